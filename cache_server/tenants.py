"""Who may do what: tokens, the tenants they belong to, and which namespaces they read and write.

    tokens.toml                                     a client sends  authorization: Bearer team-a.SECRET

    [tenants.team-a]
    quota = "8GiB"              # of --memory; tenants without one share the rest in equal parts

    [[tokens]]
    tenant = "team-a"
    sha256 = "64 hexadecimal digits"                # of the whole token; `prefixd token` prints both
    read = ["*"]                # what it may read: "*", a name (the operator's `namespace`, with * and ?), or
    write = ["llama-*"]         # a fingerprint "sha256:64 digits"

    [[tokens]]
    operator = true             # flushes and sees everything, attaches nowhere
    sha256 = "…"

Invariants.
- Blocks of two tenants never meet: a namespace is kept under a fingerprint that holds its tenant (`kept_as`), and
  index, memory, quota and the names in Redis follow from that one. What a client says its keys hold is not relied on.
- Only digests of tokens are in the file and in memory. They are compared in constant time, all of them, whichever fits.
  The secrets are 32 random bytes, so a plain SHA-256 is enough: there is nothing to guess.
- Without a tokens file there is one tenant, "", and whoever reaches the socket is its operator.

Not here: TLS and sockets (`transport.py`), memory (`arena.py`), grpc.
"""

import hashlib
import hmac
import json
import re
import secrets
import struct
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from cache_server.config import ConfigError, parse_size
from cache_server.errors import Forbidden, Unauthenticated

READ: Final = 1
WRITE: Final = 2
SCHEME: Final = "Bearer "
FOR_PEOPLE: Final = frozenset({"label"})  # in a namespace's text beside what the fingerprint is made of
_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PATTERN = re.compile(r"sha256:[0-9a-f]{64}|[^\x00-\x1f]{1,256}")
_U32 = struct.Struct("<I")


def kept_as(tenant: str, fingerprint: bytes) -> bytes:
    """The 32 bytes under which this server, and Redis, keep a tenant's namespace."""
    if not tenant:
        return fingerprint
    parts = (b"prefixd tenant", tenant.encode(), fingerprint)
    return hashlib.sha256(b"".join(_U32.pack(len(part)) + part for part in parts)).digest()


def proven_name(text: str, fingerprint: bytes) -> str | None:
    """The operator's `namespace` in a namespace's text, if the text is the one that the fingerprint was made of.

    The encoding is that of `docs/formats.md`: a client cannot show one text and attach under another's fingerprint.
    """
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    if not isinstance(fields, dict) or fingerprint_of(fields) != fingerprint:
        return None
    model = fields.get("model")
    name = model.get("namespace") if isinstance(model, dict) else None
    return name if isinstance(name, str) else None


def fingerprint_of(fields: Mapping[str, Any]) -> bytes:
    """SHA-256 over magic, names and values as JSON, each after its length, by name; FOR_PEOPLE left out."""
    encoded = [b"prefixd namespace"]
    for name in sorted(fields.keys() - FOR_PEOPLE):
        encoded += [name.encode(), json.dumps(fields[name], sort_keys=True).encode()]
    return hashlib.sha256(b"".join(_U32.pack(len(part)) + part for part in encoded)).digest()


def new_token(name: str) -> tuple[str, str]:
    """A token and its digest, as they go to the client and into the file."""
    if not _TENANT.fullmatch(name):
        raise ConfigError("tenant", name, "1 to 63 lower-case letters, digits and -, beginning with no -")
    token = f"{name}.{secrets.token_urlsafe(32)}"
    return token, hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a call. `digest` tells two tokens of one tenant apart; it is no secret worth more than the file."""

    tenant: str
    is_operator: bool
    digest: str = field(repr=False)
    read: tuple[str, ...]
    write: tuple[str, ...]

    def rights(self, fingerprint: bytes, text: str) -> int:
        """What it may do in a namespace of its tenant: READ, WRITE, both or 0."""
        name = proven_name(text, fingerprint)
        names = [f"sha256:{fingerprint.hex()}", *([name] if name is not None else [])]
        return READ * _match(self.read, names) | WRITE * _match(self.write, names)


ANYONE: Final = Caller("", True, "", ("*",), ("*",))


def _match(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(pattern == "*" or fnmatchcase(name, pattern) for pattern in patterns for name in names)


@dataclass(frozen=True, slots=True)
class Registry:
    """What a tokens file says."""

    callers: tuple[Caller, ...]
    quotas: Mapping[str, int | None]  # tenant → bytes; None: a part of what is left

    def shares(self, memory_bytes: int) -> dict[str, int]:
        """Bytes per tenant; together at most the memory."""
        given = {tenant: quota for tenant, quota in self.quotas.items() if quota is not None}
        rest = memory_bytes - sum(given.values())
        num_others = len(self.quotas) - len(given)
        if rest < 0:
            raise ConfigError(
                "quota", str(sum(given.values())), f"quotas together at most --memory ({memory_bytes} bytes)"
            )
        if num_others and not rest:
            raise ConfigError(
                "quota", str(sum(given.values())), f"nothing is left for {num_others} tenants without one"
            )
        return {tenant: rest // num_others if quota is None else quota for tenant, quota in self.quotas.items()}


def read_tokens(path: Path) -> Registry:
    """The file's content, or a ConfigError that names the place and never a digest."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("tokens-file", str(path), f"a file that can be read ({error.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        place = re.search(r"\(at [^)]*\)", str(error))
        raise ConfigError("tokens-file", str(path), f"TOML {place[0] if place else ''}".strip()) from None
    where = _Place(path)
    where.only(content, "", {"tenants", "tokens"})
    quotas: dict[str, int | None] = {}
    for name, settings in where.table(content, "tenants").items():
        if not _TENANT.fullmatch(name):
            raise where.refuse(f"tenants.{name}", "lower-case letters, digits and -")
        where.only(settings, f"tenants.{name}", {"quota"})
        quota = settings.get("quota")
        quotas[name] = None if quota is None else _quota(where, name, quota)
    callers = []
    for number, entry in enumerate(where.array(content, "tokens"), 1):
        callers.append(_caller(where, f"token {number}", entry, quotas))
    digests = [caller.digest for caller in callers]
    if len(set(digests)) != len(digests):
        raise where.refuse("tokens", "each sha256 once")
    if not callers:
        raise where.refuse("tokens", "at least one [[tokens]]")
    return Registry(tuple(callers), quotas)


def _quota(where: "_Place", tenant: str, quota: Any) -> int:
    if not isinstance(quota, str):
        raise where.refuse(f"tenants.{tenant}.quota", 'a size with its unit, for example "8GiB"')
    return parse_size(f"tenants.{tenant}.quota", quota)


def _caller(where: "_Place", place: str, entry: Any, quotas: Mapping[str, int | None]) -> Caller:
    where.only(entry, place, {"tenant", "sha256", "read", "write", "operator"})
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise where.refuse(f"{place}.sha256", "64 lower-case hexadecimal digits: the digest, not the token")
    is_operator = entry.get("operator", False)
    if not isinstance(is_operator, bool):
        raise where.refuse(f"{place}.operator", "true or false")
    if is_operator:
        where.only(entry, f"{place} of an operator", {"sha256", "operator"})
        return Caller("", True, digest, (), ())
    tenant = entry.get("tenant")
    if not isinstance(tenant, str) or tenant not in quotas:
        raise where.refuse(f"{place}.tenant", "the name of a [tenants.NAME]")
    return Caller(
        tenant, False, digest, _patterns(where, entry, place, "read"), _patterns(where, entry, place, "write")
    )


def _patterns(where: "_Place", entry: Any, place: str, name: str) -> tuple[str, ...]:
    patterns = entry.get(name, ["*"])
    if not isinstance(patterns, list) or not all(isinstance(one, str) and _PATTERN.fullmatch(one) for one in patterns):
        raise where.refuse(f"{place}.{name}", 'a list of names, "*" or "sha256:64 digits"')
    return tuple(patterns)


class _Place:
    """Errors that say where in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def refuse(self, place: str, allowed: str) -> ConfigError:
        return ConfigError("tokens-file", f"{self._path}: {place}", allowed)

    def only(self, table: Any, place: str, names: set[str]) -> None:
        if not isinstance(table, dict):
            raise self.refuse(place, "a table")
        for name in table:
            if name not in names:
                raise self.refuse(f"{place}.{name}".strip("."), f"{', '.join(sorted(names))}")

    def table(self, content: dict[str, Any], name: str) -> dict[str, Any]:
        found = content.get(name, {})
        if not isinstance(found, dict):
            raise self.refuse(name, f"tables [{name}.NAME]")
        return found

    def array(self, content: dict[str, Any], name: str) -> list[Any]:
        found = content.get(name, [])
        if not isinstance(found, list):
            raise self.refuse(name, f"tables [[{name}]]")
        return found


class Guard:
    """Knows who calls. Without a registry: anyone, who may do anything."""

    def __init__(self, registry: Registry | None, *, allow_xxh3: bool = False) -> None:
        self._registry = registry
        self._allow_xxh3 = allow_xxh3

    @property
    def is_on(self) -> bool:
        """Tokens are asked for."""
        return self._registry is not None

    @property
    def tenants(self) -> list[str]:
        """All of them."""
        return list(self._registry.quotas) if self._registry is not None else [""]

    def replace(self, registry: Registry) -> None:
        """The file changed."""
        self._registry = registry

    def caller(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """Who sent a call with this metadata, or Unauthenticated."""
        if self._registry is None:
            return ANYONE
        headers = [value for name, value in metadata or () if name == "authorization"]
        if len(headers) != 1 or not isinstance(headers[0], str) or not headers[0].startswith(SCHEME):
            raise Unauthenticated("a token is needed: authorization: Bearer TENANT.SECRET")
        digest = hashlib.sha256(headers[0].removeprefix(SCHEME).encode("utf-8", "surrogatepass")).hexdigest()
        found = None
        for caller in self._registry.callers:
            if hmac.compare_digest(caller.digest, digest):
                found = caller
        if found is None:
            raise Unauthenticated("this token is not valid here")
        return found

    def admit(self, caller: Caller, fingerprint: bytes, text: str, key_bytes: int) -> int:
        """The rights of a client that attaches to this namespace: at least one, or Forbidden."""
        if self._registry is None:
            return READ | WRITE
        if caller.is_operator:
            raise Forbidden("an operator's token flushes and asks; engines attach with a tenant's")
        rights = caller.rights(fingerprint, text)
        if not rights:
            raise Forbidden(f"tenant {caller.tenant} may neither read nor write namespace {fingerprint.hex()[:12]}")
        if key_bytes != hashlib.sha256().digest_size and not self._allow_xxh3:
            raise Forbidden(
                "with tenants, keys are made by sha256 (the connector's `hash`): prompts can be made up whose xxh3 "
                "keys collide; --allow-xxh3 accepts them"
            )
        return rights

    def still_admits(self, digest: str, tenant: str, rights: int, fingerprint: bytes, text: str) -> bool:
        """After the file changed: whether the token of a session gives it what it has."""
        if self._registry is None:
            return True
        return any(
            caller.digest == digest and caller.tenant == tenant and caller.rights(fingerprint, text) == rights
            for caller in self._registry.callers
        )
