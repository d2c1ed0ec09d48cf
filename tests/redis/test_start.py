"""Starting with a Redis that is wrong, refuses us, or is not there: one line, no trace, no hang, no password."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cache_server.harness import ROOT, ServerProcess, wait_until
from tests.proxy import Proxy
from tests.redis.harness import counters
from tests.redis.servers import RedisServer, free_port


def serve(folder: Path, *options: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and everything it said."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cache_server", "serve", "--memory", "64MiB"),
            *("--listen", f"unix://{folder}/s.sock", *options),
        ],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:{port}", "scheme"),
        ("redis://", "host"),
        ("redis://127.0.0.1:{port}/x", "database is a number"),
        ("redis://127.0.0.1:{port}/999", "DB index is out of range"),
        ("redis+cluster://127.0.0.1:{port}", "single server"),
        ("redis://:secret@127.0.0.1:{port}", "Invalid Username or Password"),
        ("redis://nobody:secret@127.0.0.1:{port}", "Invalid Username or Password"),
    ],
)
def test_a_wrong_url_is_one_line_and_status_2(
    tmp_path: Path, redis_server: RedisServer, url: str, expected: str
) -> None:
    started = time.monotonic()
    status, output = serve(tmp_path, "--redis", url.format(port=redis_server.port))

    assert status == 2, output
    assert len(output.strip().splitlines()) == 1, output
    assert re.search(expected, output), output
    assert "secret" not in output
    assert time.monotonic() - started < 10


def test_a_missing_password_is_told(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", "--requirepass", "secret", client={"password": "secret"}) as redis_server:
        status, output = serve(tmp_path, "--redis", redis_server.url)
        assert status == 2
        assert "Authentication required" in output, output

        file = tmp_path / "password"
        file.write_text("secret\n")
        options = ("--redis", redis_server.url, "--redis-password-file", str(file))
        with ServerProcess(tmp_path, "64MiB", *options) as server:
            assert counters(server)["redis_up"] == 1
        variable = {"PREFIXD_REDIS_PASSWORD": "secret"}
        with ServerProcess(tmp_path, "64MiB", "--redis", redis_server.url, environment=variable) as server:
            assert counters(server)["redis_up"] == 1


def test_the_password_is_neither_in_the_log_nor_in_the_list_of_processes(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", "--requirepass", "se:cret", client={"password": "se:cret"}) as redis_server:
        url = f"redis://default:se:cret@127.0.0.1:{redis_server.port}"
        with ServerProcess(tmp_path, "64MiB", "--redis", url) as server:
            assert counters(server)["redis_up"] == 1
            arguments = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
            redis_server.kill()
            time.sleep(0.5)

            assert b"cret" not in arguments
            assert b"redis://default:" in arguments
            assert "cret" not in server.log


@pytest.mark.parametrize("kind", ["refused", "unresolvable", "no redis"])
def test_a_redis_that_is_not_there_does_not_prevent_the_start(tmp_path: Path, kind: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))  # accepts and says nothing
    url = {
        "refused": f"redis://127.0.0.1:{free_port()}",
        "unresolvable": "redis://no-such-host.invalid:6379",
        "no redis": f"redis://127.0.0.1:{listener.getsockname()[1]}",
    }[kind]
    with ServerProcess(tmp_path, "64MiB", "--redis", url, "--redis-timeout", "500ms") as server:
        assert counters(server)["redis_up"] == 0
        assert server.log.count("starting without it") == 1
        assert server.stop() == 0
    listener.close()
    assert "Traceback" not in server.log


def test_a_slow_link_is_measured_before_the_start_is_over(tmp_path: Path, redis_server: RedisServer) -> None:
    """At 2 MB/s."""
    with Proxy(redis_server.address) as proxy:
        proxy.bytes_per_s = 2e6
        with ServerProcess(tmp_path, "64MiB", "--redis", f"redis://127.0.0.1:{proxy.port}") as server:
            figures = counters(server)
            assert figures["redis_up"] == 1
            assert 0.5e6 < figures["redis_bytes_per_s"] < 3e6
            assert server.stop() == 0


def test_a_link_that_falls_silent_while_it_is_measured_does_not_prevent_the_start(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """The first answer comes, the value that is measured with never does."""
    with Proxy(redis_server.address) as proxy:
        silent = threading.Event()

        def fall_silent() -> None:
            while proxy.num_bytes[0] < 1 << 16 and not silent.wait(0.001):
                pass
            proxy.stop()

        watch = threading.Thread(target=fall_silent)
        watch.start()
        proxy.bytes_per_s = 1e6
        with ServerProcess(
            tmp_path, "64MiB", "--redis", f"redis://127.0.0.1:{proxy.port}", "--redis-timeout", "500ms"
        ) as server:
            assert proxy.num_bytes[0] >= 1 << 16
            assert counters(server)["redis_bytes_per_s"] == 0
            wait_until(lambda: counters(server)["redis_up"] == 0, "redis_up is 0", 15)
            assert server.log.count("going on without it") == 1
            assert server.stop() == 0
        silent.set()
        watch.join()


def test_it_joins_when_redis_comes_later(tmp_path: Path) -> None:
    redis_server = RedisServer(tmp_path / "redis")
    with ServerProcess(tmp_path, "64MiB", "--redis", redis_server.url) as server, redis_server:
        deadline = time.monotonic() + 10
        while not counters(server)["redis_up"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_options_without_redis_are_refused(tmp_path: Path) -> None:
    status, output = serve(tmp_path, "--redis-ttl", "1d")

    assert status == 2
    assert "needs --redis" in output
