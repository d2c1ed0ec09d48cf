"""How much may be under way at a time. What is beyond is refused at once, with a hint when to come again.

    a call ──▶ Admission: one of MAX_CALLS?  ──no──▶ RESOURCE_EXHAUSTED, before its message is read
    Get, Put ──▶ Turns: one of MAX_MOVING?   ──no──▶ waits, as one of MAX_WAITING, for WAIT_S at most ──▶ the same

So there is no queue without end: not of calls, not of messages in memory, not of time. Health checks and reflection are
never refused: a server that is busy is not dead. The hint is the one that grpc's own retries obey
(`grpc-retry-pushback-ms`); the text says it too.

Messages under way have at most MAX_CALLS times what grpc accepts, streams (MAX_MOVING chunks and windows of grpc that
fill while MAX_WAITING wait) are the far smaller part.

Not here: what one session may hold (`cache.py`), how many there may be (`sessions.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from cache_server.errors import TooMany

MAX_CALLS: Final = 256  # of all clients, Attach streams apart
MAX_MOVING: Final = 8  # streams of each kind that move bytes
MAX_WAITING: Final = 64  # streams of each kind that wait for their turn
WAIT_S: Final = 2.0  # how long
RETRY_MS: Final = 100  # what they are told
_PUSHBACK: Final = "grpc-retry-pushback-ms"


def pushback(retry_ms: int) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of a refusal."""
    return ((_PUSHBACK, str(retry_ms)),)


class Admission(grpc.aio.ServerInterceptor):
    """Counts the calls of one service from before their message is read until they are over."""

    def __init__(self, service: str, stream_of_sessions: str, max_calls: int, max_sessions: int) -> None:
        """`stream_of_sessions`: the method that lasts as long as a session, and is counted apart."""
        self._service = f"/{service}/"
        self._sessions = f"/{service}/{stream_of_sessions}"
        self._limits = {False: max_calls, True: max_sessions}
        self._counts = {False: 0, True: 0}
        self.num_refused = 0

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Called in the task that then runs the call, so the end of that task is the end of the call."""
        if not details.method.startswith(self._service):
            return await continuation(details)
        is_session = details.method == self._sessions
        if self._counts[is_session] >= self._limits[is_session]:
            self.num_refused += 1
            return grpc.stream_stream_rpc_method_handler(self._refusal(is_session))
        task = asyncio.current_task()
        assert task is not None
        self._counts[is_session] += 1
        task.add_done_callback(lambda _: self._end(is_session))
        return await continuation(details)

    def _end(self, is_session: bool) -> None:
        self._counts[is_session] -= 1

    def _refusal(self, is_session: bool) -> Callable[[Any, Any], Awaitable[None]]:
        what = "sessions are attached" if is_session else "calls are under way"
        text = f"{self._limits[is_session]} {what}; again in {RETRY_MS} ms"

        async def refuse(_request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text, pushback(RETRY_MS))

        return refuse


class Turns:
    """Who may move bytes now."""

    def __init__(self, what: str, max_moving: int = MAX_MOVING, max_waiting: int = MAX_WAITING) -> None:
        self._what = what
        self._max_waiting = max_waiting
        self._turns = asyncio.Semaphore(max_moving)
        self._num_waiting = 0
        self.num_refused = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One's turn. TooMany: there are too many before, or it took too long."""
        if self._turns.locked() and self._num_waiting >= self._max_waiting:
            self._refuse(f"{self._num_waiting} wait before it")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turns.acquire()
        except TimeoutError:
            self._refuse(f"it was not its turn for {WAIT_S:.0f} s")
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._turns.release()

    def _refuse(self, why: str) -> None:
        self.num_refused += 1
        raise TooMany(f"no room for another {self._what} now, {why}; again in {RETRY_MS} ms", RETRY_MS)
