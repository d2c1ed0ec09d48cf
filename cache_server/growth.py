"""Touches segments ahead of need, off the event loop and off the interpreter lock.

One spare segment is kept ready while the budget has room. Whoever used it up calls `nudge`; whoever found
nothing may `wait` for the next. When the machine has no memory for a segment, the arena lives with what there is.

Not here: the budget (`arena.py`) and how memory is touched (`segments.py`).
"""

import asyncio
import logging

from cache_server.arena import Arena

_log = logging.getLogger(__name__)


class Growth:
    """The one task that makes segments."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._wanted = asyncio.Event()
        self._grown = asyncio.Event()
        self._is_open = True

    def nudge(self) -> None:
        """A spare may be missing."""
        if self._arena.wants_segment:
            self._wanted.set()

    async def wait(self, timeout_s: float) -> None:
        """Until there is another segment, or for `timeout_s`."""
        self.nudge()
        try:
            async with asyncio.timeout(timeout_s):
                await self._grown.wait()
        except TimeoutError:
            return

    async def run(self) -> None:
        """For ever; `close` and cancel it."""
        while True:
            await self.make_spare()
            await self._wanted.wait()
            self._wanted.clear()

    async def make_spare(self) -> None:
        """Touch what is wanted now."""
        while self._arena.wants_segment and self._is_open:
            for segment in self._arena.take_discarded():
                await asyncio.to_thread(segment.give_back_pages)
                self._arena.drop_discarded(segment)
            try:
                segment = self._arena.begin_segment()
            except OSError as error:
                self._arena.stop_growing()
                self._tell(error)
                return
            try:
                await asyncio.to_thread(segment.touch, lambda: self._is_open)
            except OSError as error:
                self._arena.abandon_segment(segment)
                self._tell(error)
                return
            self._arena.finish_segment(segment)
            self._grown.set()
            self._grown = asyncio.Event()

    def close(self) -> None:
        """Let a touch under way end early: the server stops."""
        self._is_open = False

    def _tell(self, error: OSError) -> None:
        _log.error(
            "no memory for another segment (%s): staying at %d of %d bytes",
            error,
            self._arena.touched_bytes,
            self._arena.budget_bytes,
        )
