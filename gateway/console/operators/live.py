"""What a tenant's requests do now, and their cancellation."""

from typing import Final
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from gateway.accounts.shared import TenantId
from gateway.billing.live import AfterPosition, LiveRequests
from gateway.billing.usage.routes import RequestId
from gateway.console.rendering import confirmation, page
from gateway.console.routing import AnyVisitor, OperatorRoute, redirect
from gateway.http.services import AllServices

ROWS: Final = 50
NOTICES: Final = {
    "cancelled": "The request is cancelled.",
    "asked": "The gateway of the request does not react. The request ends when another gateway or "
    "the sweep finds it.",
}

router = APIRouter(
    prefix="/console/tenants/{tenant_id}/live", route_class=OperatorRoute, include_in_schema=False
)


@router.get("")
async def list_live(
    request: Request, services: AllServices, tenant_id: TenantId, *, after: AfterPosition = None
) -> Response:
    """List the tenant's live requests, oldest first; htmx loads the first page again and again."""
    found = await services.make(LiveRequests).page(tenant_id, after=after, limit=ROWS)
    home, cursor = _path(tenant_id), found.next
    return page(
        request,
        "operators/live.html",
        tenant_id=tenant_id,
        home=home,
        requests=found.data,
        total=found.total,
        is_complete=found.is_complete,
        is_first=after is None,
        following=cursor and f"{home}?after={cursor}",
        notices=NOTICES,
    )


@router.get("/{request_id}/cancel")
async def ask_to_cancel(
    request: Request, services: AllServices, tenant_id: TenantId, request_id: RequestId
) -> Response:
    """Ask for confirmation."""
    live = await services.make(LiveRequests).get(tenant_id, request_id)
    return confirmation(
        request,
        _path(tenant_id),
        f"{quote(live.id, safe='')}/cancel",
        title="Cancel the request?",
        facts={
            "Request": live.id,
            "Tenant": live.tenant,
            "Key": live.key,
            "Model": live.model,
            "State": f"{live.state} for {live.age_ms / 1000:.1f} s",
        },
        text="Its client gets the error request_cancelled. The tenant pays for the work so far.",
        button="Cancel the request",
    )


@router.post("/{request_id}/cancel")
async def cancel(
    services: AllServices, visitor: AnyVisitor, tenant_id: TenantId, request_id: RequestId
) -> Response:
    """Cancel a request."""
    has_ended = await services.make(LiveRequests).cancel(
        tenant_id, request_id, actor=visitor.principal.actor
    )
    return redirect(_path(tenant_id), done="cancelled" if has_ended else "asked")


def _path(tenant_id: str) -> str:
    return f"/console/tenants/{quote(tenant_id, safe='')}/live"
