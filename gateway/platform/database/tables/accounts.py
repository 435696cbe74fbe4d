"""Tables `plans`, `tenants`, `spend_limits`, `projects`, `members`, `api_keys`, `webhooks` and
`audit_log`.
"""

from dataclasses import asdict
from datetime import datetime
from ipaddress import ip_network
from typing import Self

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import Mapped, mapped_column

from contract.dialect import Dialect
from contract.tier import ServiceTier
from gateway.platform.database.tables.base import (
    OriginsColumn,
    Recorded,
    Table,
    TenantId,
    enum_column,
    record_of,
)
from gateway.records.limits import LimitScope, LimitValues, SpendScope, Window
from gateway.records.records import (
    AnomalyAction,
    Billing,
    KeyRecord,
    Member,
    Plan,
    Project,
    ProjectStatus,
    Tenant,
    TenantStatus,
    Webhook,
)
from gateway.records.scopes import Role, Scope
from gateway.records.spending import SpendAlert, SpendLimit


class PlanRow(Table):
    """Default limits for a group of tenants."""

    __tablename__ = "plans"

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    tenant_limits: Mapped[LimitValues]
    project_limits: Mapped[LimitValues]
    key_limits: Mapped[LimitValues]
    spend_limits: Mapped[dict[str, int]] = mapped_column(server_default="{}")
    created_at: Mapped[datetime]

    def to_record(self) -> Plan:
        """Return the row as a record for other packages."""
        limits = {scope: getattr(self, f"{scope}_limits") for scope in LimitScope}
        return record_of(self, Plan, limits=limits)


class TenantRow(Recorded[Tenant], Table):
    """One tenant."""

    __tablename__ = "tenants"
    __table_args__ = (CheckConstraint("weight > 0", name="weight_positive"),)

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    weight: Mapped[float]
    status: Mapped[TenantStatus] = mapped_column(enum_column(TenantStatus, "status"))
    created_at: Mapped[datetime]
    dialect: Mapped[Dialect | None]
    strict_parameters: Mapped[bool] = mapped_column(server_default=false())
    default_model: Mapped[str | None] = mapped_column(String(200))
    plan_id: Mapped[str | None] = mapped_column(String(63), index=True)
    """No foreign key: SQLite cannot add one to an existing table; plans are never removed."""
    limits: Mapped[LimitValues] = mapped_column(server_default="{}")
    billing: Mapped[Billing] = mapped_column(server_default=Billing.POSTPAID.value)
    service_tier: Mapped[ServiceTier] = mapped_column(server_default=ServiceTier.DEFAULT.value)
    shows_cost: Mapped[bool] = mapped_column(server_default=false())
    zero_retention: Mapped[bool] = mapped_column(server_default=false())
    cors_origins: Mapped[tuple[str, ...]] = mapped_column(OriginsColumn, nullable=True)
    stripe_customer_id: Mapped[str | None] = mapped_column(String(255))
    time_zone: Mapped[str] = mapped_column(String(63), server_default="UTC")
    anomaly_factor: Mapped[int | None] = mapped_column(Integer)
    anomaly_repeats: Mapped[int | None] = mapped_column(Integer)
    anomaly_action: Mapped[AnomalyAction] = mapped_column(
        enum_column(AnomalyAction, "anomaly_action"), server_default=AnomalyAction.STOP.value
    )
    prompt_log_key: Mapped[str | None] = mapped_column(Text)
    prompt_log_days: Mapped[int | None] = mapped_column(Integer)


class SpendLimitRow(Recorded[SpendLimit], Table):
    """The most that a holder may spend in a window."""

    __tablename__ = "spend_limits"
    __table_args__ = (Index("ix_spend_limits_holder", "tenant_id", "scope", "holder"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[TenantId]
    scope: Mapped[SpendScope] = mapped_column(enum_column(SpendScope, "scope"))
    holder: Mapped[str | None] = mapped_column(String(300))
    model: Mapped[str | None] = mapped_column(String(300))
    window: Mapped[Window] = mapped_column(enum_column(Window, "window"))
    starts_on: Mapped[int] = mapped_column(Integer)
    amount_micros: Mapped[int | None]
    repeats: Mapped[int | None] = mapped_column(Integer)
    limits: Mapped[LimitValues]
    raised_micros: Mapped[int | None]
    raised_until: Mapped[datetime | None]
    raise_reason: Mapped[str | None] = mapped_column(String(300))
    is_automatic: Mapped[bool]
    is_enforced: Mapped[bool]
    is_operators: Mapped[bool]
    is_from_plan: Mapped[bool] = mapped_column(server_default=false())
    created_at: Mapped[datetime]

    time_zone = "UTC"
    """The tenant has it."""

    @classmethod
    def of(cls, limit: SpendLimit) -> Self:
        """Return the row of a new spend limit."""
        columns = asdict(limit)
        del columns["time_zone"]
        return cls(**columns)


class SpendAlertRow(Recorded[SpendAlert], Table):
    """Mail for each month in which a tenant or a project has spent an amount."""

    __tablename__ = "spend_alerts"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(index=True)
    project_id: Mapped[str | None] = mapped_column(String(32))
    amount_micros: Mapped[int]
    recipients: Mapped[list[str]]
    subject_prefix: Mapped[str | None] = mapped_column(String(200))
    sent_month: Mapped[str] = mapped_column(String(7))
    created_at: Mapped[datetime]


class ProjectRow(Recorded[Project], Table):
    """A part of a tenant; archived projects are kept, so that usage can be traced to them."""

    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(index=True)
    name: Mapped[str] = mapped_column(String(200))
    status: Mapped[ProjectStatus] = mapped_column(enum_column(ProjectStatus, "status"))
    created_at: Mapped[datetime]
    limits: Mapped[LimitValues]


class MemberRow(Recorded[Member], Table):
    """A person of a tenant."""

    __tablename__ = "members"
    __table_args__ = (
        UniqueConstraint("tenant_id", "subject"),
        UniqueConstraint("tenant_id", "email", name="uq_members_email"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[TenantId]
    subject: Mapped[str | None] = mapped_column(String(255), index=True)
    issuer: Mapped[str | None] = mapped_column(String(255))
    email: Mapped[str | None] = mapped_column(String(200), index=True)
    name: Mapped[str] = mapped_column(String(200))
    role: Mapped[Role] = mapped_column(enum_column(Role, "role"))
    created_at: Mapped[datetime]


class ApiKeyRow(Table):
    """One key; revoked keys are kept, so that usage can be traced to them."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(index=True)
    prefix: Mapped[str] = mapped_column(String(12), unique=True)
    """The public part of the key, used for look-ups."""
    digest: Mapped[bytes] = mapped_column(LargeBinary(32))
    """SHA-256 of the whole key."""
    name: Mapped[str] = mapped_column(String(200))
    scopes: Mapped[list[str]]
    allowed_models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Models that the key may use; null means all."""
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    dialect: Mapped[Dialect | None]
    project_id: Mapped[str | None] = mapped_column(String(32), index=True)
    """No foreign key, see `TenantRow.plan_id`; projects are never removed."""
    allowed_addresses: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Networks such as `10.0.0.0/8`; null means any."""
    limits: Mapped[LimitValues] = mapped_column(server_default="{}")
    old_prefix: Mapped[str | None] = mapped_column(String(12), index=True)
    old_digest: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    old_expires_at: Mapped[datetime | None]

    def to_record(self) -> KeyRecord:
        """Return the row as a record for other packages."""
        models, addresses = self.allowed_models, self.allowed_addresses
        return record_of(
            self,
            KeyRecord,
            scopes=frozenset(scope for scope in Scope if scope in self.scopes),
            allowed_models=None if models is None else frozenset(models),
            allowed_addresses=None if addresses is None else tuple(map(ip_network, addresses)),
        )


class WebhookRow(Table):
    """A URL to which a tenant's events are sent."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(index=True)
    url: Mapped[str] = mapped_column(String(2000))
    secret: Mapped[str] = mapped_column(String(100))
    """Plain secret from a release without encryption, until it is encrypted; else empty."""
    sealed_secret: Mapped[bytes | None] = mapped_column(LargeBinary(500))
    """See `gateway.accounts.webhooks.secret_box`."""
    thresholds: Mapped[list[int]]
    created_at: Mapped[datetime]
    removed_at: Mapped[datetime | None]

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
    threshold: Mapped[int] = mapped_column(Integer)
    body: Mapped[str]
    """Body of the request: JSON."""
    created_at: Mapped[datetime]
    attempts: Mapped[int]
    next_attempt_at: Mapped[datetime | None]
    """Null once it was delivered or abandoned."""
    delivered_at: Mapped[datetime | None]
    last_error: Mapped[str] = mapped_column(String(200))


class AuditRow(Table):
    """One change. The database rejects changes and removals of rows."""

    __tablename__ = "audit_log"

    sequence: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False
    )
    """1, 2, 3 ... without gaps."""
    at: Mapped[datetime]
    actor: Mapped[str] = mapped_column(String(300))
    """`key:KEY_ID`, `jwt:SUBJECT`, `cli:USER` or `system`."""
    action: Mapped[str] = mapped_column(String(63))
    """Such as `key.revoke`."""
    tenant_id: Mapped[str | None] = mapped_column(String(63), index=True)
    subject: Mapped[str] = mapped_column(String(300))
    """Id of the changed object."""
    details: Mapped[str]
    """The new values: JSON with sorted names, never a secret."""
    previous_hash: Mapped[bytes] = mapped_column(LargeBinary(32))
    hash: Mapped[bytes] = mapped_column(LargeBinary(32))
