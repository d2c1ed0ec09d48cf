"""One process's line to a cache server: attach, ask, and give up in time.

Owns the gRPC channel, the session, the descriptor socket and the mapped segments, and the circuit. Everything that
can go wrong with the neighbour is turned into a value here: `None` (no answer), a shorter list, `False`. Nothing
above this file sees a gRPC error.

Invariants.
- Channels and threads are made in `start()`, in the process that uses them; never before a fork.
- A call is made only on a session that is attached and whose circuit is closed. The first call that meets a dead or
  slow server costs one deadline and opens the circuit; then nothing is asked until a probe of the background thread
  was answered in time. If calls fail though probes are answered, each time in a row keeps it open twice as long. A
  refusal is an answer: it opens nothing. One log line per change of state.
- A server that is silent for UNANSWERED_S is given up: a new channel looks its name up again, it may have moved.
- A child process that was forked has no session: channels and threads are its parent's. It may `start()` its own where
  grpc was told to prepare for that; elsewhere that is refused, for grpc would crash.
- A session's mapped memory stays valid, and its reserved slots stay its own, as long as anyone is `inside()` it: the
  descriptor socket is closed only when it was replaced *and* left by all (the server takes the slots back at the end
  of that socket).

Not here: which keys, which slots, which blocks; copying.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc
import numpy as np
import numpy.typing as npt

from connector.backoff import Backoff
from connector.halt import Halt
from protos import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION, kv_cache_pb2, kv_cache_pb2_grpc
from protos.channel import open_channel

logger = logging.getLogger("vllm.prefixd")

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

SLOT_GRANULE = 4096  # bytes of one page number in a slot address
CHUNK_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 16 << 20
ATTACH_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 1.0
RETRY_MIN_S = 0.2
RETRY_MAX_S = 2.0
OPEN_MAX_S = 5.0  # how long the circuit stays open at most when probes are answered and calls are not
UNANSWERED_S = 4.0  # without an answer to any probe
SEGMENT_WAIT_S = 1.0
WAIT_SHARE = 0.4  # of the call's deadline: how long the server may hold a lookup back for a lower tier
POPULATE_STEP_BYTES = 1 << 20  # the kernel holds the process's mmap lock for a step, and every malloc may wait for it
MADV_POPULATE_WRITE = 23

STORED = kv_cache_pb2.COMMIT_STATUS_STORED
ALREADY_PRESENT = kv_cache_pb2.COMMIT_STATUS_ALREADY_PRESENT
REFUSED = kv_cache_pb2.COMMIT_STATUS_REFUSED
DROPPED = kv_cache_pb2.COMMIT_STATUS_DROPPED

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel looks the name up again and has no old back-off
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A link that is dead without a word is noticed within 15 s. The server permits a ping every 5 s. grpc may take
    # another ping of its own, already under way and to be waited for a minute, for the keepalive's: hence the third.
    # Without the fourth it stops after two, for nothing else is sent on an idle line.
    ("grpc.keepalive_time_ms", 10000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
]
# Statuses with which a server that is well refuses what it was asked: no reason not to ask it something else.
REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)


@dataclass(frozen=True, slots=True)
class OtherGroup:
    """Another kind of blocks that every lookup asks for (`groups.py`): a namespace of its own, the same keys."""

    fingerprint: bytes
    num_shards: int
    window: int  # blocks right before a boundary that are needed; 0: all
    num_replicas: int


@dataclass(frozen=True, slots=True)
class Hello:
    """What a process says of itself when it attaches. `shard` None: the scheduler side.

    num_replicas: workers of the engine that hold the same bytes and read one shard. window: as `OtherGroup`'s, of the
    namespace itself.
    """

    engine_id: str
    client_name: str
    fingerprint: bytes
    namespace_text: str
    key_bytes: int
    num_shards: int
    shard: int | None = None
    payload_bytes: int = 0
    descriptor: bytes = b""
    replica: int = 0
    num_replicas: int = 1
    window: int = 0
    others: tuple[OtherGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """Of one more kind of blocks: as the fields of `LookupAnswer`, whose `hit_end` is theirs."""

    present: bytes
    hit_start: int
    window: int
    slots: U64
    generations: U32
    checksums: U64 | None = None

    def is_present(self, block: int) -> bool:
        return _has_bit(self.present, block)


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """What the server said; blocks [hit_start, hit_end) are promised until `deadline` (monotonic seconds).

    present: bit i, least significant first, says that block i is there. slots, generations:
    `[num_shards, hit_end - hit_start]`. others: as many as the hello's.
    """

    present: bytes
    hit_start: int
    hit_end: int
    lease_id: int
    deadline: float
    half_life: float
    slots: U64
    generations: U32
    workers_missing: bool
    server_epoch: int
    retry_at: float | None = None  # when more is expected to be there (monotonic seconds); None: this is all
    checksums: U64 | None = None  # the shape of `slots`, 0 where none was made; None: they were not asked for
    window: int = 0
    others: tuple[GroupAnswer, ...] = ()

    def is_present(self, block: int) -> bool:
        return _has_bit(self.present, block)

    def covers(self, local: int) -> bool:
        """Whether, beside blocks [0, local), all is promised that is needed to go on at `hit_end`."""
        runs = [(self.hit_start, self.window), *((other.hit_start, other.window) for other in self.others)]
        return all(start <= (max(local, self.hit_end - window) if window else local) for start, window in runs)


@dataclass(frozen=True, slots=True)
class Segment:
    """One mapped segment: `data` can be written, `generations` (one per granule) only read."""

    data: U8
    generations: U32


class Session:
    """One attachment. Made by the client's background thread, used by any thread of the process."""

    def __init__(self, channel: grpc.Channel, attached: kv_cache_pb2.Attached) -> None:
        self.channel = channel
        self.stub = kv_cache_pb2_grpc.KvCacheStub(channel)
        self.session_id: int = attached.session_id
        self.server_epoch: int = attached.server_epoch
        self.limits = attached.limits
        self.may_read = not attached.read_denied  # what the token permits; asking for more would be refused
        self.may_write = not attached.write_denied
        self.mapped = False
        self.closed = False
        self._segments: dict[int, Segment] = {}
        self._changed = threading.Condition()
        self._users = 0
        self._descriptors: socket.socket | None = None

    def segment(self, segment_id: int) -> Segment | None:
        """The segment, waiting a moment for its descriptor: the server sent it before it named its slots."""
        found = self._segments.get(segment_id)
        if found is not None:
            return found
        with self._changed:
            self._changed.wait_for(lambda: segment_id in self._segments or self.closed, SEGMENT_WAIT_S)
            return self._segments.get(segment_id)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Keeps mapped memory and reserved slots ours for the time of the block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        with self._changed:
            self._users += 1

    def leave(self) -> None:
        with self._changed:
            self._users -= 1
            self._let_go_if_unused()

    def open_descriptors(self, path: str, ticket: bytes) -> bool:
        """Connects the descriptor socket and starts mapping what comes. False if it is not to be had."""
        descriptors = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            descriptors.settimeout(ATTACH_TIMEOUT_S)
            descriptors.connect(path)
            descriptors.send(ticket)
            descriptors.settimeout(None)
        except OSError as error:
            descriptors.close()
            logger.warning("descriptor socket %s: %s; payloads go through streams instead", path, error)
            return False
        self._descriptors = descriptors
        self.mapped = True
        threading.Thread(target=self._map_segments, args=(descriptors,), name="prefixd-map", daemon=True).start()
        return True

    def forget_parent(self) -> None:
        """In a forked child: closes its copy of the descriptor socket, without a word to the server."""
        if self._descriptors is not None:
            self._descriptors.close()
            self._descriptors = None

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()
            self._let_go_if_unused()
        self.channel.close()

    def _let_go_if_unused(self) -> None:
        assert self._users >= 0, f"{self._users} users of a session"
        if self.closed and self._users == 0 and self._descriptors is not None:
            with contextlib.suppress(OSError):  # the server may have ended it first
                self._descriptors.shutdown(socket.SHUT_RDWR)
            self._descriptors.close()
            self._descriptors = None
            self._segments = {}

    def _map_segments(self, descriptors: socket.socket) -> None:
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(descriptors, 16, 2)
            except OSError:
                return  # closed by let_go
            if not packet:
                return
            try:
                segment_id, _, size = struct.unpack("<IIQ", packet)
                data_fd, generations_fd = fds
                data = np.frombuffer(mmap.mmap(data_fd, size), dtype=np.uint8)
                generations = np.frombuffer(
                    mmap.mmap(generations_fd, size // SLOT_GRANULE * 4, prot=mmap.PROT_READ), dtype="<u4"
                )
            finally:
                for fd in fds:
                    os.close(fd)
            with self._changed:
                self._segments[segment_id] = Segment(data, generations)
                self._changed.notify_all()
            _populate(data)


def _populate(data: U8) -> None:
    """Maps the pages ahead, off the interpreter lock: a first touch costs about 1.4 s per GiB otherwise."""
    libc = ctypes.CDLL(None, use_errno=True)
    for start in range(0, data.nbytes, POPULATE_STEP_BYTES):
        size = min(POPULATE_STEP_BYTES, data.nbytes - start)
        address = ctypes.c_void_p(data.ctypes.data + start)
        if libc.madvise(address, ctypes.c_size_t(size), MADV_POPULATE_WRITE) != 0:
            return  # an old kernel: pages are mapped when they are first used


class LookupCall:
    """A lookup under way. `answer()` is None until it came, and for ever if it failed or came after its deadline."""

    def __init__(
        self, client: "CacheClient", session: Session, future: grpc.Future, sent: float, timeout_s: float
    ) -> None:
        self._client = client
        self._session = session
        self._future = future
        self._sent = sent
        self._deadline = sent + timeout_s
        self.server_epoch = session.server_epoch

    def wait(self, timeout_s: float) -> None:
        with contextlib.suppress(grpc.FutureTimeoutError, grpc.RpcError, grpc.FutureCancelledError):
            self._future.result(timeout=timeout_s)

    def done(self) -> bool:
        """Answered, failed or out of time. By our own clock, too: grpc's threads may be late on a busy machine."""
        if self._future.done():
            return True
        if self._client.now() < self._deadline:
            return False
        self._future.cancel()
        return True

    def answer(self) -> LookupAnswer | None:
        if not self._future.done() or self._future.code() is not grpc.StatusCode.OK:
            return None
        reply = self._future.result()
        lease_s = reply.lease_ms / 1000
        hello = self._client.hello
        slots, generations, checksums = _promised(reply, hello.num_shards, reply.hit_end)
        groups = hello.others
        replies = list(reply.groups)
        if len(replies) != len(groups):  # a server that does not know of groups: what it promises is not enough
            replies = [kv_cache_pb2.KvGroupReply(hit_start=reply.hit_end)] * len(groups)
            slots, generations, checksums = slots[:, :0], generations[:, :0], None
        others = tuple(
            GroupAnswer(of.present, of.hit_start, group.window, *_promised(of, group.num_shards, reply.hit_end))
            for of, group in zip(replies, groups, strict=True)
        )
        return LookupAnswer(
            present=reply.present,
            hit_start=reply.hit_start,
            hit_end=reply.hit_start + slots.shape[1],
            lease_id=reply.lease_id,
            deadline=self._sent + lease_s,
            half_life=self._sent + lease_s / 2,
            slots=slots,
            generations=generations,
            workers_missing=reply.missing_workers > 0,
            server_epoch=self._session.server_epoch,
            checksums=checksums,
            retry_at=self._client.now() + reply.retry_ms / 1000 if reply.retry and reply.retry_ms else None,
            window=hello.window,
            others=others,
        )


def checksums_of(answer: LookupAnswer | GroupAnswer, columns: slice) -> bytes:
    """Of these blocks of a promise, as a `LoadSpec` has them: empty where none were asked for."""
    return b"" if answer.checksums is None else np.ascontiguousarray(answer.checksums[:, columns]).tobytes()


def _promised(
    reply: kv_cache_pb2.LookupReply | kv_cache_pb2.KvGroupReply, num_shards: int, hit_end: int
) -> tuple[U64, U32, U64 | None]:
    """(slots, generations, checksums), `[num_shards, hit_end - hit_start]`; nothing if they are not as many."""
    slots, generations = np.frombuffer(reply.slots, dtype="<u8"), np.frombuffer(reply.generations, dtype="<u4")
    shape = (num_shards, hit_end - reply.hit_start)
    if shape[1] <= 0 or slots.size != shape[0] * shape[1] or generations.size != slots.size:
        shape = (num_shards, 0)
        slots, generations = slots[:0], generations[:0]
    checksums = np.frombuffer(reply.checksums, dtype="<u8")
    has_checksums = checksums.size == shape[0] * shape[1] > 0
    return slots.reshape(shape), generations.reshape(shape), checksums.reshape(shape) if has_checksums else None


def _has_bit(present: bytes, block: int) -> bool:
    return block >> 3 < len(present) and bool(present[block >> 3] >> (block & 7) & 1)


class CacheClient:
    """The line itself. Thread-safe. `address`: `unix:///PATH` (slots are mapped) or `HOST:PORT` (streams)."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        call_timeout_s: float,
        transfer_timeout_s: float,
        wants_checksums: bool = False,
        open_channel: Callable[[str, list[tuple[str, int]]], grpc.Channel] = open_channel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_channel` is called for every attempt to attach, so that renewed certificates and tokens are used."""
        self.address = address
        self._wants_checksums = wants_checksums
        self._open_channel = open_channel
        self.hello = hello
        self._groups = [
            kv_cache_pb2.KvGroup(fingerprint=of.fingerprint, window=of.window, num_replicas=of.num_replicas)
            for of in hello.others
        ]
        self._call_timeout_s = call_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._clock = clock
        self._session: Session | None = None
        self._events: grpc.Call | None = None  # the session's Attach stream
        self._suspect = threading.Event()
        self._stopping = threading.Event()
        self._attached = threading.Event()
        self._thread: threading.Thread | None = None
        self._trouble = Backoff(RETRY_MIN_S, OPEN_MAX_S, clock)
        self._refused: set[tuple[int, grpc.StatusCode]] = set()  # session, status: one line each
        self._of_parent: list[object] = []  # of a forked child: neither used nor closed nor collected
        self.num_lookups = 0
        self.num_failed_calls = 0
        self.num_outages = 0  # how often a server that answered was lost or did not answer in time
        _clients.add(self)

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._of_parent and os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "0").lower() not in {"1", "true", "yes"}:
            raise RuntimeError(
                "a forked process can use grpc only if GRPC_ENABLE_FORK_SUPPORT=1 was set when its parent started"
            )
        self._thread = threading.Thread(target=self._keep_attached, name="prefixd-attach", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._suspect.set()
        session = self._session
        self._session = None
        if session is not None:
            session.close()

    def forget_parent(self) -> None:
        """In a child, right after the fork: whatever another thread held locked, or was about to do, is not here.

        The descriptor socket is closed: the server takes the parent's slots back when nobody has it open any more.
        """
        session, self._session = self._session, None
        if session is not None:
            session.forget_parent()
        self._of_parent += [session, self._events]
        self._events = None
        self._suspect, self._stopping, self._attached = threading.Event(), threading.Event(), threading.Event()
        self._thread = None

    def doubt(self) -> None:
        """The server is not to be asked anything before it has answered a probe."""
        session = self._session
        if session is not None and not session.closed:
            self._open_circuit()

    def session(self) -> Session | None:
        """The session to use now, or None: not attached, or the circuit is open."""
        session = self._session
        return None if session is None or session.closed or self._suspect.is_set() else session

    def wait_attached(self, timeout_s: float) -> bool:
        return self._attached.wait(timeout_s)

    def _keep_attached(self) -> None:
        pause = RETRY_MIN_S
        announced_absence = False
        while not self._stopping.is_set():
            session, why = self._attach()
            if session is None:
                if not announced_absence:
                    logger.warning("cache server %s: %s; running uncached, trying again", self.address, why)
                    announced_absence = True
                self._stopping.wait(pause)
                pause = min(pause * 2, RETRY_MAX_S)
                continue
            way = "mapped slots" if session.mapped else "streams"
            logger.info("attached to %s (%s, %s%s)", self.address, way, why, _denied(session))
            announced_absence = False
            pause = RETRY_MIN_S
            self._suspect.clear()
            self._session = session
            self._attached.set()
            reason = self._watch(session)
            self._session = None
            self._attached.clear()
            session.close()
            if not self._stopping.is_set():
                self.num_outages += 1
                logger.warning("lost cache server %s: %s; running uncached, trying again", self.address, reason)
                announced_absence = True

    def _attach(self) -> tuple[Session | None, str]:
        try:
            channel = self._open_channel(self.address, CHANNEL_OPTIONS)
        except (OSError, ValueError) as error:  # a file of ours: it may be there the next time
            return None, _reason(error)
        stub = kv_cache_pb2_grpc.KvCacheStub(channel)
        hello = self.hello
        unix_path = self.address.removeprefix("unix://") if self.address.startswith("unix://") else None
        request = kv_cache_pb2.AttachRequest(
            protocol_version=PROTOCOL_VERSION,
            min_protocol_version=MIN_PROTOCOL_VERSION,
            role=kv_cache_pb2.ROLE_SCHEDULER if hello.shard is None else kv_cache_pb2.ROLE_WORKER,
            engine_id=hello.engine_id,
            client_name=hello.client_name,
            pid=os.getpid(),
            namespace=kv_cache_pb2.Namespace(
                fingerprint=hello.fingerprint,
                text=hello.namespace_text,
                key_bytes=hello.key_bytes,
                num_shards=hello.num_shards,
            ),
            wants_descriptors=unix_path is not None and hello.shard is not None,
            num_replicas=hello.num_replicas,
        )
        if hello.shard is not None:
            request.shard.index = hello.shard
            request.shard.payload_bytes = hello.payload_bytes
            request.shard.descriptor = hello.descriptor
            request.shard.replica = hello.replica
        events = stub.Attach(request)
        alarm = threading.Timer(ATTACH_TIMEOUT_S, events.cancel)
        alarm.daemon = True
        alarm.start()
        try:
            first = next(events)
        except (grpc.RpcError, StopIteration) as error:
            channel.close()
            return None, _reason(error)
        finally:
            alarm.cancel()
        version = first.attached.protocol_version
        if not MIN_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
            events.cancel()
            channel.close()
            return None, f"it speaks protocol version {version}, this connector {PROTOCOL_VERSION} at most"
        session = Session(channel, first.attached)
        if request.wants_descriptors and first.attached.descriptor_ticket:
            assert unix_path is not None
            session.open_descriptors(unix_path + ".fd", first.attached.descriptor_ticket)
        self._events = events
        return session, f"server {first.attached.server_version}"

    def _watch(self, session: Session) -> str:
        """Returns, with the reason, when the session is over. Meanwhile probes whenever a call failed."""
        ended: list[str] = []
        events = self._events
        assert events is not None

        def read_events() -> None:
            try:
                for event in events:
                    if event.WhichOneof("event") == "closing":
                        ended.append(f"server is closing ({event.closing.reason})")
                        break
                else:
                    ended.append("stream ended")
            except grpc.RpcError as error:
                ended.append(_reason(error))
            if not session.closed:
                self._suspect.set()

        threading.Thread(target=read_events, name="prefixd-events", daemon=True).start()
        while True:
            self._suspect.wait()
            if ended or self._stopping.is_set():
                return ended[0] if ended else "closing"
            self.num_outages += 1
            logger.warning("cache server %s does not answer in time; running uncached", self.address)
            answered = self._clock()
            while not ended and not self._stopping.is_set():
                if self._stopping.wait(min(self._trouble.left_s(), RETRY_MIN_S)) or self._trouble.left_s():
                    continue
                started = self._clock()
                status = self._probe(session)
                now = self._clock()
                if status is grpc.StatusCode.FAILED_PRECONDITION:
                    return "the server no longer knows this session"
                if status is grpc.StatusCode.UNAUTHENTICATED:
                    return "the server does not accept our token any more"
                if status is grpc.StatusCode.OK:
                    answered = now
                    if now - started <= self._call_timeout_s:
                        logger.info("cache server %s answers again", self.address)
                        self._suspect.clear()
                        break
                elif now - answered > UNANSWERED_S:
                    return f"no answer for {now - answered:.0f} s"
                self._stopping.wait(RETRY_MIN_S)

    def _probe(self, session: Session) -> grpc.StatusCode:
        request = kv_cache_pb2.RenewRequest(session_id=session.session_id)
        try:
            session.stub.Renew(request, timeout=PROBE_TIMEOUT_S)
        except (grpc.RpcError, ValueError) as error:
            return error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNAVAILABLE
        return grpc.StatusCode.OK

    def _failed(self, error: object, session: Session) -> None:
        """A call failed: count it and open the circuit, unless it was refused for its contents, or is of the past."""
        self.num_failed_calls += 1
        code = error.code() if isinstance(error, grpc.Call) else None
        if code in REFUSALS:
            refused = (session.session_id, code)
            if refused not in self._refused:
                self._refused.add(refused)
                logger.error("cache server %s refuses (reported once): %s", self.address, _reason(error))
        elif session is self._session and not session.closed:
            self._open_circuit()

    def _open_circuit(self) -> None:
        self._trouble.failed()
        self._suspect.set()

    # --- scheduler side -------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock()

    def lookup(self, keys: bytes, first: int, *, lease: bool, recompute_us_per_block: float = 0.0) -> LookupCall | None:
        """Asks for the blocks named by `keys` (packed, chain order). None: there is nobody to ask.

        `recompute_us_per_block`, if measured, lets the server weigh a slow tier, or this line, against computing.
        """
        session = self.session()
        if session is None or (lease and not session.may_read):
            return None
        request = kv_cache_pb2.LookupRequest(
            session_id=session.session_id,
            keys=keys,
            first=first,
            lease=lease,
            wait_ms=int(self._call_timeout_s * 1000 * WAIT_SHARE),
            recompute_us_per_block=recompute_us_per_block,
            wants_checksums=self._wants_checksums,
            window=self.hello.window,
            groups=self._groups,
        )
        sent = self._clock()
        future = self._send(session, session.stub.Lookup, request)
        if future is None:
            return None
        self.num_lookups += 1
        return LookupCall(self, session, future, sent, self._call_timeout_s)

    def release(self, lease_ids: Sequence[int]) -> None:
        """Ends leases, without waiting. A lost release costs the server no more than the lease time."""
        session = self.session()
        if session is not None and lease_ids:
            self._send(
                session,
                session.stub.Release,
                kv_cache_pb2.ReleaseRequest(session_id=session.session_id, lease_ids=lease_ids),
            )

    def renew(self, lease_ids: Sequence[int]) -> None:
        """Prolongs leases by a lease time, without waiting."""
        session = self.session()
        if session is not None and lease_ids:
            self._send(
                session,
                session.stub.Renew,
                kv_cache_pb2.RenewRequest(session_id=session.session_id, lease_ids=lease_ids),
            )

    def _send(self, session: Session, method: grpc.UnaryUnaryMultiCallable, request: object) -> grpc.Future | None:
        try:
            future: grpc.Future = method.future(request, timeout=self._call_timeout_s)
        except ValueError as error:  # the channel was closed by the background thread a moment ago
            self._failed(error, session)
            return None
        future.add_done_callback(lambda ended: self._settle(ended, session))
        return future

    def _settle(self, future: grpc.Future, session: Session) -> None:
        if future.cancelled() or future.code() is not grpc.StatusCode.OK:
            self._failed(future, session)  # a future of a failed call is itself the error: code(), details()
        else:
            self._trouble.worked()

    # --- worker side: mapped slots --------------------------------------------------------------------------------

    def reserve(self, session: Session, num_slots: int) -> U64:
        """Addresses of up to `num_slots` slots to write into, ascending. Blocks for at most the call deadline."""
        if not session.may_write:
            return np.empty(0, dtype="<u8")
        request = kv_cache_pb2.ReserveRequest(session_id=session.session_id, num_slots=num_slots)
        try:
            reply = session.stub.Reserve(request, timeout=self._transfer_timeout_s)
        except (grpc.RpcError, ValueError) as error:
            self._failed(error, session)
            return np.empty(0, dtype="<u8")
        self._trouble.worked()
        return np.frombuffer(reply.slots, dtype="<u8")

    def commit(
        self, session: Session, slots: U64, keys: bytes, parents: bytes, depths: U32, checksums: U64 | None = None
    ) -> bytes | None:
        """Names written slots; `checksums` None: none were made. One status byte per slot, or None: nobody answered,
        the slots are in doubt."""
        request = kv_cache_pb2.CommitRequest(
            session_id=session.session_id,
            slots=slots.astype("<u8").tobytes(),
            keys=keys,
            parent_keys=parents,
            depths=depths.astype("<u4").tobytes(),
            checksums=b"" if checksums is None else checksums.astype("<u8").tobytes(),
        )
        try:
            reply = session.stub.Commit(request, timeout=self._transfer_timeout_s)
        except (grpc.RpcError, ValueError) as error:
            self._failed(error, session)
            return None
        self._trouble.worked()
        return bytes(reply.statuses)

    # --- worker side: streams -------------------------------------------------------------------------------------

    def put(
        self,
        session: Session,
        payloads: Sequence[memoryview],
        keys: bytes,
        parents: bytes,
        depths: U32,
        checksums: U64,
    ) -> bytes | None:
        """Sends payloads under their keys. One status byte per payload, or None if the stream broke."""
        if not session.may_write:
            return None
        header = kv_cache_pb2.PutHeader(
            session_id=session.session_id,
            keys=keys,
            parent_keys=parents,
            depths=depths.astype("<u4").tobytes(),
            checksums=checksums.astype("<u8").tobytes(),
        )

        def messages() -> Iterator[bytes]:
            yield kv_cache_pb2.PutChunk(header=header).SerializeToString()
            for index, payload in enumerate(payloads):
                for offset in range(0, len(payload), CHUNK_BYTES):
                    yield put_chunk_bytes(index, offset, payload[offset : offset + CHUNK_BYTES])

        call = session.channel.stream_unary(
            "/prefixd.v1.KvCache/Put",
            request_serializer=None,
            response_deserializer=kv_cache_pb2.PutReply.FromString,
        )
        try:
            reply = call(messages(), timeout=self._transfer_timeout_s)
        except (grpc.RpcError, ValueError) as error:
            self._failed(error, session)
            return None
        self._trouble.worked()
        return bytes(reply.statuses)

    def verify(self, session: Session, keys: bytes) -> None:
        """Tells the server that these payloads did not verify here; it looks at them itself."""
        try:
            session.stub.Verify(
                kv_cache_pb2.VerifyRequest(session_id=session.session_id, keys=keys), timeout=self._transfer_timeout_s
            )
        except (grpc.RpcError, ValueError) as error:
            self._failed(error, session)

    def get(
        self,
        session: Session,
        keys: bytes,
        lease_id: int,
        payloads: Sequence[memoryview],
        *,
        timeout_s: float | None = None,
        halt: Halt | None = None,
    ) -> list[int | None]:
        """Receives payloads into `payloads`, in place. Per key: its checksum (0: none made) if every byte came, else
        None. Ends after `timeout_s` (default: what a transfer may take), however many bytes trickle in, and soon after
        `halt` was set. Writes nothing after it has returned."""
        halt = halt or Halt()
        checksums: list[int | None] = [None] * len(payloads)
        request = kv_cache_pb2.GetRequest(session_id=session.session_id, keys=keys, lease_id=lease_id)
        call = session.channel.unary_stream(
            "/prefixd.v1.KvCache/Get",
            request_serializer=kv_cache_pb2.GetRequest.SerializeToString,
            response_deserializer=None,
        )
        try:
            stream = call(request, timeout=self._transfer_timeout_s if timeout_s is None else max(timeout_s, 0.0))
            with halt.ends(stream):
                self._receive(stream, payloads, checksums)
            self._trouble.worked()
        except (grpc.RpcError, ValueError) as error:
            if not halt.is_set:
                self._failed(error, session)
        return checksums

    @staticmethod
    def _receive(stream: grpc.Call, payloads: Sequence[memoryview], checksums: list[int | None]) -> None:
        received = [0] * len(payloads)
        pending: dict[int, int] = {}
        for message in stream:
            chunk = GetChunkView.parse(message)
            if chunk.missing:
                continue
            if chunk.index >= len(payloads):
                stream.cancel()
                raise ValueError(f"Get: payload {chunk.index} of {len(payloads)}")
            target = payloads[chunk.index]
            if chunk.offset != received[chunk.index] or chunk.offset + len(chunk.data) > len(target):
                stream.cancel()
                raise ValueError(f"Get: {len(chunk.data)} bytes at {chunk.offset} of {len(target)}, out of order")
            np.copyto(
                np.frombuffer(target, np.uint8)[chunk.offset : chunk.offset + len(chunk.data)],
                np.frombuffer(chunk.data, np.uint8),
            )
            if chunk.offset == 0:
                pending[chunk.index] = chunk.checksum
            received[chunk.index] += len(chunk.data)
            if received[chunk.index] == len(target):
                checksums[chunk.index] = pending[chunk.index]


_clients: "weakref.WeakSet[CacheClient]" = weakref.WeakSet()


def _forget_parent() -> None:
    for client in list(_clients):
        client.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)


def _denied(session: Session) -> str:
    return ("" if session.may_read else ", may not load") + ("" if session.may_write else ", may not save")


def _reason(error: object) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


# --- the wire format of the two data messages, by hand: one copy instead of three (0.85-1.0 of bare bytes, not 0.67) --


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def put_chunk_bytes(index: int, offset: int, data: memoryview) -> bytes:
    """PutChunk{index=2, offset=3, data=15} as protobuf writes it."""
    return b"".join((b"\x10", _varint(index), b"\x18", _varint(offset), b"\x7a", _varint(len(data)), data))


@dataclass(frozen=True, slots=True)
class GetChunkView:
    """A GetChunk whose `data` is a view of the received message."""

    index: int
    offset: int
    checksum: int
    missing: bool
    data: memoryview

    @classmethod
    def parse(cls, message: bytes) -> "GetChunkView":
        """Raises ValueError for anything that is not a GetChunk."""
        index = offset = checksum = missing = 0
        data = memoryview(b"")
        at = 0
        try:
            while at < len(message):
                tag, at = _read_varint(message, at)
                if tag == 0x08:
                    index, at = _read_varint(message, at)
                elif tag == 0x10:
                    offset, at = _read_varint(message, at)
                elif tag == 0x19:
                    (checksum,) = struct.unpack_from("<Q", message, at)
                    at += 8
                elif tag == 0x20:
                    missing, at = _read_varint(message, at)
                elif tag == 0x7A:
                    size, at = _read_varint(message, at)
                    data = memoryview(message)[at : at + size]
                    if len(data) != size:
                        raise ValueError("GetChunk: data is cut short")
                    at += size
                else:
                    at = _skip(message, tag, at)
        except (IndexError, struct.error) as error:
            raise ValueError("GetChunk: cut short") from error
        return cls(index, offset, checksum, bool(missing), data)


def _skip(message: bytes, tag: int, at: int) -> int:
    """Past a field that a newer server sends."""
    kind = tag & 7
    if kind == 0:
        return _read_varint(message, at)[1]
    if kind == 2:
        size, at = _read_varint(message, at)
    elif kind in (1, 5):
        size = 8 if kind == 1 else 4
    else:
        raise ValueError(f"GetChunk: unknown field tag {tag}")
    if at + size > len(message):
        raise ValueError("GetChunk: cut short")
    return at + size


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint is longer than 64 bits")
