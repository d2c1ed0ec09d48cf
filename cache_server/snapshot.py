"""What a clean stop writes down: which names lie where in the segments that stay. Bytes ↔ values, and nothing else.

The layout is in docs/formats.md. Reading never trusts: whatever is not exactly as it was written is a `SnapshotError`,
and what is read is plain numbers and texts, checked against each other before anything is made of it.

Not here: files (`persist.py`), the cache (`warm_restart.py`).
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from cache_server.arena import Slots, segments_of
from cache_server.index import Columns
from cache_server.namespaces import MAX_SHARDS, NO_GENERATIONS
from cache_server.persist import Stamp
from cache_server.segments import GRANULE_BYTES
from cache_server.tenants import kept_as

MAGIC: Final = b"prefixdS"
FORMAT_VERSION: Final = 2
_HEADER: Final = struct.Struct("<8sII16sQQQ16s")  # magic, version, zero, boot, segment bytes, manifest, body, checksum
_MAX_NUMBER: Final = 1 << 63


class SnapshotError(ValueError):
    """It cannot be used; the message says why, on one line."""


@dataclass(frozen=True, slots=True)
class KeptSegment:
    """One segment. Without a payload size it is spare."""

    id: int
    namespace: int  # position among the namespaces
    payload_bytes: int
    stamps: tuple[Stamp, Stamp]
    generations_checksum: int
    owner: str | None = None  # the tenant that has seen it; None: nobody has


@dataclass(frozen=True, slots=True)
class KeptShard:
    """What the first session of a shard had fixed."""

    index: int
    payload_bytes: int
    descriptor: bytes


@dataclass(frozen=True, slots=True)
class KeptNamespace:
    """One namespace and its blocks."""

    fingerprint: bytes
    text: str
    num_shards: int
    shards: list[KeptShard]
    columns: Columns
    held: Slots  # reserved by sessions that were not over: somebody may still write there
    tenant: str = ""
    given: bytes = b""  # the fingerprint as clients compute it
    generations: bytes = NO_GENERATIONS  # in Redis, when the server stopped


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything."""

    boot_id: bytes
    segment_bytes: int
    segments: list[KeptSegment]
    namespaces: list[KeptNamespace]
    age: int  # of the youngest use
    stopped_at: float  # seconds since 1970


def pack(snapshot: Snapshot) -> bytes:
    """Values → bytes."""
    manifest = json.dumps(
        {
            "age": snapshot.age,
            "stopped_at": snapshot.stopped_at,
            "segments": [
                {
                    "id": segment.id,
                    "namespace": segment.namespace,
                    "payload_bytes": segment.payload_bytes,
                    "stamps": [[stamp.device, stamp.inode, stamp.num_bytes] for stamp in segment.stamps],
                    "generations_checksum": segment.generations_checksum,
                    "owner": segment.owner,
                }
                for segment in snapshot.segments
            ],
            "namespaces": [
                {
                    "fingerprint": namespace.fingerprint.hex(),
                    "text": namespace.text,
                    "tenant": namespace.tenant,
                    "given": namespace.given.hex(),
                    "generations": namespace.generations.hex(),
                    "key_bytes": namespace.columns.keys.shape[1] * 8,
                    "num_shards": namespace.num_shards,
                    "shards": [
                        [shard.index, shard.payload_bytes, shard.descriptor.hex()] for shard in namespace.shards
                    ],
                    "num_blocks": len(namespace.columns),
                    "num_orphans": len(namespace.columns.orphans),
                    "num_held": len(namespace.held),
                }
                for namespace in snapshot.namespaces
            ],
        }
    ).encode()
    parts = [manifest]
    for namespace in snapshot.namespaces:
        columns = namespace.columns
        for column, dtype in zip(
            (
                *(columns.keys, columns.parents, columns.depths, columns.uses, columns.slots, columns.generations),
                *(columns.checksums, columns.orphans, columns.orphan_parents, namespace.held),
            ),
            _DTYPES,
            strict=True,
        ):
            parts.append(np.ascontiguousarray(column, dtype=dtype).tobytes())
    body = b"".join(parts)
    header = _HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        0,
        snapshot.boot_id,
        snapshot.segment_bytes,
        len(manifest),
        len(body),
        xxhash.xxh3_128_digest(body),
    )
    return header + body


_DTYPES: Final = ("<u8", "<u4", "<u4", "<i8", "<u8", "<u4", "<u8", "<u4", "<u8", "<u8")


def unpack(data: bytes, boot_id: bytes, segment_bytes: int, max_segments: int) -> Snapshot:
    """Bytes → values that agree with each other, with this boot of the machine and with these segments."""
    if len(data) < _HEADER.size:
        raise SnapshotError(f"the snapshot has {len(data)} bytes")
    magic, version, _, boot, its_segment_bytes, manifest_bytes, body_bytes, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise SnapshotError("the snapshot begins with something else")
    if version != FORMAT_VERSION:
        raise SnapshotError(f"the snapshot has format {version}, this server reads {FORMAT_VERSION}")
    body = memoryview(data)[_HEADER.size :]
    if len(body) != body_bytes or manifest_bytes > body_bytes:
        raise SnapshotError(f"the snapshot has {len(body)} of {body_bytes} bytes")
    if xxhash.xxh3_128_digest(body) != checksum:
        raise SnapshotError("the snapshot's checksum does not match")
    if boot != boot_id:
        raise SnapshotError("the snapshot is older than the machine's start")
    if its_segment_bytes != segment_bytes:
        raise SnapshotError(
            f"the segments have {its_segment_bytes} bytes, with this --memory they have {segment_bytes}"
        )
    try:
        snapshot = _read(body, manifest_bytes, boot, segment_bytes)
        _check(snapshot, max_segments)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise error if isinstance(error, SnapshotError) else SnapshotError(f"the snapshot is wrong: {error}") from None
    return snapshot


def _read(body: memoryview, manifest_bytes: int, boot: bytes, segment_bytes: int) -> Snapshot:
    manifest = json.loads(bytes(body[:manifest_bytes]))
    reader = _Reader(body[manifest_bytes:])
    namespaces = []
    for entry in manifest["namespaces"]:
        key_bytes, num_shards = _number(entry["key_bytes"]), _number(entry["num_shards"])
        if key_bytes not in (16, 32) or not 1 <= num_shards <= MAX_SHARDS:
            raise SnapshotError(f"keys of {key_bytes} bytes, {num_shards} shards")
        count, num_orphans, num_held = (_number(entry[name]) for name in ("num_blocks", "num_orphans", "num_held"))
        words = key_bytes // 8
        shapes = [
            *((count, words), (count,), (count,), (count,), (count, num_shards), (count, num_shards)),
            *((count, num_shards), (num_orphans,), (num_orphans, words), (num_held,)),
        ]
        *columns, held = (reader.take(dtype, shape) for dtype, shape in zip(_DTYPES, shapes, strict=True))
        shards = [KeptShard(_number(i), _number(size), bytes.fromhex(d)) for i, size, d in entry["shards"]]
        namespaces.append(
            KeptNamespace(
                bytes.fromhex(entry["fingerprint"]),
                str(entry["text"]),
                num_shards,
                shards,
                Columns(*columns),
                held,
                str(entry["tenant"]),
                bytes.fromhex(entry["given"]),
                bytes.fromhex(entry["generations"]),
            )
        )
    reader.end()
    segments = [
        KeptSegment(
            _number(entry["id"]),
            _number(entry["namespace"]),
            _number(entry["payload_bytes"]),
            _stamps(entry["stamps"]),
            int(entry["generations_checksum"]),
            None if entry["owner"] is None else str(entry["owner"]),
        )
        for entry in manifest["segments"]
    ]
    age, stopped_at = _number(manifest["age"]), float(manifest["stopped_at"])
    return Snapshot(boot, segment_bytes, segments, namespaces, age, stopped_at)


def _stamps(entries: Any) -> tuple[Stamp, Stamp]:
    memory, generations = (Stamp(*(int(number) for number in entry)) for entry in entries)
    return memory, generations


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_NUMBER:
        raise SnapshotError(f"{value!r} is no count")
    return value


class _Reader:
    """Columns, one after the other."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._offset = 0

    def take(self, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        count = 1
        for extent in shape:
            count *= extent
        end = self._offset + count * np.dtype(dtype).itemsize
        if end > len(self._data):
            raise SnapshotError("a column ends after the snapshot")
        column = np.frombuffer(self._data[self._offset : end], dtype=dtype).reshape(shape)
        self._offset = end
        return column

    def end(self) -> None:
        if self._offset != len(self._data):
            raise SnapshotError("the snapshot goes on after its last column")


# --- what must agree ------------------------------------------------------------------------------------------


def _check(snapshot: Snapshot, max_segments: int) -> None:
    segments = {segment.id: segment for segment in snapshot.segments}
    if len(segments) != len(snapshot.segments) or 0 in segments or max(segments, default=0) >> 31:
        raise SnapshotError("segment ids are not distinct numbers from 1")
    if len(segments) > max_segments:
        raise SnapshotError(f"{len(segments)} segments; this --memory has room for {max_segments}")
    fingerprints = [namespace.fingerprint for namespace in snapshot.namespaces]
    if len(set(fingerprints)) != len(fingerprints) or any(len(fingerprint) != 32 for fingerprint in fingerprints):
        raise SnapshotError("namespaces are not distinct")
    for namespace in snapshot.namespaces:
        if kept_as(namespace.tenant, namespace.given) != namespace.fingerprint:
            raise SnapshotError("a namespace is not the tenant's that it names")
        if len(namespace.generations) != len(NO_GENERATIONS):
            raise SnapshotError(f"generations of {len(namespace.generations)} bytes")
    for segment in snapshot.segments:
        if segment.payload_bytes == 0:
            continue
        if segment.namespace >= len(snapshot.namespaces):
            raise SnapshotError(f"segment {segment.id} is of a namespace that is not there")
        if segment.owner != snapshot.namespaces[segment.namespace].tenant:
            raise SnapshotError(f"segment {segment.id} is another tenant's")
        sizes = {shard.payload_bytes for shard in snapshot.namespaces[segment.namespace].shards}
        if segment.payload_bytes not in sizes or segment.payload_bytes > snapshot.segment_bytes:
            raise SnapshotError(f"segment {segment.id} is cut for {segment.payload_bytes} bytes")
    for position, namespace in enumerate(snapshot.namespaces):
        _check_slots(position, namespace, segments, snapshot.segment_bytes)


def _check_slots(position: int, namespace: KeptNamespace, segments: dict[int, KeptSegment], segment_bytes: int) -> None:
    indices = [shard.index for shard in namespace.shards]
    if len(set(indices)) != len(indices) or any(index >= namespace.num_shards for index in indices):
        raise SnapshotError(f"shards {indices} of {namespace.num_shards}")
    sizes = {shard.index: shard.payload_bytes for shard in namespace.shards}
    slots = namespace.columns.slots
    for shard in range(namespace.num_shards):
        named = slots[:, shard][slots[:, shard] != 0]
        if len(named) and shard not in sizes:
            raise SnapshotError(f"payloads of shard {shard}, which nobody has described")
        for segment_id, _ in _by_segment(named):
            segment = segments.get(segment_id)
            if segment is None or segment.namespace != position or segment.payload_bytes != sizes[shard]:
                raise SnapshotError(f"payloads of shard {shard} in segment {segment_id}")
    every = np.concatenate((slots[slots != 0], namespace.held))
    every.sort()
    if (every[1:] == every[:-1]).any():
        raise SnapshotError("two payloads in one slot")
    for segment_id, here in _by_segment(every):
        segment = segments.get(segment_id)
        if segment is None or segment.namespace != position or not segment.payload_bytes:
            raise SnapshotError(f"slots in segment {segment_id}")
        granules = -(-segment.payload_bytes // GRANULE_BYTES)
        starts = (here & np.uint64(0xFFFFFFFF)).astype(np.int64)
        if (starts % granules).any() or int(starts.max()) + granules > segment_bytes // GRANULE_BYTES:
            raise SnapshotError(f"slots of segment {segment_id} are not where slots are")


def _by_segment(slots: Slots) -> Iterator[tuple[int, Slots]]:
    ordered = np.sort(slots)
    ids = segments_of(ordered)
    edges = np.flatnonzero(np.diff(ids)) + 1
    for start, end in pairwise((0, *edges.tolist(), len(ids))):
        if end > start:
            yield int(ids[start]), ordered[start:end]
