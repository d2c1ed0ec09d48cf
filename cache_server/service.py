"""The wire: bytes become domain values, values become bytes, errors become status codes. No decisions.

All requests arrive as bytes (grpc's own deserializers would answer INTERNAL to malformed ones) and are parsed here;
above MAX_MESSAGE_BYTES or malformed they are refused before anything is touched. Get and Put are joined and parsed
by hand (`wire.py`). Everything runs on the event loop; what a call does between two awaits is at most one message
of CHUNK_BYTES or one batch of names, so lookups wait for little.

Bounds: so many Gets and Puts move bytes at a time, some wait a moment, the others are refused (`admission.py`); a peer
that moves nothing for STALL_S loses its stream. So the memory that streams need beside the slots is bounded.

Lookup is the one call that may take its time: `LowerTier.extend` holds it back, within `wait_ms`, for blocks that come
from Redis. What it then answers is what memory has at that moment.

`kv_group` is accepted and not kept: groups are namespaces of their own (`group_lookup.py`). `lease_id` of Get is not
needed either: a payload is held while it is sent, and between payloads the scheduler side's lease holds it.

Who calls is known before anything else is looked at: every call but those of the health service brings a token where
tokens are configured (`tenants.py`), and the session that it names must be one of the same tenant. Another's session is
answered as one that does not exist.

Not here: `cache.py` knows what the calls mean, `server.py` where they arrive.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from inspect import isawaitable
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt
import xxhash
from google.protobuf.message import DecodeError, Message

from cache_server import wire
from cache_server.admission import Admission, Turns, pushback
from cache_server.cache import Cache, check_packed
from cache_server.descriptors import DescriptorServer
from cache_server.errors import (
    Forbidden,
    InvalidRequest,
    Mismatch,
    RequestError,
    SessionEnded,
    TooMany,
    Unauthenticated,
)
from cache_server.gate import STREAM_FILL_BYTES, Gate, StreamGate
from cache_server.growth import Growth
from cache_server.leases import LEASE_S
from cache_server.lower_tier import LowerTier
from cache_server.operations import BOUNDS
from cache_server.promotion import NOTHING
from cache_server.segments import Segment
from cache_server.sessions import Session
from cache_server.tenants import ANYONE, READ, WRITE, Caller, Guard, kept_as
from cache_server.values import DROPPED, Attachment, Blocks, GroupQuestion, HeldPayload, PutSlot, Shard
from protos import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from protos import kv_cache_pb2 as pb

SERVICE_NAME: Final = "prefixd.v1.KvCache"
CHUNK_BYTES: Final = 1 << 20  # of payload in one message
MAX_MESSAGE_BYTES: Final = 4 << 20  # of any request: what every grpc client is able to receive and send by default
MAX_TEXT_BYTES: Final = 64 << 10
MAX_LEASE_IDS: Final = 65536  # of one Release or Renew
MAX_VERIFY_KEYS: Final = 1024
STALL_S: Final = 30.0
PUT_WAIT_S: Final = 2.0  # for memory that is being touched
_CHECKSUM_INLINE_BYTES: Final = 4 << 20  # more is summed in a thread

_CODES: Final = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    SessionEnded: grpc.StatusCode.FAILED_PRECONDITION,
    Mismatch: grpc.StatusCode.FAILED_PRECONDITION,
    TooMany: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
}
_log = logging.getLogger(__name__)
_Context = Any  # grpc.aio.ServicerContext, generic in types that bytes in, bytes out do not need
_Method = Callable[[Any, Any], Awaitable[Any]]


class Service:
    """The eleven calls of `protos/kv_cache.proto` over one cache."""

    def __init__(
        self,
        cache: Cache,
        growth: Growth,
        server_epoch: int,
        server_version: str,
        gate: Gate,
        lower: LowerTier | None = None,
        admission: Admission | None = None,
        recent_warnings: Callable[[], list[tuple[float, str, str]]] = list,
        guard: Guard | None = None,
    ) -> None:
        self._cache = cache
        self._guard = guard or Guard(None)
        self._growth = growth
        self._lower = lower
        self._admission = admission
        self._recent_warnings = recent_warnings
        self._epoch = server_epoch
        self._version = server_version
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._streams = StreamGate(gate, self._loop.time)
        self._descriptors: list[DescriptorServer] = []
        self._closing: dict[int, asyncio.Future[str]] = {}  # session id → why its Attach stream ends
        self._is_draining = False
        self._gets = Turns("Get")
        self._puts = Turns("Put")

    def handler(self) -> Any:
        """All calls, for `grpc.aio.Server.add_generic_rpc_handlers`."""

        operations = self._cache.operations

        def unary(request: type[Message], method: Callable[..., Message | Awaitable[Message]]) -> Any:
            name = method.__name__.removeprefix("_")

            async def call(raw: bytes, context: _Context) -> bytes:
                started_at = self._loop.time()
                try:
                    caller = self._guard.caller(context.invocation_metadata())
                    parsed = _parse(request, raw)
                    if hasattr(parsed, "session_id"):
                        self._check_session(caller, parsed.session_id, _right_for(parsed))
                        if isinstance(parsed, pb.LookupRequest):
                            self._check_groups(caller, parsed)
                        reply = method(parsed)
                    else:
                        reply = method(parsed, caller)
                    if isawaitable(reply):
                        reply = await reply
                except RequestError as error:
                    await _abort(context, error)
                    raise
                finally:
                    self._growth.nudge()
                    self._tell()
                    if name in operations.timings:
                        operations.note(name, self._loop.time() - started_at)
                serialized: bytes = reply.SerializeToString()
                return serialized

            return grpc.unary_unary_rpc_method_handler(call)

        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Attach": grpc.unary_stream_rpc_method_handler(_aborting(self._attach)),
                "Lookup": unary(pb.LookupRequest, self._lookup),
                "Release": unary(pb.ReleaseRequest, self._release),
                "Renew": unary(pb.RenewRequest, self._renew),
                "Reserve": unary(pb.ReserveRequest, self._reserve),
                "Commit": unary(pb.CommitRequest, self._commit),
                "Get": grpc.unary_stream_rpc_method_handler(_aborting(self._get)),
                "Put": grpc.stream_unary_rpc_method_handler(_aborting(self._put)),
                "Verify": unary(pb.VerifyRequest, self._verify),
                "Flush": unary(pb.FlushRequest, self._flush),
                "Stats": unary(pb.StatsRequest, self._stats),
            },
        )

    # --- callers --------------------------------------------------------------------------------------------

    def _check_session(self, caller: Caller, session_id: int, right: int) -> None:
        """The session is one of the caller's tenant, and may do this."""
        if not self._guard.is_on:
            return
        session = self._cache.sessions.find(session_id)
        if session is None or caller.is_operator or session.tenant != caller.tenant:
            raise SessionEnded(f"session {session_id:#018x} is unknown here: attach again")
        if session.rights & right != right:
            verb = "write" if right == WRITE else "read"
            raise Forbidden(f"tenant {caller.tenant} may not {verb} namespace {session.namespace.given.hex()[:12]}")

    def _check_groups(self, caller: Caller, request: pb.LookupRequest) -> None:
        """What else is asked about may be read as well: it need not be of the session's model."""
        if not self._guard.is_on:
            return
        for group in request.groups:
            known = self._cache.namespace_text(kept_as(caller.tenant, group.fingerprint))
            if known and not caller.rights(group.fingerprint, known) & READ:
                raise Forbidden(f"tenant {caller.tenant} may not read namespace {group.fingerprint.hex()[:12]}")

    def end_unauthorised(self) -> int:
        """The tokens changed: sessions that would not be let in as they are end. Returns how many."""
        count = 0
        for session in self._cache.sessions:
            namespace = session.namespace
            if self._guard.still_admits(
                session.token_digest, namespace.tenant, session.rights, namespace.given, namespace.text
            ):
                continue
            closing = self._closing.get(session.id)
            if closing is not None and not closing.done():
                closing.set_result("its token is not what it was")
                count += 1
        return count

    # --- sessions -------------------------------------------------------------------------------------------

    async def _attach(self, raw: bytes, context: _Context) -> None:
        with self._cache.operations.timed("attach"):
            caller = self._guard.caller(context.invocation_metadata())
            request = _parse(pb.AttachRequest, raw)
            version = _agreed_version(request)
            # A ticket is good for a descriptor socket of this machine, so it goes to this machine only.
            is_near = bool(self._descriptors) and context.peer().startswith("unix:")
            attachment = _attachment(request, caller.tenant, is_near)
            rights = self._guard.admit(caller, attachment.fingerprint, attachment.text, attachment.key_bytes)
            session = self._cache.attach(replace(attachment, rights=rights, token_digest=caller.digest))
        if self._lower is not None:
            self._lower.meet(session.namespace.fingerprint)
        closing = self._closing[session.id] = self._loop.create_future()
        try:
            ticket = self._cache.sessions.issue_ticket(session) if session.awaits_descriptors else b""
            attached = pb.Attached(
                protocol_version=version,
                session_id=session.id,
                server_epoch=self._epoch,
                limits=self._limits(session),
                descriptor_ticket=ticket,
                server_version=self._version,
                tenant=session.tenant,
                read_denied=not session.rights & READ,
                write_denied=not session.rights & WRITE,
            )
            await context.write(pb.AttachEvent(attached=attached).SerializeToString())
            reason = await closing
            await context.write(pb.AttachEvent(closing=pb.Closing(reason=reason)).SerializeToString())
        finally:
            # The stream ended, by either side. What that means depends on the descriptor socket.
            del self._closing[session.id]
            if not self._is_draining:
                self._cache.detach(session)
                self._streams.keep_only({session.engine_id for session in self._cache.sessions})

    def _limits(self, session: Session) -> pb.Limits:
        slot_class = session.worker.slot_class if session.worker else None
        return pb.Limits(
            max_payload_bytes=self._cache.max_payload_bytes,
            max_message_bytes=MAX_MESSAGE_BYTES,
            chunk_bytes=CHUNK_BYTES,
            lease_ms=int(LEASE_S * 1000),
            max_reserved_bytes=self._cache.max_reserved_bytes(slot_class),
        )

    def drain(self, reason: str) -> None:
        """Tell every client why its Attach stream ends. Calls in flight may still end as they would have."""
        self._is_draining = True
        for closing in self._closing.values():
            if not closing.done():
                closing.set_result(reason)

    # --- descriptors ----------------------------------------------------------------------------------------

    def serve_descriptors(self, descriptors: DescriptorServer) -> None:
        """From now on sessions get tickets, and segments are announced there."""
        self._descriptors.append(descriptors)

    def redeem(self, ticket: bytes) -> int:
        """The session of a ticket, 0 for none."""
        session = self._cache.sessions.redeem(ticket)
        return session.id if session is not None else 0

    def segments_of(self, session_id: int) -> list[Segment]:
        """What a session has to map."""
        session = self._cache.sessions.find(session_id)
        if session is None or session.worker is None:
            return []
        return [cut.segment for cut in session.worker.slot_class.cuts.values()]

    def descriptors_ended(self, session_id: int) -> None:
        """The end of the descriptor socket ends the session."""
        session = self._cache.sessions.find(session_id)
        if session is None:
            return
        self._cache.unmap(session)
        closing = self._closing.get(session_id)
        if closing is not None and not closing.done():
            closing.set_result("the descriptor socket ended")

    def _announce(self) -> None:
        """Before any reply names their slots: the segments that were cut."""
        for cut in self._cache.arena.take_assigned():
            for session in self._cache.sessions.mapped(cut.slot_class):
                for descriptors in self._descriptors:
                    descriptors.announce(session.id, cut.segment)

    def _tell(self) -> None:
        """The tier below hears of what got a name or is used again."""
        if self._lower is not None:
            self._lower.told(self._cache.take_untold())

    # --- names ----------------------------------------------------------------------------------------------

    async def _lookup(self, request: pb.LookupRequest) -> pb.LookupReply:
        outlook, groups = NOTHING, _groups(request)
        # Whether blocks are present is asked to decide what to save: what lies in Redis only may be saved again.
        if self._lower is not None and request.lease:
            outlook = await self._lower.extend(
                request.session_id,
                request.keys,
                request.first,
                request.wait_ms / 1000,
                request.recompute_us_per_block,
                groups,
            )
        session = self._cache.sessions.attached(request.session_id)
        limits: tuple[int, int | None] = (0, None)
        if payload_bytes := self._cache.sessions.streamed_payload_bytes(session):
            limits = self._streams.limits(session.engine_id, payload_bytes, request.recompute_us_per_block)
        if request.window or groups:
            result = self._cache.lookup_groups(
                request.session_id,
                request.keys,
                request.first,
                request.lease,
                request.window,
                groups,
                *limits,
            )
        else:
            result = self._cache.lookup(request.session_id, request.keys, request.first, request.lease, *limits)
        # Slots that were taken for promoted payloads may lie in a segment that nobody heard of yet.
        self._announce()
        return pb.LookupReply(
            present=np.packbits(result.present, bitorder="little").tobytes(),
            hit_start=result.hit_start,
            hit_end=result.hit_end,
            lease_id=result.lease_id,
            lease_ms=int(LEASE_S * 1000) if result.lease_id else 0,
            slots=result.slots.astype("<u8", copy=False).tobytes(),
            generations=result.generations.astype("<u4", copy=False).tobytes(),
            checksums=_checksums(result.checksums, request),
            retry=result.retry or outlook.retry,
            retry_ms=outlook.retry_ms,
            missing_workers=result.missing_workers,
            groups=[
                pb.KvGroupReply(
                    present=np.packbits(group.present, bitorder="little").tobytes(),
                    hit_start=group.hit_start,
                    slots=group.slots.astype("<u8", copy=False).tobytes(),
                    generations=group.generations.astype("<u4", copy=False).tobytes(),
                    checksums=_checksums(group.checksums, request),
                )
                for group in result.groups
            ],
        )

    def _release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        self._cache.release(request.session_id, _lease_ids(request))
        return pb.ReleaseReply()

    def _renew(self, request: pb.RenewRequest) -> pb.RenewReply:
        renewed = self._cache.renew(request.session_id, _lease_ids(request))
        return pb.RenewReply(renewed=renewed, lease_ms=int(LEASE_S * 1000))

    def _reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        slots, retry = self._cache.reserve(request.session_id, request.num_slots)
        self._announce()
        return pb.ReserveReply(slots=slots.astype("<u8", copy=False).tobytes(), retry=retry)

    def _commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        session = self._cache.sessions.attached(request.session_id)
        slots = _unpack("slots", request.slots, "<u8")
        return pb.CommitReply(statuses=self._cache.commit(session.id, slots, _blocks(session, request)))

    async def _verify(self, request: pb.VerifyRequest) -> pb.VerifyReply:
        """Believes nobody: what is dropped is what does not verify here."""
        session = self._cache.sessions.attached(request.session_id)
        keys = _split("keys", request.keys, session.namespace.key_bytes)
        if len(keys) > MAX_VERIFY_KEYS:
            raise InvalidRequest(f"{len(keys)} keys to verify at once; at most {MAX_VERIFY_KEYS}")
        num_dropped = 0
        async with self._gets.turn():
            for key in keys:
                held = self._cache.hold_payload(session, key)
                if held is None:
                    continue
                try:
                    if not held.checksum:
                        continue
                    checksum = await self._checksum(held.bytes.data)
                    if checksum != held.checksum and held.is_intact:
                        self._cache.lose_payload(held)
                        num_dropped += 1
                finally:
                    self._cache.drop_payload(held)
        if num_dropped:
            _log.error("%d payloads in memory are not what was saved: dropped", num_dropped)
        return pb.VerifyReply(num_dropped=num_dropped)

    @staticmethod
    async def _checksum(payload: memoryview) -> int:
        if len(payload) > _CHECKSUM_INLINE_BYTES:
            return await asyncio.to_thread(xxhash.xxh3_64_intdigest, payload)
        checksum: int = xxhash.xxh3_64_intdigest(payload)
        return checksum

    async def _flush(self, request: pb.FlushRequest, caller: Caller) -> pb.FlushReply:
        num_blocks, is_pending = 0, False
        for kept in self._named_by(request, caller):
            num_blocks += self._cache.flush(kept)
            if self._lower is not None:
                is_pending = not await self._lower.flush(kept) or is_pending
        return pb.FlushReply(num_blocks=num_blocks, lower_tier_pending=is_pending)

    def _named_by(self, request: pb.FlushRequest, caller: Caller) -> list[bytes]:
        """What the namespaces are kept as that a flush names."""
        fingerprint, tenant = request.fingerprint, request.tenant
        if len(fingerprint) not in (0, 32):
            raise InvalidRequest(f"namespace fingerprint has {len(fingerprint)} bytes, not 32 or none")
        if caller.is_operator:
            if tenant and tenant not in self._guard.tenants:
                raise InvalidRequest(f"there is no tenant {tenant[:64]!r} here")
            if not fingerprint and not tenant:
                return [b""]
            tenants = [tenant] if tenant else self._guard.tenants
        elif tenant not in ("", caller.tenant):
            raise Forbidden(f"tenant {caller.tenant} may not flush another's blocks")
        else:
            tenants = [caller.tenant]
        if not fingerprint:
            return [namespace.fingerprint for namespace in self._cache.namespaces_of(tenants[0])]
        if not caller.is_operator:
            known = self._cache.namespace_text(kept_as(caller.tenant, fingerprint))
            if not caller.rights(fingerprint, known) & WRITE:
                raise Forbidden(f"tenant {caller.tenant} may not write namespace {fingerprint.hex()[:12]}")
        return [kept_as(one, fingerprint) for one in tenants]

    # --- bytes ----------------------------------------------------------------------------------------------

    async def _get(self, raw: bytes, context: _Context) -> None:
        caller = self._guard.caller(context.invocation_metadata())
        request = _parse(pb.GetRequest, raw)
        self._check_session(caller, request.session_id, READ)
        session = self._cache.sessions.attached(request.session_id)
        if session.worker is None:
            raise InvalidRequest("a scheduler session has no shard: it cannot get")
        started_at, num_bytes, num_moved = 0.0, 0, 0
        async with self._gets.turn():
            began_at = self._loop.time()
            for index, key in enumerate(_split("keys", request.keys, session.namespace.key_bytes)):
                held = self._cache.hold_payload(session, key)
                if held is None:
                    await _write(context, wire.join_get_missing(index))
                    continue
                try:
                    await self._send_payload(context, index, held)
                    # Measured from when the buffers on the way are full.
                    if num_bytes >= STREAM_FILL_BYTES:
                        num_moved += len(held.bytes)
                    else:
                        started_at = self._loop.time()
                    num_bytes += len(held.bytes)
                finally:
                    self._cache.drop_payload(held)
        self._cache.operations.note("get", self._loop.time() - began_at)
        self._streams.note(session.engine_id, num_moved, self._loop.time() - started_at)

    async def _send_payload(self, context: _Context, index: int, held: HeldPayload) -> None:
        counters = self._cache.counters
        payload = held.bytes.data
        if not held.checksum:
            checksum = await self._checksum(payload)
            if held.is_intact:
                self._cache.note_checksum(held, checksum)
        for offset in range(0, len(payload), CHUNK_BYTES):
            data = payload[offset : offset + CHUNK_BYTES]
            message = wire.join_get_chunk(index, offset, 0 if offset else held.checksum, data)
            # Checked after the copy: from here on the bytes are ours.
            if not held.is_intact:
                counters.get_missing += 1
                await _write(context, wire.join_get_missing(index))
                return
            counters.get_bytes += len(data)
            await _write(context, message)
        counters.get_payloads += 1

    async def _put(self, _messages: AsyncIterator[bytes], context: _Context) -> bytes:
        caller = self._guard.caller(context.invocation_metadata())
        async with self._puts.turn():
            began_at = self._loop.time()
            piece = await _read_piece(context)
            if piece is None or piece.header is None:
                raise InvalidRequest("the first message of a Put has no header")
            header = _parse(pb.PutHeader, bytes(piece.header))
            self._check_session(caller, header.session_id, WRITE)
            session = self._cache.sessions.attached(header.session_id)
            blocks = _blocks(session, header)
            reply: bytes = pb.PutReply(
                statuses=await self._receive(context, session, blocks, piece)
            ).SerializeToString()
            self._cache.operations.note("put", self._loop.time() - began_at)
            return reply

    async def _receive(self, context: _Context, session: Session, blocks: Blocks, first: wire.PutPiece) -> bytes:
        """Payload by payload; `target` is where the present one goes, or why it goes nowhere."""
        if session.worker is None:
            raise InvalidRequest("a scheduler session has no shard: it cannot put")
        payload_bytes = session.worker.slot_class.payload_bytes
        counters = self._cache.counters
        statuses = bytearray()
        target: PutSlot | int = 0
        hasher = xxhash.xxh3_64()
        written = 0
        piece: wire.PutPiece | None = first
        try:
            while piece is not None:
                size = len(piece.data)
                if size:
                    position = len(statuses)
                    _check_piece(piece, position, len(blocks.keys), written, payload_bytes)
                    if not written:
                        target = await self._target(session, blocks.keys[position])
                        hasher.reset()
                    if isinstance(target, PutSlot):
                        np.copyto(target.bytes[written : written + size], np.frombuffer(piece.data, np.uint8))
                        hasher.update(piece.data)
                        counters.put_bytes += size
                    written += size
                    if written == payload_bytes:
                        written = 0
                        counters.put_payloads += 1
                        if isinstance(target, PutSlot):
                            put, target = target, 0
                            statuses.append(self._finish(session, put, blocks, position, hasher.intdigest()))
                            self._tell()
                        else:
                            counters.put_dropped += target == DROPPED
                            statuses.append(target)
                piece = await _read_piece(context)
            if len(statuses) != len(blocks.keys):
                raise InvalidRequest(
                    f"payload {len(statuses)} ended at {written} of {payload_bytes} bytes, "
                    f"{len(blocks.keys)} payloads were announced"
                )
            return bytes(statuses)
        finally:
            if isinstance(target, PutSlot):
                self._cache.put_abandon(session, target)

    async def _target(self, session: Session, key: bytes) -> PutSlot | int:
        """Where the payload goes; waits for memory that is being touched."""
        deadline = self._loop.time() + PUT_WAIT_S
        while True:
            target = self._cache.put_slot(session, key)
            self._announce()
            self._growth.nudge()
            if target is not None:
                return target
            left = deadline - self._loop.time()
            if left <= 0:
                return DROPPED
            await self._growth.wait(left)

    def _finish(self, session: Session, put: PutSlot, blocks: Blocks, position: int, checksum: int) -> int:
        claimed = blocks.checksums[position]
        blocks.checksums[position] = checksum
        return self._cache.put_commit(session, put, blocks, position, claimed in (0, checksum))

    # --- figures --------------------------------------------------------------------------------------------

    def stats(self) -> pb.StatsReply:
        """All figures, as they are now: the one source of `Stats`, `/metrics` and the status page."""
        return self._stats(pb.StatsRequest(), ANYONE)

    def _stats(self, _request: pb.StatsRequest, caller: Caller) -> pb.StatsReply:
        """Of a tenant's own namespaces and sessions, for its own token; all of them for an operator."""
        cache = self._cache
        cache.expire()

        def is_shown(tenant: str) -> bool:
            return caller.is_operator or tenant == caller.tenant

        return pb.StatsReply(
            server_version=self._version,
            server_epoch=self._epoch,
            uptime_s=self._loop.time() - self._started_at,
            memory_bytes=cache.arena.budget_bytes,
            touched_bytes=cache.arena.touched_bytes,
            stored_bytes=cache.arena.stored_bytes,
            reserved_bytes=cache.arena.reserved_bytes,
            leased_bytes=cache.leased_bytes,
            counters=cache.counters.as_dict()
            | self._refusals()
            | (self._lower.figures() if self._lower is not None else {}),
            namespaces=[
                pb.NamespaceStats(
                    fingerprint=figures.fingerprint,
                    text=figures.text,
                    num_blocks=figures.num_blocks,
                    num_complete=figures.num_complete,
                    stored_bytes=figures.stored_bytes,
                    num_shards=figures.num_shards,
                    age_s=figures.age_s,
                    idle_s=figures.idle_s,
                    num_leased=figures.num_leased,
                    tenant=figures.tenant,
                )
                for figures in cache.namespace_figures()
                if is_shown(figures.tenant)
            ],
            sessions=[
                pb.SessionStats(
                    session_id=session.id,
                    client_name=session.client_name,
                    engine_id=session.engine_id,
                    role=pb.ROLE_WORKER if session.worker else pb.ROLE_SCHEDULER,
                    shard=session.worker.shard if session.worker else 0,
                    pid=session.pid,
                    mapped=session.is_mapped,
                    reserved_bytes=session.reserved_bytes,
                    tenant=session.tenant,
                )
                for session in cache.sessions
                if is_shown(session.tenant)
            ],
            operation_bounds_s=BOUNDS,
            operations=[
                pb.OperationStats(name=name, counts=timing.counts, seconds=timing.seconds)
                for name, timing in cache.operations.timings.items()
            ],
            slowest=[
                pb.SlowOperation(name=one.name, seconds=one.seconds, ended_s_ago=s_ago)
                for one, s_ago in cache.operations.slowest()
            ],
            recent_warnings=[
                pb.LogLine(s_ago=s_ago, level=level, text=text)
                for s_ago, level, text in (self._recent_warnings() if caller.is_operator else [])
            ],
            draining=self._is_draining,
        )

    def _refusals(self) -> dict[str, int]:
        return {
            "calls_refused": self._admission.num_refused if self._admission else 0,  # too many under way
            "streams_refused": self._gets.num_refused + self._puts.num_refused,  # Gets and Puts without a turn
        }


# --- messages → values ----------------------------------------------------------------------------------------


def _parse(message: type[Any], raw: bytes) -> Any:
    if len(raw) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"{message.DESCRIPTOR.name} of {len(raw)} bytes; a message may have at most {MAX_MESSAGE_BYTES} bytes"
        )
    try:
        return message.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest(f"{message.DESCRIPTOR.name} cannot be decoded: {error}") from None


def _agreed_version(request: pb.AttachRequest) -> int:
    """The highest version that both speak."""
    highest = request.protocol_version
    lowest = request.min_protocol_version or highest
    version: int = min(highest, PROTOCOL_VERSION)
    if lowest > highest:
        raise InvalidRequest(f"protocol versions {lowest} to {highest}")
    if version < max(lowest, MIN_PROTOCOL_VERSION):
        older = "server" if lowest > PROTOCOL_VERSION else "connector"
        raise Mismatch(
            f"this client speaks protocol version {_range(lowest, highest)}, this server "
            f"{_range(MIN_PROTOCOL_VERSION, PROTOCOL_VERSION)}: upgrade the {older}"
        )
    return version


def _range(lowest: int, highest: int) -> str:
    return str(highest) if lowest == highest else f"{lowest} to {highest}"


def _right_for(request: Message) -> int:
    """What a session must be allowed to do for this call. Whether a block is here, a writer may know as well."""
    if isinstance(request, pb.ReserveRequest | pb.CommitRequest):
        return WRITE
    return READ if isinstance(request, pb.LookupRequest) and request.lease else 0


def _attachment(request: pb.AttachRequest, tenant: str, descriptors_are_served: bool) -> Attachment:
    if request.role not in (pb.ROLE_SCHEDULER, pb.ROLE_WORKER):
        raise InvalidRequest(f"role {request.role} is neither scheduler nor worker")
    is_worker = request.role == pb.ROLE_WORKER
    if is_worker != request.HasField("shard"):
        raise InvalidRequest("a worker has a shard, a scheduler has none")
    namespace, shard = request.namespace, request.shard
    texts = {
        "engine_id": request.engine_id,
        "client_name": request.client_name,
        "namespace text": namespace.text,
        "shard descriptor": shard.descriptor,
    }
    for name, text in texts.items():
        if len(text) > MAX_TEXT_BYTES:
            raise InvalidRequest(f"{name} of {len(text)} bytes; at most {MAX_TEXT_BYTES}")
    return Attachment(
        engine_id=request.engine_id,
        client_name=request.client_name,
        pid=request.pid,
        fingerprint=namespace.fingerprint,
        text=namespace.text,
        key_bytes=namespace.key_bytes,
        num_shards=namespace.num_shards,
        shard=Shard(shard.index, shard.payload_bytes, shard.descriptor, shard.replica) if is_worker else None,
        wants_descriptors=request.wants_descriptors and descriptors_are_served,
        tenant=tenant,
        num_replicas=request.num_replicas or 1,
    )


def _checksums(checksums: npt.NDArray[np.uint64], request: pb.LookupRequest) -> bytes:
    return checksums.astype("<u8", copy=False).tobytes() if request.wants_checksums else b""


def _groups(request: pb.LookupRequest) -> list[GroupQuestion]:
    return [GroupQuestion(group.fingerprint, group.window, group.num_replicas or 1) for group in request.groups]


def _blocks(session: Session, batch: pb.CommitRequest | pb.PutHeader) -> Blocks:
    """The columns of a batch; absent parents and checksums are legal where they mean nothing."""
    key_bytes = session.namespace.key_bytes
    keys = _split("keys", batch.keys, key_bytes)
    depths = _unpack("depths", batch.depths, "<u4")
    parents = _split("parent_keys", batch.parent_keys, key_bytes)
    checksums = _unpack("checksums", batch.checksums, "<u8") or [0] * len(keys)
    for name, column in (("depths", depths), ("parent_keys", parents), ("checksums", checksums)):
        if len(column) != len(keys):
            raise InvalidRequest(f"{len(column)} {name} for {len(keys)} keys")
    return Blocks(keys, parents, depths, checksums)


def _lease_ids(request: pb.ReleaseRequest | pb.RenewRequest) -> list[int]:
    if len(request.lease_ids) > MAX_LEASE_IDS:
        raise InvalidRequest(f"{len(request.lease_ids)} leases in one call; at most {MAX_LEASE_IDS}")
    return list(request.lease_ids)


def _split(name: str, packed: bytes, item_bytes: int) -> list[bytes]:
    check_packed(name, packed, item_bytes)
    items: list[bytes] = np.frombuffer(packed, dtype=f"V{item_bytes}").tolist()
    return items


def _unpack(name: str, packed: bytes, dtype: str) -> list[int]:
    check_packed(name, packed, np.dtype(dtype).itemsize)
    numbers: list[int] = np.frombuffer(packed, dtype=dtype).tolist()
    return numbers


def _check_piece(piece: wire.PutPiece, position: int, num_payloads: int, written: int, payload_bytes: int) -> None:
    if position >= num_payloads:
        raise InvalidRequest(f"data beyond the {num_payloads} payloads of the header")
    if piece.index != position or piece.offset != written:
        raise InvalidRequest(
            f"payload {piece.index} at {piece.offset}, expected was payload {position} at {written}: payloads have "
            f"{payload_bytes} bytes and come in order"
        )
    if written + len(piece.data) > payload_bytes:
        raise InvalidRequest(
            f"payload {position} has at least {written + len(piece.data)} bytes, "
            f"payloads of this shard have {payload_bytes}"
        )


# --- streams --------------------------------------------------------------------------------------------------


def _aborting(
    method: _Method,
) -> _Method:
    async def call(request: Any, context: _Context) -> Any:
        try:
            return await method(request, context)
        except RequestError as error:
            await _abort(context, error)
            raise
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing moved for {STALL_S:.0f} s")
            raise

    return call


async def _abort(context: _Context, error: RequestError) -> None:
    hint = pushback(error.retry_ms) if isinstance(error, TooMany) and error.retry_ms else ()
    await context.abort(_CODES[type(error)], str(error), hint)


async def _write(context: _Context, message: bytes) -> None:
    async with asyncio.timeout(STALL_S):
        await context.write(message)


async def _read_piece(context: _Context) -> wire.PutPiece | None:
    async with asyncio.timeout(STALL_S):
        message = await context.read()
    if message is grpc.aio.EOF:
        return None
    if len(message) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"PutChunk of {len(message)} bytes; a message may have at most {MAX_MESSAGE_BYTES} bytes")
    try:
        piece = wire.parse_put_chunk(message)
    except wire.WireError as error:
        raise InvalidRequest(f"PutChunk cannot be decoded: {error}") from None
    if len(piece.data) > CHUNK_BYTES:
        raise InvalidRequest(f"{len(piece.data)} bytes of data in one message; at most {CHUNK_BYTES}")
    return piece
