"""Names, and the order in which blocks go."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_server.eviction import UNSETTLED_GRACE_S
from cache_server.index import Index
from tests.cache_server.harness import chain

FOREVER = 1 << 40


class Book:
    """An index that gets ages and slots by itself."""

    def __init__(self, num_shards: int = 1, key_bytes: int = 16) -> None:
        self.index = Index(key_bytes, num_shards)
        self.age = 0
        self.now = 0.0
        self.next_slot = 1 << 32

    def add(self, keys: list[bytes], positions: list[int] | range | None = None, shard: int = 0) -> None:
        for i in range(len(keys)) if positions is None else positions:
            self.age += 1
            self.next_slot += 1
            parent = keys[i - 1] if i else None
            self.index.add(keys[i], parent, i, shard, self.next_slot, 1, 0, self.age, self.now)

    def use(self, keys: list[bytes]) -> None:
        rows = self.rows(keys)
        self.age += len(rows)
        self.index.touch(rows, self.age)

    def rows(self, keys: list[bytes]) -> np.ndarray:
        return self.index.find(b"".join(keys))

    def evict(self, num_slots: int = FOREVER, shards: tuple[int, ...] = (0,)) -> int:
        return self.index.evict(num_slots, list(shards), self.now).num_blocks

    def present(self, keys: list[bytes]) -> list[int]:
        return [i for i, key in enumerate(keys) if self.index.row(key)]

    def reachable(self, keys: list[bytes]) -> list[int]:
        return [i for i, key in enumerate(keys) if self.index.reachable[self.index.row(key)]]


@pytest.mark.parametrize("key_bytes", [16, 32])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 3000])
def test_keys_are_found_where_they_were_added(key_bytes: int, length: int) -> None:
    """As a run of neighbours or one by one."""

    book = Book(key_bytes=key_bytes)
    keys = chain("a", length, key_bytes)
    book.add(keys)

    assert book.rows(keys).tolist() == list(range(1, length + 1))
    assert [book.index.key(row) for row in range(1, length + 1)] == keys


def test_absent_keys_are_row_0_and_end_no_search() -> None:
    """What lies behind a hole is found too."""

    book = Book()
    keys = chain("a", 100)
    book.add(keys, [*range(40), *range(50, 100)])
    found = book.rows(keys)

    assert np.flatnonzero(found == 0).tolist() == list(range(40, 50))
    assert len(np.unique(found)) == 91


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=12), st.data())
def test_find_agrees_with_asking_key_by_key(pieces: list[tuple[str, int]], data: st.DataObject) -> None:
    """Whatever the rows look like after chains grew side by side and went."""

    book = Book()
    chains = {name: chain(name, 500) for name in "abc"}
    done = dict.fromkeys("abc", 0)
    for name, count in pieces:
        book.add(chains[name], range(done[name], done[name] + count))
        done[name] += count
    book.evict(data.draw(st.integers(0, 30)))
    for keys in chains.values():
        asked = [*keys[:60], *data.draw(st.lists(st.sampled_from(chains["a"][:80]), max_size=20))]

        assert book.rows(asked).tolist() == [book.index.row(key) for key in asked]


def test_the_key_of_a_block_that_is_gone_is_not_found_in_its_old_row() -> None:
    """Rows keep their bytes until they are used again."""

    book = Book()
    keys = chain("a", 64)
    book.add(keys)
    book.evict(20)

    assert book.rows(keys).tolist() == [*range(1, 45), *[0] * 20]


def test_a_block_is_complete_with_all_its_shards() -> None:
    """Shards may come in any order."""

    book = Book(num_shards=2)
    keys = chain("a", 5)
    book.add(keys, shard=1)
    assert book.index.num_complete == 0
    book.add(keys, [0, 1, 3, 4])

    assert book.index.complete[book.rows(keys)].tolist() == [True, True, False, True, True]
    assert book.reachable(keys) == [0, 1]
    book.add(keys, [2])
    assert book.reachable(keys) == [0, 1, 2, 3, 4]


def test_orphans_become_reachable_when_their_parent_comes() -> None:
    """In whatever order a chain arrives."""

    book = Book()
    keys = chain("a", 6)
    book.add(keys, [5, 3, 4, 1])
    assert book.reachable(keys) == []
    book.add(keys, [0])
    assert book.reachable(keys) == [0, 1]
    book.add(keys, [2])

    assert book.reachable(keys) == list(range(6))
    assert book.index.num_children[book.rows(keys)].tolist() == [1, 1, 1, 1, 1, 0]


def test_a_suffix_is_evicted_before_its_prefix() -> None:
    """No victim while a present block extends it."""

    book = Book()
    keys = chain("a", 10)
    book.add(keys)
    for left in range(9, -1, -1):
        assert book.evict(1) == 1
        assert book.present(keys) == list(range(left))
    assert book.evict(1) == 0


def test_the_least_recently_used_chain_goes_first() -> None:
    """By use, not by arrival."""

    book = Book()
    old, new = chain("old", 5), chain("new", 5)
    book.add(old)
    book.add(new)
    book.use(old)
    book.evict(7)

    assert book.present(new) == []
    assert book.present(old) == [0, 1, 2]


def test_a_lookup_makes_heads_younger_than_tails() -> None:
    """So that every tier drops tails first."""

    book = Book()
    keys = chain("a", 50)
    book.add(keys)
    book.use(keys)

    assert (np.diff(book.index.last_use[book.rows(keys)]) < 0).all()


def test_branches_go_before_the_stem() -> None:
    """The common prefix of two chains is a leaf only when both branches are gone."""

    book = Book()
    stem = chain("stem", 3)
    branches = [[*stem, *chain(name, 3)] for name in "xy"]
    book.add(branches[0])
    book.add(branches[1], range(3, 6))
    assert book.index.num_children[book.index.row(stem[2])] == 2
    book.evict(5)
    assert book.present(stem) == [0, 1, 2]
    book.evict(2)

    assert book.present(stem) == [0, 1]


def test_a_leased_block_is_not_evicted() -> None:
    """Nor is anything it extends."""

    book = Book()
    keys = chain("a", 10)
    book.add(keys)
    rows = book.rows(keys[3:6])
    book.index.hold(rows)
    book.index.hold(rows)
    assert book.evict() == 4
    assert book.present(keys) == [0, 1, 2, 3, 4, 5]
    book.index.drop(rows)
    assert book.evict() == 0
    book.index.drop(rows)

    assert book.evict() == 6
    assert book.index.num_leased == 0


def test_a_lease_is_not_dropped_twice() -> None:
    """A negative count would make a leased block evictable."""

    book = Book()
    keys = chain("a", 2)
    book.add(keys)

    with pytest.raises(AssertionError):
        book.index.drop(book.rows(keys))


def test_blocks_that_lack_a_shard_go_first_once_their_grace_time_is_over() -> None:
    """C25: no memory for what can never be a hit. Younger ones may still be completed by the other rank."""

    book = Book(num_shards=2)
    whole, half = chain("whole", 5), chain("half", 5)
    book.add(whole)
    book.add(whole, shard=1)
    book.add(half)
    assert book.evict(1) == 1
    assert book.present(whole) == [0, 1, 2, 3]
    book.now += UNSETTLED_GRACE_S
    book.evict(5)

    assert book.present(half) == []
    assert book.present(whole) == [0, 1, 2, 3]


def test_orphans_go_first_also_when_they_were_used_last() -> None:
    """Nobody can reach them."""

    book = Book()
    reachable, orphans = chain("reachable", 5), chain("orphans", 6)
    book.add(reachable)
    book.add(orphans, [0, 3, 4, 5])
    book.now += UNSETTLED_GRACE_S
    book.use(orphans)
    book.evict(3)

    assert book.present(orphans) == [0]
    assert book.present(reachable) == [0, 1, 2, 3, 4]


def test_an_orphan_whose_parent_came_in_time_has_no_handicap() -> None:
    """Also after it was doomed."""

    book = Book()
    old, late = chain("old", 3), chain("late", 3)
    book.add(old)
    book.add(late, [1, 2])
    book.now += UNSETTLED_GRACE_S
    book.evict(0)
    book.add(late, [0])
    book.use(late)
    book.evict(3)

    assert book.present(old) == []
    assert book.present(late) == [0, 1, 2]


def test_a_parent_that_claims_another_depth_is_no_parent() -> None:
    """So no claim of a client can make a cycle, which could never be evicted."""

    book = Book()
    a, b = (hashlib.sha256(name).digest()[:16] for name in (b"a", b"b"))
    book.index.add(a, b, 1, 0, 1, 1, 0, 1, 0.0)
    book.index.add(b, a, 1, 0, 2, 1, 0, 2, 0.0)
    own = hashlib.sha256(b"own").digest()[:16]
    book.index.add(own, own, 1, 0, 3, 1, 0, 3, 0.0)

    assert book.evict() == 3


def test_removing_what_extends_a_segment_takes_descendants_along() -> None:
    """Closure holds across segments."""

    book = Book()
    keys, other = chain("a", 6), chain("b", 3)
    for segment, position in zip((1, 1, 2, 3, 1, 3), range(6), strict=True):
        book.next_slot = segment << 32 | position
        book.add(keys, [position])
    book.next_slot = 3 << 32 | 100
    book.add(other)
    rows = book.index.extending(2)
    assert sorted(book.index.key(row) for row in rows) == sorted(keys[2:])
    slots = book.index.remove(rows)

    assert len(slots) == 4
    assert book.present(keys) == [0, 1]
    assert book.present(other) == [0, 1, 2]
    assert book.index.segment_ages().keys() == {1, 3}
    assert book.evict() == 5


def test_a_leased_block_keeps_its_segments_from_being_taken() -> None:
    """Whichever shard lies there."""

    book = Book(num_shards=2)
    keys = chain("a", 2)
    book.next_slot = 1 << 32
    book.add(keys)
    book.next_slot = 2 << 32
    book.add(keys, shard=1)
    book.index.hold(book.rows(keys[:1]))

    assert book.index.segment_ages() == {}
    book.index.drop(book.rows(keys[:1]))
    assert book.index.segment_ages().keys() == {1, 2}


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(1, 12)), max_size=40))
def test_eviction_agrees_with_a_naive_model(steps: list[tuple[int, int, int]]) -> None:
    """Chains that grow, branch, are used, leased and evicted: the victim is always the oldest leaf without a lease."""

    book = Book()
    stem = chain("stem", 4)
    chains = [[*stem, *chain(str(i), 20)] if i % 2 else chain(str(i), 24) for i in range(6)]
    blocks: dict[bytes, bytes | None] = {}
    leases: list[list[bytes]] = []
    for action, which, count in steps:
        keys = chains[which]
        present = [key for key in keys if key in blocks]
        run = next((i for i, key in enumerate(keys) if key not in blocks), len(keys))
        if action in (0, 1):
            for i in range(run, min(run + count, len(keys))):
                book.add(keys, [i])
                blocks[keys[i]] = keys[i - 1] if i else None
        elif action == 2 and run:
            book.use(keys[:run])
        elif action == 3 and present:
            if leases and count > 6:
                book.index.drop(book.rows(leases.pop()))
            else:
                leases.append(present[:count])
                book.index.hold(book.rows(leases[-1]))
        else:
            for _ in range(count):
                parents = set(blocks.values())
                held = {key for lease in leases for key in lease}
                ages = {
                    int(book.index.last_use[book.index.row(key)]): key
                    for key in blocks
                    if key not in parents and key not in held
                }
                assert book.evict(1) == bool(ages)
                if ages:
                    victim = ages[min(ages)]
                    assert not book.index.row(victim)
                    del blocks[victim]
        assert len(book.index) == len(blocks)
