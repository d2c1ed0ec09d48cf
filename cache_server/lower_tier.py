"""Everything below memory, put together: the tier, its gate, what goes down and what comes up.

    service ── told(names) ──▶ write behind ──▶ Redis
            ── extend(lookup) ─▶ promotion ◀── Redis          gate: what it delivers against what recomputing costs

Also here, because only the composition sees both sides: the probe at start and while the gate is shut, and the figures.

Not here: any of the work. A server without `--redis` has no object of this class, and asks nothing.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from cache_server.cache import Cache
from cache_server.gate import Gate
from cache_server.growth import Growth
from cache_server.promotion import Outlook, Promotion
from cache_server.redis_config import RedisConfig
from cache_server.redis_generations import GenerationTier
from cache_server.redis_lanes import TierDownError
from cache_server.values import GroupQuestion, PayloadName
from cache_server.write_behind import WriteBehind

PROBE_EVERY_S: Final = 10.0  # while the gate is shut or nothing was measured
_FIRST_PROBE_S: Final = 3.0  # what the start waits for it
_log = logging.getLogger(__name__)


class LowerTier:
    """Redis, as the service sees it."""

    def __init__(self, config: RedisConfig, cache: Cache, growth: Growth, gate: Gate) -> None:
        self._cache = cache
        self.tier = GenerationTier(
            config,
            cache.shard_descriptor,
            cache.generations_of_blocks,
            cache.note_generations,
            self._flushed_elsewhere,
        )
        self._write_behind = WriteBehind(cache, self.tier, config.queue_bytes)
        self._promotion = Promotion(cache, self.tier, gate, growth.wait, growth.nudge, time.monotonic)
        self._tasks: list[asyncio.Task[None]] = []
        self._meeting: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Connect and measure. TierRefusedError: the settings are wrong; a tier that is down is no error."""
        await self.tier.start()
        tasks = (self.tier.watch(), self.tier.follow(), self._write_behind.run(), self._probe_when_shut())
        self._tasks = [asyncio.create_task(task) for task in tasks]
        if self.tier.is_up:
            with suppress(TierDownError, TimeoutError):
                async with asyncio.timeout(_FIRST_PROBE_S):
                    await self.tier.probe()

    def told(self, names: Sequence[PayloadName]) -> None:
        """These got a name, or are used again."""
        if names:
            self._write_behind.add(names)

    async def extend(
        self,
        session_id: int,
        packed_keys: bytes,
        first: int,
        wait_s: float,
        recompute_us: float,
        groups: Sequence[GroupQuestion] = (),
    ) -> Outlook:
        """Bring up what memory lacks for a lookup; returns when the lookup should be answered.

        `groups` need their windows before the boundary that the first group reaches: that one goes first. A window is
        as few blocks as it is, but all of the way to the boundary is computed without it.
        """
        until = time.monotonic() + wait_s
        outlook = await self._promotion.extend(session_id, packed_keys, first, wait_s, recompute_us)
        if outlook.retry or not groups:
            return outlook
        reach = self._cache.reach(session_id, packed_keys, first)
        size = self._cache.sessions.attached(session_id).namespace.key_bytes
        for group in groups:
            start = max(first, reach - group.window) if group.window else first
            if start < reach and not outlook.retry:
                keys = packed_keys[start * size : reach * size]
                worth_us = recompute_us * (reach - first) / (reach - start)
                left_s = max(until - time.monotonic(), 0.0)
                outlook = await self._promotion.extend(session_id, keys, 0, left_s, worth_us, group)
        return outlook

    def meet(self, namespace: bytes) -> None:
        """An engine attached."""
        task = asyncio.create_task(self.tier.meet(namespace))
        self._meeting.add(task)
        task.add_done_callback(self._meeting.discard)

    async def flush(self, namespace: bytes) -> bool:
        """Nothing of the namespace (empty: of any) goes down or comes up any more; whether Redis knows it yet.

        Its memory was flushed a moment ago, without a pause in between.
        """
        self._write_behind.forget(namespace)
        self._promotion.flush(namespace)
        return await self.tier.flush(namespace)

    def _flushed_elsewhere(self, namespace: bytes) -> None:
        """Another daemon flushed it: what this one has in memory goes as well."""
        num_blocks = self._cache.flush(namespace)
        self._write_behind.forget(namespace)
        self._promotion.flush(namespace)
        self._cache.counters.flushes_followed += 1
        _log.info("namespace %s was flushed by another server: %d blocks", namespace.hex()[:12] or "*", num_blocks)

    async def drain(self, timeout_s: float) -> None:
        """Write what is queued, then stop."""
        await self._write_behind.drain(timeout_s)
        await self.close()

    async def close(self) -> None:
        """Stop now."""
        for task in self._tasks:
            task.cancel()
        self.tier.close()
        await self._promotion.close()

    async def _probe_when_shut(self) -> None:
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            if self.tier.is_up and (self._promotion.has_shut or not self.tier.estimate.bytes_per_s):
                self._promotion.has_shut = False
                with suppress(TierDownError):
                    await self.tier.probe()

    def figures(self) -> dict[str, int]:
        """Gauges, by name, for the wire."""
        estimate = self.tier.estimate
        return {
            "redis_up": int(self.tier.is_up),  # 1: it answers
            "redis_downs": self.tier.num_downs,  # how often it was lost since the start
            "redis_bytes_per_s": int(estimate.bytes_per_s),  # what loading was measured at; 0: not measured
            "redis_latency_us": int(estimate.latency_s * 1e6),  # of a question
            "redis_queue_payloads": len(self._write_behind),  # waiting to be written
            "redis_queue_bytes": self._write_behind.num_bytes,  # of those
            "redis_deleted_values": self.tier.num_deleted,  # of flushed namespaces
            "redis_loading_bytes": self._promotion.bytes_ahead,  # promised and on their way up
            "gate_load_us": self._promotion.load_us,  # the last decision: expected time to load
            "gate_recompute_us": self._promotion.recompute_us,  # the last decision: time to recompute
        }
