"""The connector's figures, carried by vLLM: in its log line, in its `/metrics`, in `LLM.get_metrics()`.

Owns the names and meanings of the counters. The scheduler side counts requests and tokens, each once per engine
(`scheduler.py`); each worker counts the blocks and bytes of its own shard (`worker.py`), which are never added over
ranks here: with tensor parallelism every rank moves its part of the same tokens. vLLM adds the reports of one step.

Equations, when no lookup and no load is under way:
    lookups = hit + miss + later + unanswered + dropped            (the outcomes are all there is)
    promised_tokens = loaded_tokens + load_failed_tokens + load_cancelled_tokens
    hit rate = loaded_tokens / wanted_tokens
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# A counter is named NAME, or NAME:VALUE where it has a label of its own; these are the labels.
LABELS = {
    "lookups": ("outcome", ("hit", "miss", "later", "unanswered", "dropped")),
    "presence_lookups": ("outcome", ("answered", "unanswered", "dropped")),
    "loads": ("outcome", ("done", "failed", "cancelled")),
    "loaded_bytes": ("path", ("mapped", "stream")),
    "saved_bytes": ("path", ("mapped", "stream")),
    "load_seconds": ("path", ("mapped", "stream")),
    "save_seconds": ("path", ("mapped", "stream")),
}
SCHEDULER_COUNTERS = {
    "lookups": (
        "Questions to the server what can be loaded for a request, counted when they ended. hit: something was "
        "promised; miss: nothing; later: nothing yet, it asked to be asked again, which counts again; unanswered: "
        "deadline or error; dropped: nobody waited for the answer any more. Not counted: questions that were not sent, "
        "for there was no session or its circuit was open; those in presence_lookups."
    ),
    "presence_lookups": (
        "Questions to the server which blocks it has, only to know what need not be saved. Nothing is promised or "
        "loaded, so they are neither hits nor misses."
    ),
    "wanted_tokens": (
        "Tokens of admitted requests that could have been loaded: those of full blocks which the engine's own cache "
        "did not have, whether or not a server was there to ask. Counted at each admission, so again after a "
        "preemption. Not counted: requests that were bypassed or may not load."
    ),
    "promised_tokens": "Tokens that the workers were told to load. Each is loaded, failed or cancelled in the end.",
    "loaded_tokens": (
        "Tokens whose KV came from the server into the engine's memory, on all ranks, and that the engine did not "
        "compute; counted once, whatever the number of ranks, when their load ended. Not counted: hits of the engine's "
        "own cache, promises, questions asked again, blocks that arrived behind one that failed."
    ),
    "load_failed_tokens": (
        "Tokens that were promised and had to be computed: from the first block that failed on any rank to the end of "
        "the load. Not counted: loads that were cancelled."
    ),
    "load_cancelled_tokens": "Tokens promised to requests that were aborted, or reset, before their load ended.",
    "loads": "Loads that ended. done: every block arrived; failed: not every block; cancelled: nobody wants it now.",
    "late_loads": "Loads that failed, in part or whole, at their deadline. After one no load is promised for a while.",
}
BYPASSED_REQUESTS = (
    "Requests that were not looked up, by reason; nothing of them was saved either, but for the reason "
    "skip_reading_prefix_cache."
)
SHARD_COUNTERS = {
    "loaded_blocks": (
        "Blocks of this shard that were copied into the engine's memory, those included that the engine had to compute "
        "because another block or another shard failed."
    ),
    "load_failed_blocks": "Blocks of this shard that were promised and could not be loaded, or not wanted by then.",
    "loaded_bytes": "Payload bytes of loaded_blocks. mapped: from the server's memory; stream: over gRPC.",
    "saved_blocks": "Blocks of this shard that the server stored. Not counted: those that it had already.",
    "already_saved_blocks": "Blocks of this shard that were copied for the server, which had them already.",
    "refused_blocks": "Blocks of this shard that the server refused: flushed meanwhile, or damaged on the way.",
    "dropped_blocks": (
        "Blocks of this shard that were to be saved and were not: no free slot, no room in the server, or no answer."
    ),
    "discarded_blocks": "Blocks of this shard that were copied before their last token was known, and got no name.",
    "corrupt_blocks": (
        "Blocks of this shard that came with another checksum than they were saved with; counted as failed too. Not "
        "counted: blocks in mapped slots without the setting verify_loads, for nobody looks at them."
    ),
    "saved_bytes": "Payload bytes of saved_blocks. mapped: into the server's memory; stream: over gRPC.",
}
# Histograms, in seconds.
SCHEDULER_SECONDS = {
    "lookup_seconds": (
        "From sending a lookup to the scheduler's taking its answer; the waiting is done by the request, not by the "
        "engine. Not counted: lookups without an answer, presence_lookups."
    ),
}
SHARD_SECONDS = {
    "load_seconds": "From the plan of a load to its last byte in the engine's memory. Not counted: loads of no block.",
    "save_seconds": "What the server took to answer a batch of saves, off the engine's path. Not counted: no answer.",
    "save_copy_seconds": "What a step of the engine took longer because its full blocks were copied.",
}
CONNECTED = "1: this process is attached to the server and uses it; 0: it runs uncached. As of its last step."
OUTAGES = "How often the server was lost or did not answer in time, after it had been there."
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# The kinds of reports in `PrefixCacheStats.data` beside the shards, whose names are numbers.
SCHEDULER = "scheduler"
BYPASSED = "bypassed"
LINE = "line"  # side → [connected, outages]: what was said last holds


class PrefixCacheStats(KVConnectorStats):
    """`data`: shard number as text, SCHEDULER or BYPASSED → counter, or reason → count since the last step; the names
    of SCHEDULER_SECONDS and SHARD_SECONDS → durations since the last step; LINE → side → state."""

    @classmethod
    def of_shard(
        cls, shard: int, counts: dict[str, int], seconds: dict[str, list[float]] | None = None
    ) -> "PrefixCacheStats":
        figures: dict[str, Any] = {**counts, **(seconds or {})}
        return cls(data={str(shard): figures} if figures else {})

    @classmethod
    def of_scheduler(
        cls, counts: dict[str, int], bypass_counts: dict[str, int], seconds: dict[str, list[float]] | None = None
    ) -> "PrefixCacheStats":
        data = {SCHEDULER: {**counts, **(seconds or {})}, BYPASSED: bypass_counts}
        return cls(data={kind: of_kind for kind, of_kind in data.items() if of_kind})

    def add_line(self, side: str, is_connected: bool, num_outages: int) -> None:
        """What the line to the server is like now."""
        self.data.setdefault(LINE, {})[side] = [int(is_connected), num_outages]

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: "KVConnectorStats") -> "PrefixCacheStats":
        for kind, figures in other.data.items():
            mine = self.data.setdefault(kind, {})
            for name, figure in figures.items():
                # Durations are appended, counts added.
                mine[name] = mine[name] + figure if name in mine and kind != LINE else figure
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: of all shards the one that did least, since a token needs every shard."""
        shards = [figures for kind, figures in self.data.items() if kind not in {SCHEDULER, BYPASSED, LINE}]
        scheduler = self.data.get(SCHEDULER, {})
        said: dict[str, int | float] = {
            name: min((_total(figures, name) for figures in shards), default=0) for name in SHARD_COUNTERS
        }
        for name in SCHEDULER_COUNTERS:
            said[name] = _total(scheduler, name)
        for outcome in ("hit", "unanswered"):
            said[f"lookups_{outcome}"] = scheduler.get(f"lookups:{outcome}", 0)
        said["bypassed_requests"] = sum(self.data.get(BYPASSED, {}).values())
        return {f"prefixd_{name}": figure for name, figure in said.items()}


def _total(figures: dict[str, Any], name: str) -> int:
    """Over the values of the counter's own label, if it has one."""
    _, values = LABELS.get(name, ("", ()))
    return sum(figures.get(one, 0) for one in (name, *(f"{name}:{value}" for value in values)))


class PrefixCachePromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics `vllm:prefixd_*` with vLLM's labels, `shard`, and those of LABELS where they apply.

    Every label value that is known beforehand is there from the start, with 0: a rate over a counter that appears with
    its first event misses that event.
    """

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def metric(cls: Any, name: str, text: str, *more_labels: str, **arguments: Any) -> Any:
            own_label = (LABELS[name][0],) if name in LABELS else ()
            return cls(
                name=f"vllm:prefixd_{name}",
                documentation=text,
                labelnames=[*labelnames, *more_labels, *own_label],
                **arguments,
            )

        self._of_shard = {name: metric(self._counter_cls, name, text, "shard") for name, text in SHARD_COUNTERS.items()}
        self._of_scheduler = {name: metric(self._counter_cls, name, text) for name, text in SCHEDULER_COUNTERS.items()}
        self._of_shard |= {
            name: metric(self._histogram_cls, name, text, "shard", buckets=BUCKETS)
            for name, text in SHARD_SECONDS.items()
        }
        self._of_scheduler |= {
            name: metric(self._histogram_cls, name, text, buckets=BUCKETS) for name, text in SCHEDULER_SECONDS.items()
        }
        self._bypassed = metric(self._counter_cls, "bypassed_requests", BYPASSED_REQUESTS, "reason")
        self._connected = metric(self._gauge_cls, "connected", CONNECTED, "side", multiprocess_mode="mostrecent")
        self._outages = metric(self._counter_cls, "outages", OUTAGES, "side")
        self._num_outages: dict[tuple[int, str], int] = {}
        num_shards = getattr(getattr(vllm_config, "parallel_config", None), "world_size", 1)
        for labels in per_engine_labelvalues.values():
            for name, one in self._of_scheduler.items():
                _at_zero(one, name, labels)
            for shard in range(num_shards):
                for name, one in self._of_shard.items():
                    _at_zero(one, name, [*labels, str(shard)])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for kind, figures in transfer_stats_data.items():
            for name, figure in figures.items():
                if kind == SCHEDULER:
                    _add(self._of_scheduler, name, figure, labels)
                elif kind == BYPASSED:
                    self._bypassed.labels(*labels, name).inc(figure)
                elif kind == LINE:
                    is_connected, num_outages = figure
                    before = self._num_outages.get((engine_idx, name), 0)
                    self._num_outages[engine_idx, name] = num_outages
                    self._connected.labels(*labels, name).set(is_connected)
                    self._outages.labels(*labels, name).inc(num_outages - before)
                else:
                    _add(self._of_shard, name, figure, [*labels, kind])


def _add(metrics: dict[str, Any], name: str, figure: Any, labels: list[object]) -> None:
    name, _, value = name.partition(":")
    metric = metrics[name].labels(*labels, *([value] if value else []))
    if isinstance(figure, list):
        for seconds in figure:
            metric.observe(seconds)
    else:
        metric.inc(figure)


def _at_zero(metric: Any, name: str, labels: list[object]) -> None:
    for value in LABELS[name][1] if name in LABELS else (None,):
        metric.labels(*labels, *([value] if value else []))
