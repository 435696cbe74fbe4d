"""The table `model_aliases`."""

from datetime import datetime

from sqlalchemy import JSON, String
from sqlalchemy.orm import Mapped, mapped_column

from gateway.platform.database.tables.base import Table, UtcDateTime, enum_column, record_of
from gateway.records.aliases import Alias, Sticky


class AliasRow(Table):
    """A public model name that splits its requests over models by weight."""

    __tablename__ = "model_aliases"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    weights: Mapped[dict[str, int]] = mapped_column(JSON)
    sticky: Mapped[Sticky] = mapped_column(enum_column(Sticky, "sticky", is_checked=False))
    fallback: Mapped[str | None] = mapped_column(String(200))
    sunset_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    deprecated_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    replacement: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)

    def to_record(self) -> Alias:
        """Return the row as a record for other packages."""
        return record_of(self, Alias)
