"""Neighbours that are slow, gone or forgetful, as the scheduler side sees them: what is promised after something
failed, how long a load may last, and that nothing is held for ever.
"""

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from connector.load_record import PAUSE_MIN_S
from connector.scheduler import GATE_SHARE
from tests.fakes import FakeServer
from tests.scheduler.harness import ADMITS_LOADED_WHILE_PAUSED, Engine
from tests.scheduler.test_lookup import PROMPT, filled, matches_of
from tests.scheduler.test_trouble import finish_pause


def loads_of(engine: Engine) -> list[Any]:
    return [load for plan in engine.worker.plans for load in plan.loads]


def lose(engine: Engine) -> None:
    """Every block of PROMPT has another slot than was promised, as after an eviction and a save."""
    for key in engine.keys_of(engine.requests["first"], PROMPT):
        payload = engine.server.blocks[key].payload
        engine.server.drop(key)
        engine.server.commit(key, payload)


def fail_one_load(engine: Engine, name: str, lasting_s: float) -> None:
    """A request whose load brings nothing and ends after `lasting_s`; it is computed."""
    engine.worker.withhold_loads = True
    engine.add(name, PROMPT, max_tokens=2)
    engine.steps(3)
    assert engine.worker.loading_block_ids(), "positive control: it was promised"
    lose(engine)
    engine.server.clock.advance(lasting_s)
    engine.worker.withhold_loads = False
    engine.run()
    engine.clear_local()


def test_a_load_without_a_measure_may_last_as_long_as_the_operator_says(model: Path, shape: dict[str, Any]) -> None:
    engine = filled(model, extra_config={"load_timeout_ms": 4000}, **shape)
    engine.finish("second", PROMPT)

    assert [load.timeout_s for load in loads_of(engine)] == [4.0]


def measured(engine: Engine) -> float:
    """Seconds to compute a block, as this engine has measured it: a step takes one second of the test's clock."""
    engine.add("measured", range(300, 390))
    while engine.scheduler.has_requests() or engine._queue:
        engine.step()
        engine.server.clock.advance(1.0)
    engine.clear_local()
    return float(engine.side._prefill_rate.us_per_block(16)) / 1e6


def test_a_load_may_last_as_long_as_it_is_worth(model: Path, shape: dict[str, Any]) -> None:
    """0.8 of computing what it brings."""
    engine = filled(model, num_blocks=60, **shape)
    block_s = measured(engine)
    assert 0.1 < block_s < 2, "positive control"
    engine.finish("second", PROMPT)

    assert [load.timeout_s for load in loads_of(engine)] == [pytest.approx(GATE_SHARE * 6 * block_s)]
    engine.check_idle()


def test_loads_at_once_may_take_their_turns(model: Path, shape: dict[str, Any]) -> None:
    """They would be computed one after the other, too: the time of those before comes on top."""
    engine = Engine(model, FakeServer(), num_blocks=60, **shape)
    prompts = {f"r{n}": [*range(100 * n, 100 * n + 70)] for n in range(3)}
    for name, prompt in prompts.items():
        engine.finish(name, prompt)
    engine.clear_local()
    block_s = measured(engine)
    engine.worker.plans.clear()
    engine.worker.load_delay = 3
    for name, prompt in prompts.items():
        engine.add(f"{name} again", prompt)
    engine.run()

    worth_s = GATE_SHARE * 4 * block_s
    assert [load.timeout_s for load in loads_of(engine)] == [pytest.approx(n * worth_s) for n in (1, 2, 3)]
    engine.check_idle()


def test_a_load_may_always_last_as_long_as_a_lookup(model: Path, shape: dict[str, Any]) -> None:
    """A prompt that is computed in a millisecond is no reason to give a copy less than what a dead server costs."""
    engine = filled(model, num_blocks=60, extra_config={"lookup_timeout_ms": 7000}, **shape)
    assert measured(engine) < 1
    engine.worker.plans.clear()
    engine.finish("second", PROMPT)

    assert [load.timeout_s for load in loads_of(engine)] == [7.0]


def test_after_a_late_load_nothing_is_promised_for_a_while(model: Path, shape: dict[str, Any]) -> None:
    """One request pays for a server that does not deliver; the next ones are not even asked about. Then it is tried
    again. The server is asked for a sign of life (C14, C49).
    """
    engine = filled(model, extra_config={"load_timeout_ms": 5000}, **shape)
    fail_one_load(engine, "late", lasting_s=5.0)
    lookups = engine.server.calls["lookup"]
    for number in range(10):
        engine.finish(f"meanwhile {number}", PROMPT)
        engine.clear_local()
        assert set(matches_of(engine, f"meanwhile {number}")) == {(0, False)}
    assert engine.side._client.leases_in_doubt == [0], "one doubt, and the lease was let go before it"
    assert engine.counts()["scheduler"]["late_loads"] == 1
    assert engine.server.calls["lookup"] == lookups + 10, "what need not be saved is asked, off the path"
    engine.server.clock.advance(PAUSE_MIN_S)
    engine.finish("afterwards", PROMPT)

    assert matches_of(engine, "afterwards") == [(96, True)]
    engine.check_answers()
    engine.check_store()
    engine.check_idle()


def test_a_load_that_fails_in_time_withholds_nothing(model: Path, shape: dict[str, Any]) -> None:
    """It cost a step: the blocks were evicted, or a rank lost them."""
    engine = filled(model, extra_config={"load_timeout_ms": 5000}, **shape)
    fail_one_load(engine, "in time", lasting_s=4.0)
    engine.finish("second", PROMPT)

    assert matches_of(engine, "second") == [(96, True)]
    assert engine.side._client.leases_in_doubt == []
    assert "late_loads" not in engine.counts()["scheduler"]


def test_a_block_that_always_fails_is_not_promised_for_ever(model: Path, shape: dict[str, Any]) -> None:
    """The server says that it is there, and every load of it fails: twice, then it is computed by all who come; in the
    next hour it is tried again a few times, not once per request (contract 3.7: "remember the failure or it loops").
    """
    engine = filled(model, **shape)
    lost = engine.keys_of(engine.requests["first"], PROMPT)[3]
    failed = []
    for number in range(60):
        engine.add(f"r{number}", PROMPT, max_tokens=2)
        engine.worker.load_delay = 2
        engine.step()
        payload = engine.server.blocks[lost].payload
        engine.server.drop(lost)  # whatever was promised of it is not so any more
        engine.server.commit(lost, payload)
        engine.run()
        failed.append(engine.counts()["scheduler"].get("loads:failed", 0))
        assert matches_of(engine, f"r{number}")[0][0] in (96, 48), "block 3 or up to it"
        engine.clear_local()
        engine.server.clock.advance(0.2)

    assert failed[:3] == [1, 2, 2]
    assert failed[-1] <= 6
    engine.check_answers()
    engine.check_idle()


def test_a_reset_with_the_server_gone_or_silent(model: Path, shape: dict[str, Any]) -> None:
    """While loads do not end and no lookup is answered: True at once, then nothing of before is used (C19)."""
    for trouble in ("down", "failing", "held"):
        engine = filled(model, num_blocks=60, **shape)
        engine.worker.withhold_loads = True
        engine.add("loading", PROMPT, max_tokens=3)
        engine.steps(2)
        if trouble == "held":
            engine.server.hold()
        else:
            setattr(engine.server, trouble, True)
        engine.add("asking", [*PROMPT[:80], 1, 2, 3], max_tokens=3)
        engine.steps(3)
        assert engine.connector.reset_cache() is True
        engine.steps(3)
        engine.worker.withhold_loads = False
        engine.server.let_go()
        engine.run()
        engine.server.clock.advance(FakeServer.LEASE_S)

        if not shape.get("late_execution"):
            assert engine.worker.num_loaded_blocks == 0, trouble
        engine.check_answers()
        engine.check_idle()


def test_abandoned_lookups_hold_nothing(model: Path, shape: dict[str, Any]) -> None:
    """C34, 1,000 over all shapes: a quarter is loaded, a quarter never admitted, a quarter aborted while loading; of a
    quarter the engine goes away without a word. After the lease time nothing is leased, and who comes next hits.
    """
    server = FakeServer()
    engine = Engine(model, server, num_blocks=14, **shape)
    engine.finish("first", PROMPT)
    engine.clear_local()
    engine.worker.load_delay = 1
    for number in range(168):
        kind = ("loaded", "not admitted", "aborted", "killed")[number % 4]
        name = f"r{number}"
        if kind == "loaded":
            engine.finish(name, PROMPT)
        elif kind == "not admitted":
            engine.add("long", range(300, 410), max_tokens=8)
            engine.steps(2)
            engine.add(name, PROMPT)
            engine.steps(2)
            engine.abort(name)
        elif kind == "aborted":
            engine.add(name, PROMPT, max_tokens=5)
            engine.steps(1 + number // 4 % 3)
            if name not in engine.finished:
                engine.abort(name)
        else:
            request = engine.add(name, PROMPT)
            engine.connector.get_num_new_matched_tokens(request, 0)
            state = engine.side._states.pop(name)  # nobody is there any more who would release it
            assert state.question is not None and state.question.lease_id
            engine.scheduler.requests.pop(name)
            engine.scheduler.waiting.remove_request(request)
        engine.run()
        engine.clear_local()
    assert server.held_leases(), "positive control: those of the killed"
    server.clock.advance(FakeServer.LEASE_S)
    engine.finish("last", PROMPT)

    assert matches_of(engine, "last") == [(96, True)]
    engine.check_idle()


@pytest.mark.parametrize("trouble", ["slow load", "server down", "server silent"])
@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_pause_and_sleep_in_trouble(model: Path, shape: dict[str, Any], trouble: str, mode: str) -> None:
    """A load that lasts, a server that is gone or says nothing: the engine becomes idle as soon as the workers have
    reported, its caches are reset, and who came meanwhile is served afterwards, without a hit of before.
    """
    for num_steps in range(1, 5):
        engine = filled(model, num_blocks=16, **shape)
        engine.worker.withhold_loads = True
        engine.add("running", range(300, 340), max_tokens=20)
        engine.add("loading", [*PROMPT, 1, 2, 3], max_tokens=5)
        engine.steps(num_steps)
        if trouble == "server down":
            engine.server.down = True
        elif trouble == "server silent":
            engine.server.hold()
        if mode == "abort":
            for name in list(engine.scheduler.requests):
                engine.abort(name)
        engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        engine.add("meanwhile", PROMPT, max_tokens=5)
        engine.steps(10)
        engine.worker.withhold_loads = False
        for _ in range(100):
            if not engine.scheduler.has_requests() and not engine._queue:
                break
            engine.step()
        assert not engine.scheduler.has_requests(), "the pause completes"
        assert not engine.worker.loading_block_ids()
        if any(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS for request in engine.requests.values()):
            assert mode == "wait"
            assert not ADMITS_LOADED_WHILE_PAUSED, "before 0.32 vLLM refuses the reset, without us"
            continue
        finish_pause(engine)
        loaded = engine.worker.num_loaded_blocks
        engine.server.let_go()
        engine.run()
        engine.server.clock.advance(FakeServer.LEASE_S)

        assert engine.finished["meanwhile"] == "length"
        assert engine.worker.num_loaded_blocks == loaded
        engine.check_answers()
        engine.check_idle()


def test_what_was_promised_is_evicted_while_the_request_waits(model: Path, shape: dict[str, Any]) -> None:
    """C32, 200 rounds over all shapes, in which the lease runs out or the server breaks it while the request queues or
    loads. It loads what is right, or computes; every load that failed is counted, and nothing else.
    """
    engine = filled(model, num_blocks=14, **shape)
    keys = engine.keys_of(engine.requests["first"], PROMPT)
    num_broken = 0
    for number in range(34):
        engine.worker.load_delay = 1 + number % 3
        if number % 2:
            engine.add("long", range(300, 410), max_tokens=4 + number % 5)
            engine.steps(2)
        engine.add(f"r{number}", PROMPT, max_tokens=3)
        engine.steps(1 + number % 4)
        if number % 3 == 0:
            engine.server.clock.advance(FakeServer.LEASE_S + 1)
        if number % 3 != 1:
            lost = keys[number % 6]
            if lost in engine.server.blocks:
                payload = engine.server.blocks[lost].payload
                engine.server.drop(lost)  # a flood of others took it; somebody saved it again
                engine.server.commit(lost, payload)
                num_broken += 1
        engine.run()
        engine.clear_local()
        engine.server.clock.advance(FakeServer.LEASE_S)

    figures = engine.counts()["scheduler"]
    assert num_broken > 15, "positive control"
    assert 0 < figures["loads:failed"] <= num_broken
    assert engine.worker.num_loaded_blocks > 0
    engine.check_answers()
    engine.check_store()
    engine.check_idle()


def test_an_engine_with_a_request_waiting_is_never_left_idle(model: Path, shape: dict[str, Any]) -> None:
    """Whatever the server does not say: in every step something runs, loads, or is asked again; and the number of
    steps in which only was asked ends with the deadline of the lookup.
    """
    engine = filled(model, **shape)
    engine.server.hold()
    engine.add("second", PROMPT, max_tokens=2)
    for _ in range(30):
        engine.step()
        assert engine.scheduler.has_requests()
    assert set(matches_of(engine, "second")) == {(None, False)}
    engine.server.failing = True  # the deadline: no answer
    engine.server.let_go()
    asked = len(matches_of(engine, "second"))
    engine.run()

    assert matches_of(engine, "second")[asked:] == [(0, False)]
    engine.check_answers()
    engine.check_idle()
