"""Usage by day, model, key and project, single requests and their receipts."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response

from gateway.billing.usage.parts import Dimension, UsageFilter
from gateway.billing.usage.query import decode_cursor
from gateway.billing.usage.routes import RequestId, own_usage
from gateway.billing.usage.service import UsageService
from gateway.console.charts import COST, TOKENS
from gateway.console.routing import CustomerRoute, Visitor, needs
from gateway.console.usage_pages import (
    ROWS,
    key_names,
    receipt_of,
    requests_file,
    requests_list,
    sums_file,
    sums_page,
)
from gateway.console.usage_query import UsageQuery, by_dimension, by_period, cost, tokens
from gateway.http.services import AllServices
from gateway.records.errors import must
from gateway.records.scopes import Scope

VIEWS: Final = (Dimension.MODEL, Dimension.KEY, Dimension.PROJECT)
"""Dimensions of charts and table; the table can also show days or hours."""
BY_PERIOD: Final = "period"

router = APIRouter(route_class=CustomerRoute, include_in_schema=False)

SeesUsage = Annotated[Visitor, Depends(needs(Scope.USAGE, Scope.COMPLETIONS))]


@router.get("/console/usage")
async def usage(request: Request, services: AllServices, visitor: SeesUsage) -> Response:
    """Show sums of a period as charts and a table."""
    query = UsageQuery(request)
    service = services.make(UsageService)
    wanted = own_usage(visitor.principal, query.wanted)
    by = query.form["by"] or Dimension.MODEL
    dimension = None if by == BY_PERIOD else _dimension(by)
    views = [*((each, each.capitalize()) for each in VIEWS), (BY_PERIOD, "Day or hour")]
    if query.error is not None:
        return await sums_page(request, services, visitor, query, by=by, views=views)
    following = None
    if dimension is None:
        periods = await by_period(service, wanted, query.span)
        rows = [*zip(reversed(periods.names), reversed(periods.sums), strict=True)]
    else:
        after = decode_cursor(query.after, parts=2)
        periods, (rows, following) = await asyncio.gather(
            by_period(service, wanted, query.span, dimension),
            by_dimension(service, wanted, query.span, dimension, after=after, limit=ROWS),
        )
    names: Mapping[str, str] = {}
    if dimension is Dimension.KEY:
        ids = {*periods.parts, *(value for value, _ in rows)}
        names = await key_names(services, visitor, ids)
    return await sums_page(
        request,
        services,
        visitor,
        query,
        by=by,
        views=views,
        rows=rows,
        names=names,
        charts=[
            periods.chart("Cost", COST, cost, names),
            periods.chart("Tokens", TOKENS, tokens, names),
        ],
        following=following,
    )


@router.get("/console/usage.csv")
async def usage_csv(request: Request, services: AllServices, visitor: SeesUsage) -> Response:
    """Return the sums of each day and each value of a dimension as CSV."""
    query = UsageQuery(request)
    by = query.form["by"] or Dimension.MODEL
    dimensions = () if by == BY_PERIOD else (_dimension(by),)
    return sums_file(services, query, own_usage(visitor.principal, query.wanted), dimensions)


@router.get("/console/requests")
async def requests(request: Request, services: AllServices, visitor: SeesUsage) -> Response:
    """List single requests, newest first."""
    query = UsageQuery(request)
    wanted = own_usage(visitor.principal, query.wanted)
    return await requests_list(request, services, visitor, query, wanted)


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
        raise must("by", f"be {BY_PERIOD} or one of {', '.join(VIEWS)}", by)
    return Dimension(by)
