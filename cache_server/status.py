"""A `StatsReply` as plain values, for people's tools: `--json` of the commands, `/status.json`, `prefixd top`.

One shape for all of them. Numbers are numbers (protobuf's own JSON writes 64-bit integers as strings), fingerprints are
hexadecimal, and ratios are computed here, once. Keys are documented by their use in `StatsReply`, `metrics.py` and
`operations.py`, whose names they keep.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cache_server.exposition import NAMESPACE_DIGITS
from protos import kv_cache_pb2 as pb

MAX_MODEL = 60  # characters

# What of the counters a rate over time is made of: kept in `history.py`, computed live by `prefixd top`.
RATES = (
    "lookup_asked_blocks",
    "lookup_hit_blocks",
    "promised_bytes",
    "commits_stored_bytes",
    "promoted_bytes",
    "redis_saved_bytes",
    "evicted_blocks",
)


def status_of(stats: pb.StatsReply) -> dict[str, Any]:
    """All figures of a server."""
    counters = dict(stats.counters)
    return {
        "version": stats.server_version,
        "epoch": f"{stats.server_epoch:016x}",
        "uptime_s": round(stats.uptime_s, 3),
        "draining": stats.draining,
        "memory": {
            "budget_bytes": stats.memory_bytes,
            "touched_bytes": stats.touched_bytes,
            "stored_bytes": stats.stored_bytes,
            "reserved_bytes": stats.reserved_bytes,
            "leased_bytes": stats.leased_bytes,
        },
        "hit_rate": hit_rate(counters),
        "counters": counters,
        "namespaces": [
            {
                "namespace": one.fingerprint.hex()[:NAMESPACE_DIGITS],
                "fingerprint": one.fingerprint.hex(),
                "tenant": one.tenant,
                "model": model_of(one.text),
                "text": one.text,
                "blocks": one.num_blocks,
                "complete_blocks": one.num_complete,
                "leased_blocks": one.num_leased,
                "stored_bytes": one.stored_bytes,
                "shards": one.num_shards,
                "age_s": round(one.age_s, 3),
                "idle_s": round(one.idle_s, 3),
            }
            for one in stats.namespaces
        ],
        "sessions": [
            {
                "session": f"{one.session_id:016x}",
                "client": one.client_name,
                "pid": one.pid,
                "engine": one.engine_id,
                "role": "worker" if one.role == pb.ROLE_WORKER else "scheduler",
                "shard": one.shard if one.role == pb.ROLE_WORKER else None,
                "mapped": one.mapped,
                "reserved_bytes": one.reserved_bytes,
            }
            for one in stats.sessions
        ],
        "operations": [
            {
                "name": one.name,
                "count": sum(one.counts),
                "mean_s": one.seconds / sum(one.counts) if sum(one.counts) else 0.0,
                "p99_s": quantile(stats.operation_bounds_s, one.counts, 0.99),
            }
            for one in stats.operations
        ],
        "slowest": [
            {"name": one.name, "seconds": one.seconds, "ended_s_ago": round(one.ended_s_ago, 3)}
            for one in stats.slowest
        ],
        "warnings": [
            {"s_ago": round(one.s_ago, 3), "level": one.level, "text": one.text} for one in stats.recent_warnings
        ],
    }


def model_of(text: str) -> str:
    """What its first client called the namespace: `label` in the JSON that it said of it. The server depends on nothing
    in that text; another client's may be no JSON at all."""
    try:
        name = json.loads(text)["label"]
    except (ValueError, TypeError, KeyError):
        name = text
    return " ".join(str(name).split())[:MAX_MODEL]


def rates_of(counters: Mapping[str, int]) -> dict[str, int]:
    """The totals whose growth makes rates."""
    evicted = sum(count for name, count in counters.items() if name.startswith("evicted_blocks_"))
    return {name: counters.get(name, 0) for name in RATES[:-1]} | {RATES[-1]: evicted}


def hit_rate(counters: Mapping[str, int]) -> float | None:
    """Blocks promised of blocks asked for; None: nothing was asked."""
    asked = counters.get("lookup_asked_blocks", 0)
    return counters.get("lookup_hit_blocks", 0) / asked if asked else None


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The upper bound of the bucket in which the quantile lies; None: nothing was counted, or it is beyond all."""
    left = share * sum(counts)
    if not left:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        left -= count
        if left <= 0:
            return bound
    return None
