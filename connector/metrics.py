"""The connector's figures, carried by vLLM: in its log line, in its `/metrics`, in `LLM.get_metrics()`.

Owns the names and meanings of the counters. Each worker counts what it did itself (`worker.py`), the scheduler side
what it asked and promised (`scheduler.py`); vLLM adds the reports of one step. Workers' counts are kept per shard and
never added over ranks: with tensor parallelism every rank loads its part of the same tokens.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

SHARD_COUNTERS = {
    "loaded_tokens": (
        "Tokens whose KV this shard copied into the engine's memory. Not counted: hits of the engine's own cache, "
        "loads that failed."
    ),
    "load_failed_tokens": "Tokens that were promised by a lookup and that this shard could not load.",
    "saved_blocks": (
        "Blocks of this shard that the server stored. Not counted: blocks that it had already, blocks dropped."
    ),
    "dropped_blocks": "Blocks of this shard that were to be saved and were not: no free slot, or no answer.",
}
SCHEDULER_COUNTERS = {
    "lookups": (
        "Questions to the server what it has of a request, to load it or to know what need not be saved. Not counted: "
        "questions that were not sent, for there was no session or its circuit was open."
    ),
    "unanswered_lookups": (
        "Lookups that ended without an answer: deadline, error. Not counted: answers that nobody waited for any more."
    ),
    "promised_tokens": (
        "Tokens that the workers were told to load. Each shard counts them again, as loaded or as failed."
    ),
    "failed_loads": "Loads of which a block failed, so that it was computed. Not counted: those of aborted requests.",
}
BYPASSED_REQUESTS = (
    "Requests that were not looked up, by reason; nothing of them was saved either, but for the reason "
    "skip_reading_prefix_cache."
)

# The kinds of reports in `PrefixCacheStats.data` beside the shards, whose names are numbers.
SCHEDULER = "scheduler"
BYPASSED = "bypassed"


class PrefixCacheStats(KVConnectorStats):
    """`data`: shard number as text, SCHEDULER or BYPASSED → counter, or reason → count since the last step."""

    @classmethod
    def of_shard(cls, shard: int, counts: dict[str, int]) -> "PrefixCacheStats":
        return cls(data={str(shard): counts} if counts else {})

    @classmethod
    def of_scheduler(cls, counts: dict[str, int], bypass_counts: dict[str, int]) -> "PrefixCacheStats":
        data = {SCHEDULER: counts, BYPASSED: bypass_counts}
        return cls(data={kind: of_kind for kind, of_kind in data.items() if of_kind})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: "KVConnectorStats") -> "PrefixCacheStats":
        for kind, counts in other.data.items():
            mine = self.data.setdefault(kind, {})
            for name, count in counts.items():
                mine[name] = mine.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: of all shards the one that did least, since a token needs every shard."""
        shards = [counts for kind, counts in self.data.items() if kind not in {SCHEDULER, BYPASSED}]
        scheduler = self.data.get(SCHEDULER, {})
        figures = {name: min((counts.get(name, 0) for counts in shards), default=0) for name in SHARD_COUNTERS}
        figures |= {name: scheduler.get(name, 0) for name in SCHEDULER_COUNTERS}
        figures["bypassed_requests"] = sum(self.data.get(BYPASSED, {}).values())
        return {f"prefixd_{name}": figure for name, figure in figures.items()}


class PrefixCachePromMetrics(KVConnectorPromMetrics):
    """Prometheus counters `vllm:prefixd_*` with vLLM's labels, and `shard` or `reason` where they apply."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def counter(name: str, text: str, *more_labels: str) -> Any:
            return self._counter_cls(
                name=f"vllm:prefixd_{name}", documentation=text, labelnames=[*labelnames, *more_labels]
            )

        self._of_shard = {name: counter(name, text, "shard") for name, text in SHARD_COUNTERS.items()}
        self._of_scheduler = {name: counter(name, text) for name, text in SCHEDULER_COUNTERS.items()}
        self._bypassed = counter("bypassed_requests", BYPASSED_REQUESTS, "reason")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for kind, counts in transfer_stats_data.items():
            for name, count in counts.items():
                if kind == SCHEDULER:
                    self._of_scheduler[name].labels(*labels).inc(count)
                elif kind == BYPASSED:
                    self._bypassed.labels(*labels, name).inc(count)
                else:
                    self._of_shard[name].labels(*labels, kind).inc(count)
