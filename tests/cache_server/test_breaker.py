"""The breaker as a state machine."""

from cache_server.breaker import Breaker
from tests.fakes import FakeClock


def test_a_change_of_state_is_told_once(clock: FakeClock) -> None:
    breaker = Breaker(clock, 1.0, 8.0)

    assert [breaker.open(), breaker.open(), breaker.close(), breaker.close()] == [True, False, True, False]
    assert breaker.num_opened == 1


def test_it_may_be_tried_after_a_while_and_then_less_and_less_often(clock: FakeClock) -> None:
    breaker = Breaker(clock, 1.0, 8.0)
    breaker.open()
    waits = []
    for _ in range(5):
        waited = 0.0
        while not breaker.may_try:
            clock.advance(0.5)
            waited += 0.5
        waits.append(waited)
        breaker.try_failed()

    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_closed_one_is_not_tried(clock: FakeClock) -> None:
    assert not Breaker(clock, 0.0, 1.0).may_try


def test_it_starts_over_after_it_was_closed(clock: FakeClock) -> None:
    breaker = Breaker(clock, 1.0, 8.0)
    breaker.open()
    breaker.try_failed()
    breaker.close()
    breaker.open()
    clock.advance(1.0)

    assert breaker.may_try
    assert breaker.open_s == 1.0
