"""Adding rows to the ledger, and asking it what limits need to know."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, and_, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.ledger.partitions import make_partitions, month_start
from gateway.accounts.ledger.rows import hour_of
from gateway.accounts.limits import LimitScope
from gateway.accounts.tables import CreditRow, DirtyHourRow, LedgerRow, Table

BATCH: Final = 500
"""Rows that one transaction adds."""
ASKED_AT_ONCE: Final = 5_000
"""Request ids in one query; databases bound the number of parameters."""

_LEDGER = Table.metadata.tables[LedgerRow.__tablename__]


class PeriodUsage(NamedTuple):
    """What was used in a stretch of time."""

    requests: int
    tokens: int
    cost_micros: int


class LedgerStore:
    """Queries on the ledger, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def insert(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Add the rows of requests that are not in the ledger. Return how many they were.

        Of several rows of one request the first counts. The hours of what was added are marked as dirty.
        """
        first = {row["request_id"]: row for row in reversed(rows)}
        if not first:
            return 0
        months = {month_start(row["created_at"]) for row in first.values()}
        await make_partitions(self._transaction, months)
        dialect = self._transaction.get_bind().dialect.name
        add = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(_LEDGER)
        added = await self._transaction.scalars(
            add.on_conflict_do_nothing().returning(_LEDGER.c.created_at),
            # Two who add the same rows meet them in the same order, so one just waits for the other.
            [first[request_id] for request_id in sorted(first)],
        )
        times = list(added)
        await self.mark_dirty({hour_of(time) for time in times})
        return len(times)

    async def mark_dirty(self, hours: Iterable[datetime]) -> None:
        """Have the sums of these hours made anew."""
        marks = [{"hour": hour} for hour in sorted(hours)]
        if marks:
            await self._transaction.execute(insert(DirtyHourRow), marks)

    async def usage_between(
        self, tenant_id: str, scope: LimitScope, holder: str, *, start: datetime, end: datetime
    ) -> PeriodUsage:
        """Return what a tenant, project or key of the tenant used from `start` up to `end`."""
        row = await self._transaction.execute(
            select(
                func.count(),
                func.sum(LedgerRow.prompt_tokens + LedgerRow.completion_tokens),
                func.sum(LedgerRow.cost_micros),
            ).where(
                _is_of(tenant_id, scope, holder),
                LedgerRow.created_at >= start,
                LedgerRow.created_at < end,
            )
        )
        return PeriodUsage(*(int(value or 0) for value in row.one()))

    async def credit(self, tenant_id: str) -> int:
        """Return the tenant's credits less the cost of all its prepaid requests, in micro-dollars."""
        granted = await self._transaction.scalar(
            select(func.sum(CreditRow.amount_micros)).where(CreditRow.tenant_id == tenant_id)
        )
        spent = await self._transaction.scalar(
            select(func.sum(LedgerRow.cost_micros)).where(
                LedgerRow.tenant_id == tenant_id, LedgerRow.is_prepaid
            )
        )
        return int(granted or 0) - int(spent or 0)

    async def known(self, request_ids: Collection[str]) -> set[str]:
        """Return those of the request ids that are in the ledger."""
        found: set[str] = set()
        for some in _chunks(sorted(request_ids)):
            found.update(
                await self._transaction.scalars(
                    select(LedgerRow.request_id).where(LedgerRow.request_id.in_(some))
                )
            )
        return found


def _is_of(tenant_id: str, scope: LimitScope, holder: str) -> ColumnElement[bool]:
    is_tenants = LedgerRow.tenant_id == tenant_id
    match scope:
        case LimitScope.TENANT:
            return is_tenants
        case LimitScope.PROJECT:
            return and_(is_tenants, LedgerRow.project_id == holder)
        case LimitScope.KEY:
            return and_(is_tenants, LedgerRow.credential_id == holder)


def _chunks(values: Sequence[str]) -> Iterator[Sequence[str]]:
    return (values[i : i + ASKED_AT_ONCE] for i in range(0, len(values), ASKED_AT_ONCE))
