"""How closed the server is: files, modes and permissions from the options, checked before anything is bound.

    --tls-cert-file --tls-key-file     TLS on every HOST:PORT
    --tls-client-ca-file               and clients must show a certificate signed by one of these
    --tokens-file                      and every call a token (`tenants.py`), on every address
    --socket-mode --socket-owner       who may open the Unix sockets
    --insecure                         an open port although anybody could read and plant blocks through it

Rule: an address that other machines can reach needs TLS *and* a proof of who calls (tokens or client certificates).
Loopback and Unix sockets need neither; who may reach them is a matter of the machine's users.

Not here: grpc (`transport.py`).
"""

import grp
import ipaddress
import pwd
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cache_server.config import Address, ConfigError, TcpAddress
from cache_server.tenants import Registry, read_tokens

DEFAULT_SOCKET_MODE: Final = "0600"


@dataclass(frozen=True, slots=True)
class SecurityOptions:
    """The options as they were given; None where they were not."""

    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_client_ca_file: str | None = None
    tokens_file: str | None = None
    allow_xxh3: bool = False
    insecure: bool = False
    socket_mode: str | None = None
    socket_owner: str | None = None


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Checked. Paths, because the files are read again when they change."""

    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None
    tokens_file: Path | None = None
    allow_xxh3: bool = False
    socket_mode: int = 0o600
    socket_uid: int = -1  # -1: as it is
    socket_gid: int = -1
    is_open_to_all: bool = False  # an address that others reach, and --insecure

    @property
    def has_tls(self) -> bool:
        """On every TCP address."""
        return self.cert_file is not None

    def registry(self) -> Registry | None:
        """The tokens, None without a file."""
        return read_tokens(self.tokens_file) if self.tokens_file is not None else None


def parse_security(options: SecurityOptions, listen: Sequence[Address], memory_bytes: int) -> SecurityConfig:
    """Options become a `SecurityConfig` or a `ConfigError`. The files are read, to find what is wrong with them."""
    cert, key, client_ca = options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file
    if (cert is None) != (key is None):
        given = ("tls-cert-file", cert) if key is None else ("tls-key-file", key)
        raise ConfigError(given[0], str(given[1]), "certificate and key come together")
    if client_ca is not None and cert is None:
        raise ConfigError("tls-client-ca-file", client_ca, "it needs --tls-cert-file and --tls-key-file")
    if cert is not None and key is not None:
        check_pair(Path(cert), Path(key))
        if not any(isinstance(address, TcpAddress) for address in listen):
            raise ConfigError("tls-cert-file", cert, "TLS is for --listen HOST:PORT, and there is none")
    if client_ca is not None:
        check_authorities(Path(client_ca))
    if options.allow_xxh3 and options.tokens_file is None:
        raise ConfigError("allow-xxh3", "true", "it needs --tokens-file")
    if options.tokens_file is not None:
        read_tokens(Path(options.tokens_file)).shares(memory_bytes)
    proves_callers = options.tokens_file is not None or client_ca is not None
    open_addresses = [str(a) for a in listen if not _is_local(a)] if cert is None or not proves_callers else []
    if open_addresses and not options.insecure:
        missing = "TLS (--tls-cert-file)" if cert is None else "--tokens-file or --tls-client-ca-file"
        raise ConfigError(
            "listen", open_addresses[0], f"other machines reach it: {missing} is missing; --insecure does without"
        )
    if options.insecure and not open_addresses:
        raise ConfigError("insecure", "true", "no address needs it")
    uid, gid = _owner(options.socket_owner)
    return SecurityConfig(
        cert_file=Path(cert) if cert else None,
        key_file=Path(key) if key else None,
        client_ca_file=Path(client_ca) if client_ca else None,
        tokens_file=Path(options.tokens_file) if options.tokens_file is not None else None,
        allow_xxh3=options.allow_xxh3,
        socket_mode=_mode(options.socket_mode or DEFAULT_SOCKET_MODE),
        socket_uid=uid,
        socket_gid=gid,
        is_open_to_all=bool(open_addresses),
    )


def check_pair(cert: Path, key: Path) -> None:
    """The certificate chain and its key can be read and belong together."""
    for name, path in (("tls-cert-file", cert), ("tls-key-file", key)):
        _read(name, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "no PEM"
        raise ConfigError("tls-cert-file", str(cert), f"a PEM certificate and its key ({reason})") from None


def check_authorities(path: Path) -> None:
    """The certificates of whom we trust can be read."""
    _read("tls-client-ca-file", path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError:
        raise ConfigError("tls-client-ca-file", str(path), "PEM certificates") from None


def _no_password() -> str:
    """OpenSSL would ask the terminal."""
    return ""


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(name, str(path), f"a file that can be read ({error.strerror})") from None


def _is_local(address: Address) -> bool:
    """Whether only this machine reaches it. A name that is not `localhost` may mean anything."""
    if not isinstance(address, TcpAddress) or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def _mode(text: str) -> int:
    if not re.fullmatch(r"0?[0-7]{3}", text) or int(text, 8) & 0o111:
        raise ConfigError("socket-mode", text, "octal digits without execution, for example 0660")
    return int(text, 8)


def _owner(text: str | None) -> tuple[int, int]:
    """'USER', 'USER:GROUP' or ':GROUP', by name or number → ids; -1: as it is."""
    if text is None:
        return -1, -1
    user, separator, group = text.partition(":")
    if not user and not group:
        raise ConfigError("socket-owner", text, "USER, USER:GROUP or :GROUP")
    try:
        uid = -1 if not user else int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
        gid = -1 if not group else int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError("socket-owner", text, "a user and a group that this machine knows, or numbers") from None
    if separator and not group:
        raise ConfigError("socket-owner", text, "USER, USER:GROUP or :GROUP")
    return uid, gid
