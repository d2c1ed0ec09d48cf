"""What the scheduler side tells the worker side each step, and vLLM's shapes turned into ours.

Owns the metadata of one engine step (`StepPlan`) and the one place that reads `SchedulerOutput`'s two shapes of
new and resumed requests (`block_table_changes`). Everything here is data; it is pickled to the workers, so keys,
slots and generations travel as packed bytes, and what is made for every block that fills is a plain tuple.

Invariant: the block_ids in a spec belong to the request's present scheduled life. A spec is made in the step that
carries it, or (loads) at the allocation just before.
"""

import math
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

NO_BLOCK = -1  # in a load's block_ids: the engine has no block for this page (vLLM's table says null block 0 there)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Fill `block_ids` with the payloads of `keys`; the answer to one lookup, held by `lease_id`.

    keys: key_bytes per block. slots: u64 `[num_shards][num_blocks]`; generations: u32, the same shape
    (both as in `protos/kv_cache.proto`). checksums: u64, the same shape, or empty: not to be verified. A spec without
    keys cannot be loaded: every worker reports it failed.
    timeout_s: seconds from when a worker gets it; what is not there by then has failed.
    block_ids: `num_tables` of the layout per block, those of one block behind each other; NO_BLOCK: load nothing there.
    others: what the same promise says of the other store groups (`groups.py`); it is one load, of num_tokens tokens.
    """

    request_id: str
    block_ids: tuple[int, ...]
    keys: bytes
    slots: bytes
    generations: bytes
    lease_id: int
    server_epoch: int
    timeout_s: float = math.inf
    checksums: bytes = b""
    group: int = 0
    num_tables: int = 1
    num_tokens: int = 0
    others: tuple["LoadSpec", ...] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids) // self.num_tables

    def block_ids_of(self, start: int, stop: int) -> tuple[int, ...]:
        """Of the blocks [start, stop), all tables."""
        return self.block_ids[start * self.num_tables : stop * self.num_tables]

    def block_keys(self) -> list[bytes]:
        """The keys, one by one."""
        key_bytes = len(self.keys) // max(self.num_blocks, 1)
        return [self.keys[at : at + key_bytes] for at in range(0, len(self.keys), key_bytes or 1)]


class BlockName(NamedTuple):
    """The key under which a block's payload is stored, and its place in the chain."""

    key: bytes
    parent: bytes
    depth: int


class SaveSpec(NamedTuple):
    """Gather `block_id` at the end of this step. `name` None: gather now, the name follows under `ticket`.

    group: the store group; more: the block ids of the payload's further tables (`groups.py`).
    """

    block_id: int
    name: BlockName | None
    ticket: int = 0
    group: int = 0
    more: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `names`: tickets of earlier nameless gathers, with their name, or None: discard it.
    `cancelled`: requests whose load is not wanted any more; it is still reported, as failed."""

    loads: tuple[LoadSpec, ...] = ()
    saves: tuple[SaveSpec, ...] = ()
    names: dict[int, BlockName | None] = field(default_factory=dict)
    cancelled: frozenset[str] = frozenset()


class BlockTableChange(NamedTuple):
    """`block_ids` of KV group 0 replace a request's table (first schedule, resume) or are appended to it. Of a table
    that is replaced the list is vLLM's: whoever keeps it copies it. `groups`: the same of every KV group.
    """

    request_id: str
    block_ids: list[int]
    replaces: bool
    groups: tuple[list[int], ...] = ()


def block_table_changes(scheduler_output: Any) -> list[BlockTableChange]:
    """Every change of a block table in this step, whichever model runner the output is for.

    V1 runner: a resumed request is in `resumed_req_ids` and its `new_block_ids` are the whole table. V2 runner: it
    is in `scheduled_new_reqs` again. Token ids are not read here: `prefill_token_ids` is the request's live list and
    decoded tokens are in no field at all, so the scheduler side holds the `Request` (docs/decisions/0001).
    """
    changes = [
        BlockTableChange(new.req_id, new.block_ids[0], True, new.block_ids)
        for new in scheduler_output.scheduled_new_reqs
    ]
    cached = scheduler_output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    # None, no new block, is by far the most frequent: `compress` passes over it without a turn of the loop.
    tables = compress(zip(cached.req_ids, cached.new_block_ids, strict=True), cached.new_block_ids)
    changes += [BlockTableChange(request_id, groups[0], request_id in resumed, groups) for request_id, groups in tables]
    return changes
