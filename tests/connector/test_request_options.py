"""`kv_transfer_params`: two keys are ours, and no value of them costs a request."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from connector.request_options import MAX_WARNINGS, OptionReader, RequestOptions
from tests.fakes import recorded_log


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What was logged so far."""
    with recorded_log("vllm.prefixd") as lines:
        yield lines


def options(params: Any, reader: OptionReader | None = None) -> RequestOptions:
    return (reader or OptionReader())(SimpleNamespace(kv_transfer_params=params))


@pytest.mark.parametrize("save", ["all", "prompt", "none"])
@pytest.mark.parametrize("load", [True, False])
def test_what_a_request_may_ask(warnings: list[str], save: str, load: bool) -> None:
    """Both keys, every value; other connectors' keys are none of our business."""
    params = {"prefixd.save": save, "prefixd.load": load, "do_remote_prefill": True, "prefix": 1}

    assert options(params) == RequestOptions(save, load)
    assert warnings == []


@pytest.mark.parametrize("params", [None, {}, {"remote_host": "x"}, "prefixd.save", ["prefixd.save"], 7, {1: 2}])
def test_without_our_keys_there_is_no_wish(warnings: list[str], params: Any) -> None:
    """Also where the parameters are no dictionary at all, or a vLLM request has no such attribute."""
    assert options(params) == RequestOptions(None, True)
    assert OptionReader()(SimpleNamespace()) == RequestOptions(None, True)
    assert warnings == []


@pytest.mark.parametrize("save", [None, True, 1, "", "ALL", "prompts", ["all"], {}])
def test_a_wrong_save_is_none(warnings: list[str], save: Any) -> None:
    """And the warning says what is allowed."""
    assert options({"prefixd.save": save, "prefixd.load": False}) == RequestOptions(None, False)
    assert len(warnings) == 1
    assert "'prefixd.save'" in warnings[0]
    assert "'all', 'prompt', 'none'" in warnings[0]


@pytest.mark.parametrize("load", [None, 0, 1, "false", [], "x" * 10_000])
def test_a_wrong_load_is_none(warnings: list[str], load: Any) -> None:
    """`false` in quotes is not false: the default holds, and the log says so."""
    assert options({"prefixd.load": load, "prefixd.save": "none"}) == RequestOptions("none", True)
    assert "neither true nor false" in warnings[0]
    assert len(warnings[0]) < 400


def test_each_key_is_named_once(warnings: list[str]) -> None:
    """A client that sends it with every request does not fill the log."""
    reader = OptionReader()
    for _ in range(100):
        options({"prefixd.tll": 3, "prefixd.save": "never"}, reader)

    assert len(warnings) == 2
    assert "unknown" in warnings[0]


def test_a_client_cannot_fill_the_log_with_keys(warnings: list[str]) -> None:
    """Nor our memory; and what it sends cannot forge a line."""
    reader = OptionReader()
    for number in range(1000):
        options({f"prefixd.{number}\nERROR": 1}, reader)

    assert len(warnings) == MAX_WARNINGS
    assert not any("\n" in warning for warning in warnings)
