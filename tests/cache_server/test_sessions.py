"""Who may do what, and when slots without a name come back."""

import pytest

from cache_server.errors import InvalidRequest, Mismatch, SessionEnded
from cache_server.sessions import TICKET_S
from cache_server.values import ALREADY_PRESENT, STORED, Attachment, Shard
from tests.cache_server.harness import GRANULE, NAMESPACE, Bench, blocks, chain
from tests.fakes import FakeClock


@pytest.fixture
def bench(clock: FakeClock) -> Bench:
    return Bench(clock)


def test_reserved_slots_stay_reserved_when_the_stream_breaks(bench: Bench) -> None:
    """A stopped process may wake up in the middle of a copy."""

    bench.reserve(5)
    bench.cache.detach(bench.worker)

    assert bench.arena.reserved_bytes == 5 * GRANULE
    with pytest.raises(SessionEnded, match=r"^session"):
        bench.cache.commit(bench.worker.id, [], blocks([]))
    with pytest.raises(SessionEnded, match=r"^session"):
        bench.reserve(1)


def test_reserved_slots_come_back_when_the_descriptor_socket_ends(bench: Bench) -> None:
    """In whichever order stream and socket end."""

    bench.reserve(5)
    other = bench.attach_worker()
    bench.reserve(3, other)
    bench.cache.detach(bench.worker)
    bench.cache.unmap(bench.worker)
    assert bench.arena.reserved_bytes == 3 * GRANULE
    bench.cache.unmap(other)
    bench.cache.detach(other)

    assert bench.arena.reserved_bytes == 0
    assert bench.cache.counters.reserved_slots_returned == 8
    with pytest.raises(SessionEnded):
        bench.reserve(1, other)


def test_a_session_without_a_descriptor_socket_cannot_reserve(bench: Bench) -> None:
    """Nobody could tell when its writer is gone."""

    with pytest.raises(Mismatch, match="descriptor socket"):
        bench.reserve(1, bench.attach_worker(is_mapped=False))
    with pytest.raises(InvalidRequest, match="scheduler"):
        bench.reserve(1, bench.scheduler)


def test_a_session_hoards_at_most_a_quarter_of_the_budget(bench: Bench) -> None:
    """64 slots: 16. What is committed does not count."""

    slots, retry = bench.cache.reserve(bench.worker.id, 50)
    assert (len(slots), retry) == (16, False)
    assert bench.reserve(1) == []
    keys = chain("a", 16)
    bench.cache.commit(bench.worker.id, [int(slot) for slot in slots], blocks(keys))
    assert len(bench.reserve(50)) == 16


def test_one_slot_may_always_be_reserved(clock: FakeClock) -> None:
    """Also where a payload is larger than a quarter of the budget."""

    bench = Bench(clock, num_segments=2, payload_bytes=16 * GRANULE)
    assert len(bench.reserve(5)) == 1


@pytest.mark.parametrize("wrong", ["of another session", "never reserved", "named already", "twice in one batch"])
def test_a_commit_of_a_wrong_slot_changes_nothing(bench: Bench, wrong: str) -> None:
    """Not even for the right slots beside it."""

    keys = chain("a", 3)
    mine = bench.reserve(3)
    if wrong == "of another session":
        mine[2] = bench.reserve(1, bench.attach_worker())[0]
    elif wrong == "never reserved":
        mine[2] += 40
    elif wrong == "named already":
        bench.cache.commit(bench.worker.id, mine[2:], blocks(chain("b", 1)))
    else:
        mine[2] = mine[0]
    before = (bench.arena.reserved_bytes, bench.arena.stored_bytes)
    with pytest.raises(InvalidRequest, match="slot"):
        bench.cache.commit(bench.worker.id, mine, blocks(keys))

    assert (bench.arena.reserved_bytes, bench.arena.stored_bytes) == before
    assert bench.num_hit(keys) == 0


def test_the_first_commit_of_a_key_wins_and_the_second_keeps_its_slot(bench: Bench) -> None:
    """Also within one batch. The slot stays reserved, for reuse."""

    keys = chain("a", 2)
    bench.save(keys)
    slots = bench.reserve(3)
    again = blocks([*keys, *chain("b", 1)])
    again.depths[2] = 0
    assert list(bench.cache.commit(bench.worker.id, slots, again)) == [ALREADY_PRESENT, ALREADY_PRESENT, STORED]
    twice = blocks(chain("c", 1) * 2)
    twice.depths[1] = 0
    assert list(bench.cache.commit(bench.worker.id, slots[:2], twice)) == [STORED, ALREADY_PRESENT]

    assert list(bench.worker.reserved) == [slots[1]]


def test_no_hits_until_all_workers_of_the_engine_are_attached(clock: FakeClock) -> None:
    """Two shards: presence is told, nothing is promised before both ranks are in."""

    bench = Bench(clock, num_shards=2)
    keys = chain("a", 3)
    for worker in bench.workers:
        bench.save(keys, worker=worker)
    assert bench.lookup(keys).hit_end == 3
    bench.cache.detach(bench.workers[1])
    result = bench.lookup(keys)
    assert (result.hit_start, result.hit_end, result.lease_id, result.missing_workers) == (0, 0, 0, 1)
    assert result.present.all()
    bench.attach_worker(1, engine_id="another engine")
    assert bench.lookup(keys).missing_workers == 1
    unmapped = bench.attach_worker(1, is_mapped=False)
    bench.cache.sessions.issue_ticket(unmapped)
    assert bench.lookup(keys).missing_workers == 1  # it has not got the segments yet
    clock.advance(TICKET_S)
    assert bench.lookup(keys).missing_workers == 0  # it will never have them: it streams
    bench.cache.detach(unmapped)
    assert bench.lookup(keys).missing_workers == 1
    bench.attach_worker(1)

    assert bench.lookup(keys).hit_end == 3


def test_a_ticket_is_good_once_and_not_for_long(bench: Bench, clock: FakeClock) -> None:
    """And only for a session that is attached."""

    sessions = bench.cache.sessions
    worker = bench.attach_worker(is_mapped=False)
    ticket = sessions.issue_ticket(worker)
    assert sessions.redeem(b"another ticket !") is None
    assert sessions.redeem(ticket) is worker
    assert sessions.redeem(ticket) is None
    late = sessions.issue_ticket(bench.attach_worker(is_mapped=False))
    clock.advance(TICKET_S)
    assert sessions.redeem(late) is None
    gone = bench.attach_worker(is_mapped=False)
    ticket = sessions.issue_ticket(gone)
    bench.cache.detach(gone)
    assert sessions.redeem(ticket) is None


def test_the_first_session_of_a_shard_fixes_its_payload_size_and_layout(bench: Bench) -> None:
    """Bytes written in one layout and read in another would be wrong blocks."""

    for shard, word in ((Shard(0, 2 * GRANULE, b"layout"), "8192"), (Shard(0, GRANULE, b"other"), "layout")):
        with pytest.raises(Mismatch, match=word):
            bench.attach(shard)
    with pytest.raises(Mismatch, match="1 shards here"):
        bench.attach(num_shards=2)
    assert bench.cache.counters.sessions_refused == 3


def test_what_is_fixed_is_forgotten_with_the_last_session_and_block(bench: Bench) -> None:
    """A namespace that is not used any more leaves its segments to others and nothing behind."""

    keys = chain("a", 3)
    bench.save(keys)
    for session in list(bench.cache.sessions):
        bench.cache.unmap(session)
    with pytest.raises(Mismatch):
        bench.attach(Shard(0, 2 * GRANULE, b"new layout"))
    bench.cache.flush(NAMESPACE)
    assert bench.cache.namespace_figures() == []
    assert not list(bench.arena.classes)
    bench.attach(Shard(0, 2 * GRANULE, b"new layout"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fingerprint": b"short"}, "fingerprint"),
        ({"key_bytes": 20}, "keys of 20 bytes"),
        ({"num_shards": 0}, "0 shards"),
        ({"num_shards": 1 << 31}, "2147483648 shards"),
        ({"shard": Shard(1, GRANULE, b"")}, "shard 1 of 1"),
        ({"shard": Shard(0, 0, b"")}, "payload of 0 bytes"),
        ({"shard": Shard(0, 17 * GRANULE, b"")}, "payload of 69632 bytes; a segment of this server has 65536"),
    ],
)
def test_an_absurd_attachment_is_refused(clock: FakeClock, change: dict[str, object], word: str) -> None:
    """With the figures in question, and nothing changed."""

    bench = Bench(clock)
    base: dict[str, object] = {
        "engine_id": "e",
        "client_name": "c",
        "pid": 1,
        "fingerprint": b"n" * 32,
        "text": "",
        "key_bytes": 16,
        "num_shards": 1,
        "shard": None,
        "wants_descriptors": False,
    }
    with pytest.raises(InvalidRequest, match=word):
        bench.cache.attach(Attachment(**{**base, **change}))  # type: ignore[arg-type]
    assert len(bench.cache.namespace_figures()) == 1


def test_a_session_that_comes_late_gets_its_part_although_others_hoard(clock: FakeClock) -> None:
    """Four take a quarter each; a fifth gets a fifth of a half, and the four get no more."""

    bench = Bench(clock, num_segments=10, segment_bytes=8 * GRANULE)
    hoarders = [bench.worker, *(bench.attach_worker(engine_id=str(i)) for i in range(3))]
    taken = [len(bench.reserve(80, worker)) for worker in hoarders]
    late = bench.attach_worker(engine_id="late")

    assert taken[:2] == [20, 20]
    assert sum(taken) < 80
    assert len(bench.reserve(80, late)) == 40 // 5
    assert bench.reserve(80, late) == []
    assert bench.reserve(80, hoarders[0]) == []
