"""The wire over real grpc: exact bytes, refused messages, broken streams."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from protos import kv_cache_pb2 as pb
from tests.cache_server.harness import (
    MIB,
    NAMESPACE,
    TIMEOUT_S,
    Client,
    ServerProcess,
    batch,
    chain,
    payload_of,
    put_messages,
    wait_until,
)

KIB = 1 << 10
STORED, PRESENT = pb.COMMIT_STATUS_STORED, pb.COMMIT_STATUS_ALREADY_PRESENT
INVALID = grpc.StatusCode.INVALID_ARGUMENT
FAILED = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), "512MiB") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """A worker with 64 KiB payloads and mapped segments."""
    with Client(server.unix, 0, descriptors=server.socket_path) as client:
        wait_until(client.is_mapped, "mapped")
        yield client


def fresh(name: str) -> bytes:
    """A namespace for one test."""
    return xxhash.xxh3_128_digest(name.encode()) * 2


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code(), error.details()


# --- bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload_bytes", "num_blocks"),
    [(1, 3), (4095, 5), (MIB - 1, 2), (MIB, 5), (MIB + 1, 2), (4 * MIB, 3), (5 * MIB, 3), (64 * MIB, 1)],
)
@pytest.mark.parametrize("network", ["unix", "tcp"])
def test_payloads_come_back_as_they_went(
    server: ServerProcess, payload_bytes: int, num_blocks: int, network: str
) -> None:
    """C44: whatever grpc's default limits, up to a whole segment."""

    name = f"{payload_bytes} {network}"
    keys = chain(name, num_blocks)
    with Client(getattr(server, network), 0, payload_bytes=payload_bytes, fingerprint=fresh(name)) as client:
        assert client.put(keys) == [STORED] * num_blocks
        assert client.put(keys) == [PRESENT] * num_blocks
        assert client.get(keys) == [payload_of(key, payload_bytes) for key in keys]
        client.stub.Flush(pb.FlushRequest(fingerprint=fresh(name)), timeout=TIMEOUT_S)
        assert client.get(keys) == [None] * num_blocks


def test_a_batch_of_512_payloads_of_64_kib(client: Client) -> None:
    """Many payloads on one stream, larger together than any message."""

    keys = chain("batch", 512)

    assert client.put(keys) == [STORED] * 512
    assert client.get(keys) == [payload_of(key, 64 * KIB) for key in keys]


def test_get_says_which_payloads_are_missing(client: Client) -> None:
    """The others come all the same, in order."""

    keys = chain("some", 4)
    client.put(keys[:2])
    asked = [chain("none", 1)[0], keys[1], keys[3], keys[0]]

    assert client.get(asked) == [None, payload_of(keys[1], 64 * KIB), None, payload_of(keys[0], 64 * KIB)]


def test_the_checksum_of_a_payload_committed_without_one_is_computed(client: Client) -> None:
    """At the first Get; `get` of the harness compares it with the bytes."""

    keys = chain("unsummed", 2)
    client.save(keys)

    assert client.get(keys) == client.get(keys) == [payload_of(key, 64 * KIB) for key in keys]


def test_a_payload_that_does_not_match_its_checksum_is_refused(client: Client, server: ServerProcess) -> None:
    """C37: what arrives changed gets no name."""

    keys = chain("summed", 3)
    sums = [xxhash.xxh3_64_intdigest(payload_of(key, 64 * KIB)) for key in keys]
    sums[1] ^= 1
    before = server.stats().counters["put_checksum_mismatches"]

    assert client.put(keys, checksums=np.array(sums, "<u8").tobytes()) == [STORED, pb.COMMIT_STATUS_REFUSED, STORED]
    assert client.get(keys)[1] is None
    assert server.stats().counters["put_checksum_mismatches"] == before + 1


@pytest.mark.parametrize("rounds", [10, pytest.param(50, marks=pytest.mark.long)])
def test_sixteen_clients_put_the_same_keys_while_others_read(server: ServerProcess, rounds: int) -> None:
    """C38: stored once, everybody succeeds, every get is exact or a miss."""

    fingerprint = fresh(f"sixteen {rounds}")
    clients = [Client(server.unix, 0, fingerprint=fingerprint, engine_id=str(i)) for i in range(17)]
    statuses: list[list[int]] = []
    errors: list[BaseException] = []
    over = threading.Event()
    start = threading.Barrier(17)

    def put(client: Client) -> None:
        try:
            start.wait()
            statuses.extend(client.put(chain(f"same {i}", 8)) for i in range(rounds))
        except BaseException as error:  # noqa: BLE001 - a thread's top: reported by the test
            errors.append(error)

    def get(client: Client) -> None:
        try:
            start.wait()
            while not over.is_set():
                for i in range(rounds):
                    keys = chain(f"same {i}", 8)
                    for key, payload in zip(keys, client.get(keys), strict=True):
                        assert payload in (None, payload_of(key, 64 * KIB))
        except BaseException as error:  # noqa: BLE001 - as above
            errors.append(error)

    threads = [threading.Thread(target=put, args=(client,)) for client in clients[:16]]
    reader = threading.Thread(target=get, args=(clients[16],))
    for thread in [*threads, reader]:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    reader.join()
    for client in clients:
        client.close()

    assert errors == []
    flat = [status for each in statuses for status in each]
    assert (flat.count(STORED), flat.count(PRESENT)) == (8 * rounds, 15 * 8 * rounds)


def test_a_broken_put_leaves_no_reserved_slot(client: Client, server: ServerProcess) -> None:
    """What was complete has its name, the rest is free again."""

    keys = chain("broken", 3)
    payloads = [payload_of(key, 64 * KIB) for key in keys]
    header = pb.PutHeader(session_id=client.id, **batch(keys))
    reached, never = threading.Event(), threading.Event()

    def messages() -> Iterator[Any]:
        yield from put_messages(header, [payloads[0], payloads[1][:1000]])
        reached.set()
        never.wait(TIMEOUT_S)

    call = client.stub.Put.future(messages())
    reached.wait(TIMEOUT_S)
    wait_until(lambda: server.stats().reserved_bytes == 64 * KIB, "the second payload has begun")
    call.cancel()
    never.set()

    wait_until(lambda: server.stats().reserved_bytes == 0, "its slot is free")
    assert client.get(keys) == [payloads[0], None, None]


def test_a_cancelled_get_holds_nothing(server: ServerProcess) -> None:
    """The payload it was at can be evicted again."""

    keys = chain("cancelled", 4)
    with Client(server.unix, 0, payload_bytes=16 * MIB, fingerprint=fresh("cancelled")) as client:
        client.put(keys)
        before = server.stats().leased_bytes
        call = client.stub.Get(pb.GetRequest(session_id=client.id, keys=b"".join(keys)))
        next(call)
        assert server.stats().leased_bytes == before + 16 * MIB
        call.cancel()
        wait_until(lambda: server.stats().leased_bytes == before, "nothing is held")
        client.stub.Flush(pb.FlushRequest(fingerprint=fresh("cancelled")), timeout=TIMEOUT_S)


# --- malformed ------------------------------------------------------------------------------------------------


def test_a_message_over_the_limit_is_refused_with_size_and_limit(client: Client) -> None:
    """C44: INVALID_ARGUMENT, not a broken channel."""

    keys = bytes(5 * MIB)
    code, details = refusal(
        lambda: client.stub.Lookup(pb.LookupRequest(session_id=client.id, keys=keys), timeout=TIMEOUT_S)
    )
    assert code == INVALID
    assert "LookupRequest of 52428" in details
    assert str(4 * MIB) in details

    messages = [
        pb.PutChunk(header=pb.PutHeader(session_id=client.id, **batch(chain("x", 1)))),
        pb.PutChunk(data=bytes(5 * MIB)),
    ]
    code, details = refusal(lambda: client.stub.Put(iter(messages), timeout=TIMEOUT_S))
    assert code == INVALID
    assert "PutChunk of 52428" in details


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"slots": b"1234567"}, "slots has 7 bytes"),
        ({"keys": b"x" * 31}, "keys has 31 bytes"),
        ({"keys": b"x" * 16}, "for 1 keys"),
        ({"depths": b"1234"}, "1 depths for 2 keys"),
        ({"parent_keys": b""}, "0 parent_keys for 2 keys"),
        ({"checksums": b"12345678"}, "1 checksums for 2 keys"),
        ({"slots": bytes(16)}, "twice"),
        ({"slots": b"\xff" * 8 + bytes(8)}, "not reserved"),
    ],
)
def test_malformed_commits_change_nothing(
    client: Client, server: ServerProcess, change: dict[str, bytes], word: str
) -> None:
    """Lengths that do not fit, counts that are not equal, slots that are not the session's."""

    keys = chain(f"malformed {word}", 2)
    slots = client.reserve_all(2)
    before = server.stats()
    fields = {"slots": np.array(slots, "<u8").tobytes(), **batch(keys), **change}
    code, details = refusal(
        lambda: client.stub.Commit(pb.CommitRequest(session_id=client.id, **fields), timeout=TIMEOUT_S)
    )

    assert (code, word in details) == (INVALID, True), details
    after = server.stats()
    assert (after.stored_bytes, after.reserved_bytes) == (before.stored_bytes, before.reserved_bytes)
    assert client.commit(slots, keys) == [STORED] * 2


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        (lambda header, data: [], "no header"),
        (lambda header, data: [pb.PutChunk(data=data[0])], "no header"),
        (lambda header, data: [pb.PutChunk(header=header)], "payload 0 ended at 0 of 65536 bytes, 2 payloads"),
        (lambda header, data: put_messages(header, data[:1]), "payload 1 ended at 0"),
        (lambda header, data: put_messages(header, [data[0], data[1][:-1]]), "payload 1 ended at 65535 of 65536"),
        (
            lambda header, data: put_messages(header, [data[0] + b"x", data[1]]),
            "at least 65537 bytes, payloads of this",
        ),
        (lambda header, data: put_messages(header, [data[0][:-1], data[1]]), "payload 1 at 0, expected was payload 0"),
        (lambda header, data: put_messages(header, [*data, data[0]]), "beyond the 2 payloads"),
        (lambda header, data: [pb.PutChunk(header=header), pb.PutChunk(offset=5, data=b"x")], "payload 0 at 5"),
        (lambda header, data: [pb.PutChunk(header=header), pb.PutChunk(data=bytes(MIB + 1))], "at most 1048576"),
    ],
)
def test_malformed_puts_are_refused_and_leave_no_slot(
    client: Client,
    server: ServerProcess,
    messages: Callable[[Any, Sequence[bytes]], Any],
    word: str,
) -> None:
    """Payloads have the shard's size and come in order."""

    keys = chain(f"put {word}", 2)
    header = pb.PutHeader(session_id=client.id, **batch(keys))
    data = [payload_of(key, 64 * KIB) for key in keys]
    code, details = refusal(lambda: client.stub.Put(iter(messages(header, data)), timeout=TIMEOUT_S))

    assert (code, word in details) == (INVALID, True), details
    wait_until(lambda: server.stats().reserved_bytes == 0, "no slot is left reserved")


def test_bytes_that_are_no_message_are_refused(client: Client) -> None:
    """Every call, not with an internal error."""

    for name in ("Attach", "Lookup", "Release", "Renew", "Reserve", "Commit", "Get", "Put", "Flush"):
        path = f"/prefixd.v1.KvCache/{name}"
        if name == "Put":
            call = client.channel.stream_unary(path)
            code, _ = refusal(lambda call=call: call(iter([b"\x0a\xff"]), timeout=TIMEOUT_S))
        elif name in ("Attach", "Get"):
            stream = client.channel.unary_stream(path)
            code, _ = refusal(lambda stream=stream: list(stream(b"\x0a\xff", timeout=TIMEOUT_S)))
        else:
            unary = client.channel.unary_unary(path)
            code, _ = refusal(lambda unary=unary: unary(b"\x0a\xff", timeout=TIMEOUT_S))
        assert code == INVALID, name


def test_an_unknown_session_is_told_to_attach_again(client: Client) -> None:
    """FAILED_PRECONDITION with a message that starts with 'session'."""

    calls = [
        lambda: client.stub.Lookup(pb.LookupRequest(session_id=1), timeout=TIMEOUT_S),
        lambda: client.stub.Release(pb.ReleaseRequest(session_id=1), timeout=TIMEOUT_S),
        lambda: client.stub.Renew(pb.RenewRequest(session_id=1), timeout=TIMEOUT_S),
        lambda: client.stub.Reserve(pb.ReserveRequest(session_id=1), timeout=TIMEOUT_S),
        lambda: client.stub.Commit(pb.CommitRequest(session_id=1), timeout=TIMEOUT_S),
        lambda: list(client.stub.Get(pb.GetRequest(session_id=1), timeout=TIMEOUT_S)),
        lambda: client.stub.Put(iter([pb.PutChunk(header=pb.PutHeader(session_id=1))]), timeout=TIMEOUT_S),
    ]
    for call in calls:
        code, details = refusal(call)
        assert (code, details.startswith("session ")) == (FAILED, True)


def test_attach_refusals_name_what_differs(server: ServerProcess, client: Client) -> None:
    """Sizes and layouts in the message; a payload larger than a segment names both."""

    def attach(**more: Any) -> tuple[grpc.StatusCode, str]:
        return refusal(lambda: Client(server.unix, 0, **more))

    code, details = attach(payload_bytes=65 * MIB, fingerprint=fresh("large"))
    assert (code, str(65 * MIB) in details, str(64 * MIB) in details) == (INVALID, True, True)
    assert attach(payload_bytes=128 * KIB)[0] == FAILED
    assert attach(descriptor=b"another")[0] == FAILED
    assert attach(num_shards=2)[0] == FAILED
    request = pb.AttachRequest(protocol_version=99, role=pb.ROLE_SCHEDULER)
    code, details = refusal(lambda: list(client.stub.Attach(request, timeout=TIMEOUT_S)))
    assert (code, "99" in details) == (FAILED, True)


# --- the rest -------------------------------------------------------------------------------------------------


def test_attached_says_what_the_limits_are(client: Client) -> None:
    """A client need not know any constant of ours."""

    attached = client.attached
    assert attached.protocol_version == 1
    assert attached.server_epoch != 0
    assert len(attached.descriptor_ticket) == 16
    assert attached.limits == pb.Limits(
        max_payload_bytes=64 * MIB,
        max_message_bytes=4 * MIB,
        chunk_bytes=MIB,
        lease_ms=30_000,
        max_reserved_bytes=128 * MIB,
    )


def test_two_shards_one_missing_is_a_miss(server: ServerProcess) -> None:
    """C25 over the wire: bits, run, slots per shard."""

    keys = chain("shards", 5)
    common: dict[str, Any] = {"num_shards": 2, "fingerprint": fresh("two shards")}
    with (
        Client(server.unix, 0, **common) as first,
        Client(server.tcp, 1, **common) as second,
        Client(server.unix, **common) as scheduler,
    ):
        first.put(keys)
        second.put(keys[:2])
        second.put(keys, start=3)
        reply = scheduler.lookup(keys)

        assert (reply.present, reply.hit_start, reply.hit_end) == (bytes([0b11011]), 0, 2)
        assert (len(reply.slots), len(reply.generations)) == (2 * 2 * 8, 2 * 2 * 4)
        assert second.get(keys)[2] is None
        second.close()
        wait_until(lambda: scheduler.lookup(keys).missing_workers == 1, "the worker is missing")
        assert scheduler.lookup(keys).hit_end == 0


def test_leases_over_the_wire(client: Client, server: ServerProcess) -> None:
    """Granted, renewed, released."""

    keys = chain("leased", 3)
    client.put(keys)
    with Client(server.unix) as scheduler:
        before = server.stats().leased_bytes
        reply = scheduler.lookup(keys)
        assert (reply.hit_end, reply.lease_ms) == (3, 30_000)
        assert server.stats().leased_bytes == before + 3 * 64 * KIB
        request = pb.RenewRequest(session_id=scheduler.id, lease_ids=[reply.lease_id, 1])
        assert list(scheduler.stub.Renew(request, timeout=TIMEOUT_S).renewed) == [reply.lease_id]
        scheduler.stub.Release(
            pb.ReleaseRequest(session_id=scheduler.id, lease_ids=[reply.lease_id, 1]), timeout=TIMEOUT_S
        )
        assert server.stats().leased_bytes == before
        assert list(scheduler.stub.Renew(request, timeout=TIMEOUT_S).renewed) == []


def test_stats_tell_who_is_attached_and_what_is_stored(client: Client, server: ServerProcess) -> None:
    """The same figures that the tests above go by."""

    client.reserve_all(2)
    stats = server.stats()
    [session] = [session for session in stats.sessions if session.session_id == client.id]

    assert (session.role, session.mapped, session.reserved_bytes) == (pb.ROLE_WORKER, True, 2 * 64 * KIB)
    assert stats.memory_bytes == 512 * MIB
    assert stats.stored_bytes + stats.reserved_bytes <= stats.touched_bytes <= stats.memory_bytes
    [namespace] = [namespace for namespace in stats.namespaces if namespace.fingerprint == NAMESPACE]
    assert namespace.stored_bytes == namespace.num_complete * 64 * KIB
    assert stats.counters["lookup_asked_blocks"] == (
        stats.counters["lookup_hit_blocks"] + stats.counters["lookup_missed_blocks"]
    )
