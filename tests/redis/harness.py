"""What the tests of the Redis tier share: an engine (worker and scheduler side) on a server process, the tier alone in
this process, and what a value in Redis is called.
"""

import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_server.redis_config import RedisConfig, RedisOptions, parse_redis
from cache_server.redis_tier import RedisTier
from cache_server.values import PayloadName
from tests.cache_server.harness import NAMESPACE, Client, ServerProcess, payload_of, wait_until

PAYLOAD = 64 << 10
RECOMPUTE_US = 160_000.0  # of a block of 32 tokens, 5 ms each: the demo model on a CPU
WAIT_MS = 20


# What NAMESPACE is called in Redis as long as nobody flushed it: docs/formats.md, by hand.
STORED_NAMESPACE = NAMESPACE + bytes(16) + hashlib.sha256(b"layout").digest()[:8]


def redis_key(key: bytes, shard: int = 0, namespace: bytes = STORED_NAMESPACE, prefix: str = "prefixd") -> bytes:
    """As docs/formats.md says, by hand."""
    return f"{prefix}:{namespace.hex()}:{key.hex()}:{shard}".encode()


def name_of(key: bytes, num_bytes: int = PAYLOAD, shard: int = 0) -> PayloadName:
    """As Redis knows it."""
    return PayloadName(STORED_NAMESPACE, key, shard, num_bytes)


@dataclass
class Engine:
    """One engine of one shard."""

    worker: Client
    scheduler: Client

    def ask(self, keys: Sequence[bytes], *, recompute_us: float = RECOMPUTE_US, timeout_s: float = 10.0) -> Any:
        """As the connector does: while the reply says `retry`, after the time it names."""
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self.scheduler.lookup(keys, wait_ms=WAIT_MS, recompute_us_per_block=recompute_us)
            if not reply.retry:
                return reply
            self.scheduler.stub.Release(_release(self.scheduler.id, reply.lease_id))
            assert time.monotonic() < deadline, "retry for ever"
            time.sleep(min(reply.retry_ms, 50) / 1000)

    def num_hit(self, keys: Sequence[bytes], **more: Any) -> int:
        """Blocks that were promised, all of them right."""
        end = int(self.ask(keys, **more).hit_end)
        assert_right(self.worker, keys[:end])
        return end


def _release(session_id: int, lease_id: int) -> Any:
    from protos import kv_cache_pb2 as pb

    return pb.ReleaseRequest(session_id=session_id, lease_ids=[lease_id] if lease_id else [])


def assert_right(worker: Client, keys: Sequence[bytes]) -> None:
    """Every payload is the only right one for its key."""
    for key, payload in zip(keys, worker.get(keys), strict=True):
        assert payload == payload_of(key, worker.payload_bytes), f"wrong bytes for {key.hex()}"


@contextlib.contextmanager
def engine(server: ServerProcess, *, payload_bytes: int = PAYLOAD, is_mapped: bool = True) -> Iterator[Engine]:
    """Attached, its segments mapped unless it streams."""
    target = server.unix if is_mapped else server.tcp
    descriptors = server.socket_path if is_mapped else None
    with (
        Client(target, 0, payload_bytes=payload_bytes, descriptors=descriptors) as worker,
        Client(target) as scheduler,
    ):
        if is_mapped:
            wait_until(worker.is_mapped, "the worker has its segments")
        yield Engine(worker, scheduler)


def counters(server: ServerProcess) -> dict[str, int]:
    return dict(server.stats().counters)


def wait_counter(server: ServerProcess, name: str, at_least: int, timeout_s: float = 10.0) -> None:
    wait_until(lambda: counters(server)[name] >= at_least, f"{name} >= {at_least}: {counters(server)}", timeout_s)


def parsed(url: str, **options: Any) -> RedisConfig:
    config = parse_redis(RedisOptions(url, **options), {})
    assert config is not None
    return config


@contextlib.asynccontextmanager
async def tier(url: str, **options: Any) -> AsyncIterator[RedisTier]:
    """The tier alone, on the running loop."""
    alone = RedisTier(parsed(url, **options))
    try:
        await alone.start()
        yield alone
    finally:
        alone.close()


def timed(function: Callable[[], Any]) -> float:
    started = time.monotonic()
    function()
    return time.monotonic() - started


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def folder_of(path: Path, name: str) -> Path:
    folder = path / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
