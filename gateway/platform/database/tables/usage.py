"""Usage and its sums.

Tables `usage_ledger`, `usage_rollups`, `usage_dirty_hours`, `service_rollups` and
`service_rejections`.
"""

from datetime import datetime
from enum import StrEnum
from typing import Final

from sqlalchemy import BigInteger, Enum, Index, Integer, String, text
from sqlalchemy.orm import Mapped, mapped_column

from contract.tier import ServiceTier
from gateway.platform.database.tables.base import Table, TierName, UtcDateTime
from gateway.records.first_tokens import BOUNDS_MS
from gateway.records.usage_record import Outcome

FAILED_OUTCOMES: Final = (Outcome.FAILED, Outcome.LOST, Outcome.TIMED_OUT)
"""Outcomes that count as failed requests in sums."""

SUMMED: Final = ("prompt_tokens", "completion_tokens", "cost_micros")
"""Columns in the PostgreSQL indexes, so that monthly usage is summed with index-only scans."""

FIRST_TOKENS: Final = (*(f"first_token_le_{bound}" for bound in BOUNDS_MS), "first_token_more")
"""Columns of sums: requests by their time to the first token in milliseconds; null for none.

Most buckets of most sums are empty, and a null takes no space.
"""


class RollupPeriod(StrEnum):
    """Length of a sum's period."""

    HOUR = "hour"
    DAY = "day"  # A UTC day.


_PERIOD: Final = Enum(
    RollupPeriod,
    name="period",
    native_enum=False,
    length=32,
    values_callable=lambda members: [member.value for member in members],
)


class LedgerRow(Table):
    """One ended request. The database rejects changes and removals of rows.

    PostgreSQL stores each month in a separate partition, so the time of the admission is part of
    the key; it is the same in every copy of a request's record. Text columns have no length limit:
    every record must fit.
    """

    __tablename__ = "usage_ledger"
    __table_args__ = (
        Index("ix_usage_ledger_tenant_id", "tenant_id", "created_at", postgresql_include=SUMMED),
        Index("ix_usage_ledger_project_id", "project_id", "created_at", postgresql_include=SUMMED),
        Index(
            "ix_usage_ledger_credential_id",
            "credential_id",
            "created_at",
            postgresql_include=SUMMED,
        ),
        Index("ix_usage_ledger_created_at", "created_at"),
        # A credit balance needs no other column, and rows of other tenants are not in it.
        Index(
            "ix_usage_ledger_prepaid",
            "tenant_id",
            "cost_micros",
            postgresql_where=text("is_prepaid"),
            sqlite_where=text("is_prepaid"),
        ),
        {"postgresql_partition_by": "RANGE (created_at)"},
    )

    request_id: Mapped[str] = mapped_column(String, primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    """When the request was admitted."""
    ended_at: Mapped[datetime] = mapped_column(UtcDateTime)
    tenant_id: Mapped[str] = mapped_column(String)
    """No foreign key, nor for the next two: usage is recorded even for a missing tenant."""
    project_id: Mapped[str | None] = mapped_column(String)
    credential_id: Mapped[str] = mapped_column(String)
    model: Mapped[str] = mapped_column(String)
    endpoint: Mapped[str] = mapped_column(String)
    dialect: Mapped[str] = mapped_column(String)
    service_tier: Mapped[ServiceTier] = mapped_column(TierName)
    is_streamed: Mapped[bool]
    is_prepaid: Mapped[bool]
    gateway: Mapped[str] = mapped_column(String)
    jobs: Mapped[int] = mapped_column(BigInteger)
    prompt_price: Mapped[int] = mapped_column(BigInteger)
    cached_price: Mapped[int] = mapped_column(BigInteger)
    completion_price: Mapped[int] = mapped_column(BigInteger)
    outcome: Mapped[Outcome] = mapped_column(
        # The database does not check the names, so that a release can add one.
        Enum(
            Outcome,
            name="outcome",
            native_enum=False,
            length=32,
            values_callable=lambda members: [member.value for member in members],
        )
    )
    code: Mapped[str] = mapped_column(String)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    free_prompt_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """Tokens that are not charged. Negative if a row makes tokens of an earlier row chargeable."""
    free_cached_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    free_completion_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cost_micros: Mapped[int] = mapped_column(BigInteger)
    first_token_ms: Mapped[int] = mapped_column(BigInteger)
    engine: Mapped[str] = mapped_column(String, server_default="")


class RollupRow(Table):
    """Sums over one hour or one day, derived from ledger rows and recomputed for new rows."""

    __tablename__ = "usage_rollups"
    __table_args__ = (Index("ix_usage_rollups_tenant_id", "tenant_id", "period", "start_at"),)

    period: Mapped[RollupPeriod] = mapped_column(_PERIOD, primary_key=True)
    start_at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String, primary_key=True)
    project_id: Mapped[str] = mapped_column(String, primary_key=True)
    """Empty for requests without a project."""
    credential_id: Mapped[str] = mapped_column(String, primary_key=True)
    model: Mapped[str] = mapped_column(String, primary_key=True)
    service_tier: Mapped[ServiceTier] = mapped_column(TierName, primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    failed_requests: Mapped[int] = mapped_column(BigInteger)
    """Requests with `FAILED_OUTCOMES`, which `requests` includes."""
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    cost_micros: Mapped[int] = mapped_column(BigInteger)


class ServiceRollupRow(Table):
    """Requests of all tenants to one model, without lines of batches, for the public status page.

    Requests to an adapter count for its base model. The sums are derived like those of `RollupRow`.
    """

    __tablename__ = "service_rollups"

    period: Mapped[RollupPeriod] = mapped_column(_PERIOD, primary_key=True)
    start_at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    model: Mapped[str] = mapped_column(String, primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    """Requests that finished or that the service failed: not cancelled ones and client errors."""
    failed_requests: Mapped[int] = mapped_column(BigInteger)
    """Those that the service failed."""


class RejectionRow(Table):
    """Requests of one hour that the service rejected before any work; they have no ledger row."""

    __tablename__ = "service_rejections"

    hour: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    model: Mapped[str] = mapped_column(String, primary_key=True)
    """Empty if the request was rejected before its model was known."""
    requests: Mapped[int] = mapped_column(BigInteger)


for _table in (RollupRow, ServiceRollupRow):
    for _name in FIRST_TOKENS:
        setattr(_table, _name, mapped_column(BigInteger, nullable=True))


class DirtyHourRow(Table):
    """A mark: the ledger has rows of this hour that its sums may not include.

    Each transaction that adds rows adds its own marks. The summation removes only the marks that it
    has read before, so rows that are added meanwhile keep theirs.
    """

    __tablename__ = "usage_dirty_hours"

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    hour: Mapped[datetime] = mapped_column(UtcDateTime)
    """The beginning of the hour."""
