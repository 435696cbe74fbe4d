"""Lists in pages: oldest first, each page beginning after an entry of the one before."""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.tables import ApiKeyRow, CreditRow, MemberRow, ProjectRow, TenantRow
from gateway.errors import InvalidParameterError

MAX_PAGE: Final = 100

T = TypeVar("T")
Row = TypeVar("Row", TenantRow, ProjectRow, MemberRow, ApiKeyRow, CreditRow)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some entries of a list."""

    entries: list[T]
    has_more: bool
    """Whether others follow."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which part of a list is asked for."""

    after: str | None = None
    """Id of the last entry of the page before; None for the first page."""
    limit: int = MAX_PAGE


async def read_page(
    transaction: AsyncSession,
    table: type[Row],
    wanted: PageRequest,
    *conditions: ColumnElement[bool],
) -> Page[Row]:
    """Return a page of the rows that fulfil the conditions. Raises InvalidParameterError for `after`."""
    query = select(table).where(*conditions).order_by(table.created_at, table.id)
    if wanted.after is not None:
        # The database is not asked for what cannot be an id: PostgreSQL refuses some characters.
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
