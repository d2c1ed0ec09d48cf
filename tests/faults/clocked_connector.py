"""The connector with its own clock read out: what a request is kept waiting for our sake.

vLLM loads `ClockedConnector` in place of `PrefixCacheConnector`, of which it is a subclass. Each of its processes
appends one JSON object per line to a file of its own in the folder `PREFIXD_TEST_FOLDER`; times are monotonic seconds,
which all processes of a machine share:

    {"event": "asked", "request": id, "at": t, "took": s, "answer": n or null}      get_num_new_matched_tokens
    {"event": "load", "request": id, "at": t, "tokens": n, "timeout": s}             vLLM begins to wait for a load
    {"event": "loaded", "request": id, "at": t, "failed": n}                         and has waited
    {"event": "hook", "name": name, "at": t, "took": s}                              any other hook that took 0.1 ms
    {"event": "step", "at": t, "tokens": n}                                          a step was planned
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from connector.plugin import PrefixCacheConnector

FOLDER = "PREFIXD_TEST_FOLDER"
WORTH_A_LINE_S = 1e-4


def clocked(name: str) -> Callable[..., Any]:
    """The hook `name`, measured."""

    def call(self: "ClockedConnector", *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        answer = getattr(super(ClockedConnector, self), name)(*args, **kwargs)
        took = time.monotonic() - began
        if took >= WORTH_A_LINE_S:
            self._record("hook", name=name, at=began, took=took)
        return answer

    return call


class ClockedConnector(PrefixCacheConnector):
    """See above."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        folder = Path(os.environ[FOLDER])
        self._records = (folder / f"{role.name.lower()}-{os.getpid()}.jsonl").open("a", buffering=1)
        super().__init__(vllm_config, role, kv_cache_config)

    def _record(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=self._records)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        began = time.monotonic()
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        took = time.monotonic() - began
        self._record("asked", request=request.request_id, at=began, took=took, answer=answer[0])
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        began = time.monotonic()
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens and self._scheduler is not None:
            load = self._scheduler._in_flight[request.request_id]
            self._record(
                "load", request=request.request_id, at=began, tokens=num_external_tokens, timeout=load.timeout_s
            )

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        failed = len(connector_output.invalid_block_ids or ())
        for request_id in connector_output.finished_recving or ():
            self._record("loaded", request=request_id, at=time.monotonic(), failed=failed)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._record("step", at=time.monotonic(), tokens=scheduler_output.total_num_scheduled_tokens)
        return self._build_connector_meta(scheduler_output)

    _build_connector_meta = clocked("build_connector_meta")
    request_finished_all_groups = clocked("request_finished_all_groups")
    bind_connector_metadata = clocked("bind_connector_metadata")
    start_load_kv = clocked("start_load_kv")
    save_kv_layer = clocked("save_kv_layer")
    wait_for_save = clocked("wait_for_save")
    get_finished = clocked("get_finished")
    get_block_ids_with_load_errors = clocked("get_block_ids_with_load_errors")
