"""Prepaid credits: grants, adjustments, consumption by usage, and expiry.

Usage counts at the time of its admission. It consumes the grant that expires first. Grants that
never expire, and adjustments, come last; among equals the older one comes first. An expired grant
that is not taken back yet pays for what nothing else can pay, so that a late expiry causes no debt.
Usage that no credit can pay is a debt, which the next credit pays first.

What is left is derived from the rows each time, so the order in which they were written does not
matter. Usage that reaches the ledger late is inserted at its place: other credits pay for it if its
credit was already taken back.
"""

import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import zip_longest
from typing import Any, Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from common.tasks import each_apart
from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import Service, changing
from gateway.accounts.tenants.service import reading_of_tenant
from gateway.billing.credits.spending import prepaid_cost
from gateway.platform.database.paging import Page, PageRequest, list_records, read_page
from gateway.platform.database.tables import CreditRow, LedgerRow
from gateway.records.checks import check_known
from gateway.records.errors import InvalidParameterError, StoreUnavailableError, must
from gateway.records.records import MAX_AMOUNT_MICROS, Credit, CreditKind
from gateway.records.times import in_utc, utc_now

BEGINNING: Final = datetime.min.replace(tzinfo=UTC)
"""A time before every credit."""
_NEVER: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(slots=True)
class _Fund:
    """A credit that can be consumed."""

    credit: Credit
    left: int

    def rank(self, at: datetime) -> tuple[bool, datetime, datetime, str]:
        """Return the fund's rank in the order of consumption; the lowest comes first."""
        expires_at = self.credit.expires_at or _NEVER
        return expires_at <= at, expires_at, self.credit.created_at, self.credit.id


@dataclass(slots=True)
class Funds:
    """Remaining credits of a tenant."""

    debt: int = 0
    """Micro-dollars that no credit could pay."""
    _funds: list[_Fund] = field(default_factory=list)

    @property
    def left(self) -> Mapping[str, int]:
        """Remaining micro-dollars of each grant and positive adjustment, by its id."""
        return {fund.credit.id: fund.left for fund in self._funds}

    @property
    def balance(self) -> int:
        """Sum of all remaining credits, minus the debt."""
        return sum(fund.left for fund in self._funds) - self.debt

    def add(self, credit: Credit, amount: int) -> None:
        """Add a credit, which first pays the debt."""
        paid = min(self.debt, amount)
        self.debt -= paid
        self._funds.append(_Fund(credit, amount - paid))

    def take(self, amount: int, at: datetime) -> None:
        """Consume credits in the order that applies at that time."""
        for fund in sorted(self._funds, key=lambda fund: fund.rank(at)):
            taken = min(amount, fund.left)
            fund.left -= taken
            amount -= taken
        self.debt += amount


def turning_points(credits_: Iterable[Credit], now: datetime) -> list[datetime]:
    """Return the times, up to now, when the order of consumption may change; `BEGINNING` first."""
    times = {BEGINNING}
    for credit in credits_:
        times.add(credit.created_at)
        if credit.expires_at is not None:
            times.add(credit.expires_at)
    return sorted(time for time in times if time <= now)


def replay(credits_: Sequence[Credit], usage: Mapping[datetime, int]) -> Funds:
    """Return the remaining credits.

    Args:
        credits_: all credits of a tenant.
        usage: usage from each turning point up to the next one, in micro-dollars.
    """
    funds = Funds()
    taken_back = {credit.grant_id: -credit.amount_micros for credit in credits_ if credit.grant_id}
    waiting = sorted(credits_, key=lambda credit: (credit.created_at, credit.id), reverse=True)
    for start in sorted(usage):
        while waiting and waiting[-1].created_at <= start:
            _apply(funds, waiting.pop(), taken_back)
        funds.take(usage[start], start)
    return funds


def _apply(funds: Funds, credit: Credit, taken_back: Mapping[str, int]) -> None:
    if credit.kind is CreditKind.EXPIRY:
        return
    if credit.amount_micros < 0:
        funds.take(-credit.amount_micros, credit.created_at)
    else:
        funds.add(credit, credit.amount_micros - taken_back.get(credit.id, 0))


MAX_NOTE_CHARACTERS: Final = 200


def future_expiry(expires_at: datetime | None) -> datetime | None:
    """Return the time in UTC; reject one that is not in the future."""
    if expires_at is None:
        return None
    in_time = in_utc(expires_at, param="expires_at")
    if in_time <= utc_now():
        raise InvalidParameterError(
            f"'expires_at' must be in the future. Given: {in_time.isoformat()}.",
            param="expires_at",
        )
    return in_time


def check_amount(amount_micros: int, *, least: int) -> None:
    """Reject amounts below `least` and amounts that Redis cannot count exactly."""
    if not least <= amount_micros <= MAX_AMOUNT_MICROS:
        rule = f"be an integer from {least} to {MAX_AMOUNT_MICROS}"
        raise must("amount_micros", rule, amount_micros)


def check_note(note: str) -> None:
    """Reject a note that does not fit into a table row."""
    if len(note) > MAX_NOTE_CHARACTERS or not note.isprintable():
        raise must("note", f"have at most {MAX_NOTE_CHARACTERS} printable characters", note)


GRACE: Final = timedelta(minutes=5)
"""Minimum time between a grant's expiry and taking it back.

Requests admitted before the expiry must have ended and reached the ledger. Other credits pay for a
request that takes longer, or it creates a debt.
"""

_ACTIONS: Final = {
    CreditKind.GRANT: "credit.grant",
    CreditKind.ADJUSTMENT: "credit.adjust",
    CreditKind.EXPIRY: "credit.expire",
}


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


class CreditService(Service):
    """Changes and shows balances."""

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
            is_its = CreditRow.tenant_id == tenant_id
            return await read_page(transaction, CreditRow, wanted, is_its)

    async def expire_due(self, now: datetime) -> int:
        """Take back the rest of grants that expired more than `GRACE` ago.

        Two calls may run at once: each grant is taken back once. Return the number of such grants.
        One tenant's failure, which is raised at the end, delays no other tenant.
        """
        expiry = aliased(CreditRow)
        due = (
            select(CreditRow.tenant_id)
            .outerjoin(expiry, expiry.grant_id == CreditRow.id)
            .where(CreditRow.expires_at < now - GRACE, expiry.id.is_(None))
            .distinct()
            .order_by(CreditRow.tenant_id)
        )
        async with self._database.reading() as transaction:
            tenants = list(await transaction.scalars(due))
        expired = []

        async def expire(tenant_id: str) -> None:
            expired.extend(
                await self._append(tenant_id, partial(_expiries, tenant_id=tenant_id, now=now))
            )

        await each_apart(expire, tenants, at_once=1)
        return len(expired)

    async def _add(self, credit: Credit, *, actor: str) -> Credit:
        async def added(_transaction: AsyncSession) -> list[Credit]:
            return [credit]

        await self._append(credit.tenant_id, added, actor=actor)
        return credit

    async def _append(
        self,
        tenant_id: str,
        find: Callable[[AsyncSession], Awaitable[list[Credit]]],
        *,
        actor: str = SYSTEM,
    ) -> list[Credit]:
        """Add credits to the database, and mark the balance in Redis to be derived again.

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
        async with changing(self._database, tenant_id, actor=actor, is_locked=True) as change:
            written = await find(change.transaction)
            for credit in written:
                await change.insert(CreditRow(**asdict(credit)))
                await change.audit(_ACTIONS[credit.kind], credit.id, _details(credit))
        # Not announced by the unit of work: this error must say that the change is saved.
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
    granted = select(func.sum(CreditRow.amount_micros)).where(CreditRow.tenant_id == tenant_id)
    return Balance(
        int(await transaction.scalar(granted) or 0), await prepaid_cost(transaction, tenant_id)
    )


async def _expiries(transaction: AsyncSession, tenant_id: str, now: datetime) -> list[Credit]:
    """Return the expiry entries of the tenant's due grants."""
    known = await list_records(transaction, CreditRow, CreditRow.tenant_id == tenant_id)
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
    times, time = turning_points(known, now), LedgerRow.created_at
    spent: dict[datetime, int] = {}
    for start, end in zip_longest(times, times[1:]):
        cost = select(func.sum(LedgerRow.cost_micros)).where(
            LedgerRow.tenant_id == tenant_id, LedgerRow.is_prepaid, time >= start
        )
        if end is not None:
            cost = cost.where(time < end)
        spent[start] = int(await transaction.scalar(cost) or 0)
    left = replay(known, spent).left
    return [
        _credit(tenant_id, CreditKind.EXPIRY, -left[grant.id], note=grant.note, grant_id=grant.id)
        for grant in due
    ]


def _details(credit: Credit) -> dict[str, Any]:
    details = {"expires_at": credit.expires_at, "grant_id": credit.grant_id}
    return {
        "amount_micros": credit.amount_micros,
        "note": credit.note,
        **{name: value for name, value in details.items() if value is not None},
    }


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
