"""All host memory: segments under one budget, cut into slots for the classes that share it.

A segment that a tenant has seen is never another's: whoever mapped it may keep its descriptor for ever, and what is
written there later could be read and overwritten. Where tenants have quotas, a tenant's segments stay below its own.

A *class* is (namespace, payload size): payloads of one class have one size, so a segment that belongs to a class
is cut into equal slots and never fragments. A slot is in one of three states and moves in this circle only:

    free ──reserve──▶ reserved ──name──▶ named ──evict──▶ free        (reserved ──give_back──▶ free)

Invariants:
  * the bytes of all segments, touched or being touched, never exceed the budget;
  * a slot's generation is raised when it stops being named, that is, before anyone can write into it again. A
    reader that finds the same generation before and after its copy has copied what the name stands for;
  * a segment changes its class only when none of its slots is reserved or named, and then every generation in
    it is raised.

A slot travels as u64: (segment id << 32) | number of its first granule. Segment ids start at 1: slot 0 is "none".

Not here: names, ages and leases. Which blocks have to go is decided in `cache.py`; this file only knows how many
segments a class may call its own.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from cache_server.segments import GRANULE_BYTES, Segment, segment_bytes_for

Slots = npt.NDArray[np.uint64]
_FREE, _RESERVED, _NAMED = 0, 1, 2
NO_SLOTS: Slots = np.empty(0, dtype=np.uint64)


def segments_of(slots: Slots) -> npt.NDArray[np.int64]:
    """The segment id of each slot."""
    return (slots >> np.uint64(32)).astype(np.int64)


class SlotClass:
    """Payloads of one namespace and size, and the segments that are cut for them."""

    __slots__ = ("cuts", "namespace", "next_take_at", "num_sessions", "payload_bytes", "slot_bytes", "tenant")

    def __init__(self, namespace: bytes, payload_bytes: int, tenant: str = "") -> None:
        self.namespace = namespace
        self.tenant = tenant
        self.payload_bytes = payload_bytes
        self.slot_bytes = -(-payload_bytes // GRANULE_BYTES) * GRANULE_BYTES
        self.cuts: dict[int, Cut] = {}
        self.num_sessions = 0  # kept by the cache: a class without sessions has no share to defend
        self.next_take_at = 0.0  # kept by the cache: looking for a cold segment is not cheap

    @property
    def num_free(self) -> int:
        """Slots that can be reserved at once."""
        return sum(cut.num_free for cut in self.cuts.values())

    @property
    def is_empty(self) -> bool:
        """No slot is reserved or named."""
        return all(cut.is_empty for cut in self.cuts.values())


class Cut:
    """One segment as its class uses it: equal slots and their states."""

    __slots__ = ("granules", "num_free", "num_reserved", "segment", "slot_class", "states")

    def __init__(self, segment: Segment, slot_class: SlotClass) -> None:
        self.segment = segment
        self.slot_class = slot_class
        self.granules = slot_class.slot_bytes // GRANULE_BYTES
        self.states = np.zeros(segment.num_granules // self.granules, dtype=np.uint8)
        self.num_free = len(self.states)
        self.num_reserved = 0

    @property
    def num_named(self) -> int:
        """Slots that hold a payload with a name."""
        return len(self.states) - self.num_free - self.num_reserved

    @property
    def is_empty(self) -> bool:
        """No slot is reserved or named."""
        return self.num_free == len(self.states)

    def free_runs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Starts and lengths of all runs of free slots."""
        edge = np.zeros(len(self.states) + 2, dtype=np.int8)
        edge[1:-1] = self.states == _FREE
        edges = np.flatnonzero(np.diff(edge))
        return edges[::2], edges[1::2] - edges[::2]

    def reserve(self, start: int, count: int) -> Slots:
        """Free slots [start, start + count) become reserved."""
        states = self.states[start : start + count]
        assert len(states) == count and not states.any(), f"slots {start}+{count} of {self.segment.id} are not free"
        states[:] = _RESERVED
        self.num_free -= count
        self.num_reserved += count
        granules = np.arange(start, start + count, dtype=np.uint64) * np.uint64(self.granules)
        return granules | np.uint64(self.segment.id << 32)


class Arena:
    """Owns every segment. Single-threaded; only `Segment.touch` may run elsewhere."""

    def __init__(
        self,
        budget_bytes: int,
        segment_bytes: int | None = None,
        new_segment: Callable[[int, int], Segment] = Segment,
        drop_segment: Callable[[Segment], None] = Segment.close,
    ) -> None:
        """`new_segment` makes one of an id and a number of bytes, `drop_segment` takes one that nobody has used."""
        self._new_segment = new_segment
        self._drop_segment = drop_segment
        self.budget_bytes = budget_bytes
        self.segment_bytes = segment_bytes or segment_bytes_for(budget_bytes)
        self.max_segments = budget_bytes // self.segment_bytes
        self._classes: dict[tuple[bytes, int], SlotClass] = {}
        self._cuts: dict[int, Cut] = {}
        self._spares: list[Segment] = []  # touched, without a class
        self._num_touching = 0
        self._next_segment_id = 1
        self._assigned: list[Cut] = []  # not told to the clients yet
        self._quotas: dict[str, int] = {}  # tenant → bytes; empty: there are no tenants
        self._owners: dict[int, str] = {}  # segment id → the one tenant that may see it, from its first cut on
        self._discarded: list[Segment] = []  # given up, pages not given back yet

    # --- growing: the only part that concerns threads -----------------------------------------------------

    @property
    def is_growing(self) -> bool:
        """There will be more memory without anything having to go."""
        return self._num_touching > 0 or self.num_segments < self.max_segments

    @property
    def wants_segment(self) -> bool:
        """The budget has room and no segment lies ready that anybody may have."""
        anybody = None if self._quotas else ""
        lies_ready = any(self._owners.get(spare.id, anybody) == anybody for spare in self._spares)
        return self.num_segments < self.max_segments and not lies_ready and not self._num_touching

    @property
    def has_spare(self) -> bool:
        """A touched segment waits for a class."""
        return bool(self._spares)

    @property
    def num_segments(self) -> int:
        """Segments that exist or are being touched: what counts against the budget."""
        return len(self._cuts) + len(self._spares) + self._num_touching

    def begin_segment(self) -> Segment:
        """A new segment, charged to the budget at once. Touch it, then call `finish_segment` or `abandon_segment`."""
        assert self.num_segments < self.max_segments, f"{self.num_segments} of {self.max_segments} segments"
        segment = self._new_segment(self._next_segment_id, self.segment_bytes)
        self._next_segment_id += 1
        self._num_touching += 1
        return segment

    def finish_segment(self, segment: Segment) -> None:
        """The segment is touched and may be used."""
        self._num_touching -= 1
        self._spares.append(segment)

    def abandon_segment(self, segment: Segment) -> None:
        """It could not be touched. The budget shrinks to what exists."""
        self._num_touching -= 1
        self._drop_segment(segment)
        self.stop_growing()

    def stop_growing(self) -> None:
        """The machine has no more memory: live with what there is."""
        self.max_segments = self.num_segments

    def adopt(
        self,
        segment: Segment,
        slot_class: SlotClass | None,
        named: Slots,
        held: Slots,
        owner: str | None = None,
    ) -> None:
        """A touched segment of an earlier server, cut for a class or spare. `held`: somebody may still write there.

        Whoever reads a slot that has no name here reads something that is over: those generations are raised.
        """
        assert self.num_segments < self.max_segments, f"{self.num_segments} of {self.max_segments} segments"
        self._next_segment_id = max(self._next_segment_id, segment.id + 1)
        if owner is not None:
            self._owners[segment.id] = owner
        if slot_class is None:
            assert not len(named) and not len(held), f"segment {segment.id} has slots and no class"
            self._spares.append(segment)
            return
        cut = Cut(segment, slot_class)
        self._cuts[segment.id] = slot_class.cuts[segment.id] = cut
        for slots, state in ((named, _NAMED), (held, _RESERVED)):
            numbers = (slots & np.uint64(0xFFFFFFFF)).astype(np.int64) // cut.granules
            assert not cut.states[numbers].any(), f"slots of {segment.id} were given twice"
            cut.states[numbers] = state
        cut.num_reserved = len(held)
        cut.num_free -= len(named) + len(held)
        is_unnamed = np.ones(segment.num_granules, dtype=np.bool_)
        is_unnamed[(named & np.uint64(0xFFFFFFFF)).astype(np.int64)] = False
        segment.generations[is_unnamed] += np.uint32(1)

    def grow(self) -> None:
        """Touch all that is wanted, here and now: for tests and tools."""
        while self.wants_segment:
            segment = self.begin_segment()
            segment.touch()
            self.finish_segment(segment)

    # --- tenants --------------------------------------------------------------------------------------------

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Bytes per tenant. A smaller quota than before applies to what is taken from now on."""
        self._quotas = dict(quotas)

    def budget_of(self, tenant: str) -> int:
        """How much of the memory may be this tenant's."""
        return self._quotas.get(tenant, self.budget_bytes)

    def may_grow(self, tenant: str) -> bool:
        """The tenant has fewer segments than its quota; one it may have in any case."""
        if tenant not in self._quotas:
            return True
        held = sum(owner == tenant for owner in self._owners.values())
        free = any(self._owners.get(spare.id) == tenant for spare in self._spares)
        return free or held < max(self._quotas[tenant] // self.segment_bytes, 1)

    def has_spare_for(self, tenant: str) -> bool:
        """A touched segment waits that nobody else has ever seen."""
        return any(self._is_open_to(spare, tenant) for spare in self._spares)

    def make_way(self, tenant: str) -> bool:
        """Give up a spare of another tenant, so that there can be a new one. False: there is none."""
        for spare in self._spares:
            if not self._is_open_to(spare, tenant):
                self._spares.remove(spare)
                del self._owners[spare.id]
                self._discarded.append(spare)
                return True
        return False

    def take_discarded(self) -> list[Segment]:
        """Segments whose pages have to be given back, off the event loop, before others are made in their place."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def drop_discarded(self, segment: Segment) -> None:
        """Its pages were given back."""
        self._drop_segment(segment)

    def owner_of(self, segment: Segment) -> str | None:
        """The tenant that has seen it; None: nobody has."""
        return self._owners.get(segment.id)

    def _is_open_to(self, segment: Segment, tenant: str) -> bool:
        return self._owners.get(segment.id, tenant) == tenant

    # --- classes --------------------------------------------------------------------------------------------

    def slot_class(self, namespace: bytes, payload_bytes: int, tenant: str = "") -> SlotClass:
        """The class, made at first need."""
        assert 0 < payload_bytes <= self.segment_bytes, f"payload of {payload_bytes} bytes"
        key = (namespace, payload_bytes)
        if key not in self._classes:
            self._classes[key] = SlotClass(namespace, payload_bytes, tenant)
        return self._classes[key]

    def close_class(self, slot_class: SlotClass) -> None:
        """Its segments become spares."""
        for cut in list(slot_class.cuts.values()):
            self._spares.append(self._uncut(cut))
        del self._classes[slot_class.namespace, slot_class.payload_bytes]

    def assign_spare(self, slot_class: SlotClass) -> None:
        """A spare becomes the class's; one that its tenant has seen before, if there is one."""
        usable = [spare for spare in self._spares if self._is_open_to(spare, slot_class.tenant)]
        own = [spare for spare in usable if self._owners.get(spare.id) == slot_class.tenant]
        spare = (own or usable)[-1]
        self._spares.remove(spare)
        self._cut(spare, slot_class)

    @property
    def classes(self) -> Iterable[SlotClass]:
        """All of them."""
        return self._classes.values()

    def share_segments(self, tenant: str = "") -> int:
        """How many segments every class of a tenant may hold against its others."""
        num_classes = sum(slot_class.tenant == tenant for slot_class in self._classes.values())
        return min(self.max_segments, self.budget_of(tenant) // self.segment_bytes) // max(num_classes, 1)

    def take_assigned(self) -> list[Cut]:
        """The cuts made since the last call: clients have to hear of them before they hear of their slots."""
        assigned, self._assigned = self._assigned, []
        return assigned

    # --- slots ----------------------------------------------------------------------------------------------

    def reserve(self, slot_class: SlotClass, num_slots: int) -> Slots:
        """Up to `num_slots` free slots of the class, ascending, in runs as long as possible."""
        if slot_class.num_free == 0 or num_slots == 0:
            return NO_SLOTS
        runs: list[tuple[int, Cut, int]] = []  # length, where
        for cut in slot_class.cuts.values():
            if not cut.num_free:
                continue
            starts, lengths = cut.free_runs()
            if cut.num_free >= num_slots:
                fitting = np.flatnonzero(lengths >= num_slots)
                if len(fitting):
                    best = fitting[np.argmin(lengths[fitting])]
                    return cut.reserve(int(starts[best]), num_slots)
            runs.extend(zip(lengths.tolist(), [cut] * len(starts), starts.tolist(), strict=True))
        runs.sort(key=lambda run: -run[0])
        taken: list[Slots] = []
        for length, cut, start in runs:
            taken.append(cut.reserve(start, min(length, num_slots)))
            num_slots -= len(taken[-1])
            if not num_slots:
                break
        slots = np.concatenate(taken)
        slots.sort()
        return slots

    def name(self, slot: int) -> int:
        """A reserved slot gets a name. Returns the generation that stands for it."""
        cut, number = self._locate(slot)
        assert cut.states[number] == _RESERVED, f"slot {slot:#x} is in state {cut.states[number]}"
        cut.states[number] = _NAMED
        cut.num_reserved -= 1
        return int(cut.segment.generations[slot & 0xFFFFFFFF])

    def give_back(self, slots: Slots) -> None:
        """Reserved slots become free. Nobody reads them, so their generations stay."""
        for cut, numbers in self._by_cut(slots):
            assert (cut.states[numbers] == _RESERVED).all(), f"slots of {cut.segment.id} are not reserved"
            cut.states[numbers] = _FREE
            cut.num_reserved -= len(numbers)
            cut.num_free += len(numbers)

    def evict(self, slots: Slots) -> None:
        """Named slots become free, their generations are raised."""
        for cut, numbers in self._by_cut(slots):
            assert (cut.states[numbers] == _NAMED).all(), f"slots of {cut.segment.id} have no name"
            cut.segment.generations[numbers * cut.granules] += np.uint32(1)
            cut.states[numbers] = _FREE
            cut.num_free += len(numbers)

    def recut(self, cut: Cut, slot_class: SlotClass) -> None:
        """An empty segment changes its class."""
        self._cut(self._uncut(cut), slot_class)

    def generation(self, slot: int) -> int:
        """What a client would read now."""
        return int(self._cuts[slot >> 32].segment.generations[slot & 0xFFFFFFFF]) if slot >> 32 in self._cuts else -1

    def generations(self, slot: int) -> npt.NDArray[np.uint32]:
        """The generation of a slot where it lies: one number that any thread may read, also after a recut."""
        cut, _ = self._locate(slot)
        return cut.segment.generations[slot & 0xFFFFFFFF : (slot & 0xFFFFFFFF) + 1]

    def payload(self, slot: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, not copied."""
        cut, _ = self._locate(slot)
        start = (slot & 0xFFFFFFFF) * GRANULE_BYTES
        return cut.segment.data[start : start + num_bytes]

    # --- figures --------------------------------------------------------------------------------------------

    @property
    def touched_bytes(self) -> int:
        """What exists, also while it is being touched."""
        return self.num_segments * self.segment_bytes

    @property
    def reserved_bytes(self) -> int:
        """Slots without a name that somebody writes into."""
        return sum(cut.num_reserved * cut.slot_class.slot_bytes for cut in self._cuts.values())

    @property
    def stored_bytes(self) -> int:
        """Slots with a name."""
        return sum(cut.num_named * cut.slot_class.slot_bytes for cut in self._cuts.values())

    @property
    def spares(self) -> list[Segment]:
        """Touched segments without a class."""
        return list(self._spares)

    def close(self) -> None:
        """Give up all descriptors."""
        for segment in [*self._spares, *(cut.segment for cut in self._cuts.values())]:
            segment.close()
        self._spares, self._cuts = [], {}

    # --- inside ---------------------------------------------------------------------------------------------

    def _cut(self, segment: Segment, slot_class: SlotClass) -> Cut:
        cut = Cut(segment, slot_class)
        segment.generations += np.uint32(1)
        self._owners[segment.id] = slot_class.tenant
        self._cuts[segment.id] = cut
        slot_class.cuts[segment.id] = cut
        self._assigned.append(cut)
        return cut

    def _uncut(self, cut: Cut) -> Segment:
        assert cut.is_empty, f"segment {cut.segment.id}: {cut.num_reserved} reserved, {cut.num_named} named"
        del self._cuts[cut.segment.id]
        del cut.slot_class.cuts[cut.segment.id]
        self._assigned = [assigned for assigned in self._assigned if assigned is not cut]
        return cut.segment

    def _locate(self, slot: int) -> tuple[Cut, int]:
        cut = self._cuts[slot >> 32]
        number, rest = divmod(slot & 0xFFFFFFFF, cut.granules)
        assert rest == 0 and number < len(cut.states), f"{slot:#x} is no slot"
        return cut, number

    def _by_cut(self, slots: Slots) -> Iterable[tuple[Cut, npt.NDArray[np.int64]]]:
        ids = segments_of(slots)
        for segment_id in np.unique(ids).tolist():
            cut = self._cuts[segment_id]
            granules = (slots[ids == segment_id] & np.uint64(0xFFFFFFFF)).astype(np.int64)
            yield cut, granules // cut.granules
