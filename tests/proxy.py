"""A bad network between a client and a server: delays, throttles, stops, cuts.

`Proxy(target)` listens on a free loopback port, or on a Unix path, before a server on either, and forwards bytes both
ways, in a thread of its own. What it does to them is set from the test, at any time:

    delay_s       every byte arrives that much later; the rate stays
    bytes_per_s   each direction together carries no more than this; 0: no bound
    drop          what arrives is taken and lost, nothing is closed: a half-open link
    stop, resume  nothing moves, nothing is closed, connecting still works: a machine that is gone without a word
    refuse        new connections are closed at once
    cut           every connection is reset, in the middle of whatever is on its way
    half_close    the clients see the end of what the server sends; what they send still arrives

Bytes that were taken are forwarded in order or never. Not here: what the bytes mean.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_CHUNK_BYTES = 16 << 10
_LINGER_RESET = struct.pack("ii", 1, 0)

Address = tuple[str, int] | str  # host and port, or the path of a Unix socket


class Proxy:
    """One listening socket and everything that came through it."""

    def __init__(self, target: Address, listen: Address = ("127.0.0.1", 0)) -> None:
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.refuse = False
        self.drop = False
        self.num_connections = 0  # accepted, ever
        self.num_bytes = [0, 0]  # forwarded to the server, to the clients
        self._target = target
        self._moving = threading.Event()
        self._moving.set()
        self._free_at = [0.0, 0.0]  # per direction: when the next byte may go
        self._pairs: dict[tuple[socket.socket, socket.socket], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = _listening(listen)
        self.address: Any = self._listener.getsockname()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def port(self) -> int:
        return int(self.address[1])

    def stop(self) -> None:
        self._moving.clear()

    def resume(self) -> None:
        self._moving.set()

    def cut(self) -> None:
        self._call(self._cut())

    def half_close(self) -> None:
        self._call(self._half_close())

    def close(self) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if isinstance(self.address, str):
            Path(self.address).unlink(missing_ok=True)

    # --- in the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._start(self._accept())
        self._loop.run_forever()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(5)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            self.num_connections += 1
            if self.refuse:
                client.close()
                continue
            client.setblocking(False)
            family = socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET
            server = socket.socket(family, socket.SOCK_STREAM)
            server.setblocking(False)
            self._pairs[client, server] = self._start(self._serve(client, server))

    async def _serve(self, client: socket.socket, server: socket.socket) -> None:
        pair = (client, server)
        try:
            await self._loop.sock_connect(server, self._target)
            for end in pair:
                if end.family == socket.AF_INET:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await _together(self._forward(client, server, 0), self._forward(server, client, 1))
        except OSError:
            pass
        finally:
            client.close()
            server.close()
            self._pairs.pop(pair, None)

    async def _forward(self, source: socket.socket, sink: socket.socket, direction: int) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)

        async def receive() -> None:
            while True:
                data = await self._loop.sock_recv(source, _CHUNK_BYTES)
                await waiting.put((self._loop.time() + self.delay_s, data))
                if not data:
                    return

        async def send() -> None:
            while True:
                due, data = await waiting.get()
                await self._wait(due, len(data), direction)
                if self.drop:
                    continue
                if not data:
                    with contextlib.suppress(OSError):
                        sink.shutdown(socket.SHUT_WR)
                    return
                await self._loop.sock_sendall(sink, data)
                self.num_bytes[direction] += len(data)

        await _together(receive(), send())

    async def _wait(self, due: float, num_bytes: int, direction: int) -> None:
        await self._while_stopped()
        if self.bytes_per_s:
            due = max(due, self._free_at[direction])
            self._free_at[direction] = max(due, self._loop.time()) + num_bytes / self.bytes_per_s
        left = due - self._loop.time()
        if left > 0:
            await asyncio.sleep(left)
        await self._while_stopped()

    async def _while_stopped(self) -> None:
        while not self._moving.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.005)

    async def _cut(self) -> None:
        for ends, task in list(self._pairs.items()):
            for end in ends:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            task.cancel()  # closes them: with that option a reset, not an end

    async def _half_close(self) -> None:
        for client, _ in self._pairs:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_WR)

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._listener.close()


async def _together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Until all have ended, or one has failed and the others are stopped: a ConnectionError."""
    has_failed = False
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except* OSError:
        has_failed = True  # raised in here it would come out as a group, before Python 3.11.4
    if has_failed:
        raise ConnectionError


def _listening(address: Address) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(128)
    listener.setblocking(False)
    return listener
