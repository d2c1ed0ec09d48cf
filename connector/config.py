"""What an operator may set: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`.

Closed: a key we do not know or a value we cannot take is refused before the model is loaded, in one line that names
the key, the value and what is allowed. Nothing is adjusted in silence. A setting needs a person who would turn it; all
else is a named constant where it is used.

Not here: the server's settings (`cache_server/config.py`), with which this file shares the grammar of addresses
(unix:///ABSOLUTE/PATH, HOST:PORT, [IPV6]:PORT) but no code.
"""

import difflib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from connector.block_keys import KEY_BYTES

_ALLOWED_ADDRESSES = "unix:///ABSOLUTE/PATH, HOST:PORT or [IPV6]:PORT is allowed"
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
# The characters that mean nothing in a URI (gRPC takes the address as one) or in a shell.
_SOCKET_PATH = re.compile(r"/[A-Za-z0-9._+@=/-]*[A-Za-z0-9._+@=-]")
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_MAX_SOCKET_PATH_BYTES = 104  # sun_path is 108 bytes with its final NUL; the descriptor socket's name is PATH.fd

_SIZE = re.compile(r"([0-9]{1,15})\s*(B|KiB|MiB|GiB|TiB)", re.ASCII)
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

# As `prefixd token` makes them: the secret holds 32 random bytes.
_TOKEN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\.[A-Za-z0-9_-]{32,128}")

_MAX_TEXT = 256
_MAX_PATH = 4096
_MAX_TOKENS = 1 << 32


class ConfigError(ValueError):
    """A setting is not one, or has a value that is not allowed. The message is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a cache server listens: `path` of a Unix socket on this node (mapped slots), or host and port (streams)."""

    path: str | None
    host: str | None
    port: int | None

    @property
    def is_local(self) -> bool:
        return self.path is not None


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """The settings of one engine."""

    server: str  # where the cache server listens: unix:///PATH or HOST:PORT
    namespace: str | None = None  # replaces the model identity: engines with equal ones share
    weights_version: str | None = None  # added to it: to share again after a weight update
    hash: str = "xxh3_128"  # of the keys; sha256, which is slower, where tenants are hostile to each other
    lookup_timeout_ms: float = 50.0  # what a dead server costs one request, once
    load_timeout_ms: float = 10_000.0  # after which a promised load counts as failed
    lookup_wait_ms: float = 1.0  # how long the scheduler stands still for an answer before it asks again next step
    save_decoded: bool = True  # blocks with decoded tokens too; else those that the prompt fills
    min_load_tokens: int = 0  # a hit of fewer tokens is computed: it is not worth a load
    staging_bytes: int = 256 << 20  # host memory of a worker for blocks on their way to or from a server elsewhere
    verify_loads: bool = False  # checksums of blocks in mapped slots too; what came over a network is always verified
    token_file: str | None = None  # who we are: one line, TENANT.SECRET
    ca_file: str | None = None  # TLS, and who may have signed the server's certificate
    cert_file: str | None = None  # our certificate, where the server asks for one
    key_file: str | None = None  # the key of cert_file
    tls_server_name: str | None = None  # the name in the server's certificate, where the address is another
    tenant: str = field(default="", init=False)  # whose blocks these are: what the token said at the start

    @property
    def address(self) -> Address:
        return parse_address(self.server)

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any] | None) -> "ConnectorConfig":
        """The settings in `extra_config`, checked. Raises ConfigError."""
        if extra_config is not None and not isinstance(extra_config, Mapping):
            raise ConfigError(f"kv_connector_extra_config = {_shown(extra_config)}: an object is allowed")
        given = dict(extra_config or {})
        names = [one.name for one in fields(cls) if one.init]
        for key, value in given.items():
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ConfigError(f"{_key(key)} = {_shown(value)}: unknown; {hint}allowed are {', '.join(names)}")
        if "server" not in given:
            raise ConfigError(f"{_key('server')} is missing: {_ALLOWED_ADDRESSES}")
        checked: dict[str, Any] = {key: _PARSERS[key](key, value) for key, value in given.items()}
        config = cls(**checked)
        if config.lookup_wait_ms > config.lookup_timeout_ms:
            raise ConfigError(
                f"{_key('lookup_wait_ms')} = {config.lookup_wait_ms:g}: "
                f"at most lookup_timeout_ms ({config.lookup_timeout_ms:g}) is allowed"
            )
        config._check_credentials()
        return config

    def open_channel(self, address: str, options: Sequence[tuple[str, Any]]) -> Any:
        """A channel with these credentials, their files read now. Raises ConfigError."""
        from protos.channel import open_channel

        token = None if self.token_file is None else read_token(self.token_file)
        if token is not None and tenant_in(token) != self.tenant:
            raise ConfigError(f"{_key('token_file')} = {_shown(self.token_file)}: the token is another tenant's now")
        ca, cert, key = (
            None if path is None else _read_file(name, path)
            for name, path in (("ca_file", self.ca_file), ("cert_file", self.cert_file), ("key_file", self.key_file))
        )
        return open_channel(
            address, options, token=token, ca=ca, cert=cert, key=key, tls_server_name=self.tls_server_name
        )

    def _check_credentials(self) -> None:
        """Whatever contradicts itself, or cannot be read, is found before the model is loaded."""
        if self.token_file is not None:
            object.__setattr__(self, "tenant", tenant_in(read_token(self.token_file)))
        for key in ("ca_file", "cert_file", "key_file"):
            path = getattr(self, key)
            if path is None:
                continue
            if self.address.is_local:
                raise ConfigError(f"{_key(key)} = {_shown(path)}: only with server = HOST:PORT is allowed")
            if key != "ca_file" and self.ca_file is None:
                raise ConfigError(f"{_key(key)} = {_shown(path)}: only with ca_file is allowed")
            _read_file(key, path)
        if (self.cert_file is None) != (self.key_file is None):
            given = "cert_file" if self.key_file is None else "key_file"
            raise ConfigError(f"{_key(given)} = {_shown(getattr(self, given))}: cert_file and key_file come together")
        if self.tls_server_name is not None and self.ca_file is None:
            shown = _shown(self.tls_server_name)
            raise ConfigError(f"{_key('tls_server_name')} = {shown}: only with ca_file is allowed")
        if self.token_file is not None and self.ca_file is None and not _stays_on_this_machine(self.address):
            raise ConfigError(
                f"{_key('token_file')} = {_shown(self.token_file)}: a token travels over a Unix socket, the loopback "
                "interface, or TLS (ca_file) only"
            )


def read_token(path: str) -> str:
    """The token in a file. Raises ConfigError; the message holds the path, never what was read."""
    token = _read_file("token_file", path).decode("ascii", "replace").strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"{_key('token_file')} = {_shown(path)}: a file with one line TENANT.SECRET is allowed")
    return token


def tenant_in(token: str) -> str:
    """The first part of a token is no secret."""
    return token.partition(".")[0]


def _read_file(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{_key(key)} = {_shown(path)}: a file that can be read ({error.strerror})") from None


def _stays_on_this_machine(address: Address) -> bool:
    if address.host is None or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> Address:
    """An address in the grammar that connector and server share. Raises ConfigError, without the name of a key."""
    address = _unix_address(text) if text.startswith("unix:") else _tcp_address(text)
    if address is None:
        raise ConfigError(f"{_shown(text)}: {_ALLOWED_ADDRESSES}")
    return address


def _unix_address(text: str) -> Address | None:
    path = text.removeprefix("unix://")
    if not _SOCKET_PATH.fullmatch(path) or len(path) > _MAX_SOCKET_PATH_BYTES:
        return None
    return Address(path=path, host=None, port=None)


def _tcp_address(text: str) -> Address | None:
    host, _, port = text.rpartition(":")
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        return Address(path=None, host=host, port=int(port)) if _is_ipv6(host) else None
    return Address(path=None, host=host, port=int(port)) if _HOST.fullmatch(host) else None


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return "%" not in host


def _server(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{_key(key)} = {_shown(value)}: {_ALLOWED_ADDRESSES}")
    try:
        parse_address(value)
    except ConfigError as error:
        raise ConfigError(f"{_key(key)} = {error}") from None
    return value


def _text(key: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_TEXT or not value.isprintable():
        raise ConfigError(f"{_key(key)} = {_shown(value)}: a text of 1 to {_MAX_TEXT} printable characters is allowed")
    return value


def _file(key: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_PATH or not value.isprintable():
        raise ConfigError(f"{_key(key)} = {_shown(value)}: the path of a file is allowed")
    return value


def _hash(key: str, value: Any) -> str:
    if not isinstance(value, str) or value not in KEY_BYTES:
        near = difflib.get_close_matches(str(value), KEY_BYTES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{_key(key)} = {_shown(value)}: {' or '.join(KEY_BYTES)} is allowed{hint}")
    return value


def _timeout_ms(key: str, value: Any) -> float:
    if _is_number(value) and 0 < value <= 3_600_000:
        return float(value)
    raise ConfigError(f"{_key(key)} = {_shown(value)}: a number of milliseconds above 0, up to 3600000, is allowed")


def _wait_ms(key: str, value: Any) -> float:
    if _is_number(value) and 0 <= value <= 1000:
        return float(value)
    raise ConfigError(f"{_key(key)} = {_shown(value)}: a number of milliseconds from 0 to 1000 is allowed")


def _boolean(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{_key(key)} = {_shown(value)}: true or false is allowed")


def _num_tokens(key: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKENS:
        return value
    raise ConfigError(f"{_key(key)} = {_shown(value)}: a whole number of tokens from 0 to {_MAX_TOKENS} is allowed")


def _size(key: str, value: Any) -> int:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 << 20 <= size <= 1 << 50:
        raise ConfigError(
            f"{_key(key)} = {_shown(value)}: a size of 1MiB or more with its unit ({', '.join(_UNITS)}) is allowed"
        )
    return size


_PARSERS = {
    "server": _server,
    "namespace": _text,
    "weights_version": _text,
    "hash": _hash,
    "lookup_timeout_ms": _timeout_ms,
    "load_timeout_ms": _timeout_ms,
    "lookup_wait_ms": _wait_ms,
    "save_decoded": _boolean,
    "min_load_tokens": _num_tokens,
    "staging_bytes": _size,
    "verify_loads": _boolean,
    "token_file": _file,
    "ca_file": _file,
    "cert_file": _file,
    "key_file": _file,
    "tls_server_name": _text,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _key(key: Any) -> str:
    return f"kv_connector_extra_config.{_one_line(str(key))}"


def _shown(value: Any) -> str:
    return _one_line(repr(value))


def _one_line(text: str) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= 100 else f"{text[:97]}..."
