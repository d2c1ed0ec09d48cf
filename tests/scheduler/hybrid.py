"""An engine with several KV groups: the real Scheduler, our connector, and a worker that attends as it should.

As in `harness.py` the KV of a position is a digest of its whole prefix, so that whatever is computed upon wrong KV is
wrong too. Every group keeps it in its own blocks, in one memory that all share, marked with the group's number:

    full      reads all positions before the first one of a step
    window    reads the last `window - 1` of them
    state     keeps one digest per block, that of the last position of the step; reads the one before

Checked at once: each read, each payload that is saved, that no null block is written, saved or loaded, that a block
which is saved or loaded is its request's and its group's at that moment.

`HybridServer` answers lookups by trying every boundary, the longest first; `boundaries.py` is not used.
"""

import copy
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector.client import GroupAnswer, LookupAnswer
from connector.plan import NO_BLOCK, LoadSpec, SaveSpec, StepPlan
from tests.fakes import FakeCacheClient, FakeServer
from tests.scheduler import harness
from tests.scheduler.harness import (
    Digest,
    FakeLineConnector,
    _address_of,
    _model_runner_output,
    _vllm_config,
    answer_to,
    digests_of,
    next_digest,
    num_computed,
    token_after,
)

NUM_BYTES = {"num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}


def full(block_size: int = 16) -> Any:
    return FullAttentionSpec(block_size=block_size, **NUM_BYTES)


def window(num_tokens: int, block_size: int = 16) -> Any:
    return SlidingWindowSpec(block_size=block_size, sliding_window=num_tokens, **NUM_BYTES)


def chunked(num_tokens: int, block_size: int = 16) -> Any:
    return ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=num_tokens, **NUM_BYTES)


def state(block_size: int = 16) -> Any:
    return MambaSpec(block_size=block_size, shapes=((3, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")


# Group number and digest, so that another group's bytes are not taken for one's own.
Cell = tuple[int, Digest] | None


@dataclass(frozen=True, slots=True)
class Stored:
    payload: tuple[tuple[Cell, ...], ...]
    slot: int
    generation: int


class HybridServer(FakeServer):
    """Blocks by (store group, key). `windows`: of each store group, in units; set by the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[tuple[int, bytes], Stored] = {}
        self.windows: list[int] = []
        self._numbers = itertools.count(1)

    def keep(self, group: int, key: bytes, payload: tuple[tuple[Cell, ...], ...]) -> None:
        known = self.stored.get((group, key))
        assert known is None or known.payload == payload, f"group {group}: {key.hex()} names two payloads"
        if known is None:
            number = next(self._numbers)
            self.stored[group, key] = Stored(payload, number, number % 1000)

    def keys_of(self, group: int) -> set[bytes]:
        return {key for of_group, key in self.stored if of_group == group}

    def lookup(self, keys: Sequence[bytes], first: int, lease: bool) -> LookupAnswer | None:
        if self.failing:
            return None
        present = [[(group, key) in self.stored for key in keys] for group in range(len(self.windows))]

        def begin(group: int, boundary: int, at: int) -> int:
            return max(at, boundary - self.windows[group]) if self.windows[group] else at

        def is_open(boundary: int) -> bool:
            return all(all(flags[begin(group, boundary, first) : boundary]) for group, flags in enumerate(present))

        end = next((b for b in range(len(keys), first, -1) if is_open(b)), first) if not self.workers_missing else first
        lease_id = 0
        if lease and end > first:
            lease_id = next(self._lease_ids)
            self.leases[lease_id] = (frozenset(keys[:end]), self.clock() + self.LEASE_S)
        parts = []
        for group, flags in enumerate(present):
            start = end
            while lease_id and start > begin(group, end, 0) and flags[start - 1]:
                start -= 1
            blocks = [self.stored[group, key] for key in keys[start:end]]
            parts.append(
                GroupAnswer(
                    np.packbits(np.array(flags, dtype=bool), bitorder="little").tobytes(),
                    start,
                    self.windows[group],
                    np.array([[block.slot for block in blocks]], dtype="<u8"),
                    np.array([[block.generation for block in blocks]], dtype="<u4"),
                )
            )
        primary = parts[0]
        return LookupAnswer(
            present=primary.present,
            hit_start=primary.hit_start,
            hit_end=end,
            lease_id=lease_id,
            deadline=self.clock() + self.LEASE_S,
            half_life=self.clock() + self.LEASE_S / 2,
            slots=primary.slots,
            generations=primary.generations,
            workers_missing=self.workers_missing,
            server_epoch=self.epoch,
            window=self.windows[0],
            others=tuple(parts[1:]),
        )


class HybridConnector(FakeLineConnector):
    """Tells the server of the windows, and the test of the store groups."""

    def _make_client(self, hello: Any) -> Any:
        server = harness._SERVERS[self._config.server]
        assert isinstance(server, HybridServer)
        server.windows = [hello.window, *(other.window for other in hello.others)]
        return FakeCacheClient(server, hello.key_bytes)


@dataclass
class Running:
    token_ids: list[int]
    tables: list[list[int]]
    truth: list[Digest] = field(default_factory=list)

    def right(self) -> list[Digest]:
        for token_id in self.token_ids[len(self.truth) :]:
            self.truth.append(next_digest(self.truth[-1] if self.truth else None, token_id))
        return self.truth


class HybridWorker:
    """`load_delay` in steps; `fail_loads`: every load fails."""

    def __init__(self, engine: "HybridEngine", specs: Sequence[Any], num_blocks: int) -> None:
        self.engine = engine
        self.specs = specs
        self.width = max(spec.block_size for spec in specs)
        self.pages: list[list[Cell]] = [[None] * self.width for _ in range(num_blocks)]
        self.running: dict[str, Running] = {}
        self.step = 0
        self.load_delay = 0
        self.fail_loads = False
        self.num_loaded: list[tuple[str, int, int]] = []  # request, store group, pages
        self.num_failed = 0
        self._loads: list[tuple[int, LoadSpec]] = []
        self._cancelled: set[str] = set()
        self._nameless: dict[int, tuple[int, Any]] = {}

    def execute(self, output: Any) -> Any:
        self.step += 1
        plan: StepPlan = output.kv_connector_metadata
        self._cancelled |= plan.cancelled & {load.request_id for _, load in self._loads}
        for ticket, name in plan.names.items():
            group, payload = self._nameless.pop(ticket)
            if name is not None:
                self._keep(group, name.key, payload)
        self._follow(output)
        for source, target in [copy_[-2:] for copy_ in output.kv_cache_block_copies or ()]:
            self.pages[target] = list(self.pages[source])
        for block_id in output.new_block_ids_to_zero or ():
            self.pages[block_id] = [None] * self.width
        sampled = {request_id: self._forward(request_id, output) for request_id in output.num_scheduled_tokens}
        for save in plan.saves:
            self._save(save)
        self._loads.extend((self.step + self.load_delay, load) for load in plan.loads)
        finished, failed = set(), set()
        for due in [due for due in self._loads if due[0] <= self.step]:
            self._loads.remove(due)
            finished.add(due[1].request_id)
            if not self._load(due[1]):
                failed.add(due[1].request_id)
        self.num_failed += len(failed)
        said = KVConnectorOutput(finished_recving=finished or None)
        said.failed_recving = failed
        return _model_runner_output(sampled, said)

    def _follow(self, output: Any) -> None:
        for request_id in output.finished_req_ids:
            self.running.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            token_ids = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            self.running[new.req_id] = Running(list(token_ids), [list(ids) for ids in new.block_ids])
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                tables = [list(ids) for ids in block_ids]
                self.running[request_id] = Running(list(cached.all_token_ids[request_id]), tables)
            elif block_ids is not None:
                for table, ids in zip(self.running[request_id].tables, block_ids, strict=True):
                    table.extend(ids)

    def _forward(self, request_id: str, output: Any) -> list[int]:
        request = self.running[request_id]
        start = num_computed(output, request_id)
        stop = start + output.num_scheduled_tokens[request_id]
        truth = request.right()
        for group, (spec, table) in enumerate(zip(self.specs, request.tables, strict=True)):
            size = spec.block_size
            for position in self._read_positions(spec, start):
                where = position // size
                index = 0 if isinstance(spec, MambaSpec) else position % size
                got = self.pages[table[where]][index]
                assert table[where], f"{request_id}: group {group} reads null block at {position}, step {self.step}"
                assert got == (group, truth[position]), f"{request_id}: group {group}, {position}, step {self.step}"
            if isinstance(spec, MambaSpec):
                self._write(table[(stop - 1) // size], 0, (group, truth[stop - 1]))
            else:
                for position in range(start, stop):
                    self._write(table[position // size], position % size, (group, truth[position]))
        if stop < len(request.token_ids):
            return []
        request.token_ids.append(token_after(truth[-1]))
        return [request.token_ids[-1]]

    @staticmethod
    def _read_positions(spec: Any, start: int) -> range:
        if isinstance(spec, MambaSpec):
            return range(max(start - 1, 0), start)
        if isinstance(spec, SlidingWindowSpec):
            return range(max(start - spec.sliding_window + 1, 0), start)
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return range(start // spec.attention_chunk_size * spec.attention_chunk_size, start)
        return range(start)

    def _write(self, block_id: int, index: int, cell: Cell) -> None:
        assert block_id, "block 0 is the null block"
        self.pages[block_id][index] = cell

    # --- what the connector's worker side does

    def _payload(self, save: SaveSpec) -> tuple[tuple[Cell, ...], ...]:
        group = self.engine.groups.stored[save.group]
        kv_groups = [member.group_id for member in group.members for _ in range(member.kept)]
        block_ids = (save.block_id, *save.more)
        assert len(block_ids) == len(kv_groups)
        payload = []
        for kv_group, block_id in zip(kv_groups, block_ids, strict=True):
            tables = {ids for running in self.running.values() for ids in running.tables[kv_group]}
            assert block_id, "block 0 is the null block"
            assert block_id in tables, f"block {block_id} of group {kv_group} is saved and belongs to nobody"
            spec = self.specs[kv_group]
            payload.append(tuple(self.pages[block_id][: 1 if isinstance(spec, MambaSpec) else spec.block_size]))
        return tuple(payload)

    def _save(self, save: SaveSpec) -> None:
        payload = self._payload(save)
        if save.name is None:
            assert save.ticket not in self._nameless
            self._nameless[save.ticket] = (save.group, payload)
        else:
            self._keep(save.group, save.name.key, payload)

    def _keep(self, group: int, key: bytes, payload: Any) -> None:
        self.engine.check_payload(group, key, payload)
        self.engine.server.keep(group, key, payload)

    def _load(self, load: LoadSpec) -> bool:
        if load.request_id in self._cancelled or not load.keys or self.fail_loads:
            self._cancelled.discard(load.request_id)
            return False
        whole = True
        now = self.engine.scheduler.kv_cache_manager.get_block_ids(load.request_id)
        for part in (load, *load.others):
            group = self.engine.groups.stored[part.group]
            kv_groups = [member.group_id for member in group.members for _ in range(member.kept)]
            num_units = len(part.block_ids) // len(kv_groups)
            key_bytes = len(part.keys) // num_units
            num_pages = 0
            for unit in range(num_units):
                key = part.keys[unit * key_bytes : (unit + 1) * key_bytes]
                stored = self.engine.server.stored.get((part.group, key))
                slot = int.from_bytes(part.slots[unit * 8 : unit * 8 + 8], "little")
                if stored is None or stored.slot != slot:
                    whole = False
                    continue
                ids = part.block_ids[unit * len(kv_groups) : (unit + 1) * len(kv_groups)]
                for kv_group, block_id, cells in zip(kv_groups, ids, stored.payload, strict=True):
                    if block_id == NO_BLOCK:
                        continue
                    assert block_id, "block 0 is the null block"
                    assert block_id in now[kv_group], f"{block_id} is loaded, group {kv_group} has {now[kv_group]}"
                    self.pages[block_id][: len(cells)] = cells
                    num_pages += 1
            self.num_loaded.append((load.request_id, part.group, num_pages))
        return whole


class HybridEngine:
    """`hash_unit`: tokens of vLLM's own block hashes, which may be smaller than every block."""

    def __init__(
        self,
        model: Path,
        server: HybridServer,
        specs: Sequence[Any],
        *,
        num_blocks: int = 64,
        v2: bool = False,
        in_flight: int = 1,
        hash_unit: int | None = None,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 512,
        policy: str = "recompute",
        **engine_args: Any,
    ) -> None:
        arguments = {
            "block_size": 16,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "num_gpu_blocks_override": num_blocks,
            **engine_args,
        }
        config = copy.deepcopy(_vllm_config(str(model), tuple(sorted(arguments.items()))))
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.mamba_cache_mode = "align"
        config.scheduler_config.async_scheduling = in_flight > 1
        transfer = config.kv_transfer_config
        transfer.kv_connector, transfer.kv_connector_module_path = "HybridConnector", "tests.scheduler.hybrid"
        transfer.kv_load_failure_policy = policy
        transfer.kv_connector_extra_config = {"server": _address_of(server)}
        unit = int(np.lcm.reduce([spec.block_size for spec in specs]))
        hash_unit = hash_unit or int(np.gcd.reduce([spec.block_size for spec in specs]))
        groups = [KVCacheGroupSpec([f"layers.{number}"], spec) for number, spec in enumerate(specs)]
        self.scheduler = (AsyncScheduler if in_flight > 1 else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=unit,
            hash_block_size=hash_unit,
            log_stats=False,
        )
        self.scheduler.use_v2_model_runner = v2
        self.server = server
        self.unit = unit
        self.hash_unit = hash_unit
        self.specs = specs
        connector = self.scheduler.connector
        assert isinstance(connector, HybridConnector)
        self.connector = connector
        self.groups = connector._groups
        self.worker = HybridWorker(self, specs, num_blocks)
        self.requests: dict[str, Request] = {}
        self.outputs: list[Any] = []
        self.finished: dict[str, str] = {}
        self._rights: dict[tuple[int, bytes], Any] = {}
        self._in_flight = in_flight
        self._queue: deque[tuple[Any, Any]] = deque()
        self._num_free_at_start = self.num_free_blocks()

    @property
    def side(self) -> Any:
        return self.connector._scheduler

    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    # --- what is right

    def keys_of(self, request: Request) -> list[bytes]:
        keys = self.side._new_keys(request)
        prompt = list(request.prompt_token_ids or [])
        keys.extend(prompt + answer_to(prompt, request.max_tokens))
        return [keys.key(number) for number in range(len(keys))]

    def check_payload(self, group: int, key: bytes, payload: Any) -> None:
        """Of the requests that were ever here."""
        if (group, key) not in self._rights:
            for request in self.requests.values():
                self._learn(request)
        assert payload == self._rights[group, key], f"wrong KV of group {group} under {key.hex()}"

    def _learn(self, request: Request) -> None:
        prompt = list(request.prompt_token_ids or [])
        digests = digests_of(prompt + answer_to(prompt, request.max_tokens))
        for unit, key in enumerate(self.keys_of(request)):
            for number, group in enumerate(self.groups.stored):
                pages = []
                for member in group.members:
                    spec = self.specs[member.group_id]
                    for page in range((unit + 1) * member.per_unit - member.kept, (unit + 1) * member.per_unit):
                        positions = range(page * spec.block_size, (page + 1) * spec.block_size)
                        if isinstance(spec, MambaSpec):
                            positions = positions[-1:]
                        pages.append(tuple((member.group_id, digests[position]) for position in positions))
                self._rights[number, key] = tuple(pages)

    # --- requests and steps

    def add(self, request_id: str, token_ids: Sequence[int], max_tokens: int = 1) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        params.update_from_generation_config({}, 1)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(len(self.requests)),
            block_hasher=get_request_block_hasher(self.hash_unit, sha256),
        )
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.finished[request_id] = "aborted"

    def step(self) -> None:
        scheduled = False
        if self.scheduler.has_requests() and len(self._queue) < self._in_flight:
            output = self.scheduler.schedule()
            self.outputs.append(output)
            self._queue.append((output, self.worker.execute(output)))
            scheduled = True
        if self._queue and (len(self._queue) >= self._in_flight or not scheduled or not self.scheduler.has_requests()):
            output, answer = self._queue.popleft()
            for outputs in self.scheduler.update_from_output(output, answer).values():
                for one in outputs.outputs:
                    if one.finish_reason is not None:
                        assert one.request_id not in self.finished
                        self.finished[one.request_id] = str(one.finish_reason)

    def run(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._queue:
                return
            self.step()
        left = [(request.request_id, request.status.name) for request in self.scheduler.requests.values()]
        raise AssertionError(f"not idle after {max_steps} steps: {left}")

    def finish(self, request_id: str, token_ids: Sequence[int], max_tokens: int = 1) -> Request:
        request = self.add(request_id, token_ids, max_tokens)
        self.run()
        self.check_answer(request)
        return request

    def clear_local(self) -> None:
        assert self.scheduler.reset_prefix_cache()

    def check_answer(self, request: Request) -> None:
        got = list(request.output_token_ids)
        assert got == answer_to(request.prompt_token_ids or [], len(got)), request.request_id

    def check_idle(self) -> None:
        assert not self.scheduler.requests
        assert self.num_free_blocks() == self._num_free_at_start
        assert not self.worker._loads
        assert not self.worker._nameless
        assert not self.server.held_leases()
        assert self.side.num_requests() == 0
        assert self.side.num_leases() == 0
        for request in self.requests.values():
            self.check_answer(request)
