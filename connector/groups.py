"""Which blocks a model with several kinds of layers needs, and how they are stored: facts from vLLM's KV groups.

vLLM keeps one block table per *KV group*. Here groups that are needed alike are one *store group*: it has a namespace
of its own at the server (docs/decisions/0012), and a payload holds one unit's pages of all its KV groups.

    unit      the tokens of one of our blocks: the least common multiple of the groups' block sizes, which is what
              vLLM aligns its hits to. A KV group of smaller blocks has several pages in a unit.
    window    how many units before a boundary are needed to go on there: all (0) for full attention, the last ones for
              sliding windows, the last one for recurrent state.

What is kept of a unit: those of its pages that some boundary at its end needs. A window that is shorter than a unit
needs its last pages only; they are alive when the unit becomes full, because vLLM frees what lies before the window of
the step's first token.

Recurrent state (`at_end_only`) is that of a boundary only when a step ends exactly there: vLLM cuts prefills so that
steps end at block boundaries, and a step that goes past one leaves no state there.

Null block 0 stands in vLLM's tables for what is out of a window: it is never saved and never loaded.

Not here: vLLM imports; whether a model is served at all (`namespace.why_unsupported`).
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from connector.plan import NO_BLOCK

NULL_BLOCK = 0

FULL, WINDOW, STATE = "full", "window", "state"
# The exact classes: a subclass may keep state that a block's token prefix does not determine.
KINDS = {
    "FullAttentionSpec": FULL,
    "MLAAttentionSpec": FULL,
    "SlidingWindowSpec": WINDOW,
    "SlidingWindowMLASpec": WINDOW,
    "ChunkedLocalAttentionSpec": WINDOW,
    "MambaSpec": STATE,
}


@dataclass(frozen=True, slots=True)
class Member:
    """One KV group: of its `per_unit` pages in a unit the last `kept` are stored.

    reach: tokens before the next one that vLLM keeps for it; None: it keeps all, or by another rule.
    """

    group_id: int
    per_unit: int
    kept: int
    block_size: int
    reach: int | None

    def pages(self, table: Sequence[int], unit: int) -> Sequence[int]:
        return table[(unit + 1) * self.per_unit - self.kept : (unit + 1) * self.per_unit]


@dataclass(frozen=True, slots=True)
class StoreGroup:
    """KV groups that are needed alike. `replicas`: tensor-parallel ranks that hold the same bytes of them."""

    window: int
    at_end_only: bool
    replicas: int
    members: tuple[Member, ...]

    @property
    def num_tables(self) -> int:
        """Pages of one layer in a payload, for all its KV groups."""
        return sum(member.kept for member in self.members)

    def pages(self, tables: Sequence[Sequence[int]], unit: int) -> tuple[int, ...] | None:
        """The block ids of one unit. None if it is not all there: out of the window, or not allocated."""
        ids = [block_id for member in self.members for block_id in member.pages(tables[member.group_id], unit)]
        return tuple(ids) if len(ids) == self.num_tables and NULL_BLOCK not in ids else None

    def pages_to_load(self, tables: Sequence[Sequence[int]], unit: int) -> tuple[int, ...]:
        """The same, NO_BLOCK for what the engine has no block for."""
        ids = [block_id for member in self.members for block_id in member.pages(tables[member.group_id], unit)]
        assert len(ids) == self.num_tables, f"{len(ids)} pages of unit {unit}, {self.num_tables} are stored"
        return tuple(NO_BLOCK if block_id == NULL_BLOCK else block_id for block_id in ids)

    def is_alive(self, unit: int, num_computed: int) -> bool:
        """Whether vLLM certainly has not freed the stored pages of `unit` while it computes token `num_computed`."""
        return all(
            member.reach is not None
            and (unit + 1) * member.per_unit - member.kept >= max(0, num_computed - member.reach) // member.block_size
            for member in self.members
        )

    def begin(self, local: int, boundary: int) -> int:
        """The first unit to load for going on at `boundary`, of which [0, local) are there."""
        return max(local, boundary - self.window) if self.window else local


@dataclass(frozen=True, slots=True)
class Groups:
    """How one model is stored. The first store group has the longest window: all, if there is full attention."""

    unit: int
    stored: tuple[StoreGroup, ...]
    num_kv_groups: int  # of the engine, those that are not stored included

    @property
    def is_plain(self) -> bool:
        """One KV group of which every block is needed: what most models are."""
        return self.num_kv_groups == 1 and len(self.stored) == 1 and self.stored[0].window == 0

    @property
    def group_ids(self) -> tuple[int, ...]:
        """vLLM's numbers of the groups that are stored."""
        return tuple(sorted(member.group_id for group in self.stored for member in group.members))


def groups_of(kv_cache_config: Any, vllm_config: Any) -> Groups:
    """For an engine that `why_unsupported` has nothing against."""
    kv_groups = kv_cache_config.kv_cache_groups
    unit = unit_of(kv_cache_config)
    tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
    members: dict[tuple[int, bool, int], list[Member]] = {}
    for group_id in cacheable_group_ids(kv_cache_config):
        spec = layer_specs(kv_groups[group_id].kv_cache_spec)[0]
        per_unit = unit // kv_groups[group_id].kv_cache_spec.block_size
        needed = needed_pages(spec)
        kept = min(per_unit, needed) if needed else per_unit
        window = -(-needed // per_unit)
        alike = (window, KINDS[type(spec).__name__] == STATE, _replicas(spec, kv_cache_config, tensor_parallel))
        reach = getattr(spec, "sliding_window", None)
        members.setdefault(alike, []).append(
            Member(group_id, per_unit, kept, spec.block_size, reach - 1 if needed and reach else None)
        )
    order = sorted(members, key=lambda alike: (alike[0] != 0, -alike[0], alike))
    return Groups(unit, tuple(StoreGroup(*alike, tuple(members[alike])) for alike in order), len(kv_groups))


def unit_of(kv_cache_config: Any) -> int:
    """As vLLM's `resolve_kv_cache_block_sizes`, to which its hits are aligned."""
    return math.lcm(*(int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups))


def cacheable_group_ids(kv_cache_config: Any) -> list[int]:
    """The groups whose blocks a token prefix names. The others (rings, hot caches) are the engine's own business."""
    return [
        group_id
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        if getattr(group.kv_cache_spec, "prefix_cacheable", True) and getattr(group, "enable_kv_transfer", True)
    ]


def layer_specs(spec: Any) -> list[Any]:
    """A group's spec, or those inside of a `UniformTypeKVCacheSpecs`, which holds one per layer."""
    per_layer = getattr(spec, "kv_cache_specs", None)
    return [spec] if per_layer is None else list(per_layer.values())


def needed_pages(spec: Any) -> int:
    """Blocks before a boundary that are needed to go on there; 0: all."""
    kind = KINDS[type(spec).__name__]
    if kind == FULL:
        return 0
    if kind == STATE:
        return 1
    # The next token sees itself and `sliding_window - 1` before it; of local chunks, at most a chunk but for one block.
    num_tokens = int(getattr(spec, "attention_chunk_size", None) or spec.sliding_window - 1)
    return max(-(-num_tokens // int(spec.block_size)), 1)


def _replicas(spec: Any, kv_cache_config: Any, tensor_parallel: int) -> int:
    """Consecutive tensor-parallel ranks that hold the same bytes of these layers."""
    if type(spec).__name__ in ("MLAAttentionSpec", "SlidingWindowMLASpec") or getattr(spec, "tp_replicated", False):
        return tensor_parallel
    shards = getattr(spec, "max_tp_shards", None)  # vLLM 0.31: fewer KV heads than ranks are duplicated
    if shards is None:
        return int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    return int(tensor_parallel // shards) if tensor_parallel > shards and tensor_parallel % shards == 0 else 1


def fingerprint_of(fingerprint: bytes, groups: Groups, index: int) -> bytes:
    """The namespace of one store group. That of a model with one is the engine's own."""
    if len(groups.stored) == 1:
        return fingerprint
    return hashlib.sha256(b"prefixd kv group" + fingerprint + index.to_bytes(4, "little")).digest()
