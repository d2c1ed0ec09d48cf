"""How long the server's operations take: a histogram for each, and the slowest of the last hour.

Plain numbers, written on the event loop, for `/metrics`, the status page and `prefixd top` alike. What each operation
measures is in `OPERATIONS`; the name is the label.

Not here: any of the operations; how the figures are exposed (`exposition.py`).
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

OPERATIONS: Final = {
    "attach": "opening a session",
    "lookup": "answering a lookup, what it waited for Redis included",
    "release": "ending leases",
    "renew": "prolonging leases",
    "reserve": "handing out slots, evicting for them included",
    "commit": "giving names to slots",
    "get": "sending payloads to an engine elsewhere, a whole stream",
    "put": "receiving payloads from an engine elsewhere, a whole stream",
    "flush": "dropping a namespace",
    "promote": "bringing blocks of one lookup up from Redis, from the first load to the last",
    "redis_save": "writing one payload to Redis, what it waited for a connection included",
}
# Upper bounds of the buckets, seconds.
BOUNDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
NUM_SLOWEST: Final = 10
SLOWEST_S: Final = 3600.0  # an operation is among the slowest for so long


@dataclass(slots=True)
class Timing:
    """One operation since the start. `counts[i]`: those of at most BOUNDS[i] and more than the bound before; the last
    of them is beyond all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True, order=True)
class SlowOperation:
    """One of the slowest."""

    seconds: float
    ended_at: float
    name: str


class Operations:
    """All operations of one server."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self.timings = {name: Timing() for name in OPERATIONS}
        self._slowest: list[SlowOperation] = []  # a heap, the fastest of them first

    def note(self, name: str, seconds: float) -> None:
        """It ended just now."""
        timing = self.timings[name]
        timing.counts[bisect_left(BOUNDS, seconds)] += 1
        timing.seconds += seconds
        slowest = self._slowest
        if len(slowest) < NUM_SLOWEST:
            heapq.heappush(slowest, SlowOperation(seconds, self._now(), name))
        elif seconds > slowest[0].seconds:
            heapq.heapreplace(slowest, SlowOperation(seconds, self._now(), name))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Notes the time of the block, however it ends."""
        started_at = self._now()
        try:
            yield
        finally:
            self.note(name, self._now() - started_at)

    def slowest(self) -> list[tuple[SlowOperation, float]]:
        """The slowest of the last hour, slowest first, and how many seconds ago each ended."""
        now = self._now()
        self._slowest = [one for one in self._slowest if now - one.ended_at < SLOWEST_S]
        heapq.heapify(self._slowest)
        return [(one, now - one.ended_at) for one in sorted(self._slowest, reverse=True)]
