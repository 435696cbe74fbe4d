"""Usage and cost, as sums and per request: `/v1/usage` of the caller's tenant, `/admin/usage`."""

from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import Response

from gateway.accounts.routes_common import MAX_TEXT_CHARACTERS, PRINTABLE, CursorPage, text_filter
from gateway.billing.usage.pages import UsagePages
from gateway.billing.usage.parts import Dimension, UsageFilter
from gateway.billing.usage.query import (
    AskedBuckets,
    AskedPage,
    AskedSpan,
    WantedUsage,
    read_dimensions,
)
from gateway.billing.usage.schemas import (
    AnyReceiptBody,
    AnyUsageBody,
    ReceiptBody,
    Report,
    UsageBody,
    receipt_fields,
)
from gateway.billing.usage.service import LatencyBody, UsageService
from gateway.http.authorization import operators_router, requires
from gateway.http.services import made
from gateway.records.errors import PermissionDeniedError, shown
from gateway.records.principal import Principal
from gateway.records.scopes import Scope

router = APIRouter(tags=["Usage"])
operators = operators_router("Usage")

WITH_CSV: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/csv": {"schema": {"type": "string"}}}}
}
"""The response of a route whose form is JSON or CSV."""
DIMENSIONS: Final = (
    Dimension.MODEL,
    Dimension.KEY,
    Dimension.PROJECT,
    Dimension.SERVICE_TIER,
)

ALL_DIMENSIONS: Final = (Dimension.TENANT, *DIMENSIONS)

Pages = Annotated[UsagePages, made(UsagePages)]
Ledger = Annotated[UsageService, made(UsageService)]
TenantFilter = Annotated[str | None, text_filter("Only this tenant.")]
CanSeeOwnUsage = Annotated[Principal, Depends(requires(Scope.USAGE, Scope.COMPLETIONS))]
RequestId = Annotated[
    str,
    Path(
        max_length=MAX_TEXT_CHARACTERS,
        pattern=PRINTABLE,
        description="The completion's id, such as `cmpl-...` or `chatcmpl-...`.",
    ),
]


def group_by(known: tuple[Dimension, ...]) -> object:
    """Return the declaration of the `group_by` query parameter."""
    names = ", ".join(f"`{dimension}`" for dimension in known)
    return Query(
        alias="group_by", max_length=8, description=f"Any of {names}; repeated or comma-separated."
    )


@router.get(
    "/v1/usage",
    summary="Report your usage",
    response_model=Report[UsageBody],
    responses=WITH_CSV,
)
async def report(
    pages: Pages,
    principal: CanSeeOwnUsage,
    *,
    buckets: AskedBuckets,
    wanted: WantedUsage,
    page: AskedPage,
    groups: Annotated[list[str] | None, group_by(DIMENSIONS)] = None,
) -> Response:
    """Report requests, tokens and cost. The ledger records a request about a second after its end.

    With the scope `usage` you see your whole tenant, or your project with a project credential.
    With only `completions` you see the usage of the key itself.
    """
    return await pages.report(
        own_usage(principal, wanted),
        buckets,
        dimensions=read_dimensions(groups or (), DIMENSIONS),
        page=page,
        body=UsageBody,
    )


@router.get(
    "/v1/usage/requests",
    summary="List your requests with their usage",
    response_model=CursorPage[ReceiptBody, str],
    responses=WITH_CSV,
)
async def list_requests(
    pages: Pages,
    principal: CanSeeOwnUsage,
    *,
    span: AskedSpan,
    wanted: WantedUsage,
    page: AskedPage,
) -> Response:
    """List requests, newest first. Visibility is the same as for the sums."""
    wanted = own_usage(principal, wanted)
    return await pages.requests(wanted, span, page=page, body=ReceiptBody)


@router.get("/v1/usage/latency", summary="Report the time to the first token")
async def latency(
    ledger: Ledger, principal: CanSeeOwnUsage, *, span: AskedSpan, wanted: WantedUsage
) -> LatencyBody:
    """Report the time to the first token in a period, without lines of batches.

    Sluice counts requests in buckets that are 41 % apart, and interpolates within a bucket.
    Visibility is the same as for the sums.
    """
    return await ledger.latency(own_usage(principal, wanted), span)


@router.get("/v1/usage/requests/{request_id}", summary="Get the receipt of a request")
async def get_request(
    ledger: Ledger, principal: CanSeeOwnUsage, request_id: RequestId
) -> ReceiptBody:
    """Get the receipt of one request, with the prices that applied to it."""
    wanted = own_usage(principal, UsageFilter(tenant_id=None))
    record = await ledger.request(wanted, request_id)
    return ReceiptBody(**receipt_fields(record))


@operators.get(
    "/usage",
    name="report",
    summary="Report usage",
    response_model=Report[AnyUsageBody],
    responses=WITH_CSV,
)
async def report_any(
    pages: Pages,
    *,
    buckets: AskedBuckets,
    wanted: WantedUsage,
    page: AskedPage,
    tenant: TenantFilter = None,
    groups: Annotated[list[str] | None, group_by(ALL_DIMENSIONS)] = None,
) -> Response:
    """Report requests, tokens and cost of one tenant or of all tenants, from the ledger."""
    return await pages.report(
        replace(wanted, tenant_id=tenant),
        buckets,
        dimensions=read_dimensions(groups or (), ALL_DIMENSIONS),
        page=page,
        body=AnyUsageBody,
    )


@operators.get(
    "/usage/requests",
    name="list_requests",
    summary="List requests with their usage",
    response_model=CursorPage[AnyReceiptBody, str],
    responses=WITH_CSV,
)
async def list_any_requests(
    pages: Pages,
    *,
    span: AskedSpan,
    wanted: WantedUsage,
    page: AskedPage,
    tenant: TenantFilter = None,
) -> Response:
    """List requests of one tenant or of all tenants, newest first."""
    wanted = replace(wanted, tenant_id=tenant)
    return await pages.requests(wanted, span, page=page, body=AnyReceiptBody)


@operators.get(
    "/usage/requests/{request_id}", name="get_request", summary="Get the receipt of a request"
)
async def get_any_request(ledger: Ledger, request_id: RequestId) -> AnyReceiptBody:
    """Get the receipt of one request of any tenant."""
    wanted = UsageFilter(tenant_id=None)
    record = await ledger.request(wanted, request_id)
    return AnyReceiptBody(**receipt_fields(record))


def own_usage(principal: Principal, wanted: UsageFilter) -> UsageFilter:
    """Return the filter limited to what the caller may see. Raises PermissionDeniedError."""
    own = principal.project_id
    if own is not None and wanted.project_id not in (None, own):
        raise PermissionDeniedError(
            f"This credential sees only the usage of its project {shown(own)}. "
            f"Given: {shown(wanted.project_id)}.",
            param="project",
        )
    mine = replace(wanted, tenant_id=principal.tenant_id, project_id=own or wanted.project_id)
    if Scope.USAGE in principal.scopes:
        return mine
    if wanted.credential_id not in (None, principal.credential_id):
        raise PermissionDeniedError(
            "This credential sees only its own usage; that of other keys requires the scope "
            f"'{Scope.USAGE}'.",
            param="key",
        )
    return replace(mine, credential_id=principal.credential_id)
