"""The scheduler side: which blocks of a request the cache has, and which blocks of a step it should get.

The story of one request, in the order in which vLLM calls:

    num_new_matched_tokens   keys once per (request, number of tokens); one lookup; None until it is answered
    after_alloc              a positive number makes a LoadSpec for the blocks just allocated; zero lets the lease go
    build_plan               block tables follow vLLM's; blocks that become full in this step make SaveSpecs; who was
                             admitted without a question is asked about now: what the server has is not saved again
    loads_ended              loads that the workers reported: leases go, failures are remembered
    request_finished         names for the last nameless gathers; nothing of the request remains

Token ranges of one request in a step, in blocks:

    [0, local)        were in the engine's own cache: saved only if the lookup says that the server lacks them
    [local, loaded)   came from the server
    [loaded, known)   computed by the end of this step, all token ids known: saved under their key
    [known, certain)  computed by the end of this step, last token id not known yet (asynchronous scheduling): gathered
                      without a name; the next plan names or discards them. Not in an engine that speculates: there
                      vLLM counts drafts as computed that it may yet reject, also those of steps still in flight

Invariants.
- `block_ids` of a state belong to the request's present scheduled life; preemption empties them.
- A state is `tainted` when its table is in doubt, or its blocks hold KV of before a reset, or will when a load ends,
  ours or another connector's. It saves nothing until vLLM asks for it again, for then it has no blocks.
- What a request may do is decided once, when it is first seen: `may_load`, and `save_stop`, the number of leading
  blocks that may be saved. The role, the engine's settings, the request's options and its kind are not looked at again.
- Asking twice changes nothing: one RPC per (request, number of tokens) while its lease has life left.
- Every lease taken is released once: when its load ended, when no load came of it, or when the request ended.

Token ids come from the live `Request` (docs/decisions/0001): decoded tokens are in no field of SchedulerOutput.

Not here: vLLM imports (`plugin.py`), bytes (`worker.py`), the wire (`client.py`).
"""

import dataclasses
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from connector.block_keys import BlockKeys, RequestIdentity
from connector.client import LookupAnswer, checksums_of
from connector.fill_calendar import FillCalendar
from connector.group_plans import GroupPlans
from connector.groups import Groups
from connector.load_record import LoadRecord
from connector.plan import BlockName, LoadSpec, SaveSpec, StepPlan, block_table_changes
from connector.prefill_rate import PrefillRate
from connector.request_options import RequestOptions

# Steps in which nothing ran, nothing was loading and a request was answered in vain, before hits are withheld: vLLM
# (0.32) keeps blocks reserved for a request whose load failed, and a load that does not fit beside them is never
# admitted. From then on every second answer is "ask again", too: up to 0.28 a request that does not fit stands before
# those behind it, and one of them may be loaded and hold the blocks.
STALLED_STEPS = 8
WORKERS_GRACE_S = 2.0  # after the first answer of a server: its workers may still be attaching
EPOCH_BYTES = 16
GATE_SHARE = 0.8  # of the time that computing takes: a load that lasts longer is not worth waiting for
PATIENCE = 3.0  # a request waits at most this times what the server said that a promotion would take


class Call(Protocol):
    """A lookup under way (`client.LookupCall`)."""

    server_epoch: int

    def wait(self, timeout_s: float) -> None: ...
    def done(self) -> bool: ...
    def answer(self) -> LookupAnswer | None: ...


class Client(Protocol):
    """What the scheduler side asks of the line to the server (`client.CacheClient`)."""

    def lookup(self, keys: bytes, first: int, *, lease: bool, recompute_us_per_block: float = 0.0) -> Call | None: ...
    def release(self, lease_ids: list[int]) -> None: ...
    def renew(self, lease_ids: list[int]) -> None: ...
    def doubt(self) -> None: ...


class Question:
    """The lookup of one (request, number of tokens), and what came of it."""

    __slots__ = ("answer", "asked_at", "call", "for_load", "lease_id", "num_tokens", "renewed")

    def __init__(self, num_tokens: int, call: Call, for_load: bool, asked_at: float) -> None:
        self.num_tokens = num_tokens
        self.asked_at = asked_at
        self.for_load = for_load  # else only presence was asked, and nothing promised
        self.call: Call | None = call
        self.answer: LookupAnswer | None = None
        self.lease_id = 0  # held, and not handed to a load yet
        self.renewed = False


@dataclasses.dataclass(slots=True)
class RequestState:
    """One live request. `save_at`: the number of computed tokens at which its next block is full."""

    request: Any
    keys: BlockKeys
    block_ids: list[int] = dataclasses.field(default_factory=list)
    tables: list[list[int]] = dataclasses.field(default_factory=list)  # of every KV group; only where there are several
    next_save: int = 0
    save_at: float = math.inf
    tainted: bool = False
    question: Question | None = None
    offer: tuple[int, int] | None = None  # blocks [start, stop) that we last said can be loaded
    num_local: int = 0  # leading blocks that the engine itself had when it last asked
    may_load: bool = True  # also false after a load that failed
    wants_loads: bool = True  # `may_load` at first
    save_stop: int = sys.maxsize
    steps_aside: bool = False  # answers None once: its load failed, see `num_new_matched_tokens`
    patience_until: float = 0.0  # for blocks on their way to the server or to the engine; 0: it has not waited yet
    loading_first: bytes = b""  # key of the first block that it was told to load, until it is scheduled
    unanswered_local: int = 0  # blocks [0, n) whose presence is asked for, off the path


class SchedulerSide:
    """One engine. Called by the scheduler's thread only."""

    def __init__(
        self,
        client: Client,
        *,
        block_size: int,
        hash_name: str,
        root_of: Callable[[RequestIdentity, bytes], bytes],
        identity_of: Callable[[Any], RequestIdentity],
        cannot_be_keyed: Callable[[Any], str | None],
        lookup_wait_s: float,
        lookup_timeout_s: float,
        load_timeout_s: float,
        saves: bool = True,
        loads: bool = True,
        save_decoded: bool = True,
        min_load_tokens: int = 0,
        options_of: Callable[[Any], RequestOptions] = lambda _request: RequestOptions(),
        groups: Groups | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._block_size = block_size
        self._hash_name = hash_name
        self._root_of = root_of
        self._identity_of = identity_of
        self._cannot_be_keyed = cannot_be_keyed
        self._lookup_wait_s = lookup_wait_s
        self._lookup_timeout_s = lookup_timeout_s
        self._load_timeout_s = load_timeout_s
        self._saves = saves
        self._loads = loads
        self._save_decoded = save_decoded
        self._min_load_blocks = max(-(-min_load_tokens // block_size), 1)
        self._options_of = options_of
        # None: one KV group of which every block is needed, as in most models.
        self._groups = GroupPlans(groups) if groups is not None and not groups.is_plain else None
        self._clock = clock
        self._epoch = b""
        self._old_blocks_stay = False
        self._has_waited = False  # for an answer, in this step
        self._speculates = False  # drafts were scheduled, in whatever step
        self._prefill_rate = PrefillRate()
        self._last_step: tuple[float, int] = (0.0, 0)  # when the step before was planned, its prompt tokens
        self._states: dict[str, RequestState] = {}
        self._bypassed: dict[str, Any] = {}  # live requests that have no state
        self._counts: Counter[str] = Counter()
        self._bypass_counts: Counter[str] = Counter()
        self._lookup_seconds: list[float] = []
        self._new_loads: list[LoadSpec] = []
        self._in_flight: dict[str, LoadSpec] = {}
        self._due: dict[str, float] = {}  # when each of them has to be there
        self._record = LoadRecord(self._now)
        self._loading_first: dict[bytes, RequestState] = {}
        self._cancelled: set[str] = set()  # loads in flight that the next plan cancels
        self._unwanted: set[str] = set()  # loads in flight that were cancelled
        self._nameless: dict[int, tuple[RequestState, int]] = {}  # ticket → whose block, its number
        self._names: dict[int, BlockName | None] = {}
        self._fills = FillCalendar()
        self._next_ticket = 0
        self._released: list[int] = []
        self._has_answered = False  # with a number, since the last plan
        self._stalled_steps = 0
        self._late: dict[str, RequestState] = {}  # states with `unanswered_local`
        self._grace: tuple[int, float] = (0, 0.0)  # server epoch, until when its missing workers are waited for

    # --- asked at admission, perhaps many times -------------------------------------------------------------------

    def num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens beyond the local hit that can be loaded, whether asynchronously); (None, False): ask again."""
        state = self._state_of(request)
        num_blocks = self._num_loadable(state, num_computed_tokens // self._block_size) if state is not None else 0
        if num_blocks is None:
            return None, False
        self._has_answered = True
        if self._stalled_steps >= STALLED_STEPS:
            if state is not None:
                state.offer = None
            return (None if self._stalled_steps % 2 else 0), False
        return num_blocks * self._block_size, num_blocks > 0

    def _num_loadable(self, state: RequestState, local: int) -> int | None:
        """How many blocks from `local` on can be loaded: they are offered. None: not known yet."""
        state.offer = None
        state.tainted = False  # vLLM asks for requests that have no blocks
        if state.steps_aside:
            # vLLM keeps it at the head of those that hold blocks, though its own were freed. If it does not fit now,
            # those behind it, loaded and holding the rest, would never run: so it goes back to the waiting queue once.
            state.steps_aside = False
            return None
        state.num_local = local
        limit = int(state.request.num_tokens - 1) // self._block_size  # at least one token is left to compute
        if not state.may_load or limit - local < self._min_load_blocks or self._record.withholds_loads():
            return 0
        question = self._ask(state, local, limit, for_load=True)
        if question is None:
            return 0
        if not self._settle(question):
            return None
        answer = question.answer
        if answer is None:
            return 0
        if answer.workers_missing and self._in_grace(answer.server_epoch):
            state.question = None  # asked again in the next step
            return None
        stop = min(answer.hit_end, limit)
        stop = local + self._record.num_good((state.keys.key(i) for i in range(local, stop)), stop - local)
        if self._groups is not None and stop < min(answer.hit_end, limit):
            return 0  # what is promised of a window is of no use before its end
        if stop < limit and answer.retry_at is not None and self._waits_for_more(state, answer.retry_at):
            return None
        if not answer.covers(local) or stop - local < self._min_load_blocks or question.lease_id == 0:
            return 0
        other = self._loading_first.get(state.keys.key(local))
        if other is not None and other is not state and self._is_patient(state, self._load_timeout_s):
            return None  # loaded or, if the load fails, computed: once the other runs, its blocks are a local hit
        state.offer = (local, stop)
        return stop - local

    def _state_of(self, request: Any) -> RequestState | None:
        """None: the request is not for us."""
        request_id = request.request_id
        state = self._states.get(request_id)
        if state is not None and state.request is request:
            return state
        if self._bypassed.get(request_id) is request:
            return None
        self.forget(request_id)  # another request had this id
        reason = self._cannot_be_keyed(request)
        options = self._options_of(request)
        may_load, save_stop = self._loads and options.load, self._save_stop(request, options)
        if reason is None and not may_load and not save_stop:
            reason = "kv_transfer_params"
        elif reason is None and getattr(request, "skip_reading_prefix_cache", False):
            may_load = False
            self._bypass_counts["skip_reading_prefix_cache"] += 1
        if reason is not None:
            self._bypass_counts[reason] += 1
            self._bypassed[request_id] = request
            return None
        state = RequestState(
            request, self._new_keys(request), may_load=may_load, wants_loads=may_load, save_stop=save_stop
        )
        self._states[request_id] = state
        return state

    def _save_stop(self, request: Any, options: RequestOptions) -> int:
        save = options.save or ("all" if self._save_decoded else "prompt")
        if not self._saves or save == "none":
            return 0
        return sys.maxsize if save == "all" else request.num_prompt_tokens // self._block_size

    def _new_keys(self, request: Any) -> BlockKeys:
        identity = self._identity_of(request)
        return BlockKeys(self._root_of(identity, self._epoch), self._block_size, self._hash_name, identity.features)

    def _ask(self, state: RequestState, local: int, limit: int, *, for_load: bool) -> Question | None:
        """The question for the present number of tokens: the one that is out, or a new one. None: nobody to ask."""
        question = state.question
        num_tokens = state.request.num_tokens
        if question is not None and (
            question.num_tokens != num_tokens or question.for_load < for_load or self._has_expired(question)
        ):
            self._drop_question(state)
            question = None
        if question is None and limit > 0:
            state.keys.extend(state.request.all_token_ids)
            call = self._client.lookup(
                state.keys.packed(0, limit),
                min(local, limit),
                lease=for_load,
                recompute_us_per_block=self._prefill_rate.us_per_block(self._block_size),
            )
            if call is None:
                return None
            question = state.question = Question(num_tokens, call, for_load, self._clock())
        if question is not None and question.call is not None and for_load and not self._has_waited:
            # Once per step, however many requests wait: a scheduler that has nothing else to do would spin, and take
            # the processor from those who are to answer.
            self._has_waited = True
            question.call.wait(self._lookup_wait_s)
        return question

    def _settle(self, question: Question) -> bool:
        """Takes the answer if it came. True: there is nothing more to wait for."""
        if question.call is None:
            return True
        if not question.call.done():
            return False
        question.answer = question.call.answer()
        question.call = None
        if question.answer is not None:
            question.lease_id = question.answer.lease_id
            if question.for_load:
                self._lookup_seconds.append(self._clock() - question.asked_at)
        self._count_lookup(question)
        return True

    def _count_lookup(self, question: Question) -> None:
        """Once per question, when it has ended (`metrics.py` says what the outcomes mean)."""
        answer = question.answer
        if question.call is not None:
            outcome = "dropped"
        elif answer is None:
            outcome = "unanswered"
        elif not question.for_load:
            outcome = "answered"
        elif answer.lease_id:
            outcome = "hit"
        elif answer.workers_missing or answer.retry_at is not None:
            outcome = "later"
        else:
            outcome = "miss"
        self._counts[f"{'lookups' if question.for_load else 'presence_lookups'}:{outcome}"] += 1

    def _has_expired(self, question: Question) -> bool:
        """Too little is left of the lease to load under it. At half its life it is renewed instead, once."""
        answer = question.answer
        if answer is None or question.lease_id == 0:
            return False
        now = self._clock()
        if now < answer.half_life:
            return False
        if not question.renewed and now < answer.deadline:
            question.renewed = True
            self._client.renew([question.lease_id])
        return now >= (answer.half_life + answer.deadline) / 2

    def _in_grace(self, server_epoch: int) -> bool:
        now = self._clock()
        if self._grace[0] != server_epoch:
            self._grace = (server_epoch, now + WORKERS_GRACE_S)
        return now < self._grace[1]

    def _waits_for_more(self, state: RequestState, retry_at: float) -> bool:
        """The server promotes more of the tail, and judged that to be faster than computing it: wait, within reason."""
        now = self._clock()
        if not self._is_patient(state, PATIENCE * max(retry_at - now, 0.0)):
            return False
        if now >= retry_at:
            self._drop_question(state)  # asked again in the next step
        return True

    def _is_patient(self, state: RequestState, for_s: float) -> bool:
        """Whether a request still waits for blocks on their way: `for_s` seconds from when it first did, in all."""
        now = self._clock()
        if not state.patience_until:
            state.patience_until = now + min(for_s, self._load_timeout_s)
        return now < state.patience_until

    def _drop_question(self, state: RequestState) -> None:
        question, state.question = state.question, None
        state.offer = None
        if question is not None:
            if not self._settle(question):
                self._count_lookup(question)
            if question.lease_id:
                self._released.append(question.lease_id)
            # A call still out may yet take a lease; it ends by its deadline.

    # --- blocks were allocated ------------------------------------------------------------------------------------

    def after_alloc(
        self, request: Any, block_ids: list[int], num_external_tokens: int, tables: Sequence[Sequence[int]] = ()
    ) -> None:
        """vLLM allocated `block_ids`, the whole table, and will wait for `num_external_tokens` of them to be loaded.

        tables: those of every KV group.
        """
        state = self._states.get(request.request_id)
        if num_external_tokens == 0:
            # Not chosen, discarded, or the second call after a load: the lease has nothing more to hold.
            if state is not None and state.question is not None and state.question.lease_id:
                self._released.append(state.question.lease_id)
                state.question.lease_id = 0
            return
        if state is None or state.offer is None or state.question is None or state.question.answer is None:
            raise AssertionError(f"{num_external_tokens} tokens to load of request {request.request_id}, none offered")
        answer = state.question.answer
        start, stop = state.offer
        num_blocks = num_external_tokens // self._block_size
        assert num_blocks <= stop - start, f"{num_blocks} blocks of an offer of {stop - start}"
        stop = start + num_blocks
        columns = slice(start - answer.hit_start, stop - answer.hit_start)
        timeout_s = self._time_for(num_blocks)
        if self._groups is not None:
            load = self._groups.load(
                request.request_id, tables, state.keys, start, stop, answer, state.question.lease_id, timeout_s
            )
        else:
            load = LoadSpec(
                request_id=request.request_id,
                block_ids=tuple(block_ids[start:stop]),
                keys=state.keys.packed(start, stop),
                slots=np.ascontiguousarray(answer.slots[:, columns]).tobytes(),
                generations=np.ascontiguousarray(answer.generations[:, columns]).tobytes(),
                lease_id=state.question.lease_id,
                server_epoch=answer.server_epoch,
                timeout_s=timeout_s,
                checksums=checksums_of(answer, columns),
            )
        state.question.lease_id = 0
        state.offer = None
        self._lets_others_load(state)
        state.loading_first = state.keys.key(start)
        self._loading_first[state.loading_first] = state
        self._counts["promised_tokens"] += num_external_tokens
        self._queue_load(load)

    def _now(self) -> float:
        return self._clock()

    def _time_for(self, num_blocks: int) -> float:
        """Seconds that a load may last: no longer than it is faster than computing, or than a lookup may take.

        Loads before it that are not due yet would be computed one after the other, too: their time comes on top.
        """
        now = self._clock()
        recompute_s = num_blocks * self._prefill_rate.us_per_block(self._block_size) / 1e6
        worth_s = max(GATE_SHARE * recompute_s, self._lookup_timeout_s) if recompute_s else math.inf
        waits_s = max(max(self._due.values(), default=now) - now, 0.0)
        return min(waits_s + worth_s, self._load_timeout_s)

    def fail_load(self, request: Any, block_ids: list[int], num_external_tokens: int) -> None:
        """For an `after_alloc` that failed: vLLM waits for a load, so there must be one that reports failure."""
        request_id = request.request_id
        self._new_loads = [load for load in self._new_loads if load.request_id != request_id]
        queued = self._in_flight.pop(request_id, None)
        if queued is not None:
            self._due.pop(request_id, None)
            self._end_load(queued)
        num_blocks = num_external_tokens // self._block_size
        if num_blocks:
            self._queue_load(
                LoadSpec(
                    request_id,
                    tuple(block_ids[-num_blocks:]) if self._groups is None else self._groups.no_block_ids(num_blocks),
                    b"",
                    b"",
                    b"",
                    lease_id=0,
                    server_epoch=0,
                    num_tokens=num_external_tokens,
                )
            )
        state = self._states.get(request_id)
        if state is not None:
            self._drop_question(state)
            self._lets_others_load(state)
            state.may_load = False  # or vLLM would ask, be promised the same blocks, and come here again, for ever

    def _queue_load(self, load: LoadSpec) -> None:
        self._in_flight[load.request_id] = load
        if load.keys:
            self._due[load.request_id] = self._clock() + load.timeout_s
        self._new_loads.append(load)

    # --- one step -------------------------------------------------------------------------------------------------

    def build_plan(self, scheduler_output: Any) -> StepPlan:
        self._time_step(scheduler_output)
        self._has_waited = False
        for request_id in scheduler_output.preempted_req_ids or ():
            self._preempted(request_id)
        saves: list[SaveSpec] = []
        for change in block_table_changes(scheduler_output):
            state = self._states.get(change.request_id)
            if state is None:
                continue
            if self._groups is not None:
                self._groups.follow(state.tables, change)
            if change.replaces:
                self._scheduled_anew(state, change.block_ids, saves)
            else:
                state.block_ids.extend(change.block_ids)
        if self._nameless:
            self._name_gathers()
        if self._late:
            self._save_late_answers(saves)
        if scheduler_output.scheduled_spec_decode_tokens:
            self._speculates = True
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in self._fills.take(scheduled, scheduler_output.total_num_scheduled_tokens):
            state = self._states.get(request_id)
            if state is not None and state.save_at < math.inf:
                self._save_what_fills(state, scheduled.get(request_id, 0), saves)
        self._let_leases_go()
        if scheduler_output.num_scheduled_tokens or self._in_flight:
            self._stalled_steps = 0
        elif self._has_answered:
            self._stalled_steps += 1
        self._has_answered = False
        loads = tuple(
            dataclasses.replace(load, keys=b"") if load.request_id in self._cancelled else load
            for load in self._new_loads
        )
        plan = StepPlan(loads, tuple(saves), self._names, frozenset(self._cancelled))
        self._unwanted |= self._cancelled
        self._new_loads, self._names, self._cancelled = [], {}, set()
        return plan

    def _save_what_fills(self, state: RequestState, num_scheduled: int, saves: list[SaveSpec]) -> None:
        end = state.request.num_computed_tokens + num_scheduled
        if num_scheduled and end >= state.save_at:
            if self._groups is None:
                self._save_full_blocks(state, end // self._block_size, saves)
            else:
                self._save_full_units(state, end, saves)
        if state.save_at < math.inf:
            self._fills.expect(state.request.request_id, int(state.save_at) - end)

    def _time_step(self, scheduler_output: Any) -> None:
        """A step lasts until the next one is planned. Its prompt tokens: all but one per request."""
        now = self._clock()
        planned, num_prompt_tokens = self._last_step
        self._prefill_rate.observe(num_prompt_tokens, now - planned)
        num_scheduled = scheduler_output.total_num_scheduled_tokens
        self._last_step = (now, num_scheduled - len(scheduler_output.num_scheduled_tokens))

    def salvage_plan(self) -> StepPlan:
        """For a `build_plan` that failed: loads still go out, for requests wait for them; block tables are in doubt."""
        for state in self._states.values():
            self._taint(state)
        loads, self._new_loads = tuple(self._new_loads), []
        names, self._names = self._names, {}
        return StepPlan(loads, (), names)

    def _preempted(self, request_id: str) -> None:
        state = self._states.get(request_id)
        if state is not None:
            self._discard_gathers(state)
            self._drop_question(state)
            state.block_ids = []
            state.tables = []
            state.save_at = math.inf
            state.unanswered_local = 0
            self._late.pop(request_id, None)

    def _scheduled_anew(self, state: RequestState, block_ids: list[int], saves: list[SaveSpec]) -> None:
        """A first schedule or a resume: a whole new table, of which `num_computed_tokens` are there already."""
        self._discard_gathers(state)
        state.block_ids = list(block_ids)
        state.steps_aside = False
        state.patience_until = 0.0
        self._lets_others_load(state)
        if state.wants_loads:
            num_wanted = (state.request.num_tokens - 1) // self._block_size - state.num_local
            self._counts["wanted_tokens"] += max(num_wanted, 0) * self._block_size
        if state.num_local and self._old_blocks_stay:
            self._taint(state)
        if state.tainted:
            return
        num_there = state.request.num_computed_tokens // self._block_size
        self._saved_up_to(state, num_there)
        if state.save_stop == 0:
            return
        self._fills.expect(state.request.request_id, 1)  # this very step
        if state.question is None:
            limit = min((state.request.num_tokens - 1) // self._block_size, state.save_stop)
            self._ask(state, num_there, limit, for_load=False)
        if num_there and state.question is not None:
            if self._settle(state.question):
                self._save_absent(state, num_there, saves)
            else:
                state.unanswered_local = num_there
                self._late[state.request.request_id] = state

    def _saved_up_to(self, state: RequestState, num_blocks: int) -> None:
        state.next_save = num_blocks
        state.save_at = (num_blocks + 1) * self._block_size if num_blocks < state.save_stop else math.inf

    def _save_absent(
        self, state: RequestState, num_there: int, saves: list[SaveSpec], *, is_late: bool = False
    ) -> None:
        """Blocks [0, num_there) were there without our doing: those that the server lacks are saved."""
        answer = state.question.answer if state.question is not None else None
        if answer is None:
            return
        if self._groups is not None:
            stop = min(num_there, len(state.keys), state.save_stop)
            saves.extend(self._groups.saves_absent(state.tables, state.keys, stop, answer, is_late=is_late))
            return
        if answer.hit_start == 0 and answer.hit_end >= num_there:
            return
        saves.extend(
            SaveSpec(state.block_ids[block], self._name(state, block))
            for block in range(min(num_there, len(state.keys), state.save_stop))
            if not answer.is_present(block)
        )

    def _save_late_answers(self, saves: list[SaveSpec]) -> None:
        for request_id, state in list(self._late.items()):
            if state.question is None or self._settle(state.question):
                del self._late[request_id]
                self._save_absent(state, state.unanswered_local, saves, is_late=True)
                state.unanswered_local = 0

    def _save_full_blocks(self, state: RequestState, certain: int, saves: list[SaveSpec]) -> None:
        """Blocks [next_save, certain) are computed by the end of this step, or would be if all drafts were right."""
        # Many decoding requests come here in one step, with one block each: no call that is not needed.
        certain = min(certain, state.save_stop)
        keys, block_ids, block = state.keys, state.block_ids, state.next_save
        known = min(certain, keys.extend(state.request.all_token_ids))
        question = state.question
        answer = question.answer if question is not None and self._settle(question) else None
        while block < known:
            if answer is None or not answer.is_present(block):
                saves.append(SaveSpec(block_ids[block], BlockName(*keys.key_and_parent(block), block)))
            block += 1
        if not self._speculates:  # a rejected draft would leave a block that was gathered with it
            while block < certain:
                ticket = self._next_ticket = self._next_ticket + 1
                self._nameless[ticket] = (state, block)
                saves.append(SaveSpec(block_ids[block], None, ticket))
                block += 1
        state.next_save = block
        state.save_at = (block + 1) * self._block_size if block < state.save_stop else math.inf
        if answer is not None and block >= 8 * len(answer.present) and not state.unanswered_local:
            self._drop_question(state)  # all that it was about is behind

    def _save_full_units(self, state: RequestState, end: int, saves: list[SaveSpec]) -> None:
        """As `_save_full_blocks`, where a unit has blocks of several KV groups; tokens [0, end) are computed then."""
        assert self._groups is not None
        certain = min(end // self._block_size, state.save_stop)
        unit = state.next_save
        known = min(certain, state.keys.extend(state.request.all_token_ids))
        question = state.question
        answer = question.answer if question is not None and self._settle(question) else None
        stop = known if self._speculates else certain
        while unit < stop:
            for spec in self._groups.saves(state.tables, unit, state.request.num_computed_tokens, end, answer):
                if unit < known:
                    saves.append(spec._replace(name=self._name(state, unit)))
                else:
                    ticket = self._next_ticket = self._next_ticket + 1
                    self._nameless[ticket] = (state, unit)
                    saves.append(spec._replace(ticket=ticket))
            unit += 1
        self._saved_up_to(state, unit)
        if answer is not None and unit >= 8 * len(answer.present) and not state.unanswered_local:
            self._drop_question(state)  # all that it was about is behind

    def _name(self, state: RequestState, block: int) -> BlockName:
        return BlockName(*state.keys.key_and_parent(block), block)

    def _name_gathers(self, only: RequestState | None = None) -> None:
        """Names the nameless gathers whose token ids have become known."""
        for ticket, (state, block) in list(self._nameless.items()):
            request = state.request
            if request.num_tokens >= (block + 1) * self._block_size and (only is None or state is only):
                state.keys.extend(request.all_token_ids)
                self._names[ticket] = self._name(state, block)
                del self._nameless[ticket]

    def _discard_gathers(self, state: RequestState) -> None:
        for ticket, (owner, _) in list(self._nameless.items()):
            if owner is state:
                self._names[ticket] = None
                del self._nameless[ticket]

    def _taint(self, state: RequestState) -> None:
        self._discard_gathers(state)
        state.tainted = True
        state.save_at = math.inf
        state.unanswered_local = 0
        self._late.pop(state.request.request_id, None)

    # --- ends -----------------------------------------------------------------------------------------------------

    def loads_ended(
        self, finished: Iterable[str], failed_block_ids: set[int] | None, failed_requests: Collection[str] = ()
    ) -> None:
        """The workers reported these requests' loads, all ranks of them. None: which blocks failed is not known.

        failed_requests: said instead of blocks where there are several KV groups.
        """
        any_late = False
        for request_id in finished:
            load = self._in_flight.pop(request_id, None)
            if load is None:
                continue  # another connector's, under MultiConnector
            self._end_load(load)
            due = self._due.pop(request_id, math.inf)
            was_wanted = request_id not in self._unwanted
            failed = None if request_id in failed_requests else failed_block_ids
            num_good = self._num_good(load, failed)
            self._count_load(load, num_good, was_wanted)
            self._unwanted.discard(request_id)
            self._cancelled.discard(request_id)
            if was_wanted and load.keys:
                any_late |= self._note_load(load, failed, due)
            if num_good == self._num_promised(load):
                continue
            state = self._states.get(request_id)  # None: aborted, or failed for good by vLLM's policy
            if state is not None:
                # Without this vLLM would ask, be promised the same blocks, and fail again, for ever.
                state.may_load = False
                state.steps_aside = True
                state.question = None
            if was_wanted and load.keys:
                self._ask_anew_for(load.block_keys()[num_good])
        self._let_leases_go()  # the engine may be idle now: no further step would do it
        if any_late:
            self._client.doubt()  # last: from then on nothing is sent, and the leases would live until they expire

    def _num_promised(self, load: LoadSpec) -> int:
        return load.num_tokens // self._block_size or load.num_blocks

    def _num_good(self, load: LoadSpec, failed_block_ids: set[int] | None) -> int:
        """The engine goes on from the first block that failed on any rank: what lies behind it is computed, too. Of
        several groups all arrived, or nothing is worth anything.
        """
        if failed_block_ids is None:
            return 0
        return self._num_promised(load) if self._groups is not None else _run_before(load.block_ids, failed_block_ids)

    def _count_load(self, load: LoadSpec, num_good: int, was_wanted: bool) -> None:
        num_blocks = self._num_promised(load)
        self._counts["loaded_tokens"] += num_good * self._block_size
        if num_good == num_blocks:
            self._counts["loads:done"] += 1
            return
        outcome, tokens = ("failed", "load_failed_tokens") if was_wanted else ("cancelled", "load_cancelled_tokens")
        self._counts[f"loads:{outcome}"] += 1
        self._counts[tokens] += (num_blocks - num_good) * self._block_size

    def _note_load(self, load: LoadSpec, failed_block_ids: set[int] | None, due: float) -> bool:
        """Remembers what came of it. True: it ran into its deadline, which casts doubt on the server."""
        failed = [failed_block_ids is None] * load.num_blocks
        if self._groups is None and failed_block_ids:
            failed = [block_id in failed_block_ids for block_id in load.block_ids]
        late = any(failed) and self._clock() >= due
        self._record.ended(load.block_keys(), failed, late=late)
        if late:
            self._counts["late_loads"] += 1
        return late

    def _let_leases_go(self) -> None:
        if self._released:
            self._client.release(self._released)
            self._released = []

    def _ask_anew_for(self, bad_key: bytes) -> None:
        """Some of what was promised is gone: whoever else was promised it asks what is left."""
        for state in self._states.values():
            question = state.question
            if question is not None and question.lease_id and bad_key in state.keys.packed(0, len(state.keys)):
                self._drop_question(state)

    def _end_load(self, load: LoadSpec) -> None:
        if load.lease_id:
            self._released.append(load.lease_id)

    def _lets_others_load(self, state: RequestState) -> None:
        if self._loading_first.get(state.loading_first) is state:
            del self._loading_first[state.loading_first]
        state.loading_first = b""

    def request_finished(self, request: Any) -> None:
        """Finished or aborted. Its last nameless gathers get their names now: no later token changes them."""
        state = self._states.get(request.request_id)
        if state is not None and state.request is request and not state.tainted:
            self._name_gathers(state)
        self.forget(request.request_id)

    def forget(self, request_id: str) -> None:
        """Drops all that is known of a request. A load in flight is cancelled, and stays known until reported."""
        self._bypassed.pop(request_id, None)
        self._fills.forget(request_id)
        state = self._states.pop(request_id, None)
        if state is not None:
            self._discard_gathers(state)
            self._drop_question(state)
            self._lets_others_load(state)
            self._late.pop(request_id, None)
        if request_id in self._in_flight:
            self._cancelled.add(request_id)

    def reset_cache(self, *, old_blocks_stay: bool) -> None:
        """What this engine has stored is not valid for it any more (new weights): a fresh epoch, nothing shared.

        KV that running requests hold was computed before the reset: they save no more of it. Loads in flight are
        cancelled: they carry old KV. `old_blocks_stay`: the engine could not clear its own cache; then whatever it
        hits there may be old, and what is computed upon it too: neither is saved, until a reset that clears it.
        """
        self._epoch = os.urandom(EPOCH_BYTES)
        self._old_blocks_stay = old_blocks_stay
        self._cancelled.update(self._in_flight)
        for state in self._states.values():
            self._taint(state)
            self._drop_question(state)
            state.keys = self._new_keys(state.request)

    def take_counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """(counts, requests bypassed by reason) since the last call. `metrics.py` says what they mean."""
        counts, self._counts = +self._counts, Counter()
        bypass_counts, self._bypass_counts = self._bypass_counts, Counter()
        return counts, bypass_counts

    def take_seconds(self) -> dict[str, list[float]]:
        """How long lookups took that were answered since the last call."""
        seconds, self._lookup_seconds = self._lookup_seconds, []
        return {"lookup_seconds": seconds} if seconds else {}

    def num_requests(self) -> int:
        """Live requests that we know: 0 when the engine is idle."""
        return len(self._states) + len(self._bypassed)

    def num_leases(self) -> int:
        """Leases that we hold and have not let go of."""
        held = sum(1 for state in self._states.values() if state.question is not None and state.question.lease_id)
        return held + sum(1 for load in self._in_flight.values() if load.lease_id)


def _run_before(block_ids: Sequence[int], failed: set[int]) -> int:
    """How many leading blocks did not fail."""
    return next((i for i, block_id in enumerate(block_ids) if block_id in failed), len(block_ids))
