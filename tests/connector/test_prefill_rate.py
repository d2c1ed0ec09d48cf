"""`connector.prefill_rate`: what computing a block costs this engine."""

import pytest

from connector.prefill_rate import PrefillRate


def test_nothing_measured_is_zero():
    assert PrefillRate().us_per_block(16) == 0


def test_a_block_costs_its_share_of_a_step():
    rate = PrefillRate()
    rate.observe(2048, 2.0)

    assert rate.us_per_block(32) == pytest.approx(31250)


def test_steps_that_mostly_decode_say_nothing():
    rate = PrefillRate()
    rate.observe(3, 1.0)

    assert rate.us_per_block(16) == 0


def test_a_slow_first_step_fades():
    rate = PrefillRate()
    rate.observe(1000, 60.0)  # compiling
    for _ in range(12):
        rate.observe(1000, 1.0)

    assert rate.us_per_block(10) == pytest.approx(10_000, rel=0.3)
