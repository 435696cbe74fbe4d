"""Tables `files` and `file_parts`: what the objects in the file store belong to."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from gateway.platform.database.tables.base import Table, UtcDateTime, enum_column, record_of
from gateway.records.batches import File, FilePurpose


class FileRow(Table):
    """A file of a tenant, which may still grow."""

    __tablename__ = "files"
    __table_args__ = (
        Index("ix_files_tenant_id", "tenant_id", "created_at", "id"),
        Index("ix_files_expires_at", "expires_at"),
    )

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="RESTRICT"))
    project_id: Mapped[str | None] = mapped_column(String(32))
    name: Mapped[str] = mapped_column(String(255))
    purpose: Mapped[FilePurpose] = mapped_column(
        enum_column(FilePurpose, "purpose", is_checked=False)
    )
    size: Mapped[int] = mapped_column(BigInteger)
    """Bytes of all parts."""
    lines: Mapped[int] = mapped_column(BigInteger)
    parts: Mapped[int] = mapped_column(BigInteger)
    """Parts so far, which is the number of the next one."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    is_visible: Mapped[bool]
    """False during an upload, and after the deletion until the objects are removed."""

    def to_record(self) -> File:
        """Return the row as a record for other packages."""
        return record_of(self, File)


class FilePartRow(Table):
    """One object in the file store: a contiguous part of a file."""

    __tablename__ = "file_parts"

    file_id: Mapped[str] = mapped_column(
        ForeignKey("files.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    key: Mapped[str] = mapped_column(String(200))
    start: Mapped[int] = mapped_column(BigInteger)
    """Bytes of the file before it."""
    size: Mapped[int] = mapped_column(BigInteger)
