"""`prefixd stats`: every figure of a server, once."""

import click

from cache_server.commands.ask import Server, json_option, server_option
from cache_server.commands.text import human_bytes, human_percent, human_seconds, print_json, print_table
from cache_server.status import status_of


@click.command()
@server_option
@json_option
def stats(address: str, as_json: bool) -> None:
    """Print the server's figures."""
    status = status_of(Server(address).stats())
    if as_json:
        print_json(status)
        return
    state = ", draining" if status["draining"] else ""
    click.echo(
        f"prefixd {status['version']}, epoch {status['epoch']}, up {human_seconds(status['uptime_s'])}{state}; "
        f"hit rate of blocks {human_percent(status['hit_rate'])}"
    )
    for name, number in status["memory"].items():
        click.echo(f"{name.removesuffix('_bytes'):>10} {number / (1 << 20):12.1f} MiB")
    for one in status["namespaces"]:
        click.echo(
            f"namespace {one['namespace']} {one['model']}: "
            f"{one['complete_blocks']} of {one['blocks']} blocks complete, {one['shards']} shards, "
            f"{human_bytes(one['stored_bytes'])}"
        )
    for one in status["sessions"]:
        role = f"worker {one['shard']}" if one["role"] == "worker" else "scheduler"
        click.echo(
            f"session {one['session']}: {one['client']} pid {one['pid']}, engine {one['engine']}, "
            f"{role}{', mapped' if one['mapped'] else ''}, {human_bytes(one['reserved_bytes'])} reserved"
        )
    for name, count in sorted(status["counters"].items()):
        if count:
            click.echo(f"{name:>28} {count}")
    rows = [
        [one["name"], str(one["count"]), human_seconds(one["mean_s"]), human_seconds(one["p99_s"])]
        for one in status["operations"]
        if one["count"]
    ]
    if rows:
        print_table(["operation", "count", "mean", "99 % within"], rows)
