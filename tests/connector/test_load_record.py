"""`connector.load_record`: what was seen to fail is not promised again at once, and promised again soon."""

from connector.load_record import MAX_BAD_KEYS, PAUSE_MAX_S, PAUSE_MIN_S, LoadRecord
from tests.fakes import FakeClock

KEYS = [bytes([number]) * 16 for number in range(5)]
BAD_2 = [False, False, True, False, False]


def num_good(record: LoadRecord) -> int:
    return record.num_good(iter(KEYS), len(KEYS))


def test_a_block_that_failed_once_is_promised_again() -> None:
    """It may have been evicted between lookup and load."""
    record = LoadRecord(FakeClock())
    record.ended(KEYS, BAD_2, late=False)

    assert num_good(record) == 5
    assert not record.withholds_loads()


def test_a_block_that_failed_twice_in_a_row_is_not_promised_for_a_while() -> None:
    clock = FakeClock()
    record = LoadRecord(clock)
    for _ in range(2):
        record.ended(KEYS, BAD_2, late=False)

    assert num_good(record) == 2
    assert not record.withholds_loads()
    clock.advance(PAUSE_MIN_S)
    assert num_good(record) == 5
    record.ended(KEYS, BAD_2, late=False)
    clock.advance(PAUSE_MIN_S)
    assert num_good(record) == 2, "the second pause is longer"


def test_a_block_that_was_loaded_meanwhile_is_as_good_as_any() -> None:
    record = LoadRecord(FakeClock())
    for _ in range(5):
        record.ended(KEYS, BAD_2, late=False)
        record.ended(KEYS, [False] * 5, late=False)

    assert num_good(record) == 5


def test_a_late_load_withholds_all_loads_and_blames_no_block() -> None:
    clock = FakeClock()
    record = LoadRecord(clock)
    record.ended(KEYS, [True] * 5, late=True)

    assert record.withholds_loads()
    assert num_good(record) == 5
    clock.advance(PAUSE_MIN_S)
    assert not record.withholds_loads()


def test_late_loads_in_a_row_withhold_longer_but_never_ten_seconds() -> None:
    clock = FakeClock()
    record = LoadRecord(clock)
    for _ in range(20):
        record.ended(KEYS, [True] * 5, late=True)
        clock.advance(PAUSE_MAX_S)
        assert not record.withholds_loads()
    record.ended(KEYS, [True] * 5, late=True)
    clock.advance(PAUSE_MAX_S - 0.1)
    assert record.withholds_loads()


def test_a_load_that_came_in_time_ends_the_row() -> None:
    clock = FakeClock()
    record = LoadRecord(clock)
    for _ in range(3):
        record.ended(KEYS, [True] * 5, late=True)
        clock.advance(PAUSE_MAX_S)
    record.ended(KEYS, BAD_2, late=False)
    record.ended(KEYS, [True] * 5, late=True)
    clock.advance(PAUSE_MIN_S)

    assert not record.withholds_loads()


def test_what_is_remembered_is_bounded() -> None:
    record = LoadRecord(FakeClock())
    many = [number.to_bytes(16, "big") for number in range(3 * MAX_BAD_KEYS)]
    for _ in range(2):
        record.ended(many, [True] * len(many), late=False)

    assert len(record._bad) == MAX_BAD_KEYS


def test_while_all_is_well_no_key_is_looked_at() -> None:
    assert LoadRecord(FakeClock()).num_good(iter(()), 8192) == 8192
