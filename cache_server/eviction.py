"""The order in which blocks go: a lazy heap of the blocks that no present block extends.

Who may go: a block without present children (else its children could never be reached) and without a lease.
Who goes first: blocks that have been unreachable or without all their shards for longer than a grace time
(*doomed*), then the least recently used. The grace time exists because the shards of a block arrive one after the
other: without it two ranks under pressure evict each other's newest blocks for ever.

Why lazy: one lookup touches thousands of blocks with one numpy assignment; telling a queue about each would cost
more than the lookup. An entry keeps the age it was pushed with. Ages only grow, so an entry is never later in
the heap than its block deserves; `pop` re-pushes entries whose block was used since, and forgets those whose
block got children or a lease. Whoever removes a child or the last lease pushes the block again.

`queued[row]` is the key of the one entry of a row that counts (0: none); all other entries are dead.

Not here: removing anything. `pop` returns a row; the caller removes it from the index.
"""

import heapq
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

UNSETTLED_GRACE_S = 10.0  # several times what lies between the commits of two ranks of one engine
_SETTLED = 1 << 62  # doomed blocks have keys below, all others above


class EvictionQueue:
    """Which block of one index goes next. Reads the columns of that index, owns only the order."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # key, row
        self._unsettled: OrderedDict[int, float] = OrderedDict()  # row → since when, oldest first
        self.queued: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.doomed: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def resize(self, num_rows: int) -> None:
        """The index has more rows now."""
        self.queued = np.concatenate((self.queued, np.zeros(num_rows - len(self.queued), dtype=np.int64)))
        self.doomed = np.concatenate((self.doomed, np.zeros(num_rows - len(self.doomed), dtype=np.bool_)))

    def push(self, row: int, last_use: int) -> None:
        """The block is a leaf without a lease."""
        key = last_use if self.doomed[row] else last_use + _SETTLED
        if self.queued[row] != key:
            self.queued[row] = key
            heapq.heappush(self._heap, (key, row))

    def forget(self, row: int) -> None:
        """The block is gone."""
        self.queued[row] = 0
        self.settle(row)

    def unsettle(self, row: int, now: float) -> None:
        """The block is new and cannot be reached or lacks a shard."""
        self._unsettled[row] = now

    def settle(self, row: int) -> None:
        """The block can be reached with all its shards."""
        self._unsettled.pop(row, None)
        self.doomed[row] = False

    def doom(self, now: float) -> list[int]:
        """Blocks whose grace time ended since the last call; the caller pushes those that may go."""
        doomed = []
        while self._unsettled:
            row, since = next(iter(self._unsettled.items()))
            if now - since < UNSETTLED_GRACE_S:
                break
            self._unsettled.popitem(last=False)
            self.doomed[row] = True
            doomed.append(row)
        return doomed

    def pop(
        self,
        last_use: npt.NDArray[np.int64],
        num_children: npt.NDArray[np.int32],
        num_leases: npt.NDArray[np.int32],
    ) -> int | None:
        """The row that goes next, or None when every block is leased or extended by a leased one."""
        while self._heap:
            key, row = self._heap[0]
            if self.queued[row] != key or num_children[row] or num_leases[row]:
                heapq.heappop(self._heap)
                if self.queued[row] == key:
                    self.queued[row] = 0
                continue
            current = int(last_use[row]) + (0 if self.doomed[row] else _SETTLED)
            if current != key:
                self.queued[row] = current
                heapq.heapreplace(self._heap, (current, row))
                continue
            heapq.heappop(self._heap)
            self.queued[row] = 0
            return row
        return None

    def compact(self) -> None:
        """Drop dead entries when they outnumber the rows."""
        if len(self._heap) > 2 * len(self.queued) + 1024:
            self._heap = [(key, row) for key, row in self._heap if self.queued[row] == key]
            heapq.heapify(self._heap)
