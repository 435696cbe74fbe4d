"""Tables `adapters` and `model_aliases`."""

from datetime import datetime

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from gateway.platform.database.tables.base import Recorded, Table, TenantId, record_of
from gateway.records.adapters import Adapter, AdapterState
from gateway.records.aliases import Alias, Sticky


class AdapterRow(Table):
    """A LoRA adapter of a tenant. Rows of deleted adapters are kept."""

    __tablename__ = "adapters"
    __table_args__ = (
        Index("ix_adapters_tenant_id", "tenant_id", "created_at", "id"),
        Index("ix_adapters_state", "state", "claimed_until"),
        Index("ix_adapters_sha256", "sha256"),
    )

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant_id: Mapped[TenantId]
    name: Mapped[str] = mapped_column(String(63))
    base_model: Mapped[str] = mapped_column(String(200))
    source: Mapped[str] = mapped_column(String(1000))
    is_shared: Mapped[bool]
    state: Mapped[AdapterState]
    reason: Mapped[str] = mapped_column(String(500))
    sha256: Mapped[str] = mapped_column(String(64))
    rank: Mapped[int]
    target_modules: Mapped[list[str]]
    size: Mapped[int]
    is_stored: Mapped[bool]
    """Whether its files may exist in the object store."""
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]
    claimed_until: Mapped[datetime]
    """Until then, one process checks and copies its files."""

    def to_record(self) -> Adapter:
        """Return the row as a record for other packages."""
        return record_of(self, Adapter, target_modules=tuple(self.target_modules))


class AliasRow(Recorded[Alias], Table):
    """A public model name that splits its requests over models by weight."""

    __tablename__ = "model_aliases"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    weights: Mapped[dict[str, int]]
    sticky: Mapped[Sticky]
    fallback: Mapped[str | None] = mapped_column(String(200))
    fallbacks: Mapped[list[str]]
    sunset_at: Mapped[datetime | None]
    deprecated_at: Mapped[datetime | None]
    replacement: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime]
