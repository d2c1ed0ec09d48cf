"""Preempted and resumed: a request comes back with more tokens and other blocks, in one of two shapes."""

from pathlib import Path
from typing import Any

import pytest

from connector.plan import LoadSpec
from tests.fakes import FakeServer
from tests.scheduler.harness import SHAPES, Engine, answer_to

PROMPTS = {"r0": list(range(40)), "r1": list(range(200, 240))}


def crowded(model: Path, server: FakeServer | None = None, *, max_tokens: int = 40, **shape: Any) -> Engine:
    """Two requests of five blocks each on seven: the second is preempted once both grow, and resumed later."""
    engine = Engine(model, server or FakeServer(), num_blocks=8, **shape)
    for request_id, prompt in PROMPTS.items():
        engine.add(request_id, prompt, max_tokens=max_tokens)
    return engine


def resumes(output: Any) -> dict[str, tuple[list[int], int]]:
    """Resumed request → (its new block table, its computed tokens), from whichever list it is in."""
    found = {
        new.req_id: (list(new.block_ids[0]), new.num_computed_tokens)
        for new in output.scheduled_new_reqs
        if len(new.prefill_token_ids or ()) > len(new.prompt_token_ids)
    }
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        if request_id in cached.resumed_req_ids:
            found[request_id] = (list(cached.new_block_ids[index][0]), cached.num_computed_tokens[index])
    return found


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_resumed_request_answers_and_saves_as_if_never_preempted(
    model: Path, shape: dict[str, Any], prefix_caching: bool
) -> None:
    """All blocks of both sequences, each under its key, with the bytes that the key names."""
    engine = crowded(model, enable_prefix_caching=prefix_caching, **shape)
    engine.run()
    assert engine.requests["r1"].num_preemptions, "positive control"

    engine.check_answers()
    keys = [engine.keys_of(engine.requests[r], PROMPTS[r] + answer_to(PROMPTS[r], 40))[:4] for r in PROMPTS]
    assert set(keys[0] + keys[1]) <= engine.check_store()
    assert engine.server.num_already_present == 0
    engine.check_idle()


def test_the_shapes_are_the_ones_that_vllm_has(model: Path) -> None:
    """V1: resumed_req_ids with all_token_ids; V2: a new request again, whose prefill_token_ids is the live list."""
    for v2 in (False, True):
        engine = crowded(model, v2=v2)
        seen = False
        while not seen:
            engine.step()
            output = engine.outputs[-1]
            if "r1" in resumes(output):
                seen = True
                in_new = [new for new in output.scheduled_new_reqs if new.req_id == "r1"]
                assert bool(in_new) == v2
                assert ("r1" in output.scheduled_cached_reqs.resumed_req_ids) == (not v2)
                if v2:
                    length = len(in_new[0].prefill_token_ids)
                    engine.steps(2)
                    assert len(in_new[0].prefill_token_ids) > length, "the list changes after the step"


def test_both_shapes_give_the_same_plans(model: Path) -> None:
    """Same loads, same saves, same names: only the scheduler's way of saying it differs."""
    plans = []
    for v2 in (False, True):
        server = FakeServer()
        engine = crowded(model, server, v2=v2, enable_prefix_caching=False)
        engine.run()
        assert engine.requests["r1"].num_preemptions
        plans.append([(plan.loads, plan.saves, plan.names, plan.cancelled) for plan in engine.worker.plans])

    assert plans[0] == plans[1]
    assert any(loads for loads, *_ in plans[0]), "positive control: the resumed request loads"


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_resumed_requests_specs_name_only_its_new_blocks(
    model: Path, shape: dict[str, Any], prefix_caching: bool
) -> None:
    """The old table is forgotten: its blocks belong to the other one by now, and no save and no load of the resumed one
    names them, also none whose name comes later. What is stored for one is not what is stored for the other (C04).
    """
    engine = crowded(model, enable_prefix_caching=prefix_caching, **shape)
    engine.run()
    keys = {name: set(engine.keys_of(request)) for name, request in engine.requests.items()}
    names = {ticket: name for plan in engine.worker.plans for ticket, name in plan.names.items()}
    tables: dict[str, list[int]] = {}  # as this test reads the outputs
    given_up: set[int] = set()
    taken_over: set[int] = set()
    num_checked = 0
    for output, plan in zip(engine.outputs, engine.worker.plans, strict=True):
        if "r0" in output.finished_req_ids:
            del tables["r0"]
        if "r1" in (output.preempted_req_ids or ()):
            given_up |= set(tables.pop("r1"))
        for new in output.scheduled_new_reqs:
            tables[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                tables[request_id] = list(block_ids[0])
            elif block_ids is not None:
                tables[request_id] += block_ids[0]
        taken_over |= given_up & set(tables.get("r0", ()))
        for save in plan.saves:
            name = names[save.ticket] if save.name is None else save.name
            if name is not None and name.key in keys["r1"]:
                assert save.block_id == tables["r1"][name.depth], f"r1 has {tables['r1']}"
                num_checked += 1
        for load in plan.loads:
            assert load.request_id != "r1" or not set(load.block_ids) & set(tables.get("r0", ()))
    assert num_checked >= 3
    assert taken_over, "positive control: the other one has blocks that were the resumed one's"

    stored = engine.check_store()
    payloads = [{engine.server.blocks[key].payload for key in stored & keys[name]} for name in ("r0", "r1")]
    assert not payloads[0] & payloads[1]
    engine.check_answers()
    engine.check_idle()


def test_a_resumed_request_loads_what_it_had_saved(model: Path, shape: dict[str, Any]) -> None:
    """Its prompt and what it had decoded come back from the server, into its new blocks."""
    engine = crowded(model, enable_prefix_caching=False, **shape)
    engine.run()
    loads = [load for plan in engine.worker.plans for load in plan.loads if load.request_id == "r1"]

    assert len(loads) == 1
    assert len(loads[0].block_ids) >= 2
    assert engine.worker.num_loaded_blocks == len(loads[0].block_ids)
    tables = [table for output in engine.outputs for r, (table, _) in resumes(output).items() if r == "r1"]
    assert tables[-1][: len(loads[0].block_ids)] == list(loads[0].block_ids)
    engine.check_answers()
    engine.check_idle()


@pytest.mark.parametrize("load_delay", [0, 1, 5])
@pytest.mark.parametrize("commit_delay", [0, 3, 20])
def test_resumed_while_its_own_saves_are_still_on_their_way(
    model: Path, shape: dict[str, Any], load_delay: int, commit_delay: int
) -> None:
    """What is not committed yet is a miss; what is, loads: no request waits for its own save (C27)."""
    engine = crowded(model, enable_prefix_caching=False, **shape)
    engine.worker.load_delay, engine.worker.commit_delay = load_delay, commit_delay
    while not engine.requests["r1"].num_preemptions:
        engine.step()
    assert engine.worker.sides[0].num_uncommitted > 0 or commit_delay < 20, "positive control: saves are on their way"
    engine.run()
    answers = {answer for asked, _, answer in engine.connector.matches if asked == "r1"}
    assert (None, False) not in answers

    engine.check_answers()
    engine.check_store()
    engine.check_idle()


@pytest.mark.parametrize("resets", [1, 3])
def test_preempted_and_resumed_in_one_step(model: Path, shape: dict[str, Any], resets: int) -> None:
    """reset_prefix_cache(reset_running_requests=True): one output says both, preempted first."""
    engine = Engine(model, FakeServer(), **shape)
    engine.add("r0", PROMPTS["r0"], max_tokens=60)
    engine.add("r1", PROMPTS["r1"], max_tokens=60)
    for _ in range(resets):
        engine.steps(12)
        engine.preempt_all()
    engine.run()

    assert {request.num_preemptions for request in engine.requests.values()} == {resets}
    engine.check_answers()
    engine.check_store()
    engine.check_idle()


@pytest.mark.parametrize("max_tokens", [31, 32, 33, 40])
def test_a_preempted_request_costs_no_more_than_without_a_connector(
    model: Path, shape: dict[str, Any], max_tokens: int
) -> None:
    """A cache needs no delivery: no finished output is thrown away and computed again for our sake, also not one that
    was on its last step (C62).
    """
    with_cache, without = crowded(model, max_tokens=max_tokens, **shape), Engine(model, None, num_blocks=8, **shape)
    with_cache.server.down = True  # nothing is loaded: as many tokens are computed as without a cache
    assert with_cache.connector.requires_kv_delivery is False
    for request_id, prompt in PROMPTS.items():
        without.add(request_id, prompt, max_tokens=max_tokens)
    with_cache.run()
    without.run()

    assert any(request.num_preemptions for request in without.requests.values()), "positive control"
    assert with_cache.worker.num_computed_tokens == without.worker.num_computed_tokens
    with_cache.check_idle()


def test_the_victims_blocks_in_the_same_step(model: Path, shape: dict[str, Any]) -> None:
    """Its blocks go to another request in the very output that reports the preemption: no save names them for it."""
    engine = crowded(model, enable_prefix_caching=False, **shape)
    engine.run()
    reused = any(
        block_ids is not None
        for output in engine.outputs
        if "r1" in (output.preempted_req_ids or ())
        for block_ids in output.scheduled_cached_reqs.new_block_ids
    )

    assert reused or shape.get("in_flight", 1) > 1, "positive control"
    engine.check_store()


def test_aborted_while_preempted(model: Path, shape: dict[str, Any]) -> None:
    """In the waiting queue with tokens decoded: nothing of it remains (C58)."""
    engine = crowded(model, **shape)
    while not engine.requests["r1"].num_preemptions:
        engine.step()
    engine.abort("r1")
    engine.run()

    engine.check_answers()
    engine.check_store()
    engine.check_idle()


def test_aborted_while_its_resume_is_loading(model: Path, shape: dict[str, Any]) -> None:
    """The load is cancelled behind its fence; the blocks come back once it was reported."""
    engine = crowded(model, enable_prefix_caching=False, **shape)
    engine.worker.load_delay = 6
    while not any(load.request_id == "r1" for plan in engine.worker.plans for load in plan.loads):
        engine.step()
    engine.abort("r1")
    engine.run()

    assert engine.worker.num_loaded_blocks == 0, "a load that is not wanted any more writes nothing"
    engine.check_answers()
    engine.check_idle()


def test_a_request_that_skipped_a_step_is_not_a_resumed_one(model: Path, shape: dict[str, Any]) -> None:
    """all_token_ids holds everyone who was not scheduled in the step before; membership is no resume."""
    engine = Engine(model, FakeServer(), max_num_batched_tokens=17, max_num_seqs=2, num_blocks=40, **shape)
    engine.add("r0", range(60), max_tokens=20)
    engine.add("r1", range(200, 290), max_tokens=20)
    engine.run()

    engine.check_answers()
    assert len(engine.check_store()) >= (80 - 1) // 16 + (110 - 1) // 16
    engine.check_idle()


def test_priorities_choose_other_victims(model: Path, shape: dict[str, Any]) -> None:
    """With the priority policy any running request may be preempted, not only the last."""
    engine = Engine(model, FakeServer(), num_blocks=12, scheduling_policy="priority", **shape)
    for number in range(5):
        engine.add(f"r{number}", range(number * 50, number * 50 + 35), max_tokens=40, priority=-number)
        engine.steps(4)
    engine.run()

    assert sum(request.num_preemptions for request in engine.requests.values()) >= 2, "positive control"
    engine.check_answers()
    engine.check_store()
    engine.check_idle()


def test_loads_are_planned_once(model: Path) -> None:
    """No plan repeats a load, whatever the number of steps until it ends."""
    for shape in SHAPES.values():
        engine = crowded(model, enable_prefix_caching=False, **shape)
        engine.worker.load_delay = 9
        engine.run()
        loads: list[LoadSpec] = [load for plan in engine.worker.plans for load in plan.loads]

        assert len({load.lease_id for load in loads}) == len(loads)
        engine.check_idle()
