"""Monthly statements, which equal the ledger to the micro-dollar.

Tenants have these routes at `/v1/invoices`, operators at `/admin/tenants/{tenant_id}/invoices`.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, BeforeValidator, Field

from gateway.accounts.shared import CallerOfTenant, RecordBody, own_tenant
from gateway.accounts.tenants.service import find_tenant
from gateway.billing.usage.parts import Dimension, UsageFilter, UsageSums
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


@dataclass(frozen=True, slots=True)
class StatementLine:
    """Usage of one model in one service tier."""

    model: str
    service_tier: str
    sums: UsageSums


@dataclass(frozen=True, slots=True)
class Statement:
    """What a tenant used in a month."""

    tenant_id: str
    tenant_name: str
    billing: Billing
    start: datetime
    end: datetime
    is_open: bool
    """Whether the month has not ended yet."""
    lines: list[StatementLine]

    @property
    def month(self) -> str:
        """The month, such as 2026-11."""
        return f"{self.start:%Y-%m}"

    @property
    def total_micros(self) -> int:
        """The cost in micro-dollars."""
        return sum(line.sums.cost_micros for line in self.lines)


class InvoiceService:
    """Makes statements from the ledger's sums."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def statement(self, tenant_id: str, month: str) -> Statement:
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
        return Statement(
            tenant_id=tenant_id,
            tenant_name=tenant.name,
            billing=tenant.billing,
            start=span.start,
            end=span.end,
            is_open=utc_now() < span.end,
            lines=[
                StatementLine(
                    each.values[Dimension.MODEL], each.values[Dimension.SERVICE_TIER], each.sums
                )
                for each in report.slices
            ],
        )


COLUMNS: Final = (
    "month",
    "model",
    "service_tier",
    "requests",
    "failed_requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cost_micros",
)

router = APIRouter(prefix="/invoices", tags=["Usage"])
authorize_tenant = own_tenant(Scope.USAGE, of_tenant=True)

Month = Annotated[str, Path(max_length=7, description="A UTC month, such as `2026-11`.")]


class LineBody(BaseModel):
    """Usage of one model in one service tier."""

    model: str
    service_tier: str
    requests: int
    failed_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_micros: int


def _bodies(lines: list[StatementLine]) -> list[LineBody]:
    return [
        LineBody(model=each.model, service_tier=each.service_tier, **each.sums._asdict())
        for each in lines
    ]


class StatementBody(RecordBody):
    """What a tenant used in a month."""

    object: Literal["invoice"] = "invoice"
    tenant: str = Field(validation_alias="tenant_id")
    tenant_name: str
    month: str
    start: datetime
    end: datetime = Field(description="End of the month, exclusive.")
    is_open: bool = Field(description="Whether the month has not ended yet.")
    billing: Billing
    lines: Annotated[list[LineBody], BeforeValidator(_bodies)]
    total_micros: int = Field(description="Micro-dollars: the sum of the ledger's rows.")


@router.get(
    "/{month}",
    summary="Get the statement of a month",
    response_model=StatementBody,
    responses=WITH_CSV,
)
async def get_statement(
    invoices: Annotated[InvoiceService, made(InvoiceService)],
    caller: CallerOfTenant,
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
    if format_ == "csv":
        return statement_csv(statement)
    return StatementBody.of(statement)


def statement_csv(statement: Statement) -> Response:
    """Return a statement as CSV, one row for each line."""
    rows = (
        (statement.month, line.model, line.service_tier, *line.sums) for line in statement.lines
    )
    name = f"invoice-{statement.month}.csv"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(to_csv(COLUMNS, rows), media_type="text/csv", headers=headers)
