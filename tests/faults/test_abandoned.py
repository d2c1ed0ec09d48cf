"""C34: a thousand lookups that hit, of which nothing comes: what they hold ends with the lease time, whoever forgot it.

By default the server's leases last two seconds; with --long its own thirty.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from connector.plan import SaveSpec, StepPlan
from tests.connector.conftest import Engine, chain
from tests.connector.test_worker import ask, load, load_spec, present, save, slots_ready, step, wait_for
from tests.engine.prefixd import Prefixd
from tests.faults.processes import Child

NUM_CHAINS, CHAIN = 25, 8
ASKER = """
import sys, time
from connector.client import CacheClient, Hello

client = CacheClient(
    sys.argv[1], Hello("asker", "test", b"n" * 32, "test", 16, 1), call_timeout_s=5, transfer_timeout_s=5
)
worker = CacheClient(
    sys.argv[1],
    Hello("asker", "test", b"n" * 32, "test", 16, 1, 0, 16384, bytes.fromhex(sys.argv[2])),
    call_timeout_s=5,
    transfer_timeout_s=5,
)
for one in (worker, client):
    one.start()
    assert one.wait_attached(20)
num_leases = 0
for line in sys.stdin:
    keys = bytes.fromhex(line)
    call = client.lookup(keys, 0, lease=True)
    call.wait(5)
    num_leases += bool(call.answer().lease_id)
    print(num_leases, flush=True)
"""


@pytest.fixture(params=[2.0, pytest.param(30.0, marks=pytest.mark.long)], ids=["short leases", "leases of 30 s"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Prefixd]:
    server = Prefixd(
        tmp_path,
        memory="64MiB",
        module="tests.faults.short_leases",
        environment={"PREFIXD_TEST_LEASE_S": str(request.param)},
    )
    yield server.start()
    server.kill()


def hit_rate(engine: Engine, chains: list[list]) -> float:
    """Of a fresh round of questions that are released at once."""
    hits = 0
    for names in chains:
        answer = ask(engine, names, lease=True)
        hits += answer.hit_end
        engine.asker.release([answer.lease_id] if answer.lease_id else [])
    return hits / (NUM_CHAINS * CHAIN)


def test_a_thousand_abandoned_lookups(
    server: Prefixd, new_engine: Callable[..., Engine], request: pytest.FixtureRequest
) -> None:
    """250 each are loaded and released, released only, left without a word (never admitted, or aborted before the
    answer came), and asked by a process that is killed.
    """
    engine = new_engine(server.unix_address)
    rank = engine.ranks[0]
    chains = [chain(500 + number, CHAIN) for number in range(NUM_CHAINS)]
    for names in chains:
        save(engine, list(range(CHAIN)), names)
    assert hit_rate(engine, chains) == 1.0
    lease_s = 0.0

    with Child(ASKER, server.unix_address, rank.layout.descriptor.hex()) as other:
        for number in range(1000):
            names, kind = chains[number % NUM_CHAINS], number % 4
            if kind == 3:
                other.tell(b"".join(name.key for name in names).hex())
                num_theirs = int(other.read())
                continue
            answer = ask(engine, names, lease=True)
            lease_s = max(lease_s, 2 * (answer.deadline - answer.half_life))
            if kind == 0:
                assert load(rank, load_spec(answer, names, list(range(16, 16 + CHAIN)))) == set()
            if kind in {0, 1}:
                engine.asker.release([answer.lease_id])
        assert num_theirs == 250, "positive control"
        assert server.stats().leased_bytes > 0, "positive control"
        other.kill()
        wait_for(lambda: server.stats().leased_bytes == 0, 3 * lease_s)

    assert hit_rate(engine, chains) == 1.0
    fresh = chain(700, 12)
    slots_ready(rank)
    step(rank, StepPlan(saves=tuple(SaveSpec(i, name) for i, name in enumerate(fresh))))
    wait_for(lambda: all(present(ask(engine, fresh), 12)))
    wait_for(lambda: server.stats().leased_bytes == 0, 3 * lease_s)
    assert len(server.stats().sessions) == 2
