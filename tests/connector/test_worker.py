"""`connector.worker` and `connector.client` against a real server, on mapped slots and on streams."""

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from connector.client import LookupAnswer
from connector.plan import BlockName, LoadSpec, SaveSpec, StepPlan
from tests.connector.conftest import Engine, Rank, chain
from tests.engine.prefixd import ROOT, Prefixd

WAIT_S = 20.0


@pytest.fixture(params=["mapped slots", "streams"])
def address(request: pytest.FixtureRequest, prefixd: Prefixd) -> str:
    return prefixd.unix_address if request.param == "mapped slots" else prefixd.port_address


def seed(address: str) -> int:
    """Chains of the two paths differ: they share a server."""
    return 1000 * (1 + address.startswith("unix"))


def wait_for(what: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def slots_ready(rank: Rank) -> None:
    """Saves need a session and, when mapped, slots that the saver thread has reserved."""
    wait_for(lambda: (lane := rank.worker._current_lane()) is not None and len(lane.pool) >= 12)


def save(engine: Engine, block_ids: list[int], names: list[BlockName]) -> None:
    """One step of the engine that saves these blocks; returns when the server has them."""
    saves = tuple(SaveSpec(block_id, name) for block_id, name in zip(block_ids, names, strict=True))
    for rank in engine.ranks:
        slots_ready(rank)
        step(rank, StepPlan(saves=saves))
    wait_for(lambda: all(present(ask(engine, names), len(names))))


def step(rank: Rank, plan: StepPlan) -> None:
    rank.worker.begin_step(plan)
    for layer in rank.layout.layers:
        rank.worker.save_layer(layer.name)
    rank.worker.start_loads(plan.loads)
    rank.worker.finish_saves()


def ask(engine: Engine, names: list[BlockName], *, lease: bool = False) -> LookupAnswer:
    call = engine.asker.lookup(b"".join(name.key for name in names), 0, lease=lease)
    assert call is not None
    call.wait(5)
    answer = call.answer()
    assert answer is not None
    return answer


def present(answer: LookupAnswer, num_blocks: int) -> list[bool]:
    return [answer.is_present(i) for i in range(num_blocks)]


def load_spec(answer: LookupAnswer, names: list[BlockName], block_ids: list[int], request_id: str = "r") -> LoadSpec:
    assert answer.hit_end - answer.hit_start == len(block_ids)
    return LoadSpec(
        request_id,
        tuple(block_ids),
        b"".join(name.key for name in names),
        answer.slots.tobytes(),
        answer.generations.tobytes(),
        answer.lease_id,
        answer.server_epoch,
        checksums=b"" if answer.checksums is None else answer.checksums.tobytes(),
    )


def load(rank: Rank, spec: LoadSpec) -> set[int]:
    """Runs a load to its end; returns the block_ids that failed."""
    step(rank, StepPlan(loads=(spec,)))
    finished: set[str] = set()
    wait_for(lambda: finished.update(rank.worker.take_finished()) or finished)
    assert finished == {spec.request_id}
    return rank.worker.take_failed_blocks()


def test_another_engine_loads_the_bytes_that_one_saved(address, new_engine):
    names = chain(seed(address), 5)
    writer, reader = new_engine(address), new_engine(address)
    save(writer, [3, 4, 5, 9, 1], names)

    failed = load(reader.ranks[0], load_spec(ask(reader, names, lease=True), names, [20, 21, 22, 23, 30]))

    assert failed == set()
    for saved, loaded in zip(writer.ranks[0].pages, reader.ranks[0].pages, strict=True):
        assert torch.equal(saved[[3, 4, 5, 9, 1]], loaded[[20, 21, 22, 23, 30]])
    assert reader.ranks[0].worker.take_counts()["loaded_blocks"] == 5


def test_pages_outside_the_load_stay_as_they_are(address, new_engine):
    names = chain(seed(address) + 1, 3)
    engine = new_engine(address)
    save(engine, [0, 1, 2], names)
    before = [layer.clone() for layer in engine.ranks[0].pages]

    load(engine.ranks[0], load_spec(ask(engine, names, lease=True), names, [10, 12, 11]))

    others = [b for b in range(32) if b not in (10, 11, 12)]
    for was, now in zip(before, engine.ranks[0].pages, strict=True):
        assert torch.equal(was[others], now[others])
        assert torch.equal(was[[0, 1, 2]], now[[10, 12, 11]])


def test_what_the_engine_writes_after_the_step_is_not_saved(address, new_engine):
    """The block may be freed and reused at once: the step's end is the last moment at which we read it."""
    names = chain(seed(address) + 2, 1)
    engine = new_engine(address)
    rank = engine.ranks[0]
    slots_ready(rank)
    held = rank.pages[0][7].clone()

    step(rank, StepPlan(saves=(SaveSpec(7, names[0]),)))
    rank.pages[0][7].zero_()
    wait_for(lambda: ask(engine, names).is_present(0))

    load(rank, load_spec(ask(engine, names, lease=True), names, [8]))
    assert torch.equal(rank.pages[0][8], held)


def test_a_nameless_gather_is_stored_under_the_name_that_follows(address, new_engine):
    names = chain(seed(address) + 3, 1)
    engine = new_engine(address)
    rank = engine.ranks[0]
    slots_ready(rank)
    held = rank.pages[1][6].clone()

    step(rank, StepPlan(saves=(SaveSpec(6, None, ticket=41),)))
    rank.pages[1][6].zero_()
    assert not ask(engine, names).is_present(0)
    step(rank, StepPlan(names={41: names[0]}))

    wait_for(lambda: ask(engine, names).is_present(0))
    load(rank, load_spec(ask(engine, names, lease=True), names, [9]))
    assert torch.equal(rank.pages[1][9], held)


def test_a_discarded_gather_gives_its_slot_back(address, new_engine):
    engine = new_engine(address)
    rank = engine.ranks[0]
    slots_ready(rank)
    pool = rank.worker._current_lane().pool
    before = len(pool)

    step(rank, StepPlan(saves=(SaveSpec(6, None, ticket=1),)))
    during = len(pool)
    step(rank, StepPlan(names={1: None}))

    assert (during, len(pool)) == (before - 1, before)


def test_a_step_that_failed_half_way_gives_its_slots_back(address, new_engine):
    engine = new_engine(address)
    rank = engine.ranks[0]
    slots_ready(rank)
    pool = rank.worker._current_lane().pool
    before = len(pool)
    names = chain(seed(address) + 4, 2)

    rank.worker.begin_step(StepPlan(saves=(SaveSpec(6, names[0]), SaveSpec(7, names[1]))))
    rank.worker.save_layer("layer.0")
    rank.worker.abandon_step()

    assert len(pool) == before
    assert rank.worker.take_counts()["dropped_blocks"] == 2
    assert present(ask(engine, names), 2) == [False, False]


def test_without_free_slots_a_save_is_dropped_and_counted(address, new_engine):
    engine = new_engine(address)
    rank = engine.ranks[0]
    slots_ready(rank)
    pool = rank.worker._current_lane().pool
    taken = pool.take(len(pool) - 1)
    names = chain(seed(address) + 5, 30)

    rank.worker.begin_step(StepPlan(saves=tuple(SaveSpec(i, name) for i, name in enumerate(names))))
    rank.worker.finish_saves()

    wait_for(lambda: any(present(ask(engine, names), 30)))
    dropped = rank.worker.take_counts()["dropped_blocks"]
    assert 1 <= dropped <= 29
    assert present(ask(engine, names), 30) == [i < 30 - dropped for i in range(30)]
    pool.give(taken)


def test_the_first_commit_of_a_key_wins(address, new_engine):
    names = chain(seed(address) + 6, 1)
    first, second = new_engine(address), new_engine(address)
    save(first, [3], names)
    slots_ready(second.ranks[0])
    step(second.ranks[0], StepPlan(saves=(SaveSpec(4, names[0]),)))
    later = chain(seed(address) + 7, 1)
    save(second, [5], later)  # its commit went out after the other

    load(second.ranks[0], load_spec(ask(second, names, lease=True), names, [10]))

    assert torch.equal(second.ranks[0].pages[0][10], first.ranks[0].pages[0][3])


def test_a_block_is_a_hit_only_with_the_shards_of_all_ranks(prefixd, new_engine):
    names = chain(70, 2)
    engine = new_engine(prefixd.unix_address, num_ranks=2, namespace=b"t" * 32)
    for rank in engine.ranks:
        slots_ready(rank)
    saves = tuple(SaveSpec(i, name) for i, name in enumerate(names))

    step(engine.ranks[0], StepPlan(saves=saves))
    wait_for(lambda: engine.ranks[0].worker.take_counts().get("saved_blocks") == 2)
    with_one = ask(engine, names)
    step(engine.ranks[1], StepPlan(saves=saves[:1]))
    wait_for(lambda: ask(engine, names).is_present(0))
    with_both = ask(engine, names, lease=True)

    assert present(with_one, 2) == [False, False]
    assert present(with_both, 2) == [True, False]
    assert (with_both.hit_start, with_both.hit_end) == (0, 1)


def test_each_rank_loads_its_own_shard(prefixd, new_engine):
    names = chain(71, 3)
    writer = new_engine(prefixd.unix_address, num_ranks=2, namespace=b"t" * 32)
    reader = new_engine(prefixd.unix_address, num_ranks=2, namespace=b"t" * 32)
    save(writer, [1, 2, 3], names)
    answer = ask(reader, names, lease=True)

    for rank in reader.ranks:
        assert load(rank, load_spec(answer, names, [11, 12, 13])) == set()

    for written, read in zip(writer.ranks, reader.ranks, strict=True):
        assert torch.equal(written.pages[1][[1, 2, 3]], read.pages[1][[11, 12, 13]])
    assert not torch.equal(reader.ranks[0].pages[1][11], reader.ranks[1].pages[1][11])


def test_nothing_is_promised_while_a_rank_is_not_attached(prefixd, new_engine):
    names = chain(72, 1)
    writer = new_engine(prefixd.unix_address, num_ranks=2, namespace=b"t" * 32)
    save(writer, [1], names)
    reader = new_engine(prefixd.unix_address, num_ranks=2, namespace=b"t" * 32)
    reader.ranks[1].client.close()
    wait_for(lambda: ask(reader, names, lease=True).workers_missing)

    answer = ask(reader, names, lease=True)

    assert answer.hit_end == answer.hit_start
    assert answer.lease_id == 0


def test_a_changed_generation_fails_exactly_that_block(prefixd, new_engine):
    names = chain(73, 4)
    engine = new_engine(prefixd.unix_address)
    save(engine, [0, 1, 2, 3], names)
    spec = load_spec(ask(engine, names, lease=True), names, [10, 11, 12, 13])
    generations = bytearray(spec.generations)
    generations[2 * 4] ^= 1

    failed = load(engine.ranks[0], dataclasses.replace(spec, generations=bytes(generations)))

    assert failed == {12}
    counts = engine.ranks[0].worker.take_counts()
    assert (counts["loaded_blocks"], counts["load_failed_blocks"]) == (3, 1)


def test_a_block_that_a_stream_does_not_bring_fails_exactly(prefixd, new_engine):
    names = chain(74, 4)
    engine = new_engine(prefixd.port_address)
    save(engine, [0, 1, 2, 3], names)
    spec = load_spec(ask(engine, names, lease=True), names, [10, 11, 12, 13])
    absent = chain(75, 1)[0].key
    before = engine.ranks[0].pages[0].clone()

    failed = load(engine.ranks[0], dataclasses.replace(spec, keys=spec.keys[:16] + absent + spec.keys[32:]))

    assert failed == {11}
    assert torch.equal(engine.ranks[0].pages[0][11], before[11])
    assert torch.equal(engine.ranks[0].pages[0][[10, 12, 13]], before[[0, 2, 3]])


def test_a_promise_of_an_earlier_server_is_not_loaded(address, new_engine):
    names = chain(seed(address) + 8, 1)
    engine = new_engine(address)
    save(engine, [0], names)
    spec = load_spec(ask(engine, names, lease=True), names, [10])
    before = engine.ranks[0].pages[0].clone()

    failed = load(engine.ranks[0], dataclasses.replace(spec, server_epoch=spec.server_epoch ^ 1))

    assert failed == {10}
    assert torch.equal(engine.ranks[0].pages[0], before)


def test_a_cancelled_load_is_reported_once_and_as_failed(address, new_engine):
    names = chain(seed(address) + 9, 2)
    engine = new_engine(address)
    worker = engine.ranks[0].worker
    save(engine, [0, 1], names)
    spec = load_spec(ask(engine, names, lease=True), names, [10, 11], "gone")

    worker.start_loads([spec])
    worker.begin_step(StepPlan(cancelled=frozenset({"gone", "never there"})))
    finished: list[str] = []
    wait_for(lambda: finished.extend(worker.take_finished()) or finished)
    failed = worker.take_failed_blocks()
    later = load(engine.ranks[0], load_spec(ask(engine, names, lease=True), names, [10, 11], "gone"))

    assert finished == ["gone"]
    assert failed in ({10, 11}, set())  # it may have ended before the cancellation came
    assert later == set()


def test_an_engine_that_starts_first_uses_the_server_when_it_comes(own_prefixd, new_engine):
    """C42: nothing listens at first."""
    engine = new_engine(own_prefixd.unix_address, attach=False)
    names = chain(76, 1)
    assert engine.asker.lookup(names[0].key, 0, lease=True) is None
    step(engine.ranks[0], StepPlan(saves=(SaveSpec(1, names[0]),)))
    assert engine.ranks[0].worker.take_counts()["dropped_blocks"] == 1

    own_prefixd.start()

    engine.wait_attached()  # within ten seconds
    save(engine, [1], names)


def test_a_killed_server_costs_nothing_and_its_successor_is_used(own_prefixd, new_engine):
    own_prefixd.start()
    engine = new_engine(own_prefixd.unix_address)
    names = chain(77, 2)
    save(engine, [1, 2], names)
    spec = load_spec(ask(engine, names, lease=True), names, [11, 12])

    own_prefixd.kill()
    wait_for(lambda: engine.asker.session() is None and engine.ranks[0].client.session() is None)
    failed = load(engine.ranks[0], spec)
    step(engine.ranks[0], StepPlan(saves=(SaveSpec(1, names[0]),)))
    own_prefixd.start()
    engine.wait_attached()

    assert failed == {11, 12}
    assert present(ask(engine, names), 2) == [False, False]
    save(engine, [1, 2], names)


def test_a_stopped_server_costs_one_deadline_once(own_prefixd, new_engine):
    """The circuit: after one lookup without an answer nobody is asked until a probe was answered."""
    own_prefixd.start()
    engine = new_engine(own_prefixd.unix_address)
    key = chain(78, 1)[0].key

    own_prefixd.send_signal(signal.SIGSTOP)
    try:
        call = engine.asker.lookup(key, 0, lease=True)
        assert call is not None
        call.wait(5)
        answer = call.answer()
        wait_for(lambda: engine.asker.session() is None)
        asked_meanwhile = [engine.asker.lookup(key, 0, lease=True) for _ in range(100)]
    finally:
        own_prefixd.send_signal(signal.SIGCONT)

    assert answer is None
    assert asked_meanwhile == [None] * 100
    wait_for(lambda: engine.asker.session() is not None)
    assert ask(engine, chain(78, 1)) is not None


def test_a_client_that_exits_gives_its_slots_back(own_prefixd, new_engine):
    own_prefixd.start()
    code = (
        "import os, sys\n"
        "from tests.connector import conftest, test_worker\n"
        "engine = conftest.Engine(sys.argv[1])\n"
        "test_worker.slots_ready(engine.ranks[0])\n"
        "sys.stdout.write('ready')\n"
        "sys.stdout.flush()\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, own_prefixd.unix_address]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read(5) == b"ready"
        reserved = own_prefixd.stats().reserved_bytes
        child.kill()

    assert reserved > 0
    wait_for(lambda: own_prefixd.stats().reserved_bytes == 0 and len(own_prefixd.stats().sessions) == 0)
