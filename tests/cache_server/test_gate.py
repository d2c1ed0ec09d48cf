"""The gate as arithmetic: when loading pays."""

import math

import pytest

from cache_server.gate import PRIOR_RECOMPUTE_US_PER_BLOCK, Estimate, Gate, StreamGate
from tests.fakes import FakeClock

MB = 10**6
DEMO_BLOCK_BYTES = 393_216  # 32 tokens of 12,288 bytes
FAST, SLOW = 3_000.0 * 32, 5_000.0 * 32  # recomputing one block of the demo model, in us


def measured(bytes_per_s: float, latency_s: float = 0.0005) -> Estimate:
    estimate = Estimate()
    estimate.note_transfer(64 * MB, 64 * MB / bytes_per_s)
    estimate.note_latency(latency_s)
    return estimate


@pytest.mark.parametrize("recompute_us", [FAST, SLOW])
def test_the_demo_model_is_recomputed_at_2_mb_per_s_and_loaded_at_20(recompute_us: float) -> None:
    gate = Gate(0.8)

    assert gate.min_blocks(measured(2 * MB), DEMO_BLOCK_BYTES, recompute_us) is None
    assert gate.min_blocks(measured(20 * MB), DEMO_BLOCK_BYTES, recompute_us) == 1
    assert gate.min_blocks(measured(800 * MB), DEMO_BLOCK_BYTES, recompute_us) == 1


def test_without_a_measurement_of_the_engine_2_mb_per_s_is_shut_and_a_local_redis_open() -> None:
    gate = Gate(0.8)

    assert gate.min_blocks(measured(2 * MB), DEMO_BLOCK_BYTES, 0.0) is None
    assert gate.min_blocks(measured(20 * MB), DEMO_BLOCK_BYTES, 0.0) is None
    assert gate.min_blocks(measured(600 * MB, 0.0003), DEMO_BLOCK_BYTES, 0.0) == 1
    assert gate.affordable_s(1, 0.0) == pytest.approx(0.8 * PRIOR_RECOMPUTE_US_PER_BLOCK / 1e6)


def test_a_tier_that_was_not_measured_is_shut() -> None:
    assert Gate(0.8).min_blocks(Estimate(), 1, SLOW) is None


def test_a_distant_tier_needs_more_blocks() -> None:
    """10 ms away, 1 ms per block to load, 2 ms to recompute: 0.8 * 2 n > 10 + n from n = 17 on."""
    estimate = Estimate()
    estimate.note_transfer(1000 * MB, 1.0)
    estimate.note_latency(0.010)

    assert Gate(0.8).min_blocks(estimate, MB, 2000.0) == math.ceil(10 / 0.6)


def test_what_is_queued_before_counts() -> None:
    gate, estimate = Gate(0.8), measured(100 * MB)

    assert gate.min_blocks(estimate, MB, 100_000.0) == 1
    assert gate.min_blocks(estimate, MB, 100_000.0, queued_bytes=100 * MB) == math.ceil(1.0005 / 0.07)


def test_a_link_that_breaks_down_is_believed_after_three_transfers_and_so_is_its_recovery() -> None:
    estimate = measured(1000 * MB)
    for _ in range(3):
        estimate.note_transfer(4 * MB, 2.0)
    assert estimate.bytes_per_s < 5 * MB

    for _ in range(3):
        estimate.note_transfer(4 * MB, 0.004)
    assert estimate.bytes_per_s > 400 * MB


def test_small_transfers_count_little() -> None:
    estimate = measured(1000 * MB)
    estimate.note_transfer(4096, 0.001)

    assert estimate.bytes_per_s > 950 * MB


class TestStreams:
    def test_not_measured_is_open(self, clock: FakeClock) -> None:
        assert StreamGate(Gate(0.8), clock).limits("engine", MB, 1000.0) == (0, None)

    def test_a_slow_stream_is_shut_and_probed_with_a_short_run(self, clock: FakeClock) -> None:
        streams = StreamGate(Gate(0.8), clock)
        streams.note("engine", 64 * MB, 32.0)

        assert streams.limits("engine", DEMO_BLOCK_BYTES, SLOW) == (1, 0)

        clock.advance(11)
        assert streams.limits("engine", DEMO_BLOCK_BYTES, SLOW) == (0, 22)  # 8 MiB in blocks
        assert streams.limits("engine", DEMO_BLOCK_BYTES, SLOW) == (1, 0)

    def test_engines_are_told_apart_and_forgotten(self, clock: FakeClock) -> None:
        streams = StreamGate(Gate(0.8), clock)
        streams.note("slow", 64 * MB, 32.0)

        assert streams.limits("fast", DEMO_BLOCK_BYTES, SLOW) == (0, None)

        streams.keep_only({"fast"})
        assert streams.limits("slow", DEMO_BLOCK_BYTES, SLOW) == (0, None)
