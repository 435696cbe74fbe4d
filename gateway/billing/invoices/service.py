"""Monthly statements, which equal the ledger to the micro-dollar."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from gateway.accounts.tenants.service import find_tenant
from gateway.billing.usage.input import read_month
from gateway.billing.usage.parts import Dimension, UsageFilter, UsageSums
from gateway.billing.usage.periods import Bucket
from gateway.billing.usage.service import ReportRequest, UsageService
from gateway.platform.database.engine import Database
from gateway.records.records import Billing
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
