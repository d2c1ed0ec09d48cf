"""Whether loading pays: what a tier delivers, measured, against what recomputing costs, told by the engine.

    expected load      latency + (bytes queued before + blocks * block_bytes) / bytes_per_s
    worth it           expected load <= share * blocks * recompute_us_per_block

Both sides are lines over the number of blocks, so the decision is one number: the least blocks that are worth it
(`min_blocks`), or None when no number is. A slow tier answers None, a distant one a large number.

Rates are averaged by their logarithm: a link that falls from 1 GB/s to 2 MB/s must be believed after two or
three transfers, and so must its recovery; a plain average believes the one late, an average of times the other.
A transfer of less than SAMPLE_BYTES says little and counts little.

Before an engine has measured itself it says 0, and PRIOR_RECOMPUTE_US_PER_BLOCK stands in: a block of 16 tokens at
8,000 tokens/s. That is a fast engine, so the error is on the side of recomputing: a payload of 400 KB per block needs
250 MB/s then. A tier that was not measured yet is shut.

The same rule holds for memory hits of engines that are not on this node: there the tier is the engine's own stream,
and what is measured are its Gets (`StreamGate`). Not measured: open, because nobody else can measure it. Shut: now and
then a short run is let through, to see whether it still is.

Not here: Redis, counters. Who measures, probes and counts: `promotion.py` (Redis), `service.py` (streams).
"""

import math
from collections.abc import Callable

PRIOR_RECOMPUTE_US_PER_BLOCK = 2000.0
SAMPLE_BYTES = 1 << 20  # a transfer of this size or more has full weight
_WEIGHT = 0.5  # of the newest full sample
_LATENCY_WEIGHT = 0.2
STREAM_FILL_BYTES = 4 << 20  # the buffers of both machines take the first bytes of a Get at once: they say nothing
STREAM_SAMPLE_BYTES = 8 << 20  # so a Get says something from here on
STREAM_PROBE_EVERY_S = 10.0


class Estimate:
    """What a tier delivers. 0: not measured."""

    __slots__ = ("bytes_per_s", "latency_s")

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self.latency_s = 0.0

    def note_transfer(self, num_bytes: int, seconds: float) -> None:
        """So many bytes took so long, from asking to the last one."""
        if num_bytes <= 0 or seconds <= 0:
            return
        rate = num_bytes / seconds
        if not self.bytes_per_s:
            self.bytes_per_s = rate
            return
        weight = _WEIGHT * min(num_bytes / SAMPLE_BYTES, 1.0)
        self.bytes_per_s = math.exp((1 - weight) * math.log(self.bytes_per_s) + weight * math.log(rate))

    def note_latency(self, seconds: float) -> None:
        """A question of no size took so long."""
        if not self.latency_s:
            self.latency_s = seconds
        self.latency_s += _LATENCY_WEIGHT * (seconds - self.latency_s)

    def load_s(self, num_bytes: int) -> float:
        """How long that many bytes are expected to take; infinite when nothing was measured."""
        return self.latency_s + num_bytes / self.bytes_per_s if self.bytes_per_s else math.inf


class Gate:
    """The decision, for one share."""

    __slots__ = ("share",)

    def __init__(self, share: float) -> None:
        self.share = share

    def affordable_s(self, num_blocks: int, recompute_us_per_block: float) -> float:
        """How long loading so many blocks may take."""
        return self.share * num_blocks * (recompute_us_per_block or PRIOR_RECOMPUTE_US_PER_BLOCK) / 1e6

    def min_blocks(
        self, estimate: Estimate, block_bytes: int, recompute_us_per_block: float, queued_bytes: int = 0
    ) -> int | None:
        """The least number of blocks that is worth loading, None: no number is."""
        fixed_s = estimate.load_s(queued_bytes)
        if fixed_s == math.inf:
            return None
        gain_s = self.affordable_s(1, recompute_us_per_block) - block_bytes / estimate.bytes_per_s
        if gain_s <= 0:
            return None
        return max(1, math.ceil(fixed_s / gain_s))


class StreamGate:
    """The decision for engines that get their payloads through streams."""

    def __init__(self, gate: Gate, now: Callable[[], float]) -> None:
        self._gate = gate
        self._now = now
        self._engines: dict[str, tuple[Estimate, float]] = {}  # what its streams deliver, and when that was seen

    def note(self, engine_id: str, num_bytes: int, seconds: float) -> None:
        """After STREAM_FILL_BYTES one Get moved so much more in so long."""
        if num_bytes < STREAM_SAMPLE_BYTES - STREAM_FILL_BYTES:
            return
        estimate, _ = self._engines.pop(engine_id, (Estimate(), 0.0))
        estimate.note_transfer(num_bytes, seconds)
        self._engines[engine_id] = (estimate, self._now())

    def limits(self, engine_id: str, payload_bytes: int, recompute_us_per_block: float) -> tuple[int, int | None]:
        """How many blocks a hit must have at least, and may have at most (None: any number)."""
        estimate, seen_at = self._engines.get(engine_id, (None, 0.0))
        if estimate is None:
            return 0, None
        least = self._gate.min_blocks(estimate, payload_bytes, recompute_us_per_block)
        if least is not None:
            return least, None
        if self._now() - seen_at < STREAM_PROBE_EVERY_S:
            return 1, 0
        self._engines[engine_id] = (estimate, self._now())
        return 0, -(-STREAM_SAMPLE_BYTES // payload_bytes)

    def keep_only(self, engine_ids: set[str]) -> None:
        """The others are gone."""
        for engine_id in self._engines.keys() - engine_ids:
            del self._engines[engine_id]
