"""One namespace: what its blocks look like and where their names are.

The first session that attaches fixes number of shards and key size; the first session of each shard fixes payload
size and layout (the shard descriptor, opaque here). All others must agree: bytes written in one layout and read in
another would be wrong blocks. What is fixed is forgotten with the last block and the last session.

`flush_epoch` counts flushes. A slot reserved in an earlier epoch may hold a payload computed before the flush,
so it cannot get a name.

Not here: the namespace's fingerprint is computed by clients; the server never looks into it.
"""

from dataclasses import dataclass, field

from cache_server.arena import SlotClass
from cache_server.index import Index


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """What the first session of a shard has fixed."""

    descriptor: bytes
    slot_class: SlotClass


@dataclass(slots=True, eq=False)
class Namespace:
    """Blocks that may be compared by key."""

    fingerprint: bytes
    text: str
    index: Index
    shards: dict[int, ShardLayout] = field(default_factory=dict)
    flush_epoch: int = 0

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
