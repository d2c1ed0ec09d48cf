"""Models with several KV groups on the real Scheduler: what is saved, hit, loaded, recomputed of each kind of layers.

The worker checks every read of KV, every payload and every block id (`hybrid.py`); the tests say what must happen.
"""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.distributed.kv_transfer.kv_connector.v1 import base

if not hasattr(base, "KVConnectorTransferResults"):
    pytest.skip(
        "vLLM before 0.30 cannot be told that a load of several KV groups failed: prefixd is off for such models there",
        allow_module_level=True,
    )

from tests.scheduler.harness import answer_to
from tests.scheduler.hybrid import HybridEngine, HybridServer, chunked, full, state, window

SHAPES: dict[str, dict[str, Any]] = {
    "V1": {},
    "V2": {"v2": True},
    "V2, two steps in flight": {"v2": True, "in_flight": 2},
}
# Recurrent state with steps in flight: vLLM computes a step's end on tokens that it hopes for, so V1 and V2 only.
MODELS: dict[str, list[Any]] = {
    "full and window": [full(), window(40)],
    "two window groups and full": [window(40), window(40), full()],
    "windows of two lengths": [full(), window(20), window(70)],
    "blocks of two sizes": [full(16), window(70, block_size=32)],
    "a window within a unit": [full(64), window(20, block_size=16)],
    "full and state": [full(), state()],
    "full, window and state": [full(), window(40), state()],
    "window only": [window(40)],
    "state only": [state()],
    "full and local chunks": [full(), chunked(48)],
}


@pytest.fixture(params=list(MODELS))
def specs(request: pytest.FixtureRequest) -> list[Any]:
    return MODELS[request.param]


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHAPES[request.param]


def tokens(seed: int, number: int) -> list[int]:
    return random.Random(seed).choices(range(2, 2000), k=number)


def needed(spec: Any, boundary: int) -> int:
    """Blocks of a group without which the token at `boundary` cannot be computed."""
    first = 0
    if hasattr(spec, "mamba_cache_mode"):
        first = boundary - spec.block_size
    elif hasattr(spec, "attention_chunk_size") and spec.attention_chunk_size:
        first = boundary // spec.attention_chunk_size * spec.attention_chunk_size
    elif getattr(spec, "sliding_window", None):
        first = max(boundary - spec.sliding_window + 1, 0)
    return boundary // spec.block_size - first // spec.block_size


def hit(unit: int, number: int) -> int:
    return (number - 1) // unit * unit


def test_what_was_computed_is_hit_after_a_restart(model: Path, specs: list[Any], shape: dict[str, Any]) -> None:
    """The longest legal hit, in every kind of model; loaded is all that must be and no more."""
    server = HybridServer()
    first = HybridEngine(model, server, specs, **shape)
    asked = tokens(1, 300)
    first.finish("a", asked, max_tokens=20)
    first.check_idle()
    second = HybridEngine(model, server, specs, **shape)
    second.finish("b", asked, max_tokens=20)
    second.check_idle()

    matches = [answer for _, _, answer in second.connector.matches]
    legal = hit(second.unit, 300)
    assert (legal, True) in matches
    assert second.worker.num_failed == 0
    loaded = {group: pages for _, group, pages in second.worker.num_loaded}
    for number, group in enumerate(second.groups.stored):
        assert loaded.get(number, 0) == sum(needed(specs[member.group_id], legal) for member in group.members)


def test_the_next_turn_hits_what_was_decoded(model: Path, specs: list[Any], shape: dict[str, Any]) -> None:
    """Recurrent state is there at the ends of blocks that decoding reached, one token at a time."""
    server = HybridServer()
    first = HybridEngine(model, server, specs, **shape)
    asked = tokens(2, 100)
    first.finish("a", asked, max_tokens=70)
    turn = [*asked, *answer_to(asked, 70), *tokens(3, 30)]
    second = HybridEngine(model, server, specs, **shape)
    second.finish("b", turn, max_tokens=5)

    assert second.connector.matches[-1][2] == (hit(second.unit, 170), True)
    second.check_idle()


def test_a_chunked_prefill_is_saved_whole(model: Path, specs: list[Any], shape: dict[str, Any]) -> None:
    """Windows move on while a prompt is computed; what leaves them was saved in the step that filled it (C01)."""
    server = HybridServer()
    first = HybridEngine(model, server, specs, max_num_batched_tokens=64, **shape)
    first.finish("a", tokens(4, 500), max_tokens=1)
    second = HybridEngine(model, server, specs, **shape)
    second.finish("b", tokens(4, 500), max_tokens=1)

    assert second.connector.matches[-1][2] == (hit(second.unit, 500), True)
    has_state = any(group.at_end_only for group in second.groups.stored)
    for number, group in enumerate(second.groups.stored):
        saved = len(server.keys_of(number))
        assert saved == 500 // second.unit if not group.at_end_only else 1 < saved <= 500 // second.unit, has_state


def test_a_hit_ends_where_every_group_has_what_it_needs(model: Path) -> None:
    """Blocks of 16, window of 40: three of its blocks before the boundary, all of full attention's (C25, C39)."""
    specs = [full(), window(40)]
    server = HybridServer()
    first = HybridEngine(model, server, specs)
    keys = first.keys_of(first.finish("a", tokens(5, 161), max_tokens=1))
    everything = dict(server.stored)

    def hit_without(*lost: tuple[int, int]) -> int | None:
        server.stored = dict(everything)
        for group, unit in lost:
            del server.stored[group, keys[unit]]
        engine = HybridEngine(model, server, specs)
        engine.finish("b", tokens(5, 161))
        engine.check_idle()
        return engine.connector.matches[-1][2][0]

    assert hit_without() == 160
    assert hit_without((1, 9)) == 144  # the last block of the window is gone: the boundary before it is whole
    assert hit_without((1, 7)) == 112  # it is in the windows of 128, 144 and 160
    assert hit_without((1, 6)) == 160  # out of the window of the longest
    assert hit_without((1, 0), (1, 1), (1, 2)) == 160
    assert hit_without((0, 4)) == 64
    assert hit_without((0, 4), (1, 3)) == 48
    assert hit_without(*((1, unit) for unit in range(10))) == 0


def test_recurrent_state_is_hit_at_the_boundaries_that_have_it(model: Path) -> None:
    """Chunks of 64 tokens: state at 64 and 128; then the prompt's last boundary, 144."""
    specs = [full(), state()]
    server = HybridServer()
    first = HybridEngine(model, server, specs, max_num_batched_tokens=64)
    keys = first.keys_of(first.finish("a", tokens(6, 150), max_tokens=1))
    assert sorted(keys.index(key) for key in server.keys_of(1)) == [3, 7, 8]

    del server.stored[1, keys[8]]
    second = HybridEngine(model, server, specs)
    second.finish("b", tokens(6, 150))

    assert second.connector.matches[-1][2] == (128, True)
    second.check_idle()


def test_a_part_of_the_window_that_the_engine_has_is_not_loaded(model: Path) -> None:
    """Local 96, external to 160, window of 70: its blocks from 96 on, never the shared ones before (C40)."""
    specs = [full(), window(70)]
    server = HybridServer()
    engine = HybridEngine(model, server, specs)
    asked = tokens(7, 161)
    HybridEngine(model, server, specs).finish("a", asked)
    server.down = True
    engine.finish("half", asked[:100])
    server.down = False
    engine.finish("whole", asked)

    assert engine.connector.matches[-1][1:] == (96, (64, True))
    assert engine.worker.num_loaded == [("whole", 0, 4), ("whole", 1, 4)]
    engine.check_idle()


def test_groups_that_the_engine_does_not_share_are_left_alone(model: Path) -> None:
    """A ring buffer per request (vLLM: not prefix cacheable) is neither saved nor loaded nor named as loaded."""
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    ring = CircularBufferSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=full().dtype)
    engine = HybridEngine(model, HybridServer(), [full(), window(40)])
    config = engine.scheduler.kv_cache_config
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from connector.groups import groups_of

    with_ring = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["r"], ring), *config.kv_cache_groups]
    )
    groups = groups_of(with_ring, engine.scheduler.vllm_config)

    assert groups.group_ids == (1, 2)
    assert engine.groups.group_ids == (0, 1)


def test_vllm_is_told_exactly_the_groups_that_a_load_fills(model: Path) -> None:
    """It zeroes the new blocks of the others in that very step (models with state need zeroed blocks)."""
    specs = [full(), state(), window(40)]
    server = HybridServer()
    HybridEngine(model, server, specs).finish("a", tokens(8, 200))
    engine = HybridEngine(model, server, specs)
    request = engine.finish("b", tokens(8, 200))

    assert engine.connector.get_loaded_kv_cache_group_ids(request) == (0, 1, 2)
    assert {group for _, group, _ in engine.worker.num_loaded} == {0, 1, 2}
    assert any(output.new_block_ids_to_zero for output in engine.outputs), "this model's blocks are zeroed at all"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_c29_a_failed_load_is_reported_by_request_and_computed(
    model: Path, specs: list[Any], shape: dict[str, Any], policy: str
) -> None:
    """vLLM 0.31 and later ends the engine when blocks are named instead. With `fail` only that request errs."""
    server = HybridServer()
    HybridEngine(model, server, specs).finish("a", tokens(9, 200))
    engine = HybridEngine(model, server, specs, policy=policy, **shape)
    engine.worker.fail_loads = True
    request = engine.add("b", tokens(9, 200), max_tokens=3)
    engine.run()

    assert engine.worker.num_failed == 1
    assert engine.finished["b"] == ("length" if policy == "recompute" else "error")
    if policy == "recompute":
        assert engine.connector.stats.data["scheduler"]["loads:failed"] == 1
    engine.check_answer(request)
    engine.worker.fail_loads = False
    engine.clear_local()
    engine.finish("c", tokens(9, 200), max_tokens=3)
    assert engine.connector.matches[-1][2] == (hit(engine.unit, 200), True)
    engine.check_idle()


def test_a_block_that_went_between_promise_and_load_is_computed(model: Path, specs: list[Any]) -> None:
    server = HybridServer()
    first = HybridEngine(model, server, specs)
    keys = first.keys_of(first.finish("a", tokens(10, 200)))
    engine = HybridEngine(model, server, specs)
    engine.worker.load_delay = 2
    engine.add("b", tokens(10, 200), max_tokens=3)
    engine.step()
    last = hit(engine.unit, 200) // engine.unit - 1
    for group in range(len(engine.groups.stored)):
        server.stored.pop((group, keys[last]))
    engine.run()

    assert engine.worker.num_failed == 1
    assert engine.finished["b"] == "length"
    engine.check_idle()


def test_vllms_own_hash_unit_may_be_smaller_than_every_block(model: Path) -> None:
    """Ours are keys of whole units; `prefix_match_unit` is 8 here (fact 7 of the cases)."""
    specs = [full(16), window(70, block_size=32)]
    server = HybridServer()
    first = HybridEngine(model, server, specs, hash_unit=8)
    first.finish("a", tokens(11, 150), max_tokens=20)
    second = HybridEngine(model, server, specs, hash_unit=8)
    second.finish("b", tokens(11, 150), max_tokens=20)

    assert second.unit == 32
    assert second.connector.matches[-1][2] == (128, True)
    assert len(server.keys_of(0)) == 5
    second.check_idle()


def test_the_wire_of_a_plain_model_has_no_groups(model: Path) -> None:
    """One full-attention group is what it always was: no window, nothing else to ask for, its own fingerprint."""
    from tests.fakes import FakeServer
    from tests.scheduler.harness import Engine

    connector = Engine(model, FakeServer()).connector
    hello = connector._scheduler_hello()

    assert connector._groups.is_plain
    assert (hello.window, hello.others, hello.num_replicas) == (0, (), 1)
    assert hello.fingerprint == connector._namespace.fingerprint


def test_random_walks(model: Path, specs: list[Any], shape: dict[str, Any]) -> None:
    """Shared prefixes, scarce blocks, small chunks, lost blocks, failed and late loads, aborts, cleared caches."""
    assert sum(_walk(model, specs, shape, seed) for seed in range(6)) > 0


def _walk(model: Path, specs: list[Any], shape: dict[str, Any], seed: int) -> int:
    """Two engines, one after the other, on one server. Returns how many loads there were."""
    dice = random.Random(f"{seed} {len(specs)} {shape}")
    server = HybridServer()
    prefixes = [tokens(100 + number, dice.choice([40, 90, 130, 200])) for number in range(3)]
    num_loaded = 0
    for life in range(2):
        engine = HybridEngine(
            model,
            server,
            specs,
            num_blocks=dice.choice([60, 90]),
            max_num_batched_tokens=dice.choice([64, 96, 512]),
            **shape,
        )
        for step in range(160):
            live = [name for name in engine.scheduler.requests if name not in engine.finished]
            if dice.random() < 0.2 and len(live) < 5:
                asked = [*dice.choice(prefixes), *tokens(dice.randrange(5), dice.randrange(1, 60))]
                engine.add(f"r{life}-{step}", asked, max_tokens=dice.choice([1, 5, 40]))
            if dice.random() < 0.05 and live:
                engine.abort(dice.choice(live))
            if dice.random() < 0.05:
                engine.scheduler.reset_prefix_cache()
            if dice.random() < 0.1 and server.stored:
                server.stored.pop(dice.choice(list(server.stored)))
            if dice.random() < 0.05:
                server.down = dice.random() < 0.3
            if dice.random() < 0.05:
                engine.worker.fail_loads = dice.random() < 0.3
            if dice.random() < 0.1:
                engine.worker.load_delay = dice.randrange(4)
            engine.step()
        engine.worker.fail_loads = False
        engine.run()
        engine.check_idle()
        num_loaded += len(engine.worker.num_loaded)
    return num_loaded
