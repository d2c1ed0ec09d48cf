"""The reference pages, from the code: docs/configuration.md (every setting) and docs/metrics.md (every metric).

What they say is what the code has: names, defaults, help texts. Nothing is written down twice.

Not here: prose (the other pages of docs/).
"""

import dataclasses
import functools
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from cache_server import cli  # noqa: E402
from cache_server.exposition import FAMILIES, GAUGES, NAMESPACE_GAUGES  # noqa: E402
from cache_server.operations import OPERATIONS  # noqa: E402
from cache_server.settings import key_of, settings_of, variable_of  # noqa: E402
from connector import request_options  # noqa: E402
from connector.config import ConnectorConfig  # noqa: E402
from connector.plugin import PrefixCacheConnector  # noqa: E402

GENERATED = "<!-- Made by scripts/generate-docs; change the code and run it. -->"


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def server_settings() -> list[list[str]]:
    """Of `prefixd serve`."""
    rows = []
    for one in settings_of(cli.serve):
        assert isinstance(one, click.Option)
        default = one.default
        if isinstance(default, tuple | list):
            default = " ".join(map(str, default))
        text = re.sub(r"\s*\[default: (.*)\]", lambda match: f" Without it: {match[1]}.", one.help or "")
        shown = "" if default is None or not isinstance(default, str | int | float) else f"`{default}`"
        rows.append([f"`--{key_of(one)}`", f"`{variable_of(one)}`", shown, text])
    return rows


def connector_settings() -> list[list[str]]:
    """Of the connector: the fields of `ConnectorConfig` and the comments beside them."""
    source = inspect.getsource(ConnectorConfig)
    rows = []
    for field in (one for one in dataclasses.fields(ConnectorConfig) if one.init):
        comment = re.search(rf"^    {field.name}: [^\n#]*(?:# (.*))?$", source, re.MULTILINE)
        default = "" if field.default is dataclasses.MISSING else f"`{_json(field.default)}`"
        text = comment[1] if comment and comment[1] else ""
        rows.append([f"`{field.name}`", default, f"{text[0].upper()}{text[1:]}."])
    return rows


def _json(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def configuration() -> str:
    assert request_options.__doc__ is not None
    options = "\n".join(line for line in request_options.__doc__.splitlines() if line.startswith('    "'))
    return f"""{GENERATED}

# Configuration reference

## The server

`prefixd serve` takes each setting from its flag, else from its environment variable, else from the file of `--config`
(`PREFIXD_CONFIG`), else from its default. The file is YAML or TOML with one key per setting, named like the flag
without its dashes; `listen` is a list. A flag, a variable that begins with `PREFIXD_`, or a key that is none of these
is refused, with the nearest that is. Variables that Kubernetes sets for a Service called prefixd are let be.

`prefixd config` prints what is in force and where each value came from; `prefixd check` whether this machine can do it.

{table(["flag", "variable", "default", "what it is"], server_settings())}

The password of Redis may also come from `PREFIXD_REDIS_PASSWORD`; the commands that ask a server take its address from
`--server` or `PREFIXD_SERVER`.

## The connector

The keys of `kv_connector_extra_config` in vLLM's `--kv-transfer-config`. An unknown key or a value that is not allowed
ends the engine's start before the model is loaded, with one line.

{table(["key", "default", "what it is"], connector_settings())}

vLLM's own keys beside them: `kv_role` (`kv_both`; `kv_producer` saves only, `kv_consumer` loads only) and
`kv_load_failure_policy`, which should be `recompute`: vLLM's default makes a failed load a failed request.

## One request

In `kv_transfer_params` of a request:

```
{options}
```
"""


def metrics() -> str:
    server = [
        [f"`prefixd_{one.name}{'_total' if one.kind == 'counter' else ''}`", one.kind, _labels(one), one.help]
        for one in FAMILIES
    ]
    gauges = [[f"`prefixd_{name}`", "gauge", "", text] for name, (text, _) in GAUGES.items()]
    gauges += [
        [f"`prefixd_{name}`", "gauge", "namespace, tenant", text] for name, (text, _) in NAMESPACE_GAUGES.items()
    ]
    gauges += [
        ["`prefixd_sessions`", "gauge", "role, path", "Sessions that are not over."],
        ["`prefixd_build_info`", "gauge", "version, epoch", "1; which version runs, and its epoch."],
        ["`prefixd_operation_seconds`", "histogram", "operation", "How long operations took; see below."],
    ]
    operations = [[f"`{name}`", text] for name, text in OPERATIONS.items()]
    return f"""{GENERATED}

# Metrics

Every metric, and what it counts and what not. `deploy/grafana/` has a dashboard and alert rules over them.

What to look at first: **the hit rate of tokens**, `vllm:prefixd_loaded_tokens_total` over
`vllm:prefixd_wanted_tokens_total`. It is made of tokens that reached the engine's memory, not of promises: a cache
whose loads all fail has a hit rate of zero.

## The engines

In vLLM's own `/metrics`, with vLLM's labels; `shard` is the worker's rank. They are told with the engine's steps, so
those of an idle engine stand still. With `--enable-prompt-tokens-details` each answer's
`usage.prompt_tokens_details.cached_tokens` has the same tokens for one request, the engine's own hits included.

{table(["metric", "kind", "labels", "what it counts"], engine_metrics())}

## The server

On `--http`, at `/metrics`; `prefixd stats` and the status page show the same figures. Besides these there are the usual
`process_*` of the server's process.

{table(["metric", "kind", "labels", "what it counts"], server + gauges)}

### Operations

{table(["operation", "what is measured"], operations)}
"""


def _labels(family: Any) -> str:
    return f"{family.label}: {', '.join(family.fields)}" if family.label else ""


def engine_metrics() -> list[list[str]]:
    """Read from the registry that vLLM would fill."""
    registry = CollectorRegistry()
    types: dict[Any, Any] = {cls: functools.partial(cls, registry=registry) for cls in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None, parallel_config=SimpleNamespace(world_size=1))
    metrics = PrefixCacheConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
    metrics.observe({"line": {"scheduler": [1, 0]}, "bypassed": {"…": 1}})
    rows = []
    for metric in registry.collect():
        suffix = "_total" if metric.type == "counter" else ""
        labels: dict[str, list[str]] = {}
        for name, value in (label for sample in metric.samples for label in sample.labels.items()):
            if name not in ("engine", "le") and value not in labels.setdefault(name, []):
                labels[name].append(value)
        shown = [f"{name}: {', '.join(values)}" if len(values) > 1 else name for name, values in labels.items()]
        rows.append([f"`{metric.name}{suffix}`", metric.type, "; ".join(shown), metric.documentation])
    return rows


PAGES = {"docs/configuration.md": configuration, "docs/metrics.md": metrics}


def main() -> None:
    is_check = sys.argv[1:] == ["--check"]
    for name, make in PAGES.items():
        text, file = make(), ROOT / name
        if not is_check:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            sys.exit(f"{name} is not what the code says: run scripts/generate-docs")


if __name__ == "__main__":
    main()
