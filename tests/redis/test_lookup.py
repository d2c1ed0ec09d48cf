"""Lookups that go on in Redis, through a real server: what is promised, what is not, and that it is always right."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cache_server.config import BASE_BYTES
from tests.cache_server.harness import NAMESPACE, Client, ServerProcess, chain, payload_of, wait_until
from tests.proxy import Proxy
from tests.redis.harness import (
    PAYLOAD,
    RECOMPUTE_US,
    assert_right,
    counters,
    engine,
    redis_key,
    wait_counter,
)
from tests.redis.servers import RedisServer
from tests.redis.test_tier import value_of

KEYS = chain("a", 40)
BLOCK = 393_216  # of the demo model: 32 tokens of 12,288 bytes


def plant(redis_server: RedisServer, keys: list[bytes], num_bytes: int = PAYLOAD) -> None:
    with redis_server.client() as client, client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.set(redis_key(key), value_of(key, num_bytes))
        pipeline.execute()


def test_what_one_daemon_saved_another_one_serves(tmp_path: Path, redis_server: RedisServer) -> None:
    """Two nodes, one Redis."""
    with (
        ServerProcess(tmp_path / "a", "128MiB", "--redis", redis_server.url) as first,
        ServerProcess(tmp_path / "b", "128MiB", "--redis", redis_server.url) as second,
        engine(first) as one,
        engine(second) as other,
    ):
        assert other.num_hit(KEYS) == 0
        assert set(one.worker.save(KEYS)) == {1}
        wait_counter(first, "redis_saved_payloads", 40)
        time.sleep(1.1)  # that nothing was there is remembered for a second

        assert other.num_hit(KEYS) == 40
        figures = counters(second)
        assert figures["promoted_payloads"] == 40
        assert figures["gate_open"] == 1
        assert figures["gate_load_us"] < figures["gate_recompute_us"] == pytest.approx(40 * RECOMPUTE_US, rel=0.01)

        # What is saved again is not sent again.
        assert set(other.worker.save(chain("b", 40))) == {1}
        wait_counter(second, "redis_saved_payloads", 40)
        one.worker.save(chain("b", 40))
        wait_counter(first, "redis_already_present", 40)
        assert counters(first)["redis_saved_payloads"] == 40


def test_a_prefix_in_memory_and_a_tail_in_redis_are_one_hit(tmp_path: Path, redis_server: RedisServer) -> None:
    plant(redis_server, KEYS)
    with ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server, engine(server) as one:
        one.worker.save(KEYS[:10])

        assert one.num_hit(KEYS) == 40
        assert counters(server)["promoted_payloads"] == 30


def test_it_ends_at_the_first_absence(tmp_path: Path, redis_server: RedisServer) -> None:
    plant(redis_server, KEYS[:7] + KEYS[8:])
    with ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server, engine(server) as one:
        assert one.num_hit(KEYS) == 7
        assert counters(server)["promoted_payloads"] == 7


def test_every_shard_has_to_be_there(tmp_path: Path, redis_server: RedisServer) -> None:
    with ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server:
        shards = [Client(server.unix, shard, num_shards=2, descriptors=server.socket_path) for shard in range(2)]
        with shards[0], shards[1], Client(server.unix, num_shards=2) as scheduler:
            for shard in shards:
                wait_until(shard.is_mapped, "mapped")
                shard.save(KEYS)
            wait_counter(server, "redis_saved_payloads", 80)
    with redis_server.client() as client:
        client.delete(redis_key(KEYS[5], 1))
    with ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server:
        shards = [Client(server.unix, shard, num_shards=2, descriptors=server.socket_path) for shard in range(2)]
        with shards[0], shards[1], Client(server.unix, num_shards=2) as scheduler:
            for shard in shards:
                wait_until(shard.is_mapped, "mapped")
            reply = until_settled(scheduler, KEYS)
            assert reply.hit_end == 5
            for shard in shards:
                assert_right(shard, KEYS[:5])


def until_settled(scheduler: Client, keys: list[bytes]) -> Any:
    while True:
        reply = scheduler.lookup(keys, wait_ms=20, recompute_us_per_block=RECOMPUTE_US)
        if not reply.retry:
            return reply
        time.sleep(reply.retry_ms / 1000)


def test_nothing_is_promoted_for_an_engine_without_workers_or_for_questions_of_presence(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    plant(redis_server, KEYS)
    with ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server:
        with Client(server.unix) as scheduler:
            reply = scheduler.lookup(KEYS, wait_ms=20, recompute_us_per_block=RECOMPUTE_US)
            assert (reply.missing_workers, reply.retry, reply.hit_end) == (1, False, 0)
        with engine(server) as one:
            reply = one.scheduler.lookup(KEYS, lease=False, wait_ms=20, recompute_us_per_block=RECOMPUTE_US)
            assert (reply.retry, reply.present) == (False, bytes(5))
            assert counters(server)["redis_asked_blocks"] == 0
            assert one.num_hit(KEYS) == 40  # the positive control


def test_without_a_budget_the_reply_comes_at_once_and_says_retry(tmp_path: Path, redis_server: RedisServer) -> None:
    plant(redis_server, KEYS)
    with ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server, engine(server) as one:
        reply = one.scheduler.lookup(KEYS, wait_ms=0, recompute_us_per_block=RECOMPUTE_US)
        assert (reply.hit_end, reply.retry) == (0, True)
        assert reply.retry_ms >= 1

        wait_counter(server, "promoted_payloads", 40)
        reply = one.scheduler.lookup(KEYS, wait_ms=0, recompute_us_per_block=RECOMPUTE_US)
        assert (reply.hit_end, reply.retry, reply.retry_ms) == (40, False, 0)


def test_a_miss_is_not_asked_for_again_and_again(tmp_path: Path, redis_server: RedisServer) -> None:
    with ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server, engine(server) as one:
        assert one.scheduler.lookup(KEYS, wait_ms=0).retry
        wait_until(lambda: not one.scheduler.lookup(KEYS, wait_ms=0).retry, "the answer")
        asked = counters(server)["redis_asked_blocks"]
        for _ in range(5):
            assert not one.scheduler.lookup(KEYS, wait_ms=0).retry
        assert counters(server)["redis_asked_blocks"] == asked


def test_a_herd_loads_once(tmp_path: Path, redis_server: RedisServer) -> None:
    """C53: sixteen lookups of one prefix, each with a tail of its own."""
    plant(redis_server, KEYS)
    with ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server, engine(server) as one:
        hits: list[int] = []

        def ask(number: int) -> None:
            with Client(server.unix) as scheduler:
                hits.append(until_settled(scheduler, KEYS + chain(f"tail-{number}", 5)).hit_end)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert hits == [40] * 16
        assert counters(server)["promoted_payloads"] == 40
        assert_right(one.worker, KEYS)


def test_budget_and_room_hold_when_redis_has_more_than_memory(tmp_path: Path, redis_server: RedisServer) -> None:
    """Half of the budget may be promised; what comes beyond it would push out what came before."""
    keys = chain("long", 200)
    plant(redis_server, keys, 1 << 20)
    with (
        ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server,
        engine(server, payload_bytes=1 << 20) as one,
    ):
        hit = one.num_hit(keys)

        assert 48 <= hit <= 64
        assert server.stats().touched_bytes <= 128 << 20
        assert server.stats().reserved_bytes == 0


def test_a_flush_ends_what_is_on_its_way(tmp_path: Path, redis_server: RedisServer) -> None:
    plant(redis_server, KEYS, BLOCK)
    with (
        Proxy(redis_server.address) as proxy,
        ServerProcess(tmp_path, "128MiB", "--redis", f"redis://127.0.0.1:{proxy.port}") as server,
        engine(server, payload_bytes=BLOCK) as one,
    ):
        proxy.bytes_per_s = 20e6
        assert one.scheduler.lookup(KEYS, wait_ms=0, recompute_us_per_block=RECOMPUTE_US).retry
        wait_counter(server, "promoted_payloads", 2)
        from protos import kv_cache_pb2 as pb

        one.scheduler.stub.Flush(pb.FlushRequest(fingerprint=NAMESPACE))
        proxy.bytes_per_s = 0
        wait_until(lambda: counters(server)["redis_loading_bytes"] == 0, "the walk ends")

        assert server.stats().reserved_bytes == 0
        assert server.stats().stored_bytes == 0


def planted(kind: str, keys: list[bytes]) -> bytes:
    """A value for keys[1] that must not be believed."""
    good = value_of(keys[1], PAYLOAD)
    return {
        "flip": good[:5000] + bytes([good[5000] ^ 1]) + good[5001:],
        "cut": good[:-1],
        "swap": value_of(keys[2], PAYLOAD),
        "magic": b"PREFIXDV" + good[8:],
        "pickle": b"\x80\x05cos\nsystem\n(S'touch /tmp/pwned'\ntR." + bytes(PAYLOAD),
        "huge": b"x" * (80 << 20),
        "namespace": good[:32] + bytes(32) + good[64:],
    }[kind]


def test_what_does_not_verify_is_a_miss_is_counted_and_goes(tmp_path: Path, redis_server: RedisServer) -> None:
    """C37 and planted values: the first block is right, the second one is not. C36: the next save restores it."""
    kinds = ["flip", "cut", "swap", "magic", "pickle", "huge", "namespace"]
    with ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url) as server, engine(server) as one:
        for number, kind in enumerate(kinds, 1):
            keys = chain(kind, 3)
            plant(redis_server, keys)
            with redis_server.client() as client:
                client.set(redis_key(keys[1]), planted(kind, keys))

            assert one.num_hit(keys) == 1, kind
            assert counters(server)["integrity_failures"] == number, kind
            gone = redis_server.payload_keys
            wait_until(lambda: redis_key(keys[1]) not in gone(), f"{kind} is removed")  # noqa: B023
            assert set(one.worker.save(keys[:2], 1)) == {1}
            wait_until(lambda: redis_key(keys[1]) in gone(), f"{kind} is saved again")  # noqa: B023
            with redis_server.client() as client:
                assert client.get(redis_key(keys[1])) == value_of(keys[1], PAYLOAD), kind
        figures = counters(server)
        assert (figures["redis_up"], figures["redis_downs"]) == (1, 0)
        assert server.memory_bytes() < (128 << 20) + BASE_BYTES  # the 80 MB are read into nowhere


def test_hits_keep_blocks_alive_in_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    """With a TTL of 1 s a block that is used in memory is still in Redis after 2 s, an unused one is not."""
    used, unused = chain("used", 5), chain("unused", 5)
    with (
        ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url, "--redis-ttl", "1s") as server,
        engine(server) as one,
    ):
        one.worker.save(used)
        one.worker.save(unused)
        wait_counter(server, "redis_saved_payloads", 10)
        for _ in range(20):
            time.sleep(0.1)
            assert one.num_hit(used) == 5

        assert set(redis_server.payload_keys()) == {redis_key(key) for key in used}
        assert counters(server)["redis_saved_payloads"] == 10


def test_a_hit_brings_back_to_redis_what_redis_gave_up(tmp_path: Path, redis_server: RedisServer) -> None:
    with (
        ServerProcess(tmp_path, "128MiB", "--redis", redis_server.url, "--redis-ttl", "2s") as server,
        engine(server) as one,
    ):
        one.worker.save(KEYS[:5])
        wait_counter(server, "redis_saved_payloads", 5)
        with redis_server.client() as client:
            client.flushall()
        time.sleep(0.6)
        one.num_hit(KEYS[:5])
        wait_until(lambda: len(redis_server.payload_keys()) == 5, "they are back")


# --- the gate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bytes_per_s", "is_open"), [(2e6, False), (20e6, True), (0, True)])
def test_the_gate(tmp_path: Path, redis_server: RedisServer, bytes_per_s: float, is_open: bool) -> None:
    """20 blocks of the demo model, twice. What is promised came faster than it would have been computed.

    Where it is to be open, computing costs three times what it does (3 to 5 ms per token): a busy machine's slack."""
    slack = 3 if is_open else 1
    with Proxy(redis_server.address) as proxy:
        proxy.bytes_per_s = bytes_per_s
        with (
            ServerProcess(tmp_path, "128MiB", "--redis", f"redis://127.0.0.1:{proxy.port}") as server,
            engine(server, payload_bytes=BLOCK) as one,
        ):
            for number, recompute_us in enumerate((slack * 3_000.0 * 32, slack * 5_000.0 * 32), 1):
                keys = chain(f"gate-{number}", 20)
                plant(redis_server, keys, BLOCK)
                started = time.monotonic()
                hit = int(one.ask(keys, recompute_us=recompute_us).hit_end)
                elapsed_s = time.monotonic() - started

                figures = counters(server)
                if is_open:
                    assert hit == 20
                    assert (figures["gate_open"], figures["gate_shut"]) == (number, 0)
                    assert elapsed_s < 20 * recompute_us / 1e6
                    assert_right(one.worker, keys)
                else:
                    assert hit == 0
                    assert (figures["gate_open"], figures["gate_shut"]) == (0, number)
                    assert figures["promoted_bytes"] == 0
                    assert figures["gate_load_us"] > 0.8 * figures["gate_recompute_us"]
                    assert elapsed_s < 0.1


def test_a_tier_that_becomes_slow_is_given_up_on_the_way(tmp_path: Path, redis_server: RedisServer) -> None:
    """Promised at full speed, throttled to 1 MB/s before it came: recomputing is faster, so the walk ends."""
    plant(redis_server, KEYS, BLOCK)
    window = 4
    with (
        Proxy(redis_server.address) as proxy,
        ServerProcess(
            tmp_path, "128MiB", "--redis", f"redis://127.0.0.1:{proxy.port}", "--redis-connections", "1"
        ) as server,
        engine(server, payload_bytes=BLOCK) as one,
    ):
        proxy.bytes_per_s = 1e6
        started = time.monotonic()
        hit = one.num_hit(KEYS, recompute_us=RECOMPUTE_US)

        assert hit < 40
        assert time.monotonic() - started < 2 * window * BLOCK / 1e6 + 2
        assert counters(server)["gate_cut"] == 1


def test_an_engine_whose_stream_is_slow_is_not_promised_memory_hits(tmp_path: Path) -> None:
    """The same rule without any Redis: a remote engine at 4 MB/s, blocks that take 98 ms, and 60 ms to compute."""
    keys = KEYS[:24]
    recompute_us = 60_000.0
    with ServerProcess(tmp_path, "128MiB") as server:
        host, port = server.tcp.split(":")
        with Proxy((host, int(port))) as proxy:
            server.tcp = f"127.0.0.1:{proxy.port}"
            with engine(server, payload_bytes=BLOCK, is_mapped=False) as one:
                one.worker.put(keys)
                assert one.scheduler.lookup(keys, recompute_us_per_block=recompute_us).hit_end == 24
                proxy.bytes_per_s = 4e6
                assert one.worker.get(keys) == [payload_of(key, BLOCK) for key in keys]

                assert one.scheduler.lookup(keys, recompute_us_per_block=recompute_us).hit_end == 0
                assert counters(server)["gate_stream_shut"] == 1
                # Expensive blocks are still worth it.
                assert one.scheduler.lookup(keys, recompute_us_per_block=1e6).hit_end == 24
