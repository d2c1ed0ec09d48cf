"""What a request is promised: one question, one answer, at most one load, and nothing held afterwards."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from tests.fakes import FakeServer
from tests.scheduler.harness import Engine, answer_to

PROMPT = list(range(100, 200))  # 100 tokens: 6 full blocks of 16


def filled(model: Path, prompt: list[int] = PROMPT, **shape: Any) -> Engine:
    """An engine whose server holds the full blocks of `prompt`, and whose own cache is empty."""
    engine = Engine(model, FakeServer(), **shape)
    engine.finish("first", prompt)
    assert len(engine.server.blocks) == len(prompt) // 16
    engine.clear_local()
    engine.connector.matches.clear()
    for name in engine.server.calls:
        engine.server.calls[name] = 0
    return engine


def matches_of(engine: Engine, request_id: str) -> list[tuple[int | None, bool]]:
    return [answer for asked, _, answer in engine.connector.matches if asked == request_id]


def test_a_second_request_hits(model: Path, shape: dict[str, Any]) -> None:
    """The positive control of everything here: 96 of 100 tokens come from the server."""
    engine = filled(model, **shape)
    computed = engine.worker.num_computed_tokens
    engine.finish("second", PROMPT)

    assert matches_of(engine, "second") == [(96, True)]
    assert engine.worker.num_loaded_blocks == 6
    assert engine.worker.num_computed_tokens - computed <= 4 + 2, "four tokens were left; steps in flight may add some"
    engine.check_idle()


@pytest.mark.parametrize(("num_tokens", "hit"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (64, 48), (65, 64)])
def test_at_least_one_token_is_computed(model: Path, shape: dict[str, Any], num_tokens: int, hit: int) -> None:
    """A prompt that is present as a whole hits floor((n - 1) / block_size) blocks (C08)."""
    engine = filled(model, PROMPT[:num_tokens], **shape)
    engine.finish("second", PROMPT[:num_tokens])

    assert engine.worker.num_loaded_blocks * 16 == hit
    engine.check_idle()


@pytest.mark.parametrize(("local", "external", "answer"), [(32, 96, 64), (64, 32, 0), (96, 96, 0), (0, 96, 96)])
def test_what_the_engine_has_already_is_not_counted(
    model: Path, shape: dict[str, Any], local: int, external: int, answer: int
) -> None:
    """The answer is what lies beyond the local hit, never negative, and synchronous when it is none (C09)."""
    engine = filled(model, **shape)
    for key in engine.keys_of(engine.requests["first"], PROMPT)[external // 16 :]:
        engine.server.drop(key)
    request = engine.add("second", PROMPT)

    assert engine.connector.get_num_new_matched_tokens(request, local) == (answer, answer > 0)


def test_blocks_that_only_the_engine_has_are_saved(model: Path, shape: dict[str, Any]) -> None:
    """Local 64, external 32: nothing to load, and the server gets blocks 2 to 5 back (C09)."""
    engine = Engine(model, FakeServer(), **shape)
    engine.finish("first", PROMPT)
    keys = engine.keys_of(engine.requests["first"], PROMPT)
    for key in keys[2:]:
        engine.server.drop(key)
    second = [*PROMPT[:64], *range(36)]
    engine.finish("second", second)

    assert ("second", 64, (0, False)) in engine.connector.matches
    assert engine.worker.num_loaded_blocks == 0
    expected = {*keys[:4], *engine.keys_of(engine.requests["second"], second)}
    assert engine.check_store() == expected
    engine.check_idle()


@pytest.mark.parametrize("num_waits", [6, 42])
def test_asking_again_costs_nothing_and_changes_nothing(model: Path, shape: dict[str, Any], num_waits: int) -> None:
    """A request that cannot be admitted is asked about in every step: one RPC, equal answers, one load (C11)."""
    engine = filled(model, num_blocks=14, **shape)
    engine.add("long", range(300, 410), max_tokens=num_waits)  # 7 blocks at first, 10 at most, of 13
    engine.steps(2)
    lookups = engine.server.calls["lookup"]
    engine.add("waiting", PROMPT)
    engine.run()

    answers = matches_of(engine, "waiting")
    assert len(answers) >= num_waits - 4
    assert set(answers) == {(96, True)}
    assert engine.server.calls["lookup"] == lookups + 1
    assert sum(len(plan.loads) for plan in engine.worker.plans) == 1
    engine.check_answers()
    engine.check_idle()


def test_a_lease_is_not_kept_by_a_request_that_was_never_admitted(model: Path, shape: dict[str, Any]) -> None:
    """Aborted in the waiting queue (C11)."""
    engine = filled(model, num_blocks=14, **shape)
    engine.add("long", range(300, 410), max_tokens=30)
    engine.steps(2)
    engine.add("waiting", PROMPT)
    engine.steps(5)
    assert engine.server.held_leases(), "positive control"
    engine.abort("waiting")
    engine.run()

    engine.check_idle()


def test_an_answer_under_way_is_waited_for_without_asking_again(model: Path, shape: dict[str, Any]) -> None:
    """(None, False) until it is there; other requests run meanwhile; one lookup is outstanding."""
    engine = filled(model, **shape)
    engine.server.hold()
    engine.add("second", PROMPT)
    engine.add("other", range(8), max_tokens=12)
    for _ in range(10):
        engine.step()
        assert engine.server.num_outstanding() == 1
    assert set(matches_of(engine, "second")) == {(None, False)}
    assert len(engine.answer("other")) >= 5, "the others are not kept waiting"
    engine.server.let_go()
    engine.run()

    assert engine.worker.num_loaded_blocks == 6
    engine.check_answers()
    engine.check_idle()


def test_aborted_while_its_lookup_is_out(model: Path, shape: dict[str, Any]) -> None:
    """The lease of an answer that nobody takes ends by its deadline."""
    engine = filled(model, **shape)
    engine.server.hold()
    engine.add("second", PROMPT)
    engine.steps(3)
    engine.abort("second")
    engine.server.let_go()
    engine.run()
    engine.server.clock.advance(FakeServer.LEASE_S)

    engine.check_idle()


def test_a_load_that_the_engine_did_not_choose_is_not_made(model: Path, shape: dict[str, Any]) -> None:
    """update_state_after_alloc(..., 0) with real blocks: no load in any step, none is reported as ended, and the lease
    is let go (C10).
    """
    engine = filled(model, **shape)
    request = engine.add("second", PROMPT)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (96, True)
    assert engine.server.held_leases()
    blocks = SimpleNamespace(get_block_ids=lambda: (list(range(1, 8)),))
    engine.connector.update_state_after_alloc(request, blocks, 0)
    plan = engine.connector.build_connector_meta(SchedulerOutput.make_empty())

    assert plan.loads == ()
    assert not engine.server.held_leases()
    engine.run()
    assert all(plan.loads == () for plan in engine.worker.plans)
    assert engine.worker.num_loaded_blocks == 0
    engine.check_answers()
    engine.check_idle()


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}])
def test_a_request_that_must_compute_its_prompt_loads_nothing(
    model: Path, shape: dict[str, Any], fields: dict[str, Any]
) -> None:
    """vLLM would throw the hit away: nothing is promised, nothing held, and blocks that are absent are saved (C55)."""
    engine = filled(model, **shape)
    fields = {"skip_reading_prefix_cache": True, **fields}
    engine.finish("second", PROMPT, **fields)
    engine.finish("third", range(50), **fields)

    assert set(matches_of(engine, "second")) == {(0, False)}
    assert engine.worker.num_loaded_blocks == 0
    assert not engine.server.leases, "no lease was ever asked for"
    assert len(engine.server.blocks) == 6 + 3
    engine.check_idle()


def test_requests_of_one_prefix_share_one_load(model: Path, shape: dict[str, Any]) -> None:
    """Sixteen at once: the blocks are loaded once, the others then hit them locally (C53)."""
    engine = filled(model, num_blocks=200, max_num_seqs=16, **shape)
    engine.worker.load_delay = 3
    for number in range(16):
        engine.add(f"r{number}", PROMPT, max_tokens=3)
    engine.run()

    assert engine.worker.num_loaded_blocks == 6
    engine.check_answers()
    engine.check_idle()


def test_nobody_waits_for_anothers_load_longer_than_a_load_may_take(model: Path, shape: dict[str, Any]) -> None:
    """The first one's load does not end: after the deadline of a load the second makes its own (C53)."""
    engine = filled(model, extra_config={"load_timeout_ms": 5000}, **shape)
    engine.worker.withhold_loads = True
    engine.add("first of two", PROMPT)
    engine.step()
    engine.add("second of two", PROMPT)
    engine.steps(5)
    engine.server.clock.advance(4.9)
    engine.steps(5)
    assert set(matches_of(engine, "second of two")) == {(None, False)}
    engine.server.clock.advance(0.2)
    engine.steps(3)
    assert matches_of(engine, "second of two")[-1] == (96, True)
    engine.worker.withhold_loads = False
    engine.run()

    engine.check_answers()
    engine.check_idle()


@pytest.mark.parametrize("num_tokens", [96, 97, 100, 111, 112])
def test_a_local_hit_as_long_as_can_be_is_not_asked_about_at_admission(
    model: Path, shape: dict[str, Any], num_tokens: int
) -> None:
    """Also when only the tail of a block is left: 0 lookups on the path (C54). Off it, one without a promise."""
    engine = Engine(model, FakeServer(), **shape)
    prompt = list(range(num_tokens))
    engine.finish("first", prompt)
    lookups, waits = engine.server.calls["lookup"], engine.server.num_waits
    request = engine.add("second", prompt)
    local = (num_tokens - 1) // 16 * 16
    assert engine.connector.get_num_new_matched_tokens(request, local) == (0, False)
    assert engine.server.calls["lookup"] == lookups
    engine.run()

    assert engine.server.calls["lookup"] == lookups + 1
    assert engine.server.num_waits == waits
    assert not engine.server.leases
    engine.check_idle()


def test_a_late_answer_stops_nobody(model: Path, shape: dict[str, Any]) -> None:
    """Ten prompts while a request decodes and no lookup is answered: one RPC each, however many blocks, and the
    scheduler stands still at most once per step, a moment (C54).
    """
    engine = filled(model, num_blocks=200, max_num_seqs=16, **shape)
    engine.add("decoding", range(8), max_tokens=60)
    engine.steps(3)
    engine.server.hold()
    for number in range(10):
        engine.add(f"r{number}", [*PROMPT[:96], *range(number, number + 96)], max_tokens=3)
    decoded, waits = len(engine.answer("decoding")), engine.server.num_waits
    engine.steps(20)

    assert engine.server.num_outstanding() == 10
    assert engine.server.num_waits - waits <= 20
    assert len(engine.answer("decoding")) >= decoded + 20, "a token in every step"
    engine.server.let_go()
    engine.run()
    assert engine.server.calls["lookup"] == 10
    engine.check_answers()
    engine.check_idle()


def test_a_load_writes_only_what_the_engine_lacks(model: Path, shape: dict[str, Any]) -> None:
    """Local 48, external 64: the block [48, 64) is loaded; the pages of [0, 48), shared with others, are not (C40)."""
    engine = Engine(model, FakeServer(), **shape)
    engine.finish("theirs", PROMPT[:64])
    engine.clear_local()
    engine.add("sharing", PROMPT[:50], max_tokens=30, kv_transfer_params={"prefixd.load": False})
    engine.steps(4)
    shared = engine.scheduler.kv_cache_manager.get_block_ids("sharing")[0][:3]
    before = [list(engine.worker.pages[block_id]) for block_id in shared]
    engine.add("second", [*PROMPT[:64], 1, 2, 3])
    engine.run()

    assert engine.connector.matches[-1] == ("second", 48, (16, True))
    loads = [load for plan in engine.worker.plans for load in plan.loads]
    assert [len(load.block_ids) for load in loads] == [1]
    assert not set(loads[0].block_ids) & set(shared)
    assert [engine.worker.pages[block_id] for block_id in shared] == before
    engine.check_answers()
    engine.check_idle()


def test_a_hole_ends_the_hit_and_is_filled(model: Path, shape: dict[str, Any]) -> None:
    """Blocks 0, 1, 3, 4, 5 present: two are hit, block 2 is saved again, the next request hits all (C39)."""
    engine = filled(model, **shape)
    keys = engine.keys_of(engine.requests["first"], PROMPT)
    engine.server.drop(keys[2])
    engine.finish("second", PROMPT)
    assert matches_of(engine, "second") == [(32, True)]
    engine.clear_local()
    engine.finish("third", PROMPT)

    assert matches_of(engine, "third") == [(96, True)]
    engine.check_store()
    engine.check_idle()


def test_salts_separate(model: Path, shape: dict[str, Any]) -> None:
    """Salts a, b, none, a: hits 0, 0, 0, all; a salt is not a LoRA's name (C16)."""
    engine = Engine(model, FakeServer(), **shape)
    hits = []
    for number, salt in enumerate(["a", "b", None, "a"]):
        engine.finish(f"r{number}", PROMPT, cache_salt=salt)
        hits.append(matches_of(engine, f"r{number}")[-1][0])
        engine.clear_local()

    assert hits == [0, 0, 0, 96]
    engine.check_store()


@pytest.mark.parametrize("mixed", [False, True], ids=["embeddings", "embeddings among token ids"])
def test_prompt_embeddings_are_bypassed(model: Path, shape: dict[str, Any], mixed: bool) -> None:
    """Equal placeholders, other vectors: neither looked up nor saved, and no exception (C64)."""
    engine = Engine(model, FakeServer(), **shape)
    for number in range(2):
        request_id, embeds = f"r{number}", torch.full((100, 8), float(number))
        fields = {"prompt_token_ids": PROMPT, "prompt_is_token_ids": [True, False] * 50} if mixed else {}
        engine.add(request_id, None, max_tokens=3, prompt_embeds=embeds, **fields)
        engine.run()

    assert len(engine.finished) == 2
    assert engine.server.blocks == {}
    assert engine.server.calls["lookup"] == 0
    assert all(answer == (0, False) for _, _, answer in engine.connector.matches)


@pytest.mark.parametrize("trouble", ["down", "failing", "leases_refused"])
def test_without_an_answer_everything_is_computed(model: Path, shape: dict[str, Any], trouble: str) -> None:
    """Nobody to ask, no answer, no promise: a miss, without waiting; and blocks are saved as far as one may know."""
    engine = filled(model, **shape)
    setattr(engine.server, trouble, True)
    engine.finish("second", PROMPT, max_tokens=20)

    assert set(matches_of(engine, "second")) == {(0, False)}
    assert engine.worker.num_loaded_blocks == 0
    engine.check_store()
    engine.check_idle()


def test_workers_that_are_not_attached_yet_are_waited_for_a_moment(model: Path, shape: dict[str, Any]) -> None:
    """After a server's start its first answers may come before the workers are in: asked again, not for ever."""
    engine = filled(model, **shape)
    engine.server.workers_missing = True
    engine.add("second", PROMPT)
    engine.add("third", PROMPT)
    engine.steps(4)
    assert set(matches_of(engine, "second")) == {(None, False)}
    engine.server.workers_missing = False
    engine.step()
    assert matches_of(engine, "second")[-1] == (96, True)
    engine.run()
    engine.clear_local()

    engine.server.workers_missing = True
    engine.server.clock.advance(60)
    engine.finish("fourth", PROMPT)
    assert set(matches_of(engine, "fourth")) == {(0, False)}
    engine.check_answers()
    engine.check_idle()


def test_a_lease_that_runs_out_is_asked_for_again(model: Path, shape: dict[str, Any]) -> None:
    """A request that waits longer than a lease loads under a new one, or after a renewal; never under a dead one."""
    engine = filled(model, num_blocks=14, **shape)
    engine.add("long", range(300, 410), max_tokens=40)
    engine.steps(2)
    engine.add("waiting", PROMPT)
    while "waiting" not in engine.finished:
        engine.step()
        engine.server.clock.advance(0.5)

    assert engine.worker.num_loads_without_lease == 0
    assert engine.server.calls["lookup"] < 12
    assert engine.worker.num_loaded_blocks == 6
    engine.run()
    engine.server.clock.advance(60)
    engine.check_answers()
    engine.check_idle()


def test_a_restarted_server_gets_hot_prefixes_back(model: Path, shape: dict[str, Any]) -> None:
    """Blocks that hit in the engine's own cache are asked for too, and saved where they are absent."""
    engine = Engine(model, FakeServer(), **shape)
    engine.finish("first", PROMPT)
    engine.server.restart()
    engine.finish("second", [*PROMPT, *range(20)])

    assert ("second", 96, (0, False)) in engine.connector.matches
    assert len(engine.check_store()) == 7
    engine.check_idle()


def test_a_restarted_server_breaks_the_promises_of_the_old_one(model: Path, shape: dict[str, Any]) -> None:
    """Between lookup and load: the load fails and the request is computed."""
    engine = filled(model, **shape)
    engine.worker.load_delay = 2
    engine.add("second", PROMPT, max_tokens=5)
    engine.step()
    engine.server.restart()
    engine.run()

    assert engine.worker.num_loaded_blocks == 0
    assert engine.answer("second") == answer_to(PROMPT, 5)
    engine.check_store()
    engine.check_idle()
