"""What is saved: every full block once, under the key that names its bytes, whatever the engine did meanwhile."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeServer
from tests.scheduler.harness import SHAPES, Engine, answer_to


@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 31, 32, 40])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 16, 17, 18])
def test_every_block_that_is_computed_is_saved_once(
    model: Path, shape: dict[str, Any], num_prompt_tokens: int, max_tokens: int
) -> None:
    """floor((prompt + answer - 1) / block_size): the last token of an answer has no KV (C07).

    With three steps in flight it may have: the step after the last was computed before the end was known.
    """
    engine = Engine(model, FakeServer(), **shape)
    request = engine.finish("r", range(num_prompt_tokens), max_tokens)

    keys = engine.keys_of(request)
    certain = set(keys[: (num_prompt_tokens + max_tokens - 1) // 16])
    assert certain <= engine.check_store() <= (set(keys) if shape.get("in_flight") == 3 else certain)
    assert engine.server.num_already_present == 0
    engine.check_idle()


def test_the_block_that_fills_on_the_last_step_is_saved(model: Path, shape: dict[str, Any]) -> None:
    """Prompt 60, answer 5, blocks of 32: two blocks, and the next turn of 70 tokens hits 64 (C07)."""
    engine = Engine(model, FakeServer(), block_size=32, **shape)
    first = engine.finish("first", range(60), max_tokens=5)
    assert len(engine.check_store()) == 2
    engine.clear_local()
    engine.finish("second", [*range(60), *first.output_token_ids, 1, 2, 3, 4, 5])

    assert engine.connector.matches[-1] == ("second", 0, (64, True))
    engine.check_idle()


def test_a_step_that_fills_no_block_costs_nothing(model: Path, shape: dict[str, Any]) -> None:
    """No RPC, no gather, no name; a step that fills one has exactly that one, though it allocates none for it."""
    engine = Engine(model, FakeServer(), **shape)
    engine.add("r", range(40), max_tokens=200)
    engine.steps(4)
    engine.outputs.clear()
    calls = dict(engine.server.calls)
    engine.steps(160)

    plans = [output.kv_connector_metadata for output in engine.outputs]
    assert engine.server.calls == calls
    assert sum(len(plan.saves) for plan in plans) == 10
    for plan, output in zip(plans, engine.outputs, strict=True):
        computed = output.scheduled_cached_reqs.num_computed_tokens[0] + 1
        assert len(plan.saves) == (computed % 16 == 0)
        assert plan.loads == ()
        if plan.saves:
            assert output.scheduled_cached_reqs.new_block_ids == [None]
    assert sum(len(plan.names) for plan in plans) == sum(save.name is None for plan in plans for save in plan.saves)


@pytest.mark.parametrize("max_num_batched_tokens", [16, 24, 48, 100])
def test_chunks_of_a_prompt_are_saved_like_a_whole_one(
    model: Path, shape: dict[str, Any], max_num_batched_tokens: int
) -> None:
    """Prefill chunks beyond the first are in another list of SchedulerOutput (C01)."""
    engine = Engine(model, FakeServer(), max_num_batched_tokens=max_num_batched_tokens, **shape)
    request = engine.finish("r", range(250), max_tokens=3)

    assert engine.check_store() == set(engine.keys_of(request)[:15])
    engine.check_idle()


def test_a_second_prompt_saves_only_what_is_new(model: Path, shape: dict[str, Any]) -> None:
    """What the lookup found, and what was loaded, is not saved again."""
    engine = Engine(model, FakeServer(), **shape)
    engine.finish("first", range(100))
    engine.clear_local()
    engine.worker.plans.clear()
    engine.finish("second", [*range(100), *range(60)])

    names = [save.name for plan in engine.worker.plans for save in plan.saves]
    assert [name.depth for name in names if name is not None] == [6, 7, 8, 9]
    assert engine.server.num_already_present == 0
    engine.check_store()


def test_a_stop_token_ends_an_answer_within_a_block(model: Path, shape: dict[str, Any]) -> None:
    """The step in flight at the stop computed the stop token's KV: its block is named at the end, and no other."""
    prompt = list(range(60))
    for length in range(1, 12):
        engine = Engine(model, FakeServer(), **shape)
        stop = answer_to(prompt, length)[-1]
        request = engine.add("r", prompt, max_tokens=40, stop_token_ids=[stop])
        engine.run()
        assert engine.finished == {"r": "stop"}
        assert request.num_output_tokens <= length
        keys = engine.keys_of(request)

        num_computed = request.num_tokens - (1 if shape.get("in_flight", 1) == 1 else 0)
        assert engine.check_store() == set(keys[: num_computed // 16])
        engine.check_idle()


def test_aborted_requests_leave_right_blocks_only(model: Path, shape: dict[str, Any]) -> None:
    """Aborted at every step of its life, with whatever was in flight."""
    for num_steps in range(30):
        engine = Engine(model, FakeServer(), **shape)
        engine.add("r", range(45), max_tokens=24)
        engine.steps(num_steps)
        if "r" not in engine.finished:
            engine.abort("r")
        engine.run()

        engine.check_store()
        engine.check_idle()


def test_late_commits_are_right(model: Path, shape: dict[str, Any]) -> None:
    """Payloads are gathered when the step ends: what happens to the blocks afterwards does not matter (C05)."""
    engine = Engine(model, FakeServer(), num_blocks=14, **shape)
    engine.worker.commit_delay = 7
    for number in range(8):
        engine.add(f"r{number}", range(number, number + 50), max_tokens=30)
    engine.run()
    engine.check_answers()
    engine.check_idle()
    engine.finish("last", range(900, 903), max_tokens=12)

    assert 8 * 4 <= len(engine.check_store()) <= 8 * 5
    assert any(request.num_preemptions for request in engine.requests.values()), "positive control"


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
@pytest.mark.parametrize("v2", [False, True])
def test_rejected_drafts_are_never_saved(model: Path, v2: bool, num_right: int) -> None:
    """Speculative decoding: of three drafts the first `num_right` are what the model says (C63)."""
    engine = Engine(model, FakeServer(), num_drafts=3, v2=v2)
    prompt = list(range(40))
    answer = answer_to(prompt, 64)
    request = engine.add("r", prompt, max_tokens=40)
    while "r" not in engine.finished:
        engine.step()
        known = request.num_output_tokens
        if known:
            next_tokens = answer[known : known + 3]
            engine.draft("r", [token + (place >= num_right) for place, token in enumerate(next_tokens)])
    engine.run()
    num_steps = len(engine.outputs)

    assert engine.answer("r") == answer[:40]
    assert num_steps <= 40 / (1 + num_right) + 4, "positive control: right drafts are taken"
    assert engine.check_store() == set(engine.keys_of(request)[: (80 - 1) // 16])
    engine.check_idle()


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_after_a_load_as_many_drafts_are_right_as_before(model: Path, shape: dict[str, Any], num_right: int) -> None:
    """Warm equals cold, in as many tokens a step (C63)."""
    engine = Engine(model, FakeServer(), num_drafts=3, **shape)
    engine.worker.num_right_drafts = num_right
    decoded = []
    for name in ("cold", "warm"):
        engine.outputs.clear()
        engine.finish(name, range(40), max_tokens=40)
        decoded.append(sum(name in output.scheduled_spec_decode_tokens for output in engine.outputs))
        engine.clear_local()

    assert engine.worker.num_loaded_blocks == 2
    assert decoded[0] == decoded[1] > 0
    engine.check_store()
    engine.check_idle()


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
@pytest.mark.parametrize("max_model_len", [64, 65, 66, 67, 512])
@pytest.mark.parametrize("max_num_batched_tokens", [5, 7, 512])
def test_drafts_of_steps_in_flight_are_not_counted_as_computed(
    model: Path, shape: dict[str, Any], num_right: int, max_model_len: int, max_num_batched_tokens: int
) -> None:
    """While steps are in flight vLLM counts all of their drafts as right. A step without drafts behind them, at the end
    of the model's length, once saved a block that was not full: its key named wrong bytes (C63).
    """
    engine = Engine(
        model,
        FakeServer(),
        num_drafts=3,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=40,
        **shape,
    )
    engine.worker.num_right_drafts = num_right
    requests = [engine.add(f"r{i}", range(100 * i, 100 * i + 33 + i), max_tokens=40) for i in range(4)]
    engine.run()
    assert any(output.scheduled_spec_decode_tokens for output in engine.outputs), "positive control"

    engine.check_answers()
    computed = {key for request in requests for key in engine.keys_of(request)[: (request.num_tokens - 1) // 16]}
    last = {key for request in requests for key in engine.keys_of(request)[-1:]}
    assert computed - last <= engine.check_store() <= computed | last
    engine.check_idle()


def test_every_shape_saves_under_the_same_keys(model: Path) -> None:
    """V1 or V2, with or without steps in flight: one set of keys for one set of requests."""
    stores = []
    for shape in SHAPES.values():
        engine = Engine(model, FakeServer(), num_blocks=12, **shape)
        for number in range(4):
            engine.add(f"r{number}", range(number * 7, number * 7 + 40), max_tokens=30)
        engine.run()
        engine.check_answers()
        stores.append(engine.check_store())
        assert any(request.num_preemptions for request in engine.requests.values()), "positive control"

    assert all(store == stores[0] for store in stores)


def test_beside_another_connector_that_wins_every_load(model: Path, shape: dict[str, Any]) -> None:
    """MultiConnector [other, ours]: ours saves all blocks once, loads nothing, holds nothing (C61)."""
    other, ours = FakeServer(), FakeServer()
    engine = Engine(model, ours, beside=other, num_blocks=14, **shape)
    engine.finish("first", range(100))
    assert set(other.blocks) == engine.check_store()
    engine.clear_local()
    engine.worker.load_delay = 2
    for number in range(3):
        engine.add(f"r{number}", [*range(100), *range(number, number + 30)], max_tokens=20)
    engine.run()

    theirs, mine = engine.worker.sides
    assert theirs.num_loaded_blocks >= 6, "positive control"
    assert mine.num_loaded_blocks == 0
    assert ours.num_already_present == 0
    assert set(ours.blocks) == set(other.blocks) == engine.check_store()
    assert not other.held_leases()
    engine.check_answers()
    engine.check_idle()


def test_before_another_connector_that_has_more(model: Path, shape: dict[str, Any]) -> None:
    """MultiConnector [ours, other]: vLLM takes ours, the first with a hit; afterwards both have all, once."""
    ours, other = FakeServer(), FakeServer()
    engine = Engine(model, ours, beside=other, ours_first=True, **shape)
    engine.finish("first", range(100))
    engine.clear_local()
    for key in engine.keys_of(engine.requests["first"], range(100))[2:]:
        ours.drop(key)
    engine.finish("second", range(100), max_tokens=30)

    mine, theirs = engine.worker.sides
    assert engine.connector.matches[-1] == ("second", 0, (32, True))
    assert (mine.num_loaded_blocks, theirs.num_loaded_blocks) == (2, 0)
    assert set(other.blocks) == engine.check_store()
    assert len(ours.blocks) == 8
    assert ours.num_already_present == other.num_already_present == 0
    assert not other.held_leases()
    engine.check_idle()


def test_before_another_connector_that_wins_when_ours_has_nothing(model: Path, shape: dict[str, Any]) -> None:
    """MultiConnector [ours, other]: the other loads, ours saves what its server lacks; few blocks, resumes."""
    ours, other = FakeServer(), FakeServer()
    engine = Engine(model, ours, beside=other, ours_first=True, num_blocks=12, **shape)
    engine.finish("first", range(48))
    engine.clear_local()
    ours.blocks.clear()
    engine.worker.load_delay = 2
    for number in range(4):
        engine.add(f"r{number}", [*range(48), *range(number, number + 10)], max_tokens=40)
    engine.run()

    _, theirs = engine.worker.sides
    assert any(request.num_preemptions for request in engine.requests.values()), "positive control"
    assert theirs.num_loaded_blocks >= 3
    assert set(other.blocks) == engine.check_store()
    engine.check_answers()
    engine.check_idle()


def test_beside_another_connector_that_has_nothing(model: Path, shape: dict[str, Any]) -> None:
    """MultiConnector [other, ours]: ours loads, and what the other's server lacks is saved there."""
    other, ours = FakeServer(), FakeServer()
    engine = Engine(model, ours, beside=other, **shape)
    engine.finish("first", range(100))
    engine.clear_local()
    other.blocks.clear()
    engine.finish("second", range(100))

    theirs, mine = engine.worker.sides
    assert (theirs.num_loaded_blocks, mine.num_loaded_blocks) == (0, 6)
    assert set(other.blocks) == engine.check_store()
    assert not other.held_leases()
    engine.check_idle()
