"""PATH.fd: hands segments to client processes on this node, and sees when such a process is gone.

A client connects (seqpacket: messages keep their borders), sends its 16-byte ticket, and receives one packet per
segment of its class: little-endian u32 segment id, u32 zero, u64 bytes, with two descriptors. Segments of other
namespaces are never sent. The end of the socket is the one proof that nobody writes into the session's slots any
more, because the kernel closes it however the process ends.

So we never close the socket of a session ourselves while its process lives: not when it does not read (packets
wait in a queue that is bounded by the number of segments, each is sent once), not when its Attach stream is gone.

Not here: grpc; what a session is. The owner passes in how tickets are redeemed and is told when sockets end.
"""

import asyncio
import errno
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from cache_server.segments import Segment

_log = logging.getLogger(__name__)
_PACKET = struct.Struct("<IIQ")
_TICKET_BYTES = 16
_TICKET_TIMEOUT_S = 5.0  # from connecting to the ticket
_MAX_STRANGERS = 64  # connections without a ticket yet
_RETRY_S = 0.05  # when too many descriptors are in flight on this machine


class _Client:
    """One connection. `session_id` is 0 until the ticket came."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.session_id = 0
        self.known: set[int] = set()  # segment ids sent or waiting
        self.waiting: deque[Segment] = deque()
        self.timer: asyncio.TimerHandle | None = None


class DescriptorServer:
    """One listening socket and its connections, on the running event loop."""

    def __init__(
        self,
        path: Path,
        redeem: Callable[[bytes], int],
        segments: Callable[[int], Iterable[Segment]],
        ended: Callable[[int], None],
    ) -> None:
        self.path = path
        self._redeem = redeem  # ticket → session id, 0 for none
        self._segments = segments  # session id → what to send at once
        self._ended = ended  # this session's socket is over
        self._loop = asyncio.get_running_loop()
        self._clients: dict[int, _Client] = {}  # by descriptor
        self._by_session: dict[int, _Client] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(os.fspath(path))
        self._listener.listen(128)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def announce(self, session_id: int, segment: Segment) -> None:
        """Send the segment if the session is connected here and does not know it yet. Never blocks."""
        client = self._by_session.get(session_id)
        if client is not None and segment.id not in client.known:
            client.known.add(segment.id)
            client.waiting.append(segment)
            if len(client.waiting) == 1:
                self._send(client)

    def close(self) -> None:
        """Stop listening and hang up; sessions are not told."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self.path.unlink(missing_ok=True)
        for client in list(self._clients.values()):
            self._hang_up(client)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors: the client stays in the backlog
            _log.warning("cannot accept on %s: %s", self.path, error)
            return
        connection.setblocking(False)
        if len(self._clients) - len(self._by_session) >= _MAX_STRANGERS:
            connection.close()
            return
        client = _Client(connection)
        self._clients[connection.fileno()] = client
        client.timer = self._loop.call_later(_TICKET_TIMEOUT_S, self._hang_up, client)
        self._loop.add_reader(connection.fileno(), self._read, client)

    def _read(self, client: _Client) -> None:
        try:
            packet = client.connection.recv(_TICKET_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._hang_up(client)
        elif not client.session_id:
            session_id = self._redeem(packet)
            if not session_id:
                self._hang_up(client)
                return
            client.session_id = session_id
            self._by_session[session_id] = client
            if client.timer is not None:
                client.timer.cancel()
            for segment in self._segments(session_id):
                self.announce(session_id, segment)
        # Whatever comes after the ticket has no meaning yet and is dropped.

    def _send(self, client: _Client) -> None:
        self._loop.remove_writer(client.connection.fileno())
        while client.waiting:
            segment = client.waiting[0]
            packet = _PACKET.pack(segment.id, 0, segment.num_bytes)
            try:
                socket.send_fds(client.connection, [packet], [segment.fd, segment.generations_fd])
            except BlockingIOError:
                self._loop.add_writer(client.connection.fileno(), self._send, client)
                return
            except OSError as error:
                if error.errno in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                    client.timer = self._loop.call_later(_RETRY_S, self._send, client)
                # Any other error: the peer is gone, and reading will say so.
                return
            client.waiting.popleft()

    def _hang_up(self, client: _Client) -> None:
        number = client.connection.fileno()
        if number < 0:
            return
        if client.timer is not None:
            client.timer.cancel()
        self._loop.remove_reader(number)
        self._loop.remove_writer(number)
        del self._clients[number]
        client.connection.close()
        if client.session_id:
            del self._by_session[client.session_id]
            self._ended(client.session_id)
