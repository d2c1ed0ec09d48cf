"""vLLM's scheduler with an eye on it: what of a request is left in it, and what its connector was told.

vLLM loads `RecordingScheduler` where an engine has the argument `scheduler_cls` (its own option). The file
`scheduler.json` in the folder `PREFIXD_TEST_FOLDER` holds the present state, written anew with every change:

    requests      requests that vLLM knows, finished ones included whose blocks are still held
    free_blocks   of the engine's memory
    at_start      of these, right after the start
    known         requests, leases, loads and gathers without a name that the connector's scheduler side knows
    longest_idle  most steps in a row in which there were requests and nothing was computed, since the file `watch` last
                  changed
    twice         requests that were reported as loaded more than once for one load, or reported as sent
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.recording_connector import FOLDER, WORKER_STATE, write_state

SCHEDULER_STATE = "scheduler.json"
WATCH = "watch"


class RecordingScheduler(Scheduler):
    """See above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder = Path(os.environ[FOLDER])
        self._written: dict[str, Any] = {}
        self._num_idle = self._longest_idle = 0
        self._at_start = self.kv_cache_manager.block_pool.get_num_free_blocks()
        self._waiting_for: Counter[str] = Counter()  # loads that are to be reported
        self._twice: list[str] = []
        self._watch = ""
        self._write()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        watch = self._folder / WATCH
        text = watch.read_text() if watch.exists() else ""
        if text != self._watch:
            self._watch, self._longest_idle, self._num_idle = text, 0, 0
        self._num_idle = self._num_idle + 1 if self.requests and not output.total_num_scheduled_tokens else 0
        self._longest_idle = max(self._longest_idle, self._num_idle)
        self._waiting_for.update(load.request_id for load in output.kv_connector_metadata.loads)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        said = model_runner_output.kv_connector_output
        for request_id in (said and said.finished_recving) or ():
            if not self._waiting_for[request_id]:
                self._twice.append(request_id)
            self._waiting_for[request_id] -= 1
        self._twice += (said and said.finished_sending) or ()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._write()
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        self._write()
        return finished

    def _write(self) -> None:
        side: Any = self.connector._scheduler
        state = {
            "requests": len(self.requests),
            "free_blocks": self.kv_cache_manager.block_pool.get_num_free_blocks(),
            "at_start": self._at_start,
            "known": side.num_requests() + side.num_leases() + len(side._in_flight) + len(side._nameless),
            "longest_idle": self._longest_idle,
            "twice": self._twice,
        }
        if state != self._written:
            self._written = state
            write_state(self._folder / SCHEDULER_STATE, state)


class States:
    """What the processes of one engine last wrote of themselves into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of_scheduler(self) -> dict[str, Any]:
        return dict(json.loads((self._folder / SCHEDULER_STATE).read_text()))

    def of_worker(self) -> dict[str, Any]:
        """known: loads that the worker side carries out or is to report, gathers without a name."""
        path = self._folder / WORKER_STATE
        return dict(json.loads(path.read_text())) if path.exists() else {"known": 0}

    def is_idle(self) -> bool:
        """Nothing is left of any request."""
        state = self.of_scheduler()
        is_empty = (state["requests"], state["known"], self.of_worker()["known"]) == (0, 0, 0)
        return is_empty and state["free_blocks"] == state["at_start"]
