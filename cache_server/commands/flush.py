"""`prefixd flush`: drop a namespace, or everything, for all engines."""

import re

import click

from cache_server.commands.ask import Server, json_option, server_option
from cache_server.commands.text import fail, print_json
from cache_server.status import status_of

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@click.command()
@click.argument("namespace", required=False)
@click.option("--all", "everything", is_flag=True, help="All namespaces.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@server_option
@json_option
def flush(namespace: str | None, everything: bool, yes: bool, address: str, as_json: bool) -> None:
    """Drop all blocks of NAMESPACE, as `prefixd ls` shows it; its first digits are enough.

    It goes in the memory of all servers on one Redis, and in Redis. All 64 digits name also what is in Redis only.
    Engines go on; what they compute from now on is stored again.
    """
    if everything == (namespace is not None):
        fail(2, "flush: name one namespace (see prefixd ls), or say --all")
    server = Server(address)
    fingerprint, what = b"", "everything"
    if namespace is not None:
        known_namespaces = status_of(server.stats())["namespaces"]
        found = [one for one in known_namespaces if one["fingerprint"].startswith(namespace.lower())]
        if not found and _FINGERPRINT.fullmatch(namespace.lower()):
            found = [{"fingerprint": namespace.lower(), "namespace": namespace[:12], "model": "not in memory"}]
        if len(found) != 1:
            known = "no namespace begins" if not found else f"{len(found)} namespaces begin"
            fail(2, f"flush: {known} with {namespace!r}; see prefixd ls")
        fingerprint, what = bytes.fromhex(found[0]["fingerprint"]), f"{found[0]['namespace']} ({found[0]['model']})"
    if not yes and not click.confirm(f"Drop {what}?"):
        fail(1, "flush: nothing was dropped")
    reply = server.flush(fingerprint)
    if as_json:
        print_json({"flushed_blocks": reply.num_blocks, "redis_pending": reply.lower_tier_pending})
    else:
        click.echo(f"{reply.num_blocks} blocks of {what} dropped")
        if reply.lower_tier_pending:
            click.echo("Redis does not answer: it is flushed when it does, if this server runs until then")
