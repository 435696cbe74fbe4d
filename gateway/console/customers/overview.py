"""The first page: this month's spend, tokens and errors, and the limits."""

from fastapi import APIRouter, Request, Response

from gateway.accounts.limits import LimitBody, LimitReports, LimitsReport
from gateway.billing.usage.parts import UsageFilter
from gateway.billing.usage.periods import Span
from gateway.billing.usage.routes import own_usage
from gateway.billing.usage.service import UsageService
from gateway.console.charts import bars
from gateway.console.limit_fields import LABELS, shown_limit
from gateway.console.rendering import page
from gateway.console.routing import AnyVisitor, CustomerRoute
from gateway.console.usage_query import DAYS, NOTHING, Point, add, daily, last_days
from gateway.http.services import AllServices
from gateway.platform.database.partitions import month_start
from gateway.records.limits import LimitName
from gateway.records.scopes import Scope
from gateway.records.times import utc_now

router = APIRouter(route_class=CustomerRoute, include_in_schema=False)


@router.get("/console")
async def overview(request: Request, services: AllServices, visitor: AnyVisitor) -> Response:
    """Show this month and the last thirty days."""
    now = utc_now()
    limits = await services.make(LimitReports).own_limits(visitor.principal)
    sees_usage = visitor.has(Scope.USAGE, Scope.COMPLETIONS)
    month, latency = NOTHING, None
    points: list[Point] = []
    if sees_usage:
        wanted = own_usage(visitor.principal, UsageFilter(tenant_id=None))
        service = services.make(UsageService)
        # One report: a month may begin a day before the chart.
        first = month_start(now)
        points = await daily(service, wanted, Span(min(first, last_days(now).start), now))
        month = add(each.sums for each in points if each.day >= f"{first:%Y-%m-%d}")
        latency = await service.latency(wanted, last_days(now))
    return page(
        request,
        "overview.html",
        sees_usage=sees_usage,
        month=month,
        latency=latency,
        month_name=f"{now:%B %Y}",
        budget=_budget(limits),
        limits=limits,
        used=list(_used(limits)),
        spend=bars([point.of_cost() for point in points[-DAYS:]]),
        tokens=bars([point.of_tokens() for point in points[-DAYS:]]),
        labels=LABELS,
        shown_limit=shown_limit,
        is_whole=visitor.has_whole(Scope.USAGE),
    )


def _budget(limits: LimitsReport) -> LimitBody | None:
    """Return the budget of the widest holder that the visitor sees."""
    for scope in reversed(limits.scopes):
        budget = scope.limits[LimitName.BUDGET]
        if budget.limit is not None:
            return budget
    return None


def _used(limits: LimitsReport) -> list[tuple[str, str, LimitBody]]:
    return [
        (scope.scope, name, body)
        for scope in limits.scopes
        for name, body in scope.limits.items()
        if body.limit is not None
    ]
