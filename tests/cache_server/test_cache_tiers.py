"""What the cache says to and takes from a tier below: tails, promoted payloads, and names that have to be told."""

import numpy as np

from cache_server.cache import Cache
from cache_server.values import ALREADY_PRESENT, DROPPED, REFUSED, STORED, PayloadName, PutSlot
from tests.cache_server.harness import GRANULE, NAMESPACE, Bench, blocks, chain
from tests.fakes import FakeClock


def telling(clock: FakeClock, tell_every_s: float = 100.0) -> Bench:
    """A bench whose cache has a tier below."""
    return Bench(clock, tell_every_s=tell_every_s)


def packed(keys: list[bytes]) -> bytes:
    return b"".join(keys)


class TestTail:
    def test_it_begins_at_the_first_absent_block(self, clock: FakeClock) -> None:
        bench, keys = Bench(clock), chain("a", 6)
        bench.save(keys[:2])

        tail = bench.cache.tail(bench.scheduler.id, packed(keys), 0)

        assert tail is not None
        assert (tail.keys, tail.parent_key, tail.depth) == (keys[2:], keys[1], 2)

    def test_of_an_empty_memory_it_is_everything(self, clock: FakeClock) -> None:
        bench, keys = Bench(clock), chain("a", 2)

        tail = bench.cache.tail(bench.scheduler.id, packed(keys), 0)

        assert tail is not None
        assert (tail.keys, tail.parent_key, tail.depth) == (keys, bytes(16), 0)

    def test_there_is_none_when_all_is_here_or_workers_are_missing(self, clock: FakeClock) -> None:
        bench, keys = Bench(clock), chain("a", 2)
        alone = bench.attach(engine_id="another engine")
        bench.save(keys)

        assert bench.cache.tail(bench.scheduler.id, packed(keys), 0) is None
        assert bench.cache.tail(alone.id, packed(chain("b", 2)), 0) is None


class TestPromotion:
    def slot(self, cache: Cache, bench: Bench, key: bytes) -> PutSlot:
        put = cache.promote_slot(bench.worker.namespace, key, 0)
        assert isinstance(put, PutSlot)
        return put

    def test_a_promoted_block_is_a_hit_and_is_not_told_of(self, clock: FakeClock) -> None:
        bench, keys = telling(clock), chain("a", 1)
        put = self.slot(bench.cache, bench, keys[0])

        assert bench.cache.promote_commit(bench.worker.namespace, 0, put, blocks(keys), 0) == STORED
        assert bench.num_hit(keys) == 1
        assert bench.cache.take_untold() == []
        assert bench.cache.promote_slot(bench.worker.namespace, keys[0], 0) == ALREADY_PRESENT

    def test_the_first_name_wins(self, clock: FakeClock) -> None:
        bench, keys = Bench(clock), chain("a", 1)
        put = self.slot(bench.cache, bench, keys[0])
        bench.save(keys)

        assert bench.cache.promote_commit(bench.worker.namespace, 0, put, blocks(keys), 0) == ALREADY_PRESENT
        assert bench.arena.reserved_bytes == 0

    def test_a_flush_refuses_what_was_on_its_way(self, clock: FakeClock) -> None:
        bench, keys = Bench(clock), chain("a", 1)
        put = self.slot(bench.cache, bench, keys[0])
        bench.cache.flush(NAMESPACE)

        assert bench.cache.promote_commit(bench.worker.namespace, 0, put, blocks(keys), 0) == REFUSED
        assert bench.num_hit(keys) == 0
        assert bench.arena.reserved_bytes == 0

    def test_a_namespace_lives_until_its_last_slot_is_given_back(self, clock: FakeClock) -> None:
        bench, keys = Bench(clock), chain("a", 1)
        namespace = bench.worker.namespace
        put = self.slot(bench.cache, bench, keys[0])
        bench.cache.unmap(bench.worker)
        bench.cache.detach(bench.scheduler)
        assert len(bench.cache.namespace_figures()) == 1

        bench.cache.promote_abandon(namespace, put)
        assert bench.cache.namespace_figures() == []
        assert bench.cache.promote_slot(namespace, keys[0], 0) == DROPPED


class TestTelling:
    def test_a_commit_is_told_once(self, clock: FakeClock) -> None:
        bench, keys = telling(clock), chain("a", 3)
        bench.save(keys)
        bench.save(keys)

        assert bench.cache.take_untold() == [PayloadName(NAMESPACE, key, 0, GRANULE) for key in keys]
        assert bench.cache.take_untold() == []

    def test_a_block_that_is_used_is_told_now_and_then_tails_first(self, clock: FakeClock) -> None:
        bench, keys = telling(clock, 100.0), chain("a", 3)
        bench.save(keys)
        bench.cache.take_untold()

        clock.advance(99)
        bench.lookup(keys)
        assert bench.cache.take_untold() == []

        clock.advance(1)
        bench.lookup(keys, lease=False)
        assert bench.cache.take_untold() == []
        bench.lookup(keys)
        bench.lookup(keys)
        assert [name.key for name in bench.cache.take_untold()] == keys[::-1]

    def test_without_a_tier_nothing_is_kept(self, clock: FakeClock) -> None:
        bench, keys = Bench(clock), chain("a", 3)
        bench.save(keys)
        clock.advance(1e6)
        bench.lookup(keys)

        assert bench.cache.take_untold() == []

    def test_what_is_held_for_it_is_not_used(self, clock: FakeClock) -> None:
        """Writing a block to Redis does not make it younger, but keeps it while it is sent."""
        bench, keys = Bench(clock, num_segments=1), chain("a", 16)
        for key in keys:
            bench.save([key])
        held = bench.cache.hold_named(PayloadName(NAMESPACE, keys[0], 0, GRANULE))
        assert held is not None
        bench.save(chain("b", 1))
        assert bench.is_present(keys[0])
        assert not bench.is_present(keys[1])

        bench.cache.drop_payload(held)
        bench.save(chain("c", 1))
        assert not bench.is_present(keys[0])

    def test_a_name_that_does_not_fit_holds_nothing(self, clock: FakeClock) -> None:
        bench, keys = Bench(clock), chain("a", 1)
        bench.save(keys)
        name = PayloadName(NAMESPACE, keys[0], 0, GRANULE)

        assert bench.cache.hold_named(name._replace(num_bytes=GRANULE + 1)) is None
        assert bench.cache.hold_named(name._replace(shard=1)) is None
        assert bench.cache.hold_named(name._replace(namespace=bytes(32))) is None
        assert bench.cache.hold_named(name._replace(key=bytes(16))) is None
        assert bench.cache.hold_named(name) is not None


class TestLimits:
    """What a gate says about hits in memory."""

    def test_a_run_that_is_too_short_is_not_promised(self, clock: FakeClock) -> None:
        bench, keys = Bench(clock), chain("a", 4)
        bench.save(keys)

        assert bench.cache.lookup(bench.scheduler.id, packed(keys), 0, True, 5).hit_end == 0
        assert bench.cache.lookup(bench.scheduler.id, packed(keys), 1, True, 3).hit_end == 4
        assert bench.cache.lookup(bench.scheduler.id, packed(keys), 0, True, 1, 0).hit_end == 0
        assert bench.cache.lookup(bench.scheduler.id, packed(keys), 0, True, 0, 2).hit_end == 2
        assert bench.cache.counters.gate_stream_shut == 2
        counters = bench.cache.counters
        assert counters.lookup_hit_blocks + counters.lookup_missed_blocks == counters.lookup_asked_blocks
        assert np.count_nonzero(bench.worker.namespace.index.num_leases) == 4
