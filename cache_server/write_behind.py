"""What memory took in, Redis gets later: a bounded queue of names, emptied as fast as Redis takes it.

    commit, put, long-used hit ──add──▶ queue ──PEXPIRE: is it there?──▶ yes: its TTL is refreshed, done
                                                                   └──▶ no: SET from its slot

The queue holds names, not bytes. A payload is held in its slot only while it is sent; one that was evicted before its
turn is counted. Above the bound the oldest names are dropped and counted. One question serves two purposes: several
daemons save the same blocks (the second finds them there), and a block that is used in memory must not expire below.

A payload that is being sent may delay a load by SEND_AHEAD_S: on a slow link one at a time is on its way, on a fast
one as many as the connections take. Loads overtake saves that no connection has taken yet.

While the tier is down the queue waits, and drops its oldest when it is full. When Redis is full it waits FULL_PAUSE_S
between two tries.

Not here: what is committed (`cache.py`), how it travels (`redis_tier.py`).
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from cache_server.cache import Cache
from cache_server.redis_lanes import CHANGED, FULL, STORED, TierDownError
from cache_server.redis_tier import RedisTier
from cache_server.values import PayloadName

BATCH: Final = 64  # names per question
SEND_AHEAD_S: Final = 0.02
FULL_PAUSE_S: Final = 1.0

_log = logging.getLogger(__name__)


class WriteBehind:
    """The queue and the one task that empties it."""

    def __init__(self, cache: Cache, tier: RedisTier, max_bytes: int) -> None:
        self._cache = cache
        self._tier = tier
        self._max_bytes = max_bytes
        self._queue: OrderedDict[PayloadName, None] = OrderedDict()
        self._wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._sending: set[asyncio.Task[None]] = set()
        self._sending_bytes = 0
        self._moved = asyncio.Event()  # something that was being sent is not any more
        self._is_full = False
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, names: Sequence[PayloadName]) -> None:
        """They wait now; a name that waits already keeps its place."""
        for name in names:
            if name not in self._queue:
                self._queue[name] = None
                self.num_bytes += name.num_bytes
        self._bound()
        if self._queue:
            self._idle.clear()
            self._wanted.set()

    def forget(self, namespace: bytes) -> None:
        """Its blocks were flushed; empty: of all namespaces."""
        for name in [name for name in self._queue if namespace in (b"", name.namespace)]:
            self._remove(name)

    async def run(self) -> None:
        """For ever."""
        while True:
            if not self._queue:
                await self._settle()
                await self._wanted.wait()
            self._wanted.clear()
            await self._tier.wait_up()
            try:
                await self._send_some()
            except TierDownError:
                continue
            if self._is_full:
                await asyncio.sleep(FULL_PAUSE_S)
                self._is_full = False

    async def drain(self, timeout_s: float) -> None:
        """Until everything is written, the tier is down, or the time is over. What is left is counted as dropped."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._idle.is_set() and self._tier.is_up:
                    waiting = [asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(asyncio.sleep(0.05))]
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in waiting:
                        task.cancel()
        except TimeoutError:
            pass
        if self._queue:
            self._cache.counters.redis_queue_dropped += len(self._queue)
            _log.warning("%d payloads (%d bytes) were not written to Redis", len(self._queue), self.num_bytes)

    async def _send_some(self) -> None:
        names = [name for name, _ in zip(self._queue, range(BATCH), strict=False)]
        present = await self._tier.refresh(names)
        for name, is_there in zip(names, present, strict=True):
            if name not in self._queue:
                continue  # pushed out, or flushed
            if is_there:
                self._cache.counters.redis_already_present += 1
                self._remove(name)
                continue
            await self._make_way(name.num_bytes)
            if self._is_full or not self._tier.is_up:
                return
            if name in self._queue:
                self._remove(name)
                self._sending_bytes += name.num_bytes
                task = asyncio.create_task(self._send(name))
                self._sending.add(task)
                task.add_done_callback(self._sent)

    async def _make_way(self, num_bytes: int) -> None:
        """Until no more is on its way than a load may be delayed by, but one payload always is."""
        while self._sending:
            ahead = self._tier.estimate.bytes_per_s * SEND_AHEAD_S
            if len(self._sending) < self._tier.window and self._sending_bytes + num_bytes <= ahead:
                return
            self._moved.clear()
            await self._moved.wait()

    async def _send(self, name: PayloadName) -> None:
        counters = self._cache.counters
        try:
            held = self._cache.hold_named(name)
            if held is None:
                counters.redis_saves_evicted += 1
                return
            try:
                with self._cache.operations.timed("redis_save"):
                    status, checksum = await self._tier.save(name, held)
                is_intact = held.is_intact
                if is_intact and not held.checksum:
                    self._cache.note_checksum(held, checksum)
            finally:
                self._cache.drop_payload(held)
            if status == STORED and is_intact:
                counters.redis_saved_payloads += 1
                counters.redis_saved_bytes += name.num_bytes
            elif status in (STORED, CHANGED):
                # Flushed while it was sent. What arrived does not verify; nobody shall have to find that out.
                counters.redis_saves_evicted += 1
                if status == STORED:
                    await self._tier.delete([name])
            else:
                counters.redis_saves_refused += 1
                self._is_full = self._is_full or status == FULL
        except TierDownError:
            # Nobody knows whether it arrived: it is asked for again, before all others.
            if name not in self._queue:
                self._queue[name] = None
                self._queue.move_to_end(name, last=False)
                self.num_bytes += name.num_bytes
                self._bound()
        finally:
            self._sending_bytes -= name.num_bytes

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._moved.set()
        self._wanted.set()

    async def _settle(self) -> None:
        """The queue is empty; wait for what is on its way, it may come back."""
        while self._sending and not self._queue:
            self._moved.clear()
            await self._moved.wait()
        if not self._queue:
            self._idle.set()

    def _remove(self, name: PayloadName) -> None:
        del self._queue[name]
        self.num_bytes -= name.num_bytes

    def _bound(self) -> None:
        while self.num_bytes > self._max_bytes:
            name, _ = self._queue.popitem(last=False)
            self.num_bytes -= name.num_bytes
            self._cache.counters.redis_queue_dropped += 1
