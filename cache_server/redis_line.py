"""One connection to one Redis server, used by one thread. The only file that imports `redis`.

Of redis-py remain making the connection (TCP, TLS, Unix, AUTH, SELECT), the names of errors and the hash slots.
Reading and writing are ours: `_Replies` is the parser of that connection, for redis-py's handshake and for us, and
receives a payload straight into its slot; redis-py's own reading copies every reply twice (half of this rate), and
hiredis copies what is sent.

What leaves this file are replies (int, bytes, list, None, or `ErrorReply`: the command was refused, the connection is
fine) and three exceptions:

    LineError           late, cut, not understood, or the server cannot serve now (loading, read-only, no cluster)
      └── AccessError   user, password, database or certificate are not accepted
    MovedError          the key lies on another node now
    UnusableReply       a reply that is too long to be read to its end

After any of them the connection has to be dropped, with all replies that were still to come.

Invariants: the length of a reply is compared before anything is read into memory, and what is skipped goes nowhere.
Every wait has an end: connecting, each send and recv (`timeout_s` without a byte), each reply and each command as a
whole (the time of a link of SLOWEST_BYTES_PER_S).

Not here: threads, what the commands mean.
"""

import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from redis._parsers.base import BaseParser
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError as RedisMovedError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cache_server.redis_config import RedisAddress, RedisConfig

SLOWEST_BYTES_PER_S: Final = 256 << 10  # slower is of no use to anybody: the reply counts as late
MAX_SKIP_BYTES: Final = 64 << 20  # of a reply that nobody wants; above it a new connection is cheaper
_BUFFER_BYTES: Final = 16 << 10
_STEP_BYTES: Final = 1 << 20  # of a payload: received, then summed while it is in the processor's cache
_NODE_ERRORS: Final = (
    RedisMovedError,
    AskError,
    BusyLoadingError,
    ReadOnlyError,
    ClusterDownError,
    MasterDownError,
    TryAgainError,
)

# redis-py's constructors carry no annotations.
_CONNECTIONS: Final[dict[str, Callable[..., Any]]] = {
    "unix": UnixDomainSocketConnection,
    "tcp": Connection,
    "tls": SSLConnection,
}


class LineError(Exception):
    """The connection is of no use any more. The message is one line for people, never with a password."""


class AccessError(LineError):
    """The server is there and does not accept who asks."""


class MovedError(Exception):
    """The key lies on another node now."""


class UnusableReply(Exception):
    """Not worth reading to its end."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The command was refused."""

    text: str
    is_out_of_memory: bool


class _Replies(BaseParser):
    """The parser of one connection, for redis-py's handshake and for us. Reads replies, and payloads into place."""

    def __init__(self) -> None:
        self._socket: Any = None
        self._wait_flag = 0
        self._poll = select.poll()
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what was received and not used yet
        self.deadline = float("inf")  # of the reply that is being read

    def __call__(self, **_settings: object) -> "_Replies":
        """redis-py makes a parser per connection by calling its class; here that is this one."""
        return self

    def on_connect(self, connection: Any) -> None:
        self._socket = connection._sock  # what every parser of redis-py takes
        self._start = self._end = 0
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        # One call per step instead of one per packet. TLS knows no flags.
        self._wait_flag = 0 if isinstance(self._socket, ssl.SSLSocket) else socket.MSG_WAITALL

    def on_disconnect(self) -> None:
        self._socket = None

    def can_read(self, timeout: float = 0) -> bool:
        """Something has arrived that was not read yet."""
        return self._start < self._end or bool(self._poll.poll(timeout * 1000))

    def read_response(self, **_settings: object) -> Any:
        """One reply; an error is a value."""
        line = self._read_line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"-":
            return _parse_error(rest)
        if kind == b"$":
            length = int(rest)
            if length < 0:
                return None
            if length > MAX_SKIP_BYTES:
                raise UnusableReply
            data = bytearray(length)
            self.read_into(memoryview(data))
            self.read_end()
            return bytes(data)
        if kind == b"*":
            count = int(rest)
            return [self.read_response() for _ in range(count)] if count >= 0 else None
        raise RedisConnectionError("not a reply of Redis")

    def read_bulk_length(self) -> int | Exception | None:
        """How many bytes follow; None: there is no value; an error is a value."""
        line = self._read_line()
        if line[:1] == b"$":
            length = int(line[1:])
            return length if length >= 0 else None
        if line[:1] == b"-":
            return _parse_error(line[1:])
        raise RedisConnectionError("not a reply to GET")

    def read_into(self, target: memoryview, received: Callable[[memoryview], object] | None = None) -> None:
        """Fill `target`; `received` hears of each piece."""
        done = min(len(target), self._end - self._start)
        if done:
            target[:done] = self._view[self._start : self._start + done]
            self._start += done
            if received:
                received(target[:done])
        while done < len(target):
            count = self._socket.recv_into(target[done : done + _STEP_BYTES], 0, self._wait_flag)
            self._check(count)
            if received:
                received(target[done : done + count])
            done += count

    def skip(self, num_bytes: int) -> None:
        """Read so many bytes into nowhere."""
        if num_bytes > MAX_SKIP_BYTES:
            raise UnusableReply
        while num_bytes:
            if self._start == self._end:
                self._fill()
            step = min(num_bytes, self._end - self._start)
            self._start += step
            num_bytes -= step

    def read_end(self) -> None:
        """Every bulk reply is followed by an empty line."""
        if self._read_line():
            raise RedisConnectionError("a reply is longer than it said")

    def _read_line(self) -> bytes:
        found = self._buffer.find(b"\r\n", self._start, self._end)
        while found < 0:
            if self._end - self._start == len(self._buffer):
                raise RedisConnectionError("a line without an end")
            self._fill()
            found = self._buffer.find(b"\r\n", self._start, self._end)
        line = bytes(self._view[self._start : found])
        self._start = found + 2
        return line

    def _fill(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            rest = bytes(self._view[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        count = self._socket.recv_into(self._view[self._end :])
        self._check(count)
        self._end += count

    def _check(self, count: int) -> None:
        if count == 0:
            raise RedisConnectionError("Redis closed the connection")
        if time.monotonic() > self.deadline:
            raise RedisTimeoutError("a reply that does not end")


def _parse_error(text: bytes) -> Exception:
    parse: Callable[[str], Exception] = BaseParser.parse_error
    return parse(text.decode("utf-8", "replace"))


class Line:
    """One connection, used by one thread."""

    def __init__(self, address: RedisAddress, config: RedisConfig, *, is_sentinel: bool = False) -> None:
        self.address = address
        self.replies = _Replies()
        self._timeout_s = config.timeout_s
        settings: dict[str, Any] = {
            "parser_class": self.replies,
            "protocol": 2,
            "socket_timeout": config.timeout_s,
            "socket_connect_timeout": config.timeout_s,
        }
        if not is_sentinel:
            settings |= {"db": config.db, "username": config.user or None, "password": config.password or None}
        if address.path:
            settings["path"] = address.path
        else:
            settings |= {"host": address.host, "port": address.port}
        if config.tls:
            settings |= {
                "ssl_ca_certs": config.ca_file or None,
                "ssl_certfile": config.cert_file or None,
                "ssl_keyfile": config.key_file or None,
            }
        self._connection = _CONNECTIONS["unix" if address.path else "tls" if config.tls else "tcp"](**settings)

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    @property
    def _socket(self) -> Any:
        return self._connection._sock  # redis-py has no other name for it

    @property
    def is_readable(self) -> bool:
        """Something has arrived that was not read yet."""
        return self.replies.can_read() or bool(getattr(self._socket, "pending", int)())

    def connect(self) -> None:
        """Connect if it is not, authenticate and select the database."""
        if self.is_connected and self._has_ended():
            self.drop()
        if self.is_connected:
            return
        self.replies.deadline = time.monotonic() + 3 * self._timeout_s
        try:
            with translated():
                self._connection.connect()
        except LineError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise AccessError(f"its certificate is not trusted: {error}") from None
            raise
        self._set_timeout()

    def _set_timeout(self) -> None:
        """By the kernel where it can: Python's own timeouts cost a poll before each call."""
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(self._timeout_s)
            return
        self._socket.settimeout(None)
        seconds, rest = divmod(int(self._timeout_s * 1e6), 10**6)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, rest))

    def drop(self) -> None:
        """Whatever was still to come on it is gone."""
        with suppress(OSError, RedisError):
            self._connection.disconnect()

    def _has_ended(self) -> bool:
        """Nothing was asked, so anything to read is the end, or not meant for us. TLS may have news of its own."""
        connection = self._socket
        connection.settimeout(0)
        try:
            connection.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        finally:
            self._set_timeout()
        return True

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Without a copy. The timeout is for each piece that the system takes; the whole has a deadline of its own."""
        deadline = time.monotonic() + self._timeout_s + sum(map(len, buffers)) / SLOWEST_BYTES_PER_S
        views = deque([memoryview(buffer) for buffer in buffers])
        is_plain = not isinstance(self._socket, ssl.SSLSocket)
        while views:
            sent = self._socket.sendmsg(views) if is_plain else self._socket.send(views[0])
            while views and sent >= len(views[0]):
                sent -= len(views.popleft())
            if sent:
                views[0] = views[0][sent:]
            if views and time.monotonic() > deadline:
                raise RedisTimeoutError("a command that nobody takes")

    def expect(self, num_bytes: int) -> None:
        """The next reply has about so many bytes; it may take its time, but not for ever."""
        self.replies.deadline = time.monotonic() + self._timeout_s + num_bytes / SLOWEST_BYTES_PER_S

    def reply(self) -> Any:
        """The next reply."""
        return self.checked(self.replies.read_response())

    @staticmethod
    def checked(reply: Any) -> Any:
        """A refusal of the command is a reply; one that concerns the whole server or connection is raised."""
        if not isinstance(reply, RedisError):
            return reply
        if not isinstance(reply, ResponseError) or isinstance(reply, _NODE_ERRORS):
            raise reply
        return ErrorReply(_text(reply), isinstance(reply, OutOfMemoryError))

    def ask(self, *words: bytes) -> Any:
        """One command and its reply, on a line that nothing else uses."""
        with translated():
            self.send([pack(*words)])
            self.expect(_BUFFER_BYTES)
            return self.reply()


@contextmanager
def translated() -> Iterator[None]:
    """Inside, a line may be used; outside, only the exceptions of this file are known."""
    try:
        yield
    except (RedisMovedError, AskError):
        raise MovedError from None
    except (AuthenticationError, NoPermissionError) as error:
        raise AccessError(_text(error)) from None
    except (RedisTimeoutError, TimeoutError, BlockingIOError):
        raise LineError("timed out") from None
    except ResponseError as error:
        # At connecting: the database, for example. Later: the server is loading, read-only, without its cluster.
        raise (LineError if isinstance(error, _NODE_ERRORS) else AccessError)(_text(error)) from None
    except (RedisError, OSError, ValueError) as error:
        raise LineError(_text(error)) from None


def _text(error: Exception) -> str:
    """redis-py's messages name host and port, never the password."""
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def hash_slot(key: bytes) -> int:
    """Of a cluster, 0 to 16383."""
    return key_slot(key)


def pack(*words: bytes) -> bytes:
    """A command as it travels."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        parts += (b"$%d\r\n" % len(word), word, b"\r\n")
    return b"".join(parts)
