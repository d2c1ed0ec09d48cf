"""The tier alone, in this process, against real servers: what it reads, what it refuses to read, when it gives up."""

import asyncio
import hashlib
import resource
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

from cache_server.redis_lanes import ABSENT, CORRUPT, STORED, Save, TierDownError
from cache_server.redis_line import Line
from cache_server.redis_tier import RedisTier
from cache_server.redis_topology import TierRefusedError
from tests.cache_server.harness import NAMESPACE, Bench, chain, payload_of
from tests.fakes import FakeClock
from tests.proxy import Proxy
from tests.redis.harness import STORED_NAMESPACE, name_of, parsed, redis_key, tier
from tests.redis.servers import RedisServer, free_port

KEYS = chain("a", 8)
SIZE = 256 << 10
HEADER = 96


@pytest.fixture
def bench(clock: FakeClock) -> Bench:
    bench = Bench(clock, payload_bytes=SIZE, segment_bytes=8 * SIZE)
    assert set(bench.save(KEYS)) == {1}
    for key in KEYS:
        held = bench.cache.hold_named(name_of(key, SIZE)._replace(namespace=NAMESPACE))
        assert held is not None
        held.bytes[:] = np.frombuffer(payload_of(key, SIZE), np.uint8)
        bench.cache.drop_payload(held)
    return bench


async def save(redis: RedisTier, bench: Bench, key: bytes) -> str:
    name = name_of(key, SIZE)
    held = bench.cache.hold_named(name._replace(namespace=NAMESPACE))
    assert held is not None
    try:
        status, checksum = await redis.save(name, held)
    finally:
        bench.cache.drop_payload(held)
    assert checksum == xxhash.xxh3_64_intdigest(payload_of(key, SIZE))
    return status


async def load(redis: RedisTier, key: bytes) -> tuple[int | str, bytes]:
    target = np.zeros(SIZE, np.uint8)
    return await redis.load(name_of(key, SIZE), target), target.tobytes()


def value_of(key: bytes, num_bytes: int = SIZE, payload: bytes | None = None) -> bytes:
    """As docs/formats.md says, by hand."""
    payload = payload_of(key, num_bytes) if payload is None else payload
    checksum = xxhash.xxh3_64_intdigest(payload)
    stored = hashlib.sha256(STORED_NAMESPACE).digest()
    return struct.pack("<8sIIQQ32s32s", b"prefixdV", 1, 0, len(payload), checksum, stored, key) + payload


async def test_what_is_saved_is_the_document_and_is_loaded_into_place(redis_server: RedisServer, bench: Bench) -> None:
    async with tier(redis_server.url, ttl="100s") as redis:
        statuses = await asyncio.gather(*(save(redis, bench, key) for key in KEYS))
        loaded = await asyncio.gather(*(load(redis, key) for key in KEYS))

    assert statuses == [STORED] * 8
    for key, (checksum, data) in zip(KEYS, loaded, strict=True):
        assert data == payload_of(key, SIZE)
        assert checksum == xxhash.xxh3_64_intdigest(data)
    with redis_server.client() as client:
        assert client.get(redis_key(KEYS[0])) == value_of(KEYS[0])
        assert 90_000 < client.pttl(redis_key(KEYS[0])) <= 100_000


async def test_questions(redis_server: RedisServer, bench: Bench) -> None:
    names = [name_of(key, SIZE) for key in KEYS]
    with redis_server.client() as client:
        client.lpush(redis_key(KEYS[2]), b"x")
    async with tier(redis_server.url, ttl="100s") as redis:
        await save(redis, bench, KEYS[0])
        await save(redis, bench, KEYS[3])

        assert await redis.lengths(names[:4]) == [HEADER + SIZE, 0, -1, HEADER + SIZE]
        with redis_server.client() as client:
            client.pexpire(redis_key(KEYS[3]), 5000)
        assert await redis.refresh(names[:2] + names[3:4]) == [True, False, True]
        with redis_server.client() as client:
            assert client.pttl(redis_key(KEYS[3])) > 90_000
        await redis.delete(names)
    assert redis_server.payload_keys() == []


@pytest.mark.parametrize(
    "planted",
    [
        value_of(KEYS[0])[:-1],
        value_of(KEYS[0]) + b"x",
        value_of(KEYS[0])[:50] + b"\x00" + value_of(KEYS[0])[51:],
        value_of(KEYS[0])[:-1] + b"\xff",
        value_of(KEYS[1]),
        b"wrongmgc" + value_of(KEYS[0])[8:],
        value_of(KEYS[0])[:16] + struct.pack("<q", -1) + value_of(KEYS[0])[24:],
        b"",
        b"x",
        b"\x80\x05\x95" + bytes(SIZE + HEADER - 3),
        bytes(3 * SIZE),
    ],
    ids="cut longer header payload swapped magic negative empty tiny pickle huge".split(),
)
async def test_what_does_not_verify_is_a_miss_and_the_connection_goes_on(
    redis_server: RedisServer, bench: Bench, planted: bytes
) -> None:
    with redis_server.client() as client:
        client.set(redis_key(KEYS[0]), planted)
        client.set(redis_key(KEYS[1]), value_of(KEYS[1]))
    async with tier(redis_server.url, connections=1) as redis:
        results = await asyncio.gather(load(redis, KEYS[0]), load(redis, KEYS[1]), load(redis, KEYS[2]))

        assert redis.is_up
    assert [result for result, _ in results] == [CORRUPT, xxhash.xxh3_64_intdigest(results[1][1]), ABSENT]
    assert results[1][1] == payload_of(KEYS[1], SIZE)


async def test_a_huge_value_costs_no_memory(redis_server: RedisServer) -> None:
    """Above what is worth skipping the connection goes; what was asked behind it is asked again."""
    with redis_server.client() as client:
        client.setrange(redis_key(KEYS[0]), (200 << 20) - 1, b"x")
        client.set(redis_key(KEYS[1]), value_of(KEYS[1]))
    async with tier(redis_server.url, connections=1, timeout="5s") as redis:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results = await asyncio.gather(load(redis, KEYS[0]), load(redis, KEYS[1]))

        assert redis.is_up
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
    assert results[0][0] == CORRUPT
    assert results[1][1] == payload_of(KEYS[1], SIZE)


async def test_a_flush_while_it_waits_keeps_the_payload_here(redis_server: RedisServer, bench: Bench) -> None:
    async with tier(redis_server.url) as redis:
        name = name_of(KEYS[0], SIZE)
        held = bench.cache.hold_named(name._replace(namespace=NAMESPACE))
        assert held is not None
        bench.cache.flush(b"")
        status, _ = await redis.save(name, held)
        bench.cache.drop_payload(held)

    assert status == "changed"
    assert redis_server.payload_keys() == []


async def test_a_flush_between_length_and_value_leaves_a_value_that_does_not_verify(
    redis_server: RedisServer, bench: Bench
) -> None:
    """Redis was told how long the value is, so one has to come; nobody may take it for the block."""
    name = name_of(KEYS[0], SIZE)
    held = bench.cache.hold_named(name._replace(namespace=NAMESPACE))
    assert held is not None

    class Flushing(Line):
        def send(self, buffers: Sequence[bytes | memoryview]) -> None:
            super().send(buffers)
            bench.cache.flush(b"")

    line = Flushing(parsed(redis_server.url).addresses[0], parsed(redis_server.url))
    line.connect()
    operation = Save(redis_key(KEYS[0]), name, held, 100_000)
    assert operation.send(line)
    assert operation.read(line) == STORED
    line.drop()
    assert not held.is_intact  # whoever waits for the save deletes it
    bench.cache.drop_payload(held)

    async with tier(redis_server.url) as redis:
        assert await redis.lengths([name]) == [HEADER + SIZE]
        assert (await load(redis, KEYS[0]))[0] == CORRUPT


# --- how it connects ------------------------------------------------------------------------------------------


async def test_a_unix_socket_and_a_database(redis_server: RedisServer, bench: Bench) -> None:
    async with tier(f"unix://{redis_server.socket_path}?db=3") as redis:
        await save(redis, bench, KEYS[0])
        assert (await load(redis, KEYS[0]))[1] == payload_of(KEYS[0], SIZE)

    assert redis_server.payload_keys() == []
    with redis_server.client() as client:
        client.select(3)
        assert client.exists(redis_key(KEYS[0]))


async def test_a_user_with_only_what_is_documented(redis_server: RedisServer, bench: Bench) -> None:
    with redis_server.client() as client:
        client.execute_command(
            *"ACL SETUSER cache on >secret ~prefixd:* resetchannels -@all".split(),
            *"+auth +select +info +ping +strlen +get +set +pexpire +del".split(),
        )
    async with tier(f"redis://cache:secret@127.0.0.1:{redis_server.port}") as redis:
        await redis.probe()
        assert await save(redis, bench, KEYS[0]) == STORED
        assert (await load(redis, KEYS[0]))[1] == payload_of(KEYS[0], SIZE)
        assert await redis.refresh([name_of(KEYS[0], SIZE)]) == [True]
        await redis.delete([name_of(KEYS[0], SIZE)])

    assert redis_server.payload_keys() == []


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself."""
    subprocess.run(
        [
            *"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost".split(),
            *("-keyout", "key.pem", "-out", "cert.pem", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    return tmp_path


@pytest.fixture
def tls_server(certificates: Path) -> Iterator[RedisServer]:
    files = {"cert": certificates / "cert.pem", "key": certificates / "key.pem"}
    client = {
        "ssl": True,
        "ssl_ca_certs": str(files["cert"]),
        "ssl_certfile": str(files["cert"]),
        "ssl_keyfile": str(files["key"]),
    }
    server = RedisServer(certificates / "tls", client=client)
    server.settings = [
        *("--port", "0", "--tls-port", str(server.port), "--tls-ca-cert-file", str(files["cert"])),
        *("--tls-cert-file", str(files["cert"]), "--tls-key-file", str(files["key"])),
    ]
    try:
        server.start()
    except AssertionError:
        if "TLS" in (server.folder / "log").read_text() or "tls" in (server.folder / "log").read_text():
            pytest.skip("this redis-server was built without TLS")
        raise
    yield server
    server.kill()


async def test_tls(tls_server: RedisServer, certificates: Path, bench: Bench) -> None:
    cert, key = str(certificates / "cert.pem"), str(certificates / "key.pem")
    url = f"rediss://127.0.0.1:{tls_server.port}"
    async with tier(url, ca_file=cert, cert_file=cert, key_file=key) as redis:
        await asyncio.gather(*(save(redis, bench, key) for key in KEYS))
        await asyncio.sleep(0.05)  # an idle line: news of TLS itself must not look like its end
        loaded = await asyncio.gather(*(load(redis, key) for key in KEYS))

        assert [data for _, data in loaded] == [payload_of(key, SIZE) for key in KEYS]
        assert redis.is_up


async def test_a_certificate_that_is_not_trusted_is_refused(tls_server: RedisServer) -> None:
    with pytest.raises(TierRefusedError, match="certificate"):
        async with tier(f"rediss://127.0.0.1:{tls_server.port}"):
            pass


async def test_sentinel_names_the_master(redis_server: RedisServer, tmp_path: Path, bench: Bench) -> None:
    port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor main 127.0.0.1 {redis_server.port} 1\n"
    )
    sentinel = RedisServer(tmp_path / "sentinel")
    sentinel.port = port
    sentinel.command = lambda: ["redis-server", str(config), "--sentinel"]  # type: ignore[method-assign]
    with sentinel:
        async with tier(f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/main") as redis:
            assert await save(redis, bench, KEYS[0]) == STORED
        with pytest.raises(TierRefusedError, match="knows no master 'other'"):
            async with tier(f"redis+sentinel://127.0.0.1:{port}/other"):
                pass

    assert redis_server.payload_keys() == [redis_key(KEYS[0])]


# --- when it does not answer ----------------------------------------------------------------------------------


async def test_a_silent_redis_fails_within_the_timeout_and_then_at_once(
    redis_server: RedisServer, bench: Bench
) -> None:
    async with tier(redis_server.url, timeout="300ms") as redis:
        await save(redis, bench, KEYS[0])
        redis_server.stop()
        started = time.monotonic()
        results = await asyncio.gather(
            load(redis, KEYS[0]),
            save(redis, bench, KEYS[1]),
            redis.lengths([name_of(KEYS[0], SIZE)]),
            return_exceptions=True,
        )
        first_s = time.monotonic() - started
        assert all(isinstance(result, TierDownError) for result in results), results
        assert 0.25 < first_s < 0.9
        assert not redis.is_up

        started = time.monotonic()
        with pytest.raises(TierDownError):
            await load(redis, KEYS[0])
        assert time.monotonic() - started < 0.05
        redis_server.resume()


async def test_a_silent_redis_is_noticed_before_the_timeout(redis_server: RedisServer) -> None:
    async with tier(redis_server.url, timeout="1s") as redis:
        assert await redis.lengths([name_of(KEYS[0])]) == [0]
        assert redis.is_prompt
        redis_server.stop()
        question = asyncio.create_task(redis.lengths([name_of(KEYS[0])]))
        await asyncio.sleep(0.2)

        assert redis.is_up
        assert not redis.is_prompt
        redis_server.resume()
        assert await question == [0]
        assert redis.is_prompt


async def test_it_is_back_by_itself_one_line_per_change(
    redis_server: RedisServer, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with tier(redis_server.url, timeout="200ms") as redis:
        watch = asyncio.create_task(redis.watch())
        await save(redis, bench, KEYS[0])
        redis_server.kill()
        for _ in range(3):
            with pytest.raises(TierDownError):
                await load(redis, KEYS[0])
        redis_server.start()
        async with asyncio.timeout(10):
            await redis.wait_up()
        assert await save(redis, bench, KEYS[0]) == STORED
        watch.cancel()

    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3, lines
    assert "redis 7" in lines[0] or "valkey" in lines[0]
    assert "going on without it" in lines[1]
    assert "back after" in lines[2]


async def test_a_restart_between_two_calls_is_not_noticed(redis_server: RedisServer, bench: Bench) -> None:
    async with tier(redis_server.url) as redis:
        await asyncio.gather(*(save(redis, bench, key) for key in KEYS))
        await asyncio.sleep(0.2)  # every line that was wanted is connected
        redis_server.kill()
        redis_server.start()

        assert await redis.lengths([name_of(KEYS[0])]) == [0]
        assert await save(redis, bench, KEYS[0]) == STORED
        assert redis.num_downs == 0


@pytest.mark.parametrize("fault", ["cut", "half_close"])
async def test_a_reply_that_breaks_off_is_never_read_by_the_next(
    redis_server: RedisServer, bench: Bench, fault: str
) -> None:
    """In the middle of a payload the line breaks; afterwards every payload is right."""
    with Proxy(redis_server.address) as proxy:
        async with tier(f"redis://127.0.0.1:{proxy.port}", connections=1, timeout="300ms") as redis:
            await asyncio.gather(*(save(redis, bench, key) for key in KEYS))
            watch = asyncio.create_task(redis.watch())
            for _ in range(3):
                proxy.bytes_per_s = 4e6
                loads = [asyncio.create_task(load(redis, key)) for key in KEYS]
                await asyncio.sleep(0.1)
                getattr(proxy, fault)()
                results = await asyncio.gather(*loads, return_exceptions=True)
                assert any(isinstance(result, TierDownError) for result in results)

                proxy.bytes_per_s = 0
                async with asyncio.timeout(10):
                    await redis.wait_up()
                for key, (_, data) in zip(KEYS, [await load(redis, key) for key in KEYS], strict=True):
                    assert data == payload_of(key, SIZE)
            watch.cancel()


async def test_an_answer_that_trickles_is_late(bench: Bench) -> None:
    """A server that sends a byte now and then, for ever."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=trickle, args=(connection,), daemon=True).start()
        except OSError:
            return

    def trickle(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(1 << 16)
                connection.sendall(b"+")
                for _ in range(200):
                    time.sleep(0.05)
                    connection.sendall(b"x")
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    started = time.monotonic()
    async with tier(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout="200ms") as redis:
        assert not redis.is_up
    listener.close()

    assert time.monotonic() - started < 2


async def test_nobody_there_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with tier(f"redis://:secret@127.0.0.1:{free_port()}") as redis:
        assert not redis.is_up
        with pytest.raises(TierDownError):
            await redis.lengths([name_of(KEYS[0])])

    assert "starting without it" in caplog.text
    assert "secret" not in caplog.text


async def test_the_probe_measures(redis_server: RedisServer) -> None:
    with Proxy(redis_server.address) as proxy:
        proxy.bytes_per_s = 20e6
        async with tier(f"redis://127.0.0.1:{proxy.port}") as redis:
            assert redis.estimate.bytes_per_s == 0
            await redis.probe()

            assert 20e6 / 4 < redis.estimate.bytes_per_s < 30e6


async def test_nothing_of_the_password_is_in_the_objects(redis_server: RedisServer) -> None:
    config = parsed("redis://u:secret@h")

    assert "secret" not in repr(config)
