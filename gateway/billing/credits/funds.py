"""Prepaid credit consumption: which credits usage has consumed, and the rest of each grant.

Usage counts at the time of its admission. It consumes the grant that expires first. Grants that
never expire, and adjustments, come last; among equals the older one comes first. An expired grant
that is not taken back yet pays for what nothing else can pay, so that a late expiry causes no debt.
Usage that no credit can pay is a debt, which the next credit pays first.

Everything is derived from the rows each time, so the order in which they were written does not
matter. Usage that reaches the ledger late is inserted at its place: other credits pay for it if its
credit was already taken back.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from gateway.records.records import Credit, CreditKind

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
