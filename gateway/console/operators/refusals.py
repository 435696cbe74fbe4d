"""Rejected requests of all tenants, by reason."""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Response

from gateway.accounts.limits import RefusalCount, Reports, Since
from gateway.console.routing import AnyVisitor, OperatorRoute
from gateway.console.tables import Cell, Column, Field, Search
from gateway.console.visitor import tenant_path

FIELDS: Final = (
    Field("since", "Period", options=[("24h", "24 hours"), ("7d", "7 days")]),
    Field("tenant", "Tenant"),
)
TEXT: Final = (
    "Requests that gateways rejected before any work, by the code of the error. The current hour "
    "or day is included; times are in UTC."
)
PARTIAL: Final = " Small numbers are missing: choose a tenant to see all of its own."

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


def _tenant(each: RefusalCount) -> Cell:
    return Cell(each.tenant, tenant_path(each.tenant)) if each.tenant else Cell("unknown")


COLUMNS: Final = (
    Column("Tenant", _tenant),
    Column("Reason", lambda each: each.code, "mono"),
    Column("Requests", lambda each: each.requests, "num"),
)


@router.get("/console/refusals")
async def refusals(
    visitor: AnyVisitor,
    reports: Reports,
    since: Since = "24h",
    tenant: Annotated[str, Query(max_length=100)] = "",
) -> Response:
    """Show how many requests were rejected, by tenant and error code."""
    found = await reports.refusals_of_tenants(since, tenant or None)
    return visitor.list_page(
        "Rejected requests",
        COLUMNS,
        found.data,
        "No request was rejected in this period.",
        search=Search(FIELDS, {"since": since, "tenant": tenant}),
        text=TEXT if found.is_complete else TEXT + PARTIAL,
    )
