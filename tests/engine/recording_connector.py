"""The connector with an eye on it: what the engine's own pages held, and exceptions where we want them.

vLLM loads `RecordingConnector` in place of `PrefixCacheConnector`, of which it is a subclass. Each of its processes
appends one JSON object per line to a file of its own in the folder `PREFIXD_TEST_FOLDER`:

    {"event": "attached", …}                 what the worker says of itself to the server (`client.Hello`)
    {"event": "layer", "layer": i, "in_slot": true}        when `save_kv_layer` of layer i has returned
    {"event": "saved", "key": hex, "sha256": hex}          the pages of a block at the end of the step that saved it
    {"event": "loaded", "key": hex, "sha256": hex}         the pages of a block when its load was reported as done

Its worker's file `worker.json` there holds how many requests the worker side knows of: loads that it has or has to
report, gathers without a name.

The digests are of the tensors that the engine registered, read here, by this file's own rule: a page is
`tensor[block_id]`, a payload all layers' pages one after the other.

The file `slow` in that folder holds the seconds by which every load into this engine's pages is late.

The file `fault` in that folder says what breaks: `METHOD COUNT NUMBER` makes the first COUNT calls of METHOD of the
scheduler side or the worker side raise; NUMBER tells two faults apart.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from connector.plugin import PrefixCacheConnector

FOLDER = "PREFIXD_TEST_FOLDER"
FAULT = "fault"
SLOW = "slow"
WORKER_STATE = "worker.json"


def write_state(path: Path, state: dict[str, Any]) -> None:
    """In one go: whoever reads the file finds a whole state."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(state))
    new.rename(path)


class InjectedFault(Exception):
    """Raised inside the connector on purpose."""


class Faulty:
    """`inner`, whose methods raise when the file says so."""

    def __init__(self, inner: Any, control: Path) -> None:
        self._inner = inner
        self._control = control
        self._raised = ("", 0)  # the fault, how often

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name.startswith("_") or not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            fault = self._control.read_text() if self._control.exists() else ""
            if fault:
                method, count, _ = fault.split()
                raised = self._raised[1] if self._raised[0] == fault else 0
                if method == name and raised < int(count):
                    self._raised = (fault, raised + 1)
                    raise InjectedFault(name)
            return attribute(*args, **kwargs)

        return call


class RecordingConnector(PrefixCacheConnector):
    """See above."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(os.environ[FOLDER])
        self._records = (self._folder / f"{role.name.lower()}-{os.getpid()}.jsonl").open("a", buffering=1)
        self._kv_caches: dict[str, Any] = {}
        self._unnamed: dict[int, str] = {}  # ticket → digest
        self._loads: dict[str, Any] = {}
        self._finished: set[str] = set()
        self._known_requests = -1
        if self._scheduler is not None:
            self._scheduler = Faulty(self._scheduler, self._folder / FAULT)

    def _record(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=self._records)

    def _digest(self, block_id: int) -> str:
        sha256 = hashlib.sha256()
        for tensor in self._kv_caches.values():
            page = tensor[block_id]
            sha256.update(page.contiguous().numpy().tobytes())
        return sha256.hexdigest()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._kv_caches = kv_caches
        if self._worker is None:
            return
        hello = self._clients[0].hello
        self._record(
            "attached",
            fingerprint=hello.fingerprint.hex(),
            key_bytes=hello.key_bytes,
            num_shards=hello.num_shards,
            shard=hello.shard,
            payload_bytes=hello.payload_bytes,
            descriptor=hello.descriptor.hex(),
        )
        load_part = self._worker._load_part

        def load_part_late(*arguments: Any) -> None:
            if (self._folder / SLOW).exists():
                time.sleep(float((self._folder / SLOW).read_text()))
            load_part(*arguments)

        self._worker._load_part = load_part_late
        self._worker = Faulty(self._worker, self._folder / FAULT)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        for ticket, name in connector_metadata.names.items():
            digest = self._unnamed.pop(ticket, None)
            if digest is not None and name is not None:
                self._record("saved", key=name.key.hex(), sha256=digest)
        for load in connector_metadata.loads:
            self._loads[load.request_id] = load

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        step = self._worker._step if self._worker is not None else None
        if step is None:
            return
        for index, layer in enumerate(self._worker._layout.layers):
            if layer.name == layer_name:
                in_slot = all(
                    bool((rows[:, layer.start : layer.stop] == layer.pages[tables[layer.table]]).all())
                    for tables, rows in step.gather._pieces
                )
                self._record("layer", layer=index, in_slot=in_slot)

    def wait_for_save(self) -> None:
        saves = self._plan.saves if self._worker is not None and self._worker._step is not None else ()
        super().wait_for_save()
        for save in saves:
            digest = self._digest(save.block_id)
            if save.name is None:
                self._unnamed[save.ticket] = digest
            else:
                self._record("saved", key=save.name.key.hex(), sha256=digest)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        self._finished |= received or set()
        if self._worker is not None:
            worker = self._worker
            known = len(worker._jobs) + len(worker._nameless) + len(worker._finished)
            if known != self._known_requests:
                self._known_requests = known
                write_state(self._folder / WORKER_STATE, {"known": known})
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = super().get_block_ids_with_load_errors()
        for request_id in self._finished:
            load = self._loads.pop(request_id)
            key_bytes = len(load.keys) // max(1, len(load.block_ids))
            for i, block_id in enumerate(load.block_ids):
                if block_id not in failed:
                    key = load.keys[i * key_bytes : (i + 1) * key_bytes]
                    self._record("loaded", key=key.hex(), sha256=self._digest(block_id))
        self._finished = set()
        return failed
