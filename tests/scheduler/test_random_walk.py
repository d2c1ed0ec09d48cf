"""Random lives of requests, checked after every step: 1,000 steps in each shape, 10,000 with --long.

A walk is a row of engines, each with dice of its own for its size, its role and its settings; the server may outlive
them. In every step some of everything happens that can: requests come (with shared prefixes, salts, options, used ids)
and go, blocks are scarce, chunks small, steps skipped or preempted, caches reset, weights changed; lookups are late,
unanswered or refused; blocks vanish; loads are late, fail or do not end; commits are late or lost.

What holds after each step is checked by the harness (see its docstring), and when an engine is left, that nothing of
any request remains and that every answer is that of an engine without a cache.

A failure names its seed, its step and the last events; `PREFIXD_WALK_SEED=<seed>` walks that way again.
"""

import os
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.fakes import FakeServer
from tests.scheduler.harness import SHAPES, Engine, trouble_without_connector

STEPS_PER_ENGINE = 125
MAX_LIVE = 9
SEED = int(os.environ.get("PREFIXD_WALK_SEED", "0"))


class Walk:
    """One engine after the other, on one server as long as the dice like it."""

    def __init__(self, model: Path, shape: dict[str, Any], seed: int) -> None:
        self.dice = random.Random(seed)
        self.model = model
        self.shape = shape
        self.last_events: deque[str] = deque(maxlen=40)
        self.num_steps = 0
        self.num_loaded_blocks = 0
        self.num_preemptions = 0
        self.server = FakeServer()
        # 0.26 with steps in flight loses tokens of drafts that were right when it preempts, without any connector.
        name = next(name for name, one in SHAPES.items() if one is shape)
        self.may_draft = trouble_without_connector(model, name, num_drafts=3) is None
        self.events: list[tuple[float, Callable[[], Any]]] = [
            (0.25, self.add),
            (0.05, self.abort),
            (0.02, self.use_an_id_again),
            (0.02, self.preempt),
            (0.02, self.reset_local),
            (0.006, self.load_new_weights),
            (0.02, self.pause_or_go_on),
            (0.05, self.lose_a_block),
            (0.01, self.restart_server),
            (0.03, self.trouble_server),
            (0.03, self.hold_lookups),
            (0.15, self.calm_servers),
            (0.08, self.let_time_pass),
            (0.10, self.change_worker),
            (0.01, self.drain),
        ]

    def run(self, num_steps: int) -> None:
        while self.num_steps < num_steps:
            self.begin()
            for _ in range(STEPS_PER_ENGINE):
                self.num_steps += 1
                for chance, event in self.events:
                    if self.dice.random() < chance:
                        self.note(event.__name__)
                        event()
                self.engine.step()
            self.drain()
            self.num_preemptions += sum(request.num_preemptions for request in self.engine.all_requests)
            self.num_loaded_blocks += self.engine.worker.num_loaded_blocks

    def note(self, event: str) -> None:
        self.last_events.append(f"{self.num_steps} {event}")

    def begin(self) -> None:
        dice = self.dice
        if dice.random() < 0.5:
            self.server = FakeServer()
        beside = FakeServer(self.server.clock) if dice.random() < 0.25 else None
        arguments = {
            "num_blocks": dice.choice([12, 16, 24, 64]),
            "max_num_batched_tokens": dice.choice([17, 40, 512]),
            "enable_prefix_caching": dice.random() < 0.5,
            "scheduling_policy": dice.choice(["fcfs", "priority"]),
            "policy": dice.choice(["recompute", "recompute", "fail"]),
            "beside": beside,
            "ours_first": dice.random() < 0.5,
            "role": dice.choice(["kv_both"] * 4 + ["kv_producer", "kv_consumer"]) if beside is None else "kv_both",
            "num_drafts": 3 if dice.random() < 0.3 and self.may_draft else 0,
            "max_model_len": dice.choice([512, 512, 82, 97]),
            "extra_config": {
                "save_decoded": dice.random() < 0.8,
                "min_load_tokens": dice.choice([0, 0, 40]),
            },
        }
        self.note(f"begin {arguments}")
        self.engine = Engine(self.model, self.server, **arguments, **self.shape)
        self.max_prompt = arguments["max_model_len"] - 2
        self.servers = [one for one in (self.server, beside) if one is not None]
        self.prefixes = [[dice.randrange(2048) for _ in range(dice.choice([20, 48, 90]))] for _ in range(3)]
        self.num_added = 0

    # --- what requests do

    def live(self) -> list[str]:
        return [name for name in self.engine.scheduler.requests if name not in self.engine.finished]

    def add(self) -> None:
        self.num_added += 1
        self.add_as(f"r{self.num_added}")

    def add_as(self, request_id: str) -> None:
        dice = self.dice
        if len(self.live()) >= MAX_LIVE:
            return
        prompt = [*dice.choice(self.prefixes), *(dice.randrange(2048) for _ in range(dice.randrange(1, 40)))]
        if dice.random() < 0.2:
            prompt = prompt[: max(len(prompt) // 16, 1) * 16]  # ends on the edge of a block
        prompt = prompt[: self.max_prompt]
        fields: dict[str, Any] = {}
        if dice.random() < 0.15:
            fields["cache_salt"] = dice.choice(["a", "b"])
        if dice.random() < 0.1:
            fields["skip_reading_prefix_cache"] = True
        if dice.random() < 0.2:
            fields["kv_transfer_params"] = {
                "prefixd.save": dice.choice(["all", "prompt", "none"]),
                "prefixd.load": dice.random() < 0.5,
            }
        self.engine.add(request_id, prompt, dice.randrange(1, 40), priority=dice.randrange(3), **fields)

    def abort(self) -> None:
        if self.live():
            self.engine.abort(self.dice.choice(self.live()))

    def use_an_id_again(self) -> None:
        """Only of a request whose last step is answered: vLLM gives a late answer to whoever has the id then."""
        engine = self.engine
        busy = {name for output, _ in engine._queue for name in output.num_scheduled_tokens}
        free = [name for name in engine.finished if name not in engine.scheduler.requests and name not in busy]
        if free:
            self.add_as(self.dice.choice(free))

    # --- what the engine does

    def preempt(self) -> None:
        self.engine.preempt_all()

    def reset_local(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    def load_new_weights(self) -> None:
        self.engine.load_new_weights(preempt=self.dice.random() < 0.5)

    def pause_or_go_on(self) -> None:
        paused = self.engine.scheduler.pause_state != PauseState.UNPAUSED
        self.engine.scheduler.set_pause_state(
            PauseState.UNPAUSED if paused else self.dice.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
        )

    def change_worker(self) -> None:
        worker, dice = self.engine.worker, self.dice
        worker.load_delay = dice.choice([0, 0, 1, 4])
        worker.commit_delay = dice.choice([0, 1, 5])
        worker.withhold_loads = dice.random() < 0.1
        worker.lose_commits = dice.random() < 0.1
        worker.loads_before_forward = dice.random() < 0.5
        if self.engine.scheduler.num_spec_tokens:
            worker.num_right_drafts = dice.choice([0, 1, 2, 3])

    def drain(self) -> None:
        """Everything that is late arrives; then nothing of any request may remain."""
        engine = self.engine
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.worker.withhold_loads = engine.worker.lose_commits = False
        self.calm_servers()
        engine.run(3000)
        self.server.clock.advance(FakeServer.LEASE_S)  # of answers that came too late for their request
        engine.check_answers()
        engine.check_idle()

    # --- what the server does

    def lose_a_block(self) -> None:
        server = self.dice.choice(self.servers)
        if server.blocks:
            server.drop(self.dice.choice(sorted(server.blocks)))

    def restart_server(self) -> None:
        self.dice.choice(self.servers).restart()

    def trouble_server(self) -> None:
        trouble = self.dice.choice(["down", "failing", "workers_missing", "leases_refused"])
        setattr(self.dice.choice(self.servers), trouble, True)

    def hold_lookups(self) -> None:
        self.dice.choice(self.servers).hold()

    def calm_servers(self) -> None:
        for server in self.servers:
            server.let_go()
            server.down = server.failing = server.workers_missing = server.leases_refused = False

    def let_time_pass(self) -> None:
        self.server.clock.advance(self.dice.choice([0.1, 1.0, 3.0, 9.0]))


def _walk(model: Path, shape: dict[str, Any], seed: int, num_steps: int) -> Walk:
    walk = Walk(model, shape, seed)
    try:
        walk.run(num_steps)
    except Exception as error:
        events = "\n".join(walk.last_events)
        raise AssertionError(f"seed {seed}, step {walk.num_steps}: {error}\nafter\n{events}") from error
    return walk


def test_a_random_walk(model: Path, shape: dict[str, Any]) -> None:
    """1,000 steps."""
    walk = _walk(model, shape, SEED, 1000)

    assert walk.num_preemptions >= 20, "positive control"
    assert walk.num_loaded_blocks >= 5, "positive control"


@pytest.mark.long
def test_a_long_random_walk(model: Path, shape: dict[str, Any]) -> None:
    """10,000 steps, another way every time."""
    _walk(model, shape, SEED or random.SystemRandom().randrange(1 << 32), 10_000)
