"""Exports of the ledger to billing systems: `/admin/exports`."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from gateway.accounts.shared import PLAIN, PageSize
from gateway.billing.exports.schemas import (
    DiscardedBatch,
    ExportBatchList,
    ExportBody,
    ExportList,
    ExportRetry,
    RemovedExport,
)
from gateway.billing.exports.service import ExportService
from gateway.http.authorization import CanAdminister, CanSeeEverything
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made
from gateway.platform.database.paging import Page
from gateway.platform.database.tables import ExportBatchState

router = APIRouter(prefix="/exports", tags=["Exports"], route_class=BoundedRoute)

SinkName = Annotated[str, Path(max_length=63, description="Name of the sink.")]
BatchId = Annotated[int, Path(ge=1, lt=2**63, description="Id of the batch."), PLAIN]


Exports = Annotated[ExportService, made(ExportService)]


@router.get("", summary="List sinks")
async def list_exports(exports: Exports, _principal: CanSeeEverything) -> ExportList:
    """List the billing systems to which the ledger is exported, and how far it is."""
    return ExportList.of(Page(await exports.list_all(), has_more=False))


@router.get("/{name}/batches", summary="List the batches of a sink")
async def list_batches(
    exports: Exports,
    _principal: CanSeeEverything,
    name: SinkName,
    *,
    state: Annotated[
        ExportBatchState | None, Query(description="Only batches in this state.")
    ] = None,
    after: Annotated[int, Query(ge=0, lt=2**63, description="`id` of the last one."), PLAIN] = 0,
    limit: PageSize = 20,
) -> ExportBatchList:
    """List what the sink has not confirmed, oldest first."""
    found = await exports.batches(name, state, after=after, limit=limit + 1)
    return ExportBatchList.of(Page(list[object](found[:limit]), has_more=len(found) > limit))


@router.post("/{name}:pause", summary="Pause a sink")
async def pause_export(exports: Exports, principal: CanAdminister, name: SinkName) -> ExportBody:
    """Send nothing more to the sink. What enters the ledger waits for it."""
    await exports.pause(name, actor=principal.actor)
    return await _body(exports, name)


@router.post("/{name}:resume", summary="Resume a sink")
async def resume_export(exports: Exports, principal: CanAdminister, name: SinkName) -> ExportBody:
    """Send to the sink again, at once."""
    await exports.resume(name, actor=principal.actor)
    return await _body(exports, name)


@router.post("/{name}:retry", summary="Retry the rejected batches of a sink")
async def retry_export(exports: Exports, principal: CanAdminister, name: SinkName) -> ExportRetry:
    """Send all rejected batches again."""
    return ExportRetry(batches=await exports.retry(name, actor=principal.actor))


@router.post("/{name}/batches/{batch_id}:retry", summary="Retry a batch")
async def retry_batch(
    exports: Exports, principal: CanAdminister, name: SinkName, batch_id: BatchId
) -> ExportRetry:
    """Send a rejected or uncertain batch again.

    If it is uncertain, first check that the billing system does not have its event.
    """
    return ExportRetry(batches=await exports.retry(name, batch_id, actor=principal.actor))


@router.delete("/{name}/batches/{batch_id}", summary="Discard a batch")
async def discard_batch(
    exports: Exports, principal: CanAdminister, name: SinkName, batch_id: BatchId
) -> DiscardedBatch:
    """Never send a rejected or uncertain batch, because the billing system has its event."""
    await exports.discard(name, batch_id, actor=principal.actor)
    return DiscardedBatch(id=batch_id)


@router.delete("/{name}", summary="Remove a sink")
async def remove_export(
    exports: Exports, principal: CanAdminister, name: SinkName
) -> RemovedExport:
    """Remove a sink that is no longer configured, with its position and batches."""
    await exports.remove(name, actor=principal.actor)
    return RemovedExport(name=name)


async def _body(exports: ExportService, name: str) -> ExportBody:
    [state] = [each for each in await exports.list_all() if each.name == name]
    return ExportBody.of(state)
