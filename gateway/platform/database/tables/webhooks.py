"""Tables `webhooks` and `webhook_events`."""

from datetime import datetime

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, LargeBinary, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from gateway.platform.database.tables.base import Table, UtcDateTime, record_of
from gateway.records.records import Webhook


class WebhookRow(Table):
    """A URL to which a tenant's events are sent."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(
        ForeignKey("tenants.id", ondelete="RESTRICT"), index=True
    )
    url: Mapped[str] = mapped_column(String(2000))
    secret: Mapped[str] = mapped_column(String(100))
    """Plain secret from a release without encryption, until it is encrypted; else empty."""
    sealed_secret: Mapped[bytes | None] = mapped_column(LargeBinary(500))
    """See `gateway.accounts.webhooks.secret_box`."""
    thresholds: Mapped[list[int]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    removed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)

    def to_record(self) -> Webhook:
        """Return the row as a record for other packages."""
        return record_of(self, Webhook, thresholds=tuple(self.thresholds), secret="")


class WebhookEventRow(Table):
    """An event that a webhook receives once, and the state of its delivery."""

    __tablename__ = "webhook_events"
    __table_args__ = (
        UniqueConstraint("webhook_id", "kind", "subject", "period", "threshold"),
        Index("ix_webhook_events_due", "delivered_at", "next_attempt_at"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="RESTRICT"))
    kind: Mapped[str] = mapped_column(String(63))
    """For example `budget.threshold`."""
    subject: Mapped[str] = mapped_column(String(100))
    """Holder of the budget: `t:acme`, `p:prj_1`, `k:key_1`."""
    period: Mapped[str] = mapped_column(String(32))
    """The month, such as `2026-11`; empty if there is none."""
    threshold: Mapped[int]
    body: Mapped[str]
    """Body of the request: JSON."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    attempts: Mapped[int] = mapped_column(BigInteger)
    next_attempt_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Null once it was delivered or abandoned."""
    delivered_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_error: Mapped[str] = mapped_column(String(200))
