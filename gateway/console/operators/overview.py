"""The first page: revenue, the biggest tenants, and models."""

import asyncio
from typing import Final

from fastapi import APIRouter, Request, Response

from gateway.billing.usage.parts import Dimension, UsageFilter
from gateway.billing.usage.periods import Span
from gateway.billing.usage.service import UsageService
from gateway.console.charts import COST, REQUESTS
from gateway.console.rendering import page
from gateway.console.routing import OperatorRoute
from gateway.console.usage_query import add, by_dimension, by_period, cost, last_days, requests
from gateway.http.services import AllServices
from gateway.models.catalogue import Catalogue
from gateway.records.times import month_start, utc_now

TOP: Final = 10
MOST_TENANTS: Final = 100_000

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console")
async def overview(request: Request, services: AllServices) -> Response:
    """Show today, this month and the last thirty days."""
    now, everything = utc_now(), UsageFilter(tenant_id=None)
    service = services.make(UsageService)
    # Concurrent queries, from which all sums of the page follow.
    (tenants, _), periods = await asyncio.gather(
        by_dimension(
            service,
            everything,
            Span(month_start(now), now),
            Dimension.TENANT,
            after=None,
            limit=MOST_TENANTS,
        ),
        by_period(service, everything, last_days(now), Dimension.MODEL),
    )
    return page(
        request,
        "operators/overview.html",
        month_name=f"{now:%B %Y}",
        month=add(sums for _, sums in tenants),
        today=periods.sums[-1],
        tenants=len(tenants),
        top=sorted(tenants, key=lambda each: each[1].cost_micros, reverse=True)[:TOP],
        charts=[
            periods.chart("Revenue", COST, cost),
            periods.chart("Requests", REQUESTS, requests),
        ],
        models=services[Catalogue].models,
    )
