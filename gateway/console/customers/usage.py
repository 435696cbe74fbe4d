"""Usage by day, model, key and project, single requests and their receipts."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response

from gateway.accounts.keys.service import KeyService
from gateway.billing.usage.parts import Dimension, UsageFilter
from gateway.billing.usage.query import decode_cursor, encode_cursor
from gateway.billing.usage.routes import RequestId, own_usage
from gateway.billing.usage.service import UsageService
from gateway.console.charts import bars
from gateway.console.rendering import page
from gateway.console.routing import CustomerRoute, Visitor, needs
from gateway.console.usage_pages import ROWS, receipt_of, requests_file, requests_list, sums_file
from gateway.console.usage_query import UsageQuery, by_dimension, daily
from gateway.http.services import AllServices, Services
from gateway.records.errors import must
from gateway.records.scopes import Scope

VIEWS: Final = (Dimension.MODEL, Dimension.KEY, Dimension.PROJECT)
"""Dimensions of the table; it can also show days."""
BY_DAY: Final = "day"

router = APIRouter(route_class=CustomerRoute, include_in_schema=False)

SeesUsage = Annotated[Visitor, Depends(needs(Scope.USAGE, Scope.COMPLETIONS))]


@router.get("/console/usage")
async def usage(request: Request, services: AllServices, visitor: SeesUsage) -> Response:
    """Show sums of a period as charts and a table."""
    query = UsageQuery(request)
    service = services.make(UsageService)
    wanted = own_usage(visitor.principal, query.wanted)
    points = await daily(service, wanted, query.span)
    by = query.form["by"] or Dimension.MODEL
    if by == BY_DAY:
        rows, following = [(point.day, point.sums) for point in reversed(points)], None
    else:
        rows, following = await by_dimension(
            service,
            wanted,
            query.span,
            _dimension(by),
            after=decode_cursor(query.after, parts=2),
            limit=ROWS,
        )
    names = await _names(services, visitor, by, [value for value, _ in rows])
    return page(
        request,
        "usage.html",
        query=query,
        by=by,
        views=[*((each, each.replace("_", " ").capitalize()) for each in VIEWS), (BY_DAY, "Day")],
        rows=rows,
        names=names,
        spend=bars([point.of_cost() for point in points]),
        tokens=bars([point.of_tokens() for point in points]),
        following=following and query.link("/console/usage", after=encode_cursor(*following)),
    )


@router.get("/console/usage.csv")
async def usage_csv(request: Request, services: AllServices, visitor: SeesUsage) -> Response:
    """Return the sums of each day and each value of a dimension as CSV."""
    query = UsageQuery(request)
    by = query.form["by"] or Dimension.MODEL
    dimensions = () if by == BY_DAY else (_dimension(by),)
    return sums_file(services, query, own_usage(visitor.principal, query.wanted), dimensions)


@router.get("/console/requests")
async def requests(request: Request, services: AllServices, visitor: SeesUsage) -> Response:
    """List single requests, newest first."""
    query = UsageQuery(request)
    return await requests_list(request, services, query, own_usage(visitor.principal, query.wanted))


@router.get("/console/requests.csv")
async def all_requests_csv(request: Request, services: AllServices, visitor: SeesUsage) -> Response:
    """Return all requests of a period as CSV, newest first."""
    query = UsageQuery(request)
    return requests_file(services, query, own_usage(visitor.principal, query.wanted))


@router.get("/console/requests/{request_id}")
async def receipt(
    request: Request, services: AllServices, visitor: SeesUsage, request_id: RequestId
) -> Response:
    """Show the receipt of one request."""
    wanted = own_usage(visitor.principal, UsageFilter(tenant_id=None))
    return await receipt_of(request, services, wanted, request_id)


def _dimension(by: str) -> Dimension:
    if by not in VIEWS:
        raise must("by", f"be {BY_DAY} or one of {', '.join(VIEWS)}", by)
    return Dimension(by)


async def _names(services: Services, visitor: Visitor, by: str, ids: list[str]) -> dict[str, str]:
    """Return the names of keys, for visitors who may list them."""
    if by != Dimension.KEY or not visitor.has(Scope.KEYS):
        return {}
    return await services.make(KeyService).names(
        visitor.tenant_id, ids, grantor=visitor.principal.grant
    )
