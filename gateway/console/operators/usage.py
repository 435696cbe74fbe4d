"""Usage and requests of all tenants, and their receipts."""

import asyncio
from typing import Final

from fastapi import APIRouter, Request, Response

from gateway.billing.usage.parts import Dimension, UsageFilter
from gateway.billing.usage.query import decode_cursor
from gateway.billing.usage.routes import RequestId
from gateway.billing.usage.service import UsageService
from gateway.console.charts import COST, TOKENS
from gateway.console.routing import AnyVisitor, OperatorRoute
from gateway.console.usage_pages import (
    ROWS,
    receipt_of,
    requests_file,
    requests_list,
    sums_file,
    sums_page,
)
from gateway.console.usage_query import UsageQuery, by_dimension, by_period, cost, tokens
from gateway.http.services import AllServices
from gateway.records.errors import must

VIEWS: Final = (Dimension.TENANT, Dimension.MODEL, Dimension.KEY, Dimension.PROJECT)

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console/usage")
async def usage(request: Request, services: AllServices, visitor: AnyVisitor) -> Response:
    """Show sums of a period as charts and a table."""
    query, service = UsageQuery(request), services.make(UsageService)
    by = _dimension(query)
    views = [(each.value, each.capitalize()) for each in VIEWS]
    if query.error is not None:
        return await sums_page(request, services, visitor, query, by=by, views=views)
    periods, (rows, following) = await asyncio.gather(
        by_period(service, query.wanted, query.span, by),
        by_dimension(
            service,
            query.wanted,
            query.span,
            by,
            after=decode_cursor(query.after, parts=2),
            limit=ROWS,
        ),
    )
    return await sums_page(
        request,
        services,
        visitor,
        query,
        by=by,
        views=views,
        rows=rows,
        charts=[
            periods.chart("Revenue", COST, cost),
            periods.chart("Tokens", TOKENS, tokens),
        ],
        following=following,
    )


@router.get("/console/usage.csv")
async def usage_csv(request: Request, services: AllServices) -> Response:
    """Return the sums of each day and each value of a dimension as CSV."""
    query = UsageQuery(request)
    return sums_file(services, query, query.wanted, (_dimension(query),))


@router.get("/console/requests")
async def requests(request: Request, services: AllServices, visitor: AnyVisitor) -> Response:
    """List single requests of all tenants, newest first."""
    query = UsageQuery(request)
    return await requests_list(request, services, visitor, query, query.wanted)


@router.get("/console/requests.csv")
async def all_requests_csv(request: Request, services: AllServices) -> Response:
    """Return all requests of a period as CSV, newest first."""
    query = UsageQuery(request)
    return requests_file(services, query, query.wanted)


@router.get("/console/requests/{request_id}")
async def receipt(request: Request, services: AllServices, request_id: RequestId) -> Response:
    """Show the receipt of one request."""
    return await receipt_of(request, services, UsageFilter(tenant_id=None), request_id)


def _dimension(query: UsageQuery) -> Dimension:
    by = query.form["by"] or Dimension.TENANT
    if by not in VIEWS:
        raise must("by", f"be one of {', '.join(VIEWS)}", by)
    return Dimension(by)
