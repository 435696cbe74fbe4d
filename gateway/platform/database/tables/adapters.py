"""Table `adapters`."""

from datetime import datetime

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from gateway.platform.database.tables.base import Table, UtcDateTime, enum_column, record_of
from gateway.records.adapters import Adapter, AdapterState


class AdapterRow(Table):
    """A LoRA adapter of a tenant. Rows of deleted adapters are kept."""

    __tablename__ = "adapters"
    __table_args__ = (
        Index("ix_adapters_tenant_id", "tenant_id", "created_at", "id"),
        Index("ix_adapters_state", "state", "claimed_until"),
        Index("ix_adapters_sha256", "sha256"),
    )

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="RESTRICT"))
    name: Mapped[str] = mapped_column(String(63))
    base_model: Mapped[str] = mapped_column(String(200))
    source: Mapped[str] = mapped_column(String(1000))
    is_shared: Mapped[bool]
    state: Mapped[AdapterState] = mapped_column(
        enum_column(AdapterState, "state", is_checked=False)
    )
    reason: Mapped[str] = mapped_column(String(500))
    sha256: Mapped[str] = mapped_column(String(64))
    rank: Mapped[int] = mapped_column(BigInteger)
    target_modules: Mapped[list[str]] = mapped_column(JSON)
    size: Mapped[int] = mapped_column(BigInteger)
    is_stored: Mapped[bool]
    """Whether its files may exist in the object store."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    deleted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    claimed_until: Mapped[datetime] = mapped_column(UtcDateTime)
    """Until then, one process checks and copies its files."""

    def to_record(self) -> Adapter:
        """Return the row as a record for other packages."""
        return record_of(self, Adapter, target_modules=tuple(self.target_modules))
