"""Redis behind the server: blocks outlive daemon and engine, reach the engines of another node, and are never waited
for in vain.

Two daemons on one Redis are two nodes. The link of the second one leads through a proxy; one engine lives there, for
all tests of this file. An engine at the first node writes and ends.
"""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cache_server.config import DEFAULT_GATE_SHARE
from tests.engine.conftest import Cold
from tests.engine.engine import Answer, Engine, connector_config, wait_until
from tests.engine.prefixd import Prefixd
from tests.models import prompt
from tests.proxy import Proxy
from tests.redis.servers import RedisServer

LOADED = "vllm:prefixd_loaded_tokens"
LOOKUPS = "vllm:prefixd_lookups"
DEADLINE_S = 3.0  # lookup_timeout_ms of `connector_config`
SLACK = 3
WAIT_S = 60.0  # for what comes in its own time
OPEN_GATE = 10.0  # this engine computes so fast that on a busy machine a gate of 0.8 is right to shut
H_300 = 288  # the largest legal hit of 300 tokens in blocks of 32


@dataclass(frozen=True)
class Node:
    """A daemon on Redis, the link between the two, and the engine that is attached to it."""

    daemon: Prefixd
    redis: RedisServer
    link: Proxy
    engine: Engine

    def restart(self, gate_share: float = OPEN_GATE) -> None:
        """With an empty memory, and with what it now measures of the link."""
        self.daemon.stop()
        self.daemon.options = (*self.daemon.options[:2], "--gate-share", str(gate_share))
        self.daemon.start()
        wait_until(lambda: self.daemon.attached(2), 90, "the engine is attached to the new daemon")
        self.engine.clear_local()

    def counters(self) -> dict[str, int]:
        return dict(self.daemon.stats().counters)

    def ask(self, asked: list[int], num_answered: int = 4) -> tuple[Answer, float]:
        """The answer, the engine's own cache being empty, and how long it took."""
        self.engine.clear_local()
        started = time.monotonic()
        answer = self.engine.generate_one(asked, max_tokens=num_answered)
        return answer, time.monotonic() - started


@pytest.fixture(scope="module")
def redis(folder: Path) -> Iterator[RedisServer]:
    with RedisServer(folder / "redis") as server:
        yield server


@pytest.fixture(scope="module")
def node(folder: Path, settings: dict[str, Any], redis: RedisServer, cold_engine: Engine) -> Iterator[Node]:
    """`cold_engine` is asked for to be started at the same time."""
    (folder / "second").mkdir()
    with (
        Proxy(redis.address) as link,
        Prefixd(
            folder / "second", "--redis", f"redis://127.0.0.1:{link.port}", "--gate-share", str(OPEN_GATE)
        ) as daemon,
    ):
        engine = Engine(folder / "reader.log", **settings, kv_transfer_config=connector_config(daemon.unix_address))
        try:
            yield Node(daemon, redis, link, engine)
        finally:
            engine.kill()


def test_c69_what_one_node_saved_another_loads_and_a_restart_does_not_lose(
    folder: Path, settings: dict[str, Any], redis: RedisServer, node: Node, cold: Cold
) -> None:
    """The second node never had the blocks in its memory; then it is restarted."""
    asked = prompt(6900, 300)
    (folder / "first").mkdir()
    with (
        Prefixd(folder / "first", "--redis", redis.url) as first,
        Engine(folder / "writer.log", **settings, kv_transfer_config=connector_config(first.unix_address)) as writer,
    ):
        written = writer.generate_one(asked, max_tokens=12)
        wait_until(lambda: len(redis.payload_keys()) == 9, WAIT_S, "nine blocks are in Redis")

    wait_until(lambda: node.daemon.attached(2), WAIT_S, "the reader is attached")
    other_node, _ = node.ask(asked, 12)
    loaded_there = node.engine.metric(LOADED)
    node.restart()
    assert node.daemon.num_blocks() == 0
    restarted, _ = node.ask(asked, 12)
    loaded_after = node.engine.metric(LOADED)

    right = cold(asked, 12)
    assert written.token_ids == other_node.token_ids == restarted.token_ids == right
    assert (other_node.num_cached_tokens, restarted.num_cached_tokens) == (H_300, H_300)
    assert (loaded_there, loaded_after) == (H_300, 2 * H_300)


def test_c49_what_is_silent_costs_one_request_one_deadline_and_the_next_ones_nothing(node: Node, cold: Cold) -> None:
    """Each request looks up, loads 9 blocks and saves 20. Redis is a black hole, and then the daemon too."""
    head = prompt(4900, H_300)
    requests = [head + prompt(4901 + number, 20 * 32 + 10) for number in range(8)]
    stored = node.daemon.num_blocks()
    node.ask(head + prompt(4999, 12))
    wait_until(lambda: node.daemon.num_blocks() == stored + 9, WAIT_S, "the head is stored")

    def ask(number: int, num_cached: int) -> float:
        answer, took_s = node.ask(requests[number])
        assert answer.token_ids == cold(requests[number], 4)
        assert answer.num_cached_tokens == num_cached
        return took_s

    def deadlines_spent() -> float:
        return node.engine.metric(LOOKUPS, outcome="unanswered")

    # The positive control: what it costs while all is well, and that it is a load and 20 saves.
    stored, spent = node.daemon.num_blocks(), deadlines_spent()
    usual_s = max(ask(0, H_300), ask(1, H_300))
    wait_until(lambda: node.daemon.num_blocks() == stored + 40, WAIT_S, "two times 20 blocks are saved")

    def assert_paid_once(first_s: float, later_s: float) -> None:
        assert first_s <= SLACK * usual_s + DEADLINE_S
        assert later_s <= SLACK * usual_s + DEADLINE_S / 2

    node.link.stop()
    try:
        first_s = ask(2, H_300)
        later_s = max(ask(3, H_300), ask(4, H_300))
        wait_until(lambda: node.daemon.num_blocks() == stored + 100, WAIT_S, "memory takes all blocks")
        wait_until(lambda: node.counters()["redis_up"] == 0, WAIT_S, "Redis is given up")
        assert deadlines_spent() == spent  # the daemon answers
        assert_paid_once(first_s, later_s)

        node.daemon.send_signal(signal.SIGSTOP)
        first_s = ask(5, 0)
        spent_by_first = deadlines_spent()
        later_s = max(ask(6, 0), ask(7, 0))
        assert deadlines_spent() == spent_by_first <= spent + 1
        assert_paid_once(first_s, later_s)
    finally:
        node.daemon.send_signal(signal.SIGCONT)
        node.link.resume()


def test_a_hit_is_promised_only_where_loading_pays(node: Node, cold: Cold) -> None:
    """896 tokens of 4 KiB each: a link of 500 kB/s needs 7 s for what this engine computes in about one."""
    asked = prompt(3000, 900)
    node.restart(DEFAULT_GATE_SHARE)
    present = len(node.redis.payload_keys())
    node.ask(asked)
    wait_until(lambda: len(node.redis.payload_keys()) == present + 28, WAIT_S, "28 blocks are in Redis")

    node.link.bytes_per_s = 500e3
    node.restart(DEFAULT_GATE_SHARE)
    loaded, spent = node.engine.metric(LOADED), node.engine.metric(LOOKUPS, outcome="unanswered")
    slow, _ = node.ask(asked)
    figures = node.counters()
    assert (figures["gate_shut"], figures["gate_open"], figures["promoted_bytes"]) == (1, 0, 0)
    assert figures["gate_load_us"] > DEFAULT_GATE_SHARE * figures["gate_recompute_us"] > 0
    assert 250e3 < figures["redis_bytes_per_s"] < 750e3
    assert slow.num_cached_tokens == 0
    assert node.engine.metric(LOADED) == loaded
    assert node.engine.metric(LOOKUPS, outcome="unanswered") == spent  # the wait was shorter than a deadline

    node.link.bytes_per_s = 0
    node.restart(DEFAULT_GATE_SHARE)
    free, _ = node.ask(asked)
    figures = node.counters()
    assert (figures["gate_shut"], figures["gate_open"], figures["promoted_bytes"]) == (0, 1, 28 * 32 * 4096)
    assert figures["gate_load_us"] < DEFAULT_GATE_SHARE * figures["gate_recompute_us"]
    assert free.num_cached_tokens == 896
    assert node.engine.metric(LOADED) == loaded + 896
    assert slow.token_ids == free.token_ids == cold(asked, 4)


@pytest.mark.long
def test_the_gate_on_the_demo_model(folder: Path, llama_250m: Path) -> None:
    """4,096 tokens of 32 KiB (134 MB), computed in 10 to 20 s: at 2 MB/s they are computed, at 20 MB/s loaded."""
    asked = prompt(4096, 4096)
    num_bytes = 127 * 32 * 32768
    (folder / "gate").mkdir()
    with (
        RedisServer(folder / "gate" / "redis") as redis,
        Proxy(redis.address) as link,
        Prefixd(folder / "gate", "--redis", f"redis://127.0.0.1:{link.port}") as daemon,
        Engine(
            folder / "gate" / "engine.log",
            model=str(llama_250m),
            dtype="float32",
            block_size=32,
            max_model_len=4352,
            max_num_seqs=2,
            enforce_eager=True,
            kv_transfer_config=connector_config(daemon.unix_address),
        ) as engine,
    ):
        node = Node(daemon, redis, link, engine)
        wait_until(lambda: daemon.attached(2), 30, "the engine is attached")
        computed, _ = node.ask(asked)
        wait_until(lambda: len(redis.payload_keys()) == 128, 30, "all blocks are in Redis")
        for bytes_per_s, is_open in ((2e6, False), (20e6, True), (0, True)):
            link.bytes_per_s = bytes_per_s
            node.restart(DEFAULT_GATE_SHARE)
            spent = engine.metric(LOOKUPS, outcome="unanswered")
            answer, took_s = node.ask(asked)
            figures = node.counters()
            print(f"{bytes_per_s / 1e6:.0f} MB/s: {took_s:.1f} s, first token after {answer.first_token_s:.1f} s")
            assert (figures["gate_open"], figures["gate_shut"]) == (is_open, not is_open)
            assert figures["promoted_bytes"] == is_open * num_bytes
            assert figures["gate_cut"] == 0
            assert answer.num_cached_tokens == is_open * 127 * 32
            assert engine.metric(LOOKUPS, outcome="unanswered") == spent
            assert answer.token_ids == computed.token_ids
