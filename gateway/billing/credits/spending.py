"""What each tenant's prepaid requests cost, without reading their rows.

A trigger of the ledger adds the cost of new prepaid rows as partial sums, in the transaction that
inserts them: on PostgreSQL one for each tenant in a statement, on SQLite one for each row. So the
partial sums equal the rows at every moment, and transactions that insert rows do not wait for each
other. `fold` replaces several partial sums of a tenant by one.
"""

import math
import time
from collections import Counter
from typing import Final

from sqlalchemy import delete, func, insert, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.claims import lock_kind
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import LedgerRow, PrepaidSumRow

PREPAID_LOCK: Final = 7_585_428
"""PostgreSQL advisory lock: two processes at once would correct the same difference twice."""
FOLDED: Final = 5_000
"""Partial sums that one transaction replaces."""


async def prepaid_cost(transaction: AsyncSession, tenant_id: str) -> int:
    """Return what all prepaid requests of a tenant cost in micro-dollars, by the ledger."""
    sums = select(func.sum(PrepaidSumRow.cost_micros)).where(PrepaidSumRow.tenant_id == tenant_id)
    return int(await transaction.scalar(sums) or 0)


async def fold(database: Database, *, seconds: float = math.inf) -> None:
    """Replace partial sums until each tenant has one, or `seconds` are over."""
    deadline = time.monotonic() + seconds
    while await _fold_some(database) and time.monotonic() < deadline:
        pass


async def correct(database: Database, tenant_id: str) -> int:
    """Add what the partial sums of a tenant lack. Return it in micro-dollars: 0 unless they erred.

    Only a change of the trigger can make them err. This reads all prepaid rows of the tenant.
    """
    rows = select(LedgerRow.cost_micros.label("micros")).where(
        LedgerRow.tenant_id == tenant_id, LedgerRow.is_prepaid
    )
    sums = select(-PrepaidSumRow.cost_micros).where(PrepaidSumRow.tenant_id == tenant_id)
    async with database.writing() as transaction:
        await lock_kind(transaction, PREPAID_LOCK)
        # One statement reads both, so that it sees no row without its part of a sum.
        both = union_all(rows, sums).subquery()
        lacking = int(await transaction.scalar(select(func.sum(both.c.micros))) or 0)
        if lacking:
            row = PrepaidSumRow(tenant_id=tenant_id, cost_micros=lacking)
            transaction.add(row)
    return lacking


async def _fold_some(database: Database) -> bool:
    row = PrepaidSumRow
    several = select(row.tenant_id).group_by(row.tenant_id).having(func.count() > 1)
    # By tenant: otherwise these could be one partial sum of each tenant.
    some = select(row.id).where(row.tenant_id.in_(several)).order_by(row.tenant_id, row.id)
    removal = delete(row).where(row.id.in_(some.limit(FOLDED)))
    async with database.writing() as transaction:
        await lock_kind(transaction, PREPAID_LOCK)
        sums = Counter[str]()
        for tenant_id, micros in await transaction.execute(
            removal.returning(row.tenant_id, row.cost_micros)
        ):
            sums[tenant_id] += micros
        if sums:
            values = [{"tenant_id": key, "cost_micros": sum_} for key, sum_ in sums.items()]
            await transaction.execute(insert(row), values)
    return bool(sums)
