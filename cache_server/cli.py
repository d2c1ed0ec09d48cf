"""`prefixd serve`, and the other commands put together (`commands/`).

Settings are checked before anything heavy is imported, mapped or bound: a wrong one costs one line on stderr and exit
status 2; so does a Redis that answers and refuses them. A server that cannot start (socket in use, port taken) and one
that cannot be reached: one line, status 1. Where settings come from: `settings.py`.
"""

import os
from typing import Any

import click

from cache_server.cgroup import memory_limit
from cache_server.cli_security import security_options, security_options_of, token
from cache_server.commands import check as check_command
from cache_server.commands import config as config_command
from cache_server.commands.ask import json_parameter
from cache_server.commands.completion import completion
from cache_server.commands.flush import flush
from cache_server.commands.health import health
from cache_server.commands.keys import keys
from cache_server.commands.ls import ls
from cache_server.commands.stats import stats
from cache_server.commands.text import fail
from cache_server.commands.top import top
from cache_server.commands.warm import warm
from cache_server.config import (
    DEFAULT_GATE_SHARE,
    DEFAULT_LISTEN,
    DEFAULT_MEMORY,
    ConfigError,
    ServerConfig,
    check_limit,
    parse_config,
)
from cache_server.logs import FORMATS, LEVELS
from cache_server.process_title import hide_argument
from cache_server.redis_config import (
    DEFAULT_CONNECTIONS,
    DEFAULT_PREFIX,
    DEFAULT_QUEUE,
    DEFAULT_TIMEOUT,
    DEFAULT_TTL,
    PASSWORD_VARIABLE,
    RedisConfig,
    RedisOptions,
    parse_redis,
    password_in,
)
from cache_server.security_config import SecurityConfig, parse_security
from cache_server.settings import SettingsCommand, is_given, settings_of
from protos import __version__


@click.group()
@click.version_option(__version__, prog_name="prefixd", message="%(prog)s %(version)s")
def main() -> None:
    """The prefix cache server of prefixd, and what asks it."""


@main.command(cls=SettingsCommand)
@click.option(
    "--listen",
    multiple=True,
    default=(DEFAULT_LISTEN,),
    show_default=True,
    metavar="ADDRESS",
    help="unix:///PATH or HOST:PORT (0: any free port); may be repeated.",
)
@click.option("--memory", default=DEFAULT_MEMORY, show_default=True, metavar="SIZE", help="With a unit: 512MiB, 20GiB.")
@click.option(
    "--redis",
    "url",
    metavar="URL",
    help="Keep blocks there too: redis://HOST:PORT/DB, rediss://, unix:///PATH, redis+cluster://HOST:PORT,…, "
    "redis+sentinel://HOST:PORT,…/MASTER.",
)
@click.option("--redis-password-file", metavar="FILE", help=f"Or the environment: {PASSWORD_VARIABLE}.")
@click.option("--redis-ca-file", metavar="FILE", help="rediss://: who is trusted.  [default: the system's]")
@click.option("--redis-cert-file", metavar="FILE", help="rediss://: our certificate, if Redis asks for one.")
@click.option("--redis-key-file", metavar="FILE", help="rediss://: its key.")
@click.option(
    "--redis-ttl", metavar="TIME", default=DEFAULT_TTL, show_default=True, help="How long unused blocks stay."
)
@click.option("--redis-prefix", metavar="TEXT", default=DEFAULT_PREFIX, show_default=True, help="Of all keys.")
@click.option(
    "--redis-connections", type=int, default=DEFAULT_CONNECTIONS, show_default=True, help="For payloads, per node."
)
@click.option(
    "--redis-queue", metavar="SIZE", default=DEFAULT_QUEUE, show_default=True, help="What may wait to be written."
)
@click.option(
    "--redis-timeout", metavar="TIME", default=DEFAULT_TIMEOUT, show_default=True, help="Without a byte from it."
)
@click.option(
    "--gate-share",
    type=float,
    default=DEFAULT_GATE_SHARE,
    show_default=True,
    help="A hit from a slower tier is promised if loading it takes less than this share of recomputing it.",
)
@click.option(
    "--persist",
    metavar="DIR",
    help="Keep the memory over a clean stop (SIGTERM), for the next server with the same DIR and --memory. "
    "On a tmpfs, with room for --memory and 1/256 more; one server per DIR.",
)
@click.option(
    "--http",
    metavar="HOST:PORT",
    help="Serve the status page, /metrics, /healthz and /readyz there; read-only.  [default: not at all]",
)
@click.option("--log-format", type=click.Choice(FORMATS), default="text", show_default=True, help="Of stderr.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="Of stderr.")
@security_options
@click.pass_context
def serve(context: click.Context, /, **values: Any) -> None:
    """Serve until SIGTERM.

    A setting comes from its flag, else its variable, else the file of --config, else its default.
    """
    config, redis, security = _checked(context, values)
    _check_limit(config)

    import asyncio

    from cache_server import logs, server

    recent = logs.setup(values["log_format"], values["log_level"])
    try:
        asyncio.run(server.serve(config, redis, recent, security))
    except ConfigError as error:
        fail(2, str(error))
    except server.StartError as error:
        fail(1, str(error))


def _checked(context: click.Context, values: dict[str, Any]) -> tuple[ServerConfig, RedisConfig | None, SecurityConfig]:
    """What the values mean, or the end of the process with one line."""
    url = values["url"]
    # None for what nobody set: an option of Redis without --redis is a mistake.
    redis = {
        name.removeprefix("redis_"): value if is_given(context, name) else None
        for name, value in values.items()
        if name.startswith("redis_")
    }
    try:
        if url is not None:
            hide_argument(password_in(url))
        redis_config = parse_redis(RedisOptions(url, **redis), os.environ)
        config = parse_config(
            values["listen"], values["memory"], values["gate_share"], values["persist"], values["http"]
        )
        security = parse_security(security_options_of(values), config.listen, config.memory_bytes)
    except ConfigError as error:
        fail(2, str(error))
    return config, redis_config, security


def _check_limit(config: ServerConfig) -> None:
    try:
        check_limit(config, memory_limit())
    except ConfigError as error:
        fail(2, str(error))


@click.pass_context
def config(context: click.Context, /, as_json: bool, **values: Any) -> None:
    """Print the settings that `prefixd serve` would run with, and where each comes from.

    Takes the flags of serve, its variables and its file; refuses what serve would refuse.
    """
    checked, *_ = _checked(context, values)
    _check_limit(checked)
    config_command.show(context, values, as_json)


@click.pass_context
def check(context: click.Context, /, as_json: bool, **values: Any) -> None:
    """Look whether this machine can run `prefixd serve` with these settings, and an engine beside it.

    Takes the flags of serve, its variables and its file. Exit status 1 if something fails.
    """
    config, redis_config, _ = _checked(context, values)
    check_command.run(config, redis_config, as_json)


# They take what serve takes, whatever that is.
for _callback in (config, check):
    _options = [*settings_of(serve), json_parameter()]
    main.add_command(SettingsCommand(_callback.__name__, params=_options, callback=_callback, help=_callback.__doc__))
for _command in (stats, top, ls, flush, warm, health, completion, keys, token):
    main.add_command(_command)
