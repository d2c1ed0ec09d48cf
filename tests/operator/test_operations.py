"""Timings and the history: what is kept, and what a quantile of it means."""

import pytest

from cache_server.history import NUM_POINTS, History
from cache_server.operations import BOUNDS, NUM_SLOWEST, OPERATIONS, SLOWEST_S, Operations
from cache_server.status import hit_rate, model_of, quantile, rates_of
from tests.fakes import FakeClock


def test_each_duration_is_in_one_bucket() -> None:
    """Of at most its bound; beyond all bounds in the last."""
    operations = Operations(FakeClock())
    for bound in BOUNDS:
        operations.note("lookup", bound)
    operations.note("lookup", BOUNDS[-1] * 2)
    timing = operations.timings["lookup"]

    assert timing.counts == [1] * (len(BOUNDS) + 1)
    assert timing.count == len(BOUNDS) + 1
    assert timing.seconds == pytest.approx(sum(BOUNDS) + 2 * BOUNDS[-1])
    assert all(other.count == 0 for name, other in operations.timings.items() if name != "lookup")


def test_the_slowest_are_the_slowest_of_the_last_hour() -> None:
    """Ten of them, slowest first; an old one is forgotten."""
    clock = FakeClock()
    operations = Operations(clock)
    operations.note("put", 100.0)
    clock.advance(SLOWEST_S / 2)
    for number in range(3 * NUM_SLOWEST):
        operations.note("get", number / 1000)
    first = [one.seconds for one, _ in operations.slowest()]
    clock.advance(SLOWEST_S / 2)
    later = [(one.name, ago) for one, ago in operations.slowest()]

    assert first == [100.0, *(number / 1000 for number in range(29, 20, -1))]
    assert later == [("get", SLOWEST_S / 2)] * 9


def test_a_block_is_timed_however_it_ends() -> None:
    """An error is a duration too."""
    clock = FakeClock()
    operations = Operations(clock)

    def fails() -> None:
        with operations.timed("attach"):
            clock.advance(0.02)
            raise KeyError

    with pytest.raises(KeyError):
        fails()

    assert operations.timings["attach"].count == 1
    assert operations.timings["attach"].seconds == pytest.approx(0.02)


def test_an_operation_that_nobody_described_is_a_mistake() -> None:
    """Not a new label."""
    with pytest.raises(KeyError):
        Operations().note("dream", 1.0)
    assert "dream" not in OPERATIONS


def test_history_is_bounded_and_in_columns() -> None:
    """The oldest points go first."""
    history = History()
    assert history.as_columns() == {"uptime_s": [], "stored_bytes": []}
    for number in range(NUM_POINTS + 5):
        history.add(number * 10.0, number, {"lookup_hit_blocks": 2 * number})
    columns = history.as_columns()

    assert {len(column) for column in columns.values()} == {NUM_POINTS}
    assert columns["uptime_s"][0] == 50.0
    assert columns["lookup_hit_blocks"][-1] == 2 * (NUM_POINTS + 4)


def test_ratios_and_quantiles_of_nothing_are_nothing() -> None:
    """Not zero, which would say something."""
    assert hit_rate({}) is None
    assert hit_rate({"lookup_asked_blocks": 4, "lookup_hit_blocks": 1}) == 0.25
    assert quantile([1.0, 2.0], [0, 0, 0], 0.99) is None
    assert quantile([1.0, 2.0], [98, 2, 0], 0.99) == 2.0
    assert quantile([1.0, 2.0], [99, 1, 0], 0.99) == 1.0
    assert quantile([1.0, 2.0], [0, 0, 5], 0.99) is None


def test_evictions_of_all_causes_make_one_rate() -> None:
    """What does not exist yet counts as zero."""
    rates = rates_of({"evicted_blocks_capacity": 3, "evicted_blocks_recut": 4})

    assert rates["evicted_blocks"] == 7
    assert rates["promised_bytes"] == 0


@pytest.mark.parametrize(
    ("text", "name"),
    [('{"label": "llama", "hash": "x"}', "llama"), ("a namespace", "a namespace"), ("[1]", "[1]"), ("{}", "{}")],
)
def test_a_namespace_is_called_what_its_client_called_it(text: str, name: str) -> None:
    """Another client's text may be anything; it is cut, and one line."""
    assert model_of(text) == name
    assert model_of("two\nlines " * 30).startswith("two lines two")
    assert len(model_of("x" * 500)) == 60
