"""Exports of the ledger to billing systems, to show, pause and repair: `/admin/exports`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Final, Literal

from fastapi import Path, Query
from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement, case, delete, select, update

from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import Change, changing
from gateway.accounts.routes_common import PLAIN, ListBody, PageSize, RecordBody
from gateway.billing.exports.store import OLDEST_EVENT, ExportBody, ExportStore
from gateway.http.authorization import Operator, operators_router
from gateway.http.services import made
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import Page
from gateway.platform.database.tables import ExportBatchRow, ExportBatchState, ExportSinkRow
from gateway.records.checks import check_known
from gateway.records.errors import NotFoundError, shown
from gateway.records.times import EPOCH, utc_now

MAX_BATCHES: Final = 100
"""Batches of one page."""

_STOPPED: Final = (ExportBatchState.REJECTED, ExportBatchState.UNCERTAIN)


class ExportService:
    """The sinks, and the batches that they have not confirmed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list_all(self) -> list[ExportBody]:
        """Return the states of all sinks that `sluice jobs` has served, by name."""
        async with self._database.reading() as transaction:
            return await ExportStore(transaction).states()

    async def batches(
        self,
        name: str,
        state: ExportBatchState | None = None,
        *,
        after: int = 0,
        limit: int = MAX_BATCHES,
    ) -> list[ExportBatchRow]:
        """Return the batches of a sink, oldest first. Raises NotFoundError."""
        check_known(name, "sink")
        conditions = [ExportBatchRow.sink == name, ExportBatchRow.id > after]
        if state is not None:
            conditions.append(ExportBatchRow.state == state)
        found = select(ExportBatchRow).where(*conditions).order_by(ExportBatchRow.id).limit(limit)
        async with self._database.reading() as transaction:
            if await transaction.get(ExportSinkRow, name) is None:
                raise _no_sink(name)
            return list(await transaction.scalars(found))

    async def pause(self, name: str, *, actor: str = SYSTEM) -> None:
        """Send nothing more to the sink; a request that is under way ends."""
        await self._set_paused(name, utc_now(), "export.pause", actor)

    async def resume(self, name: str, *, actor: str = SYSTEM) -> None:
        """Send again from where the sink was paused or has failed, at once."""
        await self._set_paused(name, None, "export.resume", actor)

    async def retry(self, name: str, batch_id: int | None = None, *, actor: str = SYSTEM) -> int:
        """Send a batch again that is rejected or uncertain; without an id, all rejected ones.

        Return how many. Raises NotFoundError if there is no such batch.
        """
        chosen = [ExportBatchRow.sink == name, ExportBatchRow.state == ExportBatchState.REJECTED]
        if batch_id is not None:
            chosen = _stopped(name, batch_id)
        oldest = utc_now() - OLDEST_EVENT
        retrying = update(ExportBatchRow).where(*chosen).returning(ExportBatchRow.id)
        async with self._changing(name, actor) as change:
            found = await change.transaction.scalars(
                retrying.values(
                    state=ExportBatchState.PENDING,
                    attempts=0,
                    uncertain_since=None,
                    occurred_at=case(
                        (ExportBatchRow.occurred_at < oldest, oldest),
                        else_=ExportBatchRow.occurred_at,
                    ),
                )
            )
            number = len(list(found))
            if batch_id is not None and not number:
                raise _no_batch(batch_id)
            await change.audit("export.retry", name, {"batch": batch_id, "batches": number})
        return number

    async def discard(self, name: str, batch_id: int, *, actor: str = SYSTEM) -> None:
        """Never send a batch that is rejected or uncertain. Raises NotFoundError."""
        found = select(ExportBatchRow).where(*_stopped(name, batch_id)).with_for_update()
        async with self._changing(name, actor) as change:
            row = await change.transaction.scalar(found)
            if row is None:
                raise _no_batch(batch_id)
            await change.transaction.delete(row)
            details = {"batch": batch_id, "event": row.identifier, "cost_micros": row.cost_micros}
            await change.audit("export.discard", name, details, tenant_id=row.tenant_id)

    async def remove(self, name: str, *, actor: str = SYSTEM) -> None:
        """Remove the sink with its batches. If it is still configured, it begins anew."""
        async with self._changing(name, actor) as change:
            removal = delete(ExportSinkRow).where(ExportSinkRow.name == name)
            await change.transaction.execute(removal)
            await ExportStore(change.transaction).remove_exported()
            await change.audit("export.remove", name)

    async def _set_paused(
        self, name: str, paused_at: datetime | None, action: str, actor: str
    ) -> None:
        columns = {"paused_at": paused_at, "failures": 0, "next_attempt_at": EPOCH}
        async with self._changing(name, actor) as change:
            await change.set(ExportSinkRow, ExportSinkRow.name == name, columns)
            await change.audit(action, name)

    @asynccontextmanager
    async def _changing(self, name: str, actor: str) -> AsyncIterator[Change]:
        """Open the unit of work of a change of a sink, which is locked meanwhile."""
        check_known(name, "sink")
        async with changing(self._database, actor=actor) as change:
            if await ExportStore(change.transaction).lock_sink(name) is None:
                raise _no_sink(name)
            yield change


def _stopped(name: str, batch_id: int) -> list[ColumnElement[bool]]:
    is_it = ExportBatchRow.id == batch_id
    return [ExportBatchRow.sink == name, is_it, ExportBatchRow.state.in_(_STOPPED)]


def _no_sink(name: str) -> NotFoundError:
    return NotFoundError(f"There is no sink {shown(name)}.")


def _no_batch(batch_id: int) -> NotFoundError:
    return NotFoundError(f"There is no rejected or uncertain batch {batch_id}.")


class ExportBatchBody(RecordBody):
    """Events that the sink has not confirmed: a sum for Stripe, or requests."""

    object: Literal["export.batch"] = "export.batch"
    id: int
    state: ExportBatchState
    rows: int
    identifier: str = Field(description="Id of the event; empty for several events.")
    tenant_id: str | None
    customer: str
    cost_micros: int | None = Field(description="The sum; null for requests.")
    oldest_at: datetime
    attempts: int
    uncertain_since: datetime | None = Field(
        description="Since this attempt the sink may have stored the batch."
    )
    last_error: str


class ExportRetry(BaseModel):
    """The number of batches that are sent again."""

    object: Literal["export.retry"] = "export.retry"
    batches: int


class DiscardedBatch(BaseModel):
    """A batch that is never sent."""

    object: Literal["export.batch.deleted"] = "export.batch.deleted"
    id: int
    deleted: Literal[True] = True


class RemovedExport(BaseModel):
    """A removed sink."""

    object: Literal["export.deleted"] = "export.deleted"
    name: str
    deleted: Literal[True] = True


router = operators_router("Exports", "/exports")

SinkName = Annotated[str, Path(max_length=63, description="Name of the sink.")]
BatchId = Annotated[int, Path(ge=1, lt=2**63, description="Id of the batch."), PLAIN]


Exports = Annotated[ExportService, made(ExportService)]


@router.get("", summary="List sinks", response_model=ListBody[ExportBody])
async def list_exports(exports: Exports) -> Page[ExportBody]:
    """List the billing systems to which the ledger is exported, and how far it is."""
    return Page(await exports.list_all(), has_more=False)


@router.get(
    "/{name}/batches",
    summary="List the batches of a sink",
    response_model=ListBody[ExportBatchBody],
)
async def list_batches(
    exports: Exports,
    name: SinkName,
    *,
    state: Annotated[
        ExportBatchState | None, Query(description="Only batches in this state.")
    ] = None,
    after: Annotated[int, Query(ge=0, lt=2**63, description="`id` of the last one."), PLAIN] = 0,
    limit: PageSize = 20,
) -> Page[ExportBatchRow]:
    """List what the sink has not confirmed, oldest first."""
    found = await exports.batches(name, state, after=after, limit=limit + 1)
    return Page(found[:limit], has_more=len(found) > limit)


@router.post("/{name}:pause", summary="Pause a sink")
async def pause_export(exports: Exports, operator: Operator, name: SinkName) -> ExportBody:
    """Send nothing more to the sink. What enters the ledger waits for it."""
    await exports.pause(name, actor=operator.actor)
    return await _body(exports, name)


@router.post("/{name}:resume", summary="Resume a sink")
async def resume_export(exports: Exports, operator: Operator, name: SinkName) -> ExportBody:
    """Send to the sink again, at once."""
    await exports.resume(name, actor=operator.actor)
    return await _body(exports, name)


@router.post("/{name}:retry", summary="Retry the rejected batches of a sink")
async def retry_export(exports: Exports, operator: Operator, name: SinkName) -> ExportRetry:
    """Send all rejected batches again."""
    return ExportRetry(batches=await exports.retry(name, actor=operator.actor))


@router.post("/{name}/batches/{batch_id}:retry", summary="Retry a batch")
async def retry_batch(
    exports: Exports, operator: Operator, name: SinkName, batch_id: BatchId
) -> ExportRetry:
    """Send a rejected or uncertain batch again.

    If it is uncertain, first check that the billing system does not have its event.
    """
    return ExportRetry(batches=await exports.retry(name, batch_id, actor=operator.actor))


@router.delete("/{name}/batches/{batch_id}", summary="Discard a batch")
async def discard_batch(
    exports: Exports, operator: Operator, name: SinkName, batch_id: BatchId
) -> DiscardedBatch:
    """Never send a rejected or uncertain batch, because the billing system has its event."""
    await exports.discard(name, batch_id, actor=operator.actor)
    return DiscardedBatch(id=batch_id)


@router.delete("/{name}", summary="Remove a sink")
async def remove_export(exports: Exports, operator: Operator, name: SinkName) -> RemovedExport:
    """Remove a sink that is no longer configured, with its position and batches."""
    await exports.remove(name, actor=operator.actor)
    return RemovedExport(name=name)


async def _body(exports: ExportService, name: str) -> ExportBody:
    [state] = [each for each in await exports.list_all() if each.name == name]
    return state
