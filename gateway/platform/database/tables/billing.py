"""Prices, credits, usage with its sums, and the export of usage to billing systems.

Tables `prices` and `credits`, which are append-only, `usage_ledger`, `usage_rollups`,
`usage_dirty_hours`, `prepaid_sums`, `service_rollups`, `service_rejections`, `usage_positions`,
`export_sinks` and `export_batches`.
"""

from datetime import datetime
from enum import StrEnum
from typing import Final

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, String, select, text
from sqlalchemy.orm import Mapped, column_property, mapped_column

from contract.tier import ServiceTier
from gateway.platform.database.tables.base import (
    Recorded,
    Serial,
    Table,
    TenantId,
    enum_column,
)
from gateway.records.records import Credit, CreditKind, Price
from gateway.records.times import EPOCH
from gateway.records.usage_record import BOUNDS_MS, Outcome

FAILED_OUTCOMES: Final = (Outcome.FAILED, Outcome.LOST, Outcome.TIMED_OUT)
"""Outcomes that count as failed requests in sums."""

LATE: Final = ".late"
"""Suffix of the id of a row with what a later settlement of a request has more."""

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


class LedgerRow(Table):
    """One ended request, or what a later settlement of it has more (`LATE`).

    The database rejects changes and removals of rows. PostgreSQL stores each month in a separate
    partition, so the time of the admission is part of the key; it is the same in every copy of a
    request's record. Text columns have no length limit: every record must fit.
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
        Index(
            "ix_usage_ledger_end_user",
            "tenant_id",
            "end_user",
            "created_at",
            postgresql_where=text("end_user <> ''"),
            sqlite_where=text("end_user <> ''"),
        ),
        # For the correction of `prepaid_sums`.
        Index(
            "ix_usage_ledger_prepaid",
            "tenant_id",
            "cost_micros",
            postgresql_where=text("is_prepaid"),
            sqlite_where=text("is_prepaid"),
        ),
        {"postgresql_partition_by": "RANGE (created_at)"},
    )

    request_id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(primary_key=True)
    """When the request was admitted."""
    ended_at: Mapped[datetime]
    tenant_id: Mapped[str]
    """No foreign key, nor for the next two: usage is recorded even for a missing tenant."""
    project_id: Mapped[str | None]
    credential_id: Mapped[str]
    model: Mapped[str]
    endpoint: Mapped[str]
    dialect: Mapped[str]
    service_tier: Mapped[ServiceTier]
    is_streamed: Mapped[bool]
    is_prepaid: Mapped[bool]
    gateway: Mapped[str]
    jobs: Mapped[int]
    prompt_price: Mapped[int]
    cached_price: Mapped[int]
    completion_price: Mapped[int]
    audio_price: Mapped[int] = mapped_column(server_default="0")
    outcome: Mapped[Outcome]
    code: Mapped[str]
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    audio_seconds: Mapped[int] = mapped_column(server_default="0")
    free_prompt_tokens: Mapped[int] = mapped_column(server_default="0")
    """Tokens that are not charged. Negative if a row makes tokens of an earlier row chargeable."""
    free_cached_tokens: Mapped[int] = mapped_column(server_default="0")
    free_completion_tokens: Mapped[int] = mapped_column(server_default="0")
    free_audio_seconds: Mapped[int] = mapped_column(server_default="0")
    cost_micros: Mapped[int]
    first_token_ms: Mapped[int]
    engine: Mapped[str] = mapped_column(server_default="")
    preemptions: Mapped[int] = mapped_column(server_default="0")
    recomputed_tokens: Mapped[int] = mapped_column(server_default="0")
    exactness_class: Mapped[str] = mapped_column(server_default="")
    class_crossings: Mapped[int] = mapped_column(server_default="0")
    end_user: Mapped[str] = mapped_column(server_default="")
    """Empty unless the tenant limits end users."""


IS_FIRST: Final = ~LedgerRow.request_id.contains(LATE)
"""Whether a row is the first one of its request: only this one counts as a request in sums."""


class RollupRow(Table):
    """Sums over one hour or one day, derived from ledger rows and recomputed for new rows."""

    __tablename__ = "usage_rollups"
    __table_args__ = (Index("ix_usage_rollups_tenant_id", "tenant_id", "period", "start_at"),)

    period: Mapped[RollupPeriod] = mapped_column(primary_key=True)
    start_at: Mapped[datetime] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(primary_key=True)
    """Empty for requests without a project."""
    credential_id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    service_tier: Mapped[ServiceTier] = mapped_column(primary_key=True)
    requests: Mapped[int]
    failed_requests: Mapped[int]
    """Requests with `FAILED_OUTCOMES`, which `requests` includes."""
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    audio_seconds: Mapped[int] = mapped_column(server_default="0")
    cost_micros: Mapped[int]


class ServiceRollupRow(Table):
    """Requests of all tenants to one model, without lines of batches, for the public status page.

    Requests to an adapter count for its base model. The sums are derived like those of `RollupRow`.
    """

    __tablename__ = "service_rollups"

    period: Mapped[RollupPeriod] = mapped_column(primary_key=True)
    start_at: Mapped[datetime] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[int]
    """Requests that finished or that the service failed: not cancelled ones and client errors."""
    failed_requests: Mapped[int]
    """Those that the service failed."""


class RejectionRow(Table):
    """Requests of one hour that the service rejected before any work; they have no ledger row."""

    __tablename__ = "service_rejections"

    hour: Mapped[datetime] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    """Empty if the request was rejected before its model was known."""
    requests: Mapped[int]


for _table in (RollupRow, ServiceRollupRow):
    for _name in FIRST_TOKENS:
        setattr(_table, _name, mapped_column(BigInteger, nullable=True))


class DirtyHourRow(Table):
    """A mark: the ledger has rows of this hour that its sums may not include.

    Each transaction that adds rows adds its own marks. The summation removes only the marks that it
    has read before, so rows that are added meanwhile keep theirs.
    """

    __tablename__ = "usage_dirty_hours"

    id: Mapped[Serial]
    hour: Mapped[datetime]
    """The beginning of the hour."""


class PrepaidSumRow(Table):
    """A part of what the prepaid requests of a tenant cost; a trigger of the ledger adds them."""

    __tablename__ = "prepaid_sums"

    id: Mapped[Serial]
    tenant_id: Mapped[str] = mapped_column(index=True)
    cost_micros: Mapped[int]


class PriceRemovalRow(Table):
    """The removal of a price, whose row never changes."""

    __tablename__ = "price_removals"

    price_id: Mapped[int] = mapped_column(
        ForeignKey("prices.id", ondelete="RESTRICT"), primary_key=True, autoincrement=False
    )
    removed_at: Mapped[datetime]


class PriceRow(Recorded[Price], Table):
    """Price of a model in a tier from a given time on."""

    __tablename__ = "prices"
    __table_args__ = (
        CheckConstraint(
            "0 <= cached_micros AND cached_micros <= prompt_micros AND 0 <= completion_micros",
            name="micros",
        ),
        Index("ix_prices_model", "model", "service_tier", "effective_at"),
    )

    id: Mapped[Serial] = mapped_column()
    model: Mapped[str] = mapped_column(String(200))
    service_tier: Mapped[ServiceTier]
    prompt_micros: Mapped[int]
    cached_micros: Mapped[int]
    completion_micros: Mapped[int]
    audio_micros: Mapped[int] = mapped_column(server_default="0")
    effective_at: Mapped[datetime]
    created_at: Mapped[datetime]
    removed_at: Mapped[datetime | None] = column_property(
        select(PriceRemovalRow.removed_at)
        .where(PriceRemovalRow.price_id == id)  # noqa: A003 - the column of this class.
        .correlate_except(PriceRemovalRow)
        .scalar_subquery()
    )


class CreditRow(Recorded[Credit], Table):
    """One change of a tenant's prepaid balance."""

    __tablename__ = "credits"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(index=True)
    kind: Mapped[CreditKind] = mapped_column(enum_column(CreditKind, "kind"))
    amount_micros: Mapped[int]
    note: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    grant_id: Mapped[str | None] = mapped_column(
        ForeignKey("credits.id", ondelete="RESTRICT"), unique=True
    )
    """Unique, since a grant expires once."""


class ExportBatchState(StrEnum):
    """State of a frozen part of the ledger that its sink has not confirmed."""

    PENDING = "pending"  # It is sent until the sink confirms or rejects it.
    HELD = "held"  # Its tenant has no customer in the billing system.
    REJECTED = "rejected"  # The sink did not accept it; an operator retries or discards it.
    UNCERTAIN = "uncertain"  # Sending it again could charge twice; an operator decides.


class PositionRow(Table):
    """A row of the ledger that some sink still has to export.

    Transactions that add rows take a lock before they number them, and hold it until the commit. So
    positions have the order of the commits: a reader that sees one sees all lower ones.
    """

    __tablename__ = "usage_positions"
    # SQLite would otherwise number from 1 again once the table is empty.
    __table_args__ = ({"sqlite_autoincrement": True},)

    position: Mapped[Serial]
    request_id: Mapped[str]
    created_at: Mapped[datetime]


class ExportSinkRow(Table):
    """How far the ledger is exported to one sink."""

    __tablename__ = "export_sinks"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    tag: Mapped[str] = mapped_column(String(8))
    """Random; part of Stripe's identifiers, so that two deployments never use the same ones."""
    position: Mapped[int]
    """Rows up to here are in batches, or were exported."""
    closed_at: Mapped[datetime]
    """When the last window of a sink with windows was closed."""
    created_at: Mapped[datetime]
    paused_at: Mapped[datetime | None]
    lease: Mapped[str] = mapped_column(String(32), default="")
    """The process that may send, if it runs an earlier release."""
    leased_until: Mapped[datetime] = mapped_column(default=EPOCH)
    """Until then, one process sends."""
    failures: Mapped[int] = mapped_column(default=0)
    """Failed attempts since the last success; of batches sent at once, one counts."""
    next_attempt_at: Mapped[datetime] = mapped_column(default=EPOCH)
    last_error: Mapped[str] = mapped_column(String(200), default="")


class ExportBatchRow(Table):
    """A frozen part of the ledger: each attempt to send it has the same ids."""

    __tablename__ = "export_batches"
    __table_args__ = (
        Index("ix_export_batches_sink", "sink", "state", "attempts", "id"),
        Index("ix_export_batches_identifier", "sink", "identifier"),
    )

    id: Mapped[Serial]
    sink: Mapped[str] = mapped_column(ForeignKey("export_sinks.name", ondelete="CASCADE"))
    state: Mapped[ExportBatchState] = mapped_column(
        enum_column(ExportBatchState, "state"), default=ExportBatchState.PENDING
    )
    after: Mapped[int]
    upto: Mapped[int]
    """The batch has the positions above `after`, up to this one."""
    rows: Mapped[int]
    oldest_at: Mapped[datetime]
    """When the first of its requests ended."""
    identifier: Mapped[str] = mapped_column(String(120), default="")
    """Id of a single event; empty for several events, whose ids are those of their requests."""
    tenant_id: Mapped[str | None]
    """For a sum: the tenant, ..."""
    customer: Mapped[str] = mapped_column(String(255), default="")
    """... its customer in the billing system, ..."""
    cost_micros: Mapped[int | None]
    """... the sum (null for single requests, which are read from the ledger), ..."""
    occurred_at: Mapped[datetime]
    """... and the time of its last request."""
    attempts: Mapped[int] = mapped_column(default=0)
    uncertain_since: Mapped[datetime | None]
    """First attempt since which the sink may have stored the batch."""
    last_error: Mapped[str] = mapped_column(String(200), default="")
