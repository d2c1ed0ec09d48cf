"""`Prefixd`: the cache server in a process of its own, and what tests ask it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import kv_cache_pb2, kv_cache_pb2_grpc

ROOT = Path(__file__).parents[2]
START_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prefixd:
    """Its addresses are known before it is started, so that engines can be told of it first."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        memory: str = "1GiB",
        module: str = "cache_server",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.memory = memory
        self.module = module  # what `python -m` runs
        self.environment = environment or {}
        self.options = options  # more of `prefixd serve`
        self.log = folder / "prefixd.log"
        self.unix_address = f"unix://{folder / 'prefixd.sock'}"
        self.port_address = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Starts it and waits until it says SERVING."""
        assert not self.is_running
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", self.module, "serve", "--memory", self.memory),
                    *("--listen", self.unix_address, "--listen", self.port_address),
                    *self.options,
                ],
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._ask_for_processor_time()
        deadline = time.monotonic() + START_S
        while not self._is_serving():
            if not self.is_running or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"prefixd did not start; {self.log}:\n{self.log.read_text(errors='replace')}")
            time.sleep(0.05)
        return self

    def _ask_for_processor_time(self) -> None:
        """Where we may: the threads of an engine on the CPU keep every core busy, and give each up (`sched_yield`)
        thousands of times a second. Linux 6.18 was seen to leave a server of another session, ready to run, without a
        core for three seconds beside them."""
        assert self._process is not None
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._process.pid}/autogroup").write_text("-10")

    def attached(self, num_sessions: int) -> bool:
        """Whether that many clients are attached: one per worker, one for the scheduler side."""
        return len(self.stats().sessions) >= num_sessions

    def _is_serving(self) -> bool:
        with grpc.insecure_channel(self.unix_address) as channel, contextlib.suppress(grpc.RpcError):
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
        return False

    def stats(self) -> kv_cache_pb2.StatsReply:
        with grpc.insecure_channel(self.unix_address) as channel:
            return kv_cache_pb2_grpc.KvCacheStub(channel).Stats(kv_cache_pb2.StatsRequest(), timeout=10)

    def num_blocks(self) -> int:
        """Blocks that are here with all their shards, of all namespaces."""
        return sum(namespace.num_complete for namespace in self.stats().namespaces)

    def stop(self, timeout_s: float = 20) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
