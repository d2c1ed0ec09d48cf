"""What a release consists of: built once as `docs/releasing.md` says, and looked into."""

import json
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from protos import __version__
from tests.deploy.rendering import ROOT, helm, run
from tests.deploy.test_images import pins

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))


def build(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts" / "build-release", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its check by twine, for warnings too, is part of the script."""
    out = tmp_path_factory.mktemp("release")
    done = build("--tag", f"v{__version__}", "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("PASSED") == 2, done.stderr
    return out


def test_a_release_is_a_wheel_an_sdist_an_sbom_and_their_checksums(dist: Path) -> None:
    """And nothing else; the checksums are right."""

    names = {path.name for path in dist.iterdir()}
    expected = {
        f"prefixd-{__version__}-py3-none-any.whl",
        f"prefixd-{__version__}.tar.gz",
        f"prefixd-{__version__}.cdx.json",
    }

    assert names == {*expected, "SHA256SUMS"}
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=dist, check=False).returncode == 0
    assert len((dist / "SHA256SUMS").read_text().splitlines()) == 3


def test_a_tag_that_is_not_the_version_is_refused(tmp_path: Path) -> None:
    """Before anything is built."""

    done = build("--tag", "v9.9.9", "--out", tmp_path / "out")

    assert done.returncode != 0
    assert f"the tag is v9.9.9, protos/__init__.py says {__version__}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_sdist_holds_what_the_wheel_is_built_from_and_what_explains_it(dist: Path) -> None:
    """No test data, no environment, nothing of the machine it was built on."""

    with tarfile.open(dist / f"prefixd-{__version__}.tar.gz") as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    with zipfile.ZipFile(dist / f"prefixd-{__version__}-py3-none-any.whl") as wheel:
        packages = {name for name in wheel.namelist() if ".dist-info/" not in name}

    assert packages <= names
    assert {name.split("/")[0] for name in names} == {
        *{"cache_server", "connector", "protos", "docs"},
        *{"README.md", "SECURITY.md", "CHANGELOG.md", "LICENSE", "PKG-INFO", "pyproject.toml", ".gitignore"},
    }
    assert not {name for name in names if "__pycache__" in name or name.endswith((".pyc", ".so"))}


def test_the_sbom_lists_what_the_image_holds(dist: Path) -> None:
    """As locked, with the licences' owner left to the index."""

    document = json.loads((dist / f"prefixd-{__version__}.cdx.json").read_text())
    component = document["metadata"]["component"]
    listed = {(part["name"], part["version"]) for part in document["components"]}

    assert document["bomFormat"] == "CycloneDX"
    assert (component["name"], component["version"]) == ("prefixd", __version__)
    assert listed == {(name, version) for name, versions in pins("requirements.txt").items() for version in versions}
    assert all(part["purl"].startswith("pkg:pypi/") for part in document["components"])


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_the_workflow_is_one_and_runs_what_is_there(file: Path) -> None:
    """Valid for the forge; each script and folder of ours that it names exists."""

    done = run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", file)
    text = file.read_text()
    named = re.findall(r"(?:^|[ ])((?:\.ci|scripts|deploy|tests)/[\w./-]+)", text, re.MULTILINE)

    assert done.returncode == 0, done.stdout + done.stderr
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
    # Nothing may be written unless a job says so.
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_the_chart_can_be_packaged(tmp_path: Path) -> None:
    """With the script that is a link in the repository, without the values of the overlays."""

    done = helm("package", ROOT / "deploy" / "kubernetes" / "chart", "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / f"prefixd-{__version__}.tgz") as archive:
        stream = archive.extractfile("prefixd/files/form-cluster.sh")
        script = stream.read() if stream is not None else b""
        names = archive.getnames()

    assert script.startswith(b"#!/bin/sh\n")
    assert not [name for name in names if name.startswith("prefixd/values/")]
