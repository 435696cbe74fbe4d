"""Monthly statements, to read, print and download."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response

from gateway.console.rendering import page
from gateway.console.routing import CustomerRoute, Visitor, needs
from gateway.database.ledger.partitions import month_start
from gateway.http.authorization import Context
from gateway.management.invoices.routes import Month, statement_csv
from gateway.management.invoices.service import InvoiceService
from gateway.management.usage.periods import DAY
from gateway.tenancy.scopes import Scope
from gateway.tenancy.times import utc_now

MONTHS: Final = 12

router = APIRouter(route_class=CustomerRoute, prefix="/console/invoices", include_in_schema=False)

SeesInvoices = Annotated[Visitor, Depends(needs(Scope.USAGE, whole=True))]


@router.get("", dependencies=[Depends(needs(Scope.USAGE, whole=True))])
async def list_months(request: Request) -> Response:
    """List the latest months."""
    months, start = [], month_start(utc_now())
    for _ in range(MONTHS):
        months.append((f"{start:%Y-%m}", f"{start:%B %Y}"))
        start = month_start(start - DAY)
    return page(request, "invoices.html", months=months)


@router.get("/{month}.csv")
async def get_csv(context: Context, visitor: SeesInvoices, month: Month) -> Response:
    """Return a statement as CSV."""
    service = InvoiceService(context.database)
    return statement_csv(await service.statement(visitor.tenant_id, month))


@router.get("/{month}")
async def show_statement(
    request: Request, context: Context, visitor: SeesInvoices, month: Month
) -> Response:
    """Show a statement."""
    service = InvoiceService(context.database)
    statement = await service.statement(visitor.tenant_id, month)
    return page(request, "invoice.html", statement=statement)
