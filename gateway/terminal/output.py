"""Output of commands: a table for people, JSON for programs."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import click
import msgspec

URL_SOURCE: Final = "gateway.url_source"
"""Key in click's `Context.meta` of the file that the URLs of the stores are from, or None."""


def print_json(value: Any) -> None:
    """Print one JSON document, indented."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, or a message that there is nothing."""
    if not rows:
        click.echo("None.")
        return
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def show_time(time: datetime | None, *, missing: str = "never") -> str:
    """Format a time for a table, in UTC."""
    return missing if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"
