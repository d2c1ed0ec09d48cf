"""A lookup goes on where memory ends: what Redis has of the rest is brought up, if that pays.

    tail ──gate: can it pay at all?──▶ ask, in batches that double, until the first absence
         ──gate: do these blocks?────▶ load them into slots, in order, some at a time ──▶ each gets its name

One *walk* does this for one tail. It runs on its own, whether or not anybody waits; lookups only look at it:

  * single flight: a lookup whose tail begins with the first key of a walk, or with any key that a walk is bringing,
    looks at that walk; two walks that meet share loads;
  * a lookup waits for a walk only if it is expected to end within the lookup's budget, never longer than MAX_WAIT_S,
    and not at all while the tier leaves questions unanswered. Else it is told `retry` and when;
  * how a walk ended is remembered for REMEMBER_S under the first key it did not bring, so that asking again gets an
    answer (no `retry`) instead of another walk. That key may have come to Redis meanwhile: a late hit, never a wrong
    one.

Slots are taken as for a Put, one per load that is on its way, so promotion holds `window` slots without a name at most.
A load that was begun is awaited whatever happens, because a thread may be writing into the slot; then it gets its
name, or is given back when it failed or the namespace was flushed.

While it loads, a walk compares what it sees with what it was promised: if the rest is slower to load than to
recompute it stops (`gate_cut`).

Not here: the decision (`gate.py`), the bytes (`redis_tier.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cache_server import value_format
from cache_server.cache import Cache, Tail
from cache_server.gate import Gate
from cache_server.namespaces import Namespace
from cache_server.redis_lanes import ABSENT, CORRUPT, TierDownError
from cache_server.redis_tier import RedisTier
from cache_server.values import ALREADY_PRESENT, STORED, Blocks, GroupQuestion, PayloadName, PutSlot

MAX_WAIT_S: Final = 0.02  # a lookup is answered within this, whatever its client permits
REMEMBER_S: Final = 1.0  # longer than engines take to ask again, short against the life of a block
FIRST_BATCH: Final = 32  # blocks in the first question
MAX_BATCH: Final = 1024
ROOM_WAIT_S: Final = 2.0  # for memory that is being touched
CUT_AFTER_S: Final = 0.25  # what was seen before that says little


@dataclass(frozen=True, slots=True)
class Outlook:
    """Whether more than memory has may be promised soon, and when."""

    retry: bool
    retry_ms: int = 0


NOTHING: Final = Outlook(False)
_Place = tuple[bytes, bytes]  # namespace and key


class _Walk:
    """One tail on its way up."""

    def __init__(self, tail: Tail, recompute_us: float) -> None:
        self.namespace = tail.namespace
        self.flush_epoch = tail.namespace.flush_epoch
        self.tail = tail
        self.recompute_us = recompute_us
        self.shards = tail.namespace.shards
        self.block_bytes = sum(layout.slot_class.payload_bytes for layout in self.shards.values())
        self.bytes_left = 0  # of what was promised
        self.num_loaded_bytes = 0
        self.started_at = 0.0  # loading
        self.places: list[_Place] = []  # where it is found
        self.is_over = False
        self.has_failed = False
        self.task: asyncio.Task[None] | None = None

    def key_at(self, position: int) -> bytes | None:
        return self.tail.keys[position] if position < len(self.tail.keys) else None

    def names(self, position: int) -> list[PayloadName]:
        """The payloads of one block."""
        key = self.tail.keys[position]
        fingerprint = self.namespace.fingerprint
        return [
            PayloadName(fingerprint, key, shard, layout.slot_class.payload_bytes)
            for shard, layout in self.shards.items()
        ]


class Promotion:
    """All walks."""

    def __init__(
        self,
        cache: Cache,
        tier: RedisTier,
        gate: Gate,
        wait_for_room: Callable[[float], Awaitable[None]],
        took_room: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._tier = tier
        self._gate = gate
        self._wait_for_room = wait_for_room
        self._took_room = took_room
        self._now = now
        self._walks: set[_Walk] = set()
        self._by_key: dict[_Place, _Walk] = {}  # the first key of each, and all that it is bringing
        self._ended: dict[_Place, float] = {}  # where walks have ended, until when it is remembered; oldest first
        self._loads: dict[PayloadName, asyncio.Task[bool]] = {}
        self._window = asyncio.Semaphore(tier.window)
        self._tasks: set[asyncio.Task[None]] = set()
        self.load_us = 0  # the two sides of the last decision
        self.recompute_us = 0
        self.has_shut = False  # since the last probe

    @property
    def bytes_ahead(self) -> int:
        """What is promised and not here yet."""
        return sum(walk.bytes_left for walk in self._walks)

    async def extend(
        self,
        session_id: int,
        packed_keys: bytes,
        first: int,
        wait_s: float,
        recompute_us: float,
        group: GroupQuestion | None = None,
    ) -> Outlook:
        """Bring up what memory lacks for this lookup; returns when it should be answered. `group`: of that kind."""
        deadline = self._now() + min(wait_s, MAX_WAIT_S)
        while True:
            tail = self._cache.tail(session_id, packed_keys, first, group)
            walk = self._walk_for(tail, recompute_us) if tail else None
            if walk is None or walk.task is None:
                return NOTHING
            if not self._tier.is_prompt:
                return self._outlook(walk) if walk.started_at else NOTHING
            left_s = deadline - self._now()
            if left_s <= 0 or self._expected_s(walk) > left_s:
                return self._outlook(walk)
            await asyncio.wait([walk.task], timeout=left_s)

    def flush(self, namespace: bytes) -> None:
        """Its blocks are gone; empty: all. Walks stop, what they still receive gets no name."""
        for walk in self._walks:
            if namespace in (b"", walk.namespace.fingerprint):
                walk.has_failed = True

    async def close(self) -> None:
        """Until no thread writes into a slot any more. The tier is closed before, so this is short."""
        for walk in self._walks:
            walk.has_failed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    # --- walks ------------------------------------------------------------------------------------------------

    def _walk_for(self, tail: Tail, recompute_us: float) -> _Walk | None:
        """The walk that brings up this tail, begun now if need be. None: there is nothing to be had."""
        self._forget_old()
        place = (tail.namespace.fingerprint, tail.keys[0])
        walk = self._by_key.get(place)
        if walk is not None and walk.flush_epoch == tail.namespace.flush_epoch:
            return walk
        if walk is not None or place in self._ended or not self._tier.is_up:
            return None
        walk = self._by_key[place] = _Walk(tail, recompute_us)
        walk.places.append(place)
        self._walks.add(walk)
        task = walk.task = asyncio.create_task(self._run(walk))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return walk

    def _forget_old(self) -> None:
        now = self._now()
        while self._ended:
            place = next(iter(self._ended))
            if self._ended[place] > now:
                break
            del self._ended[place]

    async def _run(self, walk: _Walk) -> None:
        place = (walk.namespace.fingerprint, walk.tail.keys[0])
        num_loaded = 0
        try:
            num_loaded = await self._climb(walk)
        except TierDownError:
            pass
        finally:
            walk.is_over = True
            walk.bytes_left = 0
            self._walks.discard(walk)
            for known in walk.places:
                if self._by_key.get(known) is walk:
                    del self._by_key[known]
            # Also the first key: when memory gives up a block that has just come, it does not come again at once.
            for key in {walk.tail.keys[0], walk.key_at(num_loaded)}:
                if key is not None:
                    self._ended.pop((place[0], key), None)
                    self._ended[place[0], key] = self._now() + REMEMBER_S

    async def _climb(self, walk: _Walk) -> int:
        """How many blocks came."""
        counters = self._cache.counters
        num_wanted = min(len(walk.tail.keys), max(self._cache.leasable_blocks(walk.namespace), 0))
        least = self._gate.min_blocks(self._tier.estimate, walk.block_bytes, walk.recompute_us, self.bytes_ahead)
        if least is None or least > num_wanted:
            self._decide(walk, num_wanted, is_open=False)
            return 0
        num_present = await self._count_present(walk, num_wanted)
        counters.redis_present_blocks += num_present
        if not num_present or walk.has_failed:
            return 0
        least = self._gate.min_blocks(self._tier.estimate, walk.block_bytes, walk.recompute_us, self.bytes_ahead)
        is_open = least is not None and least <= num_present
        self._decide(walk, num_present, is_open=is_open)
        return await self._load(walk, num_present) if is_open else 0

    def _decide(self, walk: _Walk, num_blocks: int, *, is_open: bool) -> None:
        load_s = self._tier.estimate.load_s(self.bytes_ahead + num_blocks * walk.block_bytes)
        self.load_us = int(min(load_s, 3600.0) * 1e6)
        self.recompute_us = int(self._gate.affordable_s(num_blocks, walk.recompute_us) / self._gate.share * 1e6)
        self._cache.counters.gate_open += is_open
        self._cache.counters.gate_shut += not is_open
        self.has_shut = self.has_shut or not is_open

    # --- asking -----------------------------------------------------------------------------------------------

    async def _count_present(self, walk: _Walk, num_wanted: int) -> int:
        """How many leading blocks of the tail Redis has with all their shards."""
        start, batch = 0, FIRST_BATCH
        while start < num_wanted:
            end = min(start + batch, num_wanted)
            names = [name for position in range(start, end) for name in walk.names(position)]
            self._cache.counters.redis_asked_blocks += end - start
            lengths = await self._tier.lengths(names)
            wrong = [
                name
                for name, length in zip(names, lengths, strict=True)
                if length not in (0, value_format.value_bytes(name))
            ]
            if wrong:
                await self._delete(wrong)
            for number, (name, length) in enumerate(zip(names, lengths, strict=True)):
                if length != value_format.value_bytes(name):
                    return start + number // len(walk.shards)
            start, batch = end, min(2 * batch, MAX_BATCH)
        return start

    async def _delete(self, names: Sequence[PayloadName]) -> None:
        """They do not verify."""
        self._cache.counters.integrity_failures += len(names)
        try:
            await self._tier.delete(names)
        except TierDownError:
            return

    # --- loading ----------------------------------------------------------------------------------------------

    async def _load(self, walk: _Walk, num_blocks: int) -> int:
        """How many blocks came without a gap."""
        walk.bytes_left = num_blocks * walk.block_bytes
        walk.started_at = self._now()
        for key in walk.tail.keys[1:num_blocks]:
            place = (walk.namespace.fingerprint, key)
            if place not in self._by_key:
                self._by_key[place] = walk
                walk.places.append(place)
        blocks = _blocks_of(walk.tail, num_blocks)
        loads: list[list[asyncio.Task[bool]]] = []
        # Head first: what came before a failure can be used.
        for position in range(num_blocks):
            loads.append([])
            for name in walk.names(position):
                await self._window.acquire()
                if walk.has_failed or self._is_cut(walk):
                    self._window.release()
                    walk.has_failed = True
                    break
                loads[-1].append(self._load_once(walk, name, blocks, position))
            if walk.has_failed:
                break
        tasks = [task for block in loads for task in block]
        if tasks:
            await asyncio.wait(tasks)
        self._tier.estimate.note_transfer(walk.num_loaded_bytes, self._now() - walk.started_at)
        self._cache.operations.note("promote", self._now() - walk.started_at)
        came = [bool(block) and len(block) == len(walk.shards) and all(t.result() for t in block) for block in loads]
        num_came = came.index(False) if False in came else len(came)
        if num_came:
            names = [name for position in range(num_came) for name in walk.names(position)]
            task = asyncio.create_task(self._keep(names[::-1]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return num_came

    def _is_cut(self, walk: _Walk) -> bool:
        """What was seen so far says that the rest is recomputed faster."""
        elapsed_s = self._now() - walk.started_at
        if elapsed_s < CUT_AFTER_S:
            return False
        left_s = walk.bytes_left * elapsed_s / max(walk.num_loaded_bytes, 1)
        if left_s <= self._gate.affordable_s(-(-walk.bytes_left // walk.block_bytes), walk.recompute_us):
            return False
        self._cache.counters.gate_cut += 1
        self.has_shut = True
        return True

    def _load_once(self, walk: _Walk, name: PayloadName, blocks: Blocks, position: int) -> "asyncio.Task[bool]":
        """The load of this payload that is on its way, or a new one; it gives back its place in the window."""
        task = self._loads.get(name)
        if task is not None:
            self._window.release()
            return task
        task = self._loads[name] = asyncio.create_task(self._load_payload(walk, name, blocks, position))
        task.add_done_callback(lambda _: self._loads.pop(name))
        return task

    async def _load_payload(self, walk: _Walk, name: PayloadName, blocks: Blocks, position: int) -> bool:
        counters = self._cache.counters
        try:
            put = await self._slot(walk.namespace, name)
            if not isinstance(put, PutSlot):
                counters.promotions_dropped += put != ALREADY_PRESENT
                walk.has_failed = walk.has_failed or put != ALREADY_PRESENT
                return put == ALREADY_PRESENT
            result: int | str = ABSENT
            try:
                result = await self._tier.load(name, put.bytes)
            except TierDownError:
                counters.promotions_failed += 1
                walk.has_failed = True
                return False
            finally:
                if not isinstance(result, int):
                    self._cache.promote_abandon(walk.namespace, put)
            if not isinstance(result, int):
                walk.has_failed = True
                counters.promotions_missed += result == ABSENT
                if result == CORRUPT:
                    await self._delete([name])
                return False
            blocks.checksums[position] = result
            status = self._cache.promote_commit(walk.namespace, name.shard, put, blocks, position)
            if status == STORED:
                counters.promoted_payloads += 1
                counters.promoted_bytes += name.num_bytes
            else:
                counters.promotions_dropped += status != ALREADY_PRESENT
            walk.num_loaded_bytes += name.num_bytes
            return status in (STORED, ALREADY_PRESENT)
        finally:
            walk.bytes_left = max(walk.bytes_left - name.num_bytes, 0)
            self._window.release()

    async def _slot(self, namespace: Namespace, name: PayloadName) -> PutSlot | int:
        """Waits for memory that is being touched."""
        deadline = self._now() + ROOM_WAIT_S
        while True:
            put = self._cache.promote_slot(namespace, name.key, name.shard)
            self._took_room()
            left_s = deadline - self._now()
            if put is not None:
                return put
            if left_s <= 0:
                return 0
            await self._wait_for_room(left_s)

    async def _keep(self, names: Sequence[PayloadName]) -> None:
        """They were used: another TTL for them, tails before heads, so that no tail outlives its head by long."""
        try:
            await self._tier.refresh(names)
        except TierDownError:
            return

    # --- what to expect ---------------------------------------------------------------------------------------

    def _expected_s(self, walk: _Walk) -> float:
        """How long until it is over; of one that still asks only the asking is known."""
        estimate = self._tier.estimate
        if not walk.started_at:
            return estimate.latency_s
        return estimate.load_s(self.bytes_ahead)

    def _outlook(self, walk: _Walk) -> Outlook:
        expected_s = self._expected_s(walk)
        if not walk.started_at:
            expected_s *= 2
        return Outlook(True, max(1, min(int(expected_s * 1000) + 1, 60_000)))


def _blocks_of(tail: Tail, count: int) -> Blocks:
    """The names of the first `count` blocks of a tail. Checksums are filled in when they are known."""
    return Blocks(
        tail.keys[:count],
        [tail.parent_key, *tail.keys[: count - 1]],
        list(range(tail.depth, tail.depth + count)) if tail.is_chain else [0] * count,
        [0] * count,
    )
