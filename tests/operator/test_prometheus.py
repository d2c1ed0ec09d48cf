"""The dashboard and the alert rules on a real Prometheus, over figures of a real server and of the connector."""

import contextlib
import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from connector.plugin import PrefixCacheConnector
from tests.cache_server.harness import MIB, Client, ServerProcess, chain, wait_until
from tests.engine.prefixd import free_port
from tests.operator.conftest import http_url
from tests.redis.servers import RedisServer

GRAFANA = Path("deploy/grafana")
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="no prometheus and promtool on the PATH (Debian: apt-get install prometheus)",
)
# What the variables of the dashboard stand for.
VARIABLES = {"$__rate_interval": "1m", "$engine": ".*", "$model": ".*", "$server": ".*", "$job": "prefixd"}


def expressions() -> list[str]:
    """Every PromQL expression of the dashboard, variables filled in."""
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    for name, value in VARIABLES.items():
        found = [expression.replace(name, value) for expression in found]
    assert not [expression for expression in found if "$" in expression]
    return found


class Prometheus:
    """A server of its own, that scrapes every quarter of a second."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        self.port = free_port()
        configuration = {
            "global": {"scrape_interval": "250ms", "evaluation_interval": "1s"},
            "rule_files": [str((GRAFANA / "alerts.yaml").resolve())],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
            ],
        }
        (folder / "prometheus.json").write_text(json.dumps(configuration))  # JSON is YAML
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(str(PROMETHEUS), f"--config.file={folder / 'prometheus.json'}"),
                    *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{self.port}"),
                ],
                stdout=log,
                stderr=log,
            )

    def ask(self, path: str, **arguments: str) -> Any:
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}", timeout=20) as reply:
            return json.loads(reply.read())["data"]

    def query(self, expression: str) -> list[Any]:
        return list(self.ask("query", query=expression)["result"])

    def has(self, expression: str) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.query(expression))
        return False


def engine_metrics(port: int) -> Any:
    """The connector's metrics as vLLM makes them, behind a port of their own."""
    registry = CollectorRegistry()
    types: dict[Any, Any] = {cls: functools.partial(cls, registry=registry) for cls in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None, parallel_config=SimpleNamespace(world_size=1))
    labels = ["model_name", "engine"]
    metrics = PrefixCacheConnector.build_prom_metrics(config, types, labels, {0: ["llama", "0"]})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            # As vLLM's route: prometheus_client's own server would escape the colon of a name for an older Prometheus.
            self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
            self.end_headers()
            self.wfile.write(generate_latest(registry))

        def log_message(self, *_arguments: Any) -> None:
            """Not in a test's output."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever).start()
    return metrics, server


def work(metrics: Any, stop: threading.Event) -> None:
    """What an engine reports, again and again."""
    metrics.observe({"line": {"scheduler": [1, 0]}, "bypassed": {"a pooling request": 1}})
    while not stop.wait(0.2):
        metrics.observe(
            {
                "scheduler": {
                    "lookups:hit": 3,
                    "lookups:miss": 1,
                    "wanted_tokens": 400,
                    "promised_tokens": 300,
                    "loaded_tokens": 300,
                    "loads:done": 3,
                    "lookup_seconds": [0.001, 0.002],
                },
                "0": {
                    "loaded_bytes:mapped": 3000,
                    "saved_bytes:mapped": 1000,
                    "saved_blocks": 1,
                    "load_seconds:mapped": [0.02],
                    "save_seconds:mapped": [0.001],
                    "save_copy_seconds": [0.0005],
                },
            }
        )


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    stop = threading.Event()
    port = free_port()
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis"))
        server = stack.enter_context(
            ServerProcess(folder / "prefixd", "256MiB", "--http", "127.0.0.1:0", "--redis", redis.url)
        )
        metrics, engine = engine_metrics(port)
        stack.callback(engine.server_close)
        stack.callback(engine.shutdown)
        thread = threading.Thread(target=work, args=(metrics, stop))
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)
        worker = stack.enter_context(Client(server.unix, 0, payload_bytes=MIB, descriptors=server.socket_path))
        scheduler = stack.enter_context(Client(server.unix))
        wait_until(worker.is_mapped, "segments are handed out")
        targets = {"prefixd": http_url(server).removeprefix("http://"), "vllm": f"127.0.0.1:{port}"}
        prometheus = Prometheus(folder, targets)
        stack.callback(prometheus.process.wait)
        stack.callback(prometheus.process.kill)
        for name in ("prefixd", "vllm"):
            wait_until(functools.partial(prometheus.has, f'up{{job="{name}"}} == 1'), f"{name} is scraped", 60)
        # Between two scrapes something has to happen.
        worker.save(chain("a", 8))
        assert scheduler.lookup(chain("a", 8)).hit_end == 8
        for rate in ('prefixd_lookups_total{outcome="hit"}', "vllm:prefixd_loaded_tokens_total"):
            wait_until(functools.partial(prometheus.has, f"rate({rate}[1m]) > 0"), f"rates of {rate} are there", 60)
        yield prometheus


def test_every_expression_of_the_dashboard_has_an_answer(prometheus: Prometheus) -> None:
    """A Prometheus that has scraped both often enough evaluates each, to something."""
    unanswered = expressions()
    assert len(unanswered) > 50
    for expression in unanswered:
        wait_until(functools.partial(prometheus.has, expression), f"an answer to {expression}", 60)

    with pytest.raises(OSError, match="400"):
        prometheus.query("sum(rate(prefixd_lookups_total[1m])")  # positive control: a broken one
    assert prometheus.query("prefixd_no_such_thing") == []  # and one whose metric does not exist


def test_the_hit_rate_is_of_loaded_tokens(prometheus: Prometheus) -> None:
    """Three quarters here; promises have no part in it (C57)."""
    (expression,) = {one for one in expressions() if "/" in one and "by" not in one}
    ((value,),) = [[float(result["value"][1])] for result in prometheus.query(expression)]

    assert value == pytest.approx(0.75, abs=0.01)
    assert "loaded_tokens" in expression
    assert "promised" not in expression


def test_every_metric_that_is_used_exists(prometheus: Prometheus) -> None:
    """By the dashboard, its variables and the rules."""
    known = set(prometheus.ask("label/__name__/values"))
    text = (GRAFANA / "dashboard.json").read_text() + (GRAFANA / "alerts.yaml").read_text()
    used = set(re.findall(r"\b(?:vllm:prefixd|prefixd|process)_[a-z0-9_]+", text))

    assert len(used) > 45
    assert used - known == set()


def test_every_rule_is_evaluated_and_none_fires_when_all_is_well(prometheus: Prometheus) -> None:
    """By Prometheus itself, while it scrapes."""

    def rules() -> list[Any]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), "every rule was evaluated", 30)

    assert {rule["health"] for rule in rules()} == {"ok"}
    assert {rule["state"] for rule in rules()} == {"inactive"}
    assert len(rules()) == 10


def test_every_rule_names_a_chapter_that_exists() -> None:
    """`todo` says where to read on."""
    todo = re.findall(r"See (docs/[a-z-]+\.md)(?:, ([^.\"]+))?\.", (GRAFANA / "alerts.yaml").read_text())

    assert len(todo) == 10
    for file, chapter in todo:
        assert not chapter or f"# {chapter}\n" in Path(file).read_text(), f"{file}: {chapter}"


# Series that make a rule fire. `+N`: growth per minute.
FIRING: dict[str, dict[str, str]] = {
    "PrefixdServerDown": {'up{job="prefixd",instance="a"}': "0+0x200"},
    "PrefixdEngineUncached": {'vllm:prefixd_connected{instance="a",engine="0",side="0"}': "0+0x200"},
    "PrefixdLoadsFail": {
        'vllm:prefixd_load_failed_tokens_total{instance="a"}': "0+10x200",
        'vllm:prefixd_promised_tokens_total{instance="a"}': "0+100x200",
    },
    "PrefixdNeverHits": {
        'vllm:prefixd_wanted_tokens_total{instance="a"}': "0+5000x200",
        'vllm:prefixd_loaded_tokens_total{instance="a"}': "0+0x200",
    },
    "PrefixdSavesAreDropped": {
        'vllm:prefixd_dropped_blocks_total{instance="a"}': "0+30x200",
        'vllm:prefixd_saved_blocks_total{instance="a"}': "0+70x200",
    },
    "PrefixdThrashes": {
        'prefixd_evicted_blocks_total{instance="a",cause="capacity"}': "0+30x200",
        'prefixd_namespace_blocks{instance="a"}': "200+0x200",
    },
    "PrefixdLookupsAreSlow": {
        'prefixd_operation_seconds_bucket{instance="a",operation="lookup",le="0.025"}': "0+90x200",
        'prefixd_operation_seconds_bucket{instance="a",operation="lookup",le="0.05"}': "0+100x200",
        'prefixd_operation_seconds_bucket{instance="a",operation="lookup",le="+Inf"}': "0+100x200",
    },
    "PrefixdRedisDown": {'prefixd_redis_up{instance="a"}': "0+0x200"},
    "PrefixdRedisQueueDrops": {'prefixd_redis_saves_total{instance="a",outcome="queue_dropped"}': "0+1x200"},
    "PrefixdIntegrityFailures": {'prefixd_integrity_failures_total{instance="a"}': "0+0x100 1+0x100"},
}
AT = {"PrefixdIntegrityFailures": "110m"}
# The same, and all is well: it must be silent.
SILENT: dict[str, dict[str, str]] = {
    "PrefixdLoadsFail": {
        'vllm:prefixd_load_failed_tokens_total{instance="a"}': "0+4x200",
        'vllm:prefixd_promised_tokens_total{instance="a"}': "0+100x200",
    },
    "PrefixdNeverHits": {
        'vllm:prefixd_wanted_tokens_total{instance="a"}': "0+5000x200",
        'vllm:prefixd_loaded_tokens_total{instance="a"}': "0+1x200",
    },
    "PrefixdThrashes": {
        'prefixd_evicted_blocks_total{instance="a",cause="capacity"}': "0+10x200",
        'prefixd_namespace_blocks{instance="a"}': "200+0x200",
    },
}


def _unit_tests(cases: list[tuple[str, dict[str, str], bool]], folder: Path) -> subprocess.CompletedProcess[str]:
    """promtool over (rule, series, does it fire?)."""
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                    "eval_time": AT.get(name, "180m"),
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }
            ],
        }
        for name, series, fires in cases
    ]
    file = folder / "test.yaml"
    rules = str((GRAFANA / "alerts.yaml").resolve())
    file.write_text(json.dumps({"rule_files": [rules], "evaluation_interval": "1m", "tests": tests}))
    return subprocess.run([str(PROMTOOL), "test", "rules", str(file)], check=False, capture_output=True, text=True)


def test_each_rule_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    """On series made for it; some failures, few hits, some evictions are life."""
    cases = [(name, series, True) for name, series in FIRING.items()]
    cases += [(name, series, False) for name, series in SILENT.items()]
    done = _unit_tests(cases, tmp_path)
    wrong = _unit_tests([(name, series, not fires) for name, series, fires in cases], tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert wrong.returncode != 0, "positive control"
    assert [name for name in FIRING if name not in wrong.stdout + wrong.stderr] == []


def test_every_rule_has_its_series() -> None:
    """None is left out of the tests above."""
    names = re.findall(r"- alert: (\w+)", (GRAFANA / "alerts.yaml").read_text())

    assert sorted(names) == sorted(FIRING)
