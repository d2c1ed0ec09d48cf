"""Copies between the engine's pages and slots, and the slots that are free to write into.

A slot is a place for one payload. On a mapped session it is server memory, reserved for us; on a stream session it
is our own staging, and a payload travels between the two by `Put` and `Get`. Both look alike from here: an address
`(segment << 32) | granule` and a row of a tensor.

Owns the copies and the free slots. Invariants: a slot is in at most one place of {free, being filled, being sent}
(`SlotPool`); a copy of n blocks costs a few large torch calls per layer, because each call may wait up to 5 ms for
the interpreter lock; `scatter` reports success only if every generation was the promised one before and after.

Copies run on the thread that calls. `index_select(..., out=)` into contiguous runs of slots reached 0.7 of a plain
copy, into single slots 0.37; scattering contiguous block_ids by slices 0.8, by `index_copy_` 0.5.

Not here: deadlines, RPCs (`client.py`), and what is copied when (`worker.py`).
"""

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import xxhash

from connector.client import SLOT_GRANULE, U8, U32, U64, Session
from connector.kv_layout import KVLayout
from connector.plan import NO_BLOCK


class SlotMemory:
    """Rows of slots for one session: mapped segments, or staging of our own. `None` views: not to be had (yet)."""

    def __init__(self, layout: KVLayout, session: Session | None, staging: U8 | None) -> None:
        self._layout = layout
        self._session = session
        self._staging = staging
        self._tensors: dict[int, torch.Tensor] = {}
        self.granules_per_slot = -(-layout.payload_bytes // SLOT_GRANULE)
        self._words_per_slot = self.granules_per_slot * SLOT_GRANULE // layout.word_bytes

    def rows(self, first_slot: int, num_slots: int) -> torch.Tensor | None:
        """`[num_slots, payload_words]` of the slots from address `first_slot` on, one after the other."""
        segment_id, granule = first_slot >> 32, first_slot & 0xFFFFFFFF
        base = self._tensors.get(segment_id)
        if base is None:
            data = self._staging
            if data is None:
                assert self._session is not None
                segment = self._session.segment(segment_id)
                if segment is None:
                    return None
                data = segment.data
            base = torch.from_numpy(data).view(self._layout.word_dtype)
            self._tensors[segment_id] = base
        start = granule * SLOT_GRANULE // self._layout.word_bytes
        stop = start + num_slots * self._words_per_slot
        return base[start:stop].view(num_slots, self._words_per_slot)[:, : self._layout.payload_words]

    def payload(self, slot: int) -> memoryview:
        """The bytes of one slot's payload in our staging, writable."""
        assert self._staging is not None
        start = (slot & 0xFFFFFFFF) * SLOT_GRANULE
        return self._staging.data[start : start + self._layout.payload_bytes]

    def checksum(self, slot: int) -> int:
        """XXH3-64 of one slot's payload, as it lies there now; 0 where it is not mapped. Off the interpreter lock."""
        rows = self.rows(slot, 1)
        return 0 if rows is None else int(xxhash.xxh3_64_intdigest(rows[0].contiguous().numpy()))

    def generations(self, slots: U64) -> U32 | None:
        """The present generations of `slots`; None if one of their segments is not mapped."""
        assert self._session is not None
        out = np.empty(slots.size, dtype=np.uint32)
        segment_ids = slots >> np.uint64(32)
        granules = (slots & np.uint64(0xFFFFFFFF)).astype(np.int64)
        for segment_id in np.unique(segment_ids):
            segment = self._session.segment(int(segment_id))
            if segment is None:
                return None
            of_segment = segment_ids == segment_id
            out[of_segment] = segment.generations[granules[of_segment]]
        return out


class SlotPool:
    """The slots that nobody fills or sends at the moment. Thread-safe: the engine's thread takes, the saver gives."""

    def __init__(self, granules_per_slot: int) -> None:
        self._granules_per_slot = granules_per_slot
        self._free: set[int] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._free)

    def give(self, slots: Sequence[int]) -> None:
        with self._lock:
            assert self._free.isdisjoint(slots), "a slot was given back twice"
            self._free.update(slots)

    def take(self, num_slots: int) -> list[int]:
        """Up to `num_slots` slots, ascending, from the longest runs first. Fewer is an answer."""
        with self._lock:
            if num_slots == 1 and self._free:
                return [self._free.pop()]  # a decoding request fills one block at a time
            runs = sorted(contiguous_runs(sorted(self._free), self._granules_per_slot), key=len, reverse=True)
            taken: list[int] = []
            for run in runs:
                taken.extend(run[: num_slots - len(taken)])
                if len(taken) == num_slots:
                    break
            self._free.difference_update(taken)
            return sorted(taken)


def contiguous_runs(slots: Sequence[int], step: int) -> list[list[int]]:
    """`slots`, ascending, cut where one does not lie right behind the one before."""
    runs: list[list[int]] = []
    previous = None
    for slot in slots:
        if previous is None or slot != previous + step:
            runs.append([])
        runs[-1].append(slot)
        previous = slot
    return runs


class Gather:
    """Blocks of one step on their way into slots, layer by layer.

    block_ids: `layout.num_tables` per slot, those of one slot behind each other.
    Invariant: layer i of every block is copied at most once, and is in its slot when `copy_layer(i)` has returned.
    """

    def __init__(self, layout: KVLayout, memory: SlotMemory, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self._layout = layout
        self._remaining = dict.fromkeys(range(len(layout.layers)))
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []  # block ids `[num_tables, n]`, rows
        tables = torch.tensor(block_ids, dtype=torch.int64).view(-1, layout.num_tables).t().contiguous()
        start = 0
        for run in contiguous_runs(slots, memory.granules_per_slot):
            rows = memory.rows(run[0], len(run))
            if rows is None:
                raise LookupError(f"segment {run[0] >> 32} is not mapped")
            self._pieces.append((tables[:, start : start + len(run)], rows))
            start += len(run)

    def copy_layer(self, index: int) -> None:
        if index not in self._remaining:
            return
        del self._remaining[index]
        layer = self._layout.layers[index]
        for ids, rows in self._pieces:
            torch.index_select(layer.pages, 0, ids[layer.table], out=rows[:, layer.start : layer.stop])

    def copy_rest(self) -> None:
        for index in list(self._remaining):
            self.copy_layer(index)


def scatter(
    layout: KVLayout,
    memory: SlotMemory,
    block_ids: Sequence[int],
    slots: Sequence[int],
    cancelled: Callable[[], bool],
) -> bool:
    """Copies the payloads in `slots` into the pages of `block_ids`. False if cancelled or not mapped: pages undefined.

    block_ids: as for `Gather`; what belongs to NO_BLOCK is copied nowhere.
    After it has returned, nothing of this call writes into the engine's memory any more.
    """
    pieces: list[tuple[int, int, torch.Tensor]] = []  # [start, stop) of slots, rows
    start = 0
    for run in contiguous_runs(slots, memory.granules_per_slot):
        rows = memory.rows(run[0], len(run))
        if rows is None:
            return False
        pieces.append((start, start + len(run), rows))
        start += len(run)
    tables = [_Targets(block_ids[table :: layout.num_tables], pieces) for table in range(layout.num_tables)]
    for layer in layout.layers:
        if cancelled():
            return False
        for blocks, rows in tables[layer.table].plain:
            layer.pages[blocks].copy_(rows[:, layer.start : layer.stop])
        for ids, rows in tables[layer.table].indexed:
            layer.pages.index_copy_(0, ids, rows[:, layer.start : layer.stop])
    return True


class _Targets:
    """Where the rows of one table go: `plain` to consecutive blocks, `indexed` to any."""

    def __init__(self, block_ids: Sequence[int], pieces: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        self.plain: list[tuple[slice, torch.Tensor]] = []
        self.indexed: list[tuple[torch.Tensor, torch.Tensor]] = []
        for begin, end, rows in pieces:
            ids = block_ids[begin:end]
            runs = list(_block_runs(ids))
            if 4 * len(runs) <= len(ids) or len(runs) <= 1 or NO_BLOCK in ids:
                self.plain.extend((slice(first, first + n), rows[at : at + n]) for at, first, n in runs)
            else:
                self.indexed.append((torch.tensor(ids, dtype=torch.int64), rows))


def _block_runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index, first block_id, length) of the runs of consecutive block_ids; NO_BLOCK is in none."""
    at = 0
    for stop in range(1, len(block_ids) + 1):
        before = block_ids[stop - 1]
        if stop == len(block_ids) or block_ids[stop] != before + 1 or before == NO_BLOCK:
            if block_ids[at] != NO_BLOCK:
                yield at, block_ids[at], stop - at
            at = stop


def use_one_thread() -> None:
    """For transfer threads: torch's second intra-op thread beside a busy core was seen to fall to 0.3 GB/s."""
    torch.set_num_threads(1)


def new_staging(num_bytes: int) -> U8:
    """Our own slot memory for streams, page-aligned."""
    raw = np.zeros(num_bytes + SLOT_GRANULE, dtype=np.uint8)
    offset = -raw.ctypes.data % SLOT_GRANULE
    return raw[offset : offset + num_bytes]
