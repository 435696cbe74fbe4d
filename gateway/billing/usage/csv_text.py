"""CSV output that is safe for spreadsheets: no cell is interpreted as a formula."""

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

FORMULA_SIGNS: Final = ("=", "+", "-", "@", "\t", "\r")
"""Spreadsheets evaluate text that starts with one of these characters."""

Cell = str | int | datetime | None


def to_csv(headings: Sequence[str] | None, rows: Iterable[Sequence[Cell]]) -> str:
    """Return the rows as CSV (RFC 4180), after the headings if any; None is an empty cell."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if headings is not None:
        writer.writerow(headings)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return text.getvalue()


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(FORMULA_SIGNS) else value
    if isinstance(value, int):
        return str(value)
    return "" if value is None else value.isoformat().replace("+00:00", "Z")
