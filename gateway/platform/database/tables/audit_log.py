"""Table `audit_log`: who changed what, each row chained to the previous one."""

from datetime import datetime

from sqlalchemy import BigInteger, Integer, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from gateway.platform.database.tables.base import Table, UtcDateTime


class AuditRow(Table):
    """One change. The database rejects changes and removals of rows."""

    __tablename__ = "audit_log"

    sequence: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False
    )
    """1, 2, 3 ... without gaps."""
    at: Mapped[datetime] = mapped_column(UtcDateTime)
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
