"""Pagination of lists by time; each page starts after an entry of the previous one."""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.tables import (
    AdapterRow,
    ApiKeyRow,
    BatchRow,
    CreditRow,
    FileRow,
    MemberRow,
    ProjectRow,
    TenantRow,
)
from gateway.errors import must

MAX_PAGE: Final = 100
PART: Final = 250
"""Rows that one query reads: their conversion takes a few milliseconds of the event loop."""

T = TypeVar("T")
Row = TypeVar(
    "Row",
    TenantRow,
    ProjectRow,
    MemberRow,
    ApiKeyRow,
    CreditRow,
    FileRow,
    BatchRow,
    AdapterRow,
)


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


async def read_page(
    transaction: AsyncSession,
    table: type[Row],
    wanted: PageRequest,
    *conditions: ColumnElement[bool],
) -> Page[Row]:
    """Return a page of the rows that match the conditions.

    Raises InvalidParameterError for `after`.
    """
    time, id_ = order = table.created_at, table.id
    query = select(table).where(*conditions)
    query = query.order_by(
        *(column.desc() if wanted.is_newest_first else column for column in order)
    )
    last = None
    if wanted.after is not None:
        # Text that cannot be an id is not sent to the database: PostgreSQL rejects some characters.
        is_id = wanted.after.isascii() and wanted.after.isprintable()
        last = await transaction.scalar(query.where(table.id == wanted.after)) if is_id else None
        if last is None:
            raise must("after", "be the id of an entry of this list", wanted.after)
    rows: list[Row] = []
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
    return Page(rows[: wanted.limit], len(rows) > wanted.limit)
