"""Who may save and load what: the engine's role, its settings, and the wishes of one request."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeServer, recorded_log
from tests.scheduler.harness import Engine
from tests.scheduler.test_lookup import PROMPT, filled, matches_of


def saved_blocks(engine: Engine) -> int:
    return sum(len(plan.saves) for plan in engine.worker.plans)


# --- roles


def test_a_producer_saves_and_never_loads(model: Path, shape: dict[str, Any]) -> None:
    """kv_producer: no hit is taken and no lease asked for; what the server has already is not saved again."""
    engine = filled(model, role="kv_producer", **shape)
    engine.worker.plans.clear()
    engine.finish("second", [*PROMPT, *range(30)], max_tokens=20)

    assert set(matches_of(engine, "second")) == {(0, False)}
    assert engine.worker.num_loaded_blocks == 0
    assert not engine.server.leases
    assert len(engine.check_store()) == 6 + 3, "149 tokens have KV"
    assert saved_blocks(engine) == 3
    engine.check_idle()


def test_a_consumer_loads_and_never_saves(model: Path, shape: dict[str, Any]) -> None:
    """kv_consumer: hits what others saved, adds nothing, also not what its own cache has and the server lacks."""
    producer = Engine(model, FakeServer(), role="kv_producer", **shape)
    producer.finish("first", PROMPT)
    consumer = Engine(model, producer.server, role="kv_consumer", **shape)
    consumer.finish("second", [*PROMPT, *range(30)], max_tokens=20)
    consumer.server.restart()
    consumer.finish("third", [*PROMPT, *range(50)], max_tokens=20)

    assert matches_of(consumer, "second") == [(96, True)]
    assert consumer.worker.num_loaded_blocks == 6
    assert saved_blocks(consumer) == 0
    assert consumer.server.blocks == {}
    consumer.check_answers()
    consumer.check_idle()


def test_a_crowd_of_consumers_and_producers(model: Path, shape: dict[str, Any]) -> None:
    """Preempted and resumed in either role: answers equal cold, nothing remains."""
    server = FakeServer()
    for role in ("kv_producer", "kv_consumer", "kv_consumer"):
        engine = Engine(model, server, role=role, num_blocks=12, **shape)
        for number in range(4):
            engine.add(f"r{number}", range(number * 7, number * 7 + 40), max_tokens=30)
        engine.run()

        assert any(request.num_preemptions for request in engine.requests.values()), "positive control"
        assert bool(engine.worker.num_loaded_blocks) == (role == "kv_consumer")
        assert bool(saved_blocks(engine)) == (role == "kv_producer")
        engine.check_answers()
        engine.check_idle()


# --- settings of the engine


def test_decoded_tokens_need_not_be_saved(model: Path, shape: dict[str, Any]) -> None:
    """save_decoded false: the blocks that the prompt fills, also of a request that was preempted and resumed."""
    engine = Engine(model, FakeServer(), num_blocks=8, extra_config={"save_decoded": False}, **shape)
    requests = [engine.add(f"r{start}", range(start, start + 40), max_tokens=40) for start in (0, 200)]
    engine.run()
    assert any(request.num_preemptions for request in requests), "positive control"

    assert engine.check_store() == {key for request in requests for key in engine.keys_of(request)[:2]}
    engine.check_answers()
    engine.check_idle()


@pytest.mark.parametrize(("min_load_tokens", "loaded"), [(0, 6), (1, 6), (96, 6), (97, 0), (4096, 0)])
def test_a_small_hit_is_not_worth_a_load(model: Path, shape: dict[str, Any], min_load_tokens: int, loaded: int) -> None:
    """min_load_tokens: the smallest number of hit tokens that is loaded; no lease is kept for less."""
    engine = filled(model, extra_config={"min_load_tokens": min_load_tokens}, **shape)
    engine.finish("second", PROMPT, max_tokens=20)

    assert engine.worker.num_loaded_blocks == loaded
    assert engine.server.num_already_present == 0, "what the server has is not saved again either"
    engine.check_idle()


def test_a_hit_that_grows_small_while_it_waits_is_not_loaded(model: Path) -> None:
    """The engine's own cache counts first: what is left of the hit is measured."""
    engine = filled(model, extra_config={"min_load_tokens": 48})
    request = engine.add("second", PROMPT)

    answers = [engine.connector.get_num_new_matched_tokens(request, local)[0] for local in (0, 48, 64, 48, 0)]
    assert answers == [96, 48, 0, 48, 96]
    engine.run()
    engine.check_idle()


# --- wishes of a request


@pytest.mark.parametrize("wish", ["all", "prompt", "none"])
@pytest.mark.parametrize("save_decoded", [True, False])
def test_what_a_request_wants_saved(model: Path, shape: dict[str, Any], wish: str, save_decoded: bool) -> None:
    """prefixd.save goes before the engine's setting."""
    engine = Engine(model, FakeServer(), extra_config={"save_decoded": save_decoded}, **shape)
    request = engine.finish("r", range(40), max_tokens=40, kv_transfer_params={"prefixd.save": wish})

    num_blocks = {"all": (80 - 1) // 16, "prompt": 2, "none": 0}[wish]
    keys = engine.keys_of(request)
    late = keys[num_blocks : num_blocks + 1] if shape.get("in_flight") == 3 and wish == "all" else []
    assert set(keys[:num_blocks]) <= engine.check_store() <= {*keys[:num_blocks], *late}
    engine.check_idle()


def test_what_a_request_does_not_want_saved_is_not_saved_for_it_later(model: Path, shape: dict[str, Any]) -> None:
    """Nor when its blocks are hit locally and the server lacks them; another request brings them back."""
    engine = Engine(model, FakeServer(), **shape)
    engine.finish("first", PROMPT)
    engine.server.restart()
    engine.finish("second", [*PROMPT, *range(20)], kv_transfer_params={"prefixd.save": "none"})
    assert engine.server.blocks == {}
    engine.finish("third", [*PROMPT, *range(20)], max_tokens=20, kv_transfer_params={"prefixd.save": "prompt"})

    assert len(engine.check_store()) == 7
    engine.check_idle()


def test_a_request_need_not_be_loaded(model: Path, shape: dict[str, Any]) -> None:
    """prefixd.load false: computed, though the server has it; what it adds is saved."""
    engine = filled(model, **shape)
    engine.finish("second", [*PROMPT, *range(30)], kv_transfer_params={"prefixd.load": False})

    assert set(matches_of(engine, "second")) == {(0, False)}
    assert engine.worker.num_loaded_blocks == 0
    assert not engine.server.leases
    assert len(engine.check_store()) == 8
    engine.check_idle()


def test_a_request_that_wants_nothing_is_not_asked_about(model: Path, shape: dict[str, Any]) -> None:
    """Neither load nor save: no RPC, and it is counted as bypassed."""
    engine = filled(model, **shape)
    engine.finish("second", PROMPT, kv_transfer_params={"prefixd.load": False, "prefixd.save": "none"})

    assert engine.server.calls["lookup"] == 0
    assert engine.counts()["bypassed"] == {"kv_transfer_params": 1}
    engine.check_idle()


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"prefixd.sav": "none"}, "prefixd.sav"),
        ({"prefixd.save": "never"}, "prefixd.save"),
        ({"prefixd.save": None}, "prefixd.save"),
        ({"prefixd.load": "false"}, "prefixd.load"),
        ({"prefixd.load": 0, "do_remote_prefill": True}, "prefixd.load"),
    ],
)
def test_a_wish_that_we_do_not_know_costs_no_request(model: Path, params: dict[str, Any], named: str) -> None:
    """The request runs as if the key were absent; one warning names it, however many requests have it."""
    engine = filled(model)
    with recorded_log("vllm.prefixd") as warnings:
        for number in range(3):
            engine.finish(f"r{number}", PROMPT, kv_transfer_params=params)
            engine.clear_local()

    assert engine.worker.num_loaded_blocks == 18
    assert len(warnings) == 1
    assert f"'{named}'" in warnings[0]
    engine.check_idle()
