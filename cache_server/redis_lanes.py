"""What threads do for the tier: operations, the work that waits for a node, and the lanes that carry it out.

    event loop                              one thread per connection (*lane*)
    ─────────────────────────────           ──────────────────────────────────────────────────────────────
    Work.put(operation) ──────────────────▶ up to WINDOW commands in flight; replies are read in order,
    await operation.future ◀──call_soon──── payloads straight into their slot

Why threads and not the loop: a payload is received and summed outside the interpreter lock, so lookups do not wait for
bytes. Each node has two kinds of lanes: one for questions (short commands, so that none waits behind a payload), and
some for payloads, where loads go before saves.

Invariants:
  * an operation that a lane has taken is finished by that lane, once nothing can touch its buffer any more. So whoever
    awaits a load owns the slot again when it is answered. What no lane has taken can be refused at any time
    (`Work.clear`);
  * a connection on which anything went wrong is dropped, and every operation in flight on it fails: no reply can
    be read by the next caller.

Not here: the loop's side (`redis_tier.py`), the bytes on the wire (`redis_line.py`).
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from cache_server import value_format
from cache_server.redis_config import RedisAddress, RedisConfig
from cache_server.redis_line import ErrorReply, Line, LineError, MovedError, UnusableReply, pack, translated
from cache_server.values import HeldPayload, PayloadName

WINDOW: Final = 4  # commands in flight per connection; 4 GETs in flight were 2-3 times faster than one MGET
PROBE_BYTES: Final = 1 << 20

ABSENT: Final = "absent"  # load: there is no such value
CORRUPT: Final = "corrupt"  # load: there is one, and it is not what it should be
STORED: Final = "stored"  # save
FULL: Final = "full"  # save: Redis has no memory and does not evict
REJECTED: Final = "rejected"  # save: Redis answered any other error
CHANGED: Final = "changed"  # save: the slot was given to something else before it was sent


class TierDownError(Exception):
    """The tier did not answer, or not as it should: nobody knows whether the command was carried out."""


class Operation:
    """One or more commands and what comes of them. Made and finished on the loop, carried out by a lane."""

    num_bytes = 0
    unusable: object = False  # what comes of it when its reply is not worth reading
    unsent: object = None

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def send(self, line: Line) -> bool:
        """False: nothing had to be sent any more, `unsent` comes of it, and `read` is not called."""
        raise NotImplementedError

    def read(self, line: Line) -> Any:
        """The replies, as what the caller gets."""
        raise NotImplementedError

    def finish(self, result: Any) -> None:
        """On the loop."""
        if self.future.done():
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
            self.future.exception()  # who asked may be gone
        else:
            self.future.set_result(result)


class Ask(Operation):
    """Short commands, sent together."""

    def __init__(self, commands: Sequence[bytes]) -> None:
        super().__init__()
        self._packed = b"".join(commands)
        self._count = len(commands)

    def send(self, line: Line) -> bool:
        line.send([self._packed])
        return True

    def read(self, line: Line) -> list[Any]:
        line.expect(len(self._packed))
        return [line.reply() for _ in range(self._count)]


class Load(Operation):
    """GET of one value, its payload into a slot."""

    unusable = CORRUPT

    def __init__(self, key: bytes, name: PayloadName, target: npt.NDArray[np.uint8]) -> None:
        super().__init__()
        assert len(target) == name.num_bytes, f"{len(target)} bytes for a payload of {name.num_bytes}"
        self._key = key
        self._name = name
        self._target = target
        self.num_bytes = name.num_bytes

    def send(self, line: Line) -> bool:
        line.send([pack(b"GET", self._key)])
        return True

    def read(self, line: Line) -> int | str:
        """The checksum, ABSENT or CORRUPT."""
        line.expect(self.num_bytes)
        replies = line.replies
        length = replies.read_bulk_length()
        if length is None:
            return ABSENT
        if isinstance(length, Exception):
            line.checked(length)
            return CORRUPT  # a value of another type
        if length != value_format.value_bytes(self._name):
            line.expect(length)
            replies.skip(length)
            replies.read_end()
            return CORRUPT
        header = bytearray(value_format.HEADER_BYTES)
        replies.read_into(memoryview(header))
        checksum = value_format.read_checksum(self._name, header)
        if checksum is None:
            replies.skip(self.num_bytes)
            replies.read_end()
            return CORRUPT
        hasher = xxhash.xxh3_64()
        replies.read_into(self._target.data, hasher.update)
        replies.read_end()
        return checksum if hasher.intdigest() == checksum else CORRUPT


class Save(Operation):
    """SET of one value from its slot."""

    unsent = CHANGED

    def __init__(self, key: bytes, name: PayloadName, held: HeldPayload, ttl_ms: int) -> None:
        super().__init__()
        self._key = key
        self._name = name
        self._held = held
        self._ttl_ms = ttl_ms
        self.checksum = held.checksum
        self.num_bytes = name.num_bytes

    def send(self, line: Line) -> bool:
        if not self._held.is_intact:
            return False
        payload = self._held.bytes.data
        num_bytes = value_format.HEADER_BYTES + len(payload)
        # Ahead of the value, and not together with it: Redis reads a long value straight into its place if it has
        # read its length before, and moves it there if it has not. While we sum it has the time.
        line.send([b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(self._key), self._key, num_bytes)])
        if not self.checksum:
            self.checksum = xxhash.xxh3_64_intdigest(payload)
        ttl = b"%d" % self._ttl_ms
        line.send([self._header(), payload, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)])
        return True

    def _header(self) -> bytes:
        """The checksum is the payload's only if the slot was still its when it was made. Whatever happens to the slot
        from here on makes a value that does not verify; what happened before must make one too, for Redis waits for a
        value.
        """
        if not self._held.is_intact:
            return bytes(value_format.HEADER_BYTES)
        return value_format.pack_header(self._name, self.checksum)

    def read(self, line: Line) -> str:
        line.expect(self.num_bytes)
        reply = line.reply()
        if isinstance(reply, ErrorReply):
            return FULL if reply.is_out_of_memory else REJECTED
        return STORED


Message = tuple[Callable[[Any], None], Any]


class Outbox:
    """What lanes have to say to the loop. Waking it up costs a system call, so it is woken once for all that waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Message] = deque()
        self._lock = threading.Lock()
        self._is_called = False

    def tell(self, *messages: Message) -> None:
        """Call them on the loop, in the order of telling. From any thread."""
        with self._lock:
            self._waiting.extend(messages)
            if self._is_called:
                return
            self._is_called = True
        with suppress(RuntimeError):  # the loop may be gone: the process ends
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, deque[Message]()
            self._is_called = False
        for function, argument in waiting:
            function(argument)


class Work:
    """What waits for the lanes of one kind and node. Filled on the loop, emptied by threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._urgent: deque[Operation] = deque()
        self._other: deque[Operation] = deque()
        self._is_closed = False

    def put(self, operation: Operation, *, is_urgent: bool) -> None:
        with self._condition:
            (self._urgent if is_urgent else self._other).append(operation)
            self._condition.notify()

    def put_back(self, operations: Sequence[Operation]) -> None:
        """To the front: they were taken, and nothing was done."""
        with self._condition:
            self._urgent.extendleft(reversed(operations))
            self._condition.notify(len(operations))

    def wait(self) -> bool:
        """Until there is something to do. False: there will not be."""
        with self._condition:
            while not (self._urgent or self._other or self._is_closed):
                self._condition.wait()
            return not self._is_closed

    def take(self) -> Operation | None:
        with self._condition:
            for waiting in (self._urgent, self._other):
                if waiting:
                    return waiting.popleft()
            return None

    def clear(self) -> list[Operation]:
        """Everything that no lane has taken."""
        with self._condition:
            left = [*self._urgent, *self._other]
            self._urgent.clear()
            self._other.clear()
            return left

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()


class _Lane(threading.Thread):
    """One connection and its thread. A daemon thread: a name that does not resolve must not hold up our exit."""

    def __init__(self, line: Line, work: Work, outbox: "Outbox", failed: Callable[[str], None]) -> None:
        super().__init__(name=f"redis-{line.address}", daemon=True)
        self._line = line
        self._work = work
        self._tell = outbox.tell
        self._finished: list[Message] = []  # not told yet
        self._failed = failed  # on the loop: why the node cannot be used

    def run(self) -> None:
        while self._work.wait():
            try:
                self._line.connect()
            except (LineError, MovedError, UnusableReply) as error:
                self._line.drop()
                failure = TierDownError(str(error))
                self._tell(*((operation.finish, failure) for operation in self._work.clear()))
                self._tell((self._failed, str(error)))
                continue
            self._serve()
        self._line.drop()

    def _serve(self) -> None:
        """Until nothing waits and nothing is in flight, or the connection is of no use."""
        in_flight: deque[Operation] = deque()
        try:
            with translated():
                self._exchange(in_flight)
        except UnusableReply:
            self._line.drop()
            operation = in_flight.popleft()
            self._tell((operation.finish, operation.unusable))
            self._work.put_back(in_flight)
        except MovedError as error:
            self._line.drop()
            self._tell(*((operation.finish, error) for operation in in_flight))
        except LineError as error:
            self._line.drop()
            failure = TierDownError(str(error))
            self._tell(*((operation.finish, failure) for operation in in_flight))
            self._tell((self._failed, str(error)))

    def _exchange(self, in_flight: deque[Operation]) -> None:
        try:
            self._exchange_telling(in_flight)
        finally:
            self._tell(*self._finished)
            self._finished.clear()

    def _exchange_telling(self, in_flight: deque[Operation]) -> None:
        """Results are told some at a time, but never held back while the next reply has not begun to arrive: each
        telling makes the loop run, and while it runs this thread waits for the interpreter lock.
        """
        while True:
            while len(in_flight) < WINDOW and (operation := self._work.take()):
                # Before sending: from now on it is ours to finish, whatever happens.
                in_flight.append(operation)
                if not operation.send(self._line):
                    in_flight.pop()
                    self._finished.append((operation.finish, operation.unsent))
            if not in_flight:
                return
            if len(self._finished) >= WINDOW or (self._finished and not self._line.is_readable):
                self._tell(*self._finished)
                self._finished.clear()
            result = in_flight[0].read(self._line)
            self._finished.append((in_flight.popleft().finish, result))


class Node:
    """One Redis server: a lane for questions, some for payloads."""

    def __init__(
        self, address: RedisAddress, config: RedisConfig, outbox: "Outbox", failed: Callable[[str], None]
    ) -> None:
        self.address = address
        self.questions = Work()
        self.payloads = Work()
        for work in [self.questions, *[self.payloads] * config.connections]:
            _Lane(Line(address, config), work, outbox, failed).start()

    def clear(self) -> list[Operation]:
        return [*self.questions.clear(), *self.payloads.clear()]

    def close(self) -> None:
        self.questions.close()
        self.payloads.close()


class Probe(Operation):
    """GET of a value of PROBE_BYTES, into nowhere. True: it had that length."""

    num_bytes = PROBE_BYTES

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self._key = key

    def send(self, line: Line) -> bool:
        line.send([pack(b"GET", self._key)])
        return True

    def read(self, line: Line) -> bool:
        line.expect(self.num_bytes)
        length = line.replies.read_bulk_length()
        if not isinstance(length, int):
            return False
        line.replies.skip(length)
        line.replies.read_end()
        return length == PROBE_BYTES
