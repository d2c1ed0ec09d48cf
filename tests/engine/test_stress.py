"""Engines that are short of memory, behind a line that is slow, with clients that leave: right all the same.

All use one server and keep records, so that at the end every payload of the server can be compared with what
an engine held when it was saved. `tight` and `slow` go through a proxy, `mapped` does not:

    tight   8 blocks for 2 sequences, over streams
    slow    33 blocks for 8 sequences, over streams
    mapped  the same on mapped slots

Each runs vLLM's scheduler with an eye on it (`recording_scheduler.py`): after every test nothing may be left of any
request, in vLLM and on both sides of the connector, and all blocks are free again.

Numbers C05 … are those of the acceptance cases. `cold` answers, in one batch, are of an engine without the connector.
"""

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import BLOCK_SIZE, Cold
from tests.engine.engine import Answer, Engine, connector_config, wait_until
from tests.engine.oracle import Records
from tests.engine.prefixd import Prefixd
from tests.engine.recording_connector import FOLDER, SLOW
from tests.engine.recording_scheduler import WATCH, States
from tests.models import prompt
from tests.proxy import Proxy

pytestmark = pytest.mark.long  # six minutes on two busy cores

LOADED = "vllm:prefixd_loaded_tokens"
PROMISED = "vllm:prefixd_promised_tokens"
LOOKUPS = "vllm:prefixd_lookups"
PREEMPTIONS = "vllm:num_preemptions"
PAYLOAD_BYTES = 128 << 10  # of one block of this model in float32

NAMES = ("tight", "slow", "mapped")
NUM_BLOCKS = 33  # one of them is vLLM's null block: 32 hold a sequence of the maximal length, and nothing beside it

seeds = itertools.count(1000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefixd]:
    """Its gate is open: what is shown here is that a load is right, not that it pays."""
    with Prefixd(tmp_path_factory.mktemp("stress"), "--gate-share", "10") as server:
        yield server


@pytest.fixture(scope="module")
def line(server: Prefixd) -> Iterator[Proxy]:
    host, port = server.port_address.split(":")
    with Proxy((host, int(port))) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def a_good_line(line: Proxy) -> Iterator[None]:
    yield
    line.delay_s = line.bytes_per_s = 0.0


@pytest.fixture(scope="module")
def records_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def engines(
    settings: dict[str, Any], server: Prefixd, line: Proxy, records_folder: Path, cold_engine: Engine
) -> Iterator[dict[str, Engine]]:
    proxied = f"127.0.0.1:{line.port}"
    many = {"num_gpu_blocks_override": NUM_BLOCKS, "max_num_seqs": 8}
    few = {"num_gpu_blocks_override": 8, "max_num_seqs": 2, "max_model_len": 7 * BLOCK_SIZE}
    for name in NAMES:
        (records_folder / name).mkdir()
    started = {
        name: Engine(
            records_folder / f"{name}.log",
            driver="async_driver",
            environment={FOLDER: str(records_folder / name)},
            scheduler_cls="tests.engine.recording_scheduler.RecordingScheduler",
            **{**settings, **more},
            kv_transfer_config=connector_config(
                address, connector="RecordingConnector", module="tests.engine.recording_connector"
            ),
        )
        for name, address, more in zip(NAMES, (proxied, proxied, server.unix_address), (few, many, many), strict=True)
    }
    try:
        yield {name: engine.wait_ready() for name, engine in started.items()}
    finally:
        for engine in started.values():
            engine.kill()


@pytest.fixture
def states(engines: dict[str, Engine], records_folder: Path) -> dict[str, States]:
    return {name: States(records_folder / name) for name in NAMES}


@pytest.fixture(autouse=True)
def nothing_is_left(states: dict[str, States]) -> Iterator[None]:
    """After each test, of any request: in vLLM, on the connector's scheduler side, and on its worker side (C13, C58).
    And no load was reported twice, none as sent (C12).
    """
    yield
    for name, one in states.items():
        wait_until(one.is_idle, 15, f"{name} is idle: {one.of_scheduler()}, {one.of_worker()}")
        assert one.of_scheduler()["twice"] == []


@pytest.fixture
def tight(engines: dict[str, Engine]) -> Engine:
    return engines["tight"]


@pytest.fixture
def slow(engines: dict[str, Engine]) -> Engine:
    return engines["slow"]


def settled_blocks(server: Prefixd) -> int:
    """The number of blocks in the server, once no more have come for a second: saves of earlier tests have ended."""
    counts = [server.num_blocks()]

    def is_settled() -> bool:
        counts.append(server.num_blocks())
        return len(counts) > 10 and len(set(counts[-10:])) == 1

    wait_until(is_settled, 30, "the saves of earlier tests have ended")
    return counts[-1]


def is_stored(server: Prefixd, engine: Engine, *prompts: list[int]) -> None:
    """Computes the prompts, one after the other, and waits until the server has all their full blocks."""
    before = settled_blocks(server)
    num_blocks = len({tuple(one[:stop]) for one in prompts for stop in range(BLOCK_SIZE, len(one) + 1, BLOCK_SIZE)})
    for one in prompts:
        engine.play({"prompt": one, "sampling": {"max_tokens": 1}})
    wait_until(lambda: server.num_blocks() - before == num_blocks, 10, f"{num_blocks} more blocks in the server")
    engine.clear_local()


def cold_answers(cold_engine: Engine, asked: list[dict[str, Any]]) -> list[list[int]]:
    cold_engine.clear_local()
    sampling = [one["sampling"] for one in asked]
    answers = cold_engine.generate(*(one["prompt"] for one in asked), sampling=sampling)
    return [answer.token_ids for answer in answers]


def mismatches(answers: list[Answer], right: list[list[int]]) -> list[int]:
    """The numbers of the requests whose answer is not the right one; of those that were aborted, its beginning."""
    return [
        i
        for i, (answer, whole) in enumerate(zip(answers, right, strict=True))
        if answer.token_ids != (whole[: len(answer.token_ids)] if answer.finish_reason == "abort" else whole)
    ]


def mixed_requests(dice: random.Random, number: int) -> list[dict[str, Any]]:
    """Shared prefixes, tails from none to half the memory, one in eight aborted somewhere on its way."""
    prefixes = [prompt(next(seeds), num_tokens) for num_tokens in (40, 96, 200, 320)]
    return [
        {
            "prompt": [*dice.choice(prefixes), *prompt(next(seeds), dice.choice([1, 8, 24, 60, 140]))],
            "sampling": {"max_tokens": dice.choice([1, 5, 20, 60])},
            "at_s": dice.random() * number / 25,
            "abort_s": dice.random() * 2 if dice.random() < 1 / 8 else None,
        }
        for _ in range(number)
    ]


@pytest.mark.parametrize("name", ["slow", "mapped"])
def test_requests_with_preemptions_aborts_and_a_slow_server(
    engines: dict[str, Engine], cold_engine: Engine, line: Proxy, name: str
) -> None:
    """Every answer equals cold, while the line is now good, now late, now narrow: 300 requests over both engines."""
    dice, engine = random.Random(name), engines[name]
    asked = mixed_requests(dice, 150)
    right = cold_answers(cold_engine, asked)
    before = {counter: engine.metric(counter) for counter in (PREEMPTIONS, LOADED)}
    is_over = threading.Event()

    def trouble() -> None:
        while not is_over.wait(0.7):
            line.delay_s = dice.choice([0.0, 0.02, 0.2])
            line.bytes_per_s = dice.choice([0.0, 2e6, 20e6])

    troubler = threading.Thread(target=trouble)
    troubler.start()
    try:
        answers = engine.play(*asked)
    finally:
        is_over.set()
        troubler.join()

    assert mismatches(answers, right) == []
    assert sum(answer.finish_reason == "abort" for answer in answers) >= 5, "positive control"
    assert engine.metric(PREEMPTIONS) - before[PREEMPTIONS] >= 10, "positive control"
    assert engine.metric(LOADED) - before[LOADED] >= 30 * BLOCK_SIZE, "positive control"


def test_c05_pages_that_are_used_again_while_their_save_is_under_way(
    tight: Engine, cold_engine: Engine, line: Proxy
) -> None:
    """200 short requests, two at a time in 8 blocks, and a server that hears of every save 300 ms later.

    They do not wait for lookups, which would be as late.
    """
    dice = random.Random(5)
    asked = [
        {
            "prompt": prompt(next(seeds), dice.randrange(50, 100)),
            "sampling": {
                "max_tokens": dice.randrange(1, 25),
                "extra_args": {"kv_transfer_params": {"prefixd.load": False}},
            },
        }
        for _ in range(200)
    ]
    before = tight.metric(PREEMPTIONS)
    line.delay_s = 0.3
    answers = tight.play(*asked)

    assert mismatches(answers, cold_answers(cold_engine, asked)) == []
    assert tight.metric(PREEMPTIONS) - before >= 5, "positive control"


def test_c12_c13_fifty_clients_leave_while_their_blocks_are_loaded(
    slow: Engine, cold: Cold, server: Prefixd, line: Proxy
) -> None:
    """A load takes 1 s, the client leaves after 0.2 s: the engine lives, and no block of its memory is missing."""
    asked = prompt(next(seeds), 490)
    is_stored(server, slow, asked)
    promised, loaded = slow.metric(PROMISED), slow.metric(LOADED)
    line.bytes_per_s = 15 * PAYLOAD_BYTES / 1.0
    for _ in range(50):
        (left,) = slow.play({"prompt": asked, "sampling": {"max_tokens": 4}, "abort_s": 0.2})
        assert left.finish_reason == "abort"
    line.bytes_per_s = 0.0

    assert slow.metric(PROMISED) - promised >= 10 * 480, "positive control: they left while they were loaded"
    wait_until(slow.is_cleared, 15, "no block of its memory is in use")
    whole = prompt(next(seeds), NUM_BLOCKS * BLOCK_SIZE - 2 * BLOCK_SIZE)
    answers = slow.play(
        {"prompt": whole, "sampling": {"max_tokens": 30}}, {"prompt": asked, "sampling": {"max_tokens": 4}}
    )
    assert [answer.token_ids for answer in answers] == [cold(whole, 30), cold(asked, 4)], "the first needs all blocks"
    assert slow.metric(LOADED) - loaded >= 480, "the last one's load"
    assert (slow.metric("vllm:num_requests_running"), slow.metric("vllm:num_requests_waiting")) == (0, 0)
    wait_until(lambda: server.stats().leased_bytes == 0, 15, "no lease is left")


def test_c12_c13_clients_leave_while_slots_are_copied(
    engines: dict[str, Engine], cold: Cold, server: Prefixd, records_folder: Path
) -> None:
    """As above on mapped slots, whose copy begins a second late."""
    engine, asked, slow = engines["mapped"], prompt(next(seeds), 490), records_folder / "mapped" / SLOW
    is_stored(server, engine, asked)
    promised = engine.metric(PROMISED)
    slow.write_text("1.0")
    for _ in range(5):
        (left,) = engine.play({"prompt": asked, "sampling": {"max_tokens": 4}, "abort_s": 0.2})
        assert left.finish_reason == "abort"
    slow.unlink()

    assert engine.metric(PROMISED) - promised >= 480, "positive control: they left while they were loaded"
    wait_until(engine.is_cleared, 15, "no block of its memory is in use")
    answers = engine.play({"prompt": asked, "sampling": {"max_tokens": 4}})
    assert [answer.token_ids for answer in answers] == [cold(asked, 4)]


def test_c52_loads_that_hold_the_memory_which_the_head_of_the_queue_needs(
    tight: Engine, cold_engine: Engine, server: Prefixd, records_folder: Path, states: dict[str, States]
) -> None:
    """Memory for one and a half of four stored prompts; these four and a longer one come at once: all finish, and never
    are there 200 steps in a row in which nothing is computed.
    """
    common = prompt(next(seeds), 64)
    stored = [[*common, *prompt(next(seeds), 84)] for _ in range(4)]
    is_stored(server, tight, *stored)
    loaded = tight.metric(LOADED)
    asked = [*stored, [*common, *prompt(next(seeds), 130)]]
    requests = [{"prompt": one, "sampling": {"max_tokens": 10}} for one in asked]
    (records_folder / "tight" / WATCH).write_text("C52")
    answers = tight.play(*requests)

    assert mismatches(answers, cold_answers(cold_engine, requests)) == []
    assert tight.metric(LOADED) - loaded >= 64, "positive control"
    assert states["tight"].of_scheduler()["longest_idle"] < 200


def test_c53_sixteen_requests_of_one_stored_prefix(slow: Engine, cold_engine: Engine, server: Prefixd) -> None:
    """At once: what is loaded is at most twice the prefix, whoever waits for it hits it in the engine's memory."""
    prefix = prompt(next(seeds), 480)
    is_stored(server, slow, prefix)
    loaded = slow.metric(LOADED)
    requests = [
        {"prompt": [*prefix, *prompt(next(seeds), 9)], "sampling": {"max_tokens": 4}, "at_s": 0.0} for _ in range(16)
    ]
    answers = slow.play(*requests)

    assert mismatches(answers, cold_answers(cold_engine, requests)) == []
    assert 480 <= slow.metric(LOADED) - loaded <= 2 * 480
    assert [answer.num_cached_tokens for answer in answers] == [480] * 16


def test_c54_a_running_decode_does_not_wait_for_lookups(slow: Engine, line: Proxy) -> None:
    """Ten prompts come while each answer of the server takes 200 ms more: one lookup each, and no gap of that length.

    A step of this engine takes some 10 ms, one that prefills 128 tokens some 40; on a busy machine much more.
    """
    lookups = slow.metric(LOOKUPS)
    line.delay_s = 0.2
    decode = {"prompt": prompt(next(seeds), 20), "sampling": {"max_tokens": 400}}
    # 20 and 31 tokens fill no block that could be loaded: no question is asked about the decoding one.
    others = [
        {"prompt": prompt(next(seeds), 70), "sampling": {"max_tokens": 1}, "at_s": 1 + 0.1 * i} for i in range(10)
    ]
    answers = slow.play(decode, *others)
    times = answers[0].times_s
    gaps = [after - before for before, after in itertools.pairwise(times)]

    assert slow.metric(LOOKUPS) - lookups == 10, "one per prompt that has a full block, none for the other"
    assert times[-1] > others[-1]["at_s"] + 0.2, "positive control: it still decoded when the last one was asked for"
    assert sum(gap > 0.2 for gap in gaps) <= 3, f"ten would be a scheduler that waits: {sorted(gaps)[-12:]}"


def test_c55_prompt_logprobs_are_complete(slow: Engine, cold_engine: Engine, server: Prefixd) -> None:
    """vLLM computes such a prompt whole: as many rows as tokens, as without the connector, and nothing is loaded."""
    asked = prompt(next(seeds), 200)
    is_stored(server, slow, asked)
    loaded = slow.metric(LOADED)
    (answer,) = slow.play({"prompt": asked, "sampling": {"max_tokens": 4, "prompt_logprobs": 1}})
    cold_engine.clear_local()
    right = cold_engine.generate_one(asked, max_tokens=4, prompt_logprobs=1)

    assert answer.prompt_logprobs is not None
    assert right.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == 200
    assert answer.prompt_logprobs[1:] == pytest.approx(right.prompt_logprobs[1:], abs=1e-4)
    assert answer.token_ids == right.token_ids
    assert slow.metric(LOADED) == loaded
    assert server.stats().leased_bytes == 0
    slow.clear_local()
    slow.play({"prompt": asked, "sampling": {"max_tokens": 1}})
    assert slow.metric(LOADED) - loaded == 192, "positive control: it could have been loaded"


def test_c58_requests_end_in_every_way(tight: Engine, cold: Cold) -> None:
    """A stop token, the number of tokens, aborted before any step, while waiting, while running or preempted.

    What is left of each in the connector is shown on the real Scheduler (tests/scheduler), a stop string over HTTP.
    """
    asked = [prompt(next(seeds), 90) for _ in range(6)]
    right = [cold(one, 40) for one in asked]
    stop = right[0][5]
    answers = tight.play(
        {"prompt": asked[0], "sampling": {"max_tokens": 40, "stop_token_ids": [stop]}},
        {"prompt": asked[1], "sampling": {"max_tokens": 40}},
        {"prompt": asked[2], "sampling": {"max_tokens": 40}, "abort_s": 0.0},
        {"prompt": asked[3], "sampling": {"max_tokens": 40}, "at_s": 0.01, "abort_s": 0.05},
        *({"prompt": one, "sampling": {"max_tokens": 40}, "abort_s": 0.6 + i} for i, one in enumerate(asked[4:])),
    )

    assert answers[0].token_ids == right[0][: right[0].index(stop) + 1]
    assert mismatches(answers[1:], right[1:]) == []
    assert [answer.finish_reason for answer in answers[:4]] == ["stop", "length", "abort", "abort"]
    assert tight.play({"prompt": asked[5], "sampling": {"max_tokens": 40}})[0].token_ids == right[5]


def test_every_payload_of_the_server_is_what_an_engine_held_when_it_saved_it(
    engines: dict[str, Engine], server: Prefixd, records_folder: Path
) -> None:
    """After all the above, of all three engines: 0 mismatches over the whole server, and in all that was loaded."""
    records = Records(records_folder)
    saved = records.digests("saved")
    payloads = records.payload_digests(server, list(saved))
    loads = records.digests("loaded")

    assert [key for key, digest in payloads.items() if digest not in saved[key]] == []
    assert len(payloads) == server.num_blocks() > 1000, "the whole server was read"
    assert sum(map(len, loads.values())) > 100, "positive control"
    assert [key for key, digests in loads.items() if key in payloads and {payloads[key]} != set(digests)] == []
