"""Does heavy byte work stall anybody? The server's event loop, a Python thread of the client, lookups.

    python -m benchmarks.loop [--seconds 6]

While the server touches a segment of 1 GiB, and 64 MiB arrive by stream and are fetched back again and again: the
longest gap between two turns of the server's event loop (a coroutine that wakes every millisecond), the longest
gap of a thread in the client that wakes every millisecond, and how long lookups take. A lookup over its deadline
(50 ms) is counted; there should be none. The idle line shows what this machine's own noise is.
"""

import argparse
import asyncio
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.bench import ROOT, client, median, table, wait_until_serving
from cache_server.config import parse_config
from cache_server.server import serve
from connector.client import CacheClient

PAYLOAD_BYTES = 1 << 20
NUM_PAYLOADS = 64
LOOKUP_DEADLINE_S = 0.05
MEMORY = "17GiB"  # segments of 1 GiB; only two or three of them are ever touched here


class Gaps:
    """Times between two turns of something that means to turn every millisecond."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._last = time.perf_counter()

    def turn(self) -> None:
        now = time.perf_counter()
        self.worst = max(self.worst, now - self._last)
        self._last = now

    def restart(self) -> None:
        self.worst = 0.0
        self._last = time.perf_counter()


async def serve_and_watch(address: str, folder: Path) -> None:
    """The server itself, with one more coroutine on its loop that writes its worst gap down every 50 ms."""
    gaps = Gaps()

    async def watch() -> None:
        number = 0
        while True:
            await asyncio.sleep(0.001)
            gaps.turn()
            number += 1
            if number % 50 == 0:
                (folder / "gap.new").write_text(json.dumps(gaps.worst))
                (folder / "gap.new").rename(folder / "gap")
                if (folder / "restart").exists():
                    (folder / "restart").unlink()
                    gaps.restart()

    watching = asyncio.create_task(watch())
    await serve(parse_config([address], MEMORY))
    watching.cancel()


class Client:
    """Lookups in the main thread, a thread that wakes every millisecond, and, if told, streams in another."""

    def __init__(self, asker: CacheClient, worker: CacheClient) -> None:
        self.asker = asker
        self.worker = worker
        self.gaps = Gaps()
        self._stop = threading.Event()
        self.num_streams = 0

    def run(self, seconds: float, *, with_streams: bool) -> list[float]:
        self._stop.clear()
        self.gaps.restart()
        threads = [threading.Thread(target=self._tick)]
        if with_streams:
            threads.append(threading.Thread(target=self._stream))
        for thread in threads:
            thread.start()
        latencies = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            started = time.perf_counter()
            call = self.asker.lookup(b"k" * 16 * 256, 0, lease=True)
            if call is not None:
                call.wait(5)
                latencies.append(time.perf_counter() - started)
            time.sleep(0.005)
        self._stop.set()
        for thread in threads:
            thread.join()
        return latencies

    def _tick(self) -> None:
        while not self._stop.is_set():
            time.sleep(0.001)
            self.gaps.turn()

    def _stream(self) -> None:
        session = self.worker.session()
        assert session is not None
        payloads = [memoryview(bytearray(np.random.default_rng(i).bytes(PAYLOAD_BYTES))) for i in range(NUM_PAYLOADS)]
        landing = [memoryview(bytearray(PAYLOAD_BYTES)) for _ in range(NUM_PAYLOADS)]
        none = np.zeros(NUM_PAYLOADS, dtype="<u8")
        while not self._stop.is_set():
            self.num_streams += 1
            keys = b"".join(
                hashlib.blake2b(f"{self.num_streams}/{i}".encode(), digest_size=16).digest()
                for i in range(NUM_PAYLOADS)
            )
            self.worker.put(session, payloads, keys, keys, np.zeros(NUM_PAYLOADS, dtype="<u4"), none)
            got = self.worker.get(session, keys, 0, landing)
            assert all(checksum is not None for checksum in got)
            assert landing[-1] == payloads[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--serve", nargs=2, metavar=("ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve_and_watch(args.serve[0], Path(args.serve[1])))
        return
    with tempfile.TemporaryDirectory(prefix="prefixd-bench-") as folder:
        address = f"unix://{folder}/prefixd.sock"
        command = [sys.executable, "-m", "benchmarks.loop", "--serve", address, folder]
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            wait_until_serving(address, process, Path(folder, "log"))
            rows = measure(address, Path(folder), args.seconds)
        finally:
            process.terminate()
            process.wait(timeout=20)
    table(
        "longest gaps and lookups",
        ["", "server loop ms", "client thread ms", "lookup median ms", "p99 ms", "max ms", "over 50 ms"],
        rows,
    )


def measure(address: str, folder: Path, seconds: float) -> list[list[str]]:
    rows = []
    with client(address) as asker, client(address, payload_bytes=PAYLOAD_BYTES, shard=0) as worker:
        time.sleep(4)  # the spare segment is touched
        both = Client(asker, worker)
        for title, with_streams in (("idle", False), ("1 GiB touched, 64 MiB streams", True)):
            (folder / "restart").touch()
            time.sleep(0.3)
            latencies = both.run(seconds, with_streams=with_streams)
            time.sleep(0.1)
            worst = json.loads((folder / "gap").read_text())
            rows.append(
                [
                    title,
                    f"{worst * 1e3:.1f}",
                    f"{both.gaps.worst * 1e3:.1f}",
                    f"{median(latencies) * 1e3:.2f}",
                    f"{np.percentile(latencies, 99) * 1e3:.1f}",
                    f"{max(latencies) * 1e3:.1f}",
                    f"{sum(latency > LOOKUP_DEADLINE_S for latency in latencies)} of {len(latencies)}",
                ]
            )
        print(f"{both.num_streams} times 64 MiB put and fetched back")
    return rows


if __name__ == "__main__":
    main()
