"""The connector's line to a server that is dead, slow, half there, somewhere else or forked: what it costs, when it is
noticed, and that it comes back by itself.

Bounds are deadlines with slack, or counts of deadlines that were spent.
"""

import dataclasses
import signal
import socket
import time
from pathlib import Path

import grpc
import pytest
import torch

from connector.client import CHANNEL_OPTIONS, CacheClient, Hello
from connector.plan import SaveSpec, StepPlan
from tests.connector.conftest import Engine, chain
from tests.connector.test_worker import ask, load, load_spec, present, save, slots_ready, step, wait_for
from tests.engine.prefixd import Prefixd
from tests.fakes import recorded_log
from tests.faults.front import Front, fail
from tests.faults.names import NameServer
from tests.faults.processes import stopped
from tests.proxy import Proxy

DEADLINE_S = 0.05  # of a lookup, the default
RETURN_S = 10.0  # the bound: a good hit so soon after the server is back
HALF_OPEN_S = 20.0  # and a link that is dead without a word is noticed so soon
LOG = "vllm.prefixd"


def line(address: str, call_timeout_s: float = DEADLINE_S) -> CacheClient:
    """A scheduler side alone."""
    hello = Hello("engine", "test", b"n" * 32, "test", key_bytes=16, num_shards=1)
    return CacheClient(address, hello, call_timeout_s=call_timeout_s, transfer_timeout_s=5)


@pytest.fixture
def attached(request: pytest.FixtureRequest) -> object:
    clients: list[CacheClient] = []

    def make(address: str, call_timeout_s: float = DEADLINE_S) -> CacheClient:
        clients.append(line(address, call_timeout_s))
        clients[-1].start()
        assert clients[-1].wait_attached(RETURN_S)
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def seconds_until_answered(client: CacheClient) -> float | None:
    """How long a lookup keeps its asker waiting; None: it was not sent."""
    began = time.monotonic()
    call = client.lookup(chain(1, 1)[0].key, 0, lease=True)
    if call is None:
        return None
    while not call.done():
        time.sleep(0.0005)
    return time.monotonic() - began


def target(server: Prefixd) -> tuple[str, int]:
    host, _, port = server.port_address.rpartition(":")
    return host, int(port)


# --- one deadline, then nothing


@pytest.mark.parametrize("fault", ["stopped process", "stopped link", "black hole", "slow by 200 ms"])
def test_the_first_lookup_costs_one_deadline_and_the_next_ones_nothing(own_server, attached, fault) -> None:
    """Slow but alive counts as dead: its answers come when nobody waits any more."""
    with Proxy(target(own_server)) as proxy:
        client = attached(f"127.0.0.1:{proxy.port}")
        wait_for(lambda: (took := seconds_until_answered(client)) is not None and took < DEADLINE_S)
        if fault == "stopped process":
            own_server.send_signal(signal.SIGSTOP)
        elif fault == "stopped link":
            proxy.stop()
        elif fault == "black hole":
            proxy.drop = True
        else:
            proxy.delay_s = 0.1  # each way
        first = seconds_until_answered(client)
        wait_for(lambda: client.session() is None)
        began = time.monotonic()
        later = [client.lookup(chain(1, 1)[0].key, 0, lease=True) for _ in range(1000)]
        later_s = (time.monotonic() - began) / 1000
        time.sleep(1.0)
        still = client.lookup(chain(1, 1)[0].key, 0, lease=True)

        own_server.send_signal(signal.SIGCONT)
        proxy.resume()
        proxy.delay_s = 0
        if fault == "black hole":
            proxy.drop = False
            proxy.cut()  # a hole in a stream never heals
        back = time.monotonic()
        wait_for(lambda: client.session() is not None)

    assert DEADLINE_S * 0.9 <= first < 3 * DEADLINE_S
    assert later == [None] * 1000
    assert later_s < 0.001
    assert still is None, "as long as it is slow or silent nobody asks"
    assert time.monotonic() - back < RETURN_S


def test_a_server_that_answers_probes_but_no_lookup_is_asked_ever_more_rarely(own_server, attached) -> None:
    """Seven seconds of requests: the deadlines that were spent grow with their logarithm."""
    with Front(own_server.port_address) as front:
        client = attached(front.address)
        front.at("Lookup", lambda: time.sleep(0.3))
        spent = [0.0]
        end = time.monotonic() + 7
        while time.monotonic() < end:
            took = seconds_until_answered(client)
            if took is not None:
                spent.append(time.monotonic())
            time.sleep(0.005)
        num_spent = len(spent) - 1
        front.mend()
        wait_for(lambda: (took := seconds_until_answered(client)) is not None and took < DEADLINE_S)

    assert 3 <= num_spent <= 8, "pauses of 0.2, 0.4, 0.8, 1.6, 3.2 s"


def test_a_refusal_is_an_answer(own_server, attached) -> None:
    """RESOURCE_EXHAUSTED opens no circuit and is named once in the log (C43)."""
    with Front(own_server.port_address) as front, recorded_log(LOG) as log:
        client = attached(front.address, 2.0)
        front.at("Lookup", fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))
        took = [seconds_until_answered(client) for _ in range(20)]

    assert None not in took
    assert client.num_failed_calls == 20
    assert [line for line in log if "full" in line] == log[:1]


# --- one deadline for a load


@pytest.fixture
def reader_and_names(new_engine, own_server):
    """Ten blocks of 16 KiB in the server, and an engine that reads them through a proxy."""
    names = chain(5, 10)
    writer = new_engine(own_server.unix_address)
    save(writer, list(range(10)), names)
    with Proxy(target(own_server)) as proxy:
        reader = new_engine(f"127.0.0.1:{proxy.port}", call_timeout_s=2.0, load_timeout_s=1.0)
        yield proxy, reader, names, [layer[:10].clone() for layer in writer.ranks[0].pages]


def test_a_load_of_which_bytes_trickle_in_ends_at_its_deadline(reader_and_names) -> None:
    """One deadline for the whole of it. What came in time is kept, exactly the rest has failed (contract 3.7)."""
    proxy, reader, names, right = reader_and_names
    rank = reader.ranks[0]
    spec = load_spec(ask(reader, names, lease=True), names, list(range(20, 30)))
    before = [layer.clone() for layer in rank.pages]
    proxy.bytes_per_s = 60_000
    began = time.monotonic()
    failed = load(rank, spec)
    took = time.monotonic() - began
    proxy.bytes_per_s = 0

    assert took < 3 * 1.0
    assert 0 < len(failed) < 10, "some came in time, some did not"
    for layer, was, correct in zip(rank.pages, before, right, strict=True):
        for number in range(10):
            block_id = 20 + number
            assert torch.equal(layer[block_id], was[block_id] if block_id in failed else correct[number])


def test_a_load_over_a_dead_link_fails_in_time_and_writes_nothing_afterwards(reader_and_names) -> None:
    """A `Get` that goes on after its load's deadline finds nobody: its bytes never come near the blocks."""
    proxy, reader, names, right = reader_and_names
    rank = reader.ranks[0]
    spec = load_spec(ask(reader, names, lease=True), names, list(range(20, 30)))
    before = [layer.clone() for layer in rank.pages]
    proxy.stop()
    began = time.monotonic()
    failed = load(rank, spec)
    took = time.monotonic() - began
    proxy.resume()
    wait_for(lambda: rank.client.session() is not None)
    time.sleep(0.3)

    assert failed == set(range(20, 30))
    assert took < 3 * 1.0
    assert all(torch.equal(layer, was) for layer, was in zip(rank.pages, before, strict=True))
    again = load(rank, load_spec(ask(reader, names, lease=True), names, list(range(20, 30))))
    assert again == set(), "positive control: over the same link"
    assert torch.equal(rank.pages[0][20:30], right[0])


def test_loads_that_wait_for_a_thread_wait_within_their_deadline(reader_and_names) -> None:
    """Eight loads on two threads, none of which gets a byte: all fail after one deadline, not one after the other."""
    proxy, reader, names, _ = reader_and_names
    rank = reader.ranks[0]
    specs = [
        load_spec(ask(reader, names[:2], lease=True), names[:2], [10 + 2 * i, 11 + 2 * i], f"r{i}") for i in range(8)
    ]
    proxy.stop()
    began = time.monotonic()
    step(rank, StepPlan(loads=tuple(specs)))
    finished: list[str] = []
    wait_for(lambda: finished.extend(rank.worker.take_finished()) or len(finished) == 8)
    took = time.monotonic() - began

    assert sorted(finished) == [f"r{i}" for i in range(8)]
    assert rank.worker.take_failed_blocks() == set(range(10, 26))
    assert took < 3 * 1.0


def test_the_deadline_that_comes_with_a_load_is_kept(reader_and_names) -> None:
    """It may be shorter than the operator's: no longer than the load is worth."""
    proxy, reader, names, _ = reader_and_names
    spec = load_spec(ask(reader, names, lease=True), names, list(range(20, 30)))
    proxy.stop()
    began = time.monotonic()
    failed = load(reader.ranks[0], dataclasses.replace(spec, timeout_s=0.1))

    assert failed == set(range(20, 30))
    assert 0.08 < time.monotonic() - began < 0.5


def test_a_load_that_nobody_wants_ends_though_no_byte_comes(reader_and_names) -> None:
    """An abort, a reset, the end of the engine: none waits for the deadline."""
    proxy, reader, names, _ = reader_and_names
    rank = reader.ranks[0]
    spec = dataclasses.replace(
        load_spec(ask(reader, names, lease=True), names, list(range(20, 30))), request_id="gone", timeout_s=60
    )
    rank.worker._load_timeout_s = 60.0
    proxy.stop()
    step(rank, StepPlan(loads=(spec,)))
    time.sleep(0.1)
    assert not rank.worker.take_finished(), "positive control: it waits"
    began = time.monotonic()
    rank.worker.begin_step(StepPlan(cancelled=frozenset({"gone"})))
    finished: list[str] = []
    wait_for(lambda: finished.extend(rank.worker.take_finished()) or finished)
    took = time.monotonic() - began

    assert (finished, rank.worker.take_failed_blocks()) == (["gone"], set(range(20, 30)))
    assert took < 1.0
    assert rank.client.session() is not None, "that it was cancelled is no fault of the server"


@pytest.mark.parametrize("fault", ["cut", "half-close", "killed"])
def test_a_load_whose_link_breaks_reports_exactly_what_did_not_come(reader_and_names, own_server, fault) -> None:
    """C20: in the middle of a stream; what had come whole is right."""
    proxy, reader, names, right = reader_and_names
    rank = reader.ranks[0]
    spec = load_spec(ask(reader, names, lease=True), names, list(range(20, 30)))
    before = [layer.clone() for layer in rank.pages]
    proxy.bytes_per_s = 200_000
    step(rank, StepPlan(loads=(spec,)))
    came = proxy.num_bytes[1]
    wait_for(lambda: proxy.num_bytes[1] - came > 50_000)
    if fault == "killed":
        own_server.kill()
        proxy.cut()
    elif fault == "cut":
        proxy.cut()
    else:
        proxy.half_close()
    finished: list[str] = []
    wait_for(lambda: finished.extend(rank.worker.take_finished()) or finished)
    failed = rank.worker.take_failed_blocks()

    assert 0 < len(failed) < 10
    for layer, was, correct in zip(rank.pages, before, right, strict=True):
        for number in range(10):
            block_id = 20 + number
            assert torch.equal(layer[block_id], was[block_id] if block_id in failed else correct[number])


# --- coming back


def works(engine: Engine, seed: int) -> None:
    """Saves, and loads what it saved."""
    names = chain(seed, 3)
    save(engine, [1, 2, 3], names)
    assert load(engine.ranks[0], load_spec(ask(engine, names, lease=True), names, [11, 12, 13])) == set()
    for layer in engine.ranks[0].pages:
        assert torch.equal(layer[[1, 2, 3]], layer[[11, 12, 13]])


@pytest.mark.parametrize("path", ["mapped slots", "streams"])
def test_after_kill_9_everything_is_rebuilt_at_the_same_address(own_server, new_engine, path) -> None:
    """Session, segments, reserved slots, leases (C41): the first good hit comes within ten seconds; one log line for
    each change of state of each line.
    """
    engine = new_engine(own_server.unix_address if path == "mapped slots" else own_server.port_address)
    works(engine, 100)
    with recorded_log(LOG) as log:
        own_server.kill()
        wait_for(lambda: engine.asker.session() is None and engine.ranks[0].client.session() is None)
        for number in range(100):
            assert engine.asker.lookup(chain(number, 1)[0].key, 0, lease=True) is None
            step(engine.ranks[0], StepPlan(saves=(SaveSpec(1, chain(101, 1)[0]),)))
        own_server.start()
        back = time.monotonic()
        engine.wait_attached()
        works(engine, 102)
        took = time.monotonic() - back

    assert took < RETURN_S
    assert engine.ranks[0].worker.take_counts()["dropped_blocks"] == 100
    assert len(log) == 2, log
    assert all("running uncached" in line for line in log)
    wait_for(lambda: len(own_server.stats().sessions) == 2)


def test_a_server_that_moved_is_found_behind_its_name(own_server, attached) -> None:
    """C41: the name gets another address; the old one goes silent, as a machine does that is gone without a word."""
    with (
        NameServer("127.0.0.2") as names,
        Proxy(target(own_server), ("127.0.0.2", 0)) as before,
        Proxy(target(own_server), ("127.0.0.3", before.port)) as after,
    ):
        client = attached(names.target("cache.example", before.port))
        assert (before.num_connections, after.num_connections) == (1, 0)
        names.address = "127.0.0.3"
        before.stop()
        moved = time.monotonic()
        assert seconds_until_answered(client) < 3 * DEADLINE_S
        wait_for(lambda: client.session() is None)
        wait_for(lambda: client.session() is not None)
        took = time.monotonic() - moved
        answered = seconds_until_answered(client)

    assert after.num_connections >= 1
    assert took < RETURN_S
    assert answered is not None


@pytest.mark.parametrize("idle_s", [0, 1.5], ids=["with a ping of grpc's own under way", "with none"])
def test_an_idle_link_that_is_dead_is_noticed(own_server, attached, idle_s) -> None:
    """Nobody asks anything: a ping without an answer says it."""
    with Proxy(target(own_server)) as proxy:
        client = attached(f"127.0.0.1:{proxy.port}")
        time.sleep(idle_s)
        began = time.monotonic()
        proxy.drop = True
        wait_for(lambda: not client._attached.is_set(), HALF_OPEN_S)
        took = time.monotonic() - began
        proxy.drop = False
        wait_for(lambda: client.session() is not None)

    assert took < HALF_OPEN_S


@pytest.mark.long
def test_an_idle_link_is_pinged_for_ever_and_never_told_to_go_away(own_server, attached) -> None:
    """Three minutes without a call: no GOAWAY (ENHANCE_YOUR_CALM), and pings go on, so that a dead link is still
    noticed (grpc by itself stops after two).
    """
    with Proxy(target(own_server)) as proxy, recorded_log(LOG) as log:
        client = attached(f"127.0.0.1:{proxy.port}")
        session = client.session()
        time.sleep(180)
        assert client.session() is session
        assert proxy.num_connections == 1
        assert log == []
        proxy.drop = True
        wait_for(lambda: not client._attached.is_set(), HALF_OPEN_S)


def test_we_ping_no_faster_than_the_server_permits() -> None:
    """Read from both sides' settings: grpc answers what it finds too much with GOAWAY."""
    from cache_server.server import _OPTIONS

    ours, theirs = dict(CHANNEL_OPTIONS), dict(_OPTIONS)

    assert ours["grpc.keepalive_time_ms"] >= 2 * theirs["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert theirs["grpc.keepalive_permit_without_calls"] == 1
    assert ours["grpc.keepalive_time_ms"] + ours["grpc.keepalive_timeout_ms"] <= 1000 * HALF_OPEN_S
    assert ours["grpc.http2.max_pings_without_data"] == 0


@pytest.mark.parametrize("fault", ["cut", "half-close", "stopped"])
def test_a_unix_socket_that_breaks_is_opened_again(own_server, new_engine, tmp_path, fault) -> None:
    """Mapped slots, through a proxy; the descriptor socket is the server's own, by a link."""
    path = tmp_path / "fronted.sock"
    real = own_server.unix_address.removeprefix("unix://")
    Path(f"{path}.fd").symlink_to(f"{real}.fd")
    with Proxy(real, str(path)) as proxy:
        engine = new_engine(f"unix://{path}")
        assert engine.ranks[0].client.session().mapped
        works(engine, 110)
        lines = (engine.asker, engine.ranks[0].client)
        before = [line.session() for line in lines]
        if fault == "cut":
            proxy.cut()
        elif fault == "half-close":
            proxy.half_close()
        else:
            proxy.stop()
            for line in lines:
                line.doubt()
            time.sleep(7)
            proxy.resume()
        back = time.monotonic()
        wait_for(lambda: all(line.session() not in {None, was} for line, was in zip(lines, before, strict=True)))
        slots_ready(engine.ranks[0])
        works(engine, 111)
        took = time.monotonic() - back
        engine.close()

    assert took < RETURN_S


def test_saves_that_are_refused_cost_the_loads_nothing(own_server, new_engine) -> None:
    """C43: RESOURCE_EXHAUSTED for all puts. They are counted, named once, and what is there is loaded all the while."""
    names, refused = chain(120, 3), chain(121, 20)
    with Front(own_server.port_address) as front, recorded_log(LOG) as log:
        engine = new_engine(front.address)
        save(engine, [1, 2, 3], names)
        rank = engine.ranks[0]
        front.at("Put", fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room"))
        for number, name in enumerate(refused):
            step(rank, StepPlan(saves=(SaveSpec(number, name),)))
            failed = load(rank, load_spec(ask(engine, names, lease=True), names, [21, 22, 23]))
            assert failed == set()
        dropped = []
        wait_for(lambda: dropped.append(rank.worker.take_counts().get("dropped_blocks", 0)) or sum(dropped) == 20)
        front.mend()

        assert not any(present(ask(engine, refused), 20))
        assert [line for line in log if "no room" in line] == log, "one line"
        assert len(log) == 1
        works(engine, 122)


def test_a_port_where_somebody_else_answers_is_no_server(attached) -> None:
    """It accepts and says nothing that grpc knows: the engine goes on, and the wait for it is bounded."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        client = line(f"127.0.0.1:{other.getsockname()[1]}")
        client.start()
        began = time.monotonic()
        assert client.lookup(chain(1, 1)[0].key, 0, lease=True) is None
        assert time.monotonic() - began < 0.1
        client.close()


def test_a_process_that_is_stopped_and_goes_on_attaches_again(own_server, attached) -> None:
    """Longer than a silent server is borne: the old session is given up, a new one opened as soon as it answers."""
    client = attached(own_server.port_address)
    with stopped(own_server.pid):
        assert seconds_until_answered(client) < 3 * DEADLINE_S
        wait_for(lambda: not client._attached.is_set())
    back = time.monotonic()
    wait_for(lambda: client.session() is not None)

    assert time.monotonic() - back < RETURN_S
