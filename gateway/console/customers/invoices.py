"""Monthly statements, to read, print and download."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Response

from contract.tier import ServiceTier
from gateway.accounts.tenants.service import TenantService
from gateway.billing.invoices import InvoiceService, LineBody, Month, statement_csv, with_tax
from gateway.billing.usage.parts import NOTHING, UsageFilter, UsageSums
from gateway.billing.usage.periods import DAY, Bucket, Span
from gateway.billing.usage.query import read_month
from gateway.billing.usage.routes import Ledger
from gateway.billing.usage.service import ReportRequest
from gateway.console.routing import TenantRoute, needs
from gateway.console.tables import Cell, Column
from gateway.console.visitor import Visitor
from gateway.http.services import AllServices, Services
from gateway.models.alias_and_adapter_caches import AdapterBook
from gateway.models.price_book import PriceBook
from gateway.platform.settings import Settings
from gateway.records.adapters import SEPARATOR
from gateway.records.records import Price
from gateway.records.scopes import Scope
from gateway.records.times import month_start, utc_now

MONTHS: Final = 12

router = APIRouter(route_class=TenantRoute, prefix="/invoices", include_in_schema=False)

SeesInvoices = Annotated[Visitor, Depends(needs(Scope.USAGE, whole=True))]


@router.get("")
async def list_months(visitor: SeesInvoices, services: AllServices, usage: Ledger) -> Response:
    """List the statements of the latest months with their amounts."""
    months = latest_months()
    asked = ReportRequest(
        wanted=UsageFilter(tenant_id=visitor.tenant_id),
        span=Span(read_month(months[-1][0]).start, read_month(months[0][0]).end),
        bucket=Bucket.MONTH,
    )
    report = await usage.report(asked, after=None, limit=MONTHS)
    sums = {f"{each.span.start:%Y-%m}": each.sums for each in report.slices}
    tenant = await services.make(TenantService).get(visitor.tenant_id)
    first = min([f"{tenant.created_at:%Y-%m}", *sums])
    return visitor.list_page(
        "Invoices",
        _columns(f"{visitor.home}/invoices", months, sums),
        [each for each in months if each[0] >= first],
        "",
        text="A statement for each month. It equals the sum of the ledger's rows.",
    )


@router.get("/{month}.csv")
async def get_csv(services: AllServices, visitor: SeesInvoices, month: Month) -> Response:
    """Return a statement as CSV."""
    statement = await services.make(InvoiceService).statement(visitor.tenant_id, month)
    return statement_csv(statement)


@router.get("/{month}")
async def show_statement(visitor: SeesInvoices, services: AllServices, month: Month) -> Response:
    """Show a statement."""
    statement = await services.make(InvoiceService).statement(visitor.tenant_id, month)
    issuer = services[Settings].invoice_issuer
    percent = None if issuer is None else issuer.tax_percent
    start, end = statement.start, min(statement.end, utc_now())
    return visitor.page(
        "invoice.html",
        statement=statement,
        state=status_of(is_open=statement.is_open),
        lines=[
            (each, _unit_prices(services, visitor.tenant_id, each, start, end))
            for each in statement.lines
        ],
        issuer=issuer,
        due=None if percent is None else with_tax(statement.total_micros, percent),
    )


def status_of(*, is_open: bool) -> Cell:
    """Return whether the amount of a statement can still grow."""
    return Cell("open", kind="warn") if is_open else Cell("final", kind="good")


def latest_months() -> list[tuple[str, str]]:
    """Return the latest months, such as 2026-11, with their names; the current one first."""
    months, start = [], month_start(utc_now())
    for _ in range(MONTHS):
        months.append((f"{start:%Y-%m}", f"{start:%B %Y}"))
        start = month_start(start - DAY)
    return months


def _columns(
    home: str, months: Sequence[tuple[str, str]], sums: Mapping[str, UsageSums]
) -> Iterator[Column]:
    def of(row: tuple[str, str]) -> UsageSums:
        return sums.get(row[0], NOTHING)

    yield Column("Month (UTC)", lambda row: Cell(row[1], f"{home}/{row[0]}"))
    yield Column("Requests", lambda row: of(row).requests, "num wide")
    yield Column("Tokens", lambda row: of(row).tokens, "num wide")
    yield Column("Status", lambda row: status_of(is_open=row[0] == months[0][0]))
    yield Column("Amount", lambda row: of(row).cost_micros, "money")
    yield Column("File", lambda row: Cell("CSV", f"{home}/{row[0]}.csv", label=f"CSV of {row[1]}"))


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
