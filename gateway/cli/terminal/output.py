"""Output of commands: a table for people, JSON for programs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import methodcaller
from typing import Any, Final

import click
import msgspec

from gateway.records.money import show_dollars

NONE: Final = "none"
"""The value that unsets an option."""

Entity = Mapping[str, Any]
Columns = Mapping[str, Callable[[Entity], Any]]
"""For each heading of a table, a function of the entity."""


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


def print_columns(shown: Columns, found: Entity | Sequence[Entity]) -> None:
    """Print a table with one entity or a list of them."""
    entities = [found] if isinstance(found, Mapping) else found
    rows = [[show(of(entity), missing="-") for of in shown.values()] for entity in entities]
    print_table([heading.replace("_", " ") for heading in shown], rows)


def print_fields(entity: Entity) -> None:
    """Print a line for each field."""
    print_table(("OPTION", "VALUE"), list(_lines(entity)))


def _lines(fields: Entity, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{prefix}{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"{prefix}{name}", str(value) if value == "" else show(text, missing=NONE)


def show(value: Any, *, missing: str) -> str:
    """Format a value of JSON for a table."""
    if value in (None, "", [], {}):
        return missing
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case list():
            return ",".join(map(str, value))
        case dict():
            pairs = value.items()
            return ",".join(f"{name}={NONE if each is None else each}" for name, each in pairs)
        case _:
            return str(value)


def columns(text: str, **computed: Callable[[Entity], Any]) -> Columns:
    """Return the columns `HEADING=FIELD`; `_` in a heading is a space.

    The fields are those of the entity, or computed. Fields that end with `_at` are times, those
    with `_micros` are amounts. `HEADING=FIELD:TEXT` shows a text where a time is missing.
    """
    return dict(_column(part, computed) for part in text.split())


def _column(
    part: str, computed: Mapping[str, Callable[[Entity], Any]]
) -> tuple[str, Callable[[Entity], Any]]:
    heading, _, field = part.partition("=")
    name, _, missing = field.partition(":")
    # Gateways of another release may lack a field.
    read = computed.get(name, methodcaller("get", name))
    if name.endswith("_at"):
        return heading, lambda entity: show_time(read(entity), missing=missing or "never")
    if name.endswith("_micros"):
        return heading, lambda entity: show_dollars(read(entity))
    return heading, read


def show_time(time: str | int | None, *, missing: str = "never") -> str:
    """Format a time for a table, in UTC. It is ISO 8601 text or Unix seconds."""
    if time is None:
        return missing
    read = datetime.fromtimestamp(time, UTC) if isinstance(time, int) else _read(time)
    return f"{read:%Y-%m-%d %H:%M:%S} UTC"


def _read(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
