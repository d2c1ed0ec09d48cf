"""Many clients, far more bytes than memory, and too much at a time: memory stays bounded, the answer is an answer."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cache_server.admission import MAX_CALLS, MAX_MOVING, MAX_WAITING
from protos import kv_cache_pb2 as pb
from tests.cache_server.harness import (
    MIB,
    TIMEOUT_S,
    Client,
    ServerProcess,
    batch,
    chain,
    payload_of,
    put_messages,
    wait_until,
)

BEYOND_BUDGET = 150 * MIB
BUDGET = 64 * MIB
PAYLOAD = 256 << 10
NUM_CLIENTS = 64
PATIENT_S = 120.0  # for half a gigabyte through this process, on a busy machine


class Highest:
    """The most memory that a process had, looked at all the time."""

    def __init__(self, measure: Callable[[], int]) -> None:
        self.num_bytes = 0
        self._measure = measure
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Highest":  # noqa: PYI034 - one class, no heirs
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.01):
            self.num_bytes = max(self.num_bytes, self._measure())


def together(count: int, work: Callable[[int], None]) -> None:
    """`work(i)` in threads of its own; the first failure is the test's."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - a thread's top: raised below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def patiently(call: Callable[[], Any]) -> Any:
    """As a client is told: again after the hint, when the server has too much to do."""
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            code, hint, text = refused(error)
            if code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise AssertionError(text) from error
            time.sleep(hint / 1000)


def test_64_clients_write_twenty_times_the_budget(tmp_path: Path) -> None:
    """Half of them through slots, half through streams, and all read. Memory: budget + 150 MiB at any moment."""

    per_client = 20 * BUDGET // NUM_CLIENTS // PAYLOAD // 4
    with ServerProcess(tmp_path, "64MiB") as server, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(
                Client(
                    server.unix,
                    0,
                    payload_bytes=PAYLOAD,
                    engine_id=str(i),
                    descriptors=server.socket_path if i % 2 else None,
                )
            )
            for i in range(NUM_CLIENTS)
        ]
        for client in clients[1::2]:
            wait_until(client.is_mapped, "mapped")
        saved = [0] * NUM_CLIENTS
        read = [0] * NUM_CLIENTS

        def work(number: int) -> None:
            client = clients[number]
            for part in range(per_client):
                keys = chain(f"{number} {part}", 4)
                statuses = patiently(lambda: client.save(keys) if number % 2 else client.put(keys))  # noqa: B023
                assert set(statuses) <= {pb.COMMIT_STATUS_STORED, pb.COMMIT_STATUS_DROPPED}
                saved[number] += statuses.count(pb.COMMIT_STATUS_STORED)
                for key, payload in zip(keys, patiently(lambda: client.get(keys)), strict=True):  # noqa: B023
                    assert payload in (None, payload_of(key, PAYLOAD))
                    read[number] += payload is not None

        with Highest(server.memory_bytes) as highest:
            together(NUM_CLIENTS, work)
        stats = server.stats()

        assert highest.num_bytes <= BUDGET + BEYOND_BUDGET
        assert sum(saved) * PAYLOAD >= 0.9 * 20 * BUDGET
        assert sum(read) > sum(saved) / 4
        assert stats.touched_bytes == BUDGET
        assert stats.counters["evicted_blocks_capacity"] > 0
        assert min(saved) > 0, "somebody got nothing"
        print(f"highest {highest.num_bytes >> 20} MiB of {(BUDGET + BEYOND_BUDGET) >> 20}")


def test_512_payloads_of_1_mib_and_one_of_256(tmp_path: Path) -> None:
    """C44: a batch far larger than any message or memory in flight, and the largest payload of this memory."""

    with ServerProcess(tmp_path, "4GiB") as server:
        with Client(server.tcp, 0, payload_bytes=256 * MIB) as client:
            client.stream_timeout_s = PATIENT_S
            keys = chain("large", 1)
            with Highest(lambda: private_bytes(server)) as highest:
                assert client.put(keys) == [pb.COMMIT_STATUS_STORED]
                assert client.get(keys) == [payload_of(key, 256 * MIB) for key in keys]
            assert highest.num_bytes <= BEYOND_BUDGET
        with Client(server.tcp, 0, payload_bytes=MIB, fingerprint=b"b" * 32) as client:
            client.stream_timeout_s = PATIENT_S
            keys = chain("batch", 512)
            with Highest(lambda: private_bytes(server)) as highest:
                assert client.put(keys) == [pb.COMMIT_STATUS_STORED] * 512
                assert client.get(keys) == [payload_of(key, MIB) for key in keys]
            assert highest.num_bytes <= BEYOND_BUDGET


def private_bytes(server: ServerProcess) -> int:
    """Beside the segments."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10


# --- a limit from outside -------------------------------------------------------------------------------------


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory group of ours, of either version."""
    limits = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}
    groups = [made for root, limit in limits.items() if (made := make_group(Path(root), limit))]
    if not groups:
        pytest.skip("this user may not make a memory group here: run as root, or in a container of its own")
    yield groups[0]
    wait_until(lambda: not (groups[0] / "cgroup.procs").read_text(), "the group is empty")
    for group in groups:
        group.rmdir()


def make_group(root: Path, limit: str) -> Path | None:
    group = root / f"prefixd-test-{os.getpid()}"
    if not (root / "cgroup.procs").exists():
        return None
    try:
        group.mkdir()
        (group / limit).write_text(str(BUDGET + 300 * MIB))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        return None
    return group


@pytest.mark.parametrize(
    "seconds", [pytest.param(0, id="short"), pytest.param(600, id="ten-minutes", marks=pytest.mark.long)]
)
def test_a_container_of_the_budget_and_300_mib_is_not_killed(tmp_path: Path, memory_group: Path, seconds: int) -> None:
    """C66: 20 times the budget and more; evictions, and saving does not become slow."""

    with ServerProcess(tmp_path, "64MiB") as server, Client(server.unix, 0, payload_bytes=MIB) as client:
        (memory_group / "cgroup.procs").write_text(str(server.process.pid))
        took: list[float] = []
        until = time.monotonic() + seconds
        number = 0
        while time.monotonic() < until or number * 4 * MIB < 20 * BUDGET:
            began = time.monotonic()
            assert client.put(chain(str(number), 4)) == [pb.COMMIT_STATUS_STORED] * 4
            took.append(time.monotonic() - began)
            number += 1
        third = len(took) // 3
        early, late = sorted(took[:third]), sorted(took[-third:])

        assert server.process.poll() is None
        assert server.stats().counters["evicted_blocks_capacity"] >= 19 * BUDGET // MIB
        assert late[int(len(late) * 0.99)] <= 5 * early[int(len(early) * 0.99)] + 0.1


# --- too much at a time ---------------------------------------------------------------------------------------


def refused(error: grpc.RpcError) -> tuple[Any, int, str]:
    """Code, hint in milliseconds, and text."""
    call: Any = error
    trailing = dict(call.trailing_metadata() or ())
    return call.code(), int(trailing.get("grpc-retry-pushback-ms", -1)), call.details()


def test_streams_beyond_those_that_move_and_wait_are_refused_with_a_hint(tmp_path: Path) -> None:
    """RESOURCE_EXHAUSTED, when to come again, and it is true: afterwards there is room. Lookups never wait for them."""

    def never_ends(header: Any, over: threading.Event) -> Iterator[Any]:
        yield from put_messages(header, [b"x" * 1000])
        over.wait(TIMEOUT_S)

    with ServerProcess(tmp_path, "64MiB") as server, Client(server.tcp, 0) as client, Client(server.unix) as scheduler:
        header = pb.PutHeader(session_id=client.id, **batch(chain("x", 1)))
        over = threading.Event()
        calls = [client.stub.Put.future(never_ends(header, over)) for _ in range(MAX_MOVING + MAX_WAITING + 40)]
        wait_until(lambda: server.stats().counters.get("streams_refused", 0) >= 40, "they are refused")
        ended = [call for call in calls if call.done()]
        assert len(ended) >= 40
        for call in ended:
            code, hint, text = refused(call.exception())
            assert (code, hint) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 100)
            assert text.startswith("no room for another Put now")
        began = time.monotonic()
        assert scheduler.lookup(chain("x", 1)).hit_end == 0
        assert time.monotonic() - began < 1
        wait_until(lambda: sum(call.done() for call in calls) >= MAX_WAITING + 40, "those that waited are told, too")
        over.set()
        for call in calls:
            call.cancel()
        wait_until(lambda: server.stats().reserved_bytes == 0, "their slots are free")
        assert client.put(chain("y", 3)) == [pb.COMMIT_STATUS_STORED] * 3


def test_calls_beyond_the_limit_are_refused_before_their_message_is_read(tmp_path: Path) -> None:
    """Health is asked all the same; when they are gone there is room again."""

    with ServerProcess(tmp_path, "64MiB") as server, contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(server.tcp, options=[("grpc.use_local_subchannel_pool", 1)]))
            for _ in range(8)
        ]
        over = threading.Event()
        stack.callback(over.set)

        def silent() -> Iterator[bytes]:
            over.wait(TIMEOUT_S)
            yield b""

        # Calls whose message does not come: they are under way, and cost nothing but their number.
        calls = [
            channels[i % 8].stream_unary("/prefixd.v1.KvCache/Stats").future(silent(), timeout=TIMEOUT_S)
            for i in range(MAX_CALLS)
        ]
        stats = channels[0].unary_unary("/prefixd.v1.KvCache/Stats")

        def is_full() -> bool:
            try:
                stats(b"", timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                refusals.append(refused(error))
                return True
            return False

        refusals: list[Any] = []
        wait_until(is_full, "the server is full")
        text = f"{MAX_CALLS} calls are under way; again in 100 ms"
        assert set(refusals) == {(grpc.StatusCode.RESOURCE_EXHAUSTED, 100, text)}
        request = health_pb2.HealthCheckRequest()
        reply = health_pb2_grpc.HealthStub(channels[1]).Check(request, timeout=TIMEOUT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        for call in calls:
            call.cancel()
        wait_until(lambda: not is_full(), "there is room again")
        assert server.stats().counters["calls_refused"] > 0


def test_sessions_beyond_the_limit_are_refused_and_cost_nothing(tmp_path: Path) -> None:
    """1,024 is far above the processes of a node; each that leaves makes room for another."""

    with ServerProcess(tmp_path, "64MiB") as server, grpc.insecure_channel(server.unix) as channel:
        request = pb.AttachRequest(
            protocol_version=1,
            role=pb.ROLE_SCHEDULER,
            namespace=pb.Namespace(fingerprint=b"n" * 32, key_bytes=16, num_shards=1),
        )
        attach = channel.unary_stream(
            "/prefixd.v1.KvCache/Attach",
            request_serializer=pb.AttachRequest.SerializeToString,
            response_deserializer=pb.AttachEvent.FromString,
        )
        streams = [attach(request) for _ in range(1024)]
        for stream in streams:
            next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            next(attach(request))
        assert refused(caught.value)[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, 100)
        assert len(server.stats().sessions) == 1024
        streams.pop().cancel()
        wait_until(lambda: len(server.stats().sessions) == 1023, "one has left")
        streams.append(attach(request))
        assert next(streams[-1]).attached.session_id
        for stream in streams:
            stream.cancel()
        wait_until(lambda: len(server.stats().sessions) == 0, "all have left")
