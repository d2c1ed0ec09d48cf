"""As an operator meets it: vLLM's OpenAI server, the README's option, and the figures in its answers."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engine import ROOT, wait_until
from tests.engine.openai import OpenAI
from tests.engine.prefixd import Prefixd
from tests.models import prompt

# The model has more token ids than its tokenizer has texts: to most answers belongs no text at all.
LETTERS = list(range(66, 92))  # a to z


def readme_option(server: str) -> str:
    """The README's `--kv-transfer-config`, with the address of our server."""
    (option,) = set(re.findall(r"--kv-transfer-config '(\{.*?\})'", (ROOT / "README.md").read_text()))
    config = json.loads(option)
    assert config["kv_connector_extra_config"] == {"server": "unix:///run/prefixd/prefixd.sock"}
    return option.replace("unix:///run/prefixd/prefixd.sock", server)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefixd]:
    with Prefixd(tmp_path_factory.mktemp("openai")) as server:
        yield server


@pytest.fixture(scope="module")
def openai(server: Prefixd, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp("api")
    with OpenAI(folder, settings["model"], readme_option(server.unix_address), "--max-model-len", "1024") as api:
        wait_until(lambda: server.attached(2), 10, "worker and scheduler side are attached")
        yield api


def after_the_engine_forgot(openai: OpenAI, body: dict[str, Any]) -> Any:
    """The answer to `body` when nothing of it is in the engine's own cache. Asked again where nothing was cached at
    all: the README's line leaves the lookup its 50 ms, which a busy machine can miss."""

    def answer() -> Any:
        openai.post("/reset_prefix_cache")
        said = openai.post("/v1/completions", body)
        return said if said["usage"]["prompt_tokens_details"]["cached_tokens"] else None

    return wait_until(answer, 20, "an answer with cached tokens")


def test_cached_tokens_are_in_the_usage_of_the_answer(openai: OpenAI, server: Prefixd) -> None:
    body = {"model": "llama", "prompt": prompt(7, 500), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    first = openai.post("/v1/completions", body)
    wait_until(lambda: server.num_blocks() >= 15, 10, "all full blocks of the prompt are saved")
    second = after_the_engine_forgot(openai, body)

    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert len(second["choices"][0]["token_ids"]) == 8
    assert (first["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 480
    assert openai.counter("vllm:prefixd_loaded_tokens_total") == 480
    # The README's line leaves a load its 50 ms, too. On a busy machine one can be late; nothing else may fail.
    assert openai.counter("vllm:prefixd_load_failed_tokens_total") == 480 * openai.counter(
        "vllm:prefixd_late_loads_total"
    )


def test_a_text_goes_on_where_it_was_cached(openai: OpenAI, server: Prefixd) -> None:
    """Through the tokenizer and with text, after the engine forgot: the longer text hits the blocks of the shorter."""
    before, known = openai.counter("vllm:prefixd_loaded_tokens_total"), server.num_blocks()
    text = "the cache keeps what was computed once " * 20
    body = {"model": "llama", "prompt": text, "max_tokens": 4, "temperature": 0}
    first = openai.post("/v1/completions", body)
    num_full = (first["usage"]["prompt_tokens"] + 3) // 32  # the last token sampled has no KV
    wait_until(lambda: server.num_blocks() >= known + num_full, 10, "all full blocks are saved")
    second = after_the_engine_forgot(openai, {**body, "prompt": text + "and more"})
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached > 0.8 * first["usage"]["prompt_tokens"]
    assert openai.counter("vllm:prefixd_loaded_tokens_total") - before == cached


def test_a_stop_string_ends_an_answer_and_leaves_right_blocks(openai: OpenAI, server: Prefixd) -> None:
    """C58: the server aborts such a request while its next step is in flight; what it saved is right afterwards."""
    body = {"model": "llama", "prompt": "cache " * 30, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    body["allowed_token_ids"] = LETTERS
    whole = openai.post("/v1/completions", body)["choices"][0]["text"]
    assert len(whole) == 40
    stop = whole[len(whole) // 2 :][:2]
    other = {**body, "prompt": "keeps " * 30}
    for _ in range(3):
        stopped = openai.post("/v1/completions", {**body, "stop": [stop]})["choices"][0]
        assert (stopped["finish_reason"], stopped["text"]) == ("stop", whole[: whole.index(stop)])
        assert openai.post("/v1/completions", other)["choices"][0]["finish_reason"] == "length"
    before = openai.counter("vllm:prefixd_loaded_tokens_total")

    assert after_the_engine_forgot(openai, body)["choices"][0]["text"] == whole
    assert openai.counter("vllm:prefixd_loaded_tokens_total") > before, "positive control"
    wait_until(lambda: server.stats().leased_bytes == 0, 60, "nothing of them is left")


def test_warm_has_the_engine_compute_prompts_once(openai: OpenAI, server: Prefixd, tmp_path: Path) -> None:
    """`prefixd warm`, asked twice: the second time, after the engine forgot, they are cached."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(prompt(seed, 100))}\n" for seed in (81, 82)))
    known = server.num_blocks()

    def warm() -> dict[str, object]:
        command = [sys.executable, "-m", "cache_server", "warm", str(file), "--engine", openai.url, "--json"]
        return dict(json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout))

    first = warm()
    wait_until(lambda: server.num_blocks() >= known + 2 * 3, 10, "all full blocks are saved")

    def all_cached() -> bool:
        openai.post("/reset_prefix_cache")
        return warm() == {"prompts": 2, "tokens": 200, "cached_tokens": 2 * 96, "failed": []}

    assert (first["prompts"], first["tokens"], first["failed"]) == (2, 200, [])
    assert not first["cached_tokens"]
    wait_until(all_cached, 20, "both are cached")
