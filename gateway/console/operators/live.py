"""What a tenant's requests do now, and their cancellation."""

from typing import Final
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from gateway.accounts.shared import TenantId
from gateway.billing.live import AfterPosition, LiveRequests
from gateway.billing.usage.routes import RequestId
from gateway.console.lists import ROWS
from gateway.console.rendering import confirmation, page
from gateway.console.routing import FORM, AnyVisitor, OperatorRoute, SentForm, redirect
from gateway.http.services import AllServices

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


@router.api_route("/{request_id}/cancel", methods=FORM)
async def cancel(
    request: Request,
    services: AllServices,
    visitor: AnyVisitor,
    *,
    tenant_id: TenantId,
    request_id: RequestId,
    form: SentForm,
) -> Response:
    """Ask for confirmation, then cancel a request."""
    service = services.make(LiveRequests)
    if form.is_sent:
        actor = visitor.principal.actor
        has_ended = await service.cancel(tenant_id, request_id, actor=actor)
        return redirect(_path(tenant_id), done="cancelled" if has_ended else "asked")
    live = await service.get(tenant_id, request_id)
    return confirmation(
        request,
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
        back=_path(tenant_id),
    )


def _path(tenant_id: str) -> str:
    return f"/console/tenants/{quote(tenant_id, safe='')}/live"
