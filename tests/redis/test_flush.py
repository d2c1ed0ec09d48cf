"""A flush is for everybody: in this daemon, in Redis, and in the memory of the other daemons on it."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos import kv_cache_pb2 as pb
from tests.cache_server.harness import NAMESPACE, Client, ServerProcess, chain, wait_until
from tests.redis.harness import PAYLOAD, Engine, counters, engine, redis_key, wait_counter
from tests.redis.servers import RedisServer

KEYS, OTHER_KEYS = chain("a", 6), chain("b", 4)
OTHER = hashlib.sha256(b"another namespace").digest()
MARKER = f"prefixd:generation:{NAMESPACE.hex()}".encode()
STORED, REFUSED = pb.COMMIT_STATUS_STORED, pb.COMMIT_STATUS_REFUSED


@contextlib.contextmanager
def daemon(folder: Path, redis: RedisServer) -> Iterator[ServerProcess]:
    with ServerProcess(folder, "192MiB", "--redis", redis.url) as server:
        yield server


def payloads(redis: RedisServer) -> list[bytes]:
    return [key for key in redis.payload_keys() if b":generation:" not in key]


@pytest.fixture
def two(tmp_path: Path, redis_server: RedisServer) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two nodes on one Redis."""
    with daemon(tmp_path / "1", redis_server) as first, daemon(tmp_path / "2", redis_server) as second:
        yield first, second


def save_and_wait(one: Engine, keys: list[bytes], redis: RedisServer, present: int) -> None:
    one.worker.save(keys)
    wait_until(lambda: len(payloads(redis)) == present, f"{present} values in Redis: {len(payloads(redis))}")


def test_a_flush_reaches_memory_redis_and_the_other_daemon(
    two: tuple[ServerProcess, ServerProcess], redis_server: RedisServer
) -> None:
    """What the other had in memory goes too, within seconds, and never comes back: neither by its write-behind nor from
    Redis. Other namespaces stay. New blocks are saved and hit as ever, on both."""
    with engine(two[0]) as one, engine(two[1]) as other, Client(two[0].unix, 0, fingerprint=OTHER) as bystander:
        save_and_wait(one, KEYS, redis_server, 6)
        bystander.put(OTHER_KEYS)
        wait_until(lambda: len(payloads(redis_server)) == 10, "the bystander's values are there")
        assert other.num_hit(KEYS) == 6  # promoted: in the other's memory now
        reserved_before = other.worker.reserve_all(1)

        reply = one.worker.flush(NAMESPACE)

        assert (reply.num_blocks, reply.lower_tier_pending) == (6, False)
        assert one.num_hit(KEYS) == 0
        wait_counter(two[1], "flushes_followed", 1)
        assert other.num_hit(KEYS) == 0
        assert other.worker.commit(reserved_before, KEYS[:1]) == [REFUSED]  # begun before
        wait_until(lambda: len(payloads(redis_server)) == 4, "the old values are deleted")
        assert None not in bystander.get(OTHER_KEYS)

        other.worker.save(KEYS)
        wait_until(lambda: len(payloads(redis_server)) == 10, "new values")
        wait_until(lambda: one.num_hit(KEYS) == 6, "an absence is remembered for a second")
        assert "Traceback" not in two[0].log + two[1].log


def test_what_the_other_daemon_still_wrote_is_never_read(
    two: tuple[ServerProcess, ServerProcess], redis_server: RedisServer
) -> None:
    """Between a flush and the moment in which the other hears of it, it writes under the old name."""
    with engine(two[0]) as one, engine(two[1]) as other:
        save_and_wait(one, KEYS, redis_server, 6)
        late = chain("late", 5)
        one.worker.flush(NAMESPACE)
        other.worker.save(late)  # it has not looked yet, or it has: then this is new
        wait_counter(two[1], "flushes_followed", 1)
        is_new = other.scheduler.lookup(late, lease=False).hit_end == 5

        assert one.num_hit(KEYS) == 0
        if not is_new:
            assert one.num_hit(late) == 0


def test_a_restarted_daemon_does_not_find_what_was_flushed(tmp_path: Path, redis_server: RedisServer) -> None:
    """The generation is in Redis, not in a daemon; also when the old values could not be deleted in time."""
    with daemon(tmp_path / "1", redis_server) as server, engine(server) as one:
        save_and_wait(one, KEYS, redis_server, 6)
        with redis_server.client() as client:
            kept = {key: client.get(key) for key in payloads(redis_server)}
        one.worker.flush(NAMESPACE)
        wait_until(lambda: not payloads(redis_server), "the old values are deleted")
        with redis_server.client() as client:
            for key, value in kept.items():  # as if they had not been
                client.set(key, value)
    with daemon(tmp_path / "1", redis_server) as server, engine(server) as one:
        assert one.num_hit(KEYS) == 0
        save_and_wait(one, KEYS, redis_server, 12)
        with redis_server.client() as client:
            assert client.exists(redis_key(KEYS[0]))
    with daemon(tmp_path / "1", redis_server) as server, engine(server) as one:
        assert one.num_hit(KEYS) == 6  # positive control: a restart loses nothing else


def test_a_namespace_that_is_in_redis_only_is_flushed_by_its_fingerprint(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """Nobody is attached, nothing is in memory."""
    with daemon(tmp_path / "1", redis_server) as server, engine(server) as one:
        save_and_wait(one, KEYS, redis_server, 6)
    with daemon(tmp_path / "1", redis_server) as server, Client(server.unix, fingerprint=OTHER) as asker:
        assert asker.flush(NAMESPACE).num_blocks == 0
        wait_until(lambda: not payloads(redis_server), "the values are deleted")
        with engine(server) as one:
            assert one.num_hit(KEYS) == 0


def test_everything_at_once(two: tuple[ServerProcess, ServerProcess], redis_server: RedisServer) -> None:
    """Without a fingerprint all namespaces go, on all daemons."""
    with engine(two[0]) as one, engine(two[1]) as other, Client(two[1].unix, 0, fingerprint=OTHER) as bystander:
        save_and_wait(one, KEYS, redis_server, 6)
        bystander.put(OTHER_KEYS)
        assert other.num_hit(KEYS) == 6
        one.worker.flush()
        wait_counter(two[1], "flushes_followed", 1)

        assert (one.num_hit(KEYS), other.num_hit(KEYS)) == (0, 0)
        assert bystander.get(OTHER_KEYS) == [None] * 4
        wait_until(lambda: not payloads(redis_server), "the values are deleted")
        save_and_wait(one, KEYS, redis_server, 6)
        wait_until(lambda: other.num_hit(KEYS) == 6, "an absence is remembered for a second")


def test_a_flush_while_redis_is_down_is_made_up_for(tmp_path: Path, redis_server: RedisServer) -> None:
    """The reply says so; nothing old is read when Redis is back, and the others hear of it then."""
    with (
        daemon(tmp_path / "1", redis_server) as first,
        daemon(tmp_path / "2", redis_server) as second,
        engine(first) as one,
        engine(second) as other,
    ):
        save_and_wait(one, KEYS, redis_server, 6)
        assert other.num_hit(KEYS) == 6
        redis_server.stop()
        wait_until(lambda: counters(first)["redis_up"] == 0, "its absence is noticed")
        assert one.worker.flush(NAMESPACE).lower_tier_pending
        assert one.num_hit(KEYS) == 0
        redis_server.resume()
        wait_until(lambda: counters(first)["redis_up"] == 1, "it is back", 30)
        wait_counter(second, "flushes_followed", 1, 30)

        assert (one.num_hit(KEYS), other.num_hit(KEYS)) == (0, 0)
        wait_until(lambda: not payloads(redis_server), "the old values are deleted", 30)


def test_a_marker_that_redis_lost_is_set_again(tmp_path: Path, redis_server: RedisServer) -> None:
    """Redis may evict anything: then those who know the generation remember it for all."""
    with daemon(tmp_path / "1", redis_server) as server, engine(server) as one:
        save_and_wait(one, KEYS, redis_server, 6)
        one.worker.flush(NAMESPACE)
        with redis_server.client() as client:
            marker = client.get(MARKER)
            assert len(marker) == 8
            assert client.ttl(MARKER) == -1
            client.delete(MARKER)
            wait_until(lambda: client.get(MARKER) == marker, "it is set again")
        assert one.num_hit(KEYS) == 0


def test_two_layouts_of_one_namespace_do_not_meet_in_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    """On one node the second rank is refused; on two nodes nobody would notice, but for the names (C23)."""
    with daemon(tmp_path / "1", redis_server) as first, daemon(tmp_path / "2", redis_server) as second:
        with engine(first) as one:
            save_and_wait(one, KEYS, redis_server, 6)
        with (
            Client(second.unix, 0, descriptor=b"another layout", payload_bytes=PAYLOAD) as worker,
            Client(second.unix) as scheduler,
        ):
            assert Engine(worker, scheduler).num_hit(KEYS) == 0
            worker.put(KEYS)
            wait_until(lambda: len(payloads(redis_server)) == 12, "both are there, side by side")
        assert counters(second)["integrity_failures"] == 0
        with daemon(tmp_path / "3", redis_server) as third, engine(third) as one:
            assert one.num_hit(KEYS) == 6  # positive control


def test_a_user_who_may_not_list_keys_flushes_all_the_same(tmp_path: Path, redis_server: RedisServer) -> None:
    """Without SCAN the old values stay until their TTL, unread; one line says so."""
    with redis_server.client() as client:
        client.execute_command(
            *"ACL SETUSER cache on >secret ~prefixd:* resetchannels -@all".split(),
            *"+auth +select +info +ping +strlen +get +set +pexpire +del".split(),
        )
    url = f"redis://cache:secret@127.0.0.1:{redis_server.port}"
    with ServerProcess(tmp_path, "64MiB", "--redis", url) as server, engine(server) as one:
        save_and_wait(one, KEYS, redis_server, 6)
        one.worker.flush(NAMESPACE)

        assert one.num_hit(KEYS) == 0
        assert len(payloads(redis_server)) == 6
        wait_until(lambda: "keys cannot be listed" in server.log, "it is told")
