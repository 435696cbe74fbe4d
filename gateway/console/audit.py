"""The audit log: customers see their tenant's changes, operators all and the check of its chain."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Response

from gateway.accounts.audit.routes import MAX_SEQUENCE, After, Audit, own_entries, to_list
from gateway.console.formats import details
from gateway.console.lists import ROWS
from gateway.console.routing import AnyVisitor, CustomerRoute, OperatorRoute, needs
from gateway.console.tables import Action, Column, Field, Search
from gateway.console.visitor import Visitor
from gateway.records.scopes import Scope

HOME: Final = "/console/audit"
ACTION: Final = Field("action", "Action", placeholder="key.revoke")
FIELDS: Final = (Field("tenant", "Tenant"), Field("actor", "Who"), ACTION)
ALL_COLUMNS: Final = (
    Column("Time (UTC)", lambda each: each.at, "time"),
    Column("Action", lambda each: each.action),
    Column("Number", lambda each: each.sequence, "num wide"),
    Column("Who", lambda each: each.actor, "mono wide"),
    Column("Tenant", lambda each: each.tenant, "wide"),
    Column("Object", lambda each: each.subject, "mono wide"),
    Column("New values", lambda each: details(each.details), "below"),
)
OWN_COLUMNS: Final = (*ALL_COLUMNS[:4], *ALL_COLUMNS[5:])

customers = APIRouter(route_class=CustomerRoute, include_in_schema=False)
operators = APIRouter(route_class=OperatorRoute, include_in_schema=False)

SeesAudit = Annotated[Visitor, Depends(needs(Scope.MEMBERS, whole=True))]


@customers.get(HOME)
async def list_own(
    visitor: SeesAudit,
    log: Audit,
    action: Annotated[str, Query(max_length=100)] = "",
    after: Annotated[int | None, Query(ge=1, le=MAX_SEQUENCE)] = None,
) -> Response:
    """Show changes of the tenant, newest first."""
    wanted = action or None
    found = await own_entries(log, visitor.principal, action=wanted, after=after, limit=ROWS)
    return visitor.list_page(
        "Audit log",
        OWN_COLUMNS,
        found.data,
        "There is no entry.",
        label="Changes",
        search=Search([ACTION], {"action": action}),
        after=found.next,
        is_log=True,
    )


@operators.get(HOME)
async def list_all(
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
        ALL_COLUMNS,
        found.entries,
        "There is no entry.",
        label="Changes",
        action=Action("Verify the chain", f"{HOME}/verify", is_post=True),
        search=Search(FIELDS, {"tenant": tenant, "actor": actor, "action": action}),
        after=to_list(found, found.entries).next,
        is_log=True,
    )


@operators.post(f"{HOME}/verify")
async def verify(visitor: AnyVisitor, log: Audit) -> Response:
    """Check the hash of every entry."""
    return visitor.page("operators/audit_state.html", state=await log.verify())
