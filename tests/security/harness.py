"""Tokens files, namespaces with an operator's name, and engines of tenants."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cache_server.tenants import fingerprint_of, new_token
from tests.cache_server.harness import Client, ServerProcess, wait_until

PAYLOAD = 1 << 20


class Tenants:
    """A tokens file and the tokens that are in it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "tokens.toml"
        self.tokens: dict[str, str] = {}
        self._tenants: dict[str, str | None] = {}
        self._entries: list[str] = []

    def add(self, tenant: str, *, quota: str | None = None, name: str | None = None, **lists: list[str]) -> str:
        """A token of the tenant, by name (the tenant's, if it has only one)."""
        token, digest = new_token(tenant)
        self._tenants.setdefault(tenant, quota)
        self.tokens[name or tenant] = token
        rights = "".join(f"{verb} = {json.dumps(patterns)}\n" for verb, patterns in lists.items())
        self._entries.append(f'[[tokens]]\ntenant = "{tenant}"\nsha256 = "{digest}"\n{rights}')
        return token

    def add_operator(self) -> str:
        token, digest = new_token("operator")
        self.tokens["operator"] = token
        self._entries.append(f'[[tokens]]\noperator = true\nsha256 = "{digest}"\n')
        return token

    def remove(self, name: str) -> None:
        digest = hashlib.sha256(self.tokens.pop(name).encode()).hexdigest()
        self._entries = [entry for entry in self._entries if digest not in entry]

    def forget(self, tenant: str) -> None:
        """It is none any more."""
        del self._tenants[tenant]

    def write(self) -> Path:
        text = "".join(
            f"[tenants.{tenant}]\n" + (f'quota = "{quota}"\n' if quota else "")
            for tenant, quota in self._tenants.items()
        )
        self.path.write_text(text + "".join(self._entries))
        return self.path


def named(name: str) -> dict[str, Any]:
    """Fingerprint and text of a namespace that the operator has named, as `Client` takes them."""
    fields = {"format_version": 2, "model": {"namespace": name}, "hash": "sha256"}
    return {"fingerprint": fingerprint_of(fields), "text": json.dumps(fields, sort_keys=True), "key_bytes": 32}


@contextlib.contextmanager
def engine(
    server: ServerProcess, token: str, *, mapped: bool = True, payload_bytes: int = PAYLOAD, **more: Any
) -> Iterator[tuple[Client, Client]]:
    """Worker and scheduler side of a tenant's engine."""
    credentials = {"token": token}
    more = {"key_bytes": 32, **more}
    with (
        Client(
            server.unix,
            0,
            payload_bytes=payload_bytes,
            descriptors=server.socket_path if mapped else None,
            credentials=credentials,
            **more,
        ) as worker,
        Client(server.unix, credentials=credentials, **more) as scheduler,
    ):
        if mapped:
            wait_until(worker.is_mapped, "the worker has its segments")
        yield worker, scheduler


@contextlib.contextmanager
def refused(code: grpc.StatusCode, *words: str) -> Iterator[None]:
    """The call inside fails with this status; its text has these words, and nothing that looks like a secret."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error: Any = caught.value
    assert error.code() is code, f"{error.code()}: {error.details()}"
    for word in words:
        assert word in error.details()
    assert "Bearer " not in error.details().replace("Bearer TENANT.SECRET", "")
