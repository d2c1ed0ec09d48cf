"""Figures as people read them, and the one line with which a command gives up."""

import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click


def fail(status: int, line: str) -> NoReturn:
    """One line on stderr."""
    click.echo(f"prefixd: {line}", err=True)
    sys.exit(status)


def print_json(value: Any) -> None:
    """For programs."""
    click.echo(json.dumps(value, indent=2))


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns; those whose cells are all numbers with a unit or without are set right. Nothing is cut off."""
    is_right = [all(row[i][:1].isdigit() or row[i] == "-" for row in rows) for i in range(len(heads))]
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(heads))]
    for line in (heads, *rows):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_right, strict=True)
        )
        click.echo("  ".join(cells).rstrip())


def human_bytes(number: float) -> str:
    """'1.5 GiB'"""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.{0 if number >= 100 * size else 1}f} {unit}"
    return f"{number:.0f} B"


def human_seconds(seconds: float | None) -> str:
    """'250 µs', '12 ms', '3.0 s', '5 min', '2.5 h', '1.2 d'"""
    if seconds is None:
        return "-"
    for limit, unit, factor, digits in (
        (0.001, "µs", 1e6, 0),
        (0.1, "ms", 1e3, 1),
        (1, "ms", 1e3, 0),
        (10, "s", 1, 1),
        (120, "s", 1, 0),
        (7200, "min", 1 / 60, 0),
        (172800, "h", 1 / 3600, 1),
    ):
        if seconds < limit:
            return f"{seconds * factor:.{digits}f} {unit}"
    return f"{seconds / 86400:.1f} d"


def human_percent(ratio: float | None) -> str:
    """'98.4 %', or '-'"""
    return "-" if ratio is None else f"{100 * ratio:.1f} %"
