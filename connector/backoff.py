"""How long something that failed is left alone: a pause that doubles with each failure in a row, up to a bound.

Owns the arithmetic only. Invariant: a success forgets all failures; while a pause lasts further failures do not prolong
it, for they are of attempts made before it.

Not here: what counts as a failure, and who asks whether the pause is over (`client.py`, `load_record.py`).
"""

from collections.abc import Callable


class Backoff:
    """Of one neighbour. Any thread may call; a lost update would cost one pause of the wrong length."""

    def __init__(self, first_s: float, max_s: float, clock: Callable[[], float]) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._clock = clock
        self._num_failures = 0
        self._until = 0.0

    def failed(self) -> None:
        """One more failure; nothing changes while a pause lasts."""
        now = self._clock()
        if now >= self._until:
            self._until = now + min(self._first_s * 2**self._num_failures, self._max_s)
            self._num_failures = min(self._num_failures + 1, 32)

    def worked(self) -> None:
        """The next failure is a first one again."""
        self._num_failures = 0

    def left_s(self) -> float:
        """Seconds until the next attempt is due; 0: now."""
        return max(self._until - self._clock(), 0.0)
