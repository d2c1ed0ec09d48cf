"""Every set of manifests that deploy/kubernetes can render: one per overlay and one per values file of the chart.

Rendered by kubectl and helm: those of the PATH, else those that scripts/deploy-tools installs.
"""

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = KUBERNETES / "chart"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
VALUES = sorted(path.stem for path in (CHART / "values").glob("*.yaml"))
ALL = ["base", *(f"overlay {name}" for name in OVERLAYS), "chart", *(f"chart {name}" for name in VALUES)]
WORKLOADS = ("DaemonSet", "Deployment", "StatefulSet", "Job")

Document = dict[str, Any]


@functools.cache
def tools() -> Path:
    """The folder of the programs that scripts/deploy-tools installs."""
    done = subprocess.run(
        [ROOT / "scripts" / "deploy-tools"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def run(
    program: str, *arguments: str | Path, is_first_on_path: bool = False, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """One of the tools, or the machine's own."""
    found = shutil.which(program) if is_first_on_path else None
    return subprocess.run(
        [found or tools() / program, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run("helm", *arguments, is_first_on_path=True)


@functools.cache
def text_of(name: str) -> str:
    """What `kubectl kustomize` or `helm template` prints; `name` is one of ALL."""
    kind, _, which = name.partition(" ")
    if kind == "chart":
        values = ["-f", CHART / "values" / f"{which}.yaml"] if which else []
        done = helm("template", "prefixd", CHART, "--namespace", "prefixd", *values)
    else:
        folder = KUBERNETES / "overlays" / which if which else KUBERNETES / "base"
        done = run("kubectl", "kustomize", folder, is_first_on_path=True)
    assert done.returncode == 0, f"{name}:\n{done.stderr}"
    return done.stdout


def documents(name: str) -> list[Document]:
    """Fresh ones at every call."""
    return [document for document in yaml.safe_load_all(text_of(name)) if document]


def pods(found: list[Document]) -> Iterator[tuple[str, Document]]:
    """(KIND/NAME, pod template) of everything that makes pods."""
    for document in found:
        if document["kind"] in WORKLOADS:
            yield f"{document['kind']}/{document['metadata']['name']}", document["spec"]["template"]


def containers(pod: Document) -> Iterator[tuple[str, Document]]:
    """(field, container), init containers first."""
    for field in ("initContainers", "containers"):
        for container in pod["spec"].get(field, []):
            yield field, container


def servers(found: list[Document]) -> list[tuple[Document, Document]]:
    """(pod, container) of `prefixd serve`."""
    return [
        (pod, container)
        for _, pod in pods(found)
        for field, container in containers(pod)
        if field == "containers" and container.get("args", [None])[0] == "serve"
    ]


def engines(found: list[Document]) -> list[tuple[Document, Document]]:
    """(pod, container) of `vllm serve`."""
    return [
        (pod, container)
        for _, pod in pods(found)
        for _, container in containers(pod)
        if container.get("command", [None])[0] == "vllm"
    ]


def option(container: Document, name: str) -> list[str]:
    """The values of --name=VALUE among the arguments."""
    prefix = f"--{name}="
    return [text.removeprefix(prefix) for text in container["args"] if text.startswith(prefix)]


def bytes_of(quantity: str) -> int:
    """Kubernetes' way to write bytes."""
    for suffix, factor in (("Ki", 1 << 10), ("Mi", 1 << 20), ("Gi", 1 << 30), ("Ti", 1 << 40)):
        if quantity.endswith(suffix):
            return int(quantity.removesuffix(suffix)) * factor
    return int(quantity)
