"""The story: what a lookup finds, what a commit keeps, who has to go."""

import pytest

from cache_server.cache import TAKE_EVERY_S
from cache_server.errors import InvalidRequest
from cache_server.eviction import UNSETTLED_GRACE_S
from cache_server.leases import LEASE_S
from cache_server.values import ALREADY_PRESENT, DROPPED, REFUSED, STORED, PutSlot
from tests.cache_server.harness import GRANULE, NAMESPACE, Bench, blocks, chain
from tests.fakes import FakeClock

OTHER = b"o" * 32


@pytest.fixture
def bench(clock: FakeClock) -> Bench:
    """Four segments of 16 slots."""
    return Bench(clock)


# --- lookup ---------------------------------------------------------------------------------------------------


def test_a_lookup_stops_at_the_first_hole_and_a_later_save_fills_it(bench: Bench) -> None:
    """C39: blocks 0, 1, 3, 4 of 5 present are a hit of 2; with block 2 of 5."""

    keys = chain("a", 5)
    slots = bench.reserve(4)
    whole = blocks(keys)
    for column in (whole.keys, whole.parent_keys, whole.depths, whole.checksums):
        del column[2]  # type: ignore[attr-defined]
    assert list(bench.cache.commit(bench.worker.id, slots, whole)) == [STORED] * 4
    result = bench.lookup(keys)
    assert (result.hit_start, result.hit_end) == (0, 2)
    assert result.present.tolist() == [True, True, False, True, True]
    slots = bench.reserve(1)
    one = blocks(keys, 2)
    for column in (one.keys, one.parent_keys, one.depths, one.checksums):
        del column[1:]  # type: ignore[attr-defined]
    bench.cache.commit(bench.worker.id, slots, one)

    assert bench.num_hit(keys) == 5
    assert bench.worker.namespace.index.reachable[1:6].all()


@pytest.mark.parametrize(
    ("present", "first", "hit"),
    [
        ([1, 1, 1, 1], 0, (0, 4)),
        ([1, 1, 0, 1], 0, (0, 2)),
        ([1, 1, 0, 1], 1, (0, 2)),
        ([1, 1, 0, 1], 2, (2, 2)),
        ([1, 1, 0, 1], 3, (3, 4)),
        ([0, 1, 1, 0], 1, (1, 3)),
        ([0, 1, 1, 1], 2, (1, 4)),
        ([0, 0, 0, 0], 0, (0, 0)),
        ([1, 1, 1, 1], 4, (4, 4)),
    ],
)
def test_the_hit_is_the_run_of_present_blocks_around_first(
    bench: Bench, present: list[int], first: int, hit: tuple[int, int]
) -> None:
    """Blocks before `first` are in the engine; they are promised too if they lie in the run."""

    keys = chain("a", 4)
    for i, is_present in enumerate(present):
        if is_present:
            one = blocks(keys[: i + 1], i)
            bench.cache.commit(bench.worker.id, bench.reserve(1), one)
    result = bench.lookup(keys, first)

    assert (result.hit_start, result.hit_end) == hit
    assert bool(result.lease_id) == (hit[0] < hit[1])
    assert result.slots.shape == (1, hit[1] - hit[0])
    assert bench.cache.leased_bytes == (hit[1] - hit[0]) * GRANULE


def test_a_block_is_a_hit_with_all_its_shards_only(clock: FakeClock) -> None:
    """C25: rank 1 lacks block 2 of 5."""

    bench = Bench(clock, num_shards=2)
    keys = chain("a", 5)
    bench.save(keys, worker=bench.workers[0])
    bench.save(keys[:2], worker=bench.workers[1])
    bench.save(keys, 3, worker=bench.workers[1])
    assert bench.num_hit(keys) == 2
    result = bench.lookup(keys)
    index = bench.worker.namespace.index

    assert result.slots.shape == (2, 2)
    assert result.slots.tolist() == index.slots[index.find(b"".join(keys[:2]))].T.tolist()


def test_eviction_leaves_no_block_with_only_one_shard(clock: FakeClock) -> None:
    """C25: what lacks a shard is dropped first, and whole blocks go with all their shards."""

    bench = Bench(clock, num_shards=2)
    half, whole = chain("half", 6), chain("whole", 6)
    bench.save(half, worker=bench.workers[0])
    for worker in bench.workers:
        bench.save(whole, worker=worker)
    clock.advance(UNSETTLED_GRACE_S)
    for i in range(5):
        for worker in bench.workers:
            bench.save(chain(f"more {i}", 7 - i % 2), worker=worker)
    [figures] = bench.cache.namespace_figures()

    assert not any(bench.is_present(key) for key in half)
    assert figures.num_blocks == figures.num_complete
    assert bench.cache.counters.evicted_blocks_unsettled == 6


def test_presence_can_be_asked_without_a_promise(bench: Bench) -> None:
    """No lease, no slots; but the blocks count as used."""

    old, new = chain("old", 8), chain("new", 8)
    bench.save(old)
    bench.save(new)
    result = bench.lookup(old, lease=False)
    assert (result.hit_end, result.lease_id, result.slots.size) == (8, 0, 0)
    for i in range(4):
        bench.save(chain(f"more {i}", 14))

    assert bench.num_hit(new) == 0
    assert bench.num_hit(old) == 8


def test_malformed_lookups_are_refused(bench: Bench) -> None:
    """Half a key, a first beyond the keys, a key twice."""

    keys = chain("a", 3)
    bench.save(keys)
    for packed, first in ((b"x" * 17, 0), (b"".join(keys), 4), (keys[0] + keys[1] + keys[0], 0)):
        with pytest.raises(InvalidRequest):
            bench.cache.lookup(bench.scheduler.id, packed, first, True)
    assert bench.cache.leased_bytes == 0


def test_hits_and_misses_are_what_was_asked(bench: Bench) -> None:
    """The equation of the dashboard."""

    keys = chain("a", 10)
    bench.save(keys[:6])
    for first in (0, 3, 6, 8):
        bench.lookup(keys, first)
    counters = bench.cache.counters

    assert counters.lookup_hit_blocks + counters.lookup_missed_blocks == counters.lookup_asked_blocks == 10 + 7 + 4 + 2
    assert counters.lookup_hit_blocks == 6 + 3


# --- room -----------------------------------------------------------------------------------------------------


def test_memory_full_of_leases_answers_retry(clock: FakeClock) -> None:
    """Nothing leased goes, and asking again may help."""

    bench = Bench(clock, num_segments=1)
    keys = chain("a", 8)
    bench.save(keys[:4])
    bench.save(keys, 4)
    bench.lookup(keys)
    other = chain("b", 4)
    for start in range(0, 8, 4):
        bench.save(chain("c", start + 4), start)
    bench.save(other)
    assert bench.num_hit(keys) == 8
    held = [bench.reserve(4, bench.attach_worker()) for _ in range(2)]
    assert [len(slots) for slots in held] == [4, 4]
    slots, retry = bench.cache.reserve(bench.worker.id, 4)
    assert (len(slots), retry) == (0, True)
    clock.advance(LEASE_S)

    assert len(bench.reserve(4)) == 2  # its part: half of the memory for three


def test_reserve_answers_fewer_while_memory_is_being_touched(clock: FakeClock) -> None:
    """And evicts nothing: there will be room soon."""

    bench = Bench(clock, num_segments=1)
    bench.arena.max_segments = 3
    bench.save(chain("a", 4))
    bench.save(chain("b", 4))
    bench.save(chain("c", 4))
    assert bench.cache.reserve(bench.worker.id, 4)[1] is False
    other = bench.attach_worker()
    slots, retry = bench.cache.reserve(other.id, 4)
    assert (len(slots), retry) == (0, True)
    assert bench.arena.wants_segment
    bench.grow()
    assert len(bench.reserve(4, other)) == 4
    assert bench.cache.counters.evicted_blocks_capacity == 0


def test_a_generation_changes_before_a_slot_is_reserved_again(bench: Bench) -> None:
    """A reader that compares before and after its copy sees it."""

    keys = chain("a", 8)
    bench.save(keys)
    result = bench.lookup(keys)
    bench.cache.release(bench.scheduler.id, [result.lease_id])
    before = dict(zip(result.slots[0].tolist(), result.generations[0].tolist(), strict=True))
    assert all(bench.arena.generation(slot) == generation for slot, generation in before.items())
    for i in range(10):
        bench.save(chain(f"more {i}", 14))

    assert not any(bench.is_present(key) for key in keys)
    assert all(bench.arena.generation(slot) > generation for slot, generation in before.items())


def test_ten_times_the_budget_leaves_the_youngest_chains_whole(bench: Bench) -> None:
    """C66, without a process: least recently used chains are gone, tails before heads."""

    chains = [chain(str(i), 10) for i in range(64)]
    for keys in chains:
        bench.save(keys)
    hits = [bench.num_hit(keys) for keys in chains]

    assert hits[-6:] == [10] * 6
    assert hits[:57] == [0] * 57
    assert bench.arena.touched_bytes == bench.arena.budget_bytes
    assert len(bench.worker.namespace.index) == 64


# --- classes --------------------------------------------------------------------------------------------------


def test_a_class_without_room_takes_the_coldest_segment_above_the_share_of_another(bench: Bench) -> None:
    """Four segments, two classes: two each. The other payload size gets new cuts, the generations rise."""

    for i in range(8):
        bench.save(chain(str(i), 8))
    for i in (0, 1):
        bench.lookup(chain(str(i), 8), lease=False)
    first = [segment.id for segment in (cut.segment for cut in bench.worker.worker.slot_class.cuts.values())]
    before = {cut.segment.id: cut.segment.generations.copy() for cut in bench.worker.worker.slot_class.cuts.values()}
    bench.arena.take_assigned()
    other = bench.attach_worker(payload_bytes=5 * GRANULE, fingerprint=OTHER)
    assert len(bench.reserve(3, other)) == 3
    [cut] = bench.arena.take_assigned()

    assert len(first) == 4
    assert cut.slot_class is other.worker.slot_class  # type: ignore[union-attr]
    assert (cut.segment.generations > before[cut.segment.id]).all()
    assert [bench.num_hit(chain(str(i), 8)) for i in range(8)] == [8, 8, 0, 0, 8, 8, 8, 8]
    assert bench.cache.counters.recut_segments == 1
    assert bench.cache.counters.evicted_blocks_recut == 16


def test_no_class_is_pushed_below_its_share(bench: Bench, clock: FakeClock) -> None:
    """However much the other one writes; both keep two of four segments."""

    other = bench.attach_worker(fingerprint=OTHER)
    for i in range(30):
        bench.save(chain(str(i), 8))
        if i < 20:
            bench.save(chain(str(i), 8), worker=other)
        clock.advance(TAKE_EVERY_S)

    assert len(bench.worker.worker.slot_class.cuts) == 2  # type: ignore[union-attr]
    assert len(other.worker.slot_class.cuts) == 2  # type: ignore[union-attr]


def test_what_extends_a_block_of_a_taken_segment_goes_too(bench: Bench) -> None:
    """No block is left that cannot be reached."""

    keys = chain("a", 64)
    for start in range(0, 64, 16):
        bench.save(keys[: start + 16], start)
    other = bench.attach_worker(fingerprint=OTHER)
    bench.reserve(1, other)

    index = bench.worker.namespace.index
    left = [i for i, key in enumerate(keys) if bench.is_present(key)]
    assert left == list(range(len(left)))
    assert len(left) < 64
    assert len(index) == len(left)
    assert bench.arena.stored_bytes == len(left) * GRANULE


def test_a_segment_with_a_leased_or_reserved_slot_is_not_taken(clock: FakeClock) -> None:
    """Neither promises nor writers are disturbed."""

    bench = Bench(clock, num_segments=2)
    leased, old = chain("leased", 8), chain("old", 8)
    bench.save(old)
    bench.save(leased)
    bench.save(chain("x", 7))
    in_leased = {int(slot) >> 32 for slot in bench.lookup(leased).slots[0]}
    in_reserved = {slot >> 32 for slot in bench.reserve(8)}
    assert in_leased | in_reserved == {1, 2}
    other = bench.attach_worker(fingerprint=OTHER)
    assert bench.cache.reserve(other.id, 1)[0].size == 0

    assert bench.num_hit(old) == 8
    clock.advance(LEASE_S + TAKE_EVERY_S)
    assert bench.cache.reserve(other.id, 1)[0].size == 1
    assert bench.num_hit(leased) == 0


def test_a_class_without_sessions_loses_blocks_only_to_younger_ones(bench: Bench) -> None:
    """A namespace nobody uses any more ages out, also below its share."""

    other = bench.attach_worker(fingerprint=OTHER)
    for i in range(4):
        bench.save(chain(str(i), 8), worker=other)
    bench.cache.unmap(other)
    for i in range(12):
        bench.save(chain(str(i), 8))

    assert len(bench.cache.namespace_figures()) == 1
    assert bench.cache.counters.recut_segments == 2
    assert len(bench.worker.worker.slot_class.cuts) == 4  # type: ignore[union-attr]


def test_shards_of_two_sizes_are_two_classes_and_go_together(clock: FakeClock) -> None:
    """Pipeline ranks differ. Evicting a block frees its slot in both classes."""

    bench = Bench(clock, num_shards=1)
    ranks = [
        bench.attach_worker(rank, payload_bytes=size, fingerprint=OTHER, num_shards=2)
        for rank, size in ((0, GRANULE), (1, 3 * GRANULE))
    ]
    scheduler = bench.attach(fingerprint=OTHER, num_shards=2)
    for i in range(30):
        for rank in ranks:
            slots, _ = bench.cache.reserve(rank.id, 4)
            keys = chain(str(i), len(slots))
            if keys:
                bench.cache.commit(rank.id, [int(slot) for slot in slots], blocks(keys))
        clock.advance(1.0)
    result = bench.cache.lookup(scheduler.id, b"".join(chain("29", 4)), 0, True)

    assert result.hit_end == 4
    figures = bench.cache.namespace_figures()[1]
    assert figures.stored_bytes <= bench.arena.budget_bytes


# --- flush ----------------------------------------------------------------------------------------------------


def test_flush_drops_names_ends_leases_and_raises_generations(bench: Bench) -> None:
    """For everybody, at once."""

    keys = chain("a", 5)
    bench.save(keys)
    result = bench.lookup(keys)
    generations = [bench.arena.generation(int(slot)) for slot in result.slots[0]]
    assert bench.cache.flush(OTHER) == 0
    assert bench.cache.flush(b"") == 5

    assert bench.num_hit(keys) == 0
    assert bench.cache.leased_bytes == bench.arena.stored_bytes == 0
    assert bench.cache.renew(bench.scheduler.id, [result.lease_id]) == []
    assert [bench.arena.generation(int(slot)) for slot in result.slots[0]] == [g + 1 for g in generations]
    with pytest.raises(InvalidRequest, match="fingerprint"):
        bench.cache.flush(b"abc")


def test_payloads_begun_before_a_flush_are_refused(bench: Bench) -> None:
    """Their slots stay reserved and are good for what comes after."""

    keys = chain("a", 2)
    slots = bench.reserve(2)
    bench.cache.flush(NAMESPACE)
    assert list(bench.cache.commit(bench.worker.id, slots, blocks(keys))) == [REFUSED, REFUSED]
    assert bench.num_hit(keys) == 0
    assert sorted(bench.worker.reserved) == slots

    assert list(bench.cache.commit(bench.worker.id, slots, blocks(keys))) == [STORED, STORED]


# --- put and get ----------------------------------------------------------------------------------------------


def test_a_put_that_breaks_leaves_nothing(bench: Bench) -> None:
    """Its slot is free at once: nobody but the server writes there."""

    put = bench.cache.put_slot(bench.worker, chain("a", 1)[0])
    assert isinstance(put, PutSlot)
    assert bench.arena.reserved_bytes == GRANULE
    bench.cache.put_abandon(bench.worker, put)
    assert bench.arena.reserved_bytes == 0


def test_a_put_can_be_stored_present_refused_or_dropped(bench: Bench) -> None:
    """And its slot is never left behind."""

    keys = chain("a", 1)
    batch = blocks(keys)
    cache, worker = bench.cache, bench.worker
    first, second = cache.put_slot(worker, keys[0]), cache.put_slot(worker, keys[0])
    assert isinstance(first, PutSlot)
    assert isinstance(second, PutSlot)
    assert cache.put_commit(worker, first, batch, 0, is_intact=True) == STORED
    assert cache.put_commit(worker, second, batch, 0, is_intact=True) == ALREADY_PRESENT
    assert cache.put_slot(worker, keys[0]) == ALREADY_PRESENT
    broken, flushed, ended = (cache.put_slot(worker, chain(name, 1)[0]) for name in "bcd")
    assert isinstance(broken, PutSlot)
    assert isinstance(flushed, PutSlot)
    assert isinstance(ended, PutSlot)
    assert cache.put_commit(worker, broken, batch, 0, is_intact=False) == REFUSED
    cache.flush(b"")
    assert cache.put_commit(worker, flushed, batch, 0, is_intact=True) == REFUSED
    cache.unmap(worker)
    assert cache.put_commit(worker, ended, batch, 0, is_intact=True) == REFUSED

    assert bench.arena.reserved_bytes == 0


def test_a_put_without_room_is_dropped(clock: FakeClock) -> None:
    """It does not wait for leases."""

    bench = Bench(clock, num_segments=1, payload_bytes=8 * GRANULE)
    held = [bench.reserve(1, bench.attach_worker())[0] for _ in range(2)]
    assert len(held) == 2

    assert bench.cache.put_slot(bench.worker, chain("a", 1)[0]) == DROPPED


def test_a_payload_being_read_is_not_evicted_but_can_be_flushed(bench: Bench) -> None:
    """The reader sees the flush by the generation."""

    keys = chain("a", 8)
    bench.save(keys)
    held = bench.cache.hold_payload(bench.worker, keys[3])
    assert held is not None
    for i in range(20):
        bench.save(chain(str(i), 8))
    assert bench.num_hit(keys) == 4
    assert held.is_intact
    bench.cache.flush(NAMESPACE)
    assert not held.is_intact
    bench.cache.drop_payload(held)

    assert bench.cache.hold_payload(bench.worker, keys[3]) is None
    assert bench.cache.leased_bytes == 0


def test_a_session_of_another_namespace_sees_nothing_of_it(bench: Bench) -> None:
    """Keys may even be equal."""

    keys = chain("a", 4)
    bench.save(keys)
    other = bench.attach_worker(fingerprint=OTHER)
    scheduler = bench.attach(fingerprint=OTHER)

    assert bench.cache.lookup(scheduler.id, b"".join(keys), 0, True).hit_end == 0
    assert bench.cache.hold_payload(other, keys[0]) is None
    assert bench.save(keys, worker=other) == bytes([STORED] * 4)
