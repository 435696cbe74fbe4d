"""Prepaid credits: grants, adjustments, consumption by usage, and expiry."""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncSession

from contract.tasks import each_apart
from gateway.database.engine import Database
from gateway.database.locking import lock_tenant
from gateway.database.paging import Page, PageRequest
from gateway.errors import (
    InvalidParameterError,
    StoreUnavailableError,
)
from gateway.management.audit.log import SYSTEM, AuditLog
from gateway.management.credits.checks import (
    MAX_AMOUNT_MICROS,
    check_amount,
    check_note,
    future_expiry,
)
from gateway.management.credits.funds import replay, turning_points
from gateway.management.credits.prepaid_store import PrepaidStore
from gateway.management.credits.store import CreditStore
from gateway.management.tenants.service import reading_of_tenant
from gateway.tenancy.changes import ChangeAnnouncer
from gateway.tenancy.checks import check_known
from gateway.tenancy.records import Credit, CreditKind
from gateway.tenancy.times import utc_now

GRACE: Final = timedelta(minutes=5)
"""Minimum time between a grant's expiry and taking it back.

Requests admitted before the expiry must have ended and reached the ledger. Other credits pay for a
request that takes longer, or it creates a debt.
"""


@dataclass(frozen=True, slots=True)
class Balance:
    """A tenant's balance by the ledger, which usage reaches a few seconds after it ends."""

    granted_micros: int
    """All grants and adjustments, minus expired credits that were taken back."""
    spent_micros: int

    @property
    def micros(self) -> int:
        """The balance in micro-dollars; a negative balance is a debt."""
        return self.granted_micros - self.spent_micros


class CreditService:
    """Changes and shows balances."""

    def __init__(self, database: Database, announcer: ChangeAnnouncer) -> None:
        self._database = database
        self._announcer = announcer

    async def grant(
        self,
        tenant_id: str,
        amount_micros: int,
        *,
        note: str = "",
        expires_at: datetime | None = None,
        actor: str = SYSTEM,
    ) -> Credit:
        """Grant the tenant micro-dollars, which expire at `expires_at` if given."""
        check_amount(amount_micros, least=1)
        check_note(note)
        expires_at = future_expiry(expires_at)
        return await self._add(
            _credit(tenant_id, CreditKind.GRANT, amount_micros, note=note, expires_at=expires_at),
            actor=actor,
        )

    async def adjust(
        self, tenant_id: str, amount_micros: int, *, note: str, actor: str = SYSTEM
    ) -> Credit:
        """Add to the tenant's balance; a negative amount deducts. The note gives the reason."""
        check_amount(amount_micros, least=-MAX_AMOUNT_MICROS)
        if amount_micros == 0:
            raise InvalidParameterError("'amount_micros' must not be 0.", param="amount_micros")
        check_note(note)
        if not note.strip():
            raise InvalidParameterError("'note' must not be empty for an adjustment.", param="note")
        credit = _credit(tenant_id, CreditKind.ADJUSTMENT, amount_micros, note=note)
        return await self._add(credit, actor=actor)

    async def balance(self, tenant_id: str) -> Balance:
        """Return the tenant's balance."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await balance_of(transaction, tenant_id)

    async def page(self, tenant_id: str, wanted: PageRequest) -> Page[Credit]:
        """Return a page of balance changes, oldest first."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await CreditStore(transaction).page(tenant_id, wanted)

    async def list_all(self, tenant_id: str) -> list[Credit]:
        """Return all changes of the balance, oldest first."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await CreditStore(transaction).list_of_tenant(tenant_id)

    async def expire_due(self, now: datetime) -> int:
        """Take back the rest of grants that expired more than `GRACE` ago.

        Two calls may run at once: each grant is taken back once. Return the number of such grants.
        One tenant's failure, which is raised at the end, delays no other tenant.
        """
        async with self._database.reading() as transaction:
            tenants = await CreditStore(transaction).tenants_with_expired(now - GRACE)
        expired = []

        async def expire(tenant_id: str) -> None:
            expired.extend(await self._expire_of(tenant_id, now))

        await each_apart(expire, tenants, at_once=1)
        return len(expired)

    async def _expire_of(self, tenant_id: str, now: datetime) -> list[Credit]:
        async def write(transaction: AsyncSession) -> list[Credit]:
            taken_back = await _expiries(transaction, tenant_id, now)
            for credit in taken_back:
                await _append(transaction, credit, action="credit.expire", actor=SYSTEM)
            return taken_back

        return await self._change(tenant_id, write)

    async def _add(self, credit: Credit, *, actor: str) -> Credit:
        async def write(transaction: AsyncSession) -> list[Credit]:
            action = "credit.grant" if credit.kind is CreditKind.GRANT else "credit.adjust"
            await _append(transaction, credit, action=action, actor=actor)
            return [credit]

        (added,) = await self._change(credit.tenant_id, write)
        return added

    async def _change(
        self, tenant_id: str, write: Callable[[AsyncSession], Awaitable[list[Credit]]]
    ) -> list[Credit]:
        """Write to the database, and mark the balance in Redis to be derived again.

        A change that Redis did not receive must not be repeated, since it would be applied twice.
        The method therefore contacts Redis first: while Redis is unavailable, nothing changes.
        """
        check_known(tenant_id, "tenant")
        try:
            await self._announcer.credits_changed(tenant_id)
        except StoreUnavailableError as error:
            raise StoreUnavailableError(
                "Redis is unavailable, so nothing was changed. Retry later.",
                detail=f"{error.detail} Nothing was changed. Retry later.",
            ) from error
        async with self._database.writing() as transaction:
            await lock_tenant(transaction, tenant_id)
            written = await write(transaction)
        try:
            await self._announcer.credits_changed(tenant_id)
        except StoreUnavailableError as error:
            names = ", ".join(credit.id for credit in written)
            saved = f"The change is saved ({names}); do not repeat it."
            consequence = "The next reconciliation corrects the balance in Redis."
            raise StoreUnavailableError(
                f"{saved} Redis became unavailable meanwhile. {consequence}",
                detail=f"{saved} {error.detail} {consequence}",
            ) from error
        return written


async def balance_of(transaction: AsyncSession, tenant_id: str) -> Balance:
    """Return the tenant's balance, as this transaction sees it."""
    return Balance(
        await CreditStore(transaction).total(tenant_id),
        await PrepaidStore(transaction).spent(tenant_id),
    )


async def _expiries(transaction: AsyncSession, tenant_id: str, now: datetime) -> list[Credit]:
    """Return the expiry entries of the tenant's due grants."""
    known = await CreditStore(transaction).list_of_tenant(tenant_id)
    ended = {credit.grant_id for credit in known}
    due = [
        credit
        for credit in known
        if credit.expires_at is not None
        and credit.expires_at < now - GRACE
        and credit.id not in ended
    ]
    if not due:
        return []
    times = turning_points(known, now)
    left = replay(known, await PrepaidStore(transaction).spent_between(tenant_id, times)).left
    return [
        _credit(tenant_id, CreditKind.EXPIRY, -left[grant.id], note=grant.note, grant_id=grant.id)
        for grant in due
    ]


async def _append(transaction: AsyncSession, credit: Credit, *, action: str, actor: str) -> None:
    await CreditStore(transaction).add(credit)
    await AuditLog(transaction).append(
        action, credit.id, actor=actor, tenant_id=credit.tenant_id, details=_details(credit)
    )


def _details(credit: Credit) -> dict[str, Any]:
    details: dict[str, Any] = {"amount_micros": credit.amount_micros, "note": credit.note}
    if credit.expires_at is not None:
        details["expires_at"] = credit.expires_at
    if credit.grant_id is not None:
        details["grant_id"] = credit.grant_id
    return details


def _credit(
    tenant_id: str,
    kind: CreditKind,
    amount_micros: int,
    *,
    note: str,
    expires_at: datetime | None = None,
    grant_id: str | None = None,
) -> Credit:
    return Credit(
        id=f"crd_{secrets.token_hex(8)}",
        tenant_id=tenant_id,
        kind=kind,
        amount_micros=amount_micros,
        note=note,
        created_at=utc_now(),
        expires_at=expires_at,
        grant_id=grant_id,
    )
