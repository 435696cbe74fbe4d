"""Monthly statements, which equal the ledger to the micro-dollar.

Tenants have these routes at `/v1/invoices`, operators at `/admin/tenants/{tenant_id}/invoices`.
"""

from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Annotated, Final, Literal

from fastapi import Path, Query, Response
from pydantic import BaseModel, Field

from gateway.accounts.routes_common import OfTenant, TenantRouter, own_tenant
from gateway.accounts.tenants.service import find_tenant
from gateway.billing.usage.parts import Dimension, UsageFilter
from gateway.billing.usage.periods import Bucket
from gateway.billing.usage.query import read_month
from gateway.billing.usage.routes import WITH_CSV
from gateway.billing.usage.schemas import to_csv
from gateway.billing.usage.service import ReportRequest, UsageService
from gateway.http.services import made
from gateway.platform.database.engine import Database
from gateway.records.records import Billing
from gateway.records.scopes import Scope
from gateway.records.times import utc_now

MOST_LINES: Final = 100_000
"""More than models and tiers of any deployment: a statement is one query, of one state."""
_CENT: Final = Decimal("1E4")


class LineBody(BaseModel):
    """Usage of one model in one service tier."""

    model: str
    service_tier: str
    requests: int
    failed_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    audio_seconds: int
    cost_micros: int


class StatementBody(BaseModel):
    """What a tenant used in a month."""

    object: Literal["invoice"] = "invoice"
    tenant: str
    tenant_name: str
    month: str
    start: datetime
    end: datetime = Field(description="End of the month, exclusive.")
    is_open: bool = Field(description="Whether the month has not ended yet.")
    billing: Billing
    lines: list[LineBody]
    total_micros: int = Field(description="Micro-dollars: the sum of the ledger's rows.")


class InvoiceService:
    """Makes statements from the ledger's sums."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def statement(self, tenant_id: str, month: str) -> StatementBody:
        """Return the statement of a month such as 2026-11.

        Raises InvalidParameterError and NotFoundError.
        """
        span = read_month(month)
        async with self._database.reading() as transaction:
            tenant = await find_tenant(transaction, tenant_id)
        report = await UsageService(self._database).report(
            ReportRequest(
                wanted=UsageFilter(tenant_id=tenant_id),
                span=span,
                bucket=Bucket.TOTAL,
                dimensions=(Dimension.MODEL, Dimension.SERVICE_TIER),
            ),
            after=None,
            limit=MOST_LINES,
        )
        return StatementBody(
            tenant=tenant_id,
            tenant_name=tenant.name,
            month=f"{span.start:%Y-%m}",
            start=span.start,
            end=span.end,
            is_open=utc_now() < span.end,
            billing=tenant.billing,
            lines=[
                LineBody.model_validate({**each.values, **each.sums._asdict()})
                for each in report.slices
            ],
            total_micros=sum(each.sums.cost_micros for each in report.slices),
        )


def with_tax(total_micros: int, percent: Decimal) -> tuple[int, int]:
    """Return an amount and the tax on it, in micro-dollars, each rounded to cents."""
    net = Decimal(total_micros).quantize(_CENT, ROUND_HALF_UP)
    tax = (net * percent / 100).quantize(_CENT, ROUND_HALF_UP)
    return int(net), int(tax)


COLUMNS: Final = ("month", *LineBody.model_fields)

router = TenantRouter("/invoices", "Usage", own_tenant(Scope.USAGE, of_tenant=True))

Month = Annotated[str, Path(max_length=7, description="A UTC month, such as `2026-11`.")]


@router.get(
    "/{month}",
    summary="Get the statement of a month",
    response_model=StatementBody,
    responses=WITH_CSV,
)
async def get_statement(
    invoices: Annotated[InvoiceService, made(InvoiceService)],
    caller: OfTenant,
    month: Month,
    format_: Annotated[
        Literal["json", "csv"], Query(alias="format", description="Form of the statement.")
    ] = "json",
) -> Response | StatementBody:
    """Get the usage and cost of a month by model and service tier.

    `/v1/invoices` needs the scope `usage` and a credential of the whole account. A request counts
    in the month in which it was admitted.
    """
    statement = await invoices.statement(caller.tenant_id, month)
    return statement_csv(statement) if format_ == "csv" else statement


def statement_csv(statement: StatementBody) -> Response:
    """Return a statement as CSV, one row for each line."""
    rows = ((statement.month, *line.model_dump().values()) for line in statement.lines)
    name = f"{statement.tenant}-invoice-{statement.month}.csv"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(to_csv(COLUMNS, rows), media_type="text/csv", headers=headers)
