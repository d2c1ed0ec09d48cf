"""Promises: how they end, and what they cost."""

import itertools

import pytest

from cache_server.leases import LEASE_MAX_AGE_S, LEASE_S, Leases
from tests.cache_server.harness import GRANULE, Bench, blocks, chain
from tests.cache_server.test_index import Book
from tests.fakes import FakeClock

ME, OTHER = 1, 2


class Held:
    """A lease of session ME on a chain of 5."""

    def __init__(self, clock: FakeClock) -> None:
        ids = itertools.count(100)
        self.book = Book()
        self.keys = chain("a", 5)
        self.book.add(self.keys)
        self.leases = Leases(clock, lambda: next(ids))
        self.id = self.grant()

    def grant(self) -> int:
        return self.leases.grant(ME, self.book.index, self.book.rows(self.keys))

    @property
    def num_leased(self) -> int:
        return self.book.index.num_leased


@pytest.fixture
def held(clock: FakeClock) -> Held:
    return Held(clock)


def test_a_lease_ends_at_its_deadline(held: Held, clock: FakeClock) -> None:
    """Not before, and without anybody asking for it."""

    clock.advance(LEASE_S - 0.001)
    assert held.leases.expire() == 0
    assert held.num_leased == 5
    clock.advance(0.001)
    assert held.leases.expire() == 1
    assert held.num_leased == 0
    assert held.leases.expire() == 0


def test_release_ends_it_once(held: Held) -> None:
    """A second release, or one of another session, changes nothing."""

    assert held.leases.release(OTHER, [held.id]) == 0
    assert held.leases.release(ME, [held.id, held.id, 77]) == 1
    assert held.leases.release(ME, [held.id]) == 0
    assert held.num_leased == 0


def test_renew_moves_the_deadline(held: Held, clock: FakeClock) -> None:
    """From now on, not from the old deadline."""

    clock.advance(LEASE_S / 2)
    assert held.leases.renew(ME, [held.id, 77]) == [held.id]
    assert held.leases.renew(OTHER, [held.id]) == []
    clock.advance(LEASE_S - 1)
    assert held.leases.expire() == 0
    clock.advance(1)
    assert held.leases.expire() == 1


def test_renew_cannot_keep_a_lease_for_ever(held: Held, clock: FakeClock) -> None:
    """A client that hangs but renews does not hold blocks beyond the total age."""

    start = clock.now
    while held.leases.renew(ME, [held.id]):
        clock.advance(LEASE_S / 2)
        held.leases.expire()
    clock.advance(LEASE_S / 2)
    held.leases.expire()

    assert len(held.leases) == 0
    assert LEASE_MAX_AGE_S - LEASE_S <= clock.now - start <= LEASE_MAX_AGE_S


def test_two_leases_of_one_block_are_independent(held: Held) -> None:
    """The block is free with the last of them."""

    second = held.grant()
    assert held.num_leased == 5
    held.leases.release(ME, [held.id])
    assert held.num_leased == 5
    held.leases.release(ME, [second])
    assert held.num_leased == 0


# --- in the cache ---------------------------------------------------------------------------------------------


def test_a_lookup_promises_at_most_half_of_the_budget(clock: FakeClock) -> None:
    """The rest of the hit is not promised, and asking again may help: 64 slots, 32 may be leased."""

    bench = Bench(clock)
    first, second = chain("first", 20), chain("second", 20)
    bench.save(first[:16])
    bench.save(first, 16)
    bench.save(second[:12])
    bench.save(second, 12)
    assert bench.lookup(first).hit_end == 20
    capped = bench.lookup(second)

    assert (capped.hit_end, capped.retry) == (12, True)
    assert capped.present.all()
    assert bench.cache.leased_bytes == 32 * GRANULE
    assert bench.lookup(first).hit_end == 20  # leased already: costs nothing
    none = bench.lookup(second, first=12)
    assert (none.hit_start, none.hit_end, none.lease_id, none.retry) == (12, 12, 0, True)
    bench.cache.release(bench.scheduler.id, [capped.lease_id])
    assert bench.lookup(second, first=12).hit_end == 20


def test_abandoned_leases_end_and_the_hit_rate_comes_back(clock: FakeClock) -> None:
    """C34: 1,000 lookups, a quarter released, the rest forgotten; after the lease time nothing is held."""

    bench = Bench(clock)
    for round_ in range(1000):
        keys = chain(f"{round_ % 7}", 8)
        known = bench.num_hit(keys)
        slots = bench.reserve(8 - known)
        bench.cache.commit(bench.worker.id, slots, blocks(keys[: known + len(slots)], known))
        result = bench.lookup(keys)
        if round_ % 4 == 0 and result.lease_id:
            bench.cache.release(bench.scheduler.id, [result.lease_id])
        clock.advance(0.1)
        assert bench.cache.leased_bytes <= bench.arena.budget_bytes // 2
    clock.advance(LEASE_S)
    bench.cache.expire()

    assert bench.cache.leased_bytes == 0
    assert len(bench.cache.leases) == 0
    bench.save(chain("fresh", 16))
    assert bench.num_hit(chain("fresh", 16)) == 16
    counters = bench.cache.counters
    assert counters.leases_granted == counters.leases_released + counters.leases_expired


def test_a_lease_outlives_its_session(clock: FakeClock) -> None:
    """It ends by deadline or release only, never because a stream broke."""

    bench = Bench(clock)
    keys = chain("a", 4)
    bench.save(keys)
    bench.lookup(keys)
    bench.cache.detach(bench.scheduler)
    assert bench.cache.leased_bytes == 4 * GRANULE
    clock.advance(LEASE_S)
    bench.cache.expire()
    assert bench.cache.leased_bytes == 0
