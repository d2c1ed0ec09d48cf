"""Payloads into and out of Redis: the daemon against a raw socket and against redis-py, same Redis, in turn.

    .venv/bin/python -m benchmarks.redis_path [--payloads 64] [--mib 1] [--rounds 21] [--connections 4]

    raw             one plain socket, 4 requests in flight, received into place, nothing checked: the ceiling
    raw, summed     the same, and the XXH3 checksum of each payload is made before it is sent, after it came
    daemon          what `prefixd serve` does: set from being told of committed blocks (queue, the question whether
                    Redis has them, checksums, SET with TTL) until all are stored; get from a lookup (gate, the
                    question how long they are, GET into slots, checksums, names) until all can be promised
    daemon, known   set of payloads whose checksum is known: they came by streams or from Redis
    redis-py        a pipeline of SET; MGET, and a pipeline of GET (the faster of the two counts)

Every payload has a buffer of its own on both sides: one buffer sent again and again stays in the processor's cache and
flatters. A redis-server is started for this, on a loopback port and a Unix socket, and ended by its process id.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import redis
import xxhash

from benchmarks import bench
from cache_server.arena import Arena
from cache_server.cache import Cache
from cache_server.gate import Gate
from cache_server.promotion import Promotion
from cache_server.redis_config import RedisConfig, RedisOptions, parse_redis
from cache_server.redis_tier import RedisTier
from cache_server.values import Attachment, Blocks, PayloadName, Shard
from cache_server.write_behind import WriteBehind
from tests.redis.servers import RedisServer

WINDOW = 4
NAMESPACE = bytes(32)
OF_RAW = 0.85


class RawSocket:
    """The commands packed ahead, replies received into place by hand."""

    def __init__(self, address: Any, payloads: list[memoryview]) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.connect(address)
        if family == socket.AF_INET:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._payloads = payloads
        self._targets = [memoryview(bytearray(len(payload))) for payload in payloads]
        for target in self._targets:
            target[:] = bytes(len(target))
        self._keys = [b"raw:%d" % number for number in range(len(payloads))]

    def set(self, *, is_summed: bool = False) -> None:
        sent = done = 0
        while done < len(self._payloads):
            while sent < len(self._payloads) and sent - done < WINDOW:
                key, payload = self._keys[sent], self._payloads[sent]
                if is_summed:
                    xxhash.xxh3_64_intdigest(payload)
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(payload))
                self._socket.sendall(head)
                self._socket.sendall(payload)
                self._socket.sendall(b"\r\n")
                sent += 1
            reply = b""
            while len(reply) < 5:
                reply += self._socket.recv(5 - len(reply))
            assert reply == b"+OK\r\n", reply
            done += 1

    def get(self, *, is_summed: bool = False) -> None:
        sent = 0
        for done, target in enumerate(self._targets):
            while sent < len(self._targets) and sent - done < WINDOW:
                key = self._keys[sent]
                self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
                sent += 1
            expected = b"$%d\r\n" % len(target)
            self._fill(memoryview(bytearray(len(expected))))
            self._fill(target)
            self._fill(memoryview(bytearray(2)))
            if is_summed:
                xxhash.xxh3_64_intdigest(target)
        assert self._targets[-1][:64] == self._payloads[-1][:64]

    def _fill(self, target: memoryview) -> None:
        done = 0
        while done < len(target):
            done += self._socket.recv_into(target[done:])

    def close(self) -> None:
        self._socket.close()


class Client:
    """redis-py as anybody would use it."""

    def __init__(self, client: Any, payloads: list[memoryview]) -> None:
        self._client = client
        self._payloads = payloads
        self._keys = [f"py:{number}" for number in range(len(payloads))]

    def set(self) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for key, payload in zip(self._keys, self._payloads, strict=True):
                pipeline.set(key, payload)
            pipeline.execute()

    def mget(self) -> None:
        assert len(self._client.mget(self._keys)) == len(self._keys)

    def get(self) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for key in self._keys:
                pipeline.get(key)
            pipeline.execute()


class Node:
    """Memory of a node with one engine's worker and scheduler side, and one of the ways between it and Redis."""

    def __init__(self, contents: np.ndarray) -> None:
        count, self.size = contents.shape
        self.contents = contents
        self.arena = Arena(max(4 * contents.nbytes, 512 << 20))
        while self.arena.wants_segment:
            self.arena.grow()
        self.cache = Cache(self.arena)
        shard = Shard(0, self.size, b"")
        who = ("bench", "bench", os.getpid(), NAMESPACE, "", 16, 1)
        self._worker = self.cache.attach(Attachment(*who, shard, wants_descriptors=True))
        self.scheduler = self.cache.attach(Attachment(*who, None, wants_descriptors=False))
        self.cache.sessions.redeem(self.cache.sessions.issue_ticket(self._worker))
        self.names = [PayloadName(NAMESPACE, number.to_bytes(16, "little"), 0, self.size) for number in range(count)]
        self.keys = [name.key for name in self.names]

    def fill(self) -> None:
        """Every block is here."""
        count = len(self.names)
        slots: list[int] = []
        while len(slots) < count:
            taken, _ = self.cache.reserve(self._worker.id, count - len(slots))
            slots.extend(taken.tolist())
            self.arena.grow()
        for slot, content in zip(slots, self.contents, strict=True):
            self.arena.payload(slot, self.size)[:] = content
        blocks = Blocks(self.keys, [bytes(16), *self.keys[:-1]], list(range(count)), [0] * count)
        self.cache.commit(self._worker.id, slots, blocks)

    def forget_checksums(self) -> None:
        """As for payloads that were just committed."""
        for name in self.names:
            held = self.cache.hold_named(name)
            assert held is not None
            self.cache.note_checksum(held, 0)
            self.cache.drop_payload(held)

    def check(self) -> None:
        """Every byte is right."""
        for name, content in zip(self.names, self.contents, strict=True):
            held = self.cache.hold_named(name)
            assert held is not None
            assert (held.bytes == content).all()
            self.cache.drop_payload(held)


class Daemon:
    """The write-behind queue and the promotion of a daemon, each over a memory of its own, on a loop of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, url: str, contents: np.ndarray, connections: int) -> None:
        self._loop = loop
        self._full, self._empty = Node(contents), Node(contents)
        self._full.fill()
        config = parse_redis(RedisOptions(url, connections=connections, timeout="10s"), {})
        assert config is not None
        self._clock_s = 0.0  # a walk's end is remembered for a second: every round is a minute later
        self._run(self._start(config))

    async def _start(self, config: RedisConfig) -> None:
        self._tier = RedisTier(config)
        await self._tier.start()
        await self._tier.probe()
        self._queue = WriteBehind(self._full.cache, self._tier, 4 << 30)
        self._task = asyncio.create_task(self._queue.run())
        gate, nothing = Gate(10.0), asyncio.sleep
        self._promotion = Promotion(self._empty.cache, self._tier, gate, nothing, lambda: None, self._now)

    def _now(self) -> float:
        return time.monotonic() + self._clock_s

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def set(self) -> float:
        self._full.forget_checksums()
        return self.set_known()

    def set_known(self) -> float:
        self._run(self._tier.delete(self._full.names))
        before = self._full.cache.counters.redis_saved_payloads
        started = time.perf_counter()
        self._queue.add(self._full.names)
        self._run(self._queue.drain(60))
        elapsed_s = time.perf_counter() - started
        assert self._full.cache.counters.redis_saved_payloads - before == len(self._full.names)
        return elapsed_s

    def get(self) -> float:
        self._empty.cache.flush(NAMESPACE)
        self._clock_s += 60
        elapsed_s: float = self._run(self._load_all(self._empty))
        return elapsed_s

    async def _load_all(self, node: Node) -> float:
        packed = b"".join(node.keys)
        counters = node.cache.counters
        wanted = counters.promoted_payloads + len(node.keys)
        started = time.perf_counter()
        await self._promotion.extend(node.scheduler.id, packed, 0, 0.0, 1e6)
        async with asyncio.timeout(60):
            while counters.promoted_payloads < wanted:  # noqa: ASYNC110 - nobody is told; half a millisecond is 2 %
                await asyncio.sleep(0.0005)
        elapsed_s = time.perf_counter() - started
        assert node.cache.tail(node.scheduler.id, packed, 0) is None
        await asyncio.sleep(0.01)  # the walk sees its end
        return elapsed_s

    def check(self) -> None:
        self._empty.check()

    def close(self) -> None:
        self._task.cancel()
        self._tier.close()


@contextlib.contextmanager
def redis_server(num_bytes: int) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="prefixd-bench-") as folder:
        limit = f"{max(8 * num_bytes, 1 << 30)}"
        with RedisServer(Path(folder), "--maxmemory", limit, "--maxmemory-policy", "allkeys-lru") as server:
            yield server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payloads", type=int, default=64)
    parser.add_argument("--mib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--connections", type=int, default=4)
    options = parser.parse_args()
    size = int(options.mib * (1 << 20))
    contents = np.random.default_rng(7).integers(0, 256, (options.payloads, size), dtype=np.uint8)
    payloads = [memoryview(content) for content in contents]
    total = contents.nbytes
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with redis_server(total) as server:
        paths = {
            "TCP": (server.address, f"redis://127.0.0.1:{server.port}", redis.Redis(port=server.port)),
            "Unix": (
                str(server.socket_path),
                f"unix://{server.socket_path}",
                redis.Redis(unix_socket_path=str(server.socket_path)),
            ),
        }
        for path, (address, url, client) in paths.items():
            raw, daemon = RawSocket(address, payloads), Daemon(loop, url, contents, options.connections)
            plain = Client(client, payloads)
            cases: dict[str, Callable[[], object]] = {
                "raw set": raw.set,
                "raw, summed set": lambda raw=raw: raw.set(is_summed=True),
                "daemon set": daemon.set,
                "daemon, known set": daemon.set_known,
                "redis-py set": plain.set,
                "raw get": raw.get,
                "raw, summed get": lambda raw=raw: raw.get(is_summed=True),
                "daemon get": daemon.get,
                "redis-py mget": plain.mget,
                "redis-py get": plain.get,
            }
            seconds = bench.rounds(cases, options.rounds)
            daemon.check()
            report(f"{path}, {options.payloads} x {options.mib:g} MiB, {options.rounds} rounds", seconds, total)
            raw.close()
            daemon.close()
            client.close()


def report(title: str, seconds: dict[str, list[float]], total: int) -> None:
    """Medians, and what the medians are of the raw socket's and of the faster redis-py's."""
    medians = {name: bench.median(times) for name, times in seconds.items()}
    rows = []
    for verb in ("set", "get"):
        raw = medians[f"raw {verb}"]
        other = min(value for name, value in medians.items() if name.startswith("redis-py") and name.endswith(verb))
        rows += [
            [
                name,
                f"{total / value / 1e9:.2f}",
                f"{total / min(seconds[name]) / 1e9:.2f}",
                f"{raw / value:.2f}",
                f"{other / value:.2f}",
            ]
            for name, value in medians.items()
            if name.endswith(verb)
        ]
    bench.table(title, ["", "GB/s", "best", "of raw", "of redis-py"], rows)
    for verb in ("set", "get"):
        raw = medians[f"raw {verb}"] / medians[f"daemon {verb}"]
        print(f"{verb}: daemon / raw {raw:.2f} {'ok, at least' if raw >= OF_RAW else 'BELOW'} {OF_RAW}")


if __name__ == "__main__":
    main()
