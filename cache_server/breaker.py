"""Whether a neighbour is worth asking: closed (ask), open (do not), and when one question may try again.

    closed ──failure──▶ open ──retry_s passed: one try──▶ closed
                         ▲                       │
                         └─────── failure ───────┘   (the wait doubles, up to a bound)

Pure: the clock is passed in, who tries and who logs are others. `open` and `close` answer whether the state changed,
so that a change is logged once, however many calls fail together.
"""

from collections.abc import Callable


class Breaker:
    """The state of one neighbour."""

    def __init__(self, now: Callable[[], float], first_retry_s: float, last_retry_s: float) -> None:
        self._now = now
        self._first_retry_s = first_retry_s
        self._last_retry_s = last_retry_s
        self._retry_s = first_retry_s
        self._retry_at = 0.0
        self._opened_at = 0.0
        self.is_open = False
        self.num_opened = 0

    @property
    def may_try(self) -> bool:
        """It is open, and has been for long enough since the last try."""
        return self.is_open and self._now() >= self._retry_at

    @property
    def open_s(self) -> float:
        """For how long it has been open."""
        return self._now() - self._opened_at if self.is_open else 0.0

    def open(self) -> bool:
        """It failed. True: until now it had not."""
        changed = not self.is_open
        if changed:
            self.is_open = True
            self.num_opened += 1
            self._opened_at = self._now()
            self._retry_s = self._first_retry_s
        self._retry_at = self._now() + self._retry_s
        return changed

    def try_failed(self) -> None:
        """Wait longer before the next try."""
        self._retry_s = min(2 * self._retry_s, self._last_retry_s)
        self._retry_at = self._now() + self._retry_s

    def close(self) -> bool:
        """It answered. True: until now it had not."""
        changed, self.is_open = self.is_open, False
        return changed
