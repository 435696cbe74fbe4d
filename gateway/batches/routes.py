"""Batches, as OpenAI's API has them: `/v1/batches`.

Operators list and cancel those of a tenant at `/admin/tenants/{tenant_id}/batches`.
"""

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request

from gateway.accounts.shared import PLAIN, any_tenant
from gateway.batches.files.routes import After, CallerPrincipal, OwnerOfFiles, caller_principal
from gateway.batches.schemas import BatchBody, BatchCreation, BatchList
from gateway.batches.service import BatchService
from gateway.dialects.profile_choice import DIALECT_HEADER, choose_profile
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made, provided
from gateway.platform.database.paging import MAX_PAGE, PageRequest
from gateway.platform.settings import Settings

_of_both = APIRouter(prefix="/batches", tags=["Batches"], route_class=BoundedRoute)
_of_customers = APIRouter(prefix="/batches", tags=["Batches"], route_class=BoundedRoute)


Batches = Annotated[BatchService, made(BatchService)]
BatchId = Annotated[str, Path(description="Id of the batch.")]


@_of_customers.post("", summary="Create a batch")
async def create_batch(
    request: Request,
    settings: Annotated[Settings, provided(Settings)],
    batches: Batches,
    principal: CallerPrincipal,
    body: BatchCreation,
) -> BatchBody:
    """Run the requests of an uploaded file, at the price of the tier batch.

    All lines have the dialect of this request: that of its header, else that of the credential. All
    routes under `/v1/batches` need the scope `completions`. A project credential sees only the
    batches of its project.
    """
    header, expiry = request.headers.get(DIALECT_HEADER), body.output_expires_after
    if header is not None:
        profile = choose_profile(header, principal, model_dialect="", settings=settings)
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


@_of_both.get("", summary="List batches")
async def list_batches(
    batches: Batches,
    owner: OwnerOfFiles,
    after: After = None,
    limit: Annotated[
        int, Query(ge=1, le=MAX_PAGE, description="Maximum entries of one page."), PLAIN
    ] = 20,
) -> BatchList:
    """List batches, newest first."""
    page = await batches.page(owner, PageRequest(after, limit, is_newest_first=True))
    return BatchList.of(page, BatchBody.of)


@_of_both.get("/{batch_id}", summary="Get a batch")
async def get_batch(batches: Batches, owner: OwnerOfFiles, batch_id: BatchId) -> BatchBody:
    """Get a batch with its progress."""
    return BatchBody.of(await batches.get(owner, batch_id))


@_of_both.post("/{batch_id}/cancel", summary="Cancel a batch")
async def cancel_batch(batches: Batches, owner: OwnerOfFiles, batch_id: BatchId) -> BatchBody:
    """Cancel a batch. Lines that have not ended are not charged; the others stay readable."""
    return BatchBody.of(await batches.cancel(owner, batch_id))


customers = APIRouter(prefix="/v1", dependencies=[Depends(caller_principal)])
customers.include_router(_of_both)
customers.include_router(_of_customers)

operators = APIRouter(prefix="/admin/tenants/{tenant_id}", dependencies=[Depends(any_tenant)])
operators.include_router(_of_both)
