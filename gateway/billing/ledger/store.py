"""Ledger store: insert usage rows and query them for limits."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import bindparam, case, exists, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.billing.credits.service import balance_of
from gateway.limits.counters import Period
from gateway.limits.seeding import Balances, Recorded
from gateway.platform.database.claims import lock_kind
from gateway.platform.database.engine import Database
from gateway.platform.database.holders import counted_by
from gateway.platform.database.partitions import make_partitions
from gateway.platform.database.tables import (
    IS_FIRST,
    LATE,
    DirtyHourRow,
    ExportSinkRow,
    LedgerRow,
    PositionRow,
    Table,
)
from gateway.records.limits import SubjectLimits
from gateway.records.times import hour_of, month_start, to_time
from gateway.records.usage_record import Counts, Outcome

BATCH: Final = 500
"""Rows that one transaction inserts."""
MOST_LATE: Final = 9
"""Rows that are added to the first one of a request."""
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

    async def insert(
        self, rows: Sequence[Mapping[str, Any]], *, lines: Collection[str] = ()
    ) -> int:
        """Insert the rows of requests that are not in the ledger. Return how many are new.

        Several rows of one request count once, in any order: a gateway may settle a request that
        another gateway or the sweep has settled, with less, before. If a later row is not of a lost
        request while earlier ones are, or if the tenant pays for more, the difference is added
        under a separate id. The hours of the new rows are marked as dirty.

        The ids `lines` are those of lines of batches, which may have run before, at another time.
        """
        if lines:
            rows = await self._at_first_times(rows, lines)
        first = {row["request_id"]: row for row in reversed(rows)}
        if not first:
            return 0
        added = await self._add(first)
        again = [
            row
            for row in rows
            if row["request_id"] not in added or row is not first[row["request_id"]]
        ]
        late = await self._add(await self._late(again))
        times = [*added.values(), *late.values()]
        await self.mark_dirty({hour_of(time) for time in times})
        await self._number({**added, **late})
        return len(times)

    async def _at_first_times(
        self, rows: Sequence[Mapping[str, Any]], lines: Collection[str]
    ) -> list[Mapping[str, Any]]:
        """Return rows of lines with the times of their first runs: the time is part of the key."""
        await self.lock_positions()  # Another transaction may insert a first run.
        found = await self._transaction.execute(
            select(_LEDGER.c.request_id, _LEDGER.c.created_at).where(
                _LEDGER.c.request_id.in_(lines)
            )
        )
        times = {row.request_id: row.created_at for row in found}
        return [
            {**row, "created_at": times.setdefault(row["request_id"], row["created_at"])}
            if row["request_id"] in lines
            else row
            for row in rows
        ]

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

    async def _late(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return what rows have more than earlier ones of their requests, by separate ids."""
        known, late = await self._rows_of({row["request_id"] for row in rows}), {}
        for row in rows:
            earlier = known[row["request_id"]]
            more = _difference(row, earlier)
            is_first_end = row["outcome"] is not Outcome.LOST and all(
                each["outcome"] is Outcome.LOST for each in earlier
            )
            if len(earlier) <= MOST_LATE and (is_first_end or _is_more(more)):
                earlier.append(more)
                late[more["request_id"]] = more
        return late

    async def _rows_of(
        self, request_ids: Collection[str]
    ) -> defaultdict[str, list[Mapping[str, Any]]]:
        """Return the rows of requests: the first one, and those added later."""
        rows = defaultdict[str, list[Mapping[str, Any]]](list)

        async def read(ids: Mapping[str, str]) -> None:
            for some in _chunks(sorted(ids)):
                found = await self._transaction.execute(
                    select(_LEDGER).where(_LEDGER.c.request_id.in_(some))
                )
                for row in found.mappings():
                    rows[ids[row["request_id"]]].append(dict(row))

        await read({request_id: request_id for request_id in request_ids})
        await read({_late_id(first, n + 1): first for first in rows for n in range(MOST_LATE)})
        return rows

    async def mark_dirty(self, hours: Iterable[datetime]) -> None:
        """Mark these hours, so that their sums are computed again."""
        marks = [{"hour": hour} for hour in sorted(hours)]
        if marks:
            await self._transaction.execute(insert(DirtyHourRow), marks)

    async def usage_between(
        self, tenant_id: str, subject: SubjectLimits, *, start: datetime, end: datetime
    ) -> PeriodUsage:
        """Return what a holder of limits of a tenant counts, from `start` up to `end`."""
        row = await self._transaction.execute(
            select(
                func.count(case((IS_FIRST, 1))),
                func.sum(LedgerRow.prompt_tokens + LedgerRow.completion_tokens),
                func.sum(LedgerRow.audio_seconds),
                func.sum(LedgerRow.cost_micros),
            ).where(
                counted_by(tenant_id, subject),
                LedgerRow.created_at >= start,
                LedgerRow.created_at < end,
            )
        )
        return PeriodUsage(*(int(value or 0) for value in row.one()))

    async def known(self, request_ids: Collection[str]) -> dict[str, Recorded]:
        """Return the usage of those of the given requests that are in the ledger."""
        return {
            request_id: Recorded(
                sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows),
                sum(row["audio_seconds"] for row in rows),
                sum(row["cost_micros"] for row in rows),
            )
            for request_id, rows in (await self._rows_of(request_ids)).items()
        }


def _chunks(values: Sequence[str]) -> Iterator[Sequence[str]]:
    return (values[i : i + ASKED_AT_ONCE] for i in range(0, len(values), ASKED_AT_ONCE))


def _late_id(request_id: str, number: int) -> str:
    return f"{request_id}{LATE}{number if number > 1 else ''}"


def _difference(row: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of a request minus its earlier rows."""
    late = {**row, "request_id": _late_id(row["request_id"], len(earlier))}
    for name in Counts._fields:
        free = f"free_{name}"
        before = sum(each[name] for each in earlier)
        paid = row[name] - row[free] - before + sum(each[free] for each in earlier)
        late[name] = max(row[name] - before, 0)
        # Negative if tokens that were free are now paid.
        late[free] = late[name] - paid
    if any(each["first_token_ms"] for each in earlier):
        late["first_token_ms"] = 0
    late["cost_micros"] = row["cost_micros"] - sum(each["cost_micros"] for each in earlier)
    return late


def _is_more(row: Mapping[str, Any]) -> bool:
    # More tokens in a cache are no more usage.
    names = set(Counts._fields) - {"cached_tokens"}
    paid: list[int] = [row["cost_micros"], *(row[name] - row[f"free_{name}"] for name in names)]
    return min(paid) >= 0 and max(paid) > 0


async def read_balances(
    database: Database,
    tenant_id: str,
    subject: SubjectLimits,
    *,
    day_start_ms: int,
    period: Period,
    request_ids: Collection[str],
) -> Balances:
    """Return a subject's counters from the ledger and the credits (see `ReadBalances`)."""
    day = to_time(day_start_ms)
    spans = (day, day + timedelta(days=1)), (to_time(period.start_ms), to_time(period.end_ms))
    async with database.snapshot() as transaction:
        store = LedgerStore(transaction)
        today, this_month = [
            await store.usage_between(tenant_id, subject, start=start, end=end)
            for start, end in spans
        ]
        has_credit = subject.has_credit
        return Balances(
            requests_today=today.requests,
            tokens_today=today.tokens,
            audio_seconds_today=today.audio_seconds,
            cost_this_month=this_month.cost_micros,
            credit_micros=(await balance_of(transaction, tenant_id)).micros if has_credit else None,
            known=await store.known(request_ids),
        )
