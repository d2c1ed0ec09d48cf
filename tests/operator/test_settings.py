"""Where settings come from, and that nothing is ignored in silence."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cache_server.cli import main, serve
from cache_server.config import ConfigError
from cache_server.settings import check_variables, read_file, settings_of, variable_of
from tests.cache_server.harness import ROOT

BARE = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": "/nonexistent"}


def prefixd(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "cache_server", *arguments],
        cwd=ROOT,
        env={**BARE, **environment},
        check=False,
        capture_output=True,
        text=True,
    )


def run(*arguments: str, **environment: str) -> Result:
    """The command in this process: settings are refused before anything is started."""
    nothing_of_ours = dict.fromkeys((name for name in os.environ if name.startswith("PREFIXD_")), None)
    return CliRunner().invoke(main, arguments, env={**nothing_of_ours, **environment}, prog_name="prefixd")


def settings(*arguments: str, **environment: str) -> dict[str, Any]:
    done = run("config", "--json", *arguments, **environment)
    assert done.exit_code == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_flag_then_environment_then_file_then_default(tmp_path: Path) -> None:
    """Each setting has its own origin, and says it."""
    file = tmp_path / "prefixd.yaml"
    file.write_text("memory: 300MiB\ngate-share: 0.5\nlog-format: json\nlisten: [127.0.0.1:1, 127.0.0.1:2]\n")
    said = settings("--config", str(file), "--memory", "100MiB", PREFIXD_MEMORY="200MiB", PREFIXD_GATE_SHARE="0.6")

    assert said["memory"] == {"value": "100MiB", "from": "flag --memory"}
    assert said["gate-share"] == {"value": 0.6, "from": "environment PREFIXD_GATE_SHARE"}
    assert said["log-format"] == {"value": "json", "from": f"file {file}"}
    assert said["listen"] == {"value": ["127.0.0.1:1", "127.0.0.1:2"], "from": f"file {file}"}
    assert said["log-level"] == {"value": "info", "from": "default"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "memory: 300MiB\nredis: redis://h\nredis-connections: 7\n"),
        ("a.yml", "{memory: 300MiB, redis: 'redis://h', redis-connections: 7}"),
        ("a.toml", 'memory = "300MiB"\nredis = "redis://h"\nredis-connections = 7\n'),
    ],
)
def test_yaml_and_toml_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    """The file may also be named by the environment."""
    (tmp_path / name).write_text(text)
    said = settings(PREFIXD_CONFIG=str(tmp_path / name))

    assert [said[key]["value"] for key in ("memory", "redis", "redis-connections")] == ["300MiB", "redis://h", 7]


def test_several_addresses_in_one_variable() -> None:
    """Separated by spaces."""
    assert settings(PREFIXD_LISTEN="127.0.0.1:1 127.0.0.1:2")["listen"]["value"] == ["127.0.0.1:1", "127.0.0.1:2"]


def test_a_password_is_not_shown() -> None:
    """Wherever it comes from."""
    done = run("config", PREFIXD_REDIS="redis://user:secret@h:1")

    assert "secret" not in done.stdout + done.stderr
    assert "redis://user:***@h:1" in done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memroy: 1GiB", "memroy: '1GiB' is not allowed; no such setting; did you mean memory?"),
        ("redis_ttl: 1d", "redis_ttl: '1d' is not allowed; no such setting; did you mean redis-ttl?"),
        ("zzz: 1", "zzz: '1' is not allowed; no such setting; see prefixd serve --help"),
        ("memory: 1GiB\nmemory: 2GiB", "memory: 'twice' is not allowed; each key once"),
        ("memory: [1GiB]", "memory: \"['1GiB']\" is not allowed; one text or number"),
        ("listen: 127.0.0.1:1", "listen: '127.0.0.1:1' is not allowed; a list, also of one"),
        ("memory: {a: b}", "memory: \"{'a': 'b'}\" is not allowed; one text or number"),
        ("- memory", "is not allowed; one setting per line, KEY: VALUE"),
        ("a: [", "is not allowed; YAML ("),
        ("memory: 10", "memory: '10' is not allowed; a size of 1MiB or more with its unit"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    """Which key, which value, what is allowed; exit status 2."""
    file = tmp_path / "p.yaml"
    file.write_text(text)
    done = run("config", "--config", str(file))

    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """Absent, of another kind, no text, broken."""
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "c.toml").write_text("a = ")
    for name, allowed in {
        "none.yaml": "No such file",
        "a.json": "ends with .yaml, .yml or .toml",
        "b.yaml": "not text",
        "c.toml": "TOML (",
    }.items():
        with pytest.raises(ConfigError, match="config") as caught:
            read_file(str(tmp_path / name))
        assert allowed in str(caught.value)
    assert read_file(str(_empty(tmp_path))) == {}


def _empty(folder: Path) -> Path:
    (folder / "empty.yaml").write_text("# nothing\n")
    return folder / "empty.yaml"


def test_a_variable_that_is_none_of_ours_is_refused() -> None:
    """With the nearest that is, and without a password in the message."""
    done = run("serve", PREFIXD_REDIS_TLL="1d")
    assert done.exit_code == 2
    assert done.stderr == (
        "prefixd: PREFIXD_REDIS_TLL: '1d' is not allowed; no such variable; did you mean PREFIXD_REDIS_TTL?\n"
    )

    done = run("serve", PREFIXD_REDISS="redis://u:secret@h")
    assert "did you mean PREFIXD_REDIS?" in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    "name",
    """PREFIXD_SERVICE_HOST PREFIXD_SERVICE_PORT PREFIXD_SERVICE_PORT_HTTP PREFIXD_PORT PREFIXD_PORT_50051_TCP
    PREFIXD_PORT_50051_TCP_ADDR PREFIXD_REDIS_SERVICE_HOST PREFIXD_REDIS_PORT_6379_TCP_PROTO PREFIXD_PYTHON
    PREFIXD_TEST_FOLDER PREFIXD_SERVER""".split(),
)
def test_variables_that_others_set_are_let_be(name: str) -> None:
    """Those of a Kubernetes service called prefixd are in every pod beside it."""
    check_variables({name: "tcp://10.0.0.1:50051"}, ["PREFIXD_MEMORY"])


def test_variables_of_deploy_do_not_stop_the_server() -> None:
    """The systemd unit's own variables reach the process that it starts."""
    texts = [file.read_text(errors="replace") for file in (ROOT / "deploy").rglob("*") if file.is_file()]
    used = {name for text in texts for name in re.findall(r"\bPREFIXD_[A-Z_]+\b", text)}

    assert {"PREFIXD_MEMORY", "PREFIXD_OPTIONS"} <= used, "positive control"
    check_variables(dict.fromkeys(used, "1"), map(variable_of, settings_of(serve)))


@pytest.mark.parametrize("name", ["PREFIXD_MEMORY_PORTX", "PREFIXD_SERVICEHOST", "PREFIXD_TESTS", "PREFIXD_"])
def test_variables_that_only_look_like_those_are_refused(name: str) -> None:
    """Positive control of the above."""
    with pytest.raises(ConfigError, match=f"^{name}: "):
        check_variables({name: "1"}, ["PREFIXD_MEMORY"])


def test_flags_are_closed_too() -> None:
    """click says which one was meant."""
    done = prefixd("serve", "--memroy", "1GiB")

    assert done.returncode == 2
    assert "--memory" in done.stderr


def test_serve_runs_with_what_config_shows(tmp_path: Path) -> None:
    """A bad value of the file stops serve itself, before anything is bound."""
    file = tmp_path / "p.toml"
    file.write_text('memory = "1MiB"\n')
    done = prefixd("serve", "--config", str(file), "--listen", f"unix://{tmp_path}/s.sock")

    assert done.returncode == 2
    assert "at least 64MiB" in done.stderr
    assert not (tmp_path / "s.sock").exists()


@pytest.mark.parametrize("value", ["unix:///x", "127.0.0.1", "127.0.0.1:x", "http://127.0.0.1:1"])
def test_http_takes_a_host_and_a_port(value: str) -> None:
    """Nothing else; and not one that is taken by --listen."""
    done = run("config", "--http", value)

    assert done.exit_code == 2
    assert done.stderr.startswith(f"prefixd: http: {value!r} is not allowed; ")
    assert "a port of its own" in run("config", "--http", "127.0.0.1:5", "--listen", "127.0.0.1:5").stderr
