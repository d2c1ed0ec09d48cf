"""Who is attached, and which slots without a name belong to whom.

A session passes through these states, never back:

    attached ──Attach stream ends──▶ lingering ──descriptor socket ends──▶ over
        └──────── (without a descriptor socket: at once) ─────────────────────┘

A *lingering* session may do nothing any more, but it keeps its reserved slots: its process has the segments mapped
and may be stopped in the middle of a copy, to wake up hours later. Only the end of the descriptor socket
proves that nobody can write there: a process that exits, however it dies, closes it. A stream that broke proves
nothing. For the same reason only a session with a descriptor socket may reserve.

Invariant: `reserved` of all sessions are disjoint, and each slot in it is in the state reserved in the arena.

Not here: sockets, streams, memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cache_server.arena import SlotClass
from cache_server.errors import SessionEnded, TooMany
from cache_server.namespaces import Namespace
from cache_server.tenants import READ, WRITE

MAX_SESSIONS = 1024  # a bound for mistakes, far above the processes of a node
TICKET_S = 10.0  # from Attach to the descriptor socket


@dataclass(frozen=True, slots=True)
class Worker:
    """What makes a session a worker's: the shard it reads and writes, and the class of that shard's payloads."""

    shard: int
    slot_class: SlotClass
    replica: int = 0  # which of the engine's workers that read this shard


@dataclass(slots=True, eq=False)
class Session:
    """One attached client process."""

    id: int
    engine_id: str
    client_name: str
    pid: int
    namespace: Namespace
    worker: Worker | None  # None: a scheduler side
    awaits_descriptors: bool  # it has a ticket that is neither used nor too old
    num_replicas: int = 1  # workers of its engine that read one shard
    is_attached: bool = True
    is_mapped: bool = False
    rights: int = READ | WRITE
    token_digest: str = field(default="", repr=False)  # of the token that it attached with
    reserved: dict[int, int] = field(default_factory=dict)  # slot → flush epoch in which it was reserved

    @property
    def tenant(self) -> str:
        """Whose it is: no other tenant's call may name it."""
        return self.namespace.tenant

    @property
    def reserved_bytes(self) -> int:
        """What it hoards."""
        return len(self.reserved) * self.worker.slot_class.slot_bytes if self.worker else 0

    @property
    def is_ready(self) -> bool:
        """It can load. One that still waits for its segments cannot: no reply may name a slot in them before.

        One that let its ticket lapse goes without segments: it streams.
        """
        return self.is_attached and not self.awaits_descriptors


class Sessions:
    """All sessions that are not over, and the tickets to their descriptor sockets."""

    def __init__(self, now: Callable[[], float], new_id: Callable[[], int], new_ticket: Callable[[], bytes]) -> None:
        self._now = now
        self._new_id = new_id
        self._new_ticket = new_ticket
        self._sessions: dict[int, Session] = {}
        self._tickets: dict[bytes, tuple[float, int]] = {}  # deadline, session id; oldest first

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def check_room(self, tenant: str = "", num_tenants: int = 1) -> None:
        """One more of this tenant may attach."""
        share = MAX_SESSIONS // num_tenants
        if sum(session.tenant == tenant for session in self._sessions.values()) >= share:
            raise TooMany(f"{share} sessions are attached")

    def open(
        self,
        engine_id: str,
        client_name: str,
        pid: int,
        namespace: Namespace,
        worker: Worker | None,
        awaits_descriptors: bool,
        num_replicas: int = 1,
    ) -> Session:
        """A new session, attached."""
        session = Session(
            self._new_id(), engine_id, client_name, pid, namespace, worker, awaits_descriptors, num_replicas
        )
        self._sessions[session.id] = session
        return session

    def attached(self, session_id: int) -> Session:
        """The session, if it may still do something."""
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionEnded(f"session {session_id:#018x} is unknown here: attach again")
        if not session.is_attached:
            raise SessionEnded(f"session {session_id:#018x} is not attached any more: attach again")
        return session

    def find(self, session_id: int) -> Session | None:
        """The session in whatever state, None when it is over."""
        return self._sessions.get(session_id)

    def remove(self, session: Session) -> None:
        """It is over."""
        session.is_attached = session.is_mapped = False
        del self._sessions[session.id]

    def of_namespace(self, namespace: Namespace) -> list[Session]:
        """Those that are not over, lingering ones included."""
        return [session for session in self._sessions.values() if session.namespace is namespace]

    @property
    def num_mapped(self) -> int:
        """Those that may have slots."""
        return sum(session.is_mapped for session in self._sessions.values())

    def mapped(self, slot_class: SlotClass) -> list[Session]:
        """Those that have to hear of the segments of a class."""
        return [
            session
            for session in self._sessions.values()
            if session.is_mapped and session.worker is not None and session.worker.slot_class is slot_class
        ]

    def missing_workers(self, asking: Session) -> int:
        """Workers of the asking session's engine that are not ready."""
        return self.missing_workers_of(asking.engine_id, asking.namespace, asking.num_replicas)

    def missing_workers_of(self, engine_id: str, namespace: Namespace, num_replicas: int) -> int:
        """The same for one namespace of an engine that has several; each shard is read by `num_replicas` workers."""
        ready = {
            (session.worker.shard, session.worker.replica)
            for session in self._sessions.values()
            if session.worker is not None
            and session.is_ready
            and session.engine_id == engine_id
            and session.namespace is namespace
        }
        return namespace.num_shards * num_replicas - len(ready)

    def streamed_payload_bytes(self, asking: Session) -> int:
        """The largest payload that a worker of the asking session's engine gets through a stream; 0: all are mapped."""
        return max(
            (
                session.worker.slot_class.payload_bytes
                for session in self._sessions.values()
                if session.worker is not None
                and not session.is_mapped
                and session.engine_id == asking.engine_id
                and session.namespace is asking.namespace
            ),
            default=0,
        )

    # --- tickets --------------------------------------------------------------------------------------------

    def issue_ticket(self, session: Session) -> bytes:
        """Good for one descriptor socket, for TICKET_S."""
        self.expire_tickets()
        ticket = self._new_ticket()
        self._tickets[ticket] = (self._now() + TICKET_S, session.id)
        return ticket

    def redeem(self, ticket: bytes) -> Session | None:
        """The attached session of the ticket, which is mapped from now on. None: no such ticket."""
        self.expire_tickets()
        _, session_id = self._tickets.pop(ticket, (0.0, 0))
        session = self._sessions.get(session_id)
        if session is None or not session.is_attached:
            return None
        session.awaits_descriptors = False
        session.is_mapped = True
        return session

    def expire_tickets(self) -> None:
        """Forget those that are too old."""
        now = self._now()
        while self._tickets:
            ticket = next(iter(self._tickets))
            deadline, session_id = self._tickets[ticket]
            if deadline > now:
                break
            del self._tickets[ticket]
            if session_id in self._sessions:
                self._sessions[session_id].awaits_descriptors = False
