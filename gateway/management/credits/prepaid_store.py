"""Usage of prepaid credits, by the ledger."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import zip_longest

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.tables import LedgerRow


class PrepaidStore:
    """Sums of the ledger's prepaid rows, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def spent(self, tenant_id: str) -> int:
        """Return the credits that the tenant has used, in micro-dollars."""
        return await self._sum(LedgerRow.tenant_id == tenant_id)

    async def spent_between(
        self, tenant_id: str, times: Sequence[datetime]
    ) -> Mapping[datetime, int]:
        """Return the usage from each of these ascending times up to the next one."""
        spent: dict[datetime, int] = {}
        for start, end in zip_longest(times, times[1:]):
            conditions = [LedgerRow.tenant_id == tenant_id, LedgerRow.created_at >= start]
            if end is not None:
                conditions.append(LedgerRow.created_at < end)
            spent[start] = await self._sum(*conditions)
        return spent

    async def _sum(self, *conditions: ColumnElement[bool]) -> int:
        total = await self._transaction.scalar(
            select(func.sum(LedgerRow.cost_micros)).where(LedgerRow.is_prepaid, *conditions)
        )
        return int(total or 0)
