"""Rejected requests of all tenants, by reason."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from gateway.accounts.limits import LimitReports, Since
from gateway.console.rendering import page
from gateway.console.routing import OperatorRoute
from gateway.http.services import AllServices

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console/refusals")
async def refusals(
    request: Request,
    services: AllServices,
    *,
    since: Since = "24h",
    tenant: Annotated[str, Query(max_length=100)] = "",
) -> Response:
    """Show how many requests were rejected, by tenant and error code."""
    found = await services.make(LimitReports).refusals_of_tenants(since, tenant or None)
    return page(request, "operators/refusals.html", found=found, since=since, tenant=tenant)
