"""Batches, as OpenAI's API has them: `/v1/batches`."""

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request

from gateway.auth.principal import Principal
from gateway.batches.schemas import BatchBody, BatchCreation, BatchList
from gateway.batches.service import BatchService
from gateway.database.paging import MAX_PAGE, PageRequest
from gateway.dialects.profile_choice import DIALECT_HEADER, choose_profile
from gateway.files.routes import After, caller_principal, owner_of
from gateway.http.authorization import Context
from gateway.http.bounded_route import BoundedRoute
from gateway.management.shared.parameters import PLAIN

router = APIRouter(prefix="/v1/batches", tags=["Batches"], route_class=BoundedRoute)


def batch_service(context: Context) -> BatchService:
    """Return the batches of this deployment."""
    return BatchService(context.settings, context.database)


Batches = Annotated[BatchService, Depends(batch_service)]
CallerOfBatches = Annotated[Principal, Depends(caller_principal)]
BatchId = Annotated[str, Path(description="Id of the batch.")]


@router.post("", summary="Create a batch")
async def create_batch(
    request: Request,
    context: Context,
    batches: Batches,
    principal: CallerOfBatches,
    body: BatchCreation,
) -> BatchBody:
    """Run the requests of an uploaded file, at the price of the tier batch.

    All lines have the dialect of this request: that of its header, else that of the credential. All
    routes under `/v1/batches` need the scope `completions`. A project credential sees only the
    batches of its project.
    """
    header, expiry = request.headers.get(DIALECT_HEADER), body.output_expires_after
    if header is not None:
        profile = choose_profile(header, principal, model_dialect="", settings=context.settings)
        principal = replace(principal, dialect=profile.name)
    batch = await batches.create(
        principal,
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        labels=body.metadata,
        output_seconds=None if expiry is None else expiry.seconds,
    )
    return BatchBody.of(batch)


@router.get("", summary="List batches")
async def list_batches(
    batches: Batches,
    principal: CallerOfBatches,
    after: After = None,
    limit: Annotated[
        int, Query(ge=1, le=MAX_PAGE, description="Maximum entries of one page."), PLAIN
    ] = 20,
) -> BatchList:
    """List batches, newest first."""
    page = await batches.page(owner_of(principal), PageRequest(after, limit, is_newest_first=True))
    return BatchList.of(page, BatchBody.of)


@router.get("/{batch_id}", summary="Get a batch")
async def get_batch(batches: Batches, principal: CallerOfBatches, batch_id: BatchId) -> BatchBody:
    """Get a batch with its progress."""
    return BatchBody.of(await batches.get(owner_of(principal), batch_id))


@router.post("/{batch_id}/cancel", summary="Cancel a batch")
async def cancel_batch(
    batches: Batches, principal: CallerOfBatches, batch_id: BatchId
) -> BatchBody:
    """Cancel a batch. Lines that have not ended are not charged; the others stay readable."""
    return BatchBody.of(await batches.cancel(owner_of(principal), batch_id))
