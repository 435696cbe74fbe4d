"""Pages of monthly statements that customers and operators have in common.

`home` is the path of the list of the tenant's statements.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Final

from fastapi import Request, Response

from contract.tier import ServiceTier
from gateway.billing.invoices import InvoiceService, LineBody, statement_csv, with_tax
from gateway.billing.usage.parts import UsageFilter, UsageSums
from gateway.billing.usage.periods import DAY, Bucket, Span
from gateway.billing.usage.query import read_month
from gateway.billing.usage.service import ReportRequest, UsageService
from gateway.console.rendering import page
from gateway.console.tables import Cell, Column, Table
from gateway.console.usage_query import NOTHING, cost, tokens
from gateway.http.services import Services
from gateway.models.books import AdapterBook
from gateway.models.price_book import PriceBook
from gateway.platform.settings import Settings
from gateway.records.adapters import SEPARATOR
from gateway.records.records import Price
from gateway.records.times import month_start, utc_now

MONTHS: Final = 12


def latest_months() -> list[tuple[str, str]]:
    """Return the latest months, such as 2026-11, with their names; the current one first."""
    months, start = [], month_start(utc_now())
    for _ in range(MONTHS):
        months.append((f"{start:%Y-%m}", f"{start:%B %Y}"))
        start = month_start(start - DAY)
    return months


async def statements_list(
    request: Request, services: Services, home: str, *, tenant_id: str
) -> Response:
    """List the statements of the latest months with their amounts."""
    months = latest_months()
    asked = ReportRequest(
        wanted=UsageFilter(tenant_id=tenant_id),
        span=Span(read_month(months[-1][0]).start, read_month(months[0][0]).end),
        bucket=Bucket.MONTH,
    )
    report = await services.make(UsageService).report(asked, after=None, limit=MONTHS)
    sums = {f"{each.span.start:%Y-%m}": each.sums for each in report.slices}
    return page(
        request,
        "invoices.html",
        table=Table("Invoices", list(_columns(home, sums)), months, ""),
        home=home,
        tenant_id=tenant_id,
    )


def _columns(home: str, sums: Mapping[str, UsageSums]) -> Iterator[Column]:
    def of(row: tuple[str, str]) -> UsageSums:
        return sums.get(row[0], NOTHING)

    yield Column("Month (UTC)", lambda row: Cell(row[1], f"{home}/{row[0]}"))
    yield Column("Requests", lambda row: of(row).requests, "num wide")
    yield Column("Tokens", lambda row: tokens(of(row)), "num wide")
    yield Column("Amount", lambda row: cost(of(row)), "money")
    yield Column("File", lambda row: Cell("CSV", f"{home}/{row[0]}.csv", label=f"CSV of {row[1]}"))


async def statement_page(
    request: Request, services: Services, home: str, *, tenant_id: str, month: str
) -> Response:
    """Show a statement."""
    statement = await services.make(InvoiceService).statement(tenant_id, month)
    issuer = services[Settings].invoice_issuer
    percent = None if issuer is None else issuer.tax_percent
    start, end = statement.start, min(statement.end, utc_now())
    return page(
        request,
        "invoice.html",
        statement=statement,
        lines=[
            (each, _unit_prices(services, tenant_id, each, start, end)) for each in statement.lines
        ],
        home=home,
        issuer=issuer,
        due=None if percent is None else with_tax(statement.total_micros, percent),
    )


def _unit_prices(
    services: Services, tenant_id: str, line: LineBody, start: datetime, end: datetime
) -> list[Price]:
    """Return the prices that applied to a line; none if they are not known any more."""
    base, _, name = line.model.rpartition(SEPARATOR)
    adapter = services[AdapterBook].find(tenant_id, name)
    names = [line.model]
    if adapter is not None and adapter.base_model == base:
        names = [adapter.id, base]
    found = services[PriceBook].in_force(names, ServiceTier(line.service_tier), start, end)
    return [price for price in found if price is not None]


async def statement_file(services: Services, *, tenant_id: str, month: str) -> Response:
    """Return a statement as CSV."""
    return statement_csv(await services.make(InvoiceService).statement(tenant_id, month))
