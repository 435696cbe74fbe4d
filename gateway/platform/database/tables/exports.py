"""Tables `usage_positions`, `export_sinks` and `export_batches`: export of the ledger."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from gateway.platform.database.tables.base import Table, UtcDateTime, enum_column

_SERIAL = BigInteger().with_variant(Integer, "sqlite")


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
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012 SQLAlchemy reads it.

    position: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    request_id: Mapped[str] = mapped_column(String)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class ExportSinkRow(Table):
    """How far the ledger is exported to one sink."""

    __tablename__ = "export_sinks"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    tag: Mapped[str] = mapped_column(String(8))
    """Random; part of Stripe's identifiers, so that two deployments never use the same ones."""
    position: Mapped[int] = mapped_column(BigInteger)
    """Rows up to here are in batches, or were exported."""
    closed_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """When the last window of a sink with windows was closed."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    paused_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    lease: Mapped[str] = mapped_column(String(32), default="")
    """The process that may send, if it runs an earlier release."""
    leased_until: Mapped[datetime] = mapped_column(UtcDateTime)
    """Until then, one process sends."""
    failures: Mapped[int] = mapped_column(BigInteger)
    """Failed attempts since the last success."""
    next_attempt_at: Mapped[datetime] = mapped_column(UtcDateTime)
    last_error: Mapped[str] = mapped_column(String(200))


class ExportBatchRow(Table):
    """A frozen part of the ledger: each attempt to send it has the same ids."""

    __tablename__ = "export_batches"
    __table_args__ = (
        Index("ix_export_batches_sink", "sink", "state", "attempts", "id"),
        Index("ix_export_batches_identifier", "sink", "identifier"),
    )

    id: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    sink: Mapped[str] = mapped_column(ForeignKey("export_sinks.name", ondelete="CASCADE"))
    state: Mapped[ExportBatchState] = mapped_column(enum_column(ExportBatchState, "state"))
    after: Mapped[int] = mapped_column(BigInteger)
    upto: Mapped[int] = mapped_column(BigInteger)
    """The batch has the positions above `after`, up to this one."""
    rows: Mapped[int] = mapped_column(BigInteger)
    oldest_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """When the first of its requests ended."""
    identifier: Mapped[str] = mapped_column(String(120))
    """Id of a single event; empty for several events, whose ids are those of their requests."""
    tenant_id: Mapped[str | None] = mapped_column(String)
    """For a sum: the tenant, ..."""
    customer: Mapped[str] = mapped_column(String(255))
    """... its customer in the billing system, ..."""
    cost_micros: Mapped[int | None] = mapped_column(BigInteger)
    """... the sum (null for single requests, which are read from the ledger), ..."""
    occurred_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """... and the time of its last request."""
    attempts: Mapped[int] = mapped_column(BigInteger)
    uncertain_since: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """First attempt since which the sink may have stored the batch."""
    last_error: Mapped[str] = mapped_column(String(200))
