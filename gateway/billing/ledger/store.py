"""Ledger store: insert usage rows and query them for limits."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import bindparam, exists, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.billing.credits.service import balance_of
from gateway.limits.seeding import Balances
from gateway.platform.database.claims import lock_kind
from gateway.platform.database.engine import Database
from gateway.platform.database.holders import held_by
from gateway.platform.database.partitions import make_partitions
from gateway.platform.database.tables import (
    DirtyHourRow,
    ExportSinkRow,
    LedgerRow,
    PositionRow,
    Table,
)
from gateway.records.limits import LimitScope, SubjectLimits
from gateway.records.times import hour_of, month_start, next_month, to_time
from gateway.records.usage_record import Counts, Outcome

BATCH: Final = 500
"""Rows that one transaction inserts."""
LATE: Final = ".late"
"""Suffix of the id of usage settled after its request was settled as lost."""
ASKED_AT_ONCE: Final = 5_000
"""Request ids per query; databases limit the number of parameters."""

POSITION_LOCK: Final = 7_585_427
"""PostgreSQL advisory lock under which rows get their positions, until the commit."""

_LEDGER = Table.metadata.tables[LedgerRow.__tablename__]


class PeriodUsage(NamedTuple):
    """Usage in a period."""

    requests: int
    tokens: int
    audio_seconds: int
    cost_micros: int


class LedgerStore:
    """Queries on the ledger, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def insert(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Insert the rows of requests that are not in the ledger. Return how many are new.

        Of several rows of one request the first counts. There is one exception: a gateway may
        settle a request after a sweep settled it as lost. The gateway was alive, and may have
        delivered everything, so the difference is added under a separate id. If the later row is
        of a lost request too, it is added only if the tenant pays for more. The hours of the new
        rows are marked as dirty.
        """
        first = {row["request_id"]: row for row in reversed(rows)}
        if not first:
            return 0
        added = await self._add(first)
        again = [row for row in rows if row is not first[row["request_id"]]]
        again += [row for request_id, row in first.items() if request_id not in added]
        late = await self._add(await self._late(again))
        times = [*added.values(), *late.values()]
        await self.mark_dirty({hour_of(time) for time in times})
        await self._number({**added, **late})
        return len(times)

    async def lock_positions(self) -> None:
        """Block other transactions that number rows, until this one ends."""
        await lock_kind(self._transaction, POSITION_LOCK)

    async def _number(self, added: Mapping[str, datetime]) -> None:
        """Give new rows their positions, if a sink exports the ledger."""
        rows = [{"request_id": id_, "created_at": time} for id_, time in added.items()]
        if not rows:
            return
        await self.lock_positions()
        if await self._transaction.scalar(select(exists(select(ExportSinkRow.name)))):
            await self._transaction.execute(insert(PositionRow), rows)

    async def _add(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, datetime]:
        """Insert the rows that are new. Return their times by request id."""
        if not rows:
            return {}
        months = {month_start(row["created_at"]) for row in rows.values()}
        await make_partitions(self._transaction, months)
        # Sorted, so that two transactions that insert the same rows wait for each other without
        # deadlock.
        in_order = [rows[request_id] for request_id in sorted(rows)]
        new = _LEDGER.c.request_id, _LEDGER.c.created_at
        if self._transaction.get_bind().dialect.name == "postgresql":
            # An array for each column: one parameter for each value would be 17,000.
            names = list(in_order[0])
            arrays = (
                bindparam(
                    name, [row[name] for row in in_order], postgresql.ARRAY(_LEDGER.c[name].type)
                )
                for name in names
            )
            source = select(*map(func.unnest, arrays))
            add = postgresql.insert(_LEDGER).from_select(names, source)
            added = await self._transaction.execute(add.on_conflict_do_nothing().returning(*new))
        else:
            each = sqlite.insert(_LEDGER).on_conflict_do_nothing().returning(*new)
            added = await self._transaction.execute(each, in_order)
        return {row.request_id: row.created_at for row in added}

    async def _late(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the additional usage in rows of requests that were settled as lost."""
        # Of several rows of a request, one that is not lost counts.
        in_order = sorted(rows, key=lambda row: row["outcome"] is not Outcome.LOST)
        found = {row["request_id"]: row for row in in_order}
        if not found:
            return {}
        lost = await self._transaction.scalars(
            select(LedgerRow).where(
                LedgerRow.request_id.in_(found), LedgerRow.outcome == Outcome.LOST
            )
        )
        late = [_difference(found[row.request_id], row) for row in lost]
        return {
            row["request_id"]: row
            for row in late
            if row["outcome"] is not Outcome.LOST or _is_more(row)
        }

    async def mark_dirty(self, hours: Iterable[datetime]) -> None:
        """Mark these hours, so that their sums are computed again."""
        marks = [{"hour": hour} for hour in sorted(hours)]
        if marks:
            await self._transaction.execute(insert(DirtyHourRow), marks)

    async def usage_between(
        self, tenant_id: str, scope: LimitScope, holder: str, *, start: datetime, end: datetime
    ) -> PeriodUsage:
        """Return the usage of a tenant, or of its project or key, from `start` up to `end`."""
        row = await self._transaction.execute(
            select(
                func.count(),
                func.sum(LedgerRow.prompt_tokens + LedgerRow.completion_tokens),
                func.sum(LedgerRow.audio_seconds),
                func.sum(LedgerRow.cost_micros),
            ).where(
                held_by(LedgerRow, tenant_id, scope, holder),
                LedgerRow.created_at >= start,
                LedgerRow.created_at < end,
            )
        )
        return PeriodUsage(*(int(value or 0) for value in row.one()))

    async def known(self, request_ids: Collection[str]) -> set[str]:
        """Return the given request ids that are in the ledger."""
        found: set[str] = set()
        for some in _chunks(sorted(request_ids)):
            found.update(
                await self._transaction.scalars(
                    select(LedgerRow.request_id).where(LedgerRow.request_id.in_(some))
                )
            )
        return found


def _chunks(values: Sequence[str]) -> Iterator[Sequence[str]]:
    return (values[i : i + ASKED_AT_ONCE] for i in range(0, len(values), ASKED_AT_ONCE))


def _difference(row: Mapping[str, Any], lost: LedgerRow) -> dict[str, Any]:
    """Return the row of a request minus its row that was settled as lost."""
    late = {**row, "request_id": f"{lost.request_id}{LATE}"}
    for name in Counts._fields:
        free = f"free_{name}"
        paid = (row[name] - row[free]) - (getattr(lost, name) - getattr(lost, free))
        late[name] = max(row[name] - getattr(lost, name), 0)
        # Negative if tokens that were free are now paid.
        late[free] = late[name] - paid
    late["cost_micros"] = row["cost_micros"] - lost.cost_micros
    return late


def _is_more(row: Mapping[str, Any]) -> bool:
    paid: list[int] = [row[name] - row[f"free_{name}"] for name in Counts._fields]
    return min(paid) >= 0 and max(paid) > 0


async def read_balances(
    database: Database,
    tenant_id: str,
    subject: SubjectLimits,
    *,
    day_start_ms: int,
    month_start_ms: int,
    request_ids: Collection[str],
) -> Balances:
    """Return a subject's counters from the ledger and the credits (see `ReadBalances`)."""
    day, month = to_time(day_start_ms), to_time(month_start_ms)
    spans = (day, day + timedelta(days=1)), (month, next_month(month))
    async with database.snapshot() as transaction:
        store = LedgerStore(transaction)
        today, this_month = [
            await store.usage_between(tenant_id, subject.scope, subject.id, start=start, end=end)
            for start, end in spans
        ]
        has_credit = subject.scope is LimitScope.TENANT
        return Balances(
            requests_today=today.requests,
            tokens_today=today.tokens,
            audio_seconds_today=today.audio_seconds,
            cost_this_month=this_month.cost_micros,
            credit_micros=(await balance_of(transaction, tenant_id)).micros if has_credit else None,
            known_ids=await store.known(request_ids),
        )
