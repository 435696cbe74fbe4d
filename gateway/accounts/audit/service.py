"""Read the audit log page by page, and verify its hash chain and the append-only tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.accounts.audit.log import AuditEntry, AuditLog, ChainState
from gateway.accounts.audit.signing import HeadSigner, SignedHead
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import Page
from gateway.platform.database.schema import unprotected_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Filter of audit log entries; None means all."""

    tenant_id: str | None = None
    actor: str | None = None
    action: str | None = None


class AuditService:
    """Shows and verifies the audit log."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(
        self, wanted: AuditFilter, *, before: int | None, limit: int
    ) -> Page[AuditEntry]:
        """Return the newest entries, only those before a sequence number if given."""
        async with self._database.reading() as transaction:
            entries = await AuditLog(transaction).entries(
                tenant_id=wanted.tenant_id,
                actor=wanted.actor,
                action=wanted.action,
                before=before,
                limit=limit + 1,
            )
        return Page(entries[:limit], len(entries) > limit)

    async def page_of(
        self, tenant_id: str, *, action: str | None, before: int | None, limit: int
    ) -> Page[AuditEntry]:
        """Return the newest entries of a tenant, numbered within the tenant."""
        async with self._database.reading() as transaction:
            entries = await AuditLog(transaction).entries_of(
                tenant_id, action=action, before=before, limit=limit + 1
            )
        return Page(entries[:limit], len(entries) > limit)

    async def verify(
        self,
        *,
        expected_hash: str | None = None,
        signer: HeadSigner | None = None,
        noted: Sequence[SignedHead] = (),
    ) -> ChainState:
        """Check the chain as `AuditLog.verify` does, and the triggers of append-only tables."""
        async with self._database.reading() as transaction:
            state = await AuditLog(transaction).verify(
                expected_hash=expected_hash, signer=signer, noted=noted
            )
            return replace(state, unprotected=await unprotected_tables(transaction))
