"""Tables `plans`, `tenants`, `projects` and `members`."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, String, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column

from contract.dialect import Dialect
from contract.tier import ServiceTier
from gateway.platform.database.tables.base import (
    DialectName,
    LimitsColumn,
    OriginsColumn,
    Table,
    TierName,
    UtcDateTime,
    enum_column,
    record_of,
)
from gateway.records.limits import LimitScope, LimitValues
from gateway.records.records import (
    Billing,
    Member,
    Plan,
    Project,
    ProjectStatus,
    Role,
    Tenant,
    TenantStatus,
)


class PlanRow(Table):
    """Default limits for a group of tenants."""

    __tablename__ = "plans"

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    tenant_limits: Mapped[LimitValues] = mapped_column(LimitsColumn)
    project_limits: Mapped[LimitValues] = mapped_column(LimitsColumn)
    key_limits: Mapped[LimitValues] = mapped_column(LimitsColumn)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)

    def to_record(self) -> Plan:
        """Return the row as a record for other packages."""
        limits = {scope: getattr(self, f"{scope}_limits") for scope in LimitScope}
        return record_of(self, Plan, limits=limits)


class TenantRow(Table):
    """One tenant."""

    __tablename__ = "tenants"
    __table_args__ = (CheckConstraint("weight > 0", name="weight_positive"),)

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    weight: Mapped[float]
    status: Mapped[TenantStatus] = mapped_column(enum_column(TenantStatus, "status"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    dialect: Mapped[Dialect | None] = mapped_column(DialectName)
    strict_parameters: Mapped[bool] = mapped_column(server_default=false())
    default_model: Mapped[str | None] = mapped_column(String(200))
    plan_id: Mapped[str | None] = mapped_column(String(63), index=True)
    """No foreign key: SQLite cannot add one to an existing table; plans are never removed."""
    limits: Mapped[LimitValues] = mapped_column(LimitsColumn, server_default="{}")
    billing: Mapped[Billing] = mapped_column(
        enum_column(Billing, "billing", is_checked=False), server_default=Billing.POSTPAID.value
    )
    service_tier: Mapped[ServiceTier] = mapped_column(
        TierName, server_default=ServiceTier.DEFAULT.value
    )
    shows_cost: Mapped[bool] = mapped_column(server_default=false())
    cors_origins: Mapped[tuple[str, ...]] = mapped_column(OriginsColumn, nullable=True)
    stripe_customer_id: Mapped[str | None] = mapped_column(String(255))

    def to_record(self) -> Tenant:
        """Return the row as a record for other packages."""
        return record_of(self, Tenant)


class ProjectRow(Table):
    """A part of a tenant; archived projects are kept, so that usage can be traced to them."""

    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(
        ForeignKey("tenants.id", ondelete="RESTRICT"), index=True
    )
    name: Mapped[str] = mapped_column(String(200))
    status: Mapped[ProjectStatus] = mapped_column(enum_column(ProjectStatus, "status"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    limits: Mapped[LimitValues] = mapped_column(LimitsColumn)

    def to_record(self) -> Project:
        """Return the row as a record for other packages."""
        return record_of(self, Project)


class MemberRow(Table):
    """A person of a tenant."""

    __tablename__ = "members"
    __table_args__ = (
        UniqueConstraint("tenant_id", "subject"),
        UniqueConstraint("tenant_id", "email", name="uq_members_email"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="RESTRICT"))
    subject: Mapped[str | None] = mapped_column(String(255), index=True)
    issuer: Mapped[str | None] = mapped_column(String(255))
    email: Mapped[str | None] = mapped_column(String(200), index=True)
    name: Mapped[str] = mapped_column(String(200))
    role: Mapped[Role] = mapped_column(enum_column(Role, "role"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)

    def to_record(self) -> Member:
        """Return the row as a record for other packages."""
        return record_of(self, Member)
