"""`prefixd check`: the doctor's findings, one line each, and what to do about them."""

from dataclasses import asdict

import click

from cache_server.commands.ask import Server
from cache_server.commands.text import print_json
from cache_server.config import Address, ServerConfig
from cache_server.doctor import findings
from cache_server.redis_config import RedisConfig


def run(config: ServerConfig, redis: RedisConfig | None, as_json: bool) -> None:
    """Prints them as they come; exit status 1 if one is `fail`."""
    found = []
    for one in findings(config, redis, _who_answers):
        found.append(one)
        if not as_json:
            click.echo(f"{one.state.upper() if one.state != 'ok' else 'ok':<5} {one.name:<12} {one.text}")
            if one.todo:
                click.echo(f"{'':<18} → {one.todo}")
    if as_json:
        print_json([asdict(one) for one in found])
    if any(one.state == "fail" for one in found):
        raise SystemExit(1)


def _who_answers(address: Address) -> str | None:
    said = Server(str(address)).try_stats()
    return None if isinstance(said, str) else f"a prefixd {said.server_version} answers there"
