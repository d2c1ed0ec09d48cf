"""A lookup over several kinds of blocks at once: one boundary, one lease, one answer.

A model with several kinds of layers has one namespace per kind; a block has the same key in all of them. A boundary is
promised only when every kind has what it needs there (`boundaries.py`), and what is promised of all kinds is held by
one lease: it cannot be that the attention layers' blocks stay and the state they need goes.

Why the server does it and not the engine: only here can presence and promise be one step, and only here is known
which blocks are needed at all, so that a lower tier is asked for nothing else.

Not here: what the kinds are. A window is a number of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cache_server.arena import NO_SLOTS
from cache_server.boundaries import Flags, Numbers, open_boundaries, starts
from cache_server.errors import InvalidRequest
from cache_server.index import Rows
from cache_server.namespaces import Namespace
from cache_server.sessions import Session
from cache_server.tenants import kept_as
from cache_server.values import GroupHit, GroupQuestion, LookupResult

if TYPE_CHECKING:
    from cache_server.cache import Cache

MAX_GROUPS = 64  # a bound for mistakes: kinds of layers of one model
MAX_LOOKUP_SLOTS = 256 * 1024  # that one lookup promises: its reply stays below 4 MiB


@dataclass(slots=True)
class _Group:
    """One kind, as it is in memory now."""

    namespace: Namespace
    window: int
    rows: Rows
    present: Flags

    def starts(self, first: int | None) -> Numbers:
        """For each boundary, where its run begins; no earlier than `first`, which the asker has itself."""
        begin = starts(self.present, self.window)
        return begin if first is None else np.maximum(begin, first)

    def fresh_bytes(self, begin: Numbers) -> Numbers:
        """For each boundary, what would be held that nobody holds yet."""
        fresh = np.concatenate(([0], np.cumsum(self.namespace.index.num_leases[self.rows] == 0)))
        num_bytes: Numbers = (fresh - fresh[begin]) * self.namespace.block_bytes
        return num_bytes

    def num_slots(self, begin: Numbers) -> Numbers:
        return (np.arange(len(begin)) - begin) * self.namespace.num_shards

    def hit(self, start: int, end: int, *, with_slots: bool) -> GroupHit:
        rows = self.rows[start:end] if with_slots else self.rows[:0]
        index = self.namespace.index
        return GroupHit(self.present, start, index.slots[rows].T, index.generations[rows].T, index.checksums[rows].T)


def lookup(
    cache: "Cache",
    session: Session,
    packed_keys: bytes,
    first: int,
    lease: bool,
    window: int,
    questions: Sequence[GroupQuestion],
    min_hit_blocks: int,
    max_hit_blocks: int | None,
) -> LookupResult:
    """See `Cache.lookup`; group 0 is the session's namespace."""
    if len(questions) > MAX_GROUPS:
        raise InvalidRequest(f"{len(questions)} groups in one lookup; at most {MAX_GROUPS}")
    num_keys = len(packed_keys) // session.namespace.key_bytes
    if first > num_keys or len(packed_keys) % session.namespace.key_bytes:
        raise InvalidRequest(f"first is {first}, but there are {num_keys} keys in {len(packed_keys)} bytes")
    cache.expire()
    missing = cache.sessions.missing_workers(session)
    named: list[tuple[Namespace | None, int]] = [(session.namespace, window)]
    for question in questions:
        namespace = cache.namespace(kept_as(session.namespace.tenant, question.fingerprint))
        named.append((namespace, question.window))
        if namespace is None or namespace.key_bytes != session.namespace.key_bytes:
            missing += 1
        else:
            missing += cache.sessions.missing_workers_of(session.engine_id, namespace, question.num_replicas)
    if missing:
        cache.counters.lookups_without_workers += 1
        return _nothing(num_keys, first, missing, len(questions))
    groups = []
    for namespace, its_window in named:
        assert namespace is not None
        rows = namespace.index.find(packed_keys)
        groups.append(_Group(namespace, its_window, rows, namespace.index.complete[rows]))

    is_open = open_boundaries([group.present for group in groups], [group.window for group in groups], first)
    retry = False
    begins = [group.starts(None) for group in groups]
    if lease and is_open.any():
        if max_hit_blocks is not None:
            is_open[first + max_hit_blocks + 1 :] = False
        is_open[: first + min_hit_blocks] = False
        cache.counters.gate_stream_shut += not is_open.any()
        best = _last(is_open)
        if best is not None and not _fits(cache, groups, begins)[best]:
            begins = [group.starts(first) for group in groups]
            is_open &= _fits(cache, groups, begins)
            cache.counters.leases_capped += 1
            retry = True
    best = _last(is_open)
    end = first if best is None else best
    ranges = [(first, first) if best is None else (int(begin[end]), end) for begin in begins]
    promised = [group.rows[start:stop] for group, (start, stop) in zip(groups, ranges, strict=True)]
    for group, rows in zip(groups, promised, strict=True):
        cache.check_distinct(rows)
        cache.touch(group.namespace.index, rows)
    lease_id = 0
    if lease and end > first:
        of_index = [(group.namespace.index, rows) for group, rows in zip(groups, promised, strict=True)]
        lease_id = cache.leases.grant(session.id, *of_index[0], *of_index[1:])
        cache.counters.leases_granted += 1
        for group, rows in zip(groups, promised, strict=True):
            cache.tell_of_use(group.namespace, rows)
    for group in groups:
        group.namespace.used_at = cache.now()
    if lease:
        num_bytes = sum(
            (stop - max(start, first)) * group.namespace.payload_bytes
            for group, (start, stop) in zip(groups, ranges, strict=True)
        )
        cache.count_lookup(num_keys, first, end, num_bytes)
    else:
        cache.count_presence(np.logical_and.reduce([group.present for group in groups]))
    hits = [
        group.hit(start, stop, with_slots=lease_id != 0) for group, (start, stop) in zip(groups, ranges, strict=True)
    ]
    return _result(hits, end, lease_id, retry=retry, missing_workers=0)


def _result(hits: Sequence[GroupHit], end: int, lease_id: int, *, retry: bool, missing_workers: int) -> LookupResult:
    own, *others = hits
    return LookupResult(
        own.present,
        own.hit_start,
        end,
        lease_id,
        own.slots,
        own.generations,
        own.checksums,
        retry,
        missing_workers,
        tuple(others),
    )


def _fits(cache: "Cache", groups: Sequence[_Group], begins: Sequence[Numbers]) -> Flags:
    """For each boundary: whether what it needs may still be leased, and named in one reply."""
    num_bytes = np.sum([group.fresh_bytes(begin) for group, begin in zip(groups, begins, strict=True)], axis=0)
    num_slots = np.sum([group.num_slots(begin) for group, begin in zip(groups, begins, strict=True)], axis=0)
    fits: Flags = (num_bytes <= max(cache.leasable_bytes_of(groups[0].namespace.tenant), 0)) & (
        num_slots <= MAX_LOOKUP_SLOTS
    )
    return fits


def _last(flags: Flags) -> int | None:
    found = np.flatnonzero(flags)
    return int(found[-1]) if len(found) else None


def _nothing(num_keys: int, first: int, missing_workers: int, num_groups: int) -> LookupResult:
    """What is there is not told: it could not be loaded, and what the missing ones lack is not known."""
    none = np.zeros(num_keys, dtype=np.bool_)
    no_slots = NO_SLOTS.reshape(1, 0)
    hit = GroupHit(none, first, no_slots, no_slots.astype(np.uint32), no_slots.astype(np.uint64))
    return _result([hit] * (1 + num_groups), first, 0, retry=False, missing_workers=missing_workers)
