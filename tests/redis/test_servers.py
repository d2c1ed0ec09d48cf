"""No server outlives the tests that started it."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cache_server.harness import ROOT, wait_until
from tests.redis.servers import RedisServer


def processes_in(folder: Path) -> list[int]:
    """Of all users' processes we may look at: those that work in this folder."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.readlink() == folder:
                found.append(int(link.parent.name))
    return found


def test_a_killed_test_run_takes_its_servers_along(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tests.redis.servers import RedisServer\n"
        "server = RedisServer(Path(sys.argv[1])); server.start(); print(server.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        assert processes_in(tmp_path) == [pid]

        run.kill()
    wait_until(lambda: processes_in(tmp_path) == [], "the server is gone")


def test_a_server_that_does_not_start_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.redis.servers.START_S", 0.5)
    server = RedisServer(tmp_path, "--port", "0")  # it runs, and answers nowhere
    seen: list[list[int]] = []
    ping = server.client

    def client() -> Any:
        seen.append(processes_in(tmp_path))
        return ping()

    monkeypatch.setattr(server, "client", client)
    with pytest.raises(AssertionError, match="does not answer"):
        server.start()

    assert len(seen[-1]) == 1
    assert processes_in(tmp_path) == []
