"""Usage and cost of every tenant: `GET /admin/usage`."""

from dataclasses import replace
from typing import Annotated, Final

from fastapi import APIRouter
from fastapi.responses import Response

from gateway.http.authorization import CanSeeEverything, Context
from gateway.management.shared.parameters import text_filter
from gateway.management.usage.input import read_dimensions
from gateway.management.usage.pages import report_page, requests_page
from gateway.management.usage.parts import Dimension, UsageFilter
from gateway.management.usage.query import (
    AskedBuckets,
    AskedPage,
    AskedSpan,
    WantedUsage,
)
from gateway.management.usage.routes import DIMENSIONS, RequestId, group_by
from gateway.management.usage.schemas import (
    AnyReceiptBody,
    AnyReceiptList,
    AnyUsageBody,
    AnyUsageList,
    receipt_fields,
)
from gateway.management.usage.service import UsageService

router = APIRouter(tags=["Usage"])

ALL_DIMENSIONS: Final = (Dimension.TENANT, *DIMENSIONS)

TenantFilter = Annotated[str | None, text_filter("Only this tenant.")]


@router.get(
    "/usage",
    summary="Report usage",
    response_model=AnyUsageList,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
async def report(
    context: Context,
    _principal: CanSeeEverything,
    *,
    buckets: AskedBuckets,
    wanted: WantedUsage,
    page: AskedPage,
    tenant: TenantFilter = None,
    groups: Annotated[list[str] | None, group_by(ALL_DIMENSIONS)] = None,
) -> Response:
    """Report requests, tokens and cost of one tenant or of all tenants, from the ledger."""
    return await report_page(
        context,
        replace(wanted, tenant_id=tenant),
        buckets,
        dimensions=read_dimensions(groups or (), ALL_DIMENSIONS),
        page=page,
        body=AnyUsageBody,
    )


@router.get(
    "/usage/requests",
    summary="List requests with their usage",
    response_model=AnyReceiptList,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
async def list_requests(
    context: Context,
    _principal: CanSeeEverything,
    *,
    span: AskedSpan,
    wanted: WantedUsage,
    page: AskedPage,
    tenant: TenantFilter = None,
) -> Response:
    """List requests of one tenant or of all tenants, newest first."""
    wanted = replace(wanted, tenant_id=tenant)
    return await requests_page(context, wanted, span, page=page, body=AnyReceiptBody)


@router.get("/usage/requests/{request_id}", summary="Get the receipt of a request")
async def get_request(
    context: Context, _principal: CanSeeEverything, request_id: RequestId
) -> AnyReceiptBody:
    """Get the receipt of one request of any tenant."""
    wanted = UsageFilter(tenant_id=None)
    record = await UsageService(context.database).request(wanted, request_id)
    return AnyReceiptBody(**receipt_fields(record))
