"""What the benchmarks share: a server of their own, a client on it, medians, and one way to print.

Machines are shared and noisy: what is compared is measured in turn (A B A B …) in one process, and the figures are
medians. A ratio has its ceiling from the same run.
"""

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from connector.client import CacheClient, Hello

ROOT = Path(__file__).parents[1]
READY_S = 30.0


@contextlib.contextmanager
def server(memory: str) -> Iterator[tuple[str, str]]:
    """A `prefixd serve` of our own. Yields its Unix address and its TCP address."""
    with tempfile.TemporaryDirectory(prefix="prefixd-bench-") as folder:
        unix_address = f"unix://{folder}/prefixd.sock"
        tcp_address = f"127.0.0.1:{_free_port()}"
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cache_server", "serve", "--memory", memory),
                    *("--listen", unix_address, "--listen", tcp_address),
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        try:
            wait_until_serving(unix_address, process, Path(folder, "log"))
            yield unix_address, tcp_address
        finally:
            process.terminate()
            process.wait(timeout=20)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_serving(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + READY_S
    with grpc.insecure_channel(address) as channel:
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(grpc.RpcError):
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
                return
            time.sleep(0.05)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')}")


@contextlib.contextmanager
def client(
    address: str, *, payload_bytes: int = 0, shard: int | None = None, wants_checksums: bool = False
) -> Iterator[CacheClient]:
    """An attached client: the scheduler side (shard None) or a worker of one engine."""
    line = CacheClient(
        address,
        Hello(
            engine_id="bench",
            client_name="bench",
            fingerprint=b"b" * 32,
            namespace_text="bench",
            key_bytes=16,
            num_shards=1,
            shard=shard,
            payload_bytes=payload_bytes,
            descriptor=b"bench" if shard is not None else b"",
        ),
        call_timeout_s=5.0,
        transfer_timeout_s=30.0,
        wants_checksums=wants_checksums,
    )
    line.start()
    try:
        if not line.wait_attached(10):
            raise RuntimeError(f"no session at {address}")
        yield line
    finally:
        line.close()


def rounds(cases: Mapping[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Seconds of each case, measured in turn, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(count + 1):
        for name, run in cases.items():
            started = time.perf_counter()
            result = run()
            elapsed = result if isinstance(result, float) else time.perf_counter() - started
            if number:
                seconds[name].append(elapsed)
    return seconds


def median(values: list[float]) -> float:
    return statistics.median(values)


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Plain columns, the first to the left, figures to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
