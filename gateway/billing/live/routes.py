"""Live requests of a tenant: `/admin/tenants/{tenant_id}/live-requests`."""

from typing import Annotated

from fastapi import APIRouter, Query

from gateway.accounts.shared import MAX_CURSOR_CHARACTERS, PRINTABLE, PageSize, TenantId
from gateway.billing.live.schemas import CancelledRequest, LiveRequestList
from gateway.billing.live.service import LiveRequests
from gateway.billing.usage.pages import read_cursor
from gateway.billing.usage.routes import RequestId
from gateway.http.authorization import CanAdminister, CanSeeEverything
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made

router = APIRouter(
    prefix="/tenants/{tenant_id}/live-requests", tags=["Live requests"], route_class=BoundedRoute
)

Live = Annotated[LiveRequests, made(LiveRequests)]
AfterPosition = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=MAX_CURSOR_CHARACTERS,
        pattern=PRINTABLE,
        description="`next` of the previous page; absent: the first page.",
    ),
]


@router.get("", summary="List a tenant's live requests")
async def list_live_requests(
    live: Live,
    _principal: CanSeeEverything,
    tenant_id: TenantId,
    after: AfterPosition = None,
    limit: PageSize = 20,
) -> LiveRequestList:
    """List the requests that wait or run now, oldest first."""
    page = await live.page(tenant_id, after=read_cursor(after), limit=limit)
    return LiveRequestList.of(page)


@router.post("/{request_id}:cancel", summary="Cancel a live request")
async def cancel_live_request(
    live: Live, principal: CanAdminister, tenant_id: TenantId, request_id: RequestId
) -> CancelledRequest:
    """Cancel a request. Its client gets `request_cancelled`; the tenant pays for the work so far.

    The audit log records it. A line of a batch gets 409: cancel the batch.
    """
    has_ended = await live.cancel(tenant_id, request_id, actor=principal.actor)
    return CancelledRequest(id=request_id, has_ended=has_ended)
