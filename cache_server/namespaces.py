"""One namespace: what its blocks look like and where their names are.

The first session that attaches fixes number of shards and key size; the first session of each shard fixes payload
size and layout (the shard descriptor, opaque here). All others must agree: bytes written in one layout and read in
another would be wrong blocks. What is fixed is forgotten with the last block and the last session.

`flush_epoch` counts flushes. A slot reserved in an earlier epoch may hold a payload computed before the flush,
so it cannot get a name.

Not here: the namespace's fingerprint is computed by clients; what it is kept under, and who may, says `tenants.py`.
"""

from dataclasses import dataclass, field

from cache_server.arena import SlotClass
from cache_server.errors import InvalidRequest, Mismatch
from cache_server.index import Index
from cache_server.values import Attachment

NO_GENERATIONS = bytes(16)
MAX_SHARDS = 256  # tensor times pipeline parallel size; columns of the index are that wide


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """What the first session of a shard has fixed."""

    descriptor: bytes
    slot_class: SlotClass


@dataclass(slots=True, eq=False)
class Namespace:
    """Blocks that may be compared by key."""

    fingerprint: bytes  # as it is kept here and in Redis (`tenants.kept_as`)
    text: str
    index: Index
    tenant: str = ""
    given: bytes = b""  # the fingerprint as clients compute it
    generations: bytes = NO_GENERATIONS  # of everything and of it, in Redis, as far as known (`redis_generations.py`)
    shards: dict[int, ShardLayout] = field(default_factory=dict)
    flush_epoch: int = 0
    created_at: float = 0.0  # monotonic seconds: when the first session attached
    used_at: float = 0.0  # when somebody attached, looked up or stored last

    @property
    def payload_bytes(self) -> int:
        """What the payloads of a complete block have, without the rounding up to slots."""
        return sum(shard.slot_class.payload_bytes for shard in self.shards.values())

    @property
    def key_bytes(self) -> int:
        """16 or 32."""
        return self.index.key_bytes

    @property
    def num_shards(self) -> int:
        """Worker ranks that each hold a part of every block."""
        return self.index.num_shards

    @property
    def block_bytes(self) -> int:
        """What a complete block occupies."""
        return sum(layout.slot_bytes for layout in (shard.slot_class for shard in self.shards.values()))

    @property
    def slot_classes(self) -> list[SlotClass]:
        """The classes of its payloads, each once: shards of one size share one."""
        return list({id(shard.slot_class): shard.slot_class for shard in self.shards.values()}.values())

    def flush(self) -> Index:
        """All names are gone. Returns the old index, whose slots have to be given up."""
        old, self.index = self.index, Index(self.index.key_bytes, self.index.num_shards)
        self.flush_epoch += 1
        return old


def check_attachment(client: Attachment, namespace: Namespace | None, max_payload_bytes: int) -> None:
    """Refuse what contradicts itself, the server, or what others have fixed. `namespace`: as it is here, if it is."""
    if len(client.fingerprint) != 32:
        raise InvalidRequest(f"namespace fingerprint has {len(client.fingerprint)} bytes, not 32")
    if client.key_bytes not in (16, 32):
        raise InvalidRequest(f"keys of {client.key_bytes} bytes, not 16 or 32")
    if not 1 <= client.num_shards <= MAX_SHARDS:
        raise InvalidRequest(f"{client.num_shards} shards, not 1 to {MAX_SHARDS}")
    if namespace is not None and (namespace.key_bytes, namespace.num_shards) != (
        client.key_bytes,
        client.num_shards,
    ):
        raise Mismatch(
            f"namespace {client.fingerprint.hex()[:12]} has keys of {namespace.key_bytes} bytes and "
            f"{namespace.num_shards} shards here, this client has {client.key_bytes} and {client.num_shards}"
        )
    shard = client.shard
    if shard is None:
        return
    if shard.index >= client.num_shards:
        raise InvalidRequest(f"shard {shard.index} of {client.num_shards}")
    if not 1 <= shard.payload_bytes <= max_payload_bytes:
        raise InvalidRequest(
            f"payload of {shard.payload_bytes} bytes; a segment of this server has {max_payload_bytes} bytes, "
            "and a payload lies in one segment"
        )
    fixed = namespace.shards.get(shard.index) if namespace else None
    if fixed is None:
        return
    if fixed.slot_class.payload_bytes != shard.payload_bytes:
        raise Mismatch(
            f"shard {shard.index} has payloads of {fixed.slot_class.payload_bytes} bytes here, "
            f"this client has {shard.payload_bytes}"
        )
    if fixed.descriptor != shard.descriptor:
        raise Mismatch(f"shard {shard.index} has another layout here: the shard descriptors differ")
