"""Table `tenants`: the paying customers."""

from datetime import datetime

from sqlalchemy import CheckConstraint, String, false
from sqlalchemy.orm import Mapped, mapped_column

from contract.dialect import Dialect
from gateway.accounts.records import Tenant, TenantStatus
from gateway.accounts.tables.base import DialectName, Table, UtcDateTime, enum_column


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

    def to_record(self) -> Tenant:
        """Return the row as the other rooms see it."""
        return Tenant(
            id=self.id,
            name=self.name,
            weight=self.weight,
            status=self.status,
            created_at=self.created_at,
            dialect=self.dialect,
            strict_parameters=self.strict_parameters,
            default_model=self.default_model,
        )
