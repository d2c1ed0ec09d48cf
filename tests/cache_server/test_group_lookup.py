"""One lookup over several kinds of blocks: where it says that one can go on, and what it promises for that."""

import random

import numpy as np
import pytest

from cache_server.boundaries import open_boundaries, starts
from cache_server.leases import LEASE_S
from cache_server.values import Blocks, GroupQuestion, Shard
from tests.cache_server.harness import Bench, blocks, chain
from tests.fakes import FakeClock

WINDOW, STATE = b"w" * 32, b"s" * 32


def can_go_on(present: list[list[bool]], windows: list[int], first: int, boundary: int) -> bool:
    """The rule, said plainly."""
    return boundary > first and all(
        flags[block]
        for flags, window in zip(present, windows, strict=True)
        for block in range(max(first, boundary - window) if window else first, boundary)
    )


@pytest.mark.parametrize("seed", range(200))
def test_boundaries_are_open_exactly_where_every_group_has_what_it_needs(seed: int) -> None:
    dice = random.Random(seed)
    length, windows = dice.randrange(1, 14), [dice.choice([0, 1, 2, 5]) for _ in range(dice.randrange(1, 4))]
    present = [[dice.random() < 0.8 for _ in range(length)] for _ in windows]
    first = dice.randrange(length + 1)
    flags = [np.array(row) for row in present]
    found = open_boundaries(flags, windows, first).tolist()

    assert found == [can_go_on(present, windows, first, boundary) for boundary in range(length + 1)]
    for row, window in zip(flags, windows, strict=True):
        for boundary, start in enumerate(starts(row, window).tolist()):
            assert row[start:boundary].all()
            assert start == 0 or not row[start - 1] or boundary - start == window


class Hybrid(Bench):
    """Full attention in the bench's namespace, a window of two blocks and recurrent state in two others."""

    def __init__(self, clock: FakeClock, **more: int) -> None:
        super().__init__(clock, **more)
        self.of = {b"": self.worker}
        for fingerprint in (WINDOW, STATE):
            self.of[fingerprint] = self.attach_worker(fingerprint=fingerprint)
        self.groups = [GroupQuestion(WINDOW, 2, 1), GroupQuestion(STATE, 1, 1)]

    def store(self, fingerprint: bytes, keys: list[bytes], numbers: list[int]) -> None:
        """Blocks of a window stand alone, each of depth 0."""
        worker = self.of[fingerprint]
        if not fingerprint:
            assert numbers == list(range(len(numbers)))
            named = blocks(keys[: len(numbers)])
        else:
            named = Blocks(
                [keys[i] for i in numbers], [bytes(16)] * len(numbers), [0] * len(numbers), [0] * len(numbers)
            )
        slots, _ = self.cache.reserve(worker.id, len(numbers))
        assert len(slots) == len(numbers)
        self.cache.commit(worker.id, [int(slot) for slot in slots], named)

    def ask(self, keys: list[bytes], first: int = 0, lease: bool = True, **more: int):  # type: ignore[no-untyped-def]
        return self.cache.lookup_groups(self.scheduler.id, b"".join(keys), first, lease, 0, self.groups, **more)


@pytest.fixture
def hybrid(clock: FakeClock) -> Hybrid:
    return Hybrid(clock)


def test_what_is_promised_is_what_each_group_needs_at_the_boundary(hybrid: Hybrid) -> None:
    keys = chain("a", 8)
    hybrid.store(b"", keys, list(range(7)))
    hybrid.store(WINDOW, keys, [2, 3, 4, 5, 6])
    hybrid.store(STATE, keys, [1, 4, 5])
    result = hybrid.ask(keys)

    assert (result.hit_start, result.hit_end) == (0, 6)
    assert [group.hit_start for group in result.groups] == [4, 5]
    assert [group.slots.shape for group in result.groups] == [(1, 2), (1, 1)]
    assert [group.present.tolist() for group in result.groups] == [
        [i in (2, 3, 4, 5, 6) for i in range(8)],
        [i in (1, 4, 5) for i in range(8)],
    ]
    index = hybrid.of[STATE].namespace.index
    assert result.groups[1].slots.tolist() == [[int(index.slots[index.row(keys[5]), 0])]]


def test_one_lease_holds_all_groups_and_ends_for_all(hybrid: Hybrid, clock: FakeClock) -> None:
    keys = chain("a", 4)
    for fingerprint in hybrid.of:
        hybrid.store(fingerprint, keys, list(range(4)))
    leased = {f: worker.namespace.index for f, worker in hybrid.of.items()}
    first = hybrid.ask(keys)
    held = {fingerprint: index.num_leased for fingerprint, index in leased.items()}
    hybrid.cache.release(hybrid.scheduler.id, [first.lease_id])
    released = {fingerprint: index.num_leased for fingerprint, index in leased.items()}
    hybrid.ask(keys)
    clock.advance(LEASE_S)
    hybrid.cache.expire()

    assert held == {b"": 4, WINDOW: 2, STATE: 1}
    assert set(released.values()) == {0}
    assert {index.num_leased for index in leased.values()} == {0}


def test_a_flush_of_one_group_ends_the_lease_of_all(hybrid: Hybrid) -> None:
    keys = chain("a", 4)
    for fingerprint in hybrid.of:
        hybrid.store(fingerprint, keys, list(range(4)))
    hybrid.ask(keys)
    hybrid.cache.flush(STATE)

    assert len(hybrid.cache.leases) == 0
    assert {worker.namespace.index.num_leased for worker in hybrid.of.values()} == {0}
    assert hybrid.ask(keys).hit_end == 0


def test_blocks_of_a_window_go_each_by_its_own_age(clock: FakeClock) -> None:
    """A chain goes from its tail; here what left the window goes first, whatever extends it."""
    hybrid = Hybrid(clock, num_segments=3)
    keys = chain("a", 12)
    hybrid.store(b"", keys, list(range(12)))
    hybrid.store(WINDOW, keys, list(range(12)))
    hybrid.store(STATE, keys, [11])
    hybrid.cache.release(hybrid.scheduler.id, [hybrid.ask(keys).lease_id])
    hybrid.store(WINDOW, chain("b", 12), list(range(12)))
    row = hybrid.of[WINDOW].namespace.index.row
    there = [bool(row(key)) for key in keys]

    assert there[10:] == [True, True]
    assert not all(there)
    assert hybrid.ask(keys).hit_end == 12


def test_nothing_is_promised_while_a_worker_of_any_group_is_missing(hybrid: Hybrid) -> None:
    keys = chain("a", 3)
    for fingerprint in hybrid.of:
        hybrid.store(fingerprint, keys, list(range(3)))
    assert hybrid.ask(keys).hit_end == 3
    hybrid.cache.unmap(hybrid.of[WINDOW])
    without = hybrid.ask(keys)
    hybrid.groups.append(GroupQuestion(b"x" * 32, 0, 1))  # nobody of it was ever here
    without_two = hybrid.ask(keys)

    assert (without.hit_end, without.lease_id, without.missing_workers) == (0, 0, 1)
    assert (without_two.hit_end, without_two.missing_workers) == (0, 2)


def test_every_reader_of_a_shard_counts_as_a_worker(clock: FakeClock) -> None:
    """MLA: one shard, written by rank 0, read by both ranks of an engine."""
    bench = Bench(clock)
    keys = chain("a", 2)
    bench.save(keys)
    group = [GroupQuestion(WINDOW, 0, 2)]
    writer = bench.attach_worker(fingerprint=WINDOW)
    bench.save(keys, worker=writer)

    def ask():  # type: ignore[no-untyped-def]
        return bench.cache.lookup_groups(bench.scheduler.id, b"".join(keys), 0, True, 0, group)

    with_one = ask()
    reader = bench.attach(Shard(0, bench.payload_bytes, b"layout", replica=1), fingerprint=WINDOW)
    bench.cache.sessions.redeem(bench.cache.sessions.issue_ticket(reader))
    with_both = ask()

    assert (with_one.hit_end, with_one.missing_workers) == (0, 1)
    assert (with_both.hit_end, with_both.missing_workers) == (2, 0)


def test_what_may_not_be_leased_shortens_the_hit_to_a_boundary_before(clock: FakeClock) -> None:
    """Half of 96 slots may be leased."""
    hybrid = Hybrid(clock, num_segments=6)
    long, keys = chain("long", 20), chain("a", 24)
    hybrid.store(b"", long, list(range(20)))
    hybrid.store(b"", keys, list(range(24)))
    hybrid.store(WINDOW, long, [18, 19])
    hybrid.store(WINDOW, keys, list(range(24)))
    hybrid.store(STATE, long, [19])
    hybrid.store(STATE, keys, [7, 15, 19, 23])
    assert hybrid.ask(long).hit_end == 20  # 23 slots
    capped = hybrid.ask(keys)

    assert capped.hit_end == 20  # 23 slots; the boundary of 24 needs 27, and 25 are left
    assert capped.retry
    assert hybrid.cache.leased_bytes == 2 * 23 * hybrid.payload_bytes
    assert hybrid.ask(keys, 20, max_hit_blocks=3).hit_end == 20


def test_a_presence_question_promises_nothing(hybrid: Hybrid) -> None:
    keys = chain("a", 3)
    for fingerprint in hybrid.of:
        hybrid.store(fingerprint, keys, list(range(3)))
    result = hybrid.ask(keys, lease=False)

    assert (result.hit_end, result.lease_id, result.slots.size) == (3, 0, 0)
    assert hybrid.cache.leased_bytes == 0
