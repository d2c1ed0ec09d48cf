"""An engine-like client that is stopped in the middle of a copy, for three lease times, while others fill the server:
when it goes on it writes into slots that are still its own, and does not believe what it reads from those that are not.

By default the server's leases last one second; with --long its own thirty.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from connector.plan import SaveSpec, StepPlan
from tests.connector.conftest import NUM_BLOCKS, Engine, chain
from tests.connector.test_worker import ask, load, load_spec, present, slots_ready, step, wait_for
from tests.engine.prefixd import Prefixd
from tests.faults.processes import Child, wait_stopped

MEMORY_BYTES = 64 << 20
PAYLOAD_BYTES = 16 << 10
BATCH = 12

# Stops itself where `stop_at` says: in the middle of a step that saves, or at the n-th look at the clock of a load,
# which is taken before each layer that is copied. The thread that saves looks at it as well, and is not counted.
CLIENT = """
import hashlib, json, sys, threading, time
from connector.plan import SaveSpec, StepPlan
from tests.connector.conftest import Engine, chain
from tests.connector.test_worker import ask, load_spec, present, save, slots_ready, wait_for
from tests.faults.processes import stop_here

address, what, stop_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
engine = Engine(address, load_timeout_s=float(sys.argv[4]))
rank, names = engine.ranks[0], chain(900, 4)
slots_ready(rank)


def digests(block_ids):
    return [hashlib.sha256(b"".join(p[b].numpy().tobytes() for p in rank.pages)).hexdigest() for b in block_ids]


held = digests([1, 2, 3, 4])
if what == "save":
    rank.worker.begin_step(StepPlan(saves=tuple(SaveSpec(b, n) for b, n in zip([1, 2, 3, 4], names))))
    rank.worker.save_layer("layer.0")
    stop_here()
    rank.worker.save_layer("layer.1")
    rank.worker.finish_saves()
    counts = {}
    wait_for(lambda: counts.update(rank.worker.take_counts()) or counts)
    print(json.dumps({"held": held, "counts": counts}))
else:
    save(engine, [1, 2, 3, 4], names)
    spec = load_spec(ask(engine, names, lease=True), names, [11, 12, 13, 14])
    before = digests(spec.block_ids)
    looks = 0

    def clock():
        global looks
        if threading.current_thread().name == "prefixd-save":
            return time.monotonic()
        looks += 1
        if looks == stop_at:
            stop_here()
        return time.monotonic()

    rank.worker._clock = clock
    rank.worker.start_loads([spec])
    finished = []
    wait_for(lambda: finished.extend(rank.worker.take_finished()) or finished)
    failed = sorted(rank.worker.take_failed_blocks())
    rank.worker._clock = time.monotonic
    print(json.dumps({"held": held, "before": before, "after": digests(spec.block_ids), "failed": failed}))
sys.stdin.readline()
engine.close()
"""


@pytest.fixture(params=[1.0, pytest.param(30.0, marks=pytest.mark.long)], ids=["short leases", "leases of 30 s"])
def lease_s(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture
def server(tmp_path: Path, lease_s: float) -> Iterator[Prefixd]:
    server = Prefixd(
        tmp_path,
        memory="64MiB",
        module="tests.faults.short_leases",
        environment={"PREFIXD_TEST_LEASE_S": str(lease_s)},
    )
    yield server.start()
    server.kill()


def fill(engine: Engine, for_s: float) -> list[tuple[Any, int]]:
    """Saves chains as fast as it can, for so long and at least one and a half times the budget. Returns the last ones:
    (names, first block).
    """
    rank, chains, seed = engine.ranks[0], [], 10_000
    began = time.monotonic()
    num_bytes = 0
    while time.monotonic() - began < for_s or num_bytes < 1.5 * MEMORY_BYTES:
        slots_ready(rank)
        names, first = chain(seed, BATCH), (seed % 2) * BATCH
        step(rank, StepPlan(saves=tuple(SaveSpec(first + i, name) for i, name in enumerate(names))))
        chains.append((names, first))
        seed += 1
        num_bytes += BATCH * PAYLOAD_BYTES
    last = chains[-1][0]
    wait_for(lambda: all(present(ask(engine, last), BATCH)))
    return chains[-40:]


def assert_right(engine: Engine, chains: list[tuple[Any, int]]) -> None:
    """What the filler stored last is what its pages held."""
    rank, num_checked = engine.ranks[0], 0
    for names, first in chains:
        if all(present(ask(engine, names), BATCH)):
            at = NUM_BLOCKS - BATCH - 8
            before = [layer[at : at + BATCH].clone() for layer in rank.pages]
            assert load(rank, load_spec(ask(engine, names, lease=True), names, list(range(at, at + BATCH)))) == set()
            for layer, was in zip(rank.pages, before, strict=True):
                right = layer[first : first + BATCH] if first + BATCH <= at else None
                if right is not None:
                    assert torch.equal(layer[at : at + BATCH], right)
                    num_checked += 1
                layer[at : at + BATCH] = was
    assert num_checked > 10


LONG = pytest.mark.long


@pytest.mark.parametrize("path", ["mapped slots", pytest.param("streams", marks=LONG)])
def test_stopped_in_mid_save(server: Prefixd, new_engine: Callable[..., Engine], lease_s: float, path: str) -> None:
    """Its slots are its own until its process exits: what it goes on to write and name is right, or not there."""
    address = server.unix_address if path == "mapped slots" else server.port_address
    with Child(CLIENT, address, "save", "0", "5") as client:
        wait_stopped(client.pid)
        filler = new_engine(server.unix_address)
        chains = fill(filler, 3 * lease_s)
        client.go_on()
        report = json.loads(client.read())
        names = chain(900, 4)
        stored = present(ask(filler, names), 4)
        if any(stored):
            number = stored.index(False) if False in stored else 4
            spec = load_spec(ask(filler, names[:number], lease=True), names[:number], list(range(28, 28 + number)))
            assert load(filler.ranks[0], spec) == set()
            found = [
                hashlib.sha256(b"".join(layer[b].numpy().tobytes() for layer in filler.ranks[0].pages)).hexdigest()
                for b in spec.block_ids
            ]
            assert found == report["held"][:number]
        assert_right(filler, chains)

    num_saved, num_dropped = (report["counts"].get(name, 0) for name in ("saved_blocks", "dropped_blocks"))
    assert num_saved == 4 if path == "mapped slots" else num_saved + num_dropped == 4
    assert stored.count(True) == num_saved


@pytest.mark.parametrize(
    ("path", "stop_at", "deadline_s"),
    [
        pytest.param("mapped slots", 3, 1000, id="mapped, between layers"),
        pytest.param("mapped slots", 2, 1, id="mapped, deadline over", marks=LONG),
        pytest.param("streams", 4, 1, id="streamed, not written"),
        pytest.param("streams", 5, 1, id="streamed, half written", marks=LONG),
    ],
)
def test_stopped_in_mid_load(
    server: Prefixd,
    new_engine: Callable[..., Engine],
    lease_s: float,
    path: str,
    stop_at: int,
    deadline_s: int,
) -> None:
    """Its lease is over, its slots hold somebody else's bytes: all of it has failed, and no page that is reported as
    loaded is wrong. A `Get` that goes on after its load's deadline writes nothing into the blocks any more.
    """
    address = server.unix_address if path == "mapped slots" else server.port_address
    with Child(CLIENT, address, "load", str(stop_at), str(deadline_s)) as client:
        wait_stopped(client.pid)
        filler = new_engine(server.unix_address)
        assert all(present(ask(filler, chain(900, 4)), 4)), "positive control"
        chains = fill(filler, 3 * lease_s)
        assert not any(present(ask(filler, chain(900, 4)), 4)), "positive control: its slots went to others"
        client.go_on()
        report = json.loads(client.read())
        assert_right(filler, chains)

    assert report["failed"] == [11, 12, 13, 14]
    if stop_at in {2, 4}:
        assert report["after"] == report["before"], "the deadline had passed: nothing was written"
    else:
        assert report["after"] != report["held"], "half of it, and reported as failed"
