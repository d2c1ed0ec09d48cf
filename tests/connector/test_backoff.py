"""`connector.backoff`: how long something that failed is left alone."""

from connector.backoff import Backoff
from tests.fakes import FakeClock


def pauses(backoff: Backoff, clock: FakeClock, number: int) -> list[float]:
    """The pause after each of `number` failures in a row, each when the one before was over."""
    found = []
    for _ in range(number):
        backoff.failed()
        found.append(backoff.left_s())
        clock.advance(backoff.left_s())
    return found


def test_each_failure_in_a_row_doubles_the_pause_up_to_a_bound() -> None:
    clock = FakeClock()

    assert pauses(Backoff(0.5, 3.0, clock), clock, 5) == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_failures_during_a_pause_are_one() -> None:
    """They are of attempts made before it."""
    clock = FakeClock()
    backoff = Backoff(1.0, 8.0, clock)
    for _ in range(10):
        backoff.failed()
    clock.advance(0.25)

    assert backoff.left_s() == 0.75
    clock.advance(0.75)
    assert pauses(backoff, clock, 1) == [2.0]


def test_a_success_forgets_all_failures() -> None:
    clock = FakeClock()
    backoff = Backoff(1.0, 8.0, clock)
    pauses(backoff, clock, 3)
    backoff.worked()

    assert pauses(backoff, clock, 2) == [1.0, 2.0]


def test_a_thousand_failures_are_no_overflow() -> None:
    clock = FakeClock()

    assert pauses(Backoff(0.2, 5.0, clock), clock, 1000)[-1] == 5.0
