"""Redis that is silent, gone, slow or full is never felt: C48, C50 and the Redis half of C49."""

import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cache_server.harness import ServerProcess, chain, wait_until
from tests.proxy import Proxy
from tests.redis.harness import (
    RECOMPUTE_US,
    WAIT_MS,
    assert_right,
    counters,
    engine,
    percentile,
    redis_key,
    timed,
    wait_counter,
)
from tests.redis.servers import RedisServer

KEYS = chain("a", 20)
TIMEOUT_S = 0.5


def is_serving(server: ServerProcess) -> bool:
    with grpc.insecure_channel(server.unix) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("fault", ["SIGSTOP", "black hole", "killed"])
def test_lookups_answer_from_memory_while_redis_is_gone(tmp_path: Path, redis_server: RedisServer, fault: str) -> None:
    """C48: memory answers within 20 ms at the 99th percentile, readiness stays, redis_up is 0; then it is back."""
    with Proxy(redis_server.address) as proxy:
        options = ("--redis", f"redis://127.0.0.1:{proxy.port}", "--redis-timeout", f"{TIMEOUT_S}s")
        with ServerProcess(tmp_path, "128MiB", *options) as server, engine(server) as one:
            one.worker.save(KEYS)
            assert one.num_hit(KEYS) == 20
            wait_counter(server, "redis_saved_payloads", 20)

            {"SIGSTOP": redis_server.stop, "black hole": proxy.stop, "killed": redis_server.kill}[fault]()
            waits = []
            for number in range(400):
                # In memory, with a tail that nobody has: the first of these asks Redis.
                keys = KEYS + chain(f"unknown-{number}", 5)
                started = time.monotonic()
                reply = one.scheduler.lookup(keys, wait_ms=WAIT_MS, recompute_us_per_block=RECOMPUTE_US)
                waits.append(time.monotonic() - started)
                assert reply.hit_end == 20
            assert percentile(waits, 0.99) <= 0.020
            assert max(waits) <= 3 * WAIT_MS / 1000

            wait_until(lambda: counters(server)["redis_up"] == 0, "redis_up is 0", 2 + 6 * TIMEOUT_S)
            assert is_serving(server)
            assert one.worker.save(chain("meanwhile", 5)) == [1] * 5

            {"SIGSTOP": redis_server.resume, "black hole": proxy.resume, "killed": redis_server.start}[fault]()
            wait_until(lambda: counters(server)["redis_up"] == 1, "redis_up is 1", 12)
            wait_counter(server, "redis_saved_payloads", 25)
            lines = [line for line in server.log.splitlines() if "redis://" in line and "listen" not in line]
            assert sum("going on without it" in line for line in lines) == 1, server.log
            assert sum("back after" in line for line in lines) == 1, server.log


def test_one_request_pays_one_wait_for_a_black_hole(tmp_path: Path, redis_server: RedisServer) -> None:
    """C49, the half of Redis: lookup, load and 20 saves cost at most one wait, the next ones nothing."""
    with (
        Proxy(redis_server.address) as proxy,
        ServerProcess(tmp_path, "128MiB", "--redis", f"redis://127.0.0.1:{proxy.port}") as server,
        engine(server) as one,
    ):
        one.worker.save(KEYS)
        wait_counter(server, "redis_saved_payloads", 20)

        def request(name: str) -> None:
            keys = KEYS + chain(name, 20)
            reply = one.ask(keys)
            assert reply.hit_end == 20
            assert_right(one.worker, KEYS)
            slots = one.worker.reserve_all(20)
            assert one.worker.commit(slots, keys, 20) == [1] * 20

        request("warm")
        usual_s = min(timed(lambda number=number: request(f"usual-{number}")) for number in range(5))
        proxy.stop()
        first_s = timed(lambda: request("first"))
        later_s = min(timed(lambda number=number: request(f"later-{number}")) for number in range(5))

        assert first_s <= usual_s + 3 * WAIT_MS / 1000
        assert later_s <= usual_s + 0.02


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-lru"])
def test_redis_that_is_full(tmp_path: Path, policy: str) -> None:
    """C50: 64 MiB of Redis for 100 values of 8 MiB."""
    keys = chain("big", 100)
    settings = ("--maxmemory", "64mb", "--maxmemory-policy", policy)
    with (
        RedisServer(tmp_path / "redis", *settings) as redis_server,
        ServerProcess(tmp_path, "1088MiB", "--redis", redis_server.url) as server,
    ):
        assert ("noeviction" in server.log) == (policy == "noeviction")
        with engine(server, payload_bytes=8 << 20) as one:
            for start in range(0, 100, 10):
                assert set(one.worker.save(keys[: start + 10], start)) == {1}
            wait_until(
                lambda: (
                    counters(server)["redis_saved_payloads"] + counters(server)["redis_saves_refused"]
                    >= (100 if policy != "noeviction" else 8)
                ),
                f"all were tried: {counters(server)}",
                30,
            )
            figures = counters(server)
            assert figures["redis_up"] == 1
            assert figures["redis_downs"] == 0
            assert (figures["redis_saves_refused"] > 0) == (policy == "noeviction")
            assert one.num_hit(keys[:40]) == 40  # what may be leased of memory
            present = redis_server.payload_keys()
            assert 1 <= len(present) <= 8
            if policy != "noeviction":
                assert redis_key(keys[99]) in present  # room was made for the youngest
            with redis_server.client() as client:
                assert all(client.pttl(key) > 0 for key in present)


def test_the_queue_is_bounded_and_its_oldest_go_first(tmp_path: Path, redis_server: RedisServer) -> None:
    with Proxy(redis_server.address) as proxy:
        options = ("--redis", f"redis://127.0.0.1:{proxy.port}", "--redis-queue", "1MiB", "--redis-timeout", "200ms")
        with ServerProcess(tmp_path, "128MiB", *options) as server, engine(server) as one:
            proxy.refuse = True
            proxy.cut()
            wait_until(lambda: counters(server)["redis_up"] == 0, "redis_up is 0")
            one.worker.save(KEYS)
            figures = counters(server)
            assert figures["redis_queue_payloads"] == 16
            assert figures["redis_queue_bytes"] == 1 << 20
            assert figures["redis_queue_dropped"] == 4

            proxy.refuse = False
            wait_counter(server, "redis_saved_payloads", 16)
            assert set(redis_server.payload_keys()) == {redis_key(key) for key in KEYS[4:]}
