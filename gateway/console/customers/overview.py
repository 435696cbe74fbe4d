"""The first page: this month's spend, tokens and errors, and the limits."""

import asyncio

from fastapi import APIRouter, Response

from gateway.accounts.keys.service import KeyService
from gateway.accounts.limits import LimitBody, LimitReports, LimitsReport
from gateway.accounts.members import MemberService
from gateway.accounts.webhooks.service import WebhookService
from gateway.billing.usage.parts import NOTHING, Dimension, UsageFilter
from gateway.billing.usage.periods import Span
from gateway.billing.usage.routes import own_usage
from gateway.billing.usage.series import by_period
from gateway.billing.usage.service import UsageService
from gateway.console.charts import COST, TOKENS, Chart, period_chart
from gateway.console.routing import AnyVisitor, CustomerRoute
from gateway.console.tables import Step
from gateway.console.usage_query import WEEK, last_days
from gateway.console.visitor import Visitor
from gateway.http.services import AllServices
from gateway.platform.database.paging import PageRequest
from gateway.records.limits import LimitName
from gateway.records.scopes import Scope
from gateway.records.times import month_start, utc_now

router = APIRouter(route_class=CustomerRoute, include_in_schema=False)


@router.get("/console")
async def overview(visitor: AnyVisitor, services: AllServices) -> Response:
    """Show this month and the last thirty days."""
    now = utc_now()
    limits = await services.make(LimitReports).own_limits(visitor.principal)
    sees_usage = visitor.has(Scope.USAGE, Scope.COMPLETIONS)
    month, latency, week = NOTHING, None, NOTHING
    charts: list[Chart] = []
    if sees_usage:
        wanted = own_usage(visitor.principal, UsageFilter(tenant_id=None))
        service = services.make(UsageService)
        month, week, periods, latency = await asyncio.gather(
            service.total(wanted, Span(month_start(now), now)),
            service.total(wanted, Span(now - WEEK, now)),
            by_period(service, wanted, last_days(now), Dimension.MODEL),
            service.latency(wanted, last_days(now)),
        )
        charts = [
            period_chart("Cost", COST, periods, "cost_micros"),
            period_chart("Tokens", TOKENS, periods, "tokens"),
        ]
    is_new = sees_usage and not month.requests + week.requests
    return visitor.page(
        "overview.html",
        steps=await _first_steps(visitor, limits) if is_new else [],
        sees_usage=sees_usage,
        month=month,
        latency=latency,
        week_micros=week.cost_micros,
        month_name=f"{now:%B %Y}",
        budget=_budget(limits),
        limits=limits,
        used=list(_used(limits)),
        charts=charts,
        is_whole=visitor.has(Scope.USAGE) and not visitor.principal.project_id,
    )


async def _first_steps(visitor: Visitor, limits: LimitsReport) -> list[Step]:
    """Return what the visitor of an account without traffic may still do; each step once."""
    tenant_id, first = visitor.tenant_id, PageRequest(limit=1)
    is_whole, steps = visitor.principal.project_id is None, list[Step]()

    if visitor.has(Scope.KEYS):
        keys = await visitor.make(KeyService).page(tenant_id, first, grantor=visitor.caller.grant)
        if not keys.entries:
            steps.append(Step("Your programs need a key.", "/console/keys/new", "Create a key"))
    if visitor.has(Scope.COMPLETIONS):
        steps.append(Step("Send the first request.", "/console/start", "Copy a ready curl"))
    if is_whole and visitor.has(Scope.KEYS):
        if _budget(limits) is None:
            text = "No budget bounds what a key may cost."
            steps.append(Step(text, "/console/keys", "Set the budget of a key"))
        if not await visitor.make(WebhookService.of).list_of_tenant(tenant_id):
            text = "Nothing warns you before a budget is used up."
            steps.append(Step(text, "/console/webhooks", "Register a webhook"))
    if is_whole and visitor.has(Scope.MEMBERS):
        members = await visitor.make(MemberService).page(tenant_id, first)
        if not members.entries:
            text = "Only keys log in so far."
            steps.append(Step(text, "/console/members", "Invite a colleague"))
    return steps


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
        if body.used is not None
    ]
