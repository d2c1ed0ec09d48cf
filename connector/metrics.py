"""The connector's figures, carried by vLLM: in its log line, in its `/metrics`, in `LLM.get_metrics()`.

Owns the names and meanings of the counters. Each worker counts what it did itself (`worker.py`); nothing here is a
promise of the scheduler side. Counts are kept per shard and never added over ranks: with tensor parallelism every
rank loads its part of the same tokens.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
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


class PrefixCacheStats(KVConnectorStats):
    """`data`: shard number, as text, → counter → count since the last step."""

    @classmethod
    def of(cls, shard: int, counts: dict[str, int]) -> "PrefixCacheStats":
        return cls(data={str(shard): counts} if counts else {})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: "KVConnectorStats") -> "PrefixCacheStats":
        for shard, counts in other.data.items():
            mine = self.data.setdefault(shard, {})
            for name, count in counts.items():
                mine[name] = mine.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: of all shards the one that did least, since a token needs every shard."""
        return {
            f"prefixd_{name}": min((counts.get(name, 0) for counts in self.data.values()), default=0)
            for name in COUNTERS
        }


class PrefixCachePromMetrics(KVConnectorPromMetrics):
    """Prometheus counters `vllm:prefixd_*` with the labels that vLLM gives, and `shard`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:prefixd_{name}", documentation=text, labelnames=[*labelnames, "shard"])
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for shard, counts in transfer_stats_data.items():
            for name, count in counts.items():
                self._counters[name].labels(*self.per_engine_labelvalues[engine_idx], shard).inc(count)
