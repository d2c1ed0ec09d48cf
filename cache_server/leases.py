"""Promises with a deadline: the blocks of a lease stay in memory until it is released or its deadline passes.

A lease ends in three ways only: `release`, its deadline, or a flush of its namespace. A broken stream or a dead client
changes nothing, the deadline does. `renew` moves the deadline, up to a total age: a client that forgets
nothing but hangs cannot hold blocks for ever.

Invariant: num_leases of an index column counts exactly the leases here that name the row (plus the short holds of
Get, which never outlive one payload). Leased and evictable blocks are disjoint because eviction asks that column.

The leased share of the budget is capped: else a burst of long prompts in a queue makes the cache unable to take
anything in.

Not here: which keys; leases name rows. Random ids: an id of an earlier server must not fit.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cache_server.index import Index, Rows

LEASE_S = 30.0  # longer than most requests queue; a client that needs more renews at half of it
LEASE_MAX_AGE_S = 600.0
LEASED_SHARE = 0.5  # of the budget


@dataclass(slots=True)
class Lease:
    """Blocks, held for one session: rows by index."""

    session_id: int
    parts: tuple[tuple[Index, Rows], ...]
    deadline: float
    granted_at: float


class Leases:
    """All leases that live."""

    def __init__(self, now: Callable[[], float], new_id: Callable[[], int]) -> None:
        self._now = now
        self._new_id = new_id
        self._leases: dict[int, Lease] = {}
        self._deadlines: list[tuple[float, int]] = []  # never later than the lease's own

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, session_id: int, index: Index, rows: Rows, *others: tuple[Index, Rows]) -> int:
        """Hold the blocks for LEASE_S; `others` are of the same promise."""
        lease_id = self._new_id()
        now = self._now()
        parts = ((index, rows), *others)
        for its_index, its_rows in parts:
            its_index.hold(its_rows)
        self._leases[lease_id] = Lease(session_id, parts, now + LEASE_S, now)
        heapq.heappush(self._deadlines, (now + LEASE_S, lease_id))
        return lease_id

    def release(self, session_id: int, lease_ids: Iterable[int]) -> int:
        """Let go; ids that are over or another session's are passed over. Returns how many ended."""
        count = 0
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.session_id == session_id:
                self._end(lease_id)
                count += 1
        return count

    def renew(self, session_id: int, lease_ids: Iterable[int]) -> list[int]:
        """Another LEASE_S from now for each, as far as the total age permits. Returns those that live on."""
        now = self._now()
        renewed = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None or lease.session_id != session_id:
                continue
            deadline = min(now + LEASE_S, lease.granted_at + LEASE_MAX_AGE_S)
            # A promise of less than asked would be counted by the client as LEASE_S: no promise then.
            if deadline < now + LEASE_S:
                continue
            lease.deadline = deadline
            renewed.append(lease_id)
        return renewed

    def expire(self) -> int:
        """End the leases whose deadline has passed. Returns how many."""
        now = self._now()
        count = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if lease.deadline > now:
                heapq.heappush(self._deadlines, (lease.deadline, lease_id))
                continue
            self._end(lease_id)
            count += 1
        return count

    def end_all_of(self, index: Index) -> int:
        """Its namespace is flushed. Returns how many ended."""
        ended = [lease_id for lease_id, lease in self._leases.items() if any(part[0] is index for part in lease.parts)]
        for lease_id in ended:
            self._end(lease_id)
        return len(ended)

    def _end(self, lease_id: int) -> None:
        for index, rows in self._leases.pop(lease_id).parts:
            index.drop(rows)
