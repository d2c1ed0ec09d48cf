"""The Dockerfiles and what they install, without building them (`test_containers.py` does)."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.rendering import ROOT, run

DOCKER = ROOT / "deploy" / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))


def pins(file: str) -> dict[str, list[str]]:
    """name → versions; every one of them has hashes."""
    found: dict[str, list[str]] = {}
    text = (DOCKER / file).read_text().replace("\\\n", "")
    for line in re.findall(r"^[A-Za-z0-9].*", text, re.MULTILINE):
        name, version = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;]+)", line)[0]
        assert "--hash=sha256:" in line, line
        found.setdefault(canonicalize_name(name), []).append(version)
    return found


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_the_dockerfile_passes_the_linter(file: Path) -> None:
    """hadolint, which also runs shellcheck over the commands."""

    done = run("hadolint", "--failure-threshold", "style", file)

    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_linter_sees_a_fault(tmp_path: Path) -> None:
    """Positive control."""

    file = tmp_path / "Dockerfile"
    file.write_text("FROM debian:latest\nRUN apt-get install python3\n")
    done = run("hadolint", file)

    assert done.returncode != 0
    assert "DL3007" in done.stdout


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_every_base_image_has_a_version(file: Path) -> None:
    """And nothing is installed as root's last word."""

    text = file.read_text()
    images = re.findall(r"^ARG \w+_IMAGE=(\S+)$", text, re.MULTILINE)

    assert images
    assert all(re.search(r":v?\d+\.\d+", image) for image in images), images
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == "10001:10001"
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) <= {"${PYTHON_IMAGE}", "${VLLM_IMAGE}"}


@pytest.mark.parametrize("file", ["requirements.txt", "build-requirements.txt"])
def test_the_locked_versions_are_those_that_the_project_asks_for(file: str) -> None:
    """After a change of dependencies: scripts/lock-images."""

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] if file == "requirements.txt" else project["build-system"]["requires"]
    locked = pins(file)

    for text in wanted:
        requirement = Requirement(text)
        versions = locked.get(canonicalize_name(requirement.name), [])
        assert versions, f"{text} is not locked: run scripts/lock-images"
        assert all(requirement.specifier.contains(version) for version in versions), f"{text}: {versions}"
    assert "torch" not in locked
    assert "vllm" not in locked
