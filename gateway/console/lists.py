"""Lists: the page that a query asks for, their rows by a column or a text, and where more are."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import quote, urlencode

from fastapi import Depends, Request

from gateway.accounts.routes_common import AfterId
from gateway.console.tables import Cell, Column, Sort
from gateway.platform.database.paging import Page, PageRequest
from gateway.records.errors import must

ROWS: Final = 50
"""Rows of one page."""
MOST_SORTED: Final = 1000
"""Rows, the newest ones, that a list sorts and searches."""
_SORT, _FIND, _PAGE = "sort", "find", "page"
_OF_ONE_PAGE: Final = frozenset({"after", "newer", _PAGE, "done", "shown", "draft"})
"""Parameters of a query that links to other rows do not keep."""
_LARGEST_FIRST: Final = re.compile("num|money|price|budget|time")
"""Kinds of columns of which the first click shows the largest values first."""


async def _newest(request: Request, after: AfterId = None) -> PageRequest:
    asked = request.query_params
    if asked.get(_SORT) or asked.get(_FIND):
        return PageRequest(limit=MOST_SORTED, is_newest_first=True)
    return PageRequest(after, ROWS, is_newest_first=True)


Newest = Annotated[PageRequest, Depends(_newest)]
"""The page of a list that begins with the newest entry; all to sort and search, up to a bound."""


def cursor_of(page: Page[Any]) -> str | None:
    """Return where the next page of a list starts, if there is one."""
    return page.entries[-1].id if page.has_more else None


class Arranged(NamedTuple):
    """The rows of a page of a list, and links to others."""

    rows: Sequence[Any]
    sorts: Mapping[str, Sort]
    """By the titles of columns, how each is sorted now and by its link."""
    following: str | None
    """The link to the next rows in the order that was asked for."""
    find: str
    """The text that rows must contain."""
    is_arranged: bool
    """Whether rows are sorted or searched, else they are as they were given."""


def arranged(
    request: Request, columns: Sequence[Column], rows: Sequence[Any], *, default: str = ""
) -> Arranged:
    """Return the rows that a query asks for, in its order or the `default` one.

    Orders are names of columns, with `-` for descending ones. Raises InvalidParameterError.
    """
    asked = request.query_params
    find, sort = asked.get(_FIND, "").strip(), asked.get(_SORT) or default
    named = {_name(each): each for each in columns if each.title}
    chosen = named.get(sort.removeprefix("-"))
    if sort and chosen is None:
        raise must(_SORT, f"be one of {', '.join(named)}, or one with “-” before it", sort)
    number = asked.get(_PAGE, "1")
    if not (number.isascii() and number.isdecimal() and int(number[:6]) > 0):
        raise must(_PAGE, "be a whole number from 1", number)
    if find:
        rows = [row for row in rows if _contains(columns, row, find)]
    if chosen is not None:
        known = [row for row in rows if _order(chosen, row) is not None]
        missing = [row for row in rows if _order(chosen, row) is None]
        is_descending = sort.startswith("-")
        rows = [*sorted(known, key=lambda row: _order(chosen, row), reverse=is_descending)]
        rows += missing
    following, is_arranged = None, bool(find or chosen)
    if is_arranged:
        start = (int(number[:6]) - 1) * ROWS
        if len(rows) > start + ROWS:
            following = _link(request, {_PAGE: str(int(number) + 1)})
        rows = rows[start : start + ROWS]
    sorts = {each.title: _sort(request, name, each, sort) for name, each in named.items()}
    return Arranged(rows, sorts, following, find, is_arranged)


def _name(column: Column) -> str:
    return re.sub(r"\W+", "-", column.title.removesuffix("(UTC)").strip().lower())


def _sort(request: Request, name: str, column: Column, sort: str) -> Sort:
    is_up, is_down = sort == name, sort == f"-{name}"
    is_largest_first = _LARGEST_FIRST.search(column.kind) is not None
    descending = is_up or (is_largest_first and not is_down)
    state = "ascending" if is_up else "descending" if is_down else ""
    return Sort(_link(request, {_SORT: f"-{name}" if descending else name}), state)


def _link(request: Request, changes: Mapping[str, str]) -> str:
    kept = {name: text for name, text in request.query_params.items() if name not in _OF_ONE_PAGE}
    query = {name: text for name, text in {**kept, **changes}.items() if text}
    return f"{quote(request.url.path)}?{urlencode(query)}"


def _contains(columns: Sequence[Column], row: Any, text: str) -> bool:
    values = (each.value(row) for each in columns)
    texts = (each.text if isinstance(each, Cell) else str(each or "") for each in values)
    return any(text.casefold() in each.casefold() for each in texts)


def _order(column: Column, row: Any) -> Any:
    value = (column.order or column.value)(row)
    if isinstance(value, Cell):
        value = value.text
    if isinstance(value, tuple):
        value = value[0]
    return value.casefold() or None if isinstance(value, str) else value
