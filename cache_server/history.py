"""The last hour in a few hundred points, for the status page: totals, from which whoever draws them makes rates.

Kept because an operator who opens the page wants to see what was, and not every machine has a Prometheus. A ring: its
memory is bounded by NUM_POINTS, and a point is a row of integers.
"""

from collections import deque
from typing import Any, Final

EVERY_S: Final = 10.0
NUM_POINTS: Final = 360


class History:
    """Points of (uptime in seconds, stored bytes, totals), oldest first."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, dict[str, int]]] = deque(maxlen=NUM_POINTS)

    def add(self, uptime_s: float, stored_bytes: int, totals: dict[str, int]) -> None:
        """The figures of now."""
        self._points.append((uptime_s, stored_bytes, totals))

    def as_columns(self) -> dict[str, list[Any]]:
        """Column name → values, all of one length."""
        names = self._points[0][2].keys() if self._points else ()
        return {
            "uptime_s": [round(point[0], 1) for point in self._points],
            "stored_bytes": [point[1] for point in self._points],
            **{name: [point[2][name] for point in self._points] for name in names},
        }
