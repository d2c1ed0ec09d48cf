"""The worker side: moves the blocks that a step's plan names, and reports what it moved.

The story of one step, in the order in which vLLM calls: `begin_step` gives names to earlier nameless gathers and
takes free slots for the step's saves; `save_layer` copies a layer's pages of those blocks as soon as the layer is
done; `start_loads` hands loads to the transfer threads; `finish_saves` copies the layers nobody called for and
queues the commits; `take_finished` and `take_failed_blocks` say which loads ended, and where they failed.

Invariants.
- A load is reported, done or failed, once, and only when no thread of ours can write into its block_ids any more:
  the thread that ends its last part reports it.
- A load has one deadline, counted from when it was handed over: waiting for a thread, for the server and for bytes
  that trickle in all count, and what is not there by then is not written into a page any more.
- The engine's thread never waits for the server, nor for a segment: only slots whose memory is mapped are in the pool.
- Nothing here reads engine memory after `finish_saves`: no block needs to be kept for us.
- No RPC stands between a finished block and its copy: slots are reserved ahead by the saver thread. Without a free
  slot the save is dropped and counted.

Not here: what to save and load (`scheduler.py`), how bytes are copied (`transfer.py`), the wire (`client.py`).
"""

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from connector.client import ALREADY_PRESENT, DROPPED, REFUSED, SLOT_GRANULE, STORED, U64, CacheClient, Session
from connector.halt import Halt
from connector.kv_layout import KVLayout
from connector.plan import BlockName, LoadSpec, SaveSpec, StepPlan
from connector.transfer import Gather, SlotMemory, SlotPool, new_staging, scatter, use_one_thread

logger = logging.getLogger("vllm.prefixd")

NUM_LOAD_THREADS = 2
MIN_PART_BYTES = 16 << 20  # a load of more than this is shared by the threads: two copy twice as fast as one
SAVER_IDLE_S = 0.5  # how often the saver looks at the slot pool without being woken
UNATTACHED_PAUSE_S = 0.03  # and at the session, while there is none: the first request after a start is to be saved
RESERVE_PAUSE_S = 0.05  # before asking again for slots that the server did not have
MAX_COMMIT_BATCH = 1024
RECEIVE_SHARE = 0.9  # of the time a load has left, for bytes to arrive: what did arrive is then still written in time
DRAIN_S = 3.0  # what shutdown grants to queued commits

# What became of a block that was to be saved, by the status that the server gave it.
_OUTCOMES = {
    "saved_blocks": STORED,
    "already_saved_blocks": ALREADY_PRESENT,
    "refused_blocks": REFUSED,
    "dropped_blocks": DROPPED,
}


@dataclass(frozen=True, slots=True)
class Lane:
    """What belongs to one session: its slots, and the memory they lie in."""

    session: Session
    memory: SlotMemory
    pool: SlotPool


@dataclass(frozen=True, slots=True)
class Written:
    """A gathered payload that waits for its commit."""

    lane: Lane
    slot: int
    name: BlockName


@dataclass(slots=True)
class LoadJob:
    """A load in `num_parts` parts, each the work of one transfer thread. Reported when the last part has ended.

    `deadline`: monotonic seconds. `halt` is set when the load is not wanted any more. `failed`: numbers of its blocks.
    """

    load: LoadSpec
    num_parts: int
    deadline: float
    started_at: float
    is_mapped: bool = False
    halt: Halt = field(default_factory=Halt)
    failed: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """The saves of the step under way. `slots[i]` receives `saves[i]`; None: the step saves nothing."""

    lane: Lane
    saves: Sequence[SaveSpec]
    slots: list[int]
    gather: Gather
    copying_s: float = 0.0  # what the engine's thread has spent here


class WorkerSide:
    """One rank, one store group (`groups.py`). Built when the engine has registered its KV tensors.

    writes: else another rank, which holds the same bytes, saves them. is_chain: else blocks are stored as if each stood
    alone, for it is needed whether or not those before it are there.
    """

    def __init__(
        self,
        client: CacheClient,
        layout: KVLayout,
        *,
        shard: int,
        slots_ahead: int,
        staging_bytes: int,
        load_timeout_s: float,
        writes: bool = True,
        is_chain: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._layout = layout
        self._writes = writes
        self._is_chain = is_chain
        self._shard = shard
        self._slots_ahead = slots_ahead
        self._load_timeout_s = load_timeout_s
        self._clock = clock
        self._runs_of_layers = layout.runs_of_layers()
        self._staging = _Staging(layout, staging_bytes)
        self._lane: Lane | None = None
        self._step: Step | None = None
        self._nameless: dict[int, tuple[Lane, int]] = {}
        self._written: deque[Written] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._results = threading.Lock()
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._suspended = False
        self._num_copying = 0  # parts of loads that may write into the engine's memory now
        self._copies_ended = threading.Condition(self._results)
        self._jobs: dict[str, LoadJob] = {}  # loads under way
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._loaders = ThreadPoolExecutor(NUM_LOAD_THREADS, "prefixd-load", initializer=use_one_thread)
        self._saver = threading.Thread(target=self._save_loop, name="prefixd-save", daemon=True)

    def start(self) -> None:
        self._saver.start()

    # --- the engine's thread --------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Names arrive, slots are taken. Copies nothing yet."""
        self.abandon_step()
        if plan.cancelled:
            with self._results:
                jobs = [job for name in plan.cancelled if (job := self._jobs.get(name)) is not None]
            for job in jobs:
                job.halt.set()
        if plan.names:
            self._give_names(plan)
        if not plan.saves or not self._writes:
            return
        lane = self._current_lane() if not self._suspended else None
        slots = lane.pool.take(len(plan.saves)) if lane is not None else []
        self._count("dropped_blocks", len(plan.saves) - len(slots))
        if lane is None or not slots:
            return
        saves = plan.saves[: len(slots)]
        try:
            block_ids = [block_id for save in saves for block_id in (save.block_id, *save.more)]
            gather = Gather(self._layout, lane.memory, block_ids, slots)
        except LookupError:
            self._count("dropped_blocks", len(saves))  # the slots' segment never came: they go with the session
            return
        lane.session.enter()
        self._step = Step(lane, saves, slots, gather)

    def save_layer(self, layer_name: str) -> None:
        """The engine has written `layer_name` for every block of this step."""
        if self._step is not None:
            started_at = self._clock()
            for index in self._runs_of_layers.get(layer_name, ()):
                self._step.gather.copy_layer(index)
            self._step.copying_s += self._clock() - started_at

    def finish_saves(self) -> None:
        """Completes the step: after this the engine may do what it likes with its blocks."""
        step = self._step
        if step is None:
            return
        started_at = self._clock()
        step.gather.copy_rest()
        self._note("save_copy_seconds", step.copying_s + self._clock() - started_at)
        self._step = None
        named = []
        for save, slot in zip(step.saves, step.slots, strict=True):
            if save.name is None:
                self._nameless[save.ticket] = (step.lane, slot)
            else:
                named.append(Written(step.lane, slot, save.name))
        step.lane.session.leave()
        self._enqueue(named)

    def abandon_step(self) -> None:
        """Gives the slots of an unfinished step back; for a step that failed half-way."""
        step = self._step
        if step is not None:
            self._step = None
            self._count("dropped_blocks", len(step.slots))
            step.lane.pool.give(step.slots)
            step.lane.session.leave()

    def start_loads(self, loads: Sequence[LoadSpec]) -> None:
        now = self._clock()
        for load in loads:
            num_blocks = load.num_blocks
            num_parts = min(NUM_LOAD_THREADS, 1 + num_blocks * self._layout.payload_bytes // MIN_PART_BYTES, num_blocks)
            job = LoadJob(load, num_parts, now + min(load.timeout_s, self._load_timeout_s), now)
            with self._results:
                self._jobs[load.request_id] = job
            for part in range(num_parts):
                start, stop = part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts
                try:
                    self._loaders.submit(self._load_part, job, start, stop)
                except RuntimeError:  # shut down meanwhile
                    self._end_part(job, range(start, stop))

    def fail_loads(self, loads: Sequence[LoadSpec]) -> None:
        """Reports loads as failed that were never started. Those that were are reported by their threads."""
        with self._results:
            for load in loads:
                if load.request_id not in self._jobs and load.request_id not in self._finished:
                    self._counts["load_failed_blocks"] += load.num_blocks
                    self._finished.add(load.request_id)
                    self._failed_requests.add(load.request_id)
                    self._failed_blocks.update(load.block_ids)

    def take_finished(self) -> set[str]:
        """Requests whose loads ended since the last call. Their failed blocks are in `take_failed_blocks`."""
        with self._results:
            finished, self._finished = self._finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        with self._results:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Those of which a block failed, among the finished."""
        with self._results:
            failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call. `metrics.py` says what they mean."""
        with self._results:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def take_seconds(self) -> dict[str, list[float]]:
        """How long loads and saves took that ended since the last call."""
        with self._results:
            seconds, self._seconds = self._seconds, defaultdict(list)
        return dict(seconds)

    def shutdown(self) -> None:
        """Ends the threads; queued commits have a bounded time to go out. The client is closed by its owner, after."""
        self.abandon_step()
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        with self._results:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.halt.set()
        self._loaders.shutdown(wait=True, cancel_futures=True)
        if self._saver.is_alive():
            self._saver.join(DRAIN_S)

    def suspend(self) -> None:
        """The engine's memory goes away (sleep), or moves: when this has returned, nothing of ours reads it or writes
        into it, until `resume`. Loads that are under way fail; saves are dropped and counted."""
        self.abandon_step()
        with self._copies_ended:
            self._suspended = True
            jobs = list(self._jobs.values())
        for job in jobs:
            job.halt.set()
        with self._copies_ended:
            self._copies_ended.wait_for(lambda: self._num_copying == 0)

    def resume(self, layout: KVLayout | None = None) -> bool:
        """It is there again. `layout`: where, if it moved. False, and nothing is resumed, if payloads would differ."""
        if layout is not None:
            if (layout.descriptor, layout.payload_bytes) != (self._layout.descriptor, self._layout.payload_bytes):
                return False
            self._layout = layout
            self._runs_of_layers = layout.runs_of_layers()
        self._suspended = False
        return True

    def _count(self, name: str, number: int) -> None:
        if number:
            with self._results:
                self._counts[name] += number

    def _note(self, name: str, seconds: float) -> None:
        with self._results:
            self._seconds[name].append(seconds)

    def _give_names(self, plan: StepPlan) -> None:
        named = []
        for ticket, name in plan.names.items():
            lane_and_slot = self._nameless.pop(ticket, None)
            if lane_and_slot is None:
                continue  # it was dropped when it was gathered
            lane, slot = lane_and_slot
            if name is None:
                lane.pool.give([slot])
                self._count("discarded_blocks", 1)
            else:
                named.append(Written(lane, slot, name))
        self._enqueue(named)

    def _enqueue(self, written: list[Written]) -> None:
        if written:
            with self._wake:
                self._written.extend(written)
                self._wake.notify_all()

    def _current_lane(self) -> Lane | None:
        """The lane of the attached session; a new session gets a new one. Called by the engine's and the saver's
        thread."""
        session = self._client.session()
        if session is None:
            return None
        with self._results:
            if self._lane is None or self._lane.session is not session:
                if session.mapped:
                    memory = SlotMemory(self._layout, session, None)
                    self._lane = Lane(session, memory, SlotPool(memory.granules_per_slot))
                else:
                    self._lane = Lane(session, self._staging.memory, self._staging.save_pool())
            return self._lane

    # --- transfer threads: loads ----------------------------------------------------------------------------------

    def _load_part(self, job: LoadJob, start: int, stop: int) -> None:
        """Blocks [start, stop) of a load."""
        load = job.load
        failed: Sequence[int] = range(start, stop)
        with self._results:
            may_copy = not self._suspended
            self._num_copying += may_copy
        try:
            session = self._client.session()
            if may_copy and session is not None and session.server_epoch == load.server_epoch and load.keys:
                with session.inside():
                    job.is_mapped = session.mapped
                    copy = self._load_mapped if session.mapped else self._load_stream
                    failed = copy(job, start, stop, session)
        except Exception:
            logger.exception("load of %d blocks failed", stop - start)
        with self._copies_ended:
            self._num_copying -= may_copy
            self._copies_ended.notify_all()
        self._end_part(job, failed)

    def _end_part(self, job: LoadJob, failed: Sequence[int]) -> None:
        """No thread writes into these blocks any more. The last part reports the load. `failed`: numbers of blocks."""
        with self._results:
            job.failed.extend(failed)
            job.num_parts -= 1
            if job.num_parts == 0:
                del self._jobs[job.load.request_id]
                self._report(job)

    def _report(self, job: LoadJob) -> None:
        """The lock `_results` is held."""
        load = job.load
        failed = list(range(load.num_blocks)) if job.halt.is_set else job.failed
        num_loaded = load.num_blocks - len(failed)
        if num_loaded:
            path = "mapped" if job.is_mapped else "stream"
            self._counts[f"loaded_bytes:{path}"] += num_loaded * self._layout.payload_bytes
            self._counts["loaded_blocks"] += num_loaded
            self._seconds[f"load_seconds:{path}"].append(self._clock() - job.started_at)
        if failed:
            self._counts["load_failed_blocks"] += len(failed)
            self._failed_requests.add(load.request_id)
        for block in failed:
            self._failed_blocks.update(load.block_ids_of(block, block + 1))
        self._finished.add(load.request_id)

    def _load_mapped(self, job: LoadJob, start: int, stop: int, session: Session) -> Sequence[int]:
        """Copies slots into pages. Returns the blocks whose slot was not (any more) what was promised."""
        load = job.load
        first = self._shard * load.num_blocks
        mine = slice(first + start, first + stop)
        slots = np.frombuffer(load.slots, dtype="<u8")[mine]
        promised = np.frombuffer(load.generations, dtype="<u4")[mine]
        memory = SlotMemory(self._layout, session, None)
        before = memory.generations(slots)
        if before is None or slots.size != stop - start:
            return range(start, stop)
        block_ids = load.block_ids_of(start, stop)
        broken = before != promised
        if load.checksums:
            # Before the copy, and the generations again after it: what was verified is what is copied.
            broken |= self._unverified(memory, load, mine, slots)
            after = memory.generations(slots)
            assert after is not None
            self._tell_of_broken(session, load, start, broken & (after == promised))
        if not scatter(self._layout, memory, block_ids, slots.tolist(), lambda: self._is_unwanted(job)):
            return range(start, stop)
        after = memory.generations(slots)
        assert after is not None
        broken |= after != promised
        return [start + int(i) for i in np.flatnonzero(broken)]

    def _load_stream(self, job: LoadJob, start: int, stop: int, session: Session) -> Sequence[int]:
        """Receives payloads into staging, a batch at a time, and copies those that are whole and verified."""
        load = job.load
        keys = load.block_keys()
        failed: list[int] = []
        with self._staging.load_slots() as slots:
            for at in range(start, stop, len(slots)):
                if self._is_unwanted(job):
                    return [*failed, *range(at, stop)]
                end = min(at + len(slots), stop)
                batch = slots[: end - at]
                payloads = [self._staging.memory.payload(slot) for slot in batch]
                checksums = self._client.get(
                    session,
                    b"".join(keys[at:end]),
                    load.lease_id,
                    payloads,
                    timeout_s=RECEIVE_SHARE * (job.deadline - self._clock()),
                    halt=job.halt,
                )
                good = [
                    i
                    for i, checksum in enumerate(checksums)
                    if checksum is not None and checksum in (0, xxhash.xxh3_64_intdigest(payloads[i]))
                ]
                whole = scatter(
                    self._layout,
                    self._staging.memory,
                    [block_id for i in good for block_id in load.block_ids_of(at + i, at + i + 1)],
                    [batch[i] for i in good],
                    lambda: self._is_unwanted(job),
                )
                loaded = set(good) if whole else set()
                failed.extend(at + i for i in range(end - at) if i not in loaded)
                came = np.array([checksum is not None for checksum in checksums], dtype=np.bool_)
                came[good] = False
                self._tell_of_broken(session, load, at, came)
        return failed

    def _unverified(self, memory: SlotMemory, load: LoadSpec, mine: slice, slots: U64) -> npt.NDArray[np.bool_]:
        """Which payloads in mapped slots have another checksum than they were saved with."""
        promised = np.frombuffer(load.checksums, dtype="<u8")[mine]
        found = np.array([memory.checksum(slot) for slot in slots.tolist()], dtype=np.uint64)
        unverified: npt.NDArray[np.bool_] = (promised != 0) & (found != promised)
        return unverified

    def _tell_of_broken(self, session: Session, load: LoadSpec, start: int, broken: npt.NDArray[np.bool_]) -> None:
        """Payloads from block `start` of the load on that came as they should, but for what is in them."""
        if broken.any():
            keys = load.block_keys()
            places = np.flatnonzero(broken) + start
            self._count("corrupt_blocks", len(places))
            logger.error("%d blocks were not what was saved; they are computed", len(places))
            self._client.verify(session, b"".join(keys[at] for at in places.tolist()))

    def _is_unwanted(self, job: LoadJob) -> bool:
        return self._stopping or self._suspended or job.halt.is_set or self._clock() >= job.deadline

    # --- saver thread: reservations, commits ----------------------------------------------------------------------

    def _save_loop(self) -> None:
        use_one_thread()
        while True:
            pause = SAVER_IDLE_S
            try:
                pause = self._reserve_ahead()
                batch = [self._written.popleft() for _ in range(min(len(self._written), MAX_COMMIT_BATCH))]
                if batch:
                    self._commit(batch)
                    continue
            except Exception:
                logger.exception("saving failed")
            with self._wake:
                if self._stopping and not self._written:
                    return
                if not self._written:
                    self._wake.wait(pause)

    def _reserve_ahead(self) -> float:
        """Keeps the pool of a mapped session filled. Returns how long the saver may rest, in seconds."""
        lane = self._current_lane()
        if lane is None:
            return UNATTACHED_PAUSE_S
        if not lane.session.mapped or self._stopping:
            return SAVER_IDLE_S
        slot_bytes = lane.memory.granules_per_slot * SLOT_GRANULE
        target = min(self._slots_ahead, lane.session.limits.max_reserved_bytes // slot_bytes)
        if 2 * len(lane.pool) >= target:
            return SAVER_IDLE_S
        with lane.session.inside():
            slots = self._client.reserve(lane.session, target - len(lane.pool))
            # Waits here, not in the engine's step, for segments that are on their way. What stays unmapped is not used
            # and goes with the session.
            mapped = [slot for slot in slots.tolist() if lane.session.segment(slot >> 32) is not None]
        lane.pool.give(mapped)
        return SAVER_IDLE_S if 2 * len(lane.pool) >= target else RESERVE_PAUSE_S

    def _commit(self, batch: list[Written]) -> None:
        lane = batch[0].lane
        others = [written for written in batch if written.lane is not lane]
        batch = [written for written in batch if written.lane is lane]
        if others:
            self._written.extendleft(reversed(others))
        slots = [written.slot for written in batch]
        keys = b"".join(written.name.key for written in batch)
        parents = b"".join(written.name.parent for written in batch)
        depths = np.array([written.name.depth if self._is_chain else 0 for written in batch], dtype="<u4")
        started_at = self._clock()
        with lane.session.inside():
            if lane.session.mapped:
                sums: U64 = np.array([lane.memory.checksum(slot) for slot in slots], dtype="<u8")
                statuses = self._client.commit(lane.session, np.array(slots, dtype="<u8"), keys, parents, depths, sums)
            else:
                payloads = [lane.memory.payload(slot) for slot in slots]
                checksums: U64 = np.array([xxhash.xxh3_64_intdigest(payload) for payload in payloads], dtype="<u8")
                statuses = self._client.put(lane.session, payloads, keys, parents, depths, checksums)
        if statuses is not None:
            path = "mapped" if lane.session.mapped else "stream"
            self._note(f"save_seconds:{path}", self._clock() - started_at)
            self._count(f"saved_bytes:{path}", statuses.count(STORED) * self._layout.payload_bytes)
            for name, status in _OUTCOMES.items():
                self._count(name, statuses.count(status))
        if not lane.session.mapped:
            lane.pool.give(slots)
        elif statuses is not None:
            lane.pool.give([slot for slot, status in zip(slots, statuses, strict=True) if status != STORED])
        # Mapped and unanswered: the slots may have a name by now. They are the server's until the session ends.
        if statuses is None:
            self._count("dropped_blocks", len(batch))


class _Staging:
    """Our own slots for the stream path: half for saves, the rest in equal parts for the load threads.

    Made when first needed: a mapped session never pays for it.
    """

    def __init__(self, layout: KVLayout, num_bytes: int) -> None:
        self._layout = layout
        self._slot_granules = -(-layout.payload_bytes // SLOT_GRANULE)
        self._num_slots = max(num_bytes // (self._slot_granules * SLOT_GRANULE), 2 * (1 + NUM_LOAD_THREADS))
        self._lock = threading.Lock()
        self._memory: SlotMemory | None = None
        self._save_pool: SlotPool | None = None
        self._load_parts: list[list[int]] = []
        self._part_free = threading.Condition(self._lock)

    @property
    def memory(self) -> SlotMemory:
        with self._lock:
            return self._made()

    def _made(self) -> SlotMemory:
        if self._memory is None:
            staging = new_staging(self._num_slots * self._slot_granules * SLOT_GRANULE)
            self._memory = SlotMemory(self._layout, None, staging)
            slots = [i * self._slot_granules for i in range(self._num_slots)]
            half = self._num_slots // 2
            self._save_pool = SlotPool(self._slot_granules)
            self._save_pool.give(slots[:half])
            part = (self._num_slots - half) // NUM_LOAD_THREADS
            self._load_parts = [slots[half + i * part : half + (i + 1) * part] for i in range(NUM_LOAD_THREADS)]
        return self._memory

    def save_pool(self) -> SlotPool:
        with self._lock:
            self._made()
            assert self._save_pool is not None
            return self._save_pool

    def load_slots(self) -> "_LoadSlots":
        return _LoadSlots(self)

    def take_part(self) -> list[int]:
        with self._part_free:
            self._made()
            self._part_free.wait_for(lambda: self._load_parts)
            return self._load_parts.pop()

    def give_part(self, part: list[int]) -> None:
        with self._part_free:
            self._load_parts.append(part)
            self._part_free.notify()


class _LoadSlots:
    """`with staging.load_slots() as slots`: one load thread's part of the staging."""

    def __init__(self, staging: _Staging) -> None:
        self._staging = staging

    def __enter__(self) -> list[int]:
        self._part = self._staging.take_part()
        return self._part

    def __exit__(self, *_: object) -> None:
        self._staging.give_part(self._part)
