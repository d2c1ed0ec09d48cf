"""`prefixd keys explain`: what went into a namespace, and why two differ."""

import re
from pathlib import Path

import click

from cache_server.commands.ask import Server, server_option
from cache_server.commands.text import fail
from cache_server.explain import Described, ExplainError, described, differences, in_file, lines_of

_DIGITS = re.compile(r"[0-9a-f]{4,64}")


@click.group()
def keys() -> None:
    """About the names of blocks."""


@keys.command()
@click.argument("places", metavar="[ONE [OTHER]]", nargs=-1)
@server_option
def explain(places: tuple[str, ...], address: str) -> None:
    """Print what a namespace is made of; of two, only what differs, and what that means.

    ONE and OTHER are the first digits of a fingerprint that the server knows, or files: an engine's log, or the text
    that stands in it. Without any, all namespaces of the server are printed.
    """
    try:
        if len(places) > 2:
            raise ExplainError("two namespaces can be compared, not more")
        needs_server = not places or any(_DIGITS.fullmatch(place) and not Path(place).exists() for place in places)
        known = _known(address) if needs_server else []
        found = [_find(place, known) for place in places]
    except ExplainError as error:
        fail(1, str(error))
    lines = differences(*found) if len(found) == 2 else (line for one in found or known for line in lines_of(one))
    for line in lines:
        click.echo(line)


def _find(place: str, known: list[Described]) -> Described:
    if Path(place).exists() or not _DIGITS.fullmatch(place):
        return in_file(Path(place))
    fitting = {one.fingerprint: one for one in known if one.fingerprint.hex().startswith(place)}
    if len(fitting) != 1:
        raise ExplainError(f"{len(fitting)} namespaces of the server begin with {place}")
    return next(iter(fitting.values()))


def _known(address: str) -> list[Described]:
    return [described(namespace.fingerprint, namespace.text) for namespace in Server(address).stats().namespaces]
