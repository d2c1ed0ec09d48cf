"""The server's figures: exact after a known sequence, in `Stats`, in `/metrics` and in `/status.json` alike."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cache_server.admission import Turns
from cache_server.exposition import FAMILIES, GAUGES, NAMESPACE_GAUGES
from cache_server.lower_tier import LowerTier
from cache_server.metrics import Counters
from cache_server.operations import OPERATIONS
from cache_server.service import Service
from tests.cache_server.harness import NAMESPACE, ServerProcess
from tests.operator.conftest import Watched, http_url
from tests.operator.traffic import NUM_SLOTS, PAYLOAD, Traffic, counters_of


def samples_of(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def sample(text: str, name: str, **labels: str) -> float:
    return samples_of(text)[name, frozenset(labels.items())]


def test_every_counter_is_exact_after_a_known_sequence(watched: Watched) -> None:
    """Those that nothing was done for included."""
    assert counters_of(watched.server) == watched.traffic.expected
    assert watched.traffic.expected["evicted_blocks_capacity"] == 4 + 2 + 2, "positive control: it evicted"


def test_hits_and_misses_are_the_lookups(watched: Watched) -> None:
    """As calls and as blocks."""
    counters = counters_of(watched.server)

    assert counters["lookups_hit"] + counters["lookups_missed"] == counters["lookups"] == 3
    assert counters["lookup_hit_blocks"] + counters["lookup_missed_blocks"] == counters["lookup_asked_blocks"] == 14


def test_metrics_say_what_the_counters_say(watched: Watched) -> None:
    """Each under its name and label."""
    text = watched.get("/metrics")
    found = {}
    for family in FAMILIES:
        for value, figure in family.fields.items():
            suffix = "_total" if family.kind == "counter" else ""
            labels = {family.label: value} if family.label else {}
            key = (f"prefixd_{family.name}{suffix}", frozenset(labels.items()))
            if figure in watched.traffic.expected:
                found[figure] = samples_of(text)[key]

    sums = {"lookups", "lookup_asked_blocks"}  # of their outcomes
    assert found == {name: count for name, count in watched.traffic.expected.items() if name not in sums}


def test_gauges_say_what_there_is(watched: Watched) -> None:
    """64 slots of 4 MiB: 62 named, two reserved."""
    text = watched.get("/metrics")
    namespace = NAMESPACE.hex()[:12]

    assert sample(text, "prefixd_memory_budget_bytes") == NUM_SLOTS * PAYLOAD
    assert sample(text, "prefixd_memory_stored_bytes") == (NUM_SLOTS - 2) * PAYLOAD
    assert sample(text, "prefixd_memory_reserved_bytes") == 2 * PAYLOAD
    assert sample(text, "prefixd_namespace_blocks", namespace=namespace, tenant="") == NUM_SLOTS - 2
    assert sample(text, "prefixd_namespace_complete_blocks", namespace=namespace, tenant="") == NUM_SLOTS - 2
    assert sample(text, "prefixd_namespace_stored_bytes", namespace=namespace, tenant="") == (NUM_SLOTS - 2) * PAYLOAD
    assert sample(text, "prefixd_sessions", role="worker", path="mapped") == 1
    assert sample(text, "prefixd_sessions", role="worker", path="stream") == 1
    assert sample(text, "prefixd_sessions", role="scheduler", path="none") == 1
    assert sample(text, "prefixd_draining") == 0


def test_every_call_is_timed_once(watched: Watched) -> None:
    """As often as it was called; the histogram's sum is time, its last bucket the count."""
    text = watched.get("/metrics")
    counts = {"attach": 4, "lookup": 4, "renew": 1, "release": 2, "get": 1, "put": 3, "flush": 0, "promote": 0}
    counts["commit"] = 2 + NUM_SLOTS // 8

    for name, count in counts.items():
        assert sample(text, "prefixd_operation_seconds_count", operation=name) == count, name
        assert sample(text, "prefixd_operation_seconds_bucket", operation=name, le="+Inf") == count, name
    assert 0 < sample(text, "prefixd_operation_seconds_sum", operation="put") < 60


def test_a_flush_is_counted_apart_from_evictions(tmp_path: Path) -> None:
    """Of a server of its own; the lease that was out ends with it."""
    with ServerProcess(tmp_path, "256MiB", "--http", "127.0.0.1:0") as server:
        traffic = Traffic(server)
        traffic.run()
        num_flushed = traffic.flush()
        counters = counters_of(server)
        text = Watched(server, traffic, http_url(server)).get("/metrics")
        traffic.close()

    assert num_flushed == NUM_SLOTS - 2
    assert counters == traffic.expected
    assert sample(text, "prefixd_flushed_blocks_total") == num_flushed
    assert sample(text, "prefixd_memory_stored_bytes") == 0


def test_status_json_has_the_same_figures(watched: Watched) -> None:
    """As numbers, with the ratio computed."""
    status = json.loads(watched.get("/status.json"))

    assert status["counters"] == watched.traffic.expected
    assert status["hit_rate"] == pytest.approx(6 / 14)
    assert status["memory"]["stored_bytes"] == (NUM_SLOTS - 2) * PAYLOAD
    assert status["ready"] is True
    (namespace,) = status["namespaces"]
    assert (namespace["blocks"], namespace["model"]) == (NUM_SLOTS - 2, "a namespace")
    assert namespace["age_s"] >= namespace["idle_s"] >= 0
    assert len(status["slowest"]) == 10
    assert [one["seconds"] for one in status["slowest"]] == sorted(
        (o["seconds"] for o in status["slowest"]), reverse=True
    )


def test_prometheus_gets_openmetrics_if_it_asks_for_it(watched: Watched) -> None:
    """And the plain format else."""
    assert watched.get("/metrics", "application/openmetrics-text; version=1.0.0").endswith("# EOF\n")
    assert "# EOF" not in watched.get("/metrics")


def test_probes(watched: Watched) -> None:
    """Alive and ready; what is not there is not found."""
    assert watched.get("/healthz") == "ok\n"
    assert watched.get("/readyz") == "ready\n"
    with pytest.raises(OSError, match="404"):
        watched.get("/flush")


# --- the table


def figures_of_the_lower_tier() -> set[str]:
    """Names only: what a real one would say."""
    zero: Any = SimpleNamespace(
        tier=SimpleNamespace(
            estimate=SimpleNamespace(bytes_per_s=0, latency_s=0), is_up=True, num_downs=0, num_deleted=0
        ),
        _write_behind=_Sized(),
        _promotion=SimpleNamespace(bytes_ahead=0, load_us=0, recompute_us=0),
    )
    return set(LowerTier.figures(zero))


class _Sized:
    num_bytes = 0

    def __len__(self) -> int:
        return 0


def test_every_figure_is_in_exactly_one_family() -> None:
    """A counter that somebody adds has a name, a help text and a place, or fails here."""
    exposed = [figure for family in FAMILIES for figure in family.fields.values()]

    # `lookups` and `lookup_asked_blocks` are sums of their families.
    sums = {"lookups", "lookup_asked_blocks"}
    refusals = set(Service._refusals(SimpleNamespace(_admission=None, _gets=Turns("Get"), _puts=Turns("Put"))))  # type: ignore[arg-type]
    assert sorted(exposed) == sorted({*Counters().as_dict(), *figures_of_the_lower_tier(), *refusals} - sums)


def test_every_help_text_says_what_is_counted() -> None:
    """Sentences; those with outcomes name each."""
    for family in FAMILIES:
        assert family.help.endswith("."), family.name
        assert len(family.help.split()) >= 6, family.name
        if family.label == "outcome":
            assert all(value in family.help for value in family.fields), family.name
    assert all(text.endswith(".") for text, _ in (*GAUGES.values(), *NAMESPACE_GAUGES.values()))
    assert all(OPERATIONS.values())


def test_counters_are_written_down_with_what_they_count() -> None:
    """In the source: each line of `Counters` has its comment."""
    source = Path(Counters.__module__.replace(".", "/") + ".py").read_text().splitlines()
    lines = [line for line in source if ": int = 0" in line]

    assert len(lines) == len(dataclasses.fields(Counters))
    assert [line for line in lines if "  # " not in line] == []
