"""One engine without a model: vLLM's real Scheduler, our real connector, and a worker whose KV is a function of tokens.

The worker model keeps, for every position of every block, a digest of the digest before it (read from its pages, as
attention would) and the token id. So the KV of a position is a function of its whole prefix, an overwritten or wrongly
loaded block spoils everything computed after it, and the sampled tokens follow from the KV: an engine with the cache
and one without give the same tokens, or something is wrong.

Checked at once, in every test: each read of KV; each payload that is saved against the token ids that its key names;
that a block which is saved or loaded is in the table of a request at that moment; and after each step that our side
knows no request that vLLM does not (`Engine.check_states`). At the end of a test: `check_idle`, `check_answers`,
`check_store`.

The worker follows block tables by its own reading of both shapes of SchedulerOutput, not by `connector/plan.py`; of the
connector's step plan it executes what the real worker executes, with knobs for what is late, lost or withheld.

`Engine` drives it: synchronously, or with N steps in flight as `EngineCore.step_with_batch_queue` does.
"""

import copy
import functools
import hashlib
import itertools
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from packaging.version import Version
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
from vllm.version import __version__ as vllm_version

from connector.block_keys import BlockKeys, identity_of, root_key
from connector.metrics import LINE, PrefixCacheStats
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


# A paused vLLM waits for loads that are on their way. From here on it also admits the requests whose load has ended,
# so that the pause leaves nothing behind; before, resetting its caches then fails, with or without a connector.
ADMITS_LOADED_WHILE_PAUSED = Version(vllm_version) >= Version("0.32")


def _address_of(server: FakeServer) -> str:
    address = next(_addresses)
    _SERVERS[address] = server
    return address


class FakeLineConnector(PrefixCacheConnector):
    """Our connector with a line to a FakeServer, and a record of what it was asked and answered."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.matches: list[tuple[str, int, tuple[int | None, bool]]] = []
        self.stats = PrefixCacheStats()
        super().__init__(vllm_config, role, kv_cache_config)
        if self._scheduler is not None:
            self._scheduler._clock = _SERVERS[self._config.server].clock

    def _make_client(self, hello: Any) -> Any:
        return FakeCacheClient(_SERVERS[self._config.server], hello.key_bytes)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.matches.append((request.request_id, num_computed_tokens, answer))
        return answer

    def get_kv_connector_stats(self) -> PrefixCacheStats | None:
        stats = super().get_kv_connector_stats()
        if stats is not None:
            self.stats.aggregate(stats)
        return stats


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
    """The KV of a position: a function of the KV before it and of its token id (-1: a draft that is none)."""
    return hashlib.blake2b((before or b"") + token_id.to_bytes(4, "little", signed=True), digest_size=8).digest()


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
    is_old: bool = False  # planned before new weights: what it brings is not the engine's KV any more


class Worker:
    """The worker process of one engine: it computes, and carries out the step plans of its connectors (`sides`).

    Knobs: `load_delay` and `commit_delay` in steps; `withhold_loads`: none ends; `lose_commits`: none arrives;
    `loads_before_forward`: as up to vLLM 0.28; `num_right_drafts`: of the drafts that this worker makes so many are
    right, and then wrong ones follow (None: without steps in flight it makes none). `table_of`: the blocks that the
    scheduler has allocated to a request.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        servers: Sequence[FakeServer],
        connectors: Sequence["FakeLineConnector"],
        table_of: Callable[[str], list[int]],
    ) -> None:
        self.block_size = block_size
        self.pages: list[Page] = [[None] * block_size for _ in range(num_blocks)]
        self.running: dict[str, Running] = {}
        self.step = 0
        self.load_delay = 0
        self.commit_delay = 0
        self.withhold_loads = False
        self.lose_commits = False
        self.loads_before_forward = False
        self.num_right_drafts: int | None = None
        self.has_drafts_in_flight = False
        self.num_computed_tokens = 0
        self.sessions: set[str] = set()  # requests whose token ids vLLM rewrites from turn to turn
        self.tainted: set[str] = set()  # requests that computed upon KV of before new weights
        self.table_of = table_of
        self.sides = [CacheSide(self, *pair) for pair in zip(servers, connectors, strict=True)]

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
        return _model_runner_output(
            sampled, KVConnectorOutput(finished_recving=finished or None, invalid_block_ids=failed)
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
        if before is not None and request_id not in self.sessions:
            common = min(len(token_ids), len(before.token_ids))
            assert token_ids[:common] == before.token_ids[:common], f"{request_id} came back with other token ids"
        self.running[request_id] = Running(token_ids, block_ids)

    def _forward(self, request_id: str, output: Any) -> list[int]:
        request = self.running[request_id]
        start = num_computed(output, request_id)
        drafts = list(output.scheduled_spec_decode_tokens.get(request_id, ()))
        if self.has_drafts_in_flight:
            drafts = self.drafts(request, len(drafts))  # the scheduler knows only how many there are
            # The scheduler counted on all drafts of steps in flight: only the worker knows how many were right.
            start = min(start, len(request.token_ids) - 1)
        stop = start + output.num_scheduled_tokens[request_id]
        token_ids = request.token_ids + drafts
        assert stop <= len(token_ids), f"{request_id}: {stop} tokens to compute of {len(token_ids)} that are known"
        truth = request.right_digests()
        num_known = len(request.token_ids)
        self.num_computed_tokens += stop - start
        computed: dict[int, Digest] = {}
        for position in range(start, stop):
            before = self._read(request, position - 1) if position else None
            if before == TAINTED:
                self.tainted.add(request_id)
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

    def drafts(self, request: Running, number: int) -> list[int]:
        """`num_right_drafts` right ones, then wrong ones."""
        drafts: list[int] = []
        digest = request.right_digests()[-1]
        for place in range(number):
            right = token_after(digest)
            drafts.append(right if place < (self.num_right_drafts or 0) else (right + 1) % VOCABULARY)
            digest = next_digest(digest, drafts[-1])
        return drafts

    def _read(self, request: Running, position: int) -> Digest | None:
        return self.pages[request.block_ids[position // self.block_size]][position % self.block_size]

    def _write(self, request: Running, position: int, digest: Digest) -> Digest:
        block_id = request.block_ids[position // self.block_size]
        assert block_id, "block 0 is the null block"
        self.pages[block_id][position % self.block_size] = digest
        return digest

    def taint(self) -> None:
        """Marks all KV that is there or on its way: it was computed with weights that are no longer the engine's."""
        self.pages = [[digest and TAINTED for digest in page] for page in self.pages]
        for side in self.sides:
            for load in side.loads:
                load.is_old = True


def _model_runner_output(sampled: dict[str, list[int]], of_connector: KVConnectorOutput | None) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=of_connector,
    )


class CacheSide:
    """What our worker side does in a worker: gathers at the end of a step, names, loads when they are due."""

    def __init__(self, worker: Worker, server: FakeServer, connector: "FakeLineConnector") -> None:
        self.server = server
        self.rights = Rights(connector, worker.block_size)
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
        tables = {block_id for running in self._worker.running.values() for block_id in running.block_ids}
        for save in plan.saves:
            assert save.block_id in tables, f"block {save.block_id} is saved and belongs to nobody"
            payload = tuple(self._worker.pages[save.block_id])
            if save.name is None:
                assert save.ticket not in self.nameless
                self.nameless[save.ticket] = payload
            else:
                self._commit(save.name.key, payload)

    def _commit(self, key: bytes, payload: tuple[Digest | None, ...]) -> None:
        self.rights.check(key, payload)
        if not self._worker.lose_commits:
            self._commits.append((self._worker.step + self._worker.commit_delay, key, payload))

    @property
    def num_uncommitted(self) -> int:
        return len(self._commits)

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
            failed |= self._load(load.spec, load.is_old)
            finished.add(load.spec.request_id)
        return finished, failed

    def _load(self, spec: LoadSpec, is_old: bool) -> set[int]:
        if spec.request_id in self._cancelled or not spec.keys:
            self._cancelled.discard(spec.request_id)
            return set(spec.block_ids)
        key_bytes = len(spec.keys) // len(spec.block_ids)
        table = self._worker.table_of(spec.request_id)
        assert set(spec.block_ids) <= set(table), f"{spec.block_ids} are loaded, {spec.request_id} has {table}"
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
            payload = [TAINTED] * len(stored.payload) if is_old else list(stored.payload)  # type: ignore[call-overload, arg-type]
            self._worker.pages[block_id] = payload
            self.num_loaded_blocks += 1
        return failed


class Rights:
    """What every key of one connector names: for the requests that it was told of, in every epoch it had."""

    def __init__(self, connector: "FakeLineConnector", block_size: int) -> None:
        self._connector = connector
        self._block_size = block_size
        self._requests: list[Request] = []
        self._payloads: dict[bytes, tuple[bytes, tuple[Digest, ...]]] = {}  # key → (epoch, payload)

    def learn(self, request: Request) -> None:
        if request.prompt_embeds is None and request.prompt_token_ids is not None:
            self._requests.append(request)
            self._learn(request, predicted(request))

    def keys(self, request: Request, token_ids: Sequence[int], epoch: bytes) -> list[bytes]:
        identity = identity_of(request)
        root = root_key(self._connector._namespace.fingerprint, identity, epoch, HASH)
        keys = BlockKeys(root, self._block_size, HASH, identity.features)
        keys.extend(token_ids)
        return [keys.key(number) for number in range(len(keys))]

    def epoch(self) -> bytes:
        side = self._connector._scheduler
        return side._epoch if side is not None else b""

    def _learn(self, request: Request, token_ids: list[int]) -> None:
        epoch, size = self.epoch(), self._block_size
        digests = digests_of(token_ids)
        for number, key in enumerate(self.keys(request, token_ids, epoch)):
            self._payloads[key] = (epoch, tuple(digests[number * size : (number + 1) * size]))

    def check(self, key: bytes, payload: object) -> None:
        """`payload` is saved, or stored, under `key`."""
        if key not in self._payloads:  # a new epoch, or answers that followed from KV of old weights
            for request in self._requests:
                self._learn(request, predicted(request))
                self._learn(request, list(request.all_token_ids))
        assert key in self._payloads, f"a key that no request has: {key.hex()}"
        epoch, right = self._payloads[key]
        is_old = isinstance(payload, tuple) and TAINTED in payload
        assert payload == right or (is_old and epoch != self.epoch()), f"wrong KV under {key.hex()}"


def predicted(request: Request) -> list[int]:
    """What a request's token ids will be in the end, and one more: a step in flight may compute the last one's KV."""
    prompt = list(request.prompt_token_ids or [])
    return prompt + answer_to(prompt, request.max_tokens)


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
        kv_transfer_config=transfer,
        **{"max_model_len": 512, **dict(arguments)},
    ).create_engine_config()


@functools.cache
def trouble_without_connector(model: Path, shape: str, num_drafts: int = 0) -> str | None:
    """What is wrong with a crowd of which one is preempted, on a scheduler without any connector. With drafts, of which
    some are right: with one that is preempted at this moment and that, all of it.
    """
    try:
        for number in range(10 if num_drafts else 1):
            engine = Engine(model, None, num_blocks=8, num_drafts=num_drafts, **SHAPES[shape])
            for start in (0, 200):
                engine.add(f"r{start}", range(start, start + 40), max_tokens=40)
            if num_drafts:
                engine.worker.num_right_drafts = number % (num_drafts + 1)
                engine.steps(2 + number)
                engine.preempt_all()
            engine.run()
            engine.check_answers()
    except AssertionError as error:
        frames = traceback.extract_tb(error.__traceback__)
        return f"{type(error).__name__} in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno}"
    return None


class Engine:
    """A scheduler with our connector (`server` given) or without one, and its worker.

    in_flight: 1 drives the Scheduler step by step, more the AsyncScheduler with that many steps not yet answered.
    beside: under MultiConnector, a second connector of ours with a server of its own, asked before this one, or after
    it (`ours_first`).
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
        ours_first: bool = False,
        role: str = "kv_both",
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
        transfer.kv_role = role
        servers = [one for one in (beside, server) if one is not None]
        if ours_first:
            servers.reverse()
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
        connector = self.scheduler.connector
        ours = [] if server is None else getattr(connector, "_connectors", [connector])
        self.connectors: list[FakeLineConnector] = ours
        self._ours = 0 if ours_first else -1
        tables = self.scheduler.kv_cache_manager
        self.worker = Worker(
            num_blocks, block_size, servers, self.connectors, lambda request_id: tables.get_block_ids(request_id)[0]
        )
        self.worker.has_drafts_in_flight = num_drafts > 0 and in_flight > 1
        self.outputs: list[Any] = []
        self.requests: dict[str, Request] = {}  # the latest of each id
        self.all_requests: list[Request] = []
        self.checks_states = True
        self.finished: dict[str, str] = {}
        self._in_flight = in_flight
        self._late_execution = late_execution
        self._queue: deque[tuple[Any, ModelRunnerOutput | None]] = deque()
        self._num_free_at_start = self.num_free_blocks()

    # --- our connector in it

    @property
    def connector(self) -> FakeLineConnector:
        connector = self.connectors[self._ours]
        assert isinstance(connector, FakeLineConnector)
        return connector

    @property
    def side(self) -> Any:
        """Our scheduler side, a SchedulerSide."""
        return self.connector._scheduler

    def counts(self) -> dict[str, dict[str, int]]:
        """What our scheduler side has counted so far: "scheduler" → counter, "bypassed" → reason → count."""
        self.connector.get_kv_connector_stats()
        counts = {
            kind: {name: figure for name, figure in figures.items() if not isinstance(figure, list)}
            for kind, figures in self.connector.stats.data.items()
            if kind != LINE
        }
        return {kind: figures for kind, figures in counts.items() if figures}

    def break_hook(self, method: str, *, after: bool = False, times: int = 1) -> BreakingSide:
        """Lets a method of the scheduler side raise."""
        self.checks_states = False
        self.connector._scheduler = broken = BreakingSide(self.side, method, after=after, times=times)  # type: ignore[assignment]
        return broken

    def keys_of(self, request: Request, token_ids: Sequence[int] | None = None) -> list[bytes]:
        """The keys that the blocks of a sequence must have, in the shared epoch."""
        return self._keys(request, token_ids, b"")

    def _keys(self, request: Request, token_ids: Sequence[int] | None, epoch: bytes) -> list[bytes]:
        rights = self.worker.sides[self._ours].rights
        return rights.keys(request, list(request.all_token_ids if token_ids is None else token_ids), epoch)

    # --- requests

    def add(
        self,
        request_id: str,
        token_ids: Iterable[int] | None,
        max_tokens: int = 1,
        *,
        priority: int = 0,
        kv_transfer_params: Any = None,
        **fields: Any,
    ) -> Request:
        extra_args = {} if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, extra_args=extra_args)
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
        assert request_id not in self.scheduler.requests, f"{request_id} is alive"
        self.requests[request_id] = request
        self.all_requests.append(request)
        self.finished.pop(request_id, None)
        for side in self.worker.sides:
            side.rights.learn(request)
        self.scheduler.add_request(request)
        return request

    def go_on_streaming(self, request_id: str, token_ids: Iterable[int], max_tokens: int) -> None:
        """The next turn of a session that was added with `resumable`."""
        self.worker.sessions.add(request_id)
        assert self.finished.pop(request_id) == "length", "a turn ends, its session does not"
        session = self.requests[request_id]
        turn = Request(request_id, list(token_ids), session.sampling_params, None, resumable=True)
        turn.max_tokens = max_tokens
        self.scheduler.add_request(turn)

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
            if self.checks_states:
                self.check_nothing_is_passed_over(output)
            self._queue.append((output, None if self._late_execution else self.worker.execute(output)))
            scheduled = True
        if self._queue and (len(self._queue) >= self._in_flight or not scheduled or not self.scheduler.has_requests()):
            output, answer = self._queue.popleft()
            if answer is None:
                answer = self.worker.execute(output)
            self._take_answer(output, answer)
            if self.worker.num_right_drafts is not None and not self.worker.has_drafts_in_flight:
                for request_id in output.num_scheduled_tokens:
                    running = self.worker.running[request_id]
                    self.draft(request_id, self.worker.drafts(running, self.scheduler.num_spec_tokens))
        if self.checks_states:
            self.check_states()

    def _take_answer(self, output: Any, answer: ModelRunnerOutput) -> None:
        by_client = self.scheduler.update_from_output(output, answer)
        for outputs in by_client.values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    is_new = one.request_id not in self.finished or one.request_id in self.worker.sessions
                    assert is_new, f"{one.request_id} finished twice"
                    self.finished[one.request_id] = str(one.finish_reason)

    @staticmethod
    def anything(output: Any) -> ModelRunnerOutput:
        """An answer to a step that decodes, of a worker that computes nothing: for benchmarks."""
        return _model_runner_output({request_id: [7] for request_id in output.num_scheduled_tokens}, None)

    def draft(self, request_id: str, token_ids: list[int]) -> None:
        """What the next step of a request shall try besides its last token (speculative decoding)."""
        self.scheduler.update_draft_token_ids(DraftTokenIds([request_id], [token_ids]))

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def run(self, max_steps: int = 500) -> None:
        """Until nothing is left to do, of which something is done at least every 200 steps (C52)."""
        num_idle = 0
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._queue:
                return
            self.step()
            num_idle = 0 if self.outputs and self.outputs[-1].num_scheduled_tokens else num_idle + 1
            assert num_idle < 200, "the engine stands still"
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

    def load_new_weights(self, *, preempt: bool) -> None:
        """As vLLM does: after the steps in flight, and then the caches are reset, ours too."""
        self._queue = deque((output, answer or self.worker.execute(output)) for output, answer in self._queue)
        self.worker.taint()
        if preempt:
            self.preempt_all()
        if self.scheduler.reset_prefix_cache(reset_connector=True) is False:
            assert self.num_free_blocks() < self._num_free_at_start, "ours never says that it could not be reset"

    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    # --- what must hold

    def check_states(self) -> None:
        """Our side knows no request that vLLM does not, and no load, name or late answer without its request."""
        live = self.scheduler.requests
        for connector in self.connectors:
            side = connector._scheduler
            if side is None:
                continue
            for request_id, state in side._states.items():
                assert live.get(request_id) is state.request, f"{request_id} is not alive"
            for request_id, request in side._bypassed.items():
                assert live.get(request_id) is request, f"{request_id} is not alive"
            states = {id(state) for state in side._states.values()}
            assert side._in_flight.keys() <= live.keys(), "a load of nobody"
            assert side._cancelled | side._unwanted <= side._in_flight.keys(), "a load is cancelled that has ended"
            assert side._late.keys() <= side._states.keys(), "a late answer for nobody"
            assert all(id(state) in states for state in side._loading_first.values()), "others wait for nobody"
            assert all(id(state) in states for state, _ in side._nameless.values()), "a gather of nobody"

    def check_nothing_is_passed_over(self, output: Any) -> None:
        """Every block that is full after this step is saved, or is not to be; rejected drafts may hold one back."""
        for connector in self.connectors:
            for request_id, state in connector._scheduler._states.items() if connector._scheduler is not None else ():
                if request_id in output.num_scheduled_tokens and not self.scheduler.num_spec_tokens:
                    num_computed = state.request.num_computed_tokens
                    assert num_computed < state.save_at, f"{request_id}: {num_computed} tokens, next {state.save_at}"

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
        """Every finished request has the answer of a cold engine; an aborted one, the beginning of it; and one that
        ran through a change of weights, whatever came of it.
        """
        for request in self.all_requests:
            if request.request_id in self.worker.tainted:
                continue
            got = list(request.output_token_ids)
            assert got == answer_to(request.prompt_token_ids or [], len(got)), request.request_id

    def check_store(self) -> set[bytes]:
        """Every payload in the server is the KV that its key names. Returns the keys."""
        assert self.server is not None
        for key, stored in self.server.blocks.items():
            self.worker.sides[self._ours].rights.check(key, stored.payload)
        return set(self.server.blocks)
