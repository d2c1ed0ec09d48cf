"""Segments, cuts and slots."""

import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_server.arena import Arena, SlotClass
from cache_server.segments import Segment, segment_bytes_for
from tests.cache_server.harness import GRANULE, MIB, NAMESPACE

GIB = 1 << 30


def arena_of(num_segments: int, granules: int = 16) -> Arena:
    arena = Arena(num_segments * granules * GRANULE, granules * GRANULE)
    for _ in range(num_segments):
        segment = arena.begin_segment()
        segment.touch()
        arena.finish_segment(segment)
    return arena


def class_with(
    arena: Arena, num_segments: int, payload_bytes: int = GRANULE, namespace: bytes = NAMESPACE
) -> SlotClass:
    slot_class = arena.slot_class(namespace, payload_bytes)
    for _ in range(num_segments):
        arena.assign_spare(slot_class)
    return slot_class


@pytest.mark.parametrize(
    ("budget", "segment"),
    [
        (64 * MIB, 64 * MIB),
        (100 * MIB, 64 * MIB),
        (2 * GIB, 128 * MIB),
        (3 * GIB, 128 * MIB),
        (8 * GIB, 512 * MIB),
        (1000 * GIB, GIB),
    ],
)
def test_a_segment_is_about_a_sixteenth_of_the_budget(budget: int, segment: int) -> None:
    """A power of two from 64 MiB to 1 GiB."""

    assert segment_bytes_for(budget) == segment


def test_a_segment_cannot_be_resized_by_a_client() -> None:
    """A shorter file would kill everybody who maps it with SIGBUS."""

    segment = Segment(1, MIB)
    for fd in (segment.fd, segment.generations_fd):
        for size in (0, 2 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, 1033, 0x8)  # no seal can be added: F_SEAL_WRITE would break the server
    segment.close()


def test_another_process_can_map_the_segment_writable_and_its_generations_read_only() -> None:
    """Only the server can claim that a slot did not change."""

    segment = Segment(1, MIB)
    program = """
import mmap, sys
data, generations = int(sys.argv[1]), int(sys.argv[2])
mmap.mmap(data, 1 << 20)[:5] = b"hello"
print(mmap.mmap(generations, 1024, prot=mmap.PROT_READ)[4])
try:
    mmap.mmap(generations, 1024)
except PermissionError:
    print("read only")
"""
    segment.generations[1] = 7
    done = subprocess.run(
        [sys.executable, "-c", program, str(segment.fd), str(segment.generations_fd)],
        pass_fds=(segment.fd, segment.generations_fd),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split("\n")[:2] == ["7", "read only"]
    assert segment.data[:5].tobytes() == b"hello"
    segment.close()


def test_a_touched_segment_is_resident() -> None:
    """Whoever touches first is charged, and that is us."""

    def resident_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem"))

    segment = Segment(1, 8 * MIB)
    before = resident_kib()
    segment.touch()

    assert resident_kib() - before >= 8 * 1024
    assert mmap.PAGESIZE == GRANULE
    segment.close()


def test_touching_stops_when_it_is_not_wanted() -> None:
    """A shutdown does not wait for a gigabyte."""

    segment = Segment(1, MIB)
    asked = []
    segment.touch(lambda: bool(asked.append(1)))

    assert asked == [1]
    segment.close()


def test_the_budget_is_never_exceeded() -> None:
    """Segments being touched count."""

    arena = Arena(3 * MIB + 5, MIB)
    segments = [arena.begin_segment() for _ in range(3)]

    assert arena.touched_bytes == 3 * MIB
    assert not arena.wants_segment
    with pytest.raises(AssertionError):
        arena.begin_segment()
    for segment in segments[:2]:
        arena.finish_segment(segment)
    arena.abandon_segment(segments[2])
    assert not arena.is_growing
    arena.close()


def test_slots_are_payloads_rounded_up_to_granules() -> None:
    """The number of a slot is that of its first granule."""

    arena = arena_of(1)
    slot_class = class_with(arena, 1, payload_bytes=2 * GRANULE + 1)
    slots = arena.reserve(slot_class, 100)

    assert [int(slot) & 0xFFFFFFFF for slot in slots] == [0, 3, 6, 9, 12]
    assert {int(slot) >> 32 for slot in slots} == {1}
    assert len(arena.payload(int(slots[-1]), 2 * GRANULE + 1)) == 2 * GRANULE + 1


def test_reserve_prefers_the_shortest_run_that_holds_all() -> None:
    """Long runs are kept for those who need them."""

    arena = arena_of(1)
    slot_class = class_with(arena, 1)
    slots = arena.reserve(slot_class, 16)
    arena.give_back(slots[[0, 1, 2, 3, 4, 5, 8, 9, 10, 14]])

    assert (arena.reserve(slot_class, 3) & np.uint64(0xFFFF)).tolist() == [8, 9, 10]
    assert (arena.reserve(slot_class, 2) & np.uint64(0xFFFF)).tolist() == [0, 1]


def test_reserve_takes_the_longest_runs_when_none_holds_all() -> None:
    """Ascending, over all segments."""

    arena = arena_of(2)
    slot_class = class_with(arena, 2)
    slots = arena.reserve(slot_class, 32)
    arena.give_back(slots[[1, 4, 5, 20, 21, 22]])

    assert arena.reserve(slot_class, 5).tolist() == slots[[4, 5, 20, 21, 22]].tolist()
    assert arena.reserve(slot_class, 5).tolist() == slots[[1]].tolist()
    assert arena.reserve(slot_class, 5).tolist() == []


def test_a_generation_rises_when_a_slot_stops_being_named() -> None:
    """Not when it is reserved, named or given back: nobody reads it then."""

    arena = arena_of(1)
    slot_class = class_with(arena, 1)
    slot = int(arena.reserve(slot_class, 1)[0])
    one = np.array([slot], dtype=np.uint64)
    before = arena.generation(slot)
    arena.give_back(one)
    assert int(arena.reserve(slot_class, 1)[0]) == slot
    assert arena.name(slot) == before == arena.generation(slot)
    arena.evict(one)

    assert arena.generation(slot) == before + 1


def test_all_generations_rise_when_a_segment_changes_its_class() -> None:
    """The new cut has other slots; whatever a reader remembers of the old ones is over."""

    arena = arena_of(1)
    old, new = class_with(arena, 1), arena.slot_class(NAMESPACE, 3 * GRANULE)
    cut = old.cuts[1]
    before = cut.segment.generations.copy()
    arena.recut(cut, new)

    assert (cut.segment.generations == before + 1).all()
    assert old.num_free == 0
    assert new.num_free == 5


def test_a_segment_in_use_cannot_change_its_class() -> None:
    """A reserved slot is enough: somebody writes there."""

    arena = arena_of(1)
    slot_class = class_with(arena, 1)
    arena.reserve(slot_class, 1)

    with pytest.raises(AssertionError, match="1 reserved, 0 named"):
        arena.recut(slot_class.cuts[1], arena.slot_class(NAMESPACE, 2 * GRANULE))


def test_a_slot_cannot_be_given_back_twice_or_named_without_being_reserved() -> None:
    """A broken invariant stops."""

    arena = arena_of(1)
    slot_class = class_with(arena, 1)
    slots = arena.reserve(slot_class, 1)
    arena.give_back(slots)

    for wrong in (arena.give_back, arena.evict, lambda slots: arena.name(int(slots[0]))):
        with pytest.raises(AssertionError):
            wrong(slots)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=40))
def test_slots_in_use_never_overlap_and_the_figures_add_up(steps: list[tuple[int, int]]) -> None:
    """Whatever is reserved, named, evicted and given back."""

    arena = arena_of(2)
    classes = [class_with(arena, 1), class_with(arena, 1, payload_bytes=2 * GRANULE)]
    reserved: list[tuple[int, int]] = []
    named: list[tuple[int, int]] = []
    for action, count in steps:
        which = count % 2
        if action == 0:
            reserved += [(int(slot), which) for slot in arena.reserve(classes[which], count)]
        elif action == 1 and reserved:
            slot, which = reserved.pop()
            arena.name(slot)
            named.append((slot, which))
        elif action == 2:
            gone, named = named[:count], named[count:]
            arena.evict(np.array([slot for slot, _ in gone], dtype=np.uint64))
        else:
            gone, reserved = reserved[:count], reserved[count:]
            arena.give_back(np.array([slot for slot, _ in gone], dtype=np.uint64))
        granules = [slot + i for slot, which in reserved + named for i in range(which + 1)]

        assert len(set(granules)) == len(granules)
        assert arena.reserved_bytes == sum((which + 1) * GRANULE for _, which in reserved)
        assert arena.stored_bytes == sum((which + 1) * GRANULE for _, which in named)
    arena.close()
