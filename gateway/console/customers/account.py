"""Limits, credits, and how to start."""

import shlex
from typing import Final

from fastapi import APIRouter, Response
from msgspec import json

from gateway.accounts.limits import LimitReports, Reports
from gateway.billing.credits.service import CreditService
from gateway.billing.usage.parts import UsageFilter
from gateway.billing.usage.periods import Span
from gateway.billing.usage.service import UsageService
from gateway.console.customers.invoices import SeesInvoices
from gateway.console.formats import shortened, with_times
from gateway.console.limit_fields import LABELS
from gateway.console.lists import Newest, cursor_of
from gateway.console.routing import AnyVisitor, CustomerRoute, base_url
from gateway.console.tables import Cell, Column, Table
from gateway.console.usage import SeesUsage, key_names
from gateway.console.usage_query import WEEK
from gateway.http.services import AllServices
from gateway.models.catalogue import Catalogue
from gateway.records.limits import LimitName
from gateway.records.times import to_time, utc_now

_HELLO: Final = {"messages": [{"role": "user", "content": "Hello!"}]}

CREDIT_COLUMNS: Final = (
    Column("Time (UTC)", lambda each: each.created_at, "time"),
    Column("Change", lambda each: each.kind),
    Column("Amount", lambda each: each.amount_micros, "money"),
    Column("Note", lambda each: each.note, "name wide"),
    Column("Expires (UTC)", lambda each: each.expires_at, "time wide"),
)
router = APIRouter(route_class=CustomerRoute, include_in_schema=False)


@router.get("/console/limits")
async def limits(visitor: AnyVisitor, services: AllServices, reports: Reports) -> Response:
    """Show the limits with their usage."""
    refusals = await reports.own_refusals(visitor.principal)
    names = await key_names(services, visitor, {each.key for each in refusals})
    columns = (
        Column("Time (UTC)", lambda each: each.at, "time"),
        Column("Limit", lambda each: f"{_limit(each.limit)} of the {each.scope}"),
        Column("Key", lambda each: names.get(each.key, shortened(each.key))),
        Column("Model", lambda each: each.model),
        Column("Times", lambda each: each.times, "num"),
        Column("Why", lambda each: with_times(each.message, each.at), "below"),
    )
    empty = "No limit has rejected a request in the last seven days."
    return visitor.page(
        "limits.html",
        report=await reports.own_limits(visitor.principal),
        refusals=Table("Rejected requests", columns, refusals, empty),
    )


@router.get("/console/rejected")
async def rejected(visitor: SeesUsage, services: AllServices, reports: Reports) -> Response:
    """Show the latest requests that gateways rejected before any work, and why."""
    principal = visitor.principal
    found = [
        *await reports.own_rejections(principal, by_limits=True),
        *await reports.own_rejections(principal, by_limits=False),
    ]
    found.sort(key=lambda each: each.at_ms, reverse=True)
    names = await key_names(services, visitor, {each.credential_id for each in found})
    columns = (
        Column("Time (UTC)", lambda each: to_time(each.at_ms), "time"),
        Column("Error", lambda each: Cell(each.code, f"/docs/errors/{each.code}"), "mono"),
        Column("Status", lambda each: str(each.status), "wide"),
        Column("Key", lambda each: names.get(each.credential_id, shortened(each.credential_id))),
        Column("Model", lambda each: each.model, "wide name"),
        Column("Times", lambda each: each.times, "num"),
        Column("Why", lambda each: with_times(each.message, to_time(each.at_ms)), "below"),
    )
    return visitor.list_page(
        "Rejected requests",
        columns,
        found,
        "No request has been rejected in the last seven days.",
        text="The latest requests that were rejected before any work, and are not charged: 100 by "
        "limits and 100 for other reasons. Each error has a page that says what to do.",
    )


def _limit(name: str) -> str:
    return LABELS[LimitName(name)] if name in list(LimitName) else name.capitalize()


@router.get("/console/credits")
async def credit_history(visitor: SeesInvoices, services: AllServices, wanted: Newest) -> Response:
    """Show the balance and its changes, newest first."""
    service, now = services.make(CreditService), utc_now()
    limits = await services.make(LimitReports).own_limits(visitor.principal)
    found = await service.page(visitor.tenant_id, wanted)
    balance = await service.balance(visitor.tenant_id)
    usage, spent = services.make(UsageService), UsageFilter(tenant_id=visitor.tenant_id)
    week = await usage.total(spent, Span(now - WEEK, now))
    return visitor.page(
        "credits.html",
        left=limits.credits.remaining_micros if limits.credits else balance.micros,
        week_micros=week.cost_micros,
        balance=balance,
        table=Table("Credits", CREDIT_COLUMNS, found.entries, "There are no credits."),
        following=visitor.following(cursor_of(found)),
    )


@router.get("/console/start")
async def start(visitor: AnyVisitor, services: AllServices) -> Response:
    """Show how to send the first request."""
    names = sorted(filter(visitor.principal.allows_model, services[Catalogue].names))
    model = visitor.principal.default_model or (names[0] if names else "YOUR_MODEL")
    return visitor.page(
        "start.html",
        base_url=base_url(visitor.request),
        chat=first_chat(model),
        model=json.encode(model).decode(),
        models=names,
    )


def first_chat(model: str) -> str:
    """Return the body of a first request, quoted for a shell."""
    return shlex.quote(json.encode({"model": model, **_HELLO}).decode())
