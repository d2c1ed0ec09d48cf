"""Real Redis servers for tests: on free loopback ports, ended by process id, or by the system when we are killed.

`redis-server` (or `valkey-server`) has to be on the PATH; PREFIXD_REDIS_SERVER names another one.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

START_S = 10.0


def executable() -> str:
    """The server to test with."""
    for name in (os.environ.get("PREFIXD_REDIS_SERVER", ""), "redis-server", "valkey-server"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise RuntimeError("no redis-server on the PATH: install it (Debian: apt-get install redis-server)")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def dying_with_us(command: Sequence[str]) -> list[str]:
    """The command, killed by the system as soon as the thread that starts it ends: also when that is a kill -9."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--", *command] if setpriv else list(command)


class RedisServer:
    """One server without persistence. It can be stopped, killed and started again on the same port."""

    def __init__(self, folder: Path, *settings: str, client: dict[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self.socket_path = folder / "redis.sock"
        self.settings = list(settings)
        self._client_settings = client or {}
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    def command(self) -> list[str]:
        return [
            executable(),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket_path)),
            *("--dir", str(self.folder), "--save", "", "--appendonly", "no", "--daemonize", "no"),
            *self.settings,
        ]

    def start(self) -> None:
        """Until it answers. It is ended when it does not."""
        assert self.process is None, "it runs already"
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(dying_with_us(self.command()), stdout=log, stderr=log, cwd=self.folder)
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(redis.RedisError, OSError), self.client() as client:
                client.ping()
                return
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """SIGSTOP: alive, connected, silent."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        """redis-py's own client, for looking and for planting."""
        settings: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, "socket_timeout": 5}
        return redis.Redis(**{**settings, **self._client_settings})

    def configure(self, name: str, value: str) -> None:
        """CONFIG SET."""
        with self.client() as client:
            client.config_set(name, value)

    def payload_keys(self) -> list[bytes]:
        """All keys but that of the probe."""
        with self.client() as client:
            return [key for key in client.scan_iter(count=1000) if not key.endswith(b":probe")]


@contextlib.contextmanager
def cluster(folder: Path, num_nodes: int = 3) -> Iterator[list[RedisServer]]:
    """Masters that share all hash slots."""
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in range(num_nodes):
            node = RedisServer(
                folder / f"node-{number}",
                *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-node-timeout", "2000"),
                *("--cluster-port", str(free_port())),
            )
            nodes.append(stack.enter_context(node))
        _join(nodes)
        yield nodes


def _join(nodes: Sequence[RedisServer]) -> None:
    clients = [node.client() for node in nodes]
    bounds = [16384 * number // len(nodes) for number in range(len(nodes) + 1)]
    for number, client in enumerate(clients):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for node in nodes[1:]:
        bus = node.settings[node.settings.index("--cluster-port") + 1]
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
    deadline = time.monotonic() + START_S
    while not all(b"cluster_state:ok" in _cluster_info(client) for client in clients):
        assert time.monotonic() < deadline, "the cluster does not form"
        time.sleep(0.05)
    for client in clients:
        client.close()


def _cluster_info(client: Any) -> bytes:
    reply = client.execute_command("CLUSTER", "INFO")
    return reply if isinstance(reply, bytes) else str(reply).replace("'", "").replace(": ", ":").encode()
