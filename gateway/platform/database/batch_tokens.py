"""Tokens of batches that have not ended, which count against the limit `batch_tokens`."""

from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.tables import BatchRow
from gateway.records.batches import ENDED
from gateway.records.limits import LimitScope

_COLUMNS: Final = {
    LimitScope.TENANT: BatchRow.tenant_id,
    LimitScope.PROJECT: BatchRow.project_id,
    LimitScope.KEY: BatchRow.credential_id,
}


async def tokens_in_batches(
    transaction: AsyncSession, tenant_id: str, scope: LimitScope, holder: str
) -> int:
    """Return the estimated tokens in running batches of a tenant, or of its project or key."""
    tokens = await transaction.scalar(
        select(func.sum(BatchRow.tokens)).where(
            BatchRow.tenant_id == tenant_id,
            _COLUMNS[scope] == holder,
            BatchRow.status.not_in(ENDED),
        )
    )
    return int(tokens or 0)
