"""The worker side of a model with several kinds of layers: one `WorkerSide` per store group, and what joins them.

Each group has its namespace, session, slots and payloads, and knows nothing of the others. A request's load is one
thing to the engine: it is reported, once, when every group's part of it has ended, and failed when one failed.

Which block failed is not said: block ids mean nothing without their group, and behind a window there is nothing to go
on from. So vLLM is told the request.

Invariant: `_loads` holds exactly the requests that were started and not taken as finished yet.

Not here: copies, slots, RPCs (`worker.py`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from connector.kv_layout import KVLayout
from connector.plan import LoadSpec, StepPlan
from connector.worker import WorkerSide


@dataclass(slots=True)
class _Load:
    """A request's load: how many groups have not reported their part yet."""

    num_parts: int
    has_failed: bool = False


class GroupWorkers:
    """All store groups of one rank; the interface of `WorkerSide`. Called by the engine's thread only."""

    def __init__(self, workers: Sequence[WorkerSide]) -> None:
        self._workers = workers
        self._loads: dict[str, _Load] = {}
        self._never_started: set[str] = set()
        self._failed: set[str] = set()

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    def begin_step(self, plan: StepPlan) -> None:
        for group, worker in enumerate(self._workers):
            saves = tuple(save for save in plan.saves if save.group == group)
            worker.begin_step(replace(plan, loads=(), saves=saves))

    def save_layer(self, layer_name: str) -> None:
        for worker in self._workers:
            worker.save_layer(layer_name)

    def finish_saves(self) -> None:
        for worker in self._workers:
            worker.finish_saves()

    def abandon_step(self) -> None:
        for worker in self._workers:
            worker.abandon_step()

    def start_loads(self, loads: Sequence[LoadSpec]) -> None:
        for load in loads:
            parts = (load, *(replace(other, keys=other.keys if load.keys else b"") for other in load.others))
            started = self._loads[load.request_id] = _Load(0)
            for part in parts:
                self._workers[part.group].start_loads([part])
                started.num_parts += 1

    def fail_loads(self, loads: Sequence[LoadSpec]) -> None:
        """Reports loads as failed; parts of them that were started nevertheless are waited for."""
        for load in loads:
            started = self._loads.get(load.request_id)
            if started is None or not started.num_parts:
                self._loads.pop(load.request_id, None)
                self._never_started.add(load.request_id)
                self._failed.add(load.request_id)
            else:
                started.has_failed = True

    def take_finished(self) -> set[str]:
        """Requests of which every group's part has ended since the last call."""
        finished, self._never_started = self._never_started, set()
        for worker in self._workers:
            ended = worker.take_finished()
            failed = worker.take_failed_requests()
            for request_id in ended:
                load = self._loads[request_id]
                load.num_parts -= 1
                load.has_failed |= request_id in failed
                if load.num_parts == 0:
                    finished.add(request_id)
                    del self._loads[request_id]
                    if load.has_failed:
                        self._failed.add(request_id)
        return finished

    def take_failed_requests(self) -> set[str]:
        """Those of them of which some part failed."""
        failed, self._failed = self._failed, set()
        return failed

    def take_failed_blocks(self) -> set[int]:
        return set()

    def take_counts(self) -> dict[str, int]:
        """As `WorkerSide.take_counts`, added over the groups: a block counts once for each that it has a part of."""
        counts: Counter[str] = Counter()
        for worker in self._workers:
            counts.update(worker.take_counts())
        return dict(counts)

    def take_seconds(self) -> dict[str, list[float]]:
        """How long loads and saves took, of every group by itself."""
        seconds: dict[str, list[float]] = {}
        for worker in self._workers:
            for name, durations in worker.take_seconds().items():
                seconds.setdefault(name, []).extend(durations)
        return seconds

    def suspend(self) -> None:
        for worker in self._workers:
            worker.suspend()

    def resume(self, layouts: Sequence[KVLayout] | None = None) -> bool:
        """As `WorkerSide.resume`, for the layout of each group."""
        for_each: Sequence[KVLayout | None] = layouts or [None] * len(self._workers)
        return all(worker.resume(layout) for worker, layout in zip(self._workers, for_each, strict=True))

    def shutdown(self) -> None:
        for worker in self._workers:
            worker.shutdown()
