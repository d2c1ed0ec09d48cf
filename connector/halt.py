"""Ends calls that wait for bytes which do not come: a load that nobody wants any more must not wait for its deadline.

Owns the calls under way of one transfer. Invariant: after `set`, every call of it is cancelled, those that begin later,
too. Not here: who decides so (`worker.py`), and what a call is (`client.py`).
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol


class Cancellable(Protocol):
    """A call of grpc."""

    def cancel(self) -> object: ...


class Halt:
    """Ends transfers from another thread, also while they wait for bytes that do not come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[Cancellable] = set()
        self.is_set = False

    def set(self) -> None:
        with self._lock:
            self.is_set = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    @contextlib.contextmanager
    def ends(self, call: Cancellable) -> Iterator[None]:
        """`set` cancels the call, as long as the block lasts."""
        with self._lock:
            self._calls.add(call)
            is_set = self.is_set
        if is_set:
            call.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(call)
