"""`prefixd keys explain`: from the server's own knowledge, from logs, from files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cache_server.explain import ExplainError, differences, in_file, lines_of
from connector.namespace import Namespace
from tests.cache_server.harness import ROOT, Client, ServerProcess
from tests.connector.test_namespace import (
    SEPARATING_FIELDS,
    Dtype,
    HfConfig,
    kv_cache_config,
    made,
    make_model,
    spec,
    vllm_config,
)


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cache_server", "keys", "explain", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def log_of(namespace: Namespace, path: Path) -> Path:
    """An engine's log, as vLLM writes it."""
    path.write_text(
        "(EngineCore pid=7) INFO 12-01 01:00:00 [plugin.py:190] prefixd: namespace "
        f"{namespace.fingerprint.hex()[:16]}, load failure policy 'recompute'\n"
        "(EngineCore pid=7) INFO 12-01 01:00:00 [plugin.py:195] prefixd: namespace "
        f"{namespace.fingerprint.hex()} is {namespace.text}\n"
        "(EngineCore pid=7) INFO 12-01 01:00:00 other things\n"
    )
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "models")


def test_two_logs_say_why_two_engines_do_not_share(tmp_path: Path, model: Path) -> None:
    one = made(vllm_config(model))
    other = made(
        vllm_config(model, model__dtype=Dtype("float32"), model__hf_config=HfConfig(rope_theta=5.0)),
        kv_cache_config(spec(dtype=Dtype("float32"), page_size_bytes=16384)),
    )
    done = explain(str(log_of(one, tmp_path / "one.log")), str(log_of(other, tmp_path / "other.log")))

    assert done.stdout.splitlines()[1:] == [
        '  kv_cache_dtype: "bfloat16" | "float32"',
        '  kv_groups[0][0].dtype: "bfloat16" | "float32"',
        "  kv_groups[0][0].page_bytes: 8192 | 16384",
        "  model.config.resolved.rope_theta: 10000.0 | 5.0",
        '  model_dtype: "bfloat16" | "float32"',
        "  -> kv_cache_dtype: --kv-cache-dtype, or --dtype where it is auto",
        "  -> kv_groups: another model, another --block-size, --dtype or tensor parallel size",
        "  -> model.config: another model, or --hf-overrides",
        "  -> model_dtype: --dtype differs",
    ]


def test_every_difference_is_found_and_shown(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever separates two engines is a line here: no field is in the fingerprint and not in the text."""
    caught: list[Namespace] = []
    monkeypatch.setattr(
        "tests.connector.test_namespace.made", lambda *a, **k: caught.append(made(*a, **k)) or caught[-1]
    )
    plain = in_file(log_of(made(vllm_config(model)), tmp_path / "plain.log"))
    for name, of_model in SEPARATING_FIELDS.items():
        of_model(model)
        other = in_file(log_of(caught[-1], tmp_path / "other.log"))
        lines = list(differences(plain, other))
        assert plain.is_proven and other.is_proven, name
        assert len(lines) > 1, name
        assert any(" | " in line for line in lines), name
    assert len(caught) == len(SEPARATING_FIELDS)


def test_the_same_engine_twice_shares(tmp_path: Path, model: Path) -> None:
    log = str(log_of(made(vllm_config(model)), tmp_path / "one.log"))

    assert "these engines share" in explain(log, log).stdout


def test_a_running_server_knows_the_namespaces_of_its_engines(tmp_path: Path, model: Path) -> None:
    """By the first digits of the fingerprint that every engine logs; against a file as well."""
    one, other = made(vllm_config(model)), made(vllm_config(model), weights_version="2")
    with ServerProcess(tmp_path / "s", "64MiB") as server:
        clients = [Client(server.unix, fingerprint=each.fingerprint, text=each.text) for each in (one, other)]
        digits = [each.fingerprint.hex()[:16] for each in (one, other)]
        all_of_them = explain("--server", server.unix).stdout
        of_one = explain(digits[0], "--server", server.unix).stdout
        why = explain(*digits, "--server", server.unix).stdout
        against = explain(digits[0], str(log_of(other, tmp_path / "log")), "--server", server.unix).stdout
        for client in clients:
            client.close()

    assert all(each.fingerprint.hex() in all_of_them for each in (one, other))
    assert one.fingerprint.hex() in of_one
    assert '  model_dtype = "bfloat16"' in of_one
    assert '  weights_version: null | "2"' in why
    assert "weights_version: the connector's `weights_version` differs" in why
    assert against == why


def test_one_that_nobody_can_explain_does_not_hide_the_others(tmp_path: Path, model: Path) -> None:
    one, odd = made(vllm_config(model)), bytes(32)
    with ServerProcess(tmp_path / "s", "64MiB") as server:
        clients = [
            Client(server.unix, fingerprint=odd, text="not JSON"),
            Client(server.unix, fingerprint=one.fingerprint, text=one.text),
        ]
        all_of_them, the_odd = explain("--server", server.unix), explain(odd.hex(), "--server", server.unix)
        for client in clients:
            client.close()

    assert all_of_them.returncode == 0
    assert f"namespace {odd.hex()[:16]} was described with something else than JSON" in all_of_them.stdout
    assert f"namespace {one.fingerprint.hex()}" in all_of_them.stdout
    assert (the_odd.returncode, "something else than JSON" in the_odd.stderr) == (1, True)


def test_a_text_that_is_made_up_is_told(tmp_path: Path, model: Path) -> None:
    namespace = made(vllm_config(model))
    fields = {**json.loads(namespace.text), "model_dtype": "float64"}
    forged = Namespace(namespace.fingerprint, json.dumps(fields), 16, 1)

    assert any(
        "not what the fingerprint was made of" in line for line in lines_of(in_file(log_of(forged, tmp_path / "l")))
    )


@pytest.mark.parametrize("content", ["", "no namespace here", "[]", "{", "prefixd: namespace 12 is {}"])
def test_a_file_without_a_namespace_is_told(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ExplainError, match="neither"):
        in_file(path)


def test_what_cannot_be_explained_is_one_line(tmp_path: Path) -> None:
    for arguments in (["/nowhere"], ["a", "b", "c"], ["abcdef", "--server", f"unix://{tmp_path}/none"]):
        done = explain(*arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert explain("--server", "nonsense").returncode == 2
