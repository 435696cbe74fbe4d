"""What holders of limits have: the rows of a tenant, or of one of its projects or keys."""

from typing import Final

from sqlalchemy import ColumnElement, and_, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.tables import BatchRow, LedgerRow
from gateway.records.batches import ENDED
from gateway.records.limits import LimitScope

_COLUMNS: Final = {
    LimitScope.TENANT: "tenant_id",
    LimitScope.PROJECT: "project_id",
    LimitScope.KEY: "credential_id",
}


def held_by(
    table: type[BatchRow] | type[LedgerRow], tenant_id: str, scope: LimitScope, holder: str
) -> ColumnElement[bool]:
    """Return the condition for the rows of a tenant, or of its project or key."""
    return and_(table.tenant_id == tenant_id, getattr(table, _COLUMNS[scope]) == holder)


async def tokens_in_batches(
    transaction: AsyncSession, tenant_id: str, scope: LimitScope, holder: str
) -> int:
    """Return the estimated tokens in running batches of a tenant, or of its project or key."""
    is_its, is_open = held_by(BatchRow, tenant_id, scope, holder), BatchRow.status.not_in(ENDED)
    tokens = await transaction.scalar(select(func.sum(BatchRow.tokens)).where(is_its, is_open))
    return int(tokens or 0)
