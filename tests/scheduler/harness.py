"""One engine without a model: vLLM's real Scheduler, our real connector, and a worker whose KV is a function of tokens.

The worker model keeps, for every position of every block, a digest of the digest before it (read from its pages, as
attention would) and the token id. So the KV of a position is a function of its whole prefix, an overwritten or wrongly
loaded block spoils everything computed after it, and the sampled tokens follow from the KV: an engine with the cache
and one without give the same tokens, or something is wrong. Each read is checked at once, and each payload in the
server can be compared with what its key names (`check_store`).

The worker follows block tables by its own reading of both shapes of SchedulerOutput, not by `connector/plan.py`; of the
connector's step plan it executes what the real worker executes, with knobs for what is late, lost or withheld.

`Engine` drives it: synchronously, or with N steps in flight as `EngineCore.step_with_batch_queue` does.
"""

import copy
import functools
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector.block_keys import BlockKeys, identity_of, root_key
from connector.plan import LoadSpec, StepPlan
from connector.plugin import PrefixCacheConnector
from tests.fakes import FakeCacheClient, FakeServer

VOCABULARY = 2048
HASH = "xxh3_128"

Digest = bytes
Page = list[Digest | None]
TAINTED: Digest = b"tainted"  # computed from KV that is not the engine's any more

# Address → server, for connectors that are made deep inside of a Scheduler's constructor.
_SERVERS: dict[str, FakeServer] = {}
_addresses = (f"unix:///fake/{number}" for number in itertools.count())


def _address_of(server: FakeServer) -> str:
    address = next(_addresses)
    _SERVERS[address] = server
    return address


class FakeLineConnector(PrefixCacheConnector):
    """Our connector with a line to a FakeServer, and a record of what it was asked and answered."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.matches: list[tuple[str, int, tuple[int | None, bool]]] = []
        super().__init__(vllm_config, role, kv_cache_config)
        if self._scheduler is not None:
            self._scheduler._clock = _SERVERS[self._config.server].clock

    def _make_client(self, hello: Any) -> Any:
        return FakeCacheClient(_SERVERS[self._config.server], hello.key_bytes)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.matches.append((request.request_id, num_computed_tokens, answer))
        return answer


class BreakingSide:
    """A SchedulerSide of which one method raises: before it did anything, or after it did all."""

    def __init__(self, side: Any, method: str, *, after: bool, times: int) -> None:
        self._side = side
        self._method = method
        self._after = after
        self.times_left = times

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._side, name)
        if name != self._method or self.times_left == 0:
            return value

        def breaking(*args: Any, **kwargs: Any) -> Any:
            self.times_left -= 1
            if self._after:
                value(*args, **kwargs)
            raise RuntimeError(f"{name} broke, as the test wished")

        return breaking


# The shapes in which vLLM runs a scheduler: keywords of `Engine`. Every test of the life of a request runs in all.
SHAPES: dict[str, dict[str, Any]] = {
    "V1": {},
    "V2": {"v2": True},
    "V1, two steps in flight": {"in_flight": 2},
    "V2, two steps in flight": {"v2": True, "in_flight": 2},
    "V2, two steps in flight, run late": {"v2": True, "in_flight": 2, "late_execution": True},
    "V2, three steps in flight": {"v2": True, "in_flight": 3},
}


# --- what KV is here


def next_digest(before: Digest | None, token_id: int) -> Digest:
    """The KV of a position: a function of the KV before it and of its token id."""
    return hashlib.blake2b((before or b"") + token_id.to_bytes(4, "little"), digest_size=8).digest()


def digests_of(token_ids: Sequence[int]) -> list[Digest]:
    """The right KV of every position of a sequence."""
    digests: list[Digest] = []
    for token_id in token_ids:
        digests.append(next_digest(digests[-1] if digests else None, token_id))
    return digests


def token_after(digest: Digest) -> int:
    """What the model says after a position with this KV."""
    return int.from_bytes(digest[:2], "little") % VOCABULARY


def answer_to(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What any engine must answer: cold(P) of cases.md."""
    digest = digests_of(prompt)[-1]
    answer: list[int] = []
    for _ in range(num_tokens):
        answer.append(token_after(digest))
        digest = next_digest(digest, answer[-1])
    return answer


@dataclass
class Running:
    """A request as the worker knows it: its token ids, the right KV of them, its block table."""

    token_ids: list[int]
    block_ids: list[int]
    truth: list[Digest] = field(default_factory=list)

    def right_digests(self) -> list[Digest]:
        for token_id in self.token_ids[len(self.truth) :]:
            self.truth.append(next_digest(self.truth[-1] if self.truth else None, token_id))
        return self.truth


@dataclass
class PendingLoad:
    spec: LoadSpec
    due: int


class Worker:
    """The worker process of one engine: it computes, and carries out the step plans of its connectors (`sides`).

    Knobs: `load_delay` and `commit_delay` in steps; `withhold_loads`: none ends; `loads_before_forward`: as up to
    vLLM 0.28.
    """

    def __init__(self, num_blocks: int, block_size: int, servers: Sequence[FakeServer]) -> None:
        self.block_size = block_size
        self.pages: list[Page] = [[None] * block_size for _ in range(num_blocks)]
        self.running: dict[str, Running] = {}
        self.step = 0
        self.load_delay = 0
        self.commit_delay = 0
        self.withhold_loads = False
        self.loads_before_forward = False
        self.num_computed_tokens = 0
        self.sides = [CacheSide(self, server) for server in servers]

    @property
    def plans(self) -> list[StepPlan]:
        """The step plans of the first connector."""
        return self.sides[0].plans

    @property
    def num_loaded_blocks(self) -> int:
        return sum(side.num_loaded_blocks for side in self.sides)

    @property
    def num_loads_without_lease(self) -> int:
        return sum(side.num_loads_without_lease for side in self.sides)

    @property
    def num_nameless(self) -> int:
        """Gathers that wait for their name."""
        return sum(len(side.nameless) for side in self.sides)

    def loading_block_ids(self) -> set[int]:
        """Blocks that a load of ours may still write."""
        return {block_id for side in self.sides for load in side.loads for block_id in load.spec.block_ids}

    # --- one step

    def execute(self, output: Any) -> ModelRunnerOutput:
        """What happens on the device in one step, in its order."""
        self.step += 1
        metadata = output.kv_connector_metadata
        plans = getattr(metadata, "metadata", (metadata,))  # MultiConnector's are a tuple
        with_plans = list(zip(self.sides, plans, strict=True)) if self.sides else []
        for side, plan in with_plans:
            side.begin(plan)
        self._follow_tables(output)
        for block_id in output.new_block_ids_to_zero or ():
            self.pages[block_id] = [None] * self.block_size
        for side, plan in with_plans if self.loads_before_forward else ():
            side.start_loads(plan)
        sampled = {request_id: self._forward(request_id, output) for request_id in output.num_scheduled_tokens}
        for side, plan in with_plans:
            side.gather(plan)
            if not self.loads_before_forward:
                side.start_loads(plan)
        finished: set[str] = set()
        failed: set[int] = set()
        for side in self.sides:
            ended = side.end_loads()
            assert finished.isdisjoint(ended[0]), "two connectors report one load"
            finished |= ended[0]
            failed |= ended[1]
            side.end_commits()
        request_ids = list(sampled)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[sampled[request_id] for request_id in request_ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(finished_recving=finished or None, invalid_block_ids=failed),
        )

    def _follow_tables(self, output: Any) -> None:
        for request_id in output.finished_req_ids:
            self.running.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            token_ids = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            if token_ids is None:  # embeddings: what stands in the token ids' place is zero
                token_ids = [0] * len(new.prompt_embeds)
            self._begin_request(new.req_id, list(token_ids), list(new.block_ids[0]))
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._begin_request(request_id, list(cached.all_token_ids[request_id]), list(block_ids[0]))
            elif block_ids is not None:
                self.running[request_id].block_ids.extend(block_ids[0])

    def _begin_request(self, request_id: str, token_ids: list[int], block_ids: list[int]) -> None:
        before = self.running.get(request_id)
        if before is not None:
            common = min(len(token_ids), len(before.token_ids))
            assert token_ids[:common] == before.token_ids[:common], f"{request_id} came back with other token ids"
        self.running[request_id] = Running(token_ids, block_ids)

    def _forward(self, request_id: str, output: Any) -> list[int]:
        request = self.running[request_id]
        start = num_computed(output, request_id)
        stop = start + output.num_scheduled_tokens[request_id]
        drafts = list(output.scheduled_spec_decode_tokens.get(request_id, ()))
        token_ids = request.token_ids + drafts
        assert stop <= len(token_ids), f"{request_id}: {stop} tokens to compute of {len(token_ids)} that are known"
        truth = request.right_digests()
        num_known = len(request.token_ids)
        self.num_computed_tokens += stop - start
        computed: dict[int, Digest] = {}
        for position in range(start, stop):
            before = self._read(request, position - 1) if position else None
            if before == TAINTED:
                computed[position] = self._write(request, position, TAINTED)
                continue
            if 0 < position <= num_known:
                assert before == truth[position - 1], f"{request_id}: wrong KV at {position - 1}, step {self.step}"
            computed[position] = self._write(request, position, next_digest(before, token_ids[position]))
        if stop < num_known:
            return []
        accepted: list[int] = []
        for draft in [*drafts, None]:
            accepted.append(token_after(computed[num_known - 1 + len(accepted)]))
            if accepted[-1] != draft:
                break
        request.token_ids.extend(accepted)
        return accepted

    def _read(self, request: Running, position: int) -> Digest | None:
        return self.pages[request.block_ids[position // self.block_size]][position % self.block_size]

    def _write(self, request: Running, position: int, digest: Digest) -> Digest:
        block_id = request.block_ids[position // self.block_size]
        assert block_id, "block 0 is the null block"
        self.pages[block_id][position % self.block_size] = digest
        return digest

    def taint_pages(self) -> None:
        """Marks all KV that is there: it was computed with weights that are no longer the engine's."""
        self.pages = [[digest and TAINTED for digest in page] for page in self.pages]


class CacheSide:
    """What our worker side does in a worker: gathers at the end of a step, names, loads when they are due."""

    def __init__(self, worker: Worker, server: FakeServer) -> None:
        self.server = server
        self.plans: list[StepPlan] = []
        self.loads: list[PendingLoad] = []
        self.nameless: dict[int, tuple[Digest | None, ...]] = {}
        self.num_loaded_blocks = 0
        self.num_loads_without_lease = 0
        self._worker = worker
        self._cancelled: set[str] = set()
        self._commits: list[tuple[int, bytes, tuple[Digest | None, ...]]] = []

    def begin(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._cancelled |= plan.cancelled & {load.spec.request_id for load in self.loads}
        for ticket, name in plan.names.items():
            payload = self.nameless.pop(ticket)
            if name is not None:
                self._commit(name.key, payload)

    def gather(self, plan: StepPlan) -> None:
        for save in plan.saves:
            assert save.block_id, "the null block is never saved"
            payload = tuple(self._worker.pages[save.block_id])
            if save.name is None:
                assert save.ticket not in self.nameless
                self.nameless[save.ticket] = payload
            else:
                self._commit(save.name.key, payload)

    def _commit(self, key: bytes, payload: tuple[Digest | None, ...]) -> None:
        self._commits.append((self._worker.step + self._worker.commit_delay, key, payload))

    def end_commits(self) -> None:
        due = [commit for commit in self._commits if commit[0] <= self._worker.step]
        self._commits = [commit for commit in self._commits if commit[0] > self._worker.step]
        for _, key, payload in due:
            self.server.commit(key, payload)

    def start_loads(self, plan: StepPlan) -> None:
        for spec in plan.loads:
            assert all(load.spec.request_id != spec.request_id for load in self.loads), "two loads of one request"
            self.loads.append(PendingLoad(spec, self._worker.step + self._worker.load_delay))

    def end_loads(self) -> tuple[set[str], set[int]]:
        """(requests whose load ended, blocks that failed)"""
        finished: set[str] = set()
        failed: set[int] = set()
        if self._worker.withhold_loads:
            return finished, failed
        for load in [load for load in self.loads if load.due <= self._worker.step]:
            self.loads.remove(load)
            failed |= self._load(load.spec)
            finished.add(load.spec.request_id)
        return finished, failed

    def _load(self, spec: LoadSpec) -> set[int]:
        if spec.request_id in self._cancelled or not spec.keys:
            self._cancelled.discard(spec.request_id)
            return set(spec.block_ids)
        key_bytes = len(spec.keys) // len(spec.block_ids)
        self.num_loads_without_lease += spec.lease_id not in self.server.held_leases()
        failed = set()
        for number, block_id in enumerate(spec.block_ids):
            stored = self.server.blocks.get(spec.keys[number * key_bytes : (number + 1) * key_bytes])
            promised = (
                int.from_bytes(spec.slots[number * 8 : number * 8 + 8], "little"),
                int.from_bytes(spec.generations[number * 4 : number * 4 + 4], "little"),
            )
            kept = stored is not None and (stored.slot, stored.generation) == promised
            if stored is None or not kept or self.server.epoch != spec.server_epoch:
                failed.add(block_id)
                continue
            self._worker.pages[block_id] = list(stored.payload)  # type: ignore[call-overload]
            self.num_loaded_blocks += 1
        return failed


def num_computed(output: Any, request_id: str) -> int:
    """The tokens of a scheduled request that had KV before this step."""
    for new in output.scheduled_new_reqs:
        if new.req_id == request_id:
            return int(new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    return int(cached.num_computed_tokens[cached.req_ids.index(request_id)])


# --- the engine around it


@functools.cache
def _vllm_config(model: str, arguments: tuple[tuple[str, Any], ...]) -> VllmConfig:
    init_none_hash(sha256)
    transfer = KVTransferConfig(
        kv_connector="FakeLineConnector",
        kv_connector_module_path="tests.scheduler.harness",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    return EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=512,
        kv_transfer_config=transfer,
        **dict(arguments),
    ).create_engine_config()


class Engine:
    """A scheduler with our connector (`server` given) or without one, and its worker.

    in_flight: 1 drives the Scheduler step by step, more the AsyncScheduler with that many steps not yet answered.
    beside: under MultiConnector, a second connector of ours with a server of its own, asked before this one.
    v2: requests are announced as for Model Runner V2. late_execution: a step runs only when its answer is fetched.
    """

    def __init__(
        self,
        model: Path,
        server: FakeServer | None = None,
        *,
        num_blocks: int = 32,
        block_size: int = 16,
        v2: bool = False,
        in_flight: int = 1,
        late_execution: bool = False,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 512,
        policy: str = "recompute",
        extra_config: dict[str, Any] | None = None,
        beside: FakeServer | None = None,
        num_drafts: int = 0,
        **engine_args: Any,
    ) -> None:
        arguments = {
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "num_gpu_blocks_override": num_blocks,
            **engine_args,
        }
        config = copy.deepcopy(_vllm_config(str(model), tuple(sorted(arguments.items()))))
        if num_drafts:
            config.speculative_config = EngineArgs(
                model=str(model), speculative_config={"method": "ngram", "num_speculative_tokens": num_drafts}
            ).create_speculative_config(
                target_model_config=config.model_config, target_parallel_config=config.parallel_config
            )
        config.cache_config.num_gpu_blocks = num_blocks
        config.scheduler_config.async_scheduling = in_flight > 1
        transfer = config.kv_transfer_config
        transfer.kv_load_failure_policy = policy
        servers = [one for one in (beside, server) if one is not None]
        if server is None:
            config.kv_transfer_config = None
        elif beside is None:
            transfer.kv_connector_extra_config = {"server": _address_of(server), **(extra_config or {})}
        else:
            children = [
                {
                    "kv_connector": transfer.kv_connector,
                    "kv_connector_module_path": transfer.kv_connector_module_path,
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"server": _address_of(one)},
                }
                for one in servers
            ]
            transfer.kv_connector, transfer.kv_connector_module_path = "MultiConnector", None
            transfer.kv_connector_extra_config = {"connectors": children}
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=4, head_size=32, dtype=torch.bfloat16)
        self.scheduler = (AsyncScheduler if in_flight > 1 else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=False,
        )
        self.scheduler.use_v2_model_runner = v2
        self.server = server
        self.block_size = block_size
        self.worker = Worker(num_blocks, block_size, servers)
        self.outputs: list[Any] = []
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, str] = {}
        self._in_flight = in_flight
        self._late_execution = late_execution
        self._queue: deque[tuple[Any, ModelRunnerOutput | None]] = deque()
        self._num_free_at_start = self.num_free_blocks()

    # --- our connector in it

    @property
    def connector(self) -> FakeLineConnector:
        connector = self.scheduler.connector
        connector = getattr(connector, "_connectors", [connector])[-1]  # the last one of a MultiConnector
        assert isinstance(connector, FakeLineConnector)
        return connector

    @property
    def side(self) -> Any:
        """Our scheduler side, a SchedulerSide."""
        return self.connector._scheduler

    def break_hook(self, method: str, *, after: bool = False, times: int = 1) -> BreakingSide:
        """Lets a method of the scheduler side raise."""
        self.connector._scheduler = broken = BreakingSide(self.side, method, after=after, times=times)  # type: ignore[assignment]
        return broken

    def keys_of(self, request: Request, token_ids: Sequence[int] | None = None) -> list[bytes]:
        """The keys that the blocks of a sequence must have, in the shared epoch."""
        return self._keys(request, token_ids, b"")

    def _keys(self, request: Request, token_ids: Sequence[int] | None, epoch: bytes) -> list[bytes]:
        identity = identity_of(request)
        root = root_key(self.connector._namespace.fingerprint, identity, epoch, HASH)
        keys = BlockKeys(root, self.block_size, HASH, identity.features)
        keys.extend(list(request.all_token_ids if token_ids is None else token_ids))
        return [keys.key(number) for number in range(len(keys))]

    # --- requests

    def add(
        self, request_id: str, token_ids: Iterable[int] | None, max_tokens: int = 1, *, priority: int = 0, **fields: Any
    ) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        for name in ("prompt_logprobs", "skip_reading_prefix_cache", "stop_token_ids"):
            if name in fields:
                setattr(params, name, fields.pop(name))
        params.update_from_generation_config({}, 1)
        request = Request(
            request_id=request_id,
            prompt_token_ids=fields.pop("prompt_token_ids", None) if token_ids is None else list(token_ids),
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(len(self.requests)),
            priority=priority,
            block_hasher=get_request_block_hasher(self.block_size, sha256),
            **fields,
        )
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """The client went away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.finished[request_id] = "aborted"

    def answer(self, request_id: str) -> list[int]:
        return list(self.requests[request_id].output_token_ids)

    # --- steps

    def step(self) -> None:
        """As EngineCore does: schedule while the queue has room, then take the oldest answer."""
        scheduled = False
        if self.scheduler.has_requests() and len(self._queue) < self._in_flight:
            output = self.scheduler.schedule()
            self.outputs.append(output)
            self._queue.append((output, None if self._late_execution else self.worker.execute(output)))
            scheduled = True
        if self._queue and (len(self._queue) >= self._in_flight or not scheduled or not self.scheduler.has_requests()):
            output, answer = self._queue.popleft()
            if answer is None:
                answer = self.worker.execute(output)
            self._take_answer(output, answer)

    def _take_answer(self, output: Any, answer: ModelRunnerOutput) -> None:
        by_client = self.scheduler.update_from_output(output, answer)
        for outputs in by_client.values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    assert one.request_id not in self.finished, f"{one.request_id} finished twice"
                    self.finished[one.request_id] = str(one.finish_reason)

    def draft(self, request_id: str, token_ids: list[int]) -> None:
        """What the next step of a request shall try besides its last token (speculative decoding)."""
        self.scheduler.update_draft_token_ids(DraftTokenIds([request_id], [token_ids]))

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def run(self, max_steps: int = 500) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._queue:
                return
            self.step()
        left = [(request.request_id, request.status.name) for request in self.scheduler.requests.values()]
        raise AssertionError(f"not idle after {max_steps} steps: {left}")

    def finish(self, request_id: str, token_ids: Iterable[int], max_tokens: int = 1, **fields: Any) -> Request:
        """Adds a request, runs until idle, and checks its answer against a cold one."""
        request = self.add(request_id, token_ids, max_tokens, **fields)
        self.run()
        assert self.answer(request_id) == answer_to(request.prompt_token_ids or [], max_tokens)
        return request

    def finish_beside(self, request_id: str, token_ids: Iterable[int], max_tokens: int, still_there: set[str]) -> None:
        """As `finish`, while other requests cannot end."""
        self.add(request_id, token_ids, max_tokens)
        for _ in range(200):
            if set(self.scheduler.requests) == still_there:
                return
            self.step()
        raise AssertionError(f"{request_id} does not end: {list(self.scheduler.requests)}")

    def clear_local(self) -> None:
        """What the engine's own cache holds is gone; ours is not told."""
        assert self.scheduler.reset_prefix_cache()

    def preempt_all(self) -> None:
        """Preempts what is running, to be resumed in the same step. Where steps in flight or loads hold blocks vLLM
        does that and then raises, for its own cache stays.
        """
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise

    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    # --- what must hold

    def check_idle(self) -> None:
        """Nothing of any request remains: no block, no state, no lease, no gather without a name."""
        assert not self.scheduler.requests, list(self.scheduler.requests)
        assert self.num_free_blocks() == self._num_free_at_start
        assert not self.worker.loading_block_ids()
        if self.server is not None:
            assert self.worker.num_nameless == 0
            assert not self.server.held_leases(), f"leases {self.server.held_leases()}"
            if self.side is not None:
                assert self.side.num_requests() == 0
                assert self.side.num_leases() == 0

    def check_answers(self) -> None:
        """Every finished request has the answer of a cold engine; an aborted one, the beginning of it."""
        for request_id, request in self.requests.items():
            got = self.answer(request_id)
            assert got == answer_to(request.prompt_token_ids or [], len(got)), request_id

    def check_store(self, *others: "Engine") -> set[bytes]:
        """Every payload in the server is the KV that its key names. Returns the keys that were recognised."""
        assert self.server is not None
        right: dict[bytes, tuple[Digest, ...]] = {}
        for engine in (self, *others):
            for request in engine.requests.values():
                prompt = list(request.prompt_token_ids or [])
                # One token more than was answered: a step in flight may have computed what nobody heard of.
                token_ids = prompt + answer_to(prompt, request.max_tokens)
                digests = digests_of(token_ids)
                for epoch in {b"", engine.side._epoch if engine.side is not None else b""}:
                    for number, key in enumerate(engine._keys(request, token_ids, epoch)):
                        right[key] = tuple(digests[number * self.block_size : (number + 1) * self.block_size])
        for key, stored in self.server.blocks.items():
            assert key in right, f"a key that no request has: {key.hex()}"
            assert stored.payload == right[key], f"wrong KV under {key.hex()}"
        return set(self.server.blocks)
