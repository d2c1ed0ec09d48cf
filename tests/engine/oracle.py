"""What a test compares an engine's blocks with: what `RecordingConnector` wrote down, and what the server holds."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from connector.client import CacheClient, Hello
from tests.engine.prefixd import Prefixd


class Records:
    """All lines that the processes of one or more engines wrote so far into `folder` and folders in it, in the order of
    each process.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = [
            json.loads(line)
            for path in sorted(folder.rglob("*.jsonl"))
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self._lines if line["event"] == event]

    def digests(self, event: str) -> dict[str, list[str]]:
        """key → the digests recorded for it, oldest first."""
        found: dict[str, list[str]] = {}
        for line in self.of(event):
            found.setdefault(line["key"], []).append(line["sha256"])
        return found

    def payload_digests(self, server: Prefixd, keys: list[str]) -> dict[str, str]:
        """key → digest of the payload that the server has for it, as this test reads it through a stream."""
        if not keys:
            return {}
        attached = self.of("attached")[0]
        hello = Hello(
            engine_id="oracle",
            client_name="oracle",
            fingerprint=bytes.fromhex(attached["fingerprint"]),
            namespace_text="",
            key_bytes=attached["key_bytes"],
            num_shards=attached["num_shards"],
            shard=attached["shard"],
            payload_bytes=attached["payload_bytes"],
            descriptor=bytes.fromhex(attached["descriptor"]),
        )
        digests = {}
        with _attached(server.port_address, hello) as client:
            session = client.session()
            assert session is not None
            for start in range(0, len(keys), 64):
                some = keys[start : start + 64]
                payloads = [memoryview(bytearray(hello.payload_bytes)) for _ in some]
                sums = client.get(session, b"".join(map(bytes.fromhex, some)), 0, payloads)
                for key, payload, checksum in zip(some, payloads, sums, strict=True):
                    if checksum is not None:
                        digests[key] = hashlib.sha256(payload).hexdigest()
        return digests


@contextlib.contextmanager
def _attached(address: str, hello: Hello) -> Iterator[CacheClient]:
    client = CacheClient(address, hello, call_timeout_s=5, transfer_timeout_s=30)
    client.start()
    try:
        assert client.wait_attached(10), f"{address} does not let us attach"
        yield client
    finally:
        client.close()
