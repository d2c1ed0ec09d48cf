"""The server's settings: one frozen value, made from strings before anything is loaded, mapped or bound.

A wrong setting is refused, never adjusted: `ConfigError` names the key, the value and what is allowed, on one
line. A number of bytes without a unit is refused because `--memory 10` means something else to everybody.

Addresses and sizes have the grammar of the connector's settings (`connector/config.py`), with which this file shares
no code; port 0, any free port, is for `--listen` only.

Not here: Redis (`redis_config.py`), environment variables, files, defaults that depend on the machine.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_MEMORY_BYTES = 64 << 20  # one smallest segment
BASE_BYTES = 128 << 20  # what the process needs beside the budget: interpreter, grpc, index, messages in flight
DEFAULT_LISTEN = "unix:///run/prefixd/prefixd.sock"
DEFAULT_MEMORY = "2GiB"
DEFAULT_GATE_SHARE = 0.8
_ALLOWED_ADDRESSES = "unix:///ABSOLUTE/PATH, HOST:PORT or [IPV6]:PORT is allowed"
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
# The characters that mean nothing in a URI (gRPC takes the address as one) or in a shell.
_SOCKET_PATH = re.compile(r"/[A-Za-z0-9._+@=/-]*[A-Za-z0-9._+@=-]")
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_MAX_SOCKET_PATH_BYTES = 104  # sun_path is 108 bytes with its final NUL; the descriptor socket's name is PATH.fd
_SIZE = re.compile(r"([0-9]{1,15})\s*(B|KiB|MiB|GiB|TiB)", re.ASCII)
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_MAX_SHOWN = 100


class ConfigError(ValueError):
    """A setting that is refused."""

    def __init__(self, key: str, value: str, allowed: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[: _MAX_SHOWN - 3]}..."
        super().__init__(f"{key}: {shown} is not allowed; {allowed}")
        self.key = key
        self.value = value
        self.allowed = allowed


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket; the descriptor socket lies beside it."""

    path: Path

    def __str__(self) -> str:
        return f"unix://{self.path}"

    @property
    def descriptor_path(self) -> Path:
        """Where segments are handed out."""
        return Path(f"{self.path}.fd")


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP address; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


Address = UnixAddress | TcpAddress


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything `prefixd serve` can be told."""

    listen: tuple[Address, ...]
    memory_bytes: int
    gate_share: float = DEFAULT_GATE_SHARE
    persist: Path | None = None  # where the memory lies, so that it outlives a clean stop; None: it does not
    http: TcpAddress | None = None  # metrics, probes and the status page

    def __post_init__(self) -> None:
        if not self.listen:
            raise ConfigError("listen", "", "at least one address is needed")
        if len(set(self.listen)) != len(self.listen):
            raise ConfigError("listen", " ".join(map(str, self.listen)), "every address may be given once")
        if self.memory_bytes < MIN_MEMORY_BYTES:
            raise ConfigError("memory", str(self.memory_bytes), "at least 64MiB (one segment)")
        if not 0 < self.gate_share <= 10:
            allowed = "a number above 0, at most 10; 0.8 means: loading is to take 20 % less time than recomputing"
            raise ConfigError("gate-share", str(self.gate_share), allowed)


def parse_config(
    listen: Sequence[str],
    memory: str,
    gate_share: float = DEFAULT_GATE_SHARE,
    persist: str | None = None,
    http: str | None = None,
) -> ServerConfig:
    """Strings of the command line become a `ServerConfig` or a `ConfigError`."""
    memory_bytes = parse_size("memory", memory)
    if memory_bytes < MIN_MEMORY_BYTES:
        raise ConfigError("memory", memory, "at least 64MiB (one segment)")
    if persist is not None and not persist.startswith("/"):
        raise ConfigError("persist", persist, "an absolute path on a tmpfs, for instance /dev/shm/prefixd")
    addresses = tuple(parse_address("listen", text, any_port=True) for text in listen)
    http_address = None if http is None else parse_address("http", http, any_port=True)
    if isinstance(http_address, UnixAddress):
        raise ConfigError("http", str(http), "HOST:PORT")
    if http_address is not None and http_address.port and http_address in addresses:
        raise ConfigError("http", str(http), "a port of its own: --listen has this one")
    return ServerConfig(
        addresses, memory_bytes, gate_share, Path(persist) if persist is not None else None, http_address
    )


def check_limit(config: ServerConfig, limit_bytes: int | None) -> None:
    """Refuse a budget that the container's limit cannot hold: it would be killed when the cache is full."""
    needed = config.memory_bytes + BASE_BYTES
    if limit_bytes is not None and needed > limit_bytes:
        raise ConfigError(
            "memory",
            str(config.memory_bytes),
            f"with {BASE_BYTES} for the process it needs {needed} bytes, the container's limit is {limit_bytes}",
        )


def parse_size(key: str, text: str) -> int:
    """'2GiB' → bytes. Decimal units are refused: many who write 10GB mean 10GiB."""
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 << 20 <= size <= 1 << 50:
        raise ConfigError(key, text, f"a size of 1MiB or more with its unit ({', '.join(_UNITS)}) is allowed")
    return size


def parse_address(key: str, text: str, *, any_port: bool = False) -> Address:
    """An address in the grammar that connector and server share; `any_port`: 0 is allowed, the system chooses."""
    address = _unix_address(text) if text.startswith("unix:") else _tcp_address(text, 0 if any_port else 1)
    if address is None:
        raise ConfigError(key, text, _ALLOWED_ADDRESSES)
    return address


def _unix_address(text: str) -> UnixAddress | None:
    path = text.removeprefix("unix://")
    is_one = is_socket_path(path) and len(path) <= _MAX_SOCKET_PATH_BYTES
    return UnixAddress(Path(path)) if is_one else None


def _tcp_address(text: str, least_port: int) -> TcpAddress | None:
    host, _, port = text.rpartition(":")
    bare = parse_host(host)
    is_one = bare is not None and _PORT.fullmatch(port) and least_port <= int(port) <= 65535
    return TcpAddress(bare, int(port)) if bare is not None and is_one else None


def parse_host(text: str) -> str | None:
    """A name, an IPv4 address, or an IPv6 address in brackets, which come off. None: none of them."""
    if not (text.startswith("[") and text.endswith("]")):
        return text if _HOST.fullmatch(text) else None
    try:
        ipaddress.IPv6Address(text[1:-1])
    except ValueError:
        return None
    return None if "%" in text else text[1:-1]


def is_socket_path(path: str) -> bool:
    """Absolute, of characters that mean nothing elsewhere, and not a folder."""
    return _SOCKET_PATH.fullmatch(path) is not None
