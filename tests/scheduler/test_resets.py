"""C19 over several engines: what one engine's reset changes, and for whom."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeServer
from tests.scheduler.harness import Engine
from tests.scheduler.test_trouble import PROMPT, filled, matches_of

# What is told here does not depend on the shape; `test_trouble.py` resets in the middle of everything, in all of them.
pytestmark = pytest.mark.parametrize("shape", ["V1", "V2, two steps in flight"], indirect=True)
HIT, MISS = (96, True), (0, False)


def hit_of(engine: Engine, name: str) -> tuple[int, bool]:
    """After "clear local": what the engine is told about the prompt; it is computed or loaded, and saved."""
    engine.clear_local()
    engine.finish(name, PROMPT)
    engine.check_answers()
    (match,) = set(matches_of(engine, name))
    return match


def test_two_engines_of_which_one_resets(model: Path, shape: dict[str, Any]) -> None:
    """Old blocks stay the other's, new ones are the resetter's alone; a second reset is another epoch."""
    one = filled(model, **shape)
    other = Engine(model, one.server, **shape)
    assert hit_of(other, "before") == HIT

    assert one.scheduler.reset_prefix_cache(reset_connector=True) is True

    assert hit_of(other, "others old blocks") == HIT
    assert [hit_of(one, name) for name in ("first", "second")] == [MISS, HIT]
    assert hit_of(other, "others old blocks, again") == HIT
    assert one.scheduler.reset_prefix_cache(reset_connector=True) is True
    assert hit_of(one, "third") == MISS


def test_the_daemon_is_down_during_the_reset(model: Path, shape: dict[str, Any]) -> None:
    """It answers True without asking anybody; when the daemon is back, the old blocks are not this engine's."""
    engine = filled(model, **shape)
    engine.server.down = True
    calls = dict(engine.server.calls)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is True
    assert engine.server.calls == calls
    engine.server.down = False

    assert [hit_of(engine, name) for name in ("first", "second")] == [MISS, HIT]


def test_an_engine_restarted_after_a_reset_shares_again(model: Path, shape: dict[str, Any]) -> None:
    """It loads its weights anew, and what they are decides: of the reset's epoch it knows nothing."""
    engine = filled(model, **shape)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is True
    assert hit_of(engine, "new weights") == MISS
    epoch = engine.side._epoch

    restarted = Engine(model, engine.server, **shape)

    assert restarted.side._epoch == b"" != epoch
    assert hit_of(restarted, "as before the reset") == HIT


def test_engines_share_again_after_a_roll_out(model: Path, shape: dict[str, Any]) -> None:
    """`weights_version` is how an operator says that they have the same new weights; the old blocks are nobody's."""
    server = filled(model, **shape).server
    first, second = (Engine(model, server, extra_config={"weights_version": "2026-01"}, **shape) for _ in range(2))

    assert hit_of(first, "first") == MISS
    assert hit_of(second, "second") == HIT
    assert hit_of(Engine(model, server, **shape), "the old version") == HIT
    assert isinstance(server, FakeServer)
