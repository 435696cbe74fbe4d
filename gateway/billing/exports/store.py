"""Queries on the tables `usage_positions`, `export_sinks` and `export_batches`."""

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, Field
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    String,
    and_,
    cast,
    delete,
    exists,
    func,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.billing.ledger.store import LedgerStore
from gateway.platform.database.tables import (
    ExportBatchRow,
    ExportBatchState,
    ExportSinkRow,
    LedgerRow,
    PositionRow,
    TenantRow,
)
from gateway.records.times import EPOCH

ROWS_OF_WINDOW: Final = 200_000
"""Positions that one transaction sums up."""
HELD_AT_ONCE: Final = 100
"""Held sums that one transaction releases."""
OLDEST_EVENT: Final = timedelta(days=34)
"""Stripe rejects events that are older than 35 days."""
MAX_ERROR_CHARACTERS: Final = 200
EXPORTED: Final = (ExportBatchState.PENDING, ExportBatchState.UNCERTAIN)

_HOUR_FORMATS: Final = {"postgresql": "YYYYMMDDHH24", "sqlite": "%Y%m%d%H"}
_MONTH_DIGITS: Final = 6


class ExportBatch(NamedTuple):
    """A frozen part of the ledger, to send now."""

    row: ExportBatchRow
    requests: Sequence[LedgerRow]
    """The single requests; none for a sum."""
    was_uncertain: bool
    """Whether the sink may have stored it in an earlier attempt."""


class ExportBody(BaseModel):
    """A sink of the ledger, and how far the export is."""

    object: Literal["export"] = "export"
    name: str
    kind: str
    created_at: datetime = Field(description="The sink gets what entered the ledger since then.")
    paused_at: datetime | None
    lag_rows: int = Field(description="Rows that wait; rejected and held ones do not count.")
    oldest_at: datetime | None = Field(description="End of the oldest request that waits.")
    batches: dict[str, int] = Field(description="Number of batches by state.")
    held_micros: int = Field(description="Cost of tenants without a customer in Stripe.")
    failures: int = Field(
        description="Failed attempts since the last success; of batches sent at once, one counts."
    )
    next_attempt_at: datetime | None = Field(description="Null unless the last attempt failed.")
    last_error: str


class LedgerSpan(NamedTuple):
    """Positions above `after`, up to `upto`."""

    after: int
    upto: int


class ExportStore:
    """Positions, sinks and their batches, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def lock_sink(self, name: str) -> ExportSinkRow | None:
        """Return the sink, locked until the transaction ends, or None if it does not exist."""
        return await self._transaction.scalar(
            select(ExportSinkRow).where(ExportSinkRow.name == name).with_for_update()
        )

    async def register(self, name: str, kind: str, now: datetime) -> ExportSinkRow:
        """Return the locked sink. A new one exports what enters the ledger from now on."""
        if (row := await self.lock_sink(name)) is not None:
            return row
        # Rows whose transactions saw no sink have no position. All of them are committed by now.
        await LedgerStore(self._transaction).lock_positions()
        if (row := await self.lock_sink(name)) is not None:
            return row
        newest = await self._transaction.scalar(select(func.max(PositionRow.position)))
        row = ExportSinkRow(
            name=name,
            kind=kind,
            tag=secrets.token_hex(4),
            position=newest or 0,
            closed_at=now,
            created_at=now,
        )
        self._transaction.add(row)
        await self._transaction.flush()
        return row

    async def freeze_requests(self, sink: ExportSinkRow, limit: int) -> None:
        """Freeze the sink's next requests as one batch, unless another one is pending."""
        pending = select(ExportBatchRow.id).where(_is(sink.name, ExportBatchState.PENDING))
        if await self._transaction.scalar(pending.limit(1)) is not None:
            return
        later = select(PositionRow.position).where(PositionRow.position > sink.position)
        following = later.order_by(PositionRow.position).limit(limit)
        positions = list(await self._transaction.scalars(following))
        if not positions:
            return
        span = LedgerSpan(sink.position, positions[-1])
        self._transaction.add(
            _batch(sink.name, span, rows=len(positions), oldest_at=await self._oldest_end(span))
        )
        sink.position = span.upto
        await self._transaction.flush()

    async def freeze_sums(self, sink: ExportSinkRow, now: datetime, window: timedelta) -> None:
        """At the end of a window, freeze what each postpaid tenant has used in each hour.

        Sums of tenants without a customer are held, one for each month. A sum of 0 is no event.
        """
        if now - sink.closed_at < window:
            return
        newest = await self._transaction.scalar(select(func.max(PositionRow.position)))
        span = LedgerSpan(sink.position, min(newest or 0, sink.position + ROWS_OF_WINDOW))
        if span.upto <= span.after:
            sink.closed_at = now
            return
        for batch in await self._sums(sink, span):
            if batch.customer:
                self._transaction.add(batch)
            else:
                await self._hold(batch)
        sink.position = span.upto
        if span.upto == newest:
            sink.closed_at = now
        await self._transaction.flush()

    async def release_held(self, sink: ExportSinkRow, now: datetime) -> None:
        """Make held sums of tenants that have a customer by now pending."""
        found = await self._transaction.execute(
            select(ExportBatchRow, func.coalesce(TenantRow.stripe_customer_id, ""))
            .join(TenantRow, TenantRow.id == ExportBatchRow.tenant_id)
            .where(_is(sink.name, ExportBatchState.HELD), TenantRow.stripe_customer_id.is_not(None))
            .order_by(ExportBatchRow.id)
            .limit(HELD_AT_ONCE)
        )
        for batch, customer in found.all():
            batch.identifier = f"{batch.identifier}:{batch.upto:x}:{sink.tag}"
            batch.customer = customer
            batch.state = ExportBatchState.PENDING
            batch.occurred_at = max(batch.occurred_at, now - OLDEST_EVENT)
        await self._transaction.flush()

    async def stop_uncertain(self, name: str, before: datetime) -> list[int]:
        """Stop sending batches that have been uncertain since `before`. Return their ids."""
        stopped = await self._transaction.scalars(
            update(ExportBatchRow)
            .where(_is(name, ExportBatchState.PENDING), ExportBatchRow.uncertain_since <= before)
            .values(state=ExportBatchState.UNCERTAIN)
            .returning(ExportBatchRow.id)
        )
        return list(stopped)

    async def take(
        self, name: str, now: datetime, limit: int, *, tenant_id: str = ""
    ) -> list[ExportBatch]:
        """Return the pending batches that were sent least often, at most one for each customer.

        From now on the sink may have stored them. With a tenant, they have only its requests.
        """
        rows = await self._transaction.scalars(
            select(ExportBatchRow)
            .where(_is(name, ExportBatchState.PENDING))
            .order_by(ExportBatchRow.attempts, ExportBatchRow.id)
            .limit(limit)
        )
        found = []
        # Stripe limits concurrent calls to one for each customer and meter.
        for row in {row.customer: row for row in reversed(rows.all())}.values():
            was_uncertain = row.uncertain_since is not None
            row.attempts += 1
            row.uncertain_since = row.uncertain_since or now
            requests: Sequence[LedgerRow] = ()
            if row.cost_micros is None:
                requests = await self._requests(row, tenant_id)
            found.append(ExportBatch(row, requests, was_uncertain))
        await self._transaction.flush()
        return found

    async def delivered(self, batch_id: int) -> None:
        """Remove a batch that the sink has stored."""
        await self._transaction.execute(delete(ExportBatchRow).where(ExportBatchRow.id == batch_id))

    async def rejected(self, name: str, batch: ExportBatch, error: str) -> bool:
        """Divide a batch that the sink has not accepted; put aside a single event.

        Return whether it was put aside.
        """
        row = await self._transaction.scalar(
            select(ExportBatchRow)
            .where(
                ExportBatchRow.id == batch.row.id,
                # Another process may have divided it, if this one has lost its lease.
                ExportBatchRow.upto == batch.row.upto,
                _is(name, ExportBatchState.PENDING),
            )
            .with_for_update()
        )
        if row is None:
            return False
        if not batch.was_uncertain:
            row.uncertain_since = None
        positions = await self._positions(LedgerSpan(row.after, row.upto)) if batch.requests else []
        if len(positions) > 1:
            await self._divide(row, positions)
            return False
        if batch.requests:
            row.identifier = batch.requests[0].request_id
            row.tenant_id = batch.requests[0].tenant_id
        # A sum that was perhaps stored before must not be sent again without a decision.
        is_open = batch.was_uncertain and not batch.requests
        row.state = ExportBatchState.UNCERTAIN if is_open else ExportBatchState.REJECTED
        row.last_error = error[:MAX_ERROR_CHARACTERS]
        await self._transaction.flush()
        return True

    async def remove_exported(self) -> None:
        """Remove the positions that no sink needs any more."""
        least = select(func.min(ExportSinkRow.position)).scalar_subquery()
        is_needed = exists(
            select(ExportBatchRow.id).where(
                ExportBatchRow.cost_micros.is_(None),
                ExportBatchRow.after < PositionRow.position,
                ExportBatchRow.upto >= PositionRow.position,
            )
        )
        await self._transaction.execute(
            delete(PositionRow).where(
                PositionRow.position <= func.coalesce(least, 2**63 - 1), ~is_needed
            )
        )

    async def states(self) -> list[ExportBody]:
        """Return the states of all sinks, by name."""
        newest = await self._transaction.scalar(select(func.max(PositionRow.position)))
        rows = await self._transaction.scalars(select(ExportSinkRow).order_by(ExportSinkRow.name))
        return [await self._state(row, newest or 0) for row in rows.all()]

    async def _state(self, row: ExportSinkRow, newest: int) -> ExportBody:
        counts: dict[str, int] = dict.fromkeys(ExportBatchState, 0)
        waiting, held_micros, ends = max(newest - row.position, 0), 0, []
        if waiting:
            ends.append(await self._oldest_end(LedgerSpan(row.position, newest)))
        for state, count, rows, micros, oldest_at in await self._transaction.execute(
            select(
                ExportBatchRow.state,
                func.count(),
                func.sum(ExportBatchRow.rows),
                func.sum(ExportBatchRow.cost_micros),
                func.min(ExportBatchRow.oldest_at),
            )
            .where(ExportBatchRow.sink == row.name)
            .group_by(ExportBatchRow.state)
        ):
            counts[state] = count
            if state is ExportBatchState.HELD:
                held_micros = int(micros or 0)
            if state in EXPORTED:
                waiting += int(rows)
                ends.append(oldest_at)
        return ExportBody(
            name=row.name,
            kind=row.kind,
            created_at=row.created_at,
            paused_at=row.paused_at,
            lag_rows=waiting,
            oldest_at=min(ends, default=None),
            batches=counts,
            held_micros=held_micros,
            failures=row.failures,
            next_attempt_at=row.next_attempt_at if row.failures else None,
            last_error=row.last_error,
        )

    async def _sums(self, sink: ExportSinkRow, span: LedgerSpan) -> list[ExportBatchRow]:
        dialect = self._transaction.get_bind().dialect.name
        time: Any = LedgerRow.created_at
        if dialect == "postgresql":
            utc = func.timezone("UTC", time)
            hour = func.to_char(utc, _HOUR_FORMATS[dialect], type_=String)
        else:
            hour = func.strftime(_HOUR_FORMATS[dialect], time, type_=String)
        micros = cast(func.sum(LedgerRow.cost_micros), BigInteger)
        found = await self._transaction.execute(
            select(
                LedgerRow.tenant_id,
                hour.label("hour"),
                micros,
                func.count(),
                func.min(LedgerRow.ended_at),
                func.max(LedgerRow.created_at),
                func.max(TenantRow.stripe_customer_id),
            )
            .select_from(PositionRow)
            .join(LedgerRow, _IS_ROW)
            .outerjoin(TenantRow, TenantRow.id == LedgerRow.tenant_id)
            .where(_inside(span), ~LedgerRow.is_prepaid)
            .group_by(LedgerRow.tenant_id, "hour")
            .having(micros != 0)
            .order_by(LedgerRow.tenant_id, "hour")
        )
        batches = []
        for tenant_id, named_hour, cost_micros, rows, oldest_at, newest_at, customer in found:
            # At most 100 characters, as Stripe requires; unique for this sink and span.
            identifier = f"{tenant_id}:{named_hour}:{span.upto:x}:{sink.tag}"
            if customer is None:
                identifier = f"{tenant_id}:{named_hour[:_MONTH_DIGITS]}"
            batches.append(
                _batch(
                    sink.name,
                    span,
                    rows=rows,
                    oldest_at=oldest_at,
                    state=ExportBatchState.PENDING if customer else ExportBatchState.HELD,
                    identifier=identifier,
                    tenant_id=tenant_id,
                    customer=customer or "",
                    cost_micros=cost_micros,
                    occurred_at=newest_at,
                )
            )
        return batches

    async def _hold(self, batch: ExportBatchRow) -> None:
        """Add a sum to the one that is held for the same tenant and month."""
        held = await self._transaction.scalar(
            select(ExportBatchRow).where(
                _is(batch.sink, ExportBatchState.HELD),
                ExportBatchRow.identifier == batch.identifier,
            )
        )
        if held is None:
            self._transaction.add(batch)
        else:
            held.upto = batch.upto
            held.rows += batch.rows
            held.cost_micros = (held.cost_micros or 0) + (batch.cost_micros or 0)
            held.occurred_at = max(held.occurred_at, batch.occurred_at)
        await self._transaction.flush()

    async def _divide(self, row: ExportBatchRow, positions: Sequence[int]) -> None:
        half = len(positions) // 2
        second = _batch(
            row.sink,
            LedgerSpan(positions[half - 1], row.upto),
            rows=len(positions) - half,
            oldest_at=row.oldest_at,
            occurred_at=row.occurred_at,
            uncertain_since=row.uncertain_since,
        )
        row.upto, row.rows = positions[half - 1], half
        self._transaction.add(second)
        await self._transaction.flush()

    async def _positions(self, span: LedgerSpan) -> list[int]:
        found = await self._transaction.scalars(
            select(PositionRow.position).where(_inside(span)).order_by(PositionRow.position)
        )
        return list(found)

    async def _requests(self, row: ExportBatchRow, tenant_id: str) -> list[LedgerRow]:
        query = (
            select(LedgerRow)
            .select_from(PositionRow)
            .join(LedgerRow, _IS_ROW)
            .where(_inside(LedgerSpan(row.after, row.upto)))
        )
        if tenant_id:
            query = query.where(LedgerRow.tenant_id == tenant_id)
        return list(await self._transaction.scalars(query.order_by(PositionRow.position)))

    async def _oldest_end(self, span: LedgerSpan) -> datetime:
        """Return the end of the request at the first of these positions."""
        end = await self._transaction.scalar(
            select(LedgerRow.ended_at)
            .select_from(PositionRow)
            .join(LedgerRow, _IS_ROW)
            .where(_inside(span))
            .order_by(PositionRow.position)
            .limit(1)
        )
        return EPOCH if end is None else end


_IS_ROW: Final = and_(
    LedgerRow.request_id == PositionRow.request_id, LedgerRow.created_at == PositionRow.created_at
)


def _inside(span: LedgerSpan) -> ColumnElement[bool]:
    return and_(PositionRow.position > span.after, PositionRow.position <= span.upto)


def _is(name: str, state: ExportBatchState) -> ColumnElement[bool]:
    return and_(ExportBatchRow.sink == name, ExportBatchRow.state == state)


def _batch(
    sink: str, span: LedgerSpan, *, rows: int, oldest_at: datetime, **columns: Any
) -> ExportBatchRow:
    values = {"occurred_at": oldest_at, **columns}
    return ExportBatchRow(
        sink=sink, after=span.after, upto=span.upto, rows=rows, oldest_at=oldest_at, **values
    )
