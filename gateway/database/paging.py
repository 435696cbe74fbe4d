"""Pagination of lists, oldest first; each page starts after an entry of the previous one."""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.tables import ApiKeyRow, CreditRow, MemberRow, ProjectRow, TenantRow
from gateway.errors import InvalidParameterError

MAX_PAGE: Final = 100

T = TypeVar("T")
Row = TypeVar("Row", TenantRow, ProjectRow, MemberRow, ApiKeyRow, CreditRow)


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


async def read_page(
    transaction: AsyncSession,
    table: type[Row],
    wanted: PageRequest,
    *conditions: ColumnElement[bool],
) -> Page[Row]:
    """Return a page of the rows that match the conditions.

    Raises InvalidParameterError for `after`.
    """
    query = select(table).where(*conditions).order_by(table.created_at, table.id)
    if wanted.after is not None:
        # Text that cannot be an id is not sent to the database: PostgreSQL rejects some characters.
        is_id = wanted.after.isascii() and wanted.after.isprintable()
        last = await transaction.scalar(query.where(table.id == wanted.after)) if is_id else None
        if last is None:
            raise InvalidParameterError(
                "'after' must be the id of an entry of this list.", param="after"
            )
        query = query.where(
            or_(
                table.created_at > last.created_at,
                and_(table.created_at == last.created_at, table.id > last.id),
            )
        )
    rows = list(await transaction.scalars(query.limit(wanted.limit + 1)))
    return Page(rows[: wanted.limit], len(rows) > wanted.limit)
