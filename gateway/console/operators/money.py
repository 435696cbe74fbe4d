"""Money of all tenants: used up credits, and statements of a month."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Query, Response

from gateway.accounts.tenants.routes import Tenants
from gateway.billing.usage.parts import Dimension, UsageFilter, UsageSums, add
from gateway.billing.usage.periods import Bucket
from gateway.billing.usage.query import read_month
from gateway.billing.usage.service import ReportRequest, UsageService
from gateway.console.customers.invoices import latest_months
from gateway.console.lists import MOST_SORTED, arranged
from gateway.console.routing import AnyVisitor, OperatorRoute
from gateway.console.tables import Cell, Column, Table
from gateway.console.visitor import tenant_path
from gateway.http.services import AllServices
from gateway.limits.store import QuotaStore

MOST_PREPAID: Final = 10_000
"""Prepaid tenants whose credits are looked at, the newest ones."""
MOST_USED_UP: Final = 500
"""Tenants without credits that are shown, those with the least first."""

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console/money")
async def money(
    visitor: AnyVisitor,
    services: AllServices,
    tenants: Tenants,
    *,
    month: Annotated[str, Query(max_length=7)] = "",
) -> Response:
    """Show prepaid tenants whose credits are used up, and the amount of each tenant in a month."""
    months = latest_months()
    month = month or months[0][0]
    prepaid = await tenants.prepaid(limit=MOST_PREPAID + 1)
    names = {tenant.id: tenant.name for tenant in prepaid[:MOST_PREPAID]}
    left = await services[QuotaStore].credits(list(names))
    used_up = sorted((micros, tenant_id) for tenant_id, micros in left.items() if micros <= 0)
    service = services.make(UsageService)
    asked = ReportRequest(
        wanted=UsageFilter(tenant_id=None),
        span=read_month(month),
        bucket=Bucket.TOTAL,
        dimensions=(Dimension.TENANT,),
    )
    sums = await service.largest(asked, count=MOST_SORTED)
    everything = add(each.sums for each in sums)
    rows = [(each.values[Dimension.TENANT], each.sums) for each in sums if each.values]
    rows_of = await tenants.names([tenant_id for tenant_id, _ in rows])

    def statement(tenant_id: str) -> str:
        return f"{tenant_path(tenant_id)}/invoices/{month}"

    statements = sums_table("Statements", rows_of, rows, everything, statement)
    shown = arranged(visitor.request, statements.columns, rows, default="-amount")
    return visitor.page(
        "operators/money.html",
        used_up=_credits_table(names, used_up[:MOST_USED_UP]),
        hidden=max(len(used_up) - MOST_USED_UP, 0),
        unknown=len(names) - len(left),
        is_complete=len(prepaid) <= MOST_PREPAID,
        month=month,
        months=months,
        statements=statements._replace(rows=shown.rows, sorts=shown.sorts),
        following=shown.following,
    )


def sums_table(
    label: str,
    names: Mapping[str, str],
    rows: Sequence[tuple[str, UsageSums]],
    everything: UsageSums,
    link: Callable[[str], str],
) -> Table:
    """Return the sums of tenants, by name, above those of all tenants."""

    def tenant(row: tuple[str, UsageSums]) -> Cell:
        return Cell(names.get(row[0], row[0]), link(row[0])) if row[0] else Cell("All tenants")

    audio = [Column("Seconds of audio", lambda row: row[1].audio_seconds, "num wide")]
    columns = (
        Column("Tenant", tenant),
        Column("Requests", lambda row: row[1].requests, "num"),
        Column("Failed", lambda row: row[1].failed_requests, "num wide"),
        Column("Tokens", lambda row: row[1].tokens, "num wide"),
        *(audio if everything.audio_seconds else []),
        Column("Amount", lambda row: row[1].cost_micros, "money"),
    )
    return Table(label, columns, rows, "There was no request in this month.", ("", everything))


def _credits_table(names: Mapping[str, str], used_up: Sequence[tuple[int, str]]) -> Table:
    columns = (
        Column("Tenant", lambda row: Cell(names.get(row[1], ""), tenant_path(row[1]))),
        Column("Id", lambda row: row[1], "mono"),
        Column("Credits left", lambda row: row[0], "money"),
    )
    empty = "No prepaid tenant has used up its credits."
    return Table("Credits used up", columns, used_up, empty)
