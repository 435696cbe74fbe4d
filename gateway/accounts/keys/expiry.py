"""Audit entries for expired keys, and a count of keys that expire soon.

Expired keys stop working by themselves; the entries are for the audit log.
"""

from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, and_, exists, func, select

from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import Change, changing
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import ApiKeyRow, AuditRow

ACTION: Final = "key.expired"
AT_ONCE: Final = 100
"""Keys per transaction, which blocks every other change."""


async def audit_expired_keys(database: Database, now: datetime, *, actor: str = SYSTEM) -> int:
    """Append an audit row for each key that has expired since its last expiry entry.

    Two calls may run at once. Return the number of new rows. Raises StoreUnavailableError.
    """
    appended = 0
    while True:
        async with changing(database, actor=actor) as change:
            found = await _append_some(change, now)
        appended += found
        if found < AT_ONCE:
            return appended


async def count_expiring_keys(database: Database, now: datetime, within: timedelta) -> int:
    """Return the number of valid keys that expire within a time. Raises StoreUnavailableError."""
    expire_soon = and_(
        ApiKeyRow.expires_at > now,
        ApiKeyRow.expires_at <= now + within,
        ApiKeyRow.revoked_at.is_(None),
    )
    async with database.reading() as transaction:
        counted = await transaction.scalar(
            select(func.count()).select_from(ApiKeyRow).where(expire_soon)
        )
    return counted or 0


async def _append_some(change: Change, now: datetime) -> int:
    transaction = change.transaction
    candidates = select(ApiKeyRow.id).where(_is_expired(now), ~_has_audit_entry()).limit(AT_ONCE)
    # A concurrent call locks these rows until its transaction ends ...
    held = list(
        await transaction.scalars(candidates.with_for_update(of=ApiKeyRow, skip_locked=True))
    )
    # ... and may have ended it just now, which only another query sees.
    keys = await transaction.scalars(
        select(ApiKeyRow).where(ApiKeyRow.id.in_(held), ~_has_audit_entry())
    )
    for key in list(keys):
        details = {"expires_at": key.expires_at}
        await change.audit(ACTION, key.id, details, tenant_id=key.tenant_id)
    return len(held)


def _is_expired(now: datetime) -> ColumnElement[bool]:
    return and_(ApiKeyRow.expires_at <= now, ApiKeyRow.revoked_at.is_(None))


def _has_audit_entry() -> ColumnElement[bool]:
    return exists().where(
        AuditRow.tenant_id == ApiKeyRow.tenant_id,
        AuditRow.action == ACTION,
        AuditRow.subject == ApiKeyRow.id,
        # A key whose expiry was postponed may expire again.
        AuditRow.at >= ApiKeyRow.expires_at,
    )
