"""The audit log of all tenants, and the check of its chain."""

from typing import Annotated, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from gateway.accounts.audit.log import AuditService
from gateway.accounts.audit.routes import After, to_list
from gateway.console.customers.account import ACTION_FIELD, CHANGE_COLUMNS
from gateway.console.lists import ROWS
from gateway.console.rendering import page
from gateway.console.routing import OperatorRoute
from gateway.console.tables import Action, Column, Field, Search, Table
from gateway.http.services import AllServices

FIELDS: Final = (Field("tenant", "Tenant"), Field("actor", "Who"), ACTION_FIELD)
COLUMNS: Final = (
    *CHANGE_COLUMNS[:4],
    Column("Tenant", lambda each: each.tenant, "wide"),
    *CHANGE_COLUMNS[4:],
)

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
    following = to_list(found, found.entries).next
    form = {"tenant": tenant, "actor": actor, "action": action}
    return page(
        request,
        "list.html",
        title="Audit log",
        action=Action("Verify the chain", "/console/audit/verify", is_post=True),
        search=Search(FIELDS, form),
        table=Table("Changes", COLUMNS, found.entries, "There is no entry."),
        following=following and f"/console/audit?{urlencode(form | {'after': following})}",
    )


@router.post("/console/audit/verify")
async def verify(request: Request, services: AllServices) -> Response:
    """Check the hash of every entry."""
    state = await services.make(AuditService).verify()
    return page(request, "operators/audit_state.html", state=state)
