"""`prefixd ls`: the namespaces, how large and how old they are."""

import click

from cache_server.commands.ask import Server, json_option, server_option
from cache_server.commands.text import human_bytes, human_seconds, print_json, print_table
from cache_server.status import status_of


@click.command()
@server_option
@json_option
def ls(address: str, as_json: bool) -> None:
    """List the namespaces: what engines with equal ones share."""
    namespaces = status_of(Server(address).stats())["namespaces"]
    if as_json:
        print_json(namespaces)
        return
    if not namespaces:
        click.echo("no engine has attached, nothing is stored")
        return
    print_table(
        ["NAMESPACE", "TENANT", "MODEL", "BLOCKS", "COMPLETE", "MEMORY", "SHARDS", "AGE", "IDLE"],
        [
            [
                one["namespace"],
                one["tenant"] or "-",
                one["model"],
                str(one["blocks"]),
                str(one["complete_blocks"]),
                human_bytes(one["stored_bytes"]),
                str(one["shards"]),
                human_seconds(one["age_s"]),
                human_seconds(one["idle_s"]),
            ]
            for one in sorted(namespaces, key=lambda one: -one["stored_bytes"])
        ],
    )
