"""The audit log of all tenants, and the check of its chain."""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Response

from gateway.accounts.audit.routes import After, Audit, to_list
from gateway.console.customers.account import ACTION_FIELD, CHANGE_COLUMNS
from gateway.console.lists import ROWS
from gateway.console.routing import AnyVisitor, OperatorRoute
from gateway.console.tables import Action, Column, Field, Search

FIELDS: Final = (Field("tenant", "Tenant"), Field("actor", "Who"), ACTION_FIELD)
COLUMNS: Final = (
    *CHANGE_COLUMNS[:4],
    Column("Tenant", lambda each: each.tenant, "wide"),
    *CHANGE_COLUMNS[4:],
)

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console/audit")
async def audit(
    visitor: AnyVisitor,
    log: Audit,
    *,
    tenant: Annotated[str, Query(max_length=100)] = "",
    actor: Annotated[str, Query(max_length=300)] = "",
    action: Annotated[str, Query(max_length=100)] = "",
    after: After = None,
) -> Response:
    """Show changes, newest first."""
    wanted = {"tenant_id": tenant or None, "actor": actor or None, "action": action or None}
    found = await log.page(before=after, limit=ROWS, **wanted)
    return visitor.list_page(
        "Audit log",
        COLUMNS,
        found.entries,
        "There is no entry.",
        label="Changes",
        action=Action("Verify the chain", "/console/audit/verify", is_post=True),
        search=Search(FIELDS, {"tenant": tenant, "actor": actor, "action": action}),
        after=to_list(found, found.entries).next,
    )


@router.post("/console/audit/verify")
async def verify(visitor: AnyVisitor, log: Audit) -> Response:
    """Check the hash of every entry."""
    return visitor.page("operators/audit_state.html", state=await log.verify())
