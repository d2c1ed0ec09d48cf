"""A server stops and the next one goes on with its memory: what is kept, what is believed, what is held back.

    stop ─▶ keep:   names of the index ─▶ snapshot; segments stay where they are
    start ─▶ reopen: snapshot ─▶ taken, checked ─▶ segments opened ─▶ names back       any doubt ─▶ empty, one line

What is *not* kept: leases, sessions, reservations. Clients attach anew and ask anew; a payload that had no name yet is
lost, as in any restart. A reader of the old server that is in the middle of a copy has the very generations mapped
that this server raises: it sees that its slot was used again. A *writer* cannot be stopped so. The slots of
sessions that were not over at the stop are **held**: nobody gets them until no process of the earlier server's time
has their segment open any more. The kernel tells (`persist.is_open_elsewhere`).

Not here: the files, the format.
"""

import logging
import time
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from cache_server.arena import Arena, Slots, segments_of
from cache_server.cache import Cache
from cache_server.index import Index
from cache_server.namespaces import Namespace, ShardLayout
from cache_server.persist import PersistError, PersistFolder, boot_id, is_open_elsewhere
from cache_server.segments import Segment
from cache_server.snapshot import (
    KeptNamespace,
    KeptSegment,
    KeptShard,
    Snapshot,
    SnapshotError,
    pack,
    unpack,
)

ASK_EVERY_S: Final = 5.0  # how often the kernel is asked whether held slots may be used again
_log = logging.getLogger(__name__)


class WarmRestart:
    """One folder, the arena whose segments lie there, and what is held back."""

    def __init__(self, path: Path, memory_bytes: int, segment_bytes: int) -> None:
        """PersistError: the folder cannot be used."""
        self.folder = PersistFolder(path)
        self.folder.open(memory_bytes)
        self.arena = Arena(memory_bytes, segment_bytes, self.folder.new_segment, self.folder.drop_segment)
        self._held: list[tuple[Namespace, Segment, Slots]] = []
        self._ask_at = 0.0

    # --- start ----------------------------------------------------------------------------------------------

    def reopen(self, cache: Cache) -> None:
        """Fill an empty cache with what the last server kept, or with nothing."""
        began = time.monotonic()
        try:
            data = self.folder.take_snapshot()
            if data is None:
                if self.folder.remove_all_but(set()):
                    _log.warning("persist: starting empty: the last server did not stop cleanly")
                return
            snapshot = unpack(data, boot_id(), self.arena.segment_bytes, self.arena.max_segments)
            num_blocks = self._adopt(cache, snapshot)
        except (PersistError, SnapshotError, OSError) as error:
            self.folder.remove_all_but(set())
            _log.warning("persist: starting empty: %s", error)
            return
        self.folder.remove_all_but({segment.id for segment in snapshot.segments})
        _log.info(
            "persist: %d blocks, %d MiB taken over in %.0f ms from a server that stopped %.0f s ago",
            num_blocks,
            cache.arena.stored_bytes >> 20,
            (time.monotonic() - began) * 1000,
            max(0.0, time.time() - snapshot.stopped_at),
        )

    def _adopt(self, cache: Cache, snapshot: Snapshot) -> int:
        """Everything is made and compared first, then it is put in place: there is no half of it."""
        segments: dict[int, Segment] = {}
        try:
            for kept in snapshot.segments:
                segment = self.folder.open_segment(kept.id, snapshot.segment_bytes, kept.stamps)
                segments[kept.id] = segment
                if xxhash.xxh3_64_intdigest(segment.generations.data) != kept.generations_checksum:
                    raise SnapshotError(f"the generations of segment {kept.id} were changed")
            indices = [_index_of(kept, segments, cache.now()) for kept in snapshot.namespaces]
        except BaseException:
            for segment in segments.values():
                segment.close()
            raise
        namespaces = [
            cache.adopt_namespace(_namespace_of(self.arena, kept, index))
            for kept, index in zip(snapshot.namespaces, indices, strict=True)
        ]
        named = [_in_segments(index.all_slots()) for index in indices]
        held = [_in_segments(kept.held) for kept in snapshot.namespaces]
        nothing = np.empty(0, dtype=np.uint64)
        for kept in snapshot.segments:
            segment = segments[kept.id]
            if not kept.payload_bytes:
                self.arena.adopt(segment, None, nothing, nothing, kept.owner)
                continue
            namespace = namespaces[kept.namespace]
            here = held[kept.namespace].get(kept.id, nothing)
            slot_class = self.arena.slot_class(namespace.fingerprint, kept.payload_bytes, namespace.tenant)
            self.arena.adopt(segment, slot_class, named[kept.namespace].get(kept.id, nothing), here, kept.owner)
            if len(here):
                self._held.append((namespace, segment, here))
        cache.adopt_age(snapshot.age)
        return sum(len(index) for index in indices)

    # --- meanwhile ------------------------------------------------------------------------------------------

    def give_back_held(self, cache: Cache) -> None:
        """Slots that nobody can write into any more become free."""
        if not self._held or cache.now() < self._ask_at:
            return
        self._ask_at = cache.now() + ASK_EVERY_S
        still: list[tuple[Namespace, Segment, Slots]] = []
        for namespace, segment, slots in self._held:
            if is_open_elsewhere(segment):
                still.append((namespace, segment, slots))
            else:
                cache.give_back_held(namespace, slots)
        self._held = still

    # --- stop -----------------------------------------------------------------------------------------------

    def keep(self, cache: Cache) -> None:
        """The last act: nobody is served any more."""
        began = time.monotonic()
        namespaces = cache.namespaces
        positions = {id(namespace): position for position, namespace in enumerate(namespaces)}
        held: list[list[Slots]] = [[] for _ in namespaces]
        for namespace, _, slots in self._held:
            if id(namespace) in positions:
                held[positions[id(namespace)]].append(slots)
        for session in cache.sessions:
            if session.is_mapped and session.reserved:
                slots = np.fromiter(session.reserved, np.uint64, len(session.reserved))
                held[positions[id(session.namespace)]].append(slots)
        by_fingerprint = {namespace.fingerprint: position for position, namespace in enumerate(namespaces)}
        segments = [
            self._kept(cut.segment, by_fingerprint[cut.slot_class.namespace], cut.slot_class.payload_bytes)
            for slot_class in self.arena.classes
            for cut in slot_class.cuts.values()
        ]
        segments.extend(self._kept(segment, 0, 0) for segment in self.arena.spares)
        snapshot = Snapshot(
            boot_id(),
            self.arena.segment_bytes,
            segments,
            [_kept_namespace(namespace, held[i]) for i, namespace in enumerate(namespaces)],
            cache.age,
            time.time(),
        )
        try:
            self.folder.remove_all_but({segment.id for segment in segments})
            data = pack(snapshot)
            self.folder.write_snapshot(data)
        except OSError as error:
            self.folder.remove_all_but(set())
            _log.error("persist: nothing is kept: %s", error)
            return
        _log.info(
            "persist: %d blocks, %d MiB kept in %s, snapshot of %d bytes in %.0f ms",
            sum(len(namespace.columns) for namespace in snapshot.namespaces),
            self.arena.stored_bytes >> 20,
            self.folder.path,
            len(data),
            (time.monotonic() - began) * 1000,
        )

    def _kept(self, segment: Segment, namespace: int, payload_bytes: int) -> KeptSegment:
        checksum = xxhash.xxh3_64_intdigest(segment.generations.data)
        owner = self.arena.owner_of(segment)
        return KeptSegment(segment.id, namespace, payload_bytes, self.folder.stamps(segment.id), checksum, owner)


def _kept_namespace(namespace: Namespace, held: list[Slots]) -> KeptNamespace:
    shards = [
        KeptShard(index, layout.slot_class.payload_bytes, layout.descriptor)
        for index, layout in sorted(namespace.shards.items())
    ]
    slots = np.concatenate(held) if held else np.empty(0, dtype=np.uint64)
    columns = namespace.index.columns()
    return KeptNamespace(
        namespace.fingerprint,
        namespace.text,
        namespace.num_shards,
        shards,
        columns,
        slots,
        namespace.tenant,
        namespace.given,
        namespace.generations,
    )


def _index_of(kept: KeptNamespace, segments: dict[int, Segment], now: float) -> Index:
    """Its names, after each generation was compared with the segment's own."""
    slots, generations = kept.columns.slots.ravel(), kept.columns.generations.ravel()
    ids = segments_of(slots)
    for segment_id in np.unique(ids).tolist():
        if segment_id:
            here = ids == segment_id
            starts = (slots[here] & np.uint64(0xFFFFFFFF)).astype(np.int64)
            if (segments[segment_id].generations[starts] != generations[here]).any():
                raise SnapshotError(f"payloads of segment {segment_id} were replaced")
    try:
        return Index.of_columns(kept.columns, kept.num_shards, now)
    except ValueError as error:
        raise SnapshotError(f"the snapshot is wrong: {error}") from None


def _namespace_of(arena: Arena, kept: KeptNamespace, index: Index) -> Namespace:
    namespace = Namespace(
        kept.fingerprint, kept.text, index, tenant=kept.tenant, given=kept.given, generations=kept.generations
    )
    for shard in kept.shards:
        slot_class = arena.slot_class(kept.fingerprint, shard.payload_bytes, kept.tenant)
        namespace.shards[shard.index] = ShardLayout(shard.descriptor, slot_class)
    return namespace


def _in_segments(slots: Slots) -> dict[int, Slots]:
    ids = segments_of(slots)
    return {segment_id: slots[ids == segment_id] for segment_id in np.unique(ids).tolist()}
