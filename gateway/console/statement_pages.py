"""Pages of monthly statements that customers and operators have in common.

`home` is the path of the list of the tenant's statements.
"""

from typing import Final

from fastapi import Request, Response

from gateway.billing.invoices import InvoiceService, statement_csv
from gateway.billing.usage.periods import DAY
from gateway.console.rendering import page
from gateway.http.services import Services
from gateway.records.times import month_start, utc_now

MONTHS: Final = 12


def latest_months() -> list[tuple[str, str]]:
    """Return the latest months, such as 2026-11, with their names; the current one first."""
    months, start = [], month_start(utc_now())
    for _ in range(MONTHS):
        months.append((f"{start:%Y-%m}", f"{start:%B %Y}"))
        start = month_start(start - DAY)
    return months


def statements_list(request: Request, home: str, *, tenant_id: str) -> Response:
    """List the statements of the latest months."""
    return page(request, "invoices.html", months=latest_months(), home=home, tenant_id=tenant_id)


async def statement_page(
    request: Request, services: Services, home: str, *, tenant_id: str, month: str
) -> Response:
    """Show a statement."""
    statement = await services.make(InvoiceService).statement(tenant_id, month)
    return page(request, "invoice.html", statement=statement, home=home)


async def statement_file(services: Services, *, tenant_id: str, month: str) -> Response:
    """Return a statement as CSV."""
    return statement_csv(await services.make(InvoiceService).statement(tenant_id, month))
