"""The page of a tenant: what it has and lacks."""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Response

from contract.tier import ServiceTier
from gateway.accounts.keys.service import KeyService
from gateway.accounts.limits import LimitBody, LimitReports, LimitsReport
from gateway.accounts.members import MemberService
from gateway.accounts.plans.service import PlanService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.webhooks.service import WebhookService
from gateway.batches.files.service import Owner
from gateway.batches.routes import BatchService
from gateway.billing.credits.service import Balance, CreditService
from gateway.billing.usage.parts import UsageFilter
from gateway.billing.usage.periods import Span
from gateway.billing.usage.service import UsageService
from gateway.console.customers.account import CREDIT_COLUMNS
from gateway.console.customers.batches import progress
from gateway.console.customers.keys import key_state
from gateway.console.formats import shortened
from gateway.console.limit_fields import LABELS, shown_limit
from gateway.console.routing import AnyVisitor, OperatorRoute, SeenTenant
from gateway.console.tables import Cell, Column, Step, Table
from gateway.console.visitor import TENANT_PAGES, tenant_path
from gateway.http.services import AllServices, Services
from gateway.models.catalogue import Catalogue
from gateway.models.price_book import PriceBook
from gateway.platform.database.paging import PageRequest
from gateway.records.batches import Batch
from gateway.records.limits import LimitName, LimitScope
from gateway.records.records import Billing, KeyRecord, Plan, Tenant
from gateway.records.times import month_start, utc_now

CREDITS: Final = 20
NEWEST: Final = 5
"""Keys and so on that the page shows."""
MOST_NAMED: Final = 5
"""Models that a notice names."""
NOTICES: Final = {
    "created": "The tenant is created and active.",
    "changed": "The tenant is changed on all gateways within a second.",
    "suspended": "The tenant is suspended on all gateways within a second.",
    "activated": "The tenant is active again on all gateways within a second.",
    "credits": "The balance is changed.",
    "invited": "The tenant is created. Its owner can log in with the e-mail address.",
}

REJECTED: Final = (
    Column("Reason", lambda each: each.code, "mono"),
    Column("Requests", lambda each: each.requests, "num"),
)

router = APIRouter(prefix=TENANT_PAGES, route_class=OperatorRoute, include_in_schema=False)


@router.get("")
async def show(visitor: AnyVisitor, services: AllServices, tenant: SeenTenant) -> Response:
    """Show a tenant with this month's usage, its balance, limits, and what it has."""
    now, newest = utc_now(), PageRequest(None, NEWEST, is_newest_first=True)
    home, credit = tenant_path(tenant.id), services.make(CreditService)
    reports = services.make(LimitReports)
    month, balance, granted, limits, rejected = await asyncio.gather(
        services.make(UsageService).total(
            UsageFilter(tenant_id=tenant.id), Span(month_start(now), now)
        ),
        credit.balance(tenant.id),
        credit.page(tenant.id, PageRequest(None, CREDITS, is_newest_first=True)),
        reports.of_tenant(tenant.id),
        reports.refusals_of_tenants("24h", tenant.id),
    )
    plan = await services.make(PlanService).get(tenant.plan_id) if tenant.plan_id else None
    keys, members, projects, webhooks, batches = await asyncio.gather(
        services.make(KeyService).page(tenant.id, newest),
        services.make(MemberService).page(tenant.id, newest),
        services.make(ProjectService).page(tenant.id, newest),
        services.make(WebhookService.of).list_of_tenant(tenant.id),
        services.make(BatchService).page(Owner(tenant.id), newest),
    )
    return visitor.page(
        "operators/tenant.html",
        tenant=tenant,
        month=month,
        month_name=f"{now:%B %Y}",
        balance=balance,
        credits=Table("Credits", CREDIT_COLUMNS, granted.entries, "There are no credits."),
        home=home,
        limits=_limits(tenant, plan, limits),
        rejected=Table("Rejected in 24 hours", REJECTED, rejected.data, "No request was rejected."),
        steps=list(_steps(services, tenant, balance, keys.entries, members.entries)),
        parts_of_tenant=_parts(
            home,
            now,
            keys=keys.entries,
            members=members.entries,
            projects=projects.entries,
            webhooks=webhooks,
            batches=batches.entries,
        ),
        notices=NOTICES,
    )


def _steps(
    services: Services,
    tenant: Tenant,
    balance: Balance,
    keys: Sequence[KeyRecord],
    members: Sequence[object],
) -> Iterator[Step]:
    """Yield what a tenant needs before its customers are served and pay."""
    home = tenant_path(tenant.id)
    if tenant.plan_id is None and not tenant.limits:
        yield Step("It has neither a plan nor limits of its own.", f"{home}/edit", "Change")
    if not keys and not members:
        yield Step("Nobody can use it.", f"{home}/keys/new", "Create a key")
        yield Step("Nobody can log in to it.", f"{home}/members", "Invite an owner")
    if tenant.billing is Billing.PREPAID and balance.micros <= 0:
        yield Step("It has no credits.", "#credits", "Grant credits")
    known, prices = services[Catalogue], services[PriceBook]
    default = tenant.default_model
    if default is not None and known.known(default) is None:
        text = f"No worker has announced the default model {default}."
        yield Step(text, f"{home}/edit", "Change")
    free = [
        each
        for each in sorted(known.names)
        if prices.find(each, ServiceTier.DEFAULT, utc_now()) is None
    ]
    if free:
        named = ", ".join(free[:MOST_NAMED]) + (" and others" if len(free) > MOST_NAMED else "")
        link = f"/console/prices/new?{urlencode({'model': free[0]})}"
        yield Step(f"Free, for they have no price: {named}.", link, "Add a price")


def _limits(tenant: Tenant, plan: Plan | None, report: LimitsReport) -> Table:
    [scope] = report.scopes
    of_plan = {} if plan is None else plan.limits[LimitScope.TENANT]

    def set_by(row: tuple[LimitName, LimitBody]) -> str:
        if row[0] in tenant.limits:
            return "the tenant"
        return "its plan" if row[0] in of_plan else "the deployment"

    columns = (
        Column("Limit", lambda each: LABELS[each[0]]),
        Column("Allowed", lambda each: shown_limit(each[0], each[1].limit), "num"),
        Column(
            "Used",
            lambda each: None if each[1].used is None else shown_limit(each[0], each[1].used),
            "num",
        ),
        Column("Resets (UTC)", lambda each: each[1].resets_at, "time wide"),
        Column("Set by", set_by, "wide"),
    )
    rows = [(name, body) for name, body in scope.limits.items() if body.limit is not None]
    return Table("Effective limits", columns, rows, "No limit applies to the tenant.")


def _parts(home: str, now: datetime, **rows: Sequence[Any]) -> Iterator[tuple[str, Table]]:
    """Yield the newest things that a tenant has, and the names of their pages below `home`."""

    def named(path: str, name: str = "name") -> Column:
        return Column(
            "Name", lambda each: Cell(getattr(each, name), f"{home}/{path}/{each.id}"), "name"
        )

    columns = {
        "keys": (
            named("keys"),
            Column("Key", lambda key: f"sk-{key.prefix}-…", "mono wide"),
            Column("Scopes", lambda key: ", ".join(sorted(key.scopes)), "wide"),
            Column("State", lambda key: key_state(key, now)),
        ),
        "members": (
            named("members"),
            Column("Role", lambda member: member.role),
            Column("Subject", lambda member: member.subject or "not logged in yet", "wide"),
        ),
        "projects": (named("projects"), Column("Status", lambda project: project.status)),
        "webhooks": (named("webhooks", "url"),),
        "batches": (
            Column("Batch", lambda batch: shortened(batch.id), "mono"),
            Column("Status", lambda batch: batch.status.replace("_", " ")),
            Column("Lines", _lines, "wide"),
            Column("", lambda batch: _cancellation(home, batch)),
            Column("Deadline (UTC)", lambda batch: batch.expires_at, "time wide"),
        ),
    }
    created = Column("Created (UTC)", lambda each: each.created_at, "time wide")
    for name, known in columns.items():
        table = Table(f"Newest {name}", (*known, created), rows[name], f"There are no {name}.")
        yield "" if name == "batches" else name, table


def _lines(batch: Batch) -> str:
    return f"{progress(batch)}{f', {batch.failed:,} failed' if batch.failed else ''}"


def _cancellation(home: str, batch: Batch) -> Cell | None:
    if batch.status.is_end:
        return None
    return Cell("Cancel", f"{home}/batches/{batch.id}/cancel", label=f"Cancel {batch.id}")
