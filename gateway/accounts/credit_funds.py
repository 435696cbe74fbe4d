"""Which credits a tenant's usage has consumed, and so what is left of each grant.

Usage counts at the time at which it was admitted. It consumes the grant that expires first; those that
never expire, and adjustments, come last; among equals the older one comes first. A grant that has expired
but is not taken back yet pays for what nothing else can pay, so that nobody owes us money because of our own
delay. What no credit could pay is a debt, which the next credit pays first.

All of it is derived from the rows each time, so it does not matter in which order they were written, and
usage that reaches the ledger late finds its place: it takes from other credits what was taken back already.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from gateway.accounts.records import Credit, CreditKind

BEGINNING: Final = datetime.min.replace(tzinfo=UTC)
"""Before every credit."""
_NEVER: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(slots=True)
class _Fund:
    """Something that can be consumed."""

    credit: Credit
    left: int

    def rank(self, at: datetime) -> tuple[bool, datetime, datetime, str]:
        """Return the fund's place in the order of consumption, the first one lowest."""
        expires_at = self.credit.expires_at or _NEVER
        return expires_at <= at, expires_at, self.credit.created_at, self.credit.id


@dataclass(slots=True)
class Funds:
    """What is left of a tenant's credits."""

    debt: int = 0
    """Micro-dollars that no credit could pay."""
    _funds: list[_Fund] = field(default_factory=list)

    @property
    def left(self) -> Mapping[str, int]:
        """Micro-dollars left of each grant and positive adjustment, by its id."""
        return {fund.credit.id: fund.left for fund in self._funds}

    @property
    def balance(self) -> int:
        """What is left of all, less the debt."""
        return sum(fund.left for fund in self._funds) - self.debt

    def add(self, credit: Credit, amount: int) -> None:
        """Let a credit be consumed, once it has paid what is owed."""
        paid = min(self.debt, amount)
        self.debt -= paid
        self._funds.append(_Fund(credit, amount - paid))

    def take(self, amount: int, at: datetime) -> None:
        """Consume credits in the order that holds at that time."""
        for fund in sorted(self._funds, key=lambda fund: fund.rank(at)):
            taken = min(amount, fund.left)
            fund.left -= taken
            amount -= taken
        self.debt += amount


def turning_points(credits_: Iterable[Credit], now: datetime) -> list[datetime]:
    """Return the times, up to now, between which the order of consumption is the same; `BEGINNING` first."""
    times = {BEGINNING}
    for credit in credits_:
        times.add(credit.created_at)
        if credit.expires_at is not None:
            times.add(credit.expires_at)
    return sorted(time for time in times if time <= now)


def replay(credits_: Sequence[Credit], usage: Mapping[datetime, int]) -> Funds:
    """Return what is left.

    Args:
        credits_: all credits of a tenant.
        usage: what was used from each turning point up to the next one, in micro-dollars.
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
