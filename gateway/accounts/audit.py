"""The audit log: who changed what, in a chain of hashes that shows whether it was tampered with.

Each row's hash covers its content and the hash of the row before, so that changing, removing or inserting
a row breaks the chain. That the newest rows were cut off shows only against a hash noted elsewhere.
"""

import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import desc, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.tables import AuditRow
from gateway.accounts.times import utc_now

SYSTEM: Final = "system"
"""The actor of changes that nobody asked for, such as an expiry."""

CHAIN_LOCK: Final = 7_585_424
"""PostgreSQL advisory lock under which rows are added one after the other."""
BEGINNING: Final = bytes(32)
"""The hash before the first row."""
PAGE: Final = 1000

_json = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One change, as it is shown."""

    sequence: int
    at: datetime
    actor: str
    action: str
    tenant_id: str | None
    subject: str
    details: Mapping[str, Any]
    hash: str


@dataclass(frozen=True, slots=True)
class ChainState:
    """What checking the whole chain found."""

    entries: int
    head: str
    """Hash of the newest row; to be noted elsewhere, so that a cut end shows."""
    broken_at: int | None
    """Sequence number of the first row that is wrong or missing."""
    reason: str = ""
    has_expected: bool = True
    """Whether the hash that was asked for is that of a row; looked for only in a sound chain."""


class AuditLog:
    """The log, within one transaction: a change and its row are committed together, or neither."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def append(
        self,
        action: str,
        subject: str,
        *,
        actor: str,
        tenant_id: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a row. `details` must hold no secret."""
        await self._take_turn()
        last = await self._transaction.scalar(
            select(AuditRow).order_by(desc(AuditRow.sequence)).limit(1)
        )
        row = AuditRow(
            sequence=1 if last is None else last.sequence + 1,
            at=utc_now(),
            actor=actor[:300],
            action=action,
            tenant_id=tenant_id,
            subject=subject[:300],
            details=_json(details or {}).decode(),
            previous_hash=BEGINNING if last is None else last.hash,
        )
        row.hash = row_hash(row)
        self._transaction.add(row)
        await self._transaction.flush()

    async def entries(
        self,
        *,
        tenant_id: str | None = None,
        actor: str | None = None,
        action: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[AuditEntry]:
        """Return the newest rows: of one tenant, actor or action and before a sequence number, if given."""
        query = select(AuditRow).order_by(desc(AuditRow.sequence)).limit(limit)
        if tenant_id is not None:
            query = query.where(AuditRow.tenant_id == tenant_id)
        if actor is not None:
            query = query.where(AuditRow.actor == actor)
        if action is not None:
            query = query.where(AuditRow.action == action)
        if before is not None:
            query = query.where(AuditRow.sequence < before)
        return [_entry(row) for row in await self._transaction.scalars(query)]

    async def verify(self, *, expected_hash: str | None = None) -> ChainState:
        """Check every row from the first on, and whether one has a hash that was noted before."""
        expected, head = 1, BEGINNING
        is_found = expected_hash in (None, head.hex())
        async for row in self._rows():
            reason = _fault(row, expected, head)
            if reason:
                return ChainState(expected - 1, head.hex(), expected, reason)
            expected, head = row.sequence + 1, row.hash
            is_found = is_found or head.hex() == expected_hash
        return ChainState(expected - 1, head.hex(), None, has_expected=is_found)

    async def _rows(self) -> AsyncIterator[AuditRow]:
        last = 0
        while True:
            page = list(
                await self._transaction.scalars(
                    select(AuditRow)
                    .where(AuditRow.sequence > last)
                    .order_by(AuditRow.sequence)
                    .limit(PAGE)
                )
            )
            for row in page:
                yield row
            if len(page) < PAGE:
                return
            last = page[-1].sequence
            self._transaction.expunge_all()

    async def _take_turn(self) -> None:
        # A writing transaction of SQLite is alone anyway.
        if self._transaction.get_bind().dialect.name == "postgresql":
            await self._transaction.execute(
                text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": CHAIN_LOCK}
            )


def row_hash(row: AuditRow) -> bytes:
    """Return the hash that the row must have."""
    content = [
        row.sequence,
        row.at.isoformat(),
        row.actor,
        row.action,
        row.tenant_id,
        row.subject,
        row.details,
    ]
    return hashlib.sha256(row.previous_hash + _json(content)).digest()


def _fault(row: AuditRow, expected: int, head: bytes) -> str:
    if row.sequence != expected:
        return f"row {expected} is missing"
    if row.previous_hash != head:
        return f"row {expected} does not continue the row before"
    if row.hash != row_hash(row):
        return f"row {expected} was changed"
    return ""


def _entry(row: AuditRow) -> AuditEntry:
    return AuditEntry(
        sequence=row.sequence,
        at=row.at,
        actor=row.actor,
        action=row.action,
        tenant_id=row.tenant_id,
        subject=row.subject,
        details=msgspec.json.decode(row.details),
        hash=row.hash.hex(),
    )
