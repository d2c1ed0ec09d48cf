"""`prefixd config`: the settings that `prefixd serve` would run with, and where each came from."""

from typing import Any

import click

from cache_server.commands.text import print_json, print_table
from cache_server.redis_config import masked
from cache_server.settings import SettingsCommand, key_of


def show(context: click.Context, values: dict[str, Any], as_json: bool) -> None:
    """Prints them. `values`: parameter name → effective value, of a command whose settings were checked before."""
    command = context.command
    assert isinstance(command, SettingsCommand)
    origins = command.origins(context)
    rows = [(key_of(one), _plain(values[one.name or ""]), origins[key_of(one)]) for one in command.settings]
    if as_json:
        print_json({key: {"value": value, "from": origin} for key, value, origin in rows})
        return
    print_table(["SETTING", "VALUE", "FROM"], [[key, _shown(value), origin] for key, value, origin in rows])


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return masked(value) if isinstance(value, str) else value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "-" if value is None else str(value)
