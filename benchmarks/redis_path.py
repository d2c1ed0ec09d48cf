"""Payloads into and out of Redis: the tier against a raw socket and against redis-py, same Redis, in turn.

    .venv/bin/python -m benchmarks.redis_path [--payloads 64] [--mib 1] [--rounds 9] [--connections 4]

    raw       one plain socket, 4 requests in flight, received into place, nothing checked: the ceiling
    tier      `RedisTier.save` and `load`: header, checksum made and verified, TTL, in and out of slots
    redis-py  a pipeline of SET; MGET, and a pipeline of GET (the faster of the two counts)

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

from benchmarks import bench
from cache_server.arena import Arena
from cache_server.cache import Cache
from cache_server.redis_config import RedisOptions, parse_redis
from cache_server.redis_tier import RedisTier
from cache_server.values import Attachment, Blocks, PayloadName, Shard
from tests.redis.servers import RedisServer

WINDOW = 4
NAMESPACE = bytes(32)
TIER_OF_RAW = 0.85


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

    def set(self) -> None:
        sent = done = 0
        while done < len(self._payloads):
            while sent < len(self._payloads) and sent - done < WINDOW:
                key, payload = self._keys[sent], self._payloads[sent]
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

    def get(self) -> None:
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


class Tier:
    """The product's tier over a cache of its own, on a loop of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, url: str, contents: np.ndarray, connections: int) -> None:
        self._loop = loop
        count, size = contents.shape
        arena = Arena(max(4 * contents.nbytes, 256 << 20))
        arena.grow()
        self._cache = Cache(arena)
        worker = self._cache.attach(
            Attachment("bench", "bench", os.getpid(), NAMESPACE, "", 16, 1, Shard(0, size, b""), wants_descriptors=True)
        )
        self._cache.sessions.redeem(self._cache.sessions.issue_ticket(worker))
        self._names = [PayloadName(NAMESPACE, number.to_bytes(16, "little"), 0, size) for number in range(count)]
        slots: list[int] = []
        while len(slots) < count:
            taken, _ = self._cache.reserve(worker.id, count - len(slots))
            slots.extend(taken.tolist())
            arena.grow()
        for slot, content in zip(slots, contents, strict=True):
            arena.payload(slot, size)[:] = content
        keys = [name.key for name in self._names]
        self._cache.commit(worker.id, slots, Blocks(keys, [bytes(16), *keys[:-1]], list(range(count)), [0] * count))
        self._targets = np.zeros_like(contents)
        self._contents = contents
        config = parse_redis(RedisOptions(url, connections=connections), {})
        assert config is not None
        self._tier = self._run(self._start(config))

    async def _start(self, config: Any) -> RedisTier:
        tier = RedisTier(config)
        await tier.start()
        return tier

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def set(self) -> None:
        async def save(name: PayloadName) -> None:
            held = self._cache.hold_named(name)
            assert held is not None
            held.checksum = 0  # made anew each time, as for a payload that was just committed
            status, _ = await self._tier.save(name, held)
            self._cache.drop_payload(held)
            assert status == "stored", status

        async def all_of_them() -> None:
            await asyncio.gather(*map(save, self._names))

        self._run(all_of_them())

    def get(self) -> None:
        async def all_of_them() -> None:
            loads = (self._tier.load(name, target) for name, target in zip(self._names, self._targets, strict=True))
            assert all(isinstance(result, int) for result in await asyncio.gather(*loads))

        self._run(all_of_them())

    def check(self) -> None:
        assert (self._targets == self._contents).all()

    def close(self) -> None:
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
    parser.add_argument("--rounds", type=int, default=9)
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
            raw, tier = RawSocket(address, payloads), Tier(loop, url, contents, options.connections)
            plain = Client(client, payloads)
            cases: dict[str, Callable[[], object]] = {
                "raw set": raw.set,
                "tier set": tier.set,
                "redis-py set": plain.set,
                "raw get": raw.get,
                "tier get": tier.get,
                "redis-py mget": plain.mget,
                "redis-py get": plain.get,
            }
            started = time.monotonic()
            medians = {name: bench.median(times) for name, times in bench.rounds(cases, options.rounds).items()}
            tier.check()
            report(f"{path}, {options.payloads} x {options.mib:g} MiB, {options.rounds} rounds", medians, total)
            print(f"({time.monotonic() - started:.0f} s)")
            raw.close()
            tier.close()
            client.close()


def report(title: str, medians: dict[str, float], total: int) -> None:
    rows = []
    for verb in ("set", "get"):
        raw = medians[f"raw {verb}"]
        other = min(seconds for name, seconds in medians.items() if name.startswith("redis-py") and name.endswith(verb))
        for name, seconds in medians.items():
            if name.endswith(verb):
                rate = total / seconds / 1e9
                rows.append([name, f"{rate:.2f}", f"{raw / seconds:.2f}", f"{other / seconds:.2f}"])
        ratio = raw / medians[f"tier {verb}"]
        print(f"{verb}: tier / raw {ratio:.2f} {'ok' if ratio >= TIER_OF_RAW else 'BELOW'} {TIER_OF_RAW}")
    bench.table(title, ["", "GB/s", "of raw", "of redis-py"], rows)


if __name__ == "__main__":
    main()
