"""compose.yaml and the systemd unit: valid, consistent with each other and the manifests; the unit's commands run."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from cache_server.cli import serve
from connector.config import ConnectorConfig
from protos import __version__
from tests.deploy.policy import SERVER_USER, limit_for
from tests.deploy.rendering import ROOT, Document, bytes_of, run

DEPLOY = ROOT / "deploy"
SYSTEMD = DEPLOY / "systemd"
UNIT = SYSTEMD / "prefixd.service"


def compose() -> Document:
    loaded: Document = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


def default_of(text: str) -> str:
    """'${NAME:-default}' → 'default'."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def needs(program: str, package: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not on the PATH: apt-get install {package}")
    return found


def test_the_compose_file_is_valid() -> None:
    """By the specification's own schema."""

    done = run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_profile_has_one_of_each(profile: str) -> None:
    """One engine; everything hardened; ports on the loopback interface only; what is mounted is there."""

    services = {name: service for name, service in compose()["services"].items() if profile in service["profiles"]}

    assert set(services) == {f"vllm-{profile}", "prefixd", "redis", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_dir() if source.startswith(".") else source in compose()["volumes"], volume
        if "build" in service:
            assert service["image"].rpartition(":")[2].removesuffix("-cpu") == __version__
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        elif name != "redis":
            assert "mem_limit" in service


def test_the_servers_limit_and_arguments_are_right() -> None:
    """As in the manifests."""

    server = compose()["services"]["prefixd"]
    arguments = [default_of(text) for text in server["command"]]
    given = serve.make_context("prefixd serve", arguments[1:]).params

    assert given["listen"] == ("unix:///run/prefixd/prefixd.sock",)
    assert default_of(server["mem_limit"]) == f"{limit_for(given['memory']) >> 20}m"
    assert given["url"] == "redis://redis:6379"


@pytest.mark.parametrize("name", ["vllm-cpu", "vllm-gpu"])
def test_the_engine_is_told_of_the_server(name: str) -> None:
    """The same setting as everywhere, as the server's user."""

    engine = compose()["services"][name]
    (text,) = [text for text in engine["command"] if text.startswith("--kv-transfer-config=")]
    config = ConnectorConfig.parse(yaml.safe_load(text.partition("=")[2])["kv_connector_extra_config"])

    assert config.server == "unix:///run/prefixd/prefixd.sock"
    assert engine["user"] == f"{SERVER_USER}:{SERVER_USER}"
    assert "prefixd-socket:/run/prefixd:ro" in engine["volumes"]


# --- systemd --------------------------------------------------------------------------------------------------


def unit(key: str) -> str:
    (value,) = re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(value)


def test_the_unit_is_understood(tmp_path: Path) -> None:
    """systemd has nothing to say about it, once the programs are there."""

    analyze = needs("systemd-analyze", "systemd")
    file = tmp_path / "prefixd.service"
    file.write_text(UNIT.read_text().replace("/opt/prefixd/bin/prefixd", str(Path(sys.prefix, "bin", "prefixd"))))
    done = subprocess.run([analyze, "verify", "--man=no", file], capture_output=True, text=True, check=False)
    file.write_text(file.read_text().replace("NoNewPrivileges", "NoMorePrivileges"))
    wrong = subprocess.run([analyze, "verify", "--man=no", file], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "NoMorePrivileges" in wrong.stderr


def test_the_units_limit_is_what_its_memory_needs() -> None:
    """Its default; whoever changes one changes the other, or the server refuses to start."""

    (memory,) = re.findall(r"PREFIXD_MEMORY=(\S+)", unit("Environment"))

    assert bytes_of(unit("MemoryMax").replace("M", "Mi")) == limit_for(memory)


def test_the_units_commands_start_a_server_that_is_ready_and_stops_in_time(tmp_path: Path) -> None:
    """As systemd would run them, with the folder somewhere else."""

    def filled(text: str) -> str:
        return (
            text.replace("/opt/prefixd/bin", str(Path(sys.prefix, "bin")))
            .replace("/run/prefixd", str(tmp_path))
            .replace("${PREFIXD_MEMORY}", "64MiB")
            .replace("$PREFIXD_OPTIONS", "--gate-share 0.7")
            .replace("prefixd health", f"prefixd health --server unix://{tmp_path}/prefixd.sock")
        )

    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(shlex.split(filled(unit("ExecStart"))), stdout=log, stderr=log)
    try:
        after = subprocess.run(shlex.split(filled(unit("ExecStartPost"))), check=False, timeout=60, capture_output=True)
        assert after.returncode == 0
        assert "ready on" in (tmp_path / "log").read_text()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert time.monotonic() - began < float(unit("TimeoutStopSec"))
    finally:
        process.kill()
        process.wait()


def test_the_user_and_the_folder_are_those_of_the_images(tmp_path: Path) -> None:
    """Made by systemd's own tools, below another root."""

    for file in (SYSTEMD / "sysusers.d" / "prefixd.conf", SYSTEMD / "tmpfiles.d" / "prefixd.conf"):
        assert str(SERVER_USER) in file.read_text()
    sysusers, tmpfiles = needs("systemd-sysusers", "systemd"), needs("systemd-tmpfiles", "systemd")
    if os.geteuid() != 0:
        pytest.skip("run as root: files get owners")
    (tmp_path / "etc").mkdir()
    users = subprocess.run(
        [sysusers, f"--root={tmp_path}", SYSTEMD / "sysusers.d" / "prefixd.conf"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    folders = subprocess.run(
        [tmpfiles, f"--root={tmp_path}", "--create", "--prefix=/run", SYSTEMD / "tmpfiles.d" / "prefixd.conf"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    status = (tmp_path / "run" / "prefixd").stat()

    assert users.returncode == folders.returncode == 0, users.stderr + folders.stderr
    assert re.search(rf"^prefixd:[^:]*:{SERVER_USER}:", (tmp_path / "etc" / "passwd").read_text(), re.MULTILINE)
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (SERVER_USER, SERVER_USER, 0o750)


def test_the_sysctls_exist() -> None:
    """On this kernel; each line is a setting with a value."""

    lines = (SYSTEMD / "sysctl.d" / "90-prefixd.conf").read_text().splitlines()
    settings = [line.partition(" = ") for line in lines if line and not line.startswith("#")]

    assert len(settings) >= 4
    for name, equals, value in settings:
        assert equals and value, name
        assert Path("/proc/sys", *name.split(".")).exists(), name
