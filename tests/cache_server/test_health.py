"""`prefixd health`: what a probe learns from it, and how long that takes (C70)."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protos import kv_cache_pb2 as pb
from tests.cache_server.harness import MIB, ROOT, Client, ServerProcess, chain, wait_until

# What the manifests allow (deploy/kubernetes): a probe is given 5 s, and the second one that fails restarts the pod.
PROBE_TIMEOUT_S = 5.0


def health(address: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cache_server", "health", "--server", address, *options],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_server_is_healthy_once_it_serves_on_both_kinds_of_address(tmp_path: Path) -> None:
    """And says nothing."""

    with ServerProcess(tmp_path, "64MiB") as server:
        for address in (server.unix, server.tcp):
            done = health(address)

            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nobody_there_is_status_1_and_one_line(tmp_path: Path) -> None:
    """At once: there is nothing to wait for."""

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for address in (f"unix://{tmp_path}/none.sock", f"127.0.0.1:{unused.getsockname()[1]}"):
            done = health(address)

            assert done.returncode == 1
            assert done.stderr == f"prefixd: server: {address!r} does not answer: UNAVAILABLE\n"


def test_a_stuck_server_fails_within_the_timeout_and_is_healthy_again_when_it_goes_on(tmp_path: Path) -> None:
    """SIGSTOP: the process lives and the kernel accepts for it; only an answer proves that the loop runs."""

    with ServerProcess(tmp_path, "64MiB") as server:
        server.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        done = health(server.unix, "--timeout", "1s")
        took = time.monotonic() - began
        server.process.send_signal(signal.SIGCONT)

        assert done.returncode == 1
        assert done.stderr == f"prefixd: server: {server.unix!r} does not answer: DEADLINE_EXCEEDED\n"
        assert took < 3 * PROBE_TIMEOUT_S
        assert health(server.unix, "--timeout", "30s").returncode == 0


def test_a_full_cache_without_its_redis_is_healthy(tmp_path: Path) -> None:
    """C70: neither is a reason to restart it or to keep engines away."""

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        redis = f"redis://127.0.0.1:{unused.getsockname()[1]}"
        with (
            ServerProcess(tmp_path, "64MiB", "--redis", redis) as server,
            Client(server.unix, 0, payload_bytes=MIB, descriptors=server.socket_path) as client,
        ):
            wait_until(client.is_mapped, "the client has its segments")
            for number in range(10):
                client.save(chain(str(number), 8))
            stats = server.stats()

            assert stats.stored_bytes == 64 * MIB
            assert stats.counters["evicted_blocks_capacity"] == 16
            assert health(server.unix).returncode == 0


def test_a_server_that_drains_is_not_ready(tmp_path: Path) -> None:
    """Nobody new should come: it says so, or takes no connection any more."""

    with ServerProcess(tmp_path, "64MiB") as server, Client(server.unix, 0, payload_bytes=32 * MIB) as client:
        client.put(chain("a", 1))
        call = client.stub.Get(pb.GetRequest(session_id=client.id, keys=chain("a", 1)[0]))  # keeps it draining
        next(call)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in server.log, "the server is stopping")
        done = health(server.unix, "--timeout", "1s")

        assert done.returncode == 1
        assert "NOT_SERVING" in done.stderr or "UNAVAILABLE" in done.stderr


@pytest.mark.parametrize(
    ("options", "named"), [(["--timeout", "5"], "timeout: '5'"), (["--timeout", "0s"], "timeout: '0s'")]
)
def test_a_wrong_setting_is_status_2_and_one_line(options: list[str], named: str) -> None:
    """A probe that can never pass should be seen at once."""

    done = health("unix:///run/prefixd.sock", *options)

    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert health("nonsense").returncode == 2
