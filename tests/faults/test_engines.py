"""The acceptance cases about faults on real engines. `cold` is the engine's own answer, computed without the cache.

`mapped` reads slots that it has mapped, so a stopped server does not stop a copy; what is about loads that hang or
break is shown on `streams`.
"""

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.engine.engine import wait_until
from tests.faults.engines import LOOKUP_S, STREAM_LOAD_MS, Clocked, Fleet
from tests.faults.front import fail
from tests.models import prompt

pytestmark = [pytest.mark.engine, pytest.mark.long]  # seven minutes on two cores

LOADED = "vllm:prefixd_loaded_tokens"
FAILED = "vllm:prefixd_load_failed_tokens"
DROPPED = "vllm:prefixd_dropped_blocks"
PATHS = ("mapped slots", "streams")
RETURN_S = 10.0
LOAD_S = STREAM_LOAD_MS / 1000
SLACK = 3

seeds = itertools.count(80_000)


def saved(fleet: Fleet, path: str, num_tokens: int = 300) -> tuple[Clocked, list[int], list[int]]:
    """An engine, a prompt that it loads (positive control), and its right answer."""
    one, asked = fleet.engine(path), prompt(next(seeds), num_tokens)
    right = one.cold(asked, 6)
    fleet.warm(path, asked, 6)
    return one, asked, right


def figures(one: Clocked) -> tuple[float, float]:
    return one.engine.metric(LOADED), one.engine.metric(FAILED)


def test_c14_a_load_whose_result_never_arrives(fleet: Fleet) -> None:
    """The server stops right after the lookup was answered: the request is computed after its load's deadline, another
    one that comes meanwhile is kept for no more than one lookup deadline.
    """
    one, asked, right = saved(fleet, "streams")
    other = prompt(next(seeds), 200)
    right_other = one.cold(other, 6)
    fleet.front.at("Lookup answered", lambda: fleet.server.send_signal(19), times=1)
    began = time.monotonic()
    one.engine.clear_local()
    answers = one.engine.generate(asked, other, max_tokens=6)
    took = time.monotonic() - began
    events = one.events(began)
    fleet.mend()

    assert [answer.token_ids for answer in answers] == [right, right_other]
    assert [answer.finish_reason for answer in answers] == ["length", "length"]
    assert took < LOAD_S + 2
    loads = [event for event in events if event["event"] == "load"]
    assert len(loads) == 1, "one was promised a load, and it was not promised again"
    nones = [event["at"] for event in events if event["event"] == "asked" and event["request"] != loads[0]["request"]]
    assert max(nones) - min(nones) < SLACK * LOOKUP_S + loads[0]["timeout"]


def test_c14_on_mapped_slots_a_stopped_server_does_not_stop_the_load(fleet: Fleet) -> None:
    one, asked, right = saved(fleet, "mapped slots")
    events_since = time.monotonic()
    stopping = threading.Thread(target=lambda: stop_when_asked(fleet, one, events_since))
    stopping.start()
    answer = one.ask(asked, 6)
    fleet.server.send_signal(18)
    stopping.join()
    fleet.mend()

    assert answer.token_ids == right


def stop_when_asked(fleet: Fleet, one: Clocked, since: float) -> None:
    """Stops the server as soon as a lookup was answered with a hit, or after a second."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        if any(event["event"] == "load" for event in one.events(since)):
            break
    fleet.server.send_signal(19)
    time.sleep(0.3)


def tracebacks(log: str) -> list[str]:
    """But for the one of vLLM's own warm-up, which misses a tokenizer."""
    return [line for line in log.splitlines() if "Traceback" in line and "[base.py:" not in line]


@pytest.mark.parametrize("lost", [{1}, {2, 3}, {0}], ids=["block 1", "two of four", "the first"])
def test_c15_c20_a_block_that_is_lost_between_lookup_and_load(fleet: Fleet, lost: set[int]) -> None:
    """Reported exactly and in time: the answer equals cold, what failed is counted, the engine lives. What lies behind
    the first block that failed is computed, and counts as failed.
    """
    one, asked, right = saved(fleet, "streams", 4 * 32 + 5)
    before = figures(one)
    fleet.front.lose_payloads = frozenset(lost)
    began = time.monotonic()
    answer = one.ask(asked, 6)
    ended = [event for event in one.events(began) if event["event"] == "loaded"]
    fleet.mend()

    assert answer.token_ids == right
    assert [event["failed"] for event in ended] == [len(lost)], "its failed blocks, when its load was reported"
    assert figures(one) == (before[0] + 32 * min(lost), before[1] + 32 * (4 - min(lost)))
    assert one.ask(asked, 6).token_ids == right


def test_c20_a_connection_that_is_reset_in_mid_stream(fleet: Fleet) -> None:
    one, asked, right = saved(fleet, "streams", 4 * 32 + 5)
    fleet.front.at("Get chunk 2", fleet.tcp_proxy.cut, times=1)
    answer = one.ask(asked, 6)
    fleet.mend()

    assert answer.token_ids == right
    fleet.warm("streams", asked, 6)


@pytest.mark.parametrize("path", PATHS)
def test_c41_c68_a_server_that_is_killed_and_started_again(fleet: Fleet, path: str) -> None:
    """Five requests meanwhile: right, the first kept for at most a deadline, the next ones not at all; then it hits
    again by itself, with one log line per process and change of state: in doubt, lost. An engine survives the death of
    the server whose memory it has mapped.
    """
    one, asked, right = saved(fleet, path)
    lines = one.log.count("running uncached")
    before = shared_memory()
    fleet.server.kill()
    prices = []
    for _ in range(5):
        answers: list[Any] = []
        prices.append(one.price(lambda found=answers: found.append(one.ask(asked, 6))))
        assert answers[0].token_ids == right
    fleet.server.start()
    back = time.monotonic()
    fleet.warm(path, asked, 6)
    took = time.monotonic() - back

    assert prices[0].none_s < SLACK * LOOKUP_S
    assert [price.none_s + price.load_s for price in prices[1:]] == [0.0] * 4
    assert took < 3 * RETURN_S
    num_lines = one.log.count("running uncached") - lines
    assert num_lines <= 2 * 2, "scheduler side and worker; to each a call may fail before its line is seen to be lost"
    assert shared_memory() == before, "nothing is left in /dev/shm"
    assert tracebacks(one.log) == []


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir() if "prefixd" in entry.name}


def test_c43_saves_that_fail(fleet: Fleet) -> None:
    """RESOURCE_EXHAUSTED for every put: answers are right, the drops are counted, no traceback, one line in the log."""
    one = fleet.streams
    fleet.front.at("Put", fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the pool is full"))
    dropped, lines = one.engine.metric(DROPPED), one.log.count("the pool is full")
    for _ in range(3):
        asked = prompt(next(seeds), 300)
        right = one.cold(asked, 6)
        assert one.ask(asked, 6).token_ids == right
        assert one.ask(asked, 6).token_ids == right
    wait_until(lambda: one.ask([5, 6, 7], 2) and one.engine.metric(DROPPED) >= dropped + 3 * 9, 10, "drops are counted")
    fleet.mend()

    assert one.log.count("the pool is full") - lines <= 1
    assert tracebacks(one.log) == []


@pytest.mark.parametrize("path", PATHS)
def test_c49_a_black_hole_costs_one_deadline_however_much_a_request_asks_of_it(fleet: Fleet, path: str) -> None:
    """Lookup, load and 28 saves of one request; then nothing for those that come while the circuit is open."""
    one, _, _ = saved(fleet, path)
    fresh = [prompt(next(seeds), 900) for _ in range(4)]
    right = [one.cold(asked, 4) for asked in fresh]
    fleet.proxy(path).stop()
    answers: list[Any] = []
    prices = [one.price(lambda asked=asked: answers.append(one.ask(asked, 4))) for asked in fresh]
    fleet.mend()

    assert [answer.token_ids for answer in answers] == right
    assert prices[0].none_s < SLACK * LOOKUP_S
    assert [price.none_s + price.load_s for price in prices[1:]] == [0.0] * 3


def test_c54_a_slow_lookup_does_not_stop_those_who_decode(fleet: Fleet) -> None:
    """Lookups take 200 ms; one request decodes, ten prompts come: each costs one lookup for all its blocks, the
    scheduler stands still a moment per step, and a deadline later nobody is asked.
    """
    one = fleet.streams
    decoding = prompt(next(seeds), 40)
    prompts = [prompt(next(seeds), 100) for _ in range(10)]
    one.engine.clear_local()
    one.engine.generate(decoding, max_tokens=300)  # compiled, warm
    one.engine.clear_local()
    fleet.front.at("Lookup", lambda: time.sleep(0.2))
    asked_before = fleet.front.calls["Lookup"]
    began = time.monotonic()
    one.engine.generate(decoding, *prompts, sampling=[{"max_tokens": 300}, *({"max_tokens": 1} for _ in prompts)])
    events = one.events(began)
    fleet.mend()

    assert 1 <= fleet.front.calls["Lookup"] - asked_before <= 11
    per_step = sum(e["took"] for e in events if e["event"] == "asked" and e["answer"] is None)
    num_steps = sum(1 for e in events if e["event"] == "step")
    nones = [e for e in events if e["event"] == "asked" and e["answer"] is None]
    assert nones, "positive control: they were kept waiting"
    assert max(e["at"] for e in nones) - min(e["at"] for e in nones) < SLACK * 4 * LOOKUP_S
    assert per_step / num_steps < SLACK * 0.001


def test_c57_a_hit_of_which_nothing_arrives_is_no_hit(fleet: Fleet) -> None:
    """Every load fails: not one token counts as loaded, all that were promised count as failed."""
    one, asked, right = saved(fleet, "streams")
    before = figures(one)
    promised = one.engine.metric("vllm:prefixd_promised_tokens")
    fleet.front.at("Get", fail(grpc.StatusCode.INTERNAL, "broken"))
    answers = [one.ask(asked, 6) for _ in range(3)]
    one.engine.generate_one([7, 8, 9], max_tokens=2)
    promised = one.engine.metric("vllm:prefixd_promised_tokens") - promised
    after = figures(one)
    fleet.mend()

    assert [answer.token_ids for answer in answers] == [right] * 3
    assert promised >= 288
    assert after == (before[0], before[1] + promised)


@pytest.mark.parametrize("path", PATHS)
def test_c19_a_reset_while_the_server_is_down(fleet: Fleet, path: str) -> None:
    """It returns True (vLLM raises on False), and nothing of before is hit afterwards."""
    one, asked, right = saved(fleet, path)
    fleet.server.kill()
    one.engine.clear_local(connector=True)
    fleet.mend()
    before = figures(one)
    fresh = one.ask(asked, 6)

    assert fresh.token_ids == right
    assert figures(one) == before
    fleet.warm(path, asked, 6)


def rounds(fleet: Fleet, path: str, number: int) -> None:
    """Kills the server at a moment of a round of requests that save and load, and starts it again."""
    one, prompts = fleet.engine(path), [prompt(next(seeds), 100 + 60 * i) for i in range(6)]
    rights = [one.cold(asked, 8) for asked in prompts]
    slowest = 0.0
    for turn in range(number):
        one.engine.clear_local()
        delay_s = (turn % 7) * 0.02
        killing = threading.Thread(target=lambda delay_s=delay_s: (time.sleep(delay_s), fleet.server.kill()))
        killing.start()
        answers = one.engine.generate(*prompts, max_tokens=8)
        killing.join()
        assert [answer.token_ids for answer in answers] == rights, "0 wrong bytes"
        assert {answer.finish_reason for answer in answers} == {"length"}, "0 engine errors under `recompute`"
        fleet.server.start()
        back = time.monotonic()
        fleet.warm(path, prompts[turn % 6], 8)
        slowest = max(slowest, time.monotonic() - back)
        one.engine.clear_local()
        assert [answer.token_ids for answer in one.engine.generate(*prompts, max_tokens=8)] == rights
    assert slowest < 3 * RETURN_S, "first good hit after return"
    assert mappings(one) <= 2 + 4, "segments of dead servers are unmapped"


def mappings(one: Clocked) -> int:
    """Segments of servers that the engine's processes have mapped, tables of generations included."""
    group = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (entry / "stat").exists() and _group_of(entry) == one.engine.pid
    ]
    return sum(
        sum("memfd:" in line and "prefixd" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
        for pid in group
    )


def _group_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[2])
    except OSError:
        return 0


@pytest.mark.parametrize("path", PATHS)
def test_kill_9_during_saves_and_loads(fleet: Fleet, path: str) -> None:
    rounds(fleet, path, 5)


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS)
def test_kill_9_a_hundred_times(fleet: Fleet, path: str) -> None:
    rounds(fleet, path, 50)
