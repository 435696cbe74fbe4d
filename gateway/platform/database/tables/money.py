"""Tables `prices` and `credits`, which are append-only."""

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from contract.tier import ServiceTier
from gateway.platform.database.tables.base import (
    Table,
    TierName,
    UtcDateTime,
    enum_column,
    record_of,
)
from gateway.records.records import Credit, CreditKind, Price


class PriceRow(Table):
    """Price of a model in a tier from a given time on."""

    __tablename__ = "prices"
    __table_args__ = (
        CheckConstraint(
            "0 <= cached_micros AND cached_micros <= prompt_micros AND 0 <= completion_micros",
            name="micros",
        ),
        Index("ix_prices_model", "model", "service_tier", "effective_at"),
    )

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    model: Mapped[str] = mapped_column(String(200))
    service_tier: Mapped[ServiceTier] = mapped_column(TierName)
    prompt_micros: Mapped[int] = mapped_column(BigInteger)
    cached_micros: Mapped[int] = mapped_column(BigInteger)
    completion_micros: Mapped[int] = mapped_column(BigInteger)
    effective_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)

    def to_record(self) -> Price:
        """Return the row as a record for other packages."""
        return record_of(self, Price)


class CreditRow(Table):
    """One change of a tenant's prepaid balance."""

    __tablename__ = "credits"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(
        ForeignKey("tenants.id", ondelete="RESTRICT"), index=True
    )
    kind: Mapped[CreditKind] = mapped_column(enum_column(CreditKind, "kind"))
    amount_micros: Mapped[int] = mapped_column(BigInteger)
    note: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    grant_id: Mapped[str | None] = mapped_column(
        ForeignKey("credits.id", ondelete="RESTRICT"), unique=True
    )
    """Unique, since a grant expires once."""

    def to_record(self) -> Credit:
        """Return the row as a record for other packages."""
        return record_of(self, Credit)
