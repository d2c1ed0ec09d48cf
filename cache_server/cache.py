"""The story of the cache: blocks get names, names are looked up and promised, and when memory is full some go.

A key names its payload for ever; the first commit wins. So nothing here ever compares versions, and a block that
is not here is never wrong, only absent.

    attach ─▶ lookup ─▶ (lease) ─▶ the client copies or `get`s ─▶ release
           ─▶ reserve ─▶ the client copies ─▶ commit                    or  put
           ─▶ lookup ─▶ tail: what is absent ─▶ promoted from the tier below ─▶ lookup

Everything is synchronous, in domain values, on one thread: each method sees and leaves a consistent state, and
whoever calls it may be a coroutine, a test or a benchmark. Time and random ids are passed in.

Memory is found in this order: free slots of the class; a segment that nobody uses; more memory while the budget
has room (later: `retry`); an empty segment of another class; then blocks have to go. A class that has less than its
share takes the coldest segment from one that has more than its share; else it evicts its own oldest blocks. A class
without sessions has no share to defend, but is robbed of blocks only that are older than the robber's own.

Tiers below are told by nobody here. What they have to hear of is in `take_untold`: payloads that got a name, and
payloads that are used again after `tell_every_s`, so that they are not forgotten there while they are hot here.

Not here: threads, sockets, protobuf, the tiers themselves. New segments are touched by the server (`Arena`), which
asks `arena.wants_segment`. Cuts that clients have to hear of are in `arena.take_assigned()`.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
import numpy.typing as npt

from cache_server import group_lookup
from cache_server.arena import NO_SLOTS, Arena, Cut, SlotClass, Slots
from cache_server.errors import InvalidRequest, Mismatch, RequestError
from cache_server.index import Index, Rows
from cache_server.leases import LEASED_SHARE, Leases
from cache_server.metrics import Counters
from cache_server.namespaces import Namespace, ShardLayout, check_attachment
from cache_server.operations import Operations
from cache_server.sessions import Session, Sessions, Worker
from cache_server.tenants import kept_as
from cache_server.values import (
    ALREADY_PRESENT,
    DROPPED,
    REFUSED,
    STORED,
    Attachment,
    Blocks,
    GroupQuestion,
    HeldPayload,
    LookupResult,
    NamespaceFigures,
    PayloadName,
    PutSlot,
)

MAX_LOOKUP_SLOTS = 256 * 1024  # num_shards times blocks that one lookup promises: its reply stays below 4 MiB
MAX_RESERVE_SLOTS = 4096  # per call: room for more may mean evicting as many blocks, 7 us each, while lookups wait
MAX_COMMIT_BLOCKS = 16384  # per call: 5 us each
HOARD_SHARE = 0.25  # of the budget, per session
RESERVED_SHARE = 0.5  # of the budget: when sessions hoard more together, each gets its part of this and no more
_NO_ROWS: Rows = np.empty(0, dtype=np.int64)
TAKE_EVERY_S = 1.0  # how often a class looks for a cold segment of others after it found none


@dataclass(frozen=True, slots=True)
class Tail:
    """What a lookup asked for and memory does not have: keys from the first absent block on, chained."""

    namespace: Namespace
    keys: list[bytes]
    parent_key: bytes  # of the first of them
    depth: int  # of the first of them
    is_chain: bool = True  # else each of them stands alone: it is needed whether or not those before it are there


class Cache:
    """Namespaces, sessions and leases over one arena."""

    def __init__(
        self,
        arena: Arena,
        now: Callable[[], float] = monotonic,
        new_id: Callable[[], int] = lambda: secrets.randbits(64) or 1,
        new_ticket: Callable[[], bytes] = lambda: secrets.token_bytes(16),
        tell_every_s: float | None = None,
    ) -> None:
        """`tell_every_s`: how often a tier below has to hear of a block that is used; None: there is no such tier."""
        self.arena = arena
        self.counters = Counters()
        self.operations = Operations(now)
        self.sessions = Sessions(now, new_id, new_ticket)
        self.leases = Leases(now, new_id)
        self._now = now
        self._namespaces: dict[bytes, Namespace] = {}
        self._age = 0  # of the youngest use so far
        self._tell_every_s = tell_every_s
        self._untold: list[PayloadName] = []
        self._num_tenants = 1

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Bytes per tenant; none: there are no tenants. Blocks of tenants that are none any more go."""
        self.arena.set_quotas(quotas)
        self._num_tenants = max(len(quotas), 1)
        for namespace in self.namespaces:
            if namespace.tenant not in (quotas or {""}):
                self.flush(namespace.fingerprint)
                self._forget_if_idle(namespace)

    @property
    def max_payload_bytes(self) -> int:
        """A payload lies in one segment."""
        return self.arena.segment_bytes

    def max_reserved_bytes(self, slot_class: SlotClass | None = None) -> int:
        """What one session may hoard; at least one slot."""
        budget_bytes = self.arena.budget_of(slot_class.tenant) if slot_class else self.arena.budget_bytes
        share = int(budget_bytes * HOARD_SHARE)
        return max(share, slot_class.slot_bytes) if slot_class else share

    # --- sessions -------------------------------------------------------------------------------------------

    def attach(self, client: Attachment) -> Session:
        """A session in the client's namespace; the first of a namespace or shard fixes what it looks like."""
        kept = kept_as(client.tenant, client.fingerprint)
        namespace = self._namespaces.get(kept)
        try:
            check_attachment(client, namespace, self.max_payload_bytes)
            self.sessions.check_room(client.tenant, self._num_tenants)
        except RequestError:
            self.counters.sessions_refused += 1
            raise
        if namespace is None:
            index = Index(client.key_bytes, client.num_shards)
            namespace = Namespace(
                kept, client.text, index, tenant=client.tenant, given=client.fingerprint, created_at=self._now()
            )
            self._namespaces[kept] = namespace
        worker = None
        if client.shard is not None:
            slot_class = self.arena.slot_class(kept, client.shard.payload_bytes, client.tenant)
            slot_class.num_sessions += 1
            namespace.shards.setdefault(client.shard.index, ShardLayout(client.shard.descriptor, slot_class))
            worker = Worker(client.shard.index, slot_class, client.shard.replica)
        self.counters.sessions_attached += 1
        namespace.used_at = self._now()
        session = self.sessions.open(
            client.engine_id,
            client.client_name,
            client.pid,
            namespace,
            worker,
            client.wants_descriptors and worker is not None,
            client.num_replicas,
        )
        session.rights, session.token_digest = client.rights, client.token_digest
        return session

    def detach(self, session: Session) -> None:
        """Its Attach stream ended. With segments mapped it lingers, else it is over."""
        session.is_attached = False
        if not session.is_mapped:
            self._end_session(session)

    def unmap(self, session: Session) -> None:
        """Its descriptor socket ended: no process can write into its slots any more, and the session is over."""
        session.is_attached = False
        self._end_session(session)

    def _end_session(self, session: Session) -> None:
        if self.sessions.find(session.id) is not session:
            return
        self.sessions.remove(session)
        self.counters.sessions_ended += 1
        self.counters.reserved_slots_returned += len(session.reserved)
        if session.reserved:
            self.arena.give_back(np.fromiter(session.reserved, np.uint64, len(session.reserved)))
            session.reserved.clear()
        if session.worker is not None:
            session.worker.slot_class.num_sessions -= 1
        self._forget_if_idle(session.namespace)

    def _forget_if_idle(self, namespace: Namespace) -> None:
        """Without sessions, blocks and half-written slots nothing is left to remember."""
        if len(namespace.index) or self.sessions.of_namespace(namespace):
            return
        if self._namespaces.get(namespace.fingerprint) is not namespace:
            return
        if not all(slot_class.is_empty for slot_class in namespace.slot_classes):
            return
        for slot_class in namespace.slot_classes:
            self.arena.close_class(slot_class)
        del self._namespaces[namespace.fingerprint]

    # --- lookup and leases ----------------------------------------------------------------------------------

    def lookup(
        self,
        session_id: int,
        packed_keys: bytes,
        first: int,
        lease: bool,
        min_hit_blocks: int = 0,
        max_hit_blocks: int | None = None,
    ) -> LookupResult:
        """Which blocks are complete, and a promise for the run around block `first`.

        From `first` on at most `max_hit_blocks` are promised, and fewer than `min_hit_blocks` are not worth it.
        """
        session = self.sessions.attached(session_id)
        index, rows, present, start, end = self._find(session.namespace, packed_keys, first)
        num_keys = len(rows)
        self.check_distinct(rows[start:end])

        missing_workers = self.sessions.missing_workers(session)
        retry = False
        if missing_workers:
            start = end = first
            self.counters.lookups_without_workers += 1
        elif lease and end > start:
            if max_hit_blocks is not None:
                end = min(end, first + max_hit_blocks)
            if first < end < first + min_hit_blocks or (end == first and max_hit_blocks == 0):
                start = end = first
                self.counters.gate_stream_shut += 1
            start, end, retry = self._cap(session.namespace, rows, start, first, end)
            self.tell_of_use(session.namespace, rows[start:end])
        promised = rows[start:end]
        lease_id = 0
        if lease and len(promised):
            lease_id = self.leases.grant(session.id, index, promised)
            self.counters.leases_granted += 1
        session.namespace.used_at = self._now()
        if lease:
            self.count_lookup(num_keys, first, end, (end - first) * session.namespace.payload_bytes)
        else:
            self.count_presence(present)
        return LookupResult(
            present,
            start,
            end,
            lease_id,
            index.slots[promised if lease_id else _NO_ROWS].T,
            index.generations[promised if lease_id else _NO_ROWS].T,
            index.checksums[promised if lease_id else _NO_ROWS].T,
            retry,
            missing_workers,
        )

    def count_lookup(self, num_keys: int, first: int, end: int, num_bytes: int) -> None:
        """One that asked for a promise; of num_bytes that the engine lacked."""
        self.counters.lookups += 1
        self.counters.lookups_hit += end > first
        self.counters.lookups_missed += end == first
        self.counters.lookup_asked_blocks += num_keys - first
        self.counters.lookup_hit_blocks += end - first
        self.counters.lookup_missed_blocks += num_keys - end
        self.counters.promised_bytes += num_bytes

    def count_presence(self, present: npt.NDArray[np.bool_]) -> None:
        """One that asked for no promise."""
        self.counters.presence_lookups += 1
        self.counters.presence_asked_blocks += len(present)
        self.counters.presence_present_blocks += int(np.count_nonzero(present))

    def lookup_groups(
        self,
        session_id: int,
        packed_keys: bytes,
        first: int,
        lease: bool,
        window: int,
        groups: Sequence[GroupQuestion],
        min_hit_blocks: int = 0,
        max_hit_blocks: int | None = None,
    ) -> LookupResult:
        """As `lookup`, where going on at a boundary needs a window only, or blocks of several kinds."""
        session = self.sessions.attached(session_id)
        return group_lookup.lookup(
            self, session, packed_keys, first, lease, window, groups, min_hit_blocks, max_hit_blocks
        )

    def namespace(self, fingerprint: bytes) -> Namespace | None:
        """None: no client of it was here yet."""
        return self._namespaces.get(fingerprint)

    def reach(self, session_id: int, packed_keys: bytes, first: int) -> int:
        """The end of the run of complete blocks around block `first`."""
        return self._find(self.sessions.attached(session_id).namespace, packed_keys, first)[4]

    def tail(self, session_id: int, packed_keys: bytes, first: int, group: GroupQuestion | None = None) -> Tail | None:
        """What this lookup would not find, for a session whose workers are all here. None: nothing, or they are not.

        What it would find is used now: whatever comes to extend it must not push it out. `group`: of that kind.
        """
        session = self.sessions.attached(session_id)
        namespace: Namespace | None = session.namespace
        num_replicas = session.num_replicas
        if group is not None:
            namespace = self._namespaces.get(kept_as(session.namespace.tenant, group.fingerprint))
            num_replicas = group.num_replicas
        if namespace is None:
            return None
        index, rows, _, _, end = self._find(namespace, packed_keys, first)
        if end == len(rows) or self.sessions.missing_workers_of(session.engine_id, namespace, num_replicas):
            return None
        size = index.key_bytes
        keys: list[bytes] = np.frombuffer(packed_keys[end * size :], dtype=f"V{size}").tolist()
        parent_key = packed_keys[(end - 1) * size : end * size] if end else bytes(size)
        return Tail(namespace, keys, parent_key, end, is_chain=group is None or not group.window)

    def _find(
        self, namespace: Namespace, packed_keys: bytes, first: int
    ) -> tuple[Index, Rows, npt.NDArray[np.bool_], int, int]:
        """Rows, which of them are complete, and the run [start, end) around `first`; up to its end they are used."""
        index = namespace.index
        check_packed("keys", packed_keys, index.key_bytes)
        num_keys = len(packed_keys) // index.key_bytes
        if first > num_keys:
            raise InvalidRequest(f"first is {first}, but there are {num_keys} keys")
        self.expire()
        rows = index.find(packed_keys)
        present = index.complete[rows]
        start, end = _run_around(present, first)
        self.touch(index, rows[:end])
        return index, rows, present, start, end

    def _cap(self, namespace: Namespace, rows: Rows, start: int, first: int, end: int) -> tuple[int, int, bool]:
        """Shorten [start, end) to what may still be leased: what the engine has itself goes first, then the tail."""
        index = namespace.index
        if (end - start) * index.num_shards > MAX_LOOKUP_SLOTS:
            start = first
            end = min(end, first + MAX_LOOKUP_SLOTS // index.num_shards)
        room = self.leasable_blocks(namespace)
        fresh = np.cumsum(index.num_leases[rows[start:end]] == 0)
        if len(fresh) == 0 or fresh[-1] <= room:
            return start, end, False
        fresh = np.cumsum(index.num_leases[rows[first:end]] == 0)
        self.counters.leases_capped += 1
        return first, first + int(np.searchsorted(fresh, max(room, 0), side="right")), True

    def leasable_blocks(self, namespace: Namespace) -> int:
        """How many more blocks may be promised."""
        return self.leasable_bytes_of(namespace.tenant) // namespace.block_bytes

    def leasable_bytes_of(self, tenant: str) -> int:
        """How much more may be promised to a tenant; what others have leased does not count."""
        return int(self.arena.budget_of(tenant) * LEASED_SHARE) - self._leased_bytes_of(tenant)

    def release(self, session_id: int, lease_ids: Iterable[int]) -> None:
        """End leases of this session."""
        session = self.sessions.attached(session_id)
        self.expire()
        self.counters.leases_released += self.leases.release(session.id, lease_ids)

    def renew(self, session_id: int, lease_ids: Iterable[int]) -> list[int]:
        """Prolong leases of this session; returns those that live on."""
        session = self.sessions.attached(session_id)
        self.expire()
        renewed = self.leases.renew(session.id, lease_ids)
        self.counters.leases_renewed += len(renewed)
        return renewed

    def expire(self) -> None:
        """End what is past its deadline. Called by each operation that depends on it, and by the server's timer."""
        self.counters.leases_expired += self.leases.expire()
        self.sessions.expire_tickets()

    # --- reserve and commit: the client writes --------------------------------------------------------------

    def reserve(self, session_id: int, num_slots: int) -> tuple[Slots, bool]:
        """Slots for the session to write into, and whether asking again soon may bring more."""
        session = self.sessions.attached(session_id)
        worker = _worker_of(session)
        if not session.is_mapped:
            raise Mismatch(
                "slots are reserved by sessions with a descriptor socket only: "
                "without one the server could not see when their writer is gone"
            )
        slot_class = worker.slot_class
        room = (self.max_reserved_bytes(slot_class) - session.reserved_bytes) // slot_class.slot_bytes
        num_now = min(num_slots, room, MAX_RESERVE_SLOTS)
        # Else a few that came first, and rest on what they have, leave nothing to those that come later.
        share = int(self.arena.budget_bytes * RESERVED_SHARE)
        if self.arena.reserved_bytes + num_now * slot_class.slot_bytes > share:
            part = max(share // self.sessions.num_mapped, slot_class.slot_bytes) - session.reserved_bytes
            room = min(room, max(part, 0) // slot_class.slot_bytes)
            num_now = min(num_now, room)
        slots, retry = self._find_room(session.namespace, slot_class, num_now)
        session.reserved.update(dict.fromkeys(slots.tolist(), session.namespace.flush_epoch))
        self.counters.reserved_slots += len(slots)
        self.counters.reserve_short += len(slots) < num_slots
        return slots, retry or num_now < min(num_slots, room)

    def commit(self, session_id: int, slots: list[int], blocks: Blocks) -> bytes:
        """Give names to written slots. A status per block; slots that got no name stay the session's."""
        session = self.sessions.attached(session_id)
        worker = _worker_of(session)
        if len(slots) > MAX_COMMIT_BLOCKS:
            raise InvalidRequest(f"{len(slots)} blocks in one commit; at most {MAX_COMMIT_BLOCKS}")
        if len(slots) != len(blocks.keys):
            raise InvalidRequest(f"{len(slots)} slots for {len(blocks.keys)} keys")
        if len(set(slots)) != len(slots):
            raise InvalidRequest("a slot is named twice in one commit")
        for slot in slots:
            if slot not in session.reserved:
                raise InvalidRequest(f"slot {slot:#x} is not reserved by this session")
        namespace = session.namespace
        statuses = bytearray()
        for position, slot in enumerate(slots):
            if session.reserved[slot] != namespace.flush_epoch:
                # The slot stays the session's, and what is written into it from now on may get a name.
                session.reserved[slot] = namespace.flush_epoch
                self.counters.commits_refused += 1
                statuses.append(REFUSED)
                continue
            status = self._name(namespace, worker.shard, slot, blocks, position)
            if status == STORED:
                del session.reserved[slot]
                self.counters.commits_stored_bytes += worker.slot_class.payload_bytes
                namespace.used_at = self._now()
                self._tell_of_commit(namespace, blocks.keys[position], worker)
            statuses.append(status)
        return bytes(statuses)

    def _name(self, namespace: Namespace, shard: int, slot: int, blocks: Blocks, position: int) -> int:
        key = blocks.keys[position]
        index = namespace.index
        self._age += 1
        if index.has(key, shard):
            index.last_use[index.row(key)] = self._age
            self.counters.commits_already_present += 1
            return ALREADY_PRESENT
        depth = blocks.depths[position]
        index.add(
            key,
            blocks.parent_keys[position] if depth else None,
            depth,
            shard,
            slot,
            self.arena.name(slot),
            blocks.checksums[position],
            self._age,
            self._now(),
        )
        index.told_at[index.row(key)] = self._now()
        self.counters.commits_stored += 1
        return STORED

    # --- put: the server writes -----------------------------------------------------------------------------

    def put_slot(self, session: Session, key: bytes) -> PutSlot | int | None:
        """Where to write the payload of `key`: a slot; a status when it will not be written; None: ask again soon."""
        self.sessions.attached(session.id)
        worker = _worker_of(session)
        namespace = session.namespace
        if namespace.index.has(key, worker.shard):
            self.touch(namespace.index, np.array([namespace.index.row(key)]))
            self.counters.commits_already_present += 1
            return ALREADY_PRESENT
        return self._slot_to_fill(namespace, worker.slot_class)

    def _slot_to_fill(self, namespace: Namespace, slot_class: SlotClass) -> PutSlot | int | None:
        slots, retry = self._find_room(namespace, slot_class, 1)
        if not len(slots):
            return None if retry and self.arena.is_growing else DROPPED
        slot = int(slots[0])
        return PutSlot(slot, namespace.flush_epoch, self.arena.payload(slot, slot_class.payload_bytes))

    def put_commit(self, session: Session, put: PutSlot, blocks: Blocks, position: int, is_intact: bool) -> int:
        """The payload is complete. Whatever the status, the slot is not the caller's any more."""
        status = REFUSED
        if is_intact and session.is_attached and put.flush_epoch == session.namespace.flush_epoch:
            worker = _worker_of(session)
            status = self._name(session.namespace, worker.shard, put.slot, blocks, position)
            if status == STORED:
                self.counters.commits_stored_bytes += worker.slot_class.payload_bytes
                session.namespace.used_at = self._now()
                self._tell_of_commit(session.namespace, blocks.keys[position], worker)
        else:
            self.counters.commits_refused += 1
            self.counters.put_checksum_mismatches += not is_intact
        if status != STORED:
            self.put_abandon(session, put)
        return status

    def put_abandon(self, session: Session, put: PutSlot) -> None:
        """The payload will not come; nobody else writes there, so the slot is free at once."""
        self._free_unfilled(session.namespace, put)

    def _free_unfilled(self, namespace: Namespace, put: PutSlot) -> None:
        self.arena.give_back(np.array([put.slot], dtype=np.uint64))
        self._forget_if_idle(namespace)

    # --- promote: payloads come from the tier below -----------------------------------------------------------

    def promote_slot(self, namespace: Namespace, key: bytes, shard: int) -> PutSlot | int | None:
        """Like `put_slot`: a slot, ALREADY_PRESENT or DROPPED, None for later. No session: nobody waits for it."""
        if self._namespaces.get(namespace.fingerprint) is not namespace:
            return DROPPED
        if namespace.index.has(key, shard):
            return ALREADY_PRESENT
        return self._slot_to_fill(namespace, namespace.shards[shard].slot_class)

    def promote_commit(self, namespace: Namespace, shard: int, put: PutSlot, blocks: Blocks, position: int) -> int:
        """The payload is here and verified. Whatever the status, the slot is not the caller's any more."""
        status = REFUSED
        if put.flush_epoch == namespace.flush_epoch:
            status = self._name(namespace, shard, put.slot, blocks, position)
        if status != STORED:
            self._free_unfilled(namespace, put)
        return status

    def promote_abandon(self, namespace: Namespace, put: PutSlot) -> None:
        """It will not come, and its last writer is done."""
        self._free_unfilled(namespace, put)

    # --- what the tier below has to hear of -------------------------------------------------------------------

    def take_untold(self) -> list[PayloadName]:
        """Payloads that got a name since the last call, and those used again after a long time, tails first."""
        untold, self._untold = self._untold, []
        return untold

    def _tell_of_commit(self, namespace: Namespace, key: bytes, worker: Worker) -> None:
        if self._tell_every_s is not None:
            name = PayloadName(namespace.fingerprint, key, worker.shard, worker.slot_class.payload_bytes)
            self._untold.append(name)

    def tell_of_use(self, namespace: Namespace, rows: Rows) -> None:
        """A chain without its head is worth nothing, so the head is told of last and forgotten last."""
        if self._tell_every_s is None:
            return
        index = namespace.index
        due = rows[index.told_at[rows] <= self._now() - self._tell_every_s]
        index.told_at[due] = self._now()
        for row in due[::-1].tolist():
            key = index.key(row)
            for shard, layout in namespace.shards.items():
                name = PayloadName(namespace.fingerprint, key, shard, layout.slot_class.payload_bytes)
                self._untold.append(name)

    # --- get: the server reads ------------------------------------------------------------------------------

    def hold_payload(self, session: Session, key: bytes) -> HeldPayload | None:
        """The session's shard of a block, held; None when it is not here."""
        index = session.namespace.index
        worker = _worker_of(session)
        row = index.row(key)
        held = self._hold(index, row, worker.shard, worker.slot_class.payload_bytes)
        if held is None:
            self.counters.get_missing += 1
        else:
            self.touch(index, np.array([row]))
        return held

    def hold_named(self, name: PayloadName) -> HeldPayload | None:
        """The same for the tier below, which is no use of the block."""
        namespace = self._namespaces.get(name.namespace)
        layout = namespace.shards.get(name.shard) if namespace else None
        if namespace is None or layout is None or layout.slot_class.payload_bytes != name.num_bytes:
            return None
        return self._hold(namespace.index, namespace.index.row(name.key), name.shard, name.num_bytes)

    def _hold(self, index: Index, row: int, shard: int, payload_bytes: int) -> HeldPayload | None:
        slot = int(index.slots[row, shard])
        if not slot:
            return None
        index.hold(np.array([row]))
        return HeldPayload(
            index,
            row,
            shard,
            slot,
            int(index.generations[row, shard]),
            int(index.checksums[row, shard]),
            self.arena.payload(slot, payload_bytes),
            self.arena.generations(slot),
        )

    def note_checksum(self, held: HeldPayload, checksum: int) -> None:
        """It was computed from the bytes."""
        held.checksum = checksum
        held.index.checksums[held.row, held.shard] = checksum

    def lose_payload(self, held: HeldPayload) -> None:
        """Its bytes are not what was saved. Whoever was promised it fails to load; a later save fills the hole."""
        slot = held.index.lose(held.row, held.shard, self._now())
        self.arena.evict(np.array([slot], dtype=np.uint64))
        self.counters.integrity_failures += 1

    def drop_payload(self, held: HeldPayload) -> None:
        """It may be evicted again."""
        held.index.drop(np.array([held.row]))

    # --- flush ----------------------------------------------------------------------------------------------

    def flush(self, kept: bytes) -> int:
        """Drop all blocks of a namespace, or of all (empty), by what it is kept as. Returns how many.

        Leases end with it. Payloads that are written now are refused when they are committed.
        """
        if len(kept) not in (0, 32):
            raise InvalidRequest(f"namespace fingerprint has {len(kept)} bytes, not 32 or none")
        count = 0
        for namespace in list(self._namespaces.values()):
            if kept in (b"", namespace.fingerprint):
                old = namespace.flush()
                count += len(old)
                self.counters.leases_flushed += self.leases.end_all_of(old)
                self.arena.evict(old.all_slots())
                self._forget_if_idle(namespace)
        self.counters.flushed_blocks += count
        return count

    # --- room -----------------------------------------------------------------------------------------------

    def _find_room(self, namespace: Namespace, slot_class: SlotClass, num_slots: int) -> tuple[Slots, bool]:
        """Up to `num_slots` reserved slots of the class, and whether there may be more soon."""
        if num_slots <= 0:
            return NO_SLOTS, False
        self.expire()
        tenant = slot_class.tenant
        while slot_class.num_free < num_slots:
            may_grow = self.arena.may_grow(tenant)
            if may_grow and self.arena.has_spare_for(tenant):
                self.arena.assign_spare(slot_class)
            elif may_grow and (self.arena.is_growing or self.arena.make_way(tenant)):
                return self.arena.reserve(slot_class, num_slots), True
            elif not self._take_segment(slot_class):
                break
        missing = num_slots - slot_class.num_free
        if missing > 0:
            self._evict(namespace, slot_class, missing)
        slots = self.arena.reserve(slot_class, num_slots)
        return slots, len(slots) < num_slots

    def _evict(self, namespace: Namespace, slot_class: SlotClass, num_slots: int) -> None:
        """The oldest blocks of the namespace go until `num_slots` slots of the class are free, if they can."""
        shards = [shard for shard, layout in namespace.shards.items() if layout.slot_class is slot_class]
        evicted = namespace.index.evict(num_slots, shards, self._now())
        self.arena.evict(evicted.slots)
        self.counters.evicted_blocks_unsettled += evicted.num_doomed
        self.counters.evicted_blocks_capacity += evicted.num_blocks - evicted.num_doomed

    def _take_segment(self, slot_class: SlotClass) -> bool:
        """Take a segment from another class of the tenant: one without blocks if there is any, else the coldest."""
        share = self.arena.share_segments(slot_class.tenant)
        is_poor = len(slot_class.cuts) < max(share, 1)
        others = [
            other for other in self.arena.classes if other is not slot_class and other.tenant == slot_class.tenant
        ]
        above_share = [other for other in others if is_poor and len(other.cuts) > share]
        for other in others:
            for cut in other.cuts.values():
                if cut.is_empty and (other in above_share or len(other.cuts) > 1 or not other.num_sessions):
                    self._recut(cut, slot_class)
                    return True
        if self._now() < slot_class.next_take_at:
            return False
        unattended = [other for other in others if not other.num_sessions and other not in above_share]
        own_age = self._namespaces[slot_class.namespace].index.oldest_use() if unattended else None
        candidates = [(age, cut) for other in above_share for age, cut in self._ages(other)]
        for other in unattended:
            candidates.extend((age, cut) for age, cut in self._ages(other) if own_age is None or age < own_age)
        for _, cut in sorted(candidates, key=lambda candidate: candidate[0]):
            index = self._namespaces[cut.slot_class.namespace].index
            rows = index.extending(cut.segment.id)
            if not index.num_leases[rows].any():
                self.arena.evict(index.remove(rows))
                self.counters.evicted_blocks_recut += len(rows)
                self._recut(cut, slot_class)
                return True
        slot_class.next_take_at = self._now() + TAKE_EVERY_S
        return False

    def _ages(self, slot_class: SlotClass) -> list[tuple[int, Cut]]:
        """The segments of a class in which nothing is leased or reserved, and when they were used last."""
        ages = self._namespaces[slot_class.namespace].index.segment_ages()
        return [
            (ages[cut.segment.id], cut)
            for cut in slot_class.cuts.values()
            if cut.segment.id in ages and not cut.num_reserved
        ]

    def _recut(self, cut: Cut, slot_class: SlotClass) -> None:
        self.arena.recut(cut, slot_class)
        self.counters.recut_segments += 1
        self._forget_if_idle(self._namespaces[cut.slot_class.namespace])

    # --- an earlier server's ----------------------------------------------------------------------------------

    def now(self) -> float:
        """The clock of everything here."""
        return self._now()

    @property
    def namespaces(self) -> list[Namespace]:
        """All that have a block, a session or a slot."""
        return list(self._namespaces.values())

    @property
    def age(self) -> int:
        """Of the youngest use so far."""
        return self._age

    def adopt_age(self, age: int) -> None:
        """What comes is younger than what was taken over."""
        self._age = max(self._age, age)

    def adopt_namespace(self, namespace: Namespace) -> Namespace:
        """It was an earlier server's. Its segments have to come (`Arena.adopt`) before anything else happens."""
        assert namespace.fingerprint not in self._namespaces, f"{namespace.fingerprint.hex()} is here already"
        self._namespaces[namespace.fingerprint] = namespace
        return namespace

    def give_back_held(self, namespace: Namespace, slots: Slots) -> None:
        """Slots that a client of an earlier server could write into, and cannot any more."""
        self.arena.give_back(slots)
        self._forget_if_idle(namespace)

    def namespaces_of(self, tenant: str) -> list[Namespace]:
        """Those that are here."""
        return [namespace for namespace in self._namespaces.values() if namespace.tenant == tenant]

    def generations_of_blocks(self, kept: bytes) -> set[bytes]:
        """Under which generation a namespace's blocks are here; empty: those of all namespaces. None: no blocks."""
        with_blocks = [one for one in self._namespaces.values() if len(one.index)]
        if not kept:
            return {one.generations[:8] for one in with_blocks}
        return {one.generations[8:] for one in with_blocks if one.fingerprint == kept}

    def note_generations(self, kept: bytes, of_all: bytes, of_it: bytes) -> None:
        """What Redis says of a namespace that is here."""
        namespace = self._namespaces.get(kept)
        if namespace is not None:
            namespace.generations = of_all + of_it

    def shard_descriptor(self, kept: bytes, shard: int) -> bytes:
        """How a shard's payloads are laid out; empty: it is not here."""
        namespace = self._namespaces.get(kept)
        layout = namespace.shards.get(shard) if namespace is not None else None
        return layout.descriptor if layout is not None else b""

    def namespace_text(self, kept: bytes) -> str:
        """What a client said of it; empty: it is not here."""
        namespace = self._namespaces.get(kept)
        return namespace.text if namespace is not None else ""

    # --- figures --------------------------------------------------------------------------------------------

    @property
    def leased_bytes(self) -> int:
        """Blocks that cannot go because somebody was promised them."""
        return sum(namespace.index.num_leased * namespace.block_bytes for namespace in self._namespaces.values())

    def _leased_bytes_of(self, tenant: str) -> int:
        return sum(
            namespace.index.num_leased * namespace.block_bytes
            for namespace in self._namespaces.values()
            if namespace.tenant == tenant
        )

    def namespace_figures(self) -> list[NamespaceFigures]:
        """One per namespace."""
        return [
            NamespaceFigures(
                namespace.given,
                namespace.text,
                len(namespace.index),
                namespace.index.num_complete,
                sum(
                    cut.num_named * slot_class.slot_bytes
                    for slot_class in namespace.slot_classes
                    for cut in slot_class.cuts.values()
                ),
                namespace.num_shards,
                self._now() - namespace.created_at,
                self._now() - namespace.used_at,
                namespace.index.num_leased,
                namespace.tenant,
            )
            for namespace in self._namespaces.values()
        ]

    # --- inside ---------------------------------------------------------------------------------------------

    def touch(self, index: Index, rows: Rows) -> None:
        self._age += len(rows)
        index.touch(rows, self._age)

    @staticmethod
    def check_distinct(rows: Rows) -> None:
        """A chain never has one key twice, and a lease would count it twice."""
        if len(rows) > 1 and not (np.diff(rows) > 0).all() and len(np.unique(rows)) != len(rows):
            raise InvalidRequest("the same key twice in one lookup")


def _run_around(present: npt.NDArray[np.bool_], first: int) -> tuple[int, int]:
    """The longest run of present blocks around `first`; empty when that one is absent."""
    if first == len(present) or not present[first]:
        return first, first
    absent_after = np.flatnonzero(~present[first:])
    absent_before = np.flatnonzero(~present[:first])
    end = first + int(absent_after[0]) if len(absent_after) else len(present)
    start = int(absent_before[-1]) + 1 if len(absent_before) else 0
    return start, end


def _worker_of(session: Session) -> Worker:
    if session.worker is None:
        raise InvalidRequest("a scheduler session has no shard: it cannot reserve, commit, get or put")
    return session.worker


def check_packed(name: str, packed: bytes, item_bytes: int) -> None:
    """A packed field holds whole items."""
    if len(packed) % item_bytes:
        raise InvalidRequest(f"{name} has {len(packed)} bytes, not a multiple of {item_bytes}")
