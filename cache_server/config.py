"""The server's settings: one frozen value, made from strings before anything is loaded, mapped or bound.

A wrong setting is refused, never adjusted: `ConfigError` names the key, the value and what is allowed, on one
line. A number of bytes without a unit is refused because `--memory 10` means something else to everybody.

Not here: Redis (`redis_config.py`), environment variables, files, defaults that depend on the machine.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_MEMORY_BYTES = 64 << 20  # one smallest segment
BASE_BYTES = 128 << 20  # what the process needs beside the budget: interpreter, grpc, index, messages in flight
DEFAULT_LISTEN = "unix:///run/prefixd/prefixd.sock"
DEFAULT_MEMORY = "2GiB"
DEFAULT_GATE_SHARE = 0.8
_MAX_UNIX_PATH = 107 - len(".fd")  # sun_path is 108 bytes with its zero; the descriptor socket adds ".fd"
_UNITS = {
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


class ConfigError(ValueError):
    """A setting that is refused."""

    def __init__(self, key: str, value: str, allowed: str) -> None:
        super().__init__(f"{key}: {value!r} is not allowed; {allowed}")
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
    listen: Sequence[str], memory: str, gate_share: float = DEFAULT_GATE_SHARE, persist: str | None = None
) -> ServerConfig:
    """Strings of the command line become a `ServerConfig` or a `ConfigError`."""
    memory_bytes = parse_size("memory", memory)
    if memory_bytes < MIN_MEMORY_BYTES:
        raise ConfigError("memory", memory, "at least 64MiB (one segment)")
    if persist is not None and not persist.startswith("/"):
        raise ConfigError("persist", persist, "an absolute path on a tmpfs, for instance /dev/shm/prefixd")
    addresses = tuple(parse_address("listen", text) for text in listen)
    return ServerConfig(addresses, memory_bytes, gate_share, Path(persist) if persist is not None else None)


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
    """'2GiB' → bytes."""
    allowed = f"a number with a unit ({', '.join(_UNITS)}), for example 2GiB"
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(key, text, allowed)
    return int(float(match[1]) * _UNITS[match[2]])


def parse_address(key: str, text: str) -> Address:
    """'unix:///PATH' or 'HOST:PORT'."""
    allowed = "unix:///ABSOLUTE/PATH or HOST:PORT"
    if text.startswith("unix:"):
        path = text.removeprefix("unix://")
        if not path.startswith("/") or path.endswith("/") or "\0" in path:
            raise ConfigError(key, text, allowed)
        if len(path.encode()) > _MAX_UNIX_PATH:
            raise ConfigError(key, text, f"the path may have at most {_MAX_UNIX_PATH} bytes")
        return UnixAddress(Path(path))
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise ConfigError(key, text, allowed)
    return TcpAddress(match[1].strip("[]"), int(match[2]))
