"""What goes into and comes out of the cache: requests and answers as plain values, and the statuses of a commit.

The border to protobuf is `service.py`; these types know nothing of it. Checks of single fields are where the values
are used, because only there is known what they must agree with.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_server.arena import Slots
from cache_server.index import Index
from cache_server.tenants import READ, WRITE

STORED, ALREADY_PRESENT, REFUSED, DROPPED = 1, 2, 3, 4  # CommitStatus of the wire


class PayloadName(NamedTuple):
    """Names a payload in every tier, together with its size. A tuple, because commits make them by the thousand."""

    namespace: bytes
    key: bytes
    shard: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One worker's part of every block, as its process describes it."""

    index: int
    payload_bytes: int
    descriptor: bytes
    replica: int = 0  # which of the engine's workers that read it


@dataclass(frozen=True, slots=True)
class Attachment:
    """Who attaches. `shard` is None for a scheduler side."""

    engine_id: str
    client_name: str
    pid: int
    fingerprint: bytes
    text: str
    key_bytes: int
    num_shards: int
    shard: Shard | None
    wants_descriptors: bool
    tenant: str = ""
    rights: int = READ | WRITE
    token_digest: str = field(default="", repr=False)
    num_replicas: int = 1  # workers of the engine that read one shard


@dataclass(frozen=True, slots=True)
class GroupQuestion:
    """Another kind of blocks that a lookup needs, under the same keys in a namespace of its own."""

    fingerprint: bytes
    window: int  # how many right before a boundary; 0: all
    num_replicas: int


@dataclass(frozen=True, slots=True)
class GroupHit:
    """What is present of a group, and what is promised: [hit_start, the lookup's hit_end)."""

    present: npt.NDArray[np.bool_]
    hit_start: int
    slots: Slots  # [num_shards][hit_end - hit_start]
    generations: npt.NDArray[np.uint32]
    checksums: npt.NDArray[np.uint64]  # 0: none was made


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Which blocks are present; [hit_start, hit_end) is promised, or merely present when no lease was asked.

    Slots come with a lease only: without the promise they are worth nothing.
    """

    present: npt.NDArray[np.bool_]
    hit_start: int
    hit_end: int
    lease_id: int
    slots: Slots  # [num_shards][hit_end - hit_start]
    generations: npt.NDArray[np.uint32]
    checksums: npt.NDArray[np.uint64]  # 0: none was made
    retry: bool
    missing_workers: int
    groups: tuple[GroupHit, ...] = ()


@dataclass(frozen=True, slots=True)
class Blocks:
    """A batch of names to give, column by column."""

    keys: list[bytes]
    parent_keys: list[bytes]
    depths: list[int]
    checksums: list[int]


@dataclass(frozen=True, slots=True)
class PutSlot:
    """A slot that the server itself fills, for one payload of one Put."""

    slot: int
    flush_epoch: int
    bytes: npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class HeldPayload:
    """One payload that cannot be evicted until `drop_payload`; a flush shows in its generation."""

    index: Index
    row: int
    shard: int
    slot: int
    generation: int
    checksum: int  # 0: not known
    bytes: npt.NDArray[np.uint8]
    generations: npt.NDArray[np.uint32]  # of this slot: one number, read by any thread

    @property
    def is_intact(self) -> bool:
        """What was copied since `hold_payload` is the payload; a flush is the only thing that can change that."""
        return int(self.generations[0]) == self.generation


@dataclass(frozen=True, slots=True)
class NamespaceFigures:
    """One namespace, for people."""

    fingerprint: bytes
    text: str
    num_blocks: int
    num_complete: int
    stored_bytes: int
    num_shards: int
    age_s: float  # since its first session attached
    idle_s: float  # since somebody attached, looked up or stored last
    num_leased: int  # blocks that somebody was promised
    tenant: str = ""
