"""`prefixd keys explain`: what went into a namespace, and why two differ."""

import re
from collections.abc import Iterator
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
        if not places:
            lines = _lines_of_all(_known(address))
        else:
            asked = any(_is_digits(place) for place in places)
            known = _known(address) if asked else {}
            found = [_find(place, known) for place in places]
            lines = differences(*found) if len(found) == 2 else lines_of(found[0])
    except ExplainError as error:
        fail(1, str(error))
    for line in lines:
        click.echo(line)


def _is_digits(place: str) -> bool:
    return _DIGITS.fullmatch(place) is not None and not Path(place).exists()


def _find(place: str, known: dict[bytes, str]) -> Described:
    if not _is_digits(place):
        return in_file(Path(place))
    fitting = [fingerprint for fingerprint in known if fingerprint.hex().startswith(place)]
    if len(fitting) != 1:
        raise ExplainError(f"{len(fitting)} namespaces of the server begin with {place}")
    return described(fitting[0], known[fitting[0]])


def _lines_of_all(known: dict[bytes, str]) -> Iterator[str]:
    """One that nobody can explain does not hide the others."""
    for fingerprint, text in known.items():
        try:
            yield from lines_of(described(fingerprint, text))
        except ExplainError as error:
            yield str(error)


def _known(address: str) -> dict[bytes, str]:
    """Texts by fingerprint."""
    return {namespace.fingerprint: namespace.text for namespace in Server(address).stats().namespaces}
