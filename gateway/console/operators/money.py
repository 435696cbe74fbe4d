"""Money of all tenants: used up credits, and statements of a month."""

from typing import Annotated, Final
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response

from gateway.accounts.shared import TenantId
from gateway.accounts.tenants.routes import Tenants
from gateway.billing.invoices import Month
from gateway.billing.live import AfterPosition
from gateway.billing.usage.parts import Dimension, UsageFilter
from gateway.billing.usage.query import decode_cursor, encode_cursor, read_month
from gateway.billing.usage.service import UsageService
from gateway.console.rendering import page
from gateway.console.routing import OperatorRoute
from gateway.console.statement_pages import (
    latest_months,
    statement_file,
    statement_page,
    statements_list,
)
from gateway.console.usage_query import by_dimension
from gateway.http.services import AllServices
from gateway.limits.store import QuotaStore

ROWS: Final = 50
MOST_PREPAID: Final = 10_000
"""Prepaid tenants whose credits are looked at, the newest ones."""
MOST_USED_UP: Final = 500
"""Tenants without credits that are shown, those with the least first."""

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console/money")
async def money(
    request: Request,
    services: AllServices,
    tenants: Tenants,
    *,
    month: Annotated[str, Query(max_length=7)] = "",
    after: AfterPosition = None,
) -> Response:
    """Show prepaid tenants whose credits are used up, and the amount of each tenant in a month."""
    months = latest_months()
    month = month or months[0][0]
    prepaid = await tenants.prepaid(limit=MOST_PREPAID + 1)
    names = {tenant.id: tenant.name for tenant in prepaid[:MOST_PREPAID]}
    left = await services[QuotaStore].credits(list(names))
    used_up = sorted((micros, tenant_id) for tenant_id, micros in left.items() if micros <= 0)
    rows, following = await by_dimension(
        services.make(UsageService),
        UsageFilter(tenant_id=None),
        read_month(month),
        Dimension.TENANT,
        after=decode_cursor(after, parts=2),
        limit=ROWS,
    )
    return page(
        request,
        "operators/money.html",
        used_up=[(each, names[each], micros) for micros, each in used_up[:MOST_USED_UP]],
        hidden=max(len(used_up) - MOST_USED_UP, 0),
        unknown=len(names) - len(left),
        is_complete=len(prepaid) <= MOST_PREPAID,
        month=month,
        months=months,
        rows=rows,
        following=following and f"/console/money?month={month}&after={encode_cursor(*following)}",
    )


@router.get("/console/tenants/{tenant_id}/invoices")
async def list_months(
    request: Request, services: AllServices, tenants: Tenants, tenant_id: TenantId
) -> Response:
    """List the latest months of a tenant."""
    tenant = await tenants.get(tenant_id)
    return await statements_list(request, services, _path(tenant.id), tenant_id=tenant.id)


@router.get("/console/tenants/{tenant_id}/invoices/{month}.csv")
async def get_csv(services: AllServices, tenant_id: TenantId, month: Month) -> Response:
    """Return a statement of a tenant as CSV."""
    return await statement_file(services, tenant_id=tenant_id, month=month)


@router.get("/console/tenants/{tenant_id}/invoices/{month}")
async def show_statement(
    request: Request, services: AllServices, tenant_id: TenantId, month: Month
) -> Response:
    """Show a statement of a tenant."""
    return await statement_page(
        request, services, _path(tenant_id), tenant_id=tenant_id, month=month
    )


def _path(tenant_id: str) -> str:
    return f"/console/tenants/{quote(tenant_id, safe='')}/invoices"
