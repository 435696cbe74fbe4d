"""Table `api_keys`: the tenants' credentials, without the keys themselves."""

from datetime import datetime
from ipaddress import ip_network

from sqlalchemy import JSON, ForeignKey, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from contract.dialect import Dialect
from gateway.platform.database.tables.base import (
    DialectName,
    LimitsColumn,
    Table,
    UtcDateTime,
    record_of,
)
from gateway.records.limits import LimitValues
from gateway.records.records import KeyRecord
from gateway.records.scopes import Scope


class ApiKeyRow(Table):
    """One key; revoked keys are kept, so that usage can be traced to them."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(
        ForeignKey("tenants.id", ondelete="RESTRICT"), index=True
    )
    prefix: Mapped[str] = mapped_column(String(12), unique=True)
    """The public part of the key, used for look-ups."""
    digest: Mapped[bytes] = mapped_column(LargeBinary(32))
    """SHA-256 of the whole key."""
    name: Mapped[str] = mapped_column(String(200))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    allowed_models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Models that the key may use; null means all."""
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    dialect: Mapped[Dialect | None] = mapped_column(DialectName)
    project_id: Mapped[str | None] = mapped_column(String(32), index=True)
    """No foreign key, see `TenantRow.plan_id`; projects are never removed."""
    allowed_addresses: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Networks such as `10.0.0.0/8`; null means any."""
    limits: Mapped[LimitValues] = mapped_column(LimitsColumn, server_default="{}")
    old_prefix: Mapped[str | None] = mapped_column(String(12), index=True)
    old_digest: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    old_expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)

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
