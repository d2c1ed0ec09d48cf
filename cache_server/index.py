"""Names: key → row of one namespace, and what is known of each block as columns of numpy arrays.

A block is *present* as soon as one shard of it is here, *complete* with all shards, and *reachable* when it is
complete and so are all blocks before it. A lookup counts complete blocks only.

Invariants:
  * row 0 is "no block": never complete, its own parent. So absent keys need no special case in numpy;
  * num_children[row] == number of present blocks whose parent is row. A block goes only when it is zero, or together
    with all blocks that extend it. So a reachable block stays reachable until it goes;
  * a child is one deeper than its parent, else it is not linked: whatever clients claim, there is no cycle;
  * a block that is not reachable waits under its parent's key and is linked when the parent comes.

Ages (`last_use`) are ordinal numbers handed in by the cache, larger is younger; the head of a chain is younger than
its tail. Why columns: a lookup of 8,192 keys reads and writes four of them in microseconds, and a block costs
about 170 bytes instead of 300. Rows of a chain are neighbours most of the time; `find` uses that and compares whole
runs of keys at once.

Not here: memory. Slots are numbers; who removes a block gives its slots back to the arena.
"""

from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from cache_server.arena import Slots, segments_of
from cache_server.eviction import EvictionQueue

Rows = npt.NDArray[np.int64]
_FIRST_CAPACITY = 1024
_SHORT_RUN = 16  # neighbours fewer than this: asking the dict for each key is faster


@dataclass(frozen=True, slots=True)
class Evicted:
    """What went: its slots, how many blocks, and how many of those because they were doomed."""

    slots: Slots
    num_blocks: int
    num_doomed: int


@dataclass(frozen=True, slots=True)
class Columns:
    """All blocks of an index, column by column: what a snapshot keeps. n blocks, one element each."""

    keys: npt.NDArray[np.uint64]  # [n][key_bytes / 8]
    parents: npt.NDArray[np.uint32]  # 1 + position of the parent among these blocks, 0: it is not here
    depths: npt.NDArray[np.uint32]
    uses: npt.NDArray[np.int64]
    slots: Slots  # [n][num_shards]
    generations: npt.NDArray[np.uint32]  # the same shape
    checksums: npt.NDArray[np.uint64]  # the same shape
    orphans: npt.NDArray[np.uint32]  # positions of blocks that are not first and whose parent is not here
    orphan_parents: npt.NDArray[np.uint64]  # the keys of their parents

    def __len__(self) -> int:
        return len(self.keys)


class Index:
    """The blocks of one namespace."""

    def __init__(self, key_bytes: int, num_shards: int) -> None:
        assert key_bytes in (16, 32), f"keys of {key_bytes} bytes"
        self.key_bytes = key_bytes
        self.num_shards = num_shards
        self.queue = EvictionQueue()
        self.num_complete = 0
        self.num_leased = 0
        self._rows: dict[bytes, int] = {}
        self._free_rows: list[int] = []
        self._next_row = 1
        self._waiting: dict[bytes, set[int]] = {}  # parent key → blocks that cannot be reached without it
        self._awaits: dict[int, bytes] = {}  # the same, the other way round
        self._keys = np.zeros((0, key_bytes // 8), dtype=np.uint64)
        self._live = np.zeros(0, dtype=np.bool_)
        self.parent = np.zeros(0, dtype=np.int32)
        self.depth = np.zeros(0, dtype=np.int64)
        self.num_children = np.zeros(0, dtype=np.int32)
        self.num_leases = np.zeros(0, dtype=np.int32)
        self.last_use = np.zeros(0, dtype=np.int64)
        self.told_at = np.zeros(0, dtype=np.float64)  # seconds: when the tier below was last told of the block
        self.num_present = np.zeros(0, dtype=np.int32)
        self.complete = np.zeros(0, dtype=np.bool_)
        self.reachable = np.zeros(0, dtype=np.bool_)
        self.slots = np.zeros((0, num_shards), dtype=np.uint64)
        self.generations = np.zeros((0, num_shards), dtype=np.uint32)
        self.checksums = np.zeros((0, num_shards), dtype=np.uint64)
        self._resize(_FIRST_CAPACITY)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, key: bytes) -> int:
        """The row of a key, 0 when absent."""
        return self._rows.get(key, 0)

    def key(self, row: int) -> bytes:
        """The key of a present block."""
        key: bytes = self._keys[row].tobytes()
        return key

    # --- lookup ---------------------------------------------------------------------------------------------

    def find(self, packed_keys: bytes) -> Rows:
        """The row of each key, 0 where absent."""
        size = self.key_bytes
        asked = np.frombuffer(packed_keys, dtype=np.uint64).reshape(-1, size // 8)
        rows = np.zeros(len(asked), dtype=np.int64)
        position = 0
        while position < len(asked):
            row = self._rows.get(packed_keys[position * size : (position + 1) * size], 0)
            run = self._run_length(row, asked[position:]) if row else 0
            rows[position : position + run] = np.arange(row, row + run)
            position += run
            if run < _SHORT_RUN:
                rest = np.frombuffer(packed_keys[position * size :], dtype=f"V{size}").tolist()
                rows[position:] = np.fromiter(map(self._rows.get, rest, repeat(0)), np.int64, len(rest))
                break
        return rows

    def _run_length(self, row: int, asked: npt.NDArray[np.uint64]) -> int:
        """How many of the asked keys lie in row, row + 1, …; in windows that double, so that a miss costs little."""
        end = min(len(asked), self._next_row - row)
        done, window = 0, _SHORT_RUN
        while done < end:
            stop = min(done + window, end)
            same = (self._keys[row + done : row + stop] == asked[done:stop]).all(axis=1)
            same &= self._live[row + done : row + stop]
            if not same.all():
                return done + int(same.argmin())
            done, window = stop, window * 2
        return done

    def touch(self, rows: Rows, youngest: int) -> None:
        """The blocks are used now, the first one last to go. Row 0 may be among them."""
        self.last_use[rows] = youngest - np.arange(len(rows))

    # --- leases ---------------------------------------------------------------------------------------------

    def hold(self, rows: Rows) -> None:
        """Present blocks, each once, cannot go until `drop`."""
        self.num_leased += int(np.count_nonzero(self.num_leases[rows] == 0))
        self.num_leases[rows] += 1

    def drop(self, rows: Rows) -> None:
        """Undo one `hold`."""
        self.num_leases[rows] -= 1
        idle = rows[self.num_leases[rows] == 0]
        assert (self.num_leases[rows] >= 0).all(), "a lease was dropped twice"
        self.num_leased -= len(idle)
        for row in idle[self.num_children[idle] == 0].tolist():
            self.queue.push(row, int(self.last_use[row]))

    # --- blocks come ----------------------------------------------------------------------------------------

    def has(self, key: bytes, shard: int) -> bool:
        """This shard of the block is here."""
        row = self._rows.get(key, 0)
        return row != 0 and self.slots[row, shard] != 0

    def add(
        self,
        key: bytes,
        parent_key: bytes | None,
        depth: int,
        shard: int,
        slot: int,
        generation: int,
        checksum: int,
        age: int,
        now: float,
    ) -> None:
        """One shard of a block comes; it must not be here already. `parent_key` is None for the first of a chain."""
        row = self._rows.get(key, 0) or self._insert(key, parent_key, depth, age, now)
        assert self.slots[row, shard] == 0, f"shard {shard} of row {row} is here already"
        self.slots[row, shard] = slot
        self.generations[row, shard] = generation
        self.checksums[row, shard] = checksum
        self.last_use[row] = age
        self.num_present[row] += 1
        if self.num_present[row] == self.num_shards:
            self.complete[row] = True
            self.num_complete += 1
            self._settle(row)

    def _insert(self, key: bytes, parent_key: bytes | None, depth: int, age: int, now: float) -> int:
        row = self._new_row()
        self._rows[key] = row
        self._keys[row] = np.frombuffer(key, dtype=np.uint64)
        self._live[row] = True
        self.depth[row] = depth
        self.last_use[row] = age
        if parent_key is not None:
            parent = self._rows.get(parent_key, 0)
            if parent and self.depth[parent] + 1 == depth:
                self.parent[row] = parent
                self.num_children[parent] += 1
            if not (parent and self.reachable[parent]):
                self._waiting.setdefault(parent_key, set()).add(row)
                self._awaits[row] = parent_key
        for child in self._waiting.get(key, ()):
            if self.depth[child] == depth + 1 and not self.parent[child]:
                self.parent[child] = row
                self.num_children[row] += 1
        self.queue.unsettle(row, now)
        if not self.num_children[row]:
            self.queue.push(row, age)
        return row

    def _settle(self, row: int) -> None:
        """A complete block may have become reachable, and with it those that waited for it."""
        rows = [row]
        while rows:
            row = rows.pop()
            parent = self.parent[row]
            if not self.complete[row] or not (self.depth[row] == 0 or (parent and self.reachable[parent])):
                continue
            self.reachable[row] = True
            self.queue.settle(row)
            for child in self._waiting.pop(self.key(row), ()):
                del self._awaits[child]
                rows.append(child)

    def lose(self, row: int, shard: int, now: float) -> int:
        """One shard of a present block is worth nothing. Returns its slot; what extends the block waits for it."""
        slot = int(self.slots[row, shard])
        assert slot, f"shard {shard} of row {row} is not here"
        self.slots[row, shard] = self.generations[row, shard] = self.checksums[row, shard] = 0
        self.num_present[row] -= 1
        self.num_complete -= bool(self.complete[row])
        self.complete[row] = False
        if self.reachable[row]:
            rows = self._and_what_extends(np.arange(self._next_row) == row)
            for lost in rows[self.reachable[rows]].tolist():
                self.reachable[lost] = False
                self.queue.unsettle(lost, now)
                if lost != row:
                    parent_key = self.key(int(self.parent[lost]))
                    self._waiting.setdefault(parent_key, set()).add(lost)
                    self._awaits[lost] = parent_key
        return slot

    # --- blocks go ------------------------------------------------------------------------------------------

    def evict(self, num_slots: int, shards: list[int], now: float) -> Evicted:
        """Blocks go, in the queue's order, until `num_slots` slots of these shards are free or no block may go."""
        for row in self.queue.doom(now):
            if not self.num_children[row] and not self.num_leases[row]:
                self.queue.push(row, int(self.last_use[row]))
        rows: list[int] = []
        num_doomed = 0
        while num_slots > 0:
            row_or_none = self.queue.pop(self.last_use, self.num_children, self.num_leases)
            if row_or_none is None:
                break
            num_slots -= (
                len(shards) if self.complete[row_or_none] else int((self.slots[row_or_none, shards] != 0).sum())
            )
            num_doomed += bool(self.queue.doomed[row_or_none])
            self._unlink(row_or_none)
            rows.append(row_or_none)
        return Evicted(self._clear(np.array(rows, dtype=np.int64)), len(rows), num_doomed)

    def remove(self, rows: Rows) -> Slots:
        """Blocks without a lease that nothing outside `rows` extends. Returns their slots, which are free to go."""
        assert not self.num_leases[rows].any(), "a leased block cannot go"
        for row in rows.tolist():
            self._unlink(row)
        return self._clear(rows)

    def _unlink(self, row: int) -> None:
        """The block cannot be found any more and extends nothing. Its columns stay until `_clear`."""
        del self._rows[self.key(row)]
        parent_key = self._awaits.pop(row, None)
        if parent_key is not None:
            siblings = self._waiting[parent_key]
            siblings.discard(row)
            if not siblings:
                del self._waiting[parent_key]
        self.queue.forget(row)
        self._live[row] = False
        parent = int(self.parent[row])
        if parent and self._live[parent]:
            self.num_children[parent] -= 1
            if not self.num_children[parent] and not self.num_leases[parent]:
                self.queue.push(parent, int(self.last_use[parent]))

    def _clear(self, rows: Rows) -> Slots:
        slots = self.slots[rows]
        self.num_complete -= int(np.count_nonzero(self.complete[rows]))
        for column in (self.parent, self.num_children, self.num_present, self.complete, self.reachable, self.slots):
            column[rows] = 0
        self._free_rows.extend(rows.tolist())
        self.queue.compact()
        named: Slots = slots[slots != 0]
        return named

    # --- whole segments -------------------------------------------------------------------------------------

    def segment_ages(self) -> dict[int, int]:
        """Segment id → age of the youngest block in it; segments with a leased block are left out."""
        rows = np.flatnonzero(self._live[: self._next_row])
        ids = segments_of(self.slots[rows])
        ages: dict[int, int] = {}
        leased = self.num_leases[rows] > 0
        for segment_id in np.unique(ids).tolist():
            if segment_id:
                here = (ids == segment_id).any(axis=1)
                if not leased[here].any():
                    ages[segment_id] = int(self.last_use[rows[here]].max())
        return ages

    def extending(self, segment_id: int) -> Rows:
        """The blocks with a shard in the segment and all blocks that extend one of them."""
        return self._and_what_extends((segments_of(self.slots[: self._next_row]) == segment_id).any(axis=1))

    def _and_what_extends(self, marked: npt.NDArray[np.bool_]) -> Rows:
        """Marked rows and all that extend them.

        Pointer jumping: after k rounds every block knows of its 2^k nearest ancestors.
        """
        ancestor = self.parent[: self._next_row].copy()
        while ancestor.any():
            marked |= marked[ancestor]
            ancestor = ancestor[ancestor]
        return np.flatnonzero(marked)

    def oldest_use(self) -> int | None:
        """The age of the oldest block, None without one."""
        rows = np.flatnonzero(self._live[: self._next_row])
        return int(self.last_use[rows].min()) if len(rows) else None

    def all_slots(self) -> Slots:
        """The slots of all blocks."""
        named: Slots = self.slots[self.slots != 0]
        return named

    # --- all at once ----------------------------------------------------------------------------------------

    def columns(self) -> Columns:
        """Everything, except for blocks that can never be reached: their parent is here at another depth.

        A block that has lost its only payload (`lose`) is not here any more; what extends it waits for it.
        """
        has_payload = self.num_present[: self._next_row] > 0
        live = self._live[: self._next_row] & has_payload
        parent = np.where(has_payload[self.parent[: self._next_row]], self.parent[: self._next_row], 0)
        is_child = (self.depth[: self._next_row] > 0) & (parent == 0)
        is_orphan = np.zeros(len(live), dtype=np.bool_)
        is_orphan[list(self._awaits)] = True
        is_orphan &= is_child & live
        rows = np.flatnonzero(live & (~is_child | is_orphan))
        # A block that goes takes along what extends it.
        while True:
            positions = np.zeros(self._next_row, dtype=np.uint32)
            positions[rows] = np.arange(1, len(rows) + 1, dtype=np.uint32)
            lost = (parent[rows] != 0) & (positions[parent[rows]] == 0)
            if not lost.any():
                break
            rows = rows[~lost]
        orphans = np.flatnonzero(is_orphan[rows])
        waited_for = b"".join(self._awaits[row] for row in rows[orphans].tolist())
        return Columns(
            self._keys[rows],
            positions[parent[rows]],
            self.depth[rows].astype(np.uint32),
            self.last_use[rows],
            self.slots[rows],
            self.generations[rows],
            self.checksums[rows],
            orphans.astype(np.uint32),
            np.frombuffer(waited_for, dtype=np.uint64).reshape(-1, self.key_bytes // 8),
        )

    @classmethod
    def of_columns(cls, columns: Columns, num_shards: int, now: float) -> "Index":
        """The index that has these blocks. ValueError: they contradict each other."""
        words = columns.keys.shape[1]
        index = cls(words * 8, num_shards)
        count = len(columns)
        if count + 1 > len(index._live):
            index._resize(count + 1)
        rows = slice(1, count + 1)
        names = np.ascontiguousarray(columns.keys).view(f"V{words * 8}").ravel().tolist()
        index._rows = dict(zip(names, range(1, count + 1), strict=True))
        if len(index._rows) != count:
            raise ValueError("a key is there twice")
        index._next_row = count + 1
        index._keys[rows] = columns.keys
        index._live[rows] = True
        index.parent[rows] = columns.parents
        index.depth[rows] = columns.depths
        index.last_use[rows] = columns.uses
        index.told_at[rows] = -np.inf  # the tier below may have forgotten it
        index.slots[rows] = columns.slots
        index.generations[rows] = columns.generations
        index.checksums[rows] = columns.checksums
        index.num_present[rows] = np.count_nonzero(columns.slots, axis=1)
        index.complete[rows] = index.num_present[rows] == num_shards
        index.num_complete = int(np.count_nonzero(index.complete))
        index._link(columns, now)
        return index

    def _link(self, columns: Columns, now: float) -> None:
        count = len(columns)
        rows = np.arange(1, count + 1)
        parents = self.parent[rows]
        linked = parents != 0
        if count and int(columns.parents.max(initial=0)) > count:
            raise ValueError("a parent is not there")
        if (self.depth[rows[linked]] != self.depth[parents[linked]] + 1).any():
            raise ValueError("a block is not one deeper than its parent")
        awaiting = np.zeros(count + 1, dtype=np.bool_)
        if len(columns.orphans):
            if int(columns.orphans.max()) >= count:
                raise ValueError("an orphan is not there")
            awaiting[columns.orphans.astype(np.int64) + 1] = True
        if ((self.depth[rows] > 0) != (linked | awaiting[rows])).any() or (linked & awaiting[rows]).any():
            raise ValueError("blocks and their parents do not agree")
        if (self.num_present[rows] == 0).any():
            raise ValueError("a block without payload")
        np.add.at(self.num_children, parents[linked], 1)
        # A block is reachable when it and all its ancestors are complete and the last of them is the first of a chain.
        reachable = self.complete[: count + 1].copy()
        reachable[0] = True
        ancestor = self.parent[: count + 1].copy()
        is_first = ~awaiting
        while ancestor.any():
            reachable &= reachable[ancestor]
            is_first &= is_first[ancestor]
            ancestor = ancestor[ancestor]
        reachable &= is_first
        reachable[0] = False
        self.reachable[: count + 1] = reachable
        orphan_parents = np.ascontiguousarray(columns.orphan_parents).view(f"V{self.key_bytes}").ravel().tolist()
        waited_for = dict(zip((columns.orphans.astype(np.int64) + 1).tolist(), orphan_parents, strict=True))
        for row in np.flatnonzero(self._live[: count + 1] & ~reachable).tolist():
            self.queue.unsettle(row, now)
            parent = int(self.parent[row])
            if row in waited_for or (parent and not reachable[parent]):
                parent_key = self.key(parent) if parent else waited_for[row]
                self._waiting.setdefault(parent_key, set()).add(row)
                self._awaits[row] = parent_key
        for row in rows[self.num_children[rows] == 0].tolist():
            self.queue.push(row, int(self.last_use[row]))

    # --- rows -----------------------------------------------------------------------------------------------

    def _new_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        if self._next_row == len(self._live):
            self._resize(2 * len(self._live))
        self._next_row += 1
        return self._next_row - 1

    def _resize(self, num_rows: int) -> None:
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                grown = np.zeros((num_rows, *column.shape[1:]), dtype=column.dtype)
                grown[: len(column)] = column
                setattr(self, name, grown)
        self.queue.resize(num_rows)
