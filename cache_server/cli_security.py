"""The options of `prefixd serve` that close the server, those with which other commands reach a closed one, and
`prefixd token`.

Secrets come from files only: what stands on a command line is read by every user of the machine.

Not here: what is allowed (`security_config.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from cache_server.config import Address, ConfigError, TcpAddress
from cache_server.security_config import DEFAULT_SOCKET_MODE, SecurityOptions
from cache_server.tenants import new_token

_SERVE = (
    click.option("--tls-cert-file", metavar="FILE", help="TLS on every HOST:PORT: our certificate and its chain, PEM."),
    click.option("--tls-key-file", metavar="FILE", help="Its key. Both are read again when they change."),
    click.option("--tls-client-ca-file", metavar="FILE", help="Clients need a certificate signed by one of these."),
    click.option("--tokens-file", metavar="FILE", help="Every call needs a token; see docs/security.md."),
    click.option("--allow-xxh3", is_flag=True, help="With tokens: accept keys by xxh3_128 too."),
    click.option("--socket-mode", metavar="MODE", help=f"Of the Unix sockets.  [default: {DEFAULT_SOCKET_MODE}]"),
    click.option("--socket-owner", metavar="USER:GROUP", help="Of the Unix sockets, by name or number."),
    click.option("--insecure", is_flag=True, help="Listen where others reach us, without TLS or without tokens."),
)
_META = "cache_server.client"
Command = TypeVar("Command", bound=Callable[..., Any])


def _remember(context: click.Context, option: click.Parameter, value: str | None) -> None:
    assert option.name is not None
    context.meta.setdefault(_META, {})[option.name] = value


def _client_option(name: str, metavar: str, text: str) -> Callable[[Any], Any]:
    variable = "PREFIXD_" + name.removeprefix("--").upper().replace("-", "_")
    return click.option(
        name, metavar=metavar, help=text, envvar=variable, show_envvar=True, expose_value=False, callback=_remember
    )


_CLIENT = (
    _client_option("--token-file", "FILE", "Who we are: one line, TENANT.SECRET."),
    _client_option("--ca-file", "FILE", "TLS: who may have signed the server's certificate."),
    _client_option("--cert-file", "FILE", "TLS: our certificate, if the server asks for one."),
    _client_option("--key-file", "FILE", "TLS: its key."),
    _client_option("--tls-server-name", "NAME", "TLS: the name in its certificate, if not the address."),
)
CLIENT_VARIABLES = tuple(f"PREFIXD_{name.upper()}" for name in ("token_file", "ca_file", "cert_file", "key_file",
                                                                "tls_server_name"))  # fmt: skip


def security_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of `serve`."""
    return _with(command, _SERVE)


def security_options_of(values: Mapping[str, Any]) -> SecurityOptions:
    """What was given for them."""
    return SecurityOptions(**{name: values[name] for name in SecurityOptions.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a command reaches the server. `open` reads the files."""

    token_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    tls_server_name: str | None = None

    def open(self, address: Address) -> Any:
        """A channel. ConfigError: a file cannot be read, or does not go with the address."""
        from protos.channel import open_channel

        if self.ca_file is not None and not isinstance(address, TcpAddress):
            raise ConfigError("ca-file", self.ca_file, "TLS is for HOST:PORT")
        token = self._read("token_file", self.token_file)
        return open_channel(
            str(address),
            token=token.decode("ascii", "replace").strip() if token is not None else None,
            ca=self._read("ca_file", self.ca_file),
            cert=self._read("cert_file", self.cert_file),
            key=self._read("key_file", self.key_file),
            tls_server_name=self.tls_server_name,
        )

    @staticmethod
    def _read(name: str, path: str | None) -> bytes | None:
        if path is None:
            return None
        try:
            return Path(path).read_bytes()
        except OSError as error:
            key = name.replace("_", "-")
            raise ConfigError(key, path, f"a file that can be read ({error.strerror})") from None


def client_options(command: Command) -> Command:
    """Adds the options with which a server is reached; `current_client` has what was given."""
    return _with(command, _CLIENT)


def current_client() -> ClientOptions:
    """Of the command that runs."""
    context = click.get_current_context(silent=True)
    return ClientOptions(**(context.meta.get(_META, {}) if context is not None else {}))


def _with(command: Command, options: tuple[Callable[[Command], Command], ...]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("tenant", metavar="TENANT")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
def token(tenant: str, file: Path) -> None:
    """Make a token of TENANT: it goes into FILE (mode 0600), and what the tokens file needs is printed."""
    import os
    import sys

    try:
        made, digest = new_token(tenant)
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except ConfigError as error:
        click.echo(f"prefixd: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        click.echo(f"prefixd: FILE: {str(file)!r} cannot be written: {error.strerror}", err=True)
        sys.exit(1)
    with os.fdopen(number, "w", encoding="ascii") as stream:
        stream.write(made + "\n")
    click.echo(f'[[tokens]]\ntenant = "{tenant}"\nsha256 = "{digest}"')
