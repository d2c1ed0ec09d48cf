"""Where Redis is and how to use it: one frozen value from the options `--redis…`, checked before anything connects.

    redis://[USER[:PASSWORD]@]HOST[:PORT][/DB]                one server; rediss:// is the same over TLS
    unix://[USER[:PASSWORD]@]/PATH[?db=DB]
    redis+cluster://[…@]HOST[:PORT][,HOST[:PORT]…]            any nodes of the cluster; rediss+cluster://
    redis+sentinel://[…@]HOST[:PORT][,HOST[:PORT]…]/MASTER[/DB]   the sentinels; rediss+sentinel://

The mode is part of the URL, so one string says where the tier is, and a wrong combination cannot be written down.

The password comes from the URL, from a file or from the environment, from one of them only. It is in no message: what
errors and logs name is `RedisConfig.text`, or the URL with the password masked.

Not here: whether anybody answers there (`redis_tier.py`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal
from urllib.parse import unquote

from cache_server.config import ConfigError, is_socket_path, parse_host, parse_size

Mode = Literal["single", "cluster", "sentinel"]

DEFAULT_TTL: Final = "1d"
DEFAULT_PREFIX: Final = "prefixd"
DEFAULT_CONNECTIONS: Final = 4
DEFAULT_QUEUE: Final = "1GiB"
DEFAULT_TIMEOUT: Final = "1s"
PASSWORD_VARIABLE: Final = "PREFIXD_REDIS_PASSWORD"  # noqa: S105 - the name of a variable

_SCHEMES: Final[dict[str, tuple[Mode, bool]]] = {  # mode, TLS
    "redis": ("single", False),
    "rediss": ("single", True),
    "unix": ("single", False),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
}
_DEFAULT_PORTS: Final[dict[Mode, int]] = {"single": 6379, "cluster": 6379, "sentinel": 26379}
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """One server: a host and port, or a path."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Everything the tier can be told."""

    mode: Mode
    addresses: tuple[RedisAddress, ...]
    tls: bool = False
    master: str = ""  # sentinel: the name of what they watch
    db: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    ttl_s: float = 86400.0
    prefix: str = DEFAULT_PREFIX
    connections: int = DEFAULT_CONNECTIONS
    queue_bytes: int = 1 << 30
    timeout_s: float = 1.0

    @property
    def text(self) -> str:
        """For people; without user and password."""
        scheme = "unix" if self.addresses[0].path else f"redis{'s' if self.tls else ''}"
        mode = "" if self.mode == "single" else f"+{self.mode}"
        places = ",".join(str(address) for address in self.addresses)
        master = f"/{self.master}" if self.master else ""
        return f"{scheme}{mode}://{places}{master}{f'/{self.db}' if self.db else ''}"


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """The options as they were given; None where they were not."""

    url: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    ttl: str | None = None
    prefix: str | None = None
    connections: int | None = None
    queue: str | None = None
    timeout: str | None = None


def parse_redis(options: RedisOptions, environment: Mapping[str, str]) -> RedisConfig | None:
    """Strings of the command line become a `RedisConfig`, None without `--redis`, or a `ConfigError`."""
    if options.url is None:
        for name in RedisOptions.__dataclass_fields__:
            if getattr(options, name) is not None:
                key = name.replace("_", "-")
                raise ConfigError(f"redis-{key}", str(getattr(options, name)), "it needs --redis URL")
        return None
    place = _parse_url(options.url)
    password = _password(place.password, options.password_file, environment)
    if place.user and not password:
        raise ConfigError("redis", masked(options.url), "a user needs a password")
    for name in ("ca_file", "cert_file", "key_file"):
        path = getattr(options, name)
        if path is not None and not place.tls:
            raise ConfigError(f"redis-{name.replace('_', '-')}", path, "it needs rediss://")
        if path is not None:
            _read(f"redis-{name.replace('_', '-')}", path)
    if (options.cert_file is None) != (options.key_file is None):
        raise ConfigError("redis-cert-file", str(options.cert_file), "certificate and key come together")
    prefix = DEFAULT_PREFIX if options.prefix is None else options.prefix
    if not re.fullmatch(r"[A-Za-z0-9._:/-]{1,64}", prefix):
        raise ConfigError("redis-prefix", prefix, "1 to 64 letters, digits and . _ : / -")
    connections = DEFAULT_CONNECTIONS if options.connections is None else options.connections
    if not 1 <= connections <= 64:
        raise ConfigError("redis-connections", str(connections), "1 to 64")
    ttl_s = parse_seconds("redis-ttl", DEFAULT_TTL if options.ttl is None else options.ttl)
    if not 1 <= ttl_s <= 366 * 86400:
        raise ConfigError("redis-ttl", str(options.ttl), "1s to 366d")
    timeout_s = parse_seconds("redis-timeout", DEFAULT_TIMEOUT if options.timeout is None else options.timeout)
    if not 0.05 <= timeout_s <= 60:
        raise ConfigError("redis-timeout", str(options.timeout), "50ms to 60s")
    return RedisConfig(
        mode=place.mode,
        addresses=place.addresses,
        tls=place.tls,
        master=place.master,
        db=place.db,
        user=place.user,
        password=password,
        ca_file=options.ca_file or "",
        cert_file=options.cert_file or "",
        key_file=options.key_file or "",
        ttl_s=ttl_s,
        prefix=prefix,
        connections=connections,
        queue_bytes=parse_size("redis-queue", DEFAULT_QUEUE if options.queue is None else options.queue),
        timeout_s=timeout_s,
    )


def masked(url: str) -> str:
    """The URL as it may be shown: everything between the first ':' of the credentials and the '@' is gone."""
    return re.sub(r"^([^/]*//[^:@/]*):.*@", r"\1:***@", url)


def password_in(url: str) -> str:
    """What has to be hidden from the list of processes; empty: nothing."""
    match = re.match(r"^[^/]*//[^:@/]*:(.*)@", url)
    return match[1] if match else ""


def parse_seconds(key: str, text: str) -> float:
    """'500ms', '1s', '30m', '12h', '1d' → seconds."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(ms|s|m|h|d)", text, re.ASCII)
    if match is None:
        raise ConfigError(key, text, "a number with a unit (ms, s, m, h, d), for example 1d")
    return float(match[1]) * _SECONDS[match[2]]


def _parse_url(url: str) -> RedisConfig:
    shown = masked(url)

    def refuse(allowed: str) -> ConfigError:
        return ConfigError("redis", shown, allowed)

    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise refuse(f"the scheme is one of {', '.join(_SCHEMES)}")
    mode, tls = _SCHEMES[scheme]
    credentials, at, rest = rest.rpartition("@")
    user, _, password = credentials.partition(":")
    user, password = unquote(user), unquote(password)
    if at and not (user or password):
        raise refuse("there is nothing before the @")
    if any(character in user + password for character in "\r\n\0"):
        raise refuse("a control character in user or password")
    if scheme == "unix":
        path, _, query = rest.partition("?")
        if not is_socket_path(path) or len(path) > 107:
            raise refuse("unix:///ABSOLUTE/PATH of at most 107 bytes, with ?db=N for another database")
        if query and not query.startswith("db="):
            raise refuse("the only parameter is db")
        db = _parse_db(query.removeprefix("db="), refuse) if query else 0
        return RedisConfig(mode, (RedisAddress(path=path),), db=db, user=user, password=password)
    if "?" in rest or "#" in rest:
        raise refuse("parameters are options: see prefixd serve --help")
    places, *parts = rest.split("/")
    addresses = tuple(_parse_place(place, _DEFAULT_PORTS[mode], refuse) for place in places.split(","))
    master = ""
    if mode == "single" and len(addresses) > 1:
        raise refuse("several hosts need redis+cluster:// or redis+sentinel://")
    if mode == "sentinel":
        master = unquote(parts.pop(0)) if parts else ""
        if not master:
            raise refuse("redis+sentinel://HOST:PORT,…/MASTER needs the name of the master")
    db = _parse_db(parts.pop(0), refuse) if parts and parts[0] else 0
    if any(parts):
        raise refuse("nothing may follow the database number")
    if mode == "cluster" and db:
        raise refuse("a cluster has database 0 only")
    return RedisConfig(mode, addresses, tls=tls, master=master, db=db, user=user, password=password)


def _parse_place(text: str, default_port: int, refuse: Callable[[str], ConfigError]) -> RedisAddress:
    match = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::([0-9]{1,5}))?", text, re.ASCII)
    host = parse_host(match[1]) if match else None
    if match is None or host is None:
        raise refuse("a host is missing or malformed: HOST or HOST:PORT")
    port = int(match[2]) if match[2] else default_port
    if not 1 <= port <= 65535:
        raise refuse("a port is 1 to 65535")
    return RedisAddress(host, port)


def _parse_db(text: str, refuse: Callable[[str], ConfigError]) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text, re.ASCII):
        raise refuse("the database is a number")
    return int(text)


def _password(from_url: str, file: str | None, environment: Mapping[str, str]) -> str:
    from_environment = environment.get(PASSWORD_VARIABLE, "")
    given = [bool(from_url), file is not None, bool(from_environment)]
    if sum(given) > 1:
        raise ConfigError(
            "redis-password-file", file or "", f"the password comes from the URL, the file or {PASSWORD_VARIABLE}: one"
        )
    if file is None:
        return from_url or from_environment
    password = _read("redis-password-file", file).strip("\r\n")
    if not password or any(character in password for character in "\r\n\0"):
        raise ConfigError("redis-password-file", file, "a file with the password on one line")
    return password


def _read(key: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(key, path, f"a file that can be read ({reason})") from None
