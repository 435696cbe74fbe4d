"""The first page: health, revenue, the biggest tenants, and models."""

import asyncio
from typing import Final

from fastapi import APIRouter, Response

from gateway.accounts.tenants.routes import Tenants
from gateway.billing.usage.parts import Dimension, UsageFilter, add
from gateway.billing.usage.periods import Bucket, Span
from gateway.billing.usage.series import by_period
from gateway.billing.usage.service import ReportRequest, UsageService
from gateway.console.charts import COST, REQUESTS, period_chart
from gateway.console.formats import cents
from gateway.console.operators.health import read_health
from gateway.console.operators.models import models_table
from gateway.console.operators.money import sums_table
from gateway.console.routing import AnyVisitor, OperatorRoute
from gateway.console.tables import Card
from gateway.console.usage_query import last_days
from gateway.console.visitor import tenant_path
from gateway.http.services import AllServices
from gateway.models.catalogue import Catalogue
from gateway.platform.settings import Settings
from gateway.records.times import month_start, utc_now

TOP: Final = 10

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console")
async def overview(visitor: AnyVisitor, services: AllServices, tenants: Tenants) -> Response:
    """Show the health of the last day, and the money of today, this month and thirty days."""
    now, everything = utc_now(), UsageFilter(tenant_id=None)
    service = services.make(UsageService)
    by_tenant = ReportRequest(
        wanted=everything,
        span=Span(month_start(now), now),
        bucket=Bucket.TOTAL,
        dimensions=(Dimension.TENANT,),
    )
    # Concurrent queries, from which all sums of the page follow.
    sums, periods, health = await asyncio.gather(
        service.largest(by_tenant, count=TOP),
        by_period(service, everything, last_days(now), Dimension.MODEL),
        read_health(services),
    )
    month, today, name = add(each.sums for each in sums), periods.sums[-1], f"{now:%B %Y}"
    top = [(each.values[Dimension.TENANT], each.sums) for each in sums if each.values]
    top.sort(key=lambda each: each[1].cost_micros, reverse=True)
    names = await tenants.names([tenant_id for tenant_id, _ in top])
    money = [
        Card(title, cents(each.cost_micros), f"{each.requests:,} requests", href="/console/money")
        for title, each in (("Revenue today", today), (f"Revenue in {name}", month))
    ]
    return visitor.page(
        "operators/overview.html",
        health=health,
        cards=[
            *health.cards,
            *money,
            Card(
                f"Tokens in {name}",
                f"{month.tokens:,}",
                f"{month.prompt_tokens:,} in ({month.cached_tokens:,} cached), "
                f"{month.completion_tokens:,} out",
            ),
        ],
        charts=[
            period_chart("Revenue", COST, periods, "cost_micros"),
            period_chart("Requests", REQUESTS, periods, "requests"),
        ],
        models=models_table(services[Settings], services[Catalogue].models, health.workers),
        top=sums_table(f"Biggest tenants in {name}", names, top, month, tenant_path),
    )
