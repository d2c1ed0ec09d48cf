"""Adapters: named by what they are, and by nothing at all when that is in doubt."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connector.block_keys import cannot_be_keyed, identity_of
from connector.lora_identity import Adapters
from tests.connector.test_namespace import safetensors


def adapter(folder: Path, weights: bytes = b"a" * 9000, config: str = '{"r": 8}') -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors(folder / "adapter_model.safetensors", {"lora_a": weights})
    (folder / "adapter_config.json").write_text(config)
    return folder


def request(path: Path | str, name: str = "sql", number: int = 1, **lora: Any) -> SimpleNamespace:
    asked = SimpleNamespace(lora_name=name, lora_path=str(path), lora_int_id=number, load_inplace=False)
    vars(asked).update(lora)
    return SimpleNamespace(lora_request=asked, prompt_token_ids=[1], mm_features=[])


def content(asked: SimpleNamespace) -> str | None:
    """As a new engine would see it."""
    return Adapters().content_of(asked.lora_request)


def test_an_adapter_is_its_content_wherever_it_lies(tmp_path: Path) -> None:
    """Two nodes mount it at two paths: one identity, which holds the name and the content, not the path."""
    here, there = request(adapter(tmp_path / "here")), request(adapter(tmp_path / "there"))
    identities = [identity_of(one, "", Adapters().content_of) for one in (here, there)]

    assert identities[0] == identities[1]
    assert (identities[0].lora_name, identities[0].lora_path) == ("sql", None)
    assert identities[0].lora_content


@pytest.mark.parametrize(
    "changed",
    [{"weights": b"b" * 9000}, {"weights": b"a" * 9001}, {"config": '{"r": 16}'}],
    ids=["weights", "size", "configuration"],
)
def test_an_adapter_trained_anew_at_the_same_path_is_another(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Weights, their size, and the configuration that scales them."""
    before = content(request(adapter(tmp_path)))
    adapter(tmp_path, **changed)

    assert content(request(tmp_path)) not in (before, None)


@pytest.mark.parametrize("path", ["/nowhere", "org/adapter", "s3://bucket/adapter", ""])
def test_an_adapter_that_cannot_be_read_goes_by_its_path(path: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    identity = identity_of(request(path), "", Adapters().content_of)

    assert (identity.lora_path, identity.lora_content) == (path, None)


def test_files_that_change_under_a_running_engine_take_its_keys_away(tmp_path: Path) -> None:
    """vLLM may load the files again at any time: from then on nobody knows which ones the KV is of."""
    asked, adapters = request(adapter(tmp_path)), Adapters()
    first = adapters.content_of(asked.lora_request)
    assert adapters.why_doubtful(asked) is None

    os.utime(tmp_path / "adapter_model.safetensors", ns=(1, 1))

    assert "changed while the engine runs" in str(adapters.why_doubtful(asked))
    assert adapters.content_of(asked.lora_request) == first
    again = request(tmp_path, number=2)  # unloaded and loaded: vLLM gives it another id
    assert adapters.why_doubtful(again) is None


def test_files_that_vanish_or_come_are_changes(tmp_path: Path) -> None:
    asked, adapters = request(tmp_path / "later"), Adapters()
    assert adapters.why_doubtful(asked) is None
    adapter(tmp_path / "later")
    assert adapters.why_doubtful(asked) is not None

    other, adapters = request(adapter(tmp_path / "now")), Adapters()
    assert adapters.why_doubtful(other) is None
    (tmp_path / "now" / "adapter_model.safetensors").unlink()
    assert adapters.why_doubtful(other) is not None


def test_requests_without_an_adapter_are_never_in_doubt() -> None:
    assert Adapters().why_doubtful(SimpleNamespace(lora_request=None)) is None


def test_an_adapter_that_is_reloaded_in_place_has_no_keys(tmp_path: Path) -> None:
    """vLLM says so itself: its own blocks of the old weights are not invalidated."""
    assert "in place" in str(cannot_be_keyed(request(adapter(tmp_path), load_inplace=True)))
    assert cannot_be_keyed(request(tmp_path)) is None
