"""The server as a process: addresses, health, reflection, memory, start and stop."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import kv_cache_pb2 as pb
from tests.cache_server.harness import MIB, ROOT, TIMEOUT_S, Client, ServerProcess, batch, chain, payload_of, wait_until

BASE_BYTES = 160 * MIB  # what the process needs beside the segments: interpreter, grpc, messages in flight


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as process:
        yield process


def mapped(server: ServerProcess, **more: object) -> Client:
    client = Client(server.unix, 0, descriptors=server.socket_path, **more)  # type: ignore[arg-type]
    wait_until(client.is_mapped, "the descriptor socket is connected")
    return client


def test_health_says_serving_for_the_server_and_for_the_service(server: ServerProcess) -> None:
    """Probes and load balancers ask one or the other."""

    for target in (server.unix, server.tcp):
        with grpc.insecure_channel(target) as channel:
            for name in ("", "prefixd.v1.KvCache"):
                request = health_pb2.HealthCheckRequest(service=name)
                reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)

                assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_service(server: ServerProcess) -> None:
    """grpcurl works without the proto file."""

    with grpc.insecure_channel(server.tcp) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        replies = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([request]), timeout=TIMEOUT_S
        )
        names = {service.name for service in next(replies).list_services_response.service}

    assert "prefixd.v1.KvCache" in names


def test_blocks_saved_through_slots_are_read_by_another_client_through_slots(server: ServerProcess) -> None:
    """One memory copy on each side, exact bytes, generations unchanged."""

    keys = chain("slots", 20)
    with mapped(server) as writer, mapped(server, engine_id="other") as reader, Client(server.unix) as scheduler:
        assert writer.save(keys) == [pb.COMMIT_STATUS_STORED] * 20
        reply = scheduler.lookup(keys)
        reader.receive_segments()
        slots = np.frombuffer(reply.slots, "<u8").tolist()
        generations = np.frombuffer(reply.generations, "<u4").tolist()

        assert (reply.hit_start, reply.hit_end, reply.missing_workers) == (0, 20, 0)
        assert [reader.slot(slot) for slot in slots] == [payload_of(key, 64 << 10) for key in keys]
        assert [reader.generation(slot) for slot in slots] == generations


def test_blocks_saved_through_slots_are_read_by_a_stream_and_the_other_way_round(server: ServerProcess) -> None:
    """Two ways to the same payloads."""

    saved, put = chain("saved", 5), chain("put", 5)
    with mapped(server) as near, Client(server.tcp, 0) as far, Client(server.unix) as scheduler:
        near.save(saved)
        assert far.put(put) == [pb.COMMIT_STATUS_STORED] * 5

        assert far.get(saved) == [payload_of(key, 64 << 10) for key in saved]
        near.receive_segments()
        slots = np.frombuffer(scheduler.lookup(put).slots, "<u8").tolist()
        assert [near.slot(slot) for slot in slots] == [payload_of(key, 64 << 10) for key in put]


# --- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["slots", "stream"])
def test_ten_times_the_budget_stays_within_the_budget(tmp_path: Path, path: str) -> None:
    """C66: 640 MiB into 64; least recently used chains are gone, tails before heads, memory is bounded."""

    with ServerProcess(tmp_path, "64MiB") as server, mapped(server, payload_bytes=MIB) as client:
        base = server.memory_bytes()
        chains = [chain(str(i), 16) for i in range(40)]
        highest = 0
        for keys in chains:
            if path == "slots":
                for start in (0, 8):
                    client.save(keys[: start + 8], start)
            else:
                client.put(keys)
            highest = max(highest, server.memory_bytes())
        with Client(server.unix) as scheduler:
            hits = [scheduler.lookup(keys, lease=False).hit_end for keys in chains]
        stats = server.stats()

        assert hits == [0] * 36 + [16] * 4
        assert highest <= 64 * MIB + BASE_BYTES
        assert highest - base <= 32 * MIB
        assert stats.touched_bytes == 64 * MIB
        assert stats.stored_bytes == 64 * MIB
        assert stats.counters["evicted_blocks_capacity"] == 640 - 64
        assert client.get(chains[-1]) == [payload_of(key, MIB) for key in chains[-1]]


# --- start and stop -------------------------------------------------------------------------------------------


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cache_server", "serve", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def test_sigterm_closes_sessions_removes_the_sockets_and_exits_0(tmp_path: Path) -> None:
    """Clients are told before they notice."""

    with ServerProcess(tmp_path, "64MiB") as server, mapped(server) as client:
        server.process.send_signal(signal.SIGTERM)

        assert "shutting down" in next(client.events).closing.reason
        assert server.process.wait(TIMEOUT_S) == 0
        assert [path.name for path in tmp_path.iterdir()] == ["server.log"]
        assert "Traceback" not in server.log


def test_sigterm_lets_a_call_in_flight_finish(tmp_path: Path) -> None:
    """Within the grace time."""

    keys = chain("a", 4)
    with ServerProcess(tmp_path, "64MiB") as server, mapped(server, payload_bytes=MIB) as client:
        header = pb.PutHeader(session_id=client.id, **batch(chain("a", 1)))

        def messages() -> Iterator[object]:
            yield pb.PutChunk(header=header)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "stopping" in server.log, "the server is stopping")
            yield pb.PutChunk(data=payload_of(keys[0], MIB))

        assert list(client.stub.Put(messages(), timeout=TIMEOUT_S).statuses) == [pb.COMMIT_STATUS_STORED]
        assert server.process.wait(TIMEOUT_S) == 0


def test_a_stopped_server_does_not_wait_for_a_client_that_hangs(tmp_path: Path) -> None:
    """The grace time bounds it."""

    with ServerProcess(tmp_path, "64MiB") as server, mapped(server, payload_bytes=32 * MIB) as client:
        keys = chain("a", 1)
        client.put(keys)
        call = client.stub.Get(pb.GetRequest(session_id=client.id, keys=b"".join(keys)))
        next(call)
        began = time.monotonic()

        assert server.stop() == 0
        assert time.monotonic() - began < 6


def test_a_socket_left_by_a_killed_server_is_replaced(tmp_path: Path) -> None:
    """C68: kill -9 and start again, five times, on the same paths. A client that has the memory mapped survives."""

    epochs = set()
    keys = chain("a", 1)
    for _ in range(5):
        with ServerProcess(tmp_path, "64MiB") as server, mapped(server) as client:
            epochs.add(client.attached.server_epoch)
            [slot] = client.reserve_all(1)
            client.slot(slot)[:] = payload_of(keys[0], client.payload_bytes)
            assert server.stats().stored_bytes == 0, "nothing is left of the last one"
            server.process.kill()
            server.process.wait()
            assert client.slot(slot) == payload_of(keys[0], client.payload_bytes)
    assert server.socket_path.is_socket()
    assert len(epochs) == 5


def test_a_live_server_is_not_replaced(tmp_path: Path) -> None:
    """One line that says why, status 1, and the first one goes on."""

    with ServerProcess(tmp_path, "64MiB") as server:
        for address in (server.unix, server.tcp):
            done = run_serve("--listen", address, "--memory", "64MiB")
            assert done.returncode == 1
            assert len(done.stderr.splitlines()) == 1, done.stderr
            assert f"cannot listen on {address}" in done.stderr
        assert server.stats().memory_bytes == 64 * MIB


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    """Somebody's data may be there."""

    file = tmp_path / "p.sock"
    file.write_text("data")
    done = run_serve("--listen", f"unix://{file}", "--memory", "64MiB")

    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "not a socket" in done.stderr
    assert file.read_text() == "data"


def test_stats_on_the_command_line(server: ServerProcess) -> None:
    """For people and for programs; one line when nobody answers."""

    def stats(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cache_server", "stats", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    with mapped(server, engine_id="an engine"):
        assert "engine an engine, worker 0, mapped" in stats("--server", server.unix).stdout
        assert json.loads(stats("--server", server.tcp, "--json").stdout)["memory"]["budget_bytes"] == 256 * MIB
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        done = stats("--server", f"127.0.0.1:{unused.getsockname()[1]}")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


# --- memory that outlives a stop --------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_used_costs_one_line(tmp_path: Path, shared_memory_folder: Path) -> None:
    """Status 2 where the setting is wrong, 1 where another server has the folder; that one goes on."""

    listen = ("--listen", f"unix://{tmp_path / 'other.sock'}", "--memory", "64MiB", "--persist")
    for folder, status, word in (
        ("relative", 2, "persist: 'relative' is not allowed; an absolute path on a tmpfs"),
        ("/sys", 2, "persist: '/sys' is not allowed; it is on sysfs; it must be on a tmpfs"),
    ):
        done = run_serve(*listen, folder)
        assert (done.returncode, len(done.stderr.splitlines()), word in done.stderr) == (status, 1, True), done.stderr
    with ServerProcess(tmp_path, "64MiB", "--persist", str(shared_memory_folder)) as server:
        done = run_serve(*listen, str(shared_memory_folder))
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert f"persist: another server uses {shared_memory_folder}" in done.stderr
        assert server.stats().touched_bytes == 64 * MIB


def test_a_clean_stop_keeps_what_is_stored_and_another_memory_does_not_believe_it(
    tmp_path: Path, shared_memory_folder: Path
) -> None:
    """As a process: twice the same memory, then one whose segments have another size."""

    keys = chain("kept", 20)
    persist = ("--persist", str(shared_memory_folder))
    with ServerProcess(tmp_path, "64MiB", *persist) as server, mapped(server) as client:
        client.save(keys)
        assert server.stop() == 0
        assert "persist: 20 blocks, 1 MiB kept in" in server.log
    with ServerProcess(tmp_path, "64MiB", *persist) as server, mapped(server) as client, Client(server.unix) as asker:
        assert "persist: 20 blocks, 1 MiB taken over in" in server.log
        assert asker.lookup(keys).hit_end == 20
        assert client.get(keys) == [payload_of(key, 64 << 10) for key in keys]
        assert server.stop() == 0
    with ServerProcess(tmp_path, "4GiB", *persist) as server, mapped(server), Client(server.unix) as asker:
        assert server.log.count("persist: starting empty: the segments have 67108864 bytes") == 1
        assert asker.lookup(keys).hit_end == 0
        assert not (shared_memory_folder / "snapshot").exists()
