"""Real engines, one server: a prompt computed once is loaded, and every answer equals that of an engine without us.

Numbers C01 … are those of the acceptance cases. `cold(prompt, n)` is the right answer. All figures are for blocks of
32 tokens. What was loaded is read from the workers' own counters, never from what the scheduler side promised.
"""

import contextlib
import itertools

import pytest

from tests.engine.conftest import ARRIVAL_S, Cold, Early, Recorded
from tests.engine.engine import Engine, wait_until
from tests.engine.oracle import Records
from tests.engine.prefixd import Prefixd
from tests.models import prompt

LOADED = "vllm:prefixd_loaded_tokens"
FAILED = "vllm:prefixd_load_failed_tokens"
SAVED = "vllm:prefixd_saved_blocks"
DROPPED = "vllm:prefixd_dropped_blocks"

seeds = itertools.count(1)


def settled_blocks(server: Prefixd, more_than: int, expected: int) -> int:
    """The number of blocks beyond `more_than`, once `expected` are there or the saver had its time."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: server.num_blocks() - more_than >= expected, 5, f"{expected} more blocks")
    return server.num_blocks() - more_than


def loaded_by(engine: Engine, asked: list[int], max_tokens: int) -> tuple[list[int], float, int]:
    """After "clear local": (the answer, tokens that the workers loaded for it, cached tokens as reported)."""
    engine.clear_local()
    before = engine.metric(LOADED)
    answer = engine.generate_one(asked, max_tokens=max_tokens)
    return answer.token_ids, engine.metric(LOADED) - before, answer.num_cached_tokens


def test_c42_an_engine_without_a_server_serves_and_hits_soon_after_its_start(early: Early, cold: Cold) -> None:
    right = cold(prompt(4200, 100), 4)

    assert [answer.token_ids for answer in early.alone] == [right, right]
    assert [answer.num_cached_tokens for answer in early.alone] == [0, 0]
    assert early.arrival_s < ARRIVAL_S
    warnings = [line for line in early.engine.log.read_text().splitlines() if "running uncached" in line]
    assert len(warnings) == 2, f"one line per process: scheduler side and worker\n{warnings}"


def test_c01_a_prompt_of_several_chunks_is_saved_and_loaded_whole(early: Early, cold: Cold, server: Prefixd) -> None:
    asked, before = prompt(next(seeds), 500), server.num_blocks()
    first = early.engine.generate_one(asked, max_tokens=1)

    assert settled_blocks(server, before, 15) == 15
    assert first.num_cached_tokens == 0
    assert loaded_by(early.engine, asked, 1) == (cold(asked, 1), 480, 480)


def test_c07_the_block_that_fills_on_the_last_step_is_saved(early: Early, cold: Cold, server: Prefixd) -> None:
    asked, before = prompt(next(seeds), 60), server.num_blocks()
    first = early.engine.generate_one(asked, max_tokens=5)  # the KV of 64 tokens: the last one sampled has none

    assert first.token_ids == cold(asked, 5)
    assert settled_blocks(server, before, 2) == 2
    next_turn = [*asked, *first.token_ids, *prompt(next(seeds), 5)]
    assert loaded_by(early.engine, next_turn, 8) == (cold(next_turn, 8), 64, 64)


@pytest.mark.parametrize(("num_tokens", "hit"), [(32, 0), (64, 32), (96, 64), (33, 32), (31, 0)])
def test_c08_a_prompt_that_is_cached_in_full_leaves_a_token_to_compute(
    early: Early, cold: Cold, server: Prefixd, num_tokens: int, hit: int
) -> None:
    asked, before = prompt(next(seeds), num_tokens), server.num_blocks()
    early.engine.generate_one(asked, max_tokens=1)
    settled_blocks(server, before, num_tokens // 32)

    assert loaded_by(early.engine, asked, 4) == (cold(asked, 4), hit, hit)


def test_c60_pages_loaded_with_nothing_else_running_are_what_was_saved(
    early: Early, cold: Cold, server: Prefixd
) -> None:
    asked, before = prompt(next(seeds), 300), server.num_blocks()
    early.engine.generate_one(asked, max_tokens=1)
    settled_blocks(server, before, 9)
    known = len(Records(early.folder).of("loaded"))

    assert loaded_by(early.engine, asked, 6) == (cold(asked, 6), 288, 288)
    records = Records(early.folder)
    loaded = {line["key"]: line["sha256"] for line in records.of("loaded")[known:]}
    assert len(loaded) == 9
    assert loaded == {key: records.digests("saved")[key][0] for key in loaded}
    assert loaded == records.payload_digests(server, list(loaded))


def test_many_requests_at_once_equal_cold(early: Early, cold: Cold) -> None:
    """Shared beginnings, loads and computation side by side, more requests than sequences."""
    common = prompt(next(seeds), 200)
    asked = [[*common, *prompt(next(seeds), 10 + 17 * i)] for i in range(6)]
    asked += [prompt(next(seeds), 150), asked[0]]
    for _ in range(2):
        early.engine.clear_local()
        answers = early.engine.generate(*asked, max_tokens=12)
        assert [answer.token_ids for answer in answers] == [cold(one, 12) for one in asked]


def test_a_layer_is_in_its_slot_when_its_hook_returns(early: Early) -> None:
    """Then so is layer i before the hook of layer i+1 returns."""
    early.engine.generate_one(prompt(next(seeds), 100), max_tokens=1)
    layers = Records(early.folder).of("layer")

    assert {line["in_slot"] for line in layers} == {True}
    assert [line["layer"] for line in layers] == [0, 1, 2, 3] * (len(layers) // 4)


# What each hook of vLLM's calls inside, where it raises, and how often it does.
WORKER_FAULTS = {
    "begin_step": 10**6,
    "save_layer": 10**6,
    "finish_saves": 10**6,
    "start_loads": 10**6,
    "take_finished": 5,  # raised for ever, no load would ever be reported
    "take_failed_blocks": 10**6,
    "take_counts": 10**6,
}
SCHEDULER_FAULTS = {
    "num_new_matched_tokens": 10**6,
    "after_alloc": 10**6,
    "build_plan": 10**6,
    "loads_ended": 1,  # raised again while what it held is given back, the scheduler side switches itself off
    "request_finished": 10**6,
}


@pytest.mark.parametrize("method", [*WORKER_FAULTS, *SCHEDULER_FAULTS])
def test_a_hook_that_raises_leaves_the_engine_right(early: Early, cold: Cold, server: Prefixd, method: str) -> None:
    """While it raises, a request that could load and one that could save are answered right; afterwards both hit."""
    engine, number = early.engine, next(seeds)
    saved, fresh, before = prompt(next(seeds), 100), prompt(next(seeds), 100), server.num_blocks()
    engine.generate_one(saved, max_tokens=1)
    settled_blocks(server, before, 3)
    expired = server.stats().counters["leases_expired"]
    engine.clear_local()

    early.break_(method, {**WORKER_FAULTS, **SCHEDULER_FAULTS}[method], number)
    answers = engine.generate(saved, fresh, max_tokens=40)
    early.mend()
    engine.generate_one(prompt(next(seeds), 5), max_tokens=2)  # figures that were held back are counted

    assert [answer.token_ids for answer in answers] == [cold(saved, 40), cold(fresh, 40)]
    assert loaded_by(engine, saved, 4) == (cold(saved, 4), 96, 96)
    assert loaded_by(engine, fresh, 4)[0] == cold(fresh, 4)
    wait_until(lambda: loaded_by(engine, fresh, 4) == (cold(fresh, 4), 96, 96), 5, "the fresh one is saved in the end")
    wait_until(lambda: server.stats().leased_bytes == 0, 5, "all leases are back")
    assert server.stats().counters["leases_expired"] == expired


def test_after_all_that_raised_no_slot_is_missing(early: Early, cold: Cold, server: Prefixd) -> None:
    """As many blocks as there are slots reserved ahead (256) are saved in short steps, none is dropped."""
    dropped, before = early.engine.metric(DROPPED), server.num_blocks()
    asked = [prompt(next(seeds), 900) for _ in range(9)]
    for one in asked:
        early.engine.generate_one(one, max_tokens=1)

    assert settled_blocks(server, before, 9 * 28) == 9 * 28
    assert early.engine.metric(DROPPED) == dropped
    assert loaded_by(early.engine, asked[8], 2) == (cold(asked[8], 2), 896, 896)


def test_two_engines_alive_at_once_hit_what_the_other_saved(
    early: Early, streams: Engine, cold: Cold, server: Prefixd
) -> None:
    """One with mapped slots, one with streams, both ways; nothing is restarted."""
    failed = early.engine.metric(FAILED)  # on purpose, above
    for one, other in ((early.engine, streams), (streams, early.engine)):
        asked, before = prompt(next(seeds), 500), server.num_blocks()
        one.generate_one(asked, max_tokens=1)
        assert settled_blocks(server, before, 15) == 15
        assert loaded_by(other, asked, 8) == (cold(asked, 8), 480, 480)
        assert loaded_by(one, asked, 8) == (cold(asked, 8), 480, 480)
    assert (early.engine.metric(FAILED), streams.metric(FAILED)) == (failed, 0)


def test_a_preempted_and_resumed_request_is_saved_under_its_whole_sequence(
    small: Recorded, cold: Cold, server: Prefixd
) -> None:
    """Seven blocks for two requests that need five each: one is preempted, and resumed with what it had decoded."""
    both = [prompt(next(seeds), 80), prompt(next(seeds), 80)]
    answers = small.engine.generate(*both, max_tokens=60)

    assert small.engine.metric("vllm:num_preemptions") >= 1
    assert [answer.token_ids for answer in answers] == [cold(one, 60) for one in both]
    for asked, answer in zip(both, answers, strict=True):
        third = [*asked, *answer.token_ids, *prompt(next(seeds), 3)]
        # 139 tokens have KV, 140 are known: four full blocks, the third and fourth with decoded tokens.
        wait_until(lambda third=third: loaded_by(small.engine, third, 6)[1] == 128, 5, "all four blocks are there")
        assert loaded_by(small.engine, third, 6) == (cold(third, 6), 128, 128)


def test_requests_preempted_again_and_again_equal_cold(small: Recorded, cold: Cold) -> None:
    asked = [prompt(next(seeds), 60 + 7 * i) for i in range(6)]
    for _ in range(2):
        small.engine.clear_local()
        answers = small.engine.generate(*asked, max_tokens=50)
        assert [answer.token_ids for answer in answers] == [cold(one, 50) for one in asked]
    assert small.engine.metric(FAILED) == 0


@pytest.mark.parametrize("which", ["early", "small"])
def test_every_payload_is_what_the_engine_held_when_it_was_saved(
    request: pytest.FixtureRequest, server: Prefixd, which: str
) -> None:
    """After all the above: the server's bytes are those of the first save of the key, for every key it has."""
    records = Records(request.getfixturevalue(which).folder)
    saved = records.digests("saved")
    payloads = records.payload_digests(server, list(saved))
    wrong = [key for key, digest in payloads.items() if digest not in saved[key]]
    loads = records.digests("loaded")

    assert wrong == []
    assert len(payloads) > 0.9 * len(saved) > 20
    assert all(digest == payloads[key] for key, digests in loads.items() if key in payloads for digest in digests)
