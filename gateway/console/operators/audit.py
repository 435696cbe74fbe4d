"""The audit log of all tenants, and the check of its chain."""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from gateway.accounts.audit.log import AuditService
from gateway.accounts.audit.routes import After, to_list
from gateway.console.rendering import page
from gateway.console.routing import OperatorRoute
from gateway.http.services import AllServices

ROWS: Final = 50

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console/audit")
async def audit(
    request: Request,
    services: AllServices,
    *,
    tenant: Annotated[str, Query(max_length=100)] = "",
    actor: Annotated[str, Query(max_length=300)] = "",
    action: Annotated[str, Query(max_length=100)] = "",
    after: After = None,
) -> Response:
    """Show changes, newest first."""
    wanted = {"tenant_id": tenant or None, "actor": actor or None, "action": action or None}
    found = await services.make(AuditService).page(before=after, limit=ROWS, **wanted)
    entries = to_list(found, found.entries)
    return page(
        request,
        "operators/audit.html",
        entries=entries.data,
        following=entries.next,
        tenant=tenant,
        actor=actor,
        action=action,
        state=None,
    )


@router.post("/console/audit/verify")
async def verify(request: Request, services: AllServices) -> Response:
    """Check the hash of every entry."""
    state = await services.make(AuditService).verify()
    return page(request, "operators/audit_state.html", state=state)
