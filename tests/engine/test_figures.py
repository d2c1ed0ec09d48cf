"""A known sequence on a real engine, and every counter after each step: in vLLM's /metrics, in the server, and as
`cached_tokens` in the answers. Then the lines in the engine's log when the server goes away and comes back (C41).

Prompts have 160 tokens in blocks of 32: at most four blocks (128 tokens) can be loaded, for one token is always
computed, and five are saved.
"""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engine import connector_config, wait_until
from tests.engine.openai import OpenAI
from tests.engine.prefixd import Prefixd
from tests.engine.recording_connector import FAULT, FOLDER
from tests.models import prompt

BLOCK, NUM_LOADABLE, NUM_FULL = 32, 128, 5
OUTCOMES = {
    "lookups": ("hit", "miss", "later", "unanswered", "dropped"),
    "loads": ("done", "failed", "cancelled"),
}
TOKENS = ("wanted_tokens", "promised_tokens", "loaded_tokens", "load_failed_tokens", "load_cancelled_tokens")
OF_SHARDS = ("loaded_blocks", "load_failed_blocks", "saved_blocks", "dropped_blocks", "refused_blocks")


class Watched:
    """The engine and its server, with what was expected so far."""

    def __init__(self, openai: OpenAI, server: Prefixd, folder: Path) -> None:
        self.openai = openai
        self.server = server
        self.fault = folder / FAULT
        self.expected: dict[str, float] = dict.fromkeys(self.engine(), 0.0)

    def ask(self, token_ids: list[int], **more: Any) -> Any:
        body = {"model": "llama", "prompt": token_ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **more}
        return self.openai.post("/v1/completions", body)

    def cached_tokens(self, token_ids: list[int], **more: Any) -> int:
        return int(
            (self.ask(token_ids, **more)["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
        )

    def forget(self) -> None:
        """The engine's own cache."""
        self.openai.post("/reset_prefix_cache")

    def engine(self) -> dict[str, float]:
        """What vLLM's /metrics say of us now."""
        text = self.openai.get("/metrics")
        found: dict[str, float] = {}
        for name in (*TOKENS, *OF_SHARDS):
            found[name] = _value(text, f"prefixd_{name}_total")
        for name, outcomes in OUTCOMES.items():
            for outcome in outcomes:
                found[f"{name}:{outcome}"] = _value(text, f"prefixd_{name}_total", outcome=outcome)
        found["bypassed"] = _value(text, "prefixd_bypassed_requests_total")
        return found

    def expect(self, **more: int) -> None:
        """`more` than before, and nothing else. What a worker did off the engine's path is told with a later step."""
        for name, number in more.items():
            self.expected[name.replace("__", ":")] += number
        deadline = time.monotonic() + 20
        while self.engine() != self.expected and time.monotonic() < deadline:
            self.nudge()
        assert self.engine() == self.expected

    def nudge(self) -> None:
        """A step that changes nothing: one token, nothing to look up, nothing to save."""
        self.ask([1, 2, 3])

    def counters(self) -> dict[str, int]:
        return dict(self.server.stats().counters)


def _value(text: str, name: str, **labels: str) -> float:
    found = re.findall(rf"^vllm:{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for its_labels, value in found if all(one in its_labels for one in wanted))


@pytest.fixture(scope="module")
def watched(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("figures")
    with Prefixd(folder) as server:
        option = json.dumps(
            connector_config(
                server.unix_address, connector="RecordingConnector", module="tests.engine.recording_connector"
            )
        )
        options = ("--max-model-len", str(7 * BLOCK), "--num-gpu-blocks-override", "8", "--max-num-seqs", "2")
        with OpenAI(folder, settings["model"], option, *options, environment={FOLDER: str(folder)}) as openai:
            wait_until(lambda: server.attached(2), 10, "worker and scheduler side are attached")
            yield Watched(openai, server, folder)


FIRST = prompt(71, 160)


def test_every_figure_is_there_before_anything_happened(watched: Watched) -> None:
    """With 0, so that a rate sees the first event; for a Prometheus of whatever age, under the same names."""
    openmetrics = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    names = set(re.findall(r"^(vllm:prefixd_\w+)\{", watched.openai.get("/metrics", openmetrics), re.MULTILINE))
    watched.nudge()

    assert {f"vllm:prefixd_{name}_total" for name in (*TOKENS, *OF_SHARDS, *OUTCOMES)} <= names
    assert {f"vllm:prefixd_{name}_seconds_count" for name in ("lookup", "load", "save", "save_copy")} <= names
    assert set(watched.engine().values()) == {0.0}
    wait_until(lambda: _value(watched.openai.get("/metrics"), "prefixd_connected") == 2, 10, "both sides are connected")


def test_cold(watched: Watched) -> None:
    """All is wanted, nothing is there, all full blocks are saved."""
    cached = watched.cached_tokens(FIRST)
    watched.expect(lookups__miss=1, wanted_tokens=NUM_LOADABLE, saved_blocks=NUM_FULL)

    assert cached == 0
    counters = watched.counters()
    assert (counters["lookups"], counters["lookups_missed"], counters["lookup_missed_blocks"]) == (1, 1, 4)
    assert counters["commits_stored"] == NUM_FULL


def test_warm(watched: Watched) -> None:
    """What was promised is loaded, once; the answer says the same number."""
    watched.forget()
    cached = watched.cached_tokens(FIRST)
    watched.expect(
        lookups__hit=1,
        loads__done=1,
        wanted_tokens=NUM_LOADABLE,
        promised_tokens=NUM_LOADABLE,
        loaded_tokens=NUM_LOADABLE,
        loaded_blocks=4,
    )

    assert cached == NUM_LOADABLE
    counters = watched.counters()
    assert (counters["lookups_hit"], counters["lookup_hit_blocks"], counters["lookup_missed_blocks"]) == (1, 4, 4)
    assert counters["promised_bytes"] * BLOCK == NUM_LOADABLE * counters["commits_stored_bytes"] // NUM_FULL


def test_local_hit(watched: Watched) -> None:
    """The engine has all that can be had: nothing is wanted or loaded, though the answer says that it was cached."""
    cached = watched.cached_tokens(FIRST)
    before = watched.counters()
    watched.expect()

    assert cached == NUM_LOADABLE
    assert (before["lookups"], before["presence_lookups"]) == (2, 1)


def test_skipped(watched: Watched) -> None:
    """`prompt_logprobs` reads no cache: bypassed, nothing wanted, nothing loaded."""
    watched.forget()
    cached = watched.cached_tokens(FIRST, prompt_logprobs=1)
    watched.expect(bypassed=1)

    assert cached == 0
    assert watched.counters()["lookups"] == 2


def test_deferred(watched: Watched) -> None:
    """The server is slow to answer, and the engine asks its scheduler side many times: counted once."""
    watched.forget()
    watched.server.send_signal(signal.SIGSTOP)
    timer = threading.Timer(0.7, lambda: watched.server.send_signal(signal.SIGCONT))
    timer.start()
    began = time.monotonic()
    try:
        cached = watched.cached_tokens(FIRST)
    finally:
        timer.join()
    assert time.monotonic() - began > 0.6, "positive control: it waited"
    watched.expect(
        lookups__hit=1,
        loads__done=1,
        wanted_tokens=NUM_LOADABLE,
        promised_tokens=NUM_LOADABLE,
        loaded_tokens=NUM_LOADABLE,
        loaded_blocks=4,
    )

    assert cached == NUM_LOADABLE
    assert _value(watched.openai.get("/metrics"), "prefixd_lookup_seconds_sum") > 0.6


def test_failed_load(watched: Watched) -> None:
    """Promised, and not one byte came: loaded stays as it was, failed grows by the promise (C57)."""
    watched.forget()
    watched.fault.write_text("start_loads 1 1")
    watched.ask(FIRST)
    watched.fault.unlink()
    watched.expect(
        lookups__hit=1,
        loads__failed=1,
        wanted_tokens=NUM_LOADABLE,
        promised_tokens=NUM_LOADABLE,
        load_failed_tokens=NUM_LOADABLE,
        load_failed_blocks=4,
    )
    assert watched.engine()["loaded_tokens"] == 2 * NUM_LOADABLE


def test_preempted(watched: Watched) -> None:
    """Two requests that do not fit together: one is admitted twice, and what it wants then is wanted again. How much
    the engine's own cache keeps of it is the engine's; what must hold are the sums."""
    watched.forget()
    before = watched.engine()
    threads = [
        threading.Thread(target=watched.ask, args=(prompt(seed, 80),), kwargs={"max_tokens": 60}) for seed in (72, 73)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    num_preemptions = watched.openai.counter("vllm:num_preemptions_total")
    watched.nudge()
    after = watched.engine()
    grown = {name: after[name] - before[name] for name in after}

    assert num_preemptions >= 1, "positive control"
    assert grown["wanted_tokens"] >= 2 * 64
    assert grown["promised_tokens"] == grown["loaded_tokens"]
    assert grown["loaded_tokens"] == BLOCK * grown["loaded_blocks"]
    # Each of 139 tokens: 80 of the prompt, 60 decoded, of which the last has no KV.
    wait_until(
        lambda: watched.nudge() or _saved(watched, before) == 2 * (139 // BLOCK), 20, "all full blocks are saved"
    )
    watched.expected = watched.engine()


def _saved(watched: Watched, before: dict[str, float]) -> float:
    return watched.engine()["saved_blocks"] - before["saved_blocks"]


def test_server_and_engine_agree(watched: Watched) -> None:
    """What one says it sent, the other says it got."""
    watched.expect()
    engine, counters = watched.engine(), watched.counters()
    text = watched.openai.get("/metrics")

    assert counters["commits_stored"] == engine["saved_blocks"]
    assert counters["commits_already_present"] == _value(text, "prefixd_already_saved_blocks_total")
    assert counters["commits_stored_bytes"] == _value(text, "prefixd_saved_bytes_total", path="mapped")
    assert counters["lookups"] == sum(engine[f"lookups:{outcome}"] for outcome in OUTCOMES["lookups"])
    assert counters["lookups_hit"] == engine["lookups:hit"]
    assert counters["presence_lookups"] == _value(text, "prefixd_presence_lookups_total")
    assert counters["leases_granted"] == counters["leases_released"] + counters["leases_expired"]
    assert engine["dropped_blocks"] == engine["refused_blocks"] == 0


def test_the_log_has_one_line_per_change_of_state(watched: Watched) -> None:
    """C41: the server is killed and comes back; between there are five requests, and no line for any of them."""
    start = watched.openai.log.stat().st_size

    def lines(pattern: str) -> list[str]:
        said = watched.openai.log.read_bytes()[start:].decode(errors="replace")
        return [line for line in said.splitlines() if "prefixd" in line and re.search(pattern, line)]

    watched.server.kill()
    for seed in range(90, 95):
        watched.ask(prompt(seed, 100))
    wait_until(lambda: len(lines("lost cache server")) == 2, 10, "both sides have said that it is gone")
    told = {
        label: _value(watched.openai.get("/metrics"), "prefixd_connected", side=label) for label in ("scheduler", "0")
    }
    watched.server.start()
    wait_until(lambda: len(lines("attached to")) == 2, 15, "both sides have said that it is back")

    def hits() -> bool:
        watched.forget()
        return watched.cached_tokens(prompt(95, 100)) == 96

    wait_until(hits, 15, "there are hits again")
    assert told == {"scheduler": 0.0, "0": 0.0}
    assert len(lines("lost cache server|does not answer")) == 2, "one line per side and change"
    assert len(lines("attached to")) == 2
    assert len(lines("WARNING|ERROR")) == 2
    assert _value(watched.openai.get("/metrics"), "prefixd_outages_total") == 2
    assert _value(watched.openai.get("/metrics"), "prefixd_connected") == 2


def test_no_token_ids_in_any_log(watched: Watched) -> None:
    """Neither the engine's lines about us nor the server's hold a run of the prompts' numbers."""
    asked = [FIRST, prompt(72, 80), prompt(95, 100)]
    runs = {text for ids in asked for text in (", ".join(map(str, ids[:3])), " ".join(map(str, ids[:3])))}
    ours = [line for line in watched.openai.log.read_text(errors="replace").splitlines() if "prefixd" in line]
    theirs = watched.server.log.read_text(errors="replace").splitlines()

    assert len(ours) > 3
    assert len(theirs) > 0
    assert [line for line in (*ours, *theirs) if any(run in line for run in runs)] == []
