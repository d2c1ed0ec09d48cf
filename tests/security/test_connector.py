"""The connector's line to a closed server: its settings become TLS and a token, and follow their files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector.client import STORED, CacheClient, Hello
from connector.config import ConfigError, ConnectorConfig
from tests.cache_server.harness import ServerProcess, chain, parents_of, payload_of, wait_until
from tests.fakes import recorded_log
from tests.security.certificates import Authority
from tests.security.harness import Tenants, named

SIZE = 64 << 10
KEYS = chain("a", 3, 32)


@contextmanager
def line(
    config: ConnectorConfig, shard: int | None = 0, name: str = "llama", attach: bool = True
) -> Iterator[CacheClient]:
    """As the plugin makes it."""
    namespace = named(name)
    hello = Hello(
        engine_id="engine",
        client_name="test",
        fingerprint=namespace["fingerprint"],
        namespace_text=namespace["text"],
        key_bytes=32,
        num_shards=1,
        shard=shard,
        payload_bytes=SIZE if shard is not None else 0,
        descriptor=b"layout" if shard is not None else b"",
    )
    client = CacheClient(
        config.server, hello, call_timeout_s=2, transfer_timeout_s=10, open_channel=config.open_channel
    )
    client.start()
    try:
        assert client.wait_attached(10 if attach else 1.5) is attach
        yield client
    finally:
        client.close()


def put(client: CacheClient) -> bytes | None:
    session = client.session()
    assert session is not None
    payloads = [memoryview(payload_of(key, SIZE)) for key in KEYS]
    return client.put(
        session, payloads, b"".join(KEYS), b"".join(parents_of(KEYS)), np.arange(3, dtype="<u4"), np.zeros(3, "<u8")
    )


def get(client: CacheClient) -> list[bytes | None]:
    session = client.session()
    assert session is not None
    payloads = [memoryview(bytearray(SIZE)) for _ in KEYS]
    came = client.get(session, b"".join(KEYS), 0, payloads)
    return [None if checksum is None else bytes(payload) for payload, checksum in zip(payloads, came, strict=True)]


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    tenants = Tenants(tmp_path)
    tenants.add("team-a")
    tenants.add("team-a", name="reader", write=[])
    tenants.add("team-a", name="writer", read=[])
    tenants.add("team-b")
    tenants.write()
    return tenants


def token_file(folder: Path, token: str) -> str:
    path = folder / "token"
    path.write_text(token + "\n")
    return str(path)


def parsed(**settings: Any) -> ConnectorConfig:
    return ConnectorConfig.parse({"hash": "sha256", **settings})


def test_blocks_go_both_ways_over_mutual_tls_with_a_token(tmp_path: Path, tenants: Tenants) -> None:
    """And not without any of the three."""
    authority = Authority(tmp_path / "ca")
    pair, mine = authority.sign("server"), authority.sign("client")
    options = ["--tls-cert-file", str(pair.cert), "--tls-key-file", str(pair.key), "--tokens-file", str(tenants.path)]
    options += ["--tls-client-ca-file", str(authority.ca)]
    all_of_it = {
        "token_file": token_file(tmp_path, tenants.tokens["team-a"]),
        "ca_file": str(authority.ca),
        "cert_file": str(mine.cert),
        "key_file": str(mine.key),
    }
    with ServerProcess(tmp_path / "s", "128MiB", *options) as server:
        with line(parsed(server=server.tcp, **all_of_it)) as client:
            assert put(client) == bytes([STORED] * 3)
            assert get(client) == [payload_of(key, SIZE) for key in KEYS]
        assert tenants.tokens["team-a"].split(".")[1] not in server.log
        for missing in (["token_file"], ["cert_file", "key_file"], list(all_of_it)):
            some = {name: value for name, value in all_of_it.items() if name not in missing}
            with (
                recorded_log("vllm.prefixd") as log,
                line(parsed(server=server.tcp, **some), attach=False) as client,
            ):
                assert client.lookup(KEYS[0], 0, lease=True) is None
            assert len([text for text in log if "running uncached" in text]) == 1
            assert ("UNAUTHENTICATED" in log[0]) == (missing == ["token_file"])


def test_the_token_may_be_renewed_while_the_engine_runs(tmp_path: Path, tenants: Tenants) -> None:
    """The old one is removed: the session ends, one line; with the new one in the file it is back within seconds."""
    file = token_file(tmp_path, tenants.tokens["team-a"])
    with (
        ServerProcess(tmp_path / "s", "256MiB", "--tokens-file", str(tenants.path)) as server,
        line(parsed(server=server.tcp, token_file=file)) as client,
    ):
        put(client)
        tenants.remove("team-a")
        fresh = tenants.add("team-a", name="fresh")
        tenants.write()
        wait_until(lambda: client.session() is None, "the session ends")
        token_file(tmp_path, fresh)
        wait_until(lambda: client.session() is not None, "it is attached again")

        assert get(client) == [payload_of(key, SIZE) for key in KEYS]


def test_the_token_of_another_tenant_is_not_used(tmp_path: Path, tenants: Tenants) -> None:
    """The tenant is in the keys of a running engine."""
    config = parsed(server="unix:///tmp/nobody.sock", token_file=token_file(tmp_path, tenants.tokens["team-a"]))
    config.open_channel("unix:///tmp/nobody.sock", []).close()
    token_file(tmp_path, tenants.tokens["team-b"])

    with pytest.raises(ConfigError, match="another tenant's now") as caught:
        config.open_channel("unix:///tmp/nobody.sock", [])
    assert tenants.tokens["team-b"].split(".")[1] not in str(caught.value)


def test_an_engine_does_not_try_what_its_token_does_not_permit(tmp_path: Path, tenants: Tenants) -> None:
    """A reader's saves and a writer's loads end here: no call, no error, the circuit stays closed."""
    with ServerProcess(tmp_path / "s", "256MiB", "--tokens-file", str(tenants.path)) as server:

        def config(name: str) -> ConnectorConfig:
            return parsed(server=server.tcp, token_file=token_file(tmp_path, tenants.tokens[name]))

        with line(config("team-a")) as owner:
            assert put(owner) == bytes([STORED] * 3)
        with line(config("reader")) as reader:
            assert put(reader) is None
            assert None not in get(reader)
            assert (reader.num_failed_calls, reader.session() is not None) == (0, True)
        with line(config("writer"), shard=None) as writer:
            assert writer.lookup(b"".join(KEYS), 0, lease=True) is None
            present = writer.lookup(b"".join(KEYS), 0, lease=False)
            assert present is not None
            present.wait(5)
            answer = present.answer()
            assert answer is not None and answer.is_present(2)
            assert (writer.num_failed_calls, writer.session() is not None) == (0, True)
