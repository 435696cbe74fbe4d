"""Records of tables: one, several, or a page of a list by time.

A page starts after an entry of the previous one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from sqlalchemy import ColumnExpressionArgument, Select, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.records.errors import must

MAX_PAGE: Final = 100
PART: Final = 250
"""Rows that one query reads: their conversion takes a few milliseconds of the event loop."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Row(Protocol[T_co]):
    """A row whose record other packages get; `read_page` needs `id` and `created_at` too."""

    def to_record(self) -> T_co:
        """Return the record."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page of a list."""

    entries: list[T]
    has_more: bool
    """Whether more entries follow."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The requested part of a list."""

    after: str | None = None
    """Id of the last entry of the previous page; None for the first page."""
    limit: int = MAX_PAGE
    is_newest_first: bool = False
    param: str = "after"
    """The parameter that has `after`."""


async def find_record(
    transaction: AsyncSession,
    table: type[Row[T]],
    *conditions: ColumnExpressionArgument[bool],
    is_locked: bool = False,
) -> T | None:
    """Return the record of the row that matches the conditions, or None if there is none.

    With `is_locked`, no other transaction changes the row before this one ends.
    """
    query = select(table).where(*conditions)
    row = await transaction.scalar(query.with_for_update() if is_locked else query)
    return None if row is None else row.to_record()


async def list_records(
    transaction: AsyncSession,
    table: type[Row[T]],
    *conditions: ColumnExpressionArgument[bool],
    order: Sequence[str] = ("created_at", "id"),
    limit: int | None = None,
) -> list[T]:
    """Return the records of the rows that match the conditions, by default oldest first."""
    columns = [getattr(table, name) for name in order]
    query = select(table).where(*conditions).order_by(*columns).limit(limit)
    rows = await transaction.scalars(query)
    return [row.to_record() for row in rows]


async def read_page(
    transaction: AsyncSession,
    table: type[Row[T]],
    wanted: PageRequest,
    *conditions: ColumnExpressionArgument[bool],
) -> Page[T]:
    """Return a page of the records of the rows that match the conditions.

    Raises InvalidParameterError for an unknown `after`.
    """
    columns: Any = table
    time, id_ = order = columns.created_at, columns.id
    query: Select[Any] = select(columns).where(*conditions)
    query = query.order_by(
        *(column.desc() if wanted.is_newest_first else column for column in order)
    )
    last = None
    if wanted.after is not None:
        # Text that cannot be an id is not sent to the database: PostgreSQL rejects some characters.
        is_id = wanted.after.isascii() and wanted.after.isprintable()
        last = await transaction.scalar(query.where(id_ == wanted.after)) if is_id else None
        if last is None:
            raise must(wanted.param, "be the id of an entry of this list", wanted.after)
    rows: list[Any] = []
    while (missing := wanted.limit + 1 - len(rows)) > 0:
        part = query.limit(min(missing, PART))
        if last is not None:
            is_later = time < last.created_at if wanted.is_newest_first else time > last.created_at
            follows = id_ < last.id if wanted.is_newest_first else id_ > last.id
            part = part.where(or_(is_later, and_(time == last.created_at, follows)))
        found = list(await transaction.scalars(part))
        rows += found
        if len(found) < min(missing, PART):
            break
        last = found[-1]
    records = [row.to_record() for row in rows[: wanted.limit]]
    return Page(records, len(rows) > wanted.limit)
