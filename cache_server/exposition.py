"""The server's figures for Prometheus: names, labels and help texts, and nothing that counts.

Everything is read from one `StatsReply` per scrape, so that `/metrics`, the status page and `prefixd stats` cannot
differ. `FAMILIES` covers every counter of `metrics.py` and every figure of `lower_tier.py` exactly once; a test holds
it to that. Names end as Prometheus wishes: `_total` for counters, a unit for the others.

A label `namespace` is the first 12 digits of the fingerprint, as `prefixd ls` shows it. Tenants may have the same one,
hence `tenant` beside it: empty where the server has none.

Equations: the outcomes of a family are all there is, so hits and misses are the lookups.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from cache_server.operations import OPERATIONS
from protos import kv_cache_pb2 as pb

NAMESPACE_DIGITS: Final = 12


@dataclass(frozen=True, slots=True)
class Family:
    """One metric over figures of `StatsReply.counters`. `fields`: label value → figure; "" where there is no label.
    A figure is multiplied by `scale` to be in the unit that the name ends with."""

    name: str
    help: str
    fields: dict[str, str]
    label: str = ""
    kind: Literal["counter", "gauge"] = "counter"
    scale: float = 1.0


def _one(name: str, figure: str, text: str, kind: Literal["counter", "gauge"] = "counter", scale: float = 1) -> Family:
    return Family(name, text, {"": figure}, "", kind, scale)


FAMILIES: Final = (
    Family(
        "lookups",
        "Lookups answered that asked for a promise. hit: the first block that the engine lacked was promised; miss: it "
        "was not. A request that asks again counts again. Not counted: refused calls, prefixd_presence_lookups.",
        {"hit": "lookups_hit", "miss": "lookups_missed"},
        "outcome",
    ),
    Family(
        "lookup_blocks",
        "Blocks that those lookups asked for beyond what the engine had itself. hit: promised; miss: all others, "
        "also blocks behind a hole, beyond the leasable share, or that the gate held back.",
        {"hit": "lookup_hit_blocks", "miss": "lookup_missed_blocks"},
        "outcome",
    ),
    _one(
        "promised_bytes",
        "promised_bytes",
        "Payload bytes of the promised blocks, all shards. Whether engines loaded them is counted by the engines "
        "(vllm:prefixd_loaded_tokens_total): on the node they copy without asking.",
    ),
    _one(
        "lookups_without_workers",
        "lookups_without_workers",
        "Lookups that promised nothing because workers of the engine were not attached. Counted as misses too.",
    ),
    _one(
        "presence_lookups",
        "presence_lookups",
        "Lookups that asked for no promise, only to know what need not be saved. Not in prefixd_lookups_total.",
    ),
    Family(
        "presence_blocks",
        "Blocks that those lookups asked for, by whether they are here with all their shards.",
        {"asked": "presence_asked_blocks", "present": "presence_present_blocks"},
        "what",
    ),
    _one("leases_granted", "leases_granted", "Leases granted by lookups. Not counted: the short holds of Get."),
    Family(
        "leases_ended",
        "Leases that ended, by cause: released by the engine, expired, or their namespace was flushed.",
        {"released": "leases_released", "expired": "leases_expired", "flushed": "leases_flushed"},
        "cause",
    ),
    _one("leases_renewed", "leases_renewed", "Leases prolonged by Renew, counted each time."),
    _one("leases_capped", "leases_capped", "Lookups that promised less because too much memory is leased already."),
    _one("reserved_slots", "reserved_slots", "Slots handed out to be written into. Not counted: those that Put takes."),
    _one("reserve_short", "reserve_short", "Reserve calls that got fewer slots than they asked for: memory is tight."),
    Family(
        "commits",
        "Payloads that arrived to get a name, by Commit or Put. stored; already_present: the earlier one stays; "
        "refused: written before a flush, or damaged on the way.",
        {
            "stored": "commits_stored",
            "already_present": "commits_already_present",
            "refused": "commits_refused",
        },
        "outcome",
    ),
    _one(
        "stored_bytes",
        "commits_stored_bytes",
        "Payload bytes of the stored commits. Not counted: what came up from Redis (prefixd_promoted_bytes_total).",
    ),
    _one(
        "get_payloads", "get_payloads", "Payloads sent in full to engines elsewhere; engines here copy by themselves."
    ),
    _one("get_missing", "get_missing", "Payloads asked for by Get that were not here any more."),
    _one("get_bytes", "get_bytes", "Payload bytes sent by Get, those of streams that broke included."),
    _one("put_payloads", "put_payloads", "Payloads received in full by Put, stored or not."),
    _one("put_bytes", "put_bytes", "Payload bytes received by Put and written into memory."),
    _one("put_dropped", "put_dropped", "Payloads received by Put for which there was no room."),
    _one(
        "put_checksum_mismatches",
        "put_checksum_mismatches",
        "Payloads that arrived by Put other than they were sent. In prefixd_commits_total as refused, too.",
    ),
    Family(
        "evicted_blocks",
        "Blocks that had to go. capacity: their own class needed room; unsettled: unreachable, or short of a shard for "
        "too long; recut: another class took their memory. Not counted: flushed blocks.",
        {
            "capacity": "evicted_blocks_capacity",
            "unsettled": "evicted_blocks_unsettled",
            "recut": "evicted_blocks_recut",
        },
        "cause",
    ),
    _one("flushed_blocks", "flushed_blocks", "Blocks dropped by Flush. Not counted as evicted."),
    _one(
        "flushes_followed",
        "flushes_followed",
        "Flushes of other servers on the same Redis that this one followed. Blocks: prefixd_flushed_blocks_total.",
    ),
    _one("recut_segments", "recut_segments", "Segments that changed hands between classes. Not the first assignment."),
    _one("sessions_attached", "sessions_attached", "Attach calls that opened a session."),
    _one("sessions_refused", "sessions_refused", "Attach calls that were refused: another layout, too many sessions."),
    _one("sessions_ended", "sessions_ended", "Sessions that are over, their slots given back."),
    _one("returned_slots", "reserved_slots_returned", "Slots without a name that came back when their session ended."),
    Family(
        "gate_decisions",
        "Whether a hit in a slower tier was worth loading. open: promised; shut: computing is expected to be faster; "
        "cut: loading was stopped on the way; stream_shut: a hit in memory, but the engine's stream is too slow.",
        {"open": "gate_open", "shut": "gate_shut", "cut": "gate_cut", "stream_shut": "gate_stream_shut"},
        "decision",
    ),
    Family(
        "promotions",
        "Payloads that were to come up from Redis. stored; missed: gone since it was asked; dropped: no room, or "
        "flushed; failed: Redis or the line to it failed. Those that did not verify: prefixd_integrity_failures_total.",
        {
            "stored": "promoted_payloads",
            "missed": "promotions_missed",
            "dropped": "promotions_dropped",
            "failed": "promotions_failed",
        },
        "outcome",
    ),
    _one("promoted_bytes", "promoted_bytes", "Payload bytes that came up from Redis and got their name."),
    Family(
        "refused_too_many",
        "What was refused because too much of it was under way, with a hint when to come again. calls: of any kind; "
        "streams: Gets and Puts. Not counted: sessions (prefixd_sessions_refused_total).",
        {"calls": "calls_refused", "streams": "streams_refused"},
        "what",
    ),
    _one(
        "integrity_failures",
        "integrity_failures",
        "Values in Redis that did not verify, and payloads in memory that did not when an engine complained of them: "
        "they were misses, and were dropped. Should stay 0.",
    ),
    _one("redis_asked_blocks", "redis_asked_blocks", "Blocks whose presence in Redis lookups asked for."),
    _one("redis_present_blocks", "redis_present_blocks", "Of those: the leading ones that are there, all shards."),
    Family(
        "redis_saves",
        "Payloads that were queued for Redis. stored; already_present: only their TTL was refreshed; queue_dropped: "
        "pushed out by younger ones, or left behind at the end; evicted: memory lost them before their turn; refused: "
        "by Redis, full or otherwise.",
        {
            "stored": "redis_saved_payloads",
            "already_present": "redis_already_present",
            "queue_dropped": "redis_queue_dropped",
            "evicted": "redis_saves_evicted",
            "refused": "redis_saves_refused",
        },
        "outcome",
    ),
    _one("redis_saved_bytes", "redis_saved_bytes", "Payload bytes written to Redis, without headers."),
    _one(
        "redis_deleted_values",
        "redis_deleted_values",
        "Values of flushed namespaces that this server deleted in Redis. Not counted: what goes with its TTL.",
    ),
    _one("redis_up", "redis_up", "1: Redis answers; 0: the breaker is open, memory serves alone.", "gauge"),
    _one("redis_downs", "redis_downs", "How often Redis was lost since the start."),
    _one(
        "redis_bytes_per_second",
        "redis_bytes_per_s",
        "What loading from Redis was measured at, for the gate. 0: not measured yet.",
        "gauge",
    ),
    _one("redis_latency_seconds", "redis_latency_us", "What a question to Redis was measured at.", "gauge", 1e-6),
    _one("redis_queue_payloads", "redis_queue_payloads", "Payloads waiting to be written to Redis.", "gauge"),
    _one("redis_queue_bytes", "redis_queue_bytes", "Bytes of the payloads waiting to be written to Redis.", "gauge"),
    _one("redis_loading_bytes", "redis_loading_bytes", "Bytes promised and on their way up from Redis.", "gauge"),
    _one("gate_load_seconds", "gate_load_us", "The gate's last decision: how long loading would take.", "gauge", 1e-6),
    _one(
        "gate_recompute_seconds",
        "gate_recompute_us",
        "The gate's last decision: how long computing would take.",
        "gauge",
        1e-6,
    ),
)
# Gauges over the reply itself.
GAUGES: Final[dict[str, tuple[str, Callable[[pb.StatsReply], float]]]] = {
    "memory_budget_bytes": ("What --memory allows.", lambda stats: stats.memory_bytes),
    "memory_touched_bytes": ("Memory of the segments that exist; it grows to the budget.", lambda s: s.touched_bytes),
    "memory_stored_bytes": ("Memory of slots with a name, rounded up to slots.", lambda stats: stats.stored_bytes),
    "memory_reserved_bytes": ("Memory of slots that sessions hold and have not named.", lambda s: s.reserved_bytes),
    "memory_leased_bytes": (
        "Memory of promised blocks, which cannot be evicted; part of stored.",
        lambda s: s.leased_bytes,
    ),
    "uptime_seconds": ("Since the server started.", lambda stats: stats.uptime_s),
    "draining": ("1: the server was told to stop and lets calls in flight end.", lambda stats: int(stats.draining)),
}
NAMESPACE_GAUGES: Final[dict[str, tuple[str, Callable[[pb.NamespaceStats], float]]]] = {
    "namespace_blocks": ("Blocks of this namespace, with at least one shard.", lambda one: one.num_blocks),
    "namespace_complete_blocks": (
        "Of those: with all their shards, so that they can be hits.",
        lambda o: o.num_complete,
    ),
    "namespace_stored_bytes": ("Memory of its slots with a name.", lambda one: one.stored_bytes),
    "namespace_leased_blocks": ("Of its blocks: promised to somebody.", lambda one: one.num_leased),
    "namespace_idle_seconds": ("Since somebody attached, looked up or stored last.", lambda one: one.idle_s),
}


class StatsCollector(Collector):
    """Makes metrics of a `StatsReply` when Prometheus asks."""

    def __init__(self, stats: Callable[[], pb.StatsReply]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering asks for no figures."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All families. A server without Redis has no `prefixd_redis_*` gauges."""
        stats = self._stats()
        build = GaugeMetricFamily(
            "prefixd_build_info", "1; which version runs, and its epoch.", labels=["version", "epoch"]
        )
        build.add_metric([stats.server_version, f"{stats.server_epoch:016x}"], 1)
        yield build
        for name, (text, value_of) in GAUGES.items():
            yield GaugeMetricFamily(f"prefixd_{name}", text, value_of(stats))
        for name, (text, value_of) in NAMESPACE_GAUGES.items():
            family = GaugeMetricFamily(f"prefixd_{name}", text, labels=["namespace", "tenant"])
            for one in stats.namespaces:
                family.add_metric([one.fingerprint.hex()[:NAMESPACE_DIGITS], one.tenant], value_of(one))
            yield family
        yield _sessions(stats)
        for described in FAMILIES:
            yield from _family(described, stats)
        yield _operations(stats)


def _family(described: Family, stats: pb.StatsReply) -> Iterator[Metric]:
    labels = [described.label] if described.label else []
    family: CounterMetricFamily | GaugeMetricFamily
    if described.kind == "counter":
        family = CounterMetricFamily(f"prefixd_{described.name}", described.help, labels=labels)
    else:
        family = GaugeMetricFamily(f"prefixd_{described.name}", described.help, labels=labels)
    for value, figure in described.fields.items():
        if figure in stats.counters:
            family.add_metric([value] if value else [], stats.counters[figure] * described.scale)
    if family.samples:
        yield family


def _sessions(stats: pb.StatsReply) -> Metric:
    family = GaugeMetricFamily("prefixd_sessions", "Sessions that are not over.", labels=["role", "path"])
    kinds = {("worker", "mapped"): 0, ("worker", "stream"): 0, ("scheduler", "none"): 0}
    for session in stats.sessions:
        if session.role == pb.ROLE_WORKER:
            kinds["worker", "mapped" if session.mapped else "stream"] += 1
        else:
            kinds["scheduler", "none"] += 1
    for kind, count in kinds.items():
        family.add_metric(list(kind), count)
    return family


def _operations(stats: pb.StatsReply) -> Metric:
    text = "; ".join(f"{name}: {meaning}" for name, meaning in OPERATIONS.items())
    family = HistogramMetricFamily(
        "prefixd_operation_seconds", f"How long operations took. {text}.", labels=["operation"]
    )
    for one in stats.operations:
        count, buckets = 0, []
        bounds = [*map(str, stats.operation_bounds_s), "+Inf"]
        for bound, number in zip(bounds, one.counts, strict=True):
            count += number
            buckets.append((bound, count))
        family.add_metric([one.name], buckets, one.seconds)
    return family


class Exposition:
    """`/metrics`: the figures of one server and of its process."""

    def __init__(self, stats: Callable[[], pb.StatsReply]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(stats))
        ProcessCollector(registry=self._registry)

    def text(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) in the format that an Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
