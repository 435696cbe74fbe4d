"""Monthly statements, to read, print and download."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response

from gateway.billing.invoices import Month
from gateway.console.routing import CustomerRoute, Visitor, needs
from gateway.console.statement_pages import statement_file, statement_page, statements_list
from gateway.http.services import AllServices
from gateway.records.scopes import Scope

HOME: Final = "/console/invoices"

router = APIRouter(route_class=CustomerRoute, prefix=HOME, include_in_schema=False)

SeesInvoices = Annotated[Visitor, Depends(needs(Scope.USAGE, whole=True))]


@router.get("")
async def list_months(request: Request, services: AllServices, visitor: SeesInvoices) -> Response:
    """List the latest months."""
    return await statements_list(request, services, HOME, tenant_id=visitor.tenant_id)


@router.get("/{month}.csv")
async def get_csv(services: AllServices, visitor: SeesInvoices, month: Month) -> Response:
    """Return a statement as CSV."""
    return await statement_file(services, tenant_id=visitor.tenant_id, month=month)


@router.get("/{month}")
async def show_statement(
    request: Request, services: AllServices, visitor: SeesInvoices, month: Month
) -> Response:
    """Show a statement."""
    return await statement_page(request, services, HOME, tenant_id=visitor.tenant_id, month=month)
