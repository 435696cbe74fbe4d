"""The first page: health, revenue, the biggest tenants, and models."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from operator import itemgetter
from typing import Final

from fastapi import APIRouter, Response

from gateway.accounts.tenants.routes import Tenants
from gateway.billing.ledger.history import ServiceHistory
from gateway.billing.usage.parts import Dimension, UsageFilter, add
from gateway.billing.usage.periods import DAY, HOUR, Bucket, Span
from gateway.billing.usage.series import by_period
from gateway.billing.usage.service import ReportRequest, UsageService, UsageSlice
from gateway.console.charts import COST, REQUESTS, period_chart
from gateway.console.formats import cents
from gateway.console.operators.health import read_health
from gateway.console.operators.models import Recent, models_table
from gateway.console.operators.money import sums_table
from gateway.console.routing import AnyVisitor, OperatorRoute
from gateway.console.tables import Card, Cell, Column, Table
from gateway.console.usage_query import last_days
from gateway.console.visitor import tenant_path
from gateway.http.services import AllServices, Services
from gateway.models.catalogue import Catalogue
from gateway.platform.settings import Settings
from gateway.records.times import day_of, hour_of, month_start, utc_now

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
    by_day = replace(by_tenant, span=Span(day_of(now) - DAY, now), bucket=Bucket.DAY)
    # Concurrent queries, from which all sums of the page follow.
    sums, days, periods, health = await asyncio.gather(
        service.largest(by_tenant, count=TOP),
        service.largest(by_day, count=TOP),
        by_period(service, everything, last_days(now), Dimension.MODEL),
        read_health(services),
    )
    recent = await _recent(services, now)
    month, today, name = add(each.sums for each in sums), periods.sums[-1], f"{now:%B %Y}"
    top = [(each.values[Dimension.TENANT], each.sums) for each in sums if each.values]
    top.sort(key=lambda each: each[1].cost_micros, reverse=True)
    names = await tenants.names(_ids(sums))
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
        models=models_table(services[Settings], services[Catalogue].models, health.workers, recent),
        today=_today(await tenants.names(_ids(days)), days, day_of(now)),
        top=sums_table(f"Biggest tenants in {name}", names, top, month, tenant_path),
    )


async def _recent(services: Services, now: datetime) -> Mapping[str, Recent]:
    """Return how each model has served the current and the last hour."""
    history, span = await services[ServiceHistory].get(), Span(hour_of(now) - HOUR, now)
    names = [each.card.model for each in services[Catalogue].models]
    service = services.make(UsageService)
    first = await asyncio.gather(
        *(service.first_token_ms(UsageFilter(tenant_id=None, model=name), span) for name in names)
    )
    return {
        name: Recent(p95_ms, history.recent(name))
        for name, p95_ms in zip(names, first, strict=True)
    }


def _ids(slices: Iterable[UsageSlice]) -> list[str]:
    return [each.values[Dimension.TENANT] for each in slices if each.values]


def _today(names: Mapping[str, str], slices: Iterable[UsageSlice], today: datetime) -> Table:
    """Return the tenants that spend the most today, and what they spent yesterday."""
    spent: dict[str, list[int]] = {}
    for each in slices:
        if tenant_id := each.values.get(Dimension.TENANT):
            days = spent.setdefault(tenant_id, [0, 0])
            days[each.span.start < today] += each.sums.cost_micros
    columns = (
        Column("Tenant", lambda row: Cell(names.get(row[0], row[0]), tenant_path(row[0])), "name"),
        Column("Today", lambda row: row[1][0], "money"),
        Column("Yesterday", lambda row: row[1][1], "money"),
    )
    rows = sorted(spent.items(), key=itemgetter(1), reverse=True)
    return Table("Tenants by spend today", columns, rows, "There was no request since yesterday.")
