"""C69: blocks outlive the daemon, an orderly end writes what is queued, no end at any moment leaves half a value."""

import random
import signal
import time
from pathlib import Path

import pytest

from tests.cache_server.harness import ServerProcess, chain, wait_until
from tests.proxy import Proxy
from tests.redis.harness import PAYLOAD, counters, engine, redis_key, wait_counter
from tests.redis.servers import RedisServer
from tests.redis.test_tier import value_of

KEYS = chain("a", 50)


def test_a_new_daemon_has_what_the_old_one_saved(tmp_path: Path, redis_server: RedisServer) -> None:
    with ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server:
        with engine(server) as one:
            one.worker.save(KEYS)
            wait_counter(server, "redis_saved_payloads", 50)
        assert server.stop() == 0
    with ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server, engine(server) as one:
        assert one.num_hit(KEYS) == 50


def test_without_redis_a_new_daemon_has_nothing_and_no_error(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "128MiB") as server:
        with engine(server) as one:
            one.worker.save(KEYS)
        assert server.stop() == 0
    with ServerProcess(tmp_path, "128MiB") as server, engine(server) as one:
        assert one.num_hit(KEYS) == 0
        assert "ERROR" not in server.log


def test_sigterm_writes_what_is_queued(tmp_path: Path, redis_server: RedisServer) -> None:
    """200 blocks are queued because Redis is silent; it comes back, SIGTERM comes: all are readable afterwards."""
    keys = chain("queued", 200)
    with Proxy(redis_server.address) as proxy:
        proxy.bytes_per_s = 8e6  # 13 MB take their time
        with ServerProcess(tmp_path, "128MiB", "--redis", f"redis://127.0.0.1:{proxy.port}") as server:
            with engine(server) as one:
                one.worker.save(keys)
                assert counters(server)["redis_queue_payloads"] > 100
                assert server.stop() == 0
            assert "not written" not in server.log
    assert len(redis_server.payload_keys()) == 200
    with redis_server.client() as client:
        assert all(client.get(redis_key(key)) == value_of(key, PAYLOAD) for key in keys)


def test_sigterm_with_a_silent_redis_ends_within_the_grace_time(tmp_path: Path, redis_server: RedisServer) -> None:
    options = ("--redis", redis_server.url, "--redis-timeout", "300ms")
    with ServerProcess(tmp_path, "128MiB", *options) as server, engine(server) as one:
        redis_server.stop()
        one.worker.save(KEYS)
        started = time.monotonic()

        assert server.stop() == 0
        assert time.monotonic() - started < 8
        assert "50 payloads" in server.log
        assert "were not written" in server.log


def kill_rounds(tmp_path: Path, redis_server: RedisServer, rounds: int) -> None:
    """kill -9 while it writes. Whatever is in Redis then is whole, and a new daemon serves the head of each chain."""
    generator = random.Random(20260731)
    payload_bytes = 1 << 20
    chains = [chain(f"round-{number}", 20) for number in range(rounds)]
    with Proxy(redis_server.address) as proxy:
        proxy.bytes_per_s = 100e6  # so that most moments lie in the middle of a value
        for keys in chains:
            with (
                ServerProcess(tmp_path, "128MiB", "--redis", f"redis://127.0.0.1:{proxy.port}") as server,
                engine(server, payload_bytes=payload_bytes) as one,
            ):
                one.worker.save(keys)
                time.sleep(generator.uniform(0.0, 0.2))
                server.process.send_signal(signal.SIGKILL)
                server.process.wait()
    present = set(redis_server.payload_keys())
    assert 0 < len(present) < 20 * rounds
    with (
        ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server,
        engine(server, payload_bytes=payload_bytes) as one,
    ):
        for keys in chains:
            leading = next((n for n, key in enumerate(keys) if redis_key(key) not in present), 20)
            assert one.num_hit(keys) == leading
            with redis_server.client() as client:
                for key in keys:
                    assert client.get(redis_key(key)) in (None, value_of(key, payload_bytes))
        assert counters(server)["integrity_failures"] == 0


def test_kill_9_leaves_no_half_value(tmp_path: Path, redis_server: RedisServer) -> None:
    kill_rounds(tmp_path, redis_server, 10)


@pytest.mark.long
def test_kill_9_leaves_no_half_value_in_100_rounds(tmp_path: Path, redis_server: RedisServer) -> None:
    redis_server.configure("maxmemory", "3gb")
    kill_rounds(tmp_path, redis_server, 100)


def test_kill_9_of_redis_while_a_promotion_runs(tmp_path: Path, redis_server: RedisServer) -> None:
    """What came is right, what did not is a miss, no slot is lost."""
    with redis_server.client() as client:
        for key in KEYS:
            client.set(redis_key(key), value_of(key, 393_216))
    with (
        Proxy(redis_server.address) as proxy,
        ServerProcess(tmp_path, "128MiB", "--redis", f"redis://127.0.0.1:{proxy.port}") as server,
        engine(server, payload_bytes=393_216) as one,
    ):
        proxy.bytes_per_s = 30e6
        assert one.scheduler.lookup(KEYS, wait_ms=0, recompute_us_per_block=160_000).retry
        wait_counter(server, "promoted_payloads", 3)
        redis_server.kill()

        assert 3 <= one.num_hit(KEYS) < 50
        wait_until(lambda: server.stats().reserved_bytes == 0, "no slot is lost")
        assert counters(server)["promotions_failed"] > 0
