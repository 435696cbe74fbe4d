"""Which credits usage consumes, compared with a model that spends each micro-dollar."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.credits.service import Funds, replay, turning_points
from gateway.records.records import Credit, CreditKind

START = datetime(2026, 1, 1, tzinfo=UTC)
LAST = 30
NOW = START + timedelta(hours=LAST)

Spent = tuple[int, int]
"""An hour, and the micro-dollars used in it, half an hour after it began."""


def _at(hour: float) -> datetime:
    return START + timedelta(hours=hour)


def _credit(
    number: int, hour: int, amount: int, *, expires: int | None = None, kind: str = "grant"
) -> Credit:
    return Credit(
        id=f"crd_{number:03}",
        tenant_id="acme",
        kind=CreditKind(kind),
        amount_micros=amount,
        note="",
        created_at=_at(hour),
        expires_at=None if expires is None else _at(hour + expires),
    )


def _replayed(known: Sequence[Credit], spent: Sequence[Spent], now: datetime = NOW) -> Funds:
    """Sum up usage between grants and expiries, as the database does, and replay it."""
    times = turning_points(known, now)
    usage = Counter(dict.fromkeys(times, 0))
    for hour, cost in spent:
        usage[times[bisect_right(times, _at(hour + 0.5)) - 1]] += cost
    return replay(known, usage)


def _modelled(known: Sequence[Credit], spent: Sequence[Spent]) -> tuple[dict[str, int], int]:
    """Spend each micro-dollar from the credit that is first in order at its time."""
    left: dict[str, int] = {}
    debt = 0
    forever = _at(10**6)
    by_id = {credit.id: credit for credit in known}
    changes = [(credit.created_at, 0, credit.id, credit.amount_micros) for credit in known]
    changes += [(_at(hour + 0.5), 1, "", -cost) for hour, cost in spent]
    for time, _, id_, amount in sorted(changes):
        for _ in range(abs(amount)):
            if amount > 0:
                left.setdefault(id_, 0)
                debt, left[id_] = (debt - 1, left[id_]) if debt else (0, left[id_] + 1)
                continue
            usable = [by_id[each] for each in left if left[each]]
            if not usable:
                debt += 1
                continue
            first = min(
                usable,
                key=lambda credit: (
                    (credit.expires_at or forever) <= time,
                    credit.expires_at or forever,
                    credit.created_at,
                    credit.id,
                ),
            )
            left[first.id] -= 1
    return {id_: amount for id_, amount in left.items() if amount}, debt


hours = st.integers(0, LAST - 1)


@st.composite
def credits_(draw: st.DrawFn) -> list[Credit]:
    grants = draw(
        st.lists(st.tuples(hours, st.integers(1, 9), st.none() | st.integers(1, 20)), max_size=6)
    )
    adjustments = draw(st.lists(st.tuples(hours, st.integers(-6, 6).filter(bool)), max_size=3))
    known = [
        _credit(number, hour, amount, expires=expires)
        for number, (hour, amount, expires) in enumerate(grants)
    ]
    return known + [
        _credit(100 + number, hour, amount, kind="adjustment")
        for number, (hour, amount) in enumerate(adjustments)
    ]


usages = st.lists(st.tuples(hours, st.integers(1, 7)), max_size=10)


@given(known=credits_(), spent=usages)
def test_replay_equals_the_model(known: list[Credit], spent: list[Spent]) -> None:
    funds = _replayed(known, spent)
    left, debt = _modelled(known, spent)
    assert {id_: amount for id_, amount in funds.left.items() if amount} == left
    assert funds.debt == debt


@given(known=credits_(), spent=usages)
def test_remaining_credit_is_the_balance(known: list[Credit], spent: list[Spent]) -> None:
    balance = sum(credit.amount_micros for credit in known) - sum(cost for _, cost in spent)
    assert _replayed(known, spent).balance == balance


@given(known=credits_(), spent=usages, late=usages)
def test_taking_back_changes_no_other_credit(
    known: list[Credit], spent: list[Spent], late: list[Spent]
) -> None:
    before = _replayed(known, spent)
    expired = [credit for credit in known if credit.expires_at and credit.expires_at < NOW]
    taken_back = [
        replace(
            _credit(200 + number, LAST, -before.left[grant.id], kind="expiry"), grant_id=grant.id
        )
        for number, grant in enumerate(expired)
    ]
    after = _replayed(known + taken_back, spent)
    gone = {credit.id for credit in expired}
    assert all(after.left[id_] == 0 for id_ in gone)
    assert {i: n for i, n in after.left.items() if i not in gone} == {
        i: n for i, n in before.left.items() if i not in gone
    }
    # Later usage is paid by other credits, or is a debt.
    assert _replayed(known + taken_back, spent + late).balance == after.balance - sum(
        cost for _, cost in late
    )


def test_grants_are_consumed_in_order_of_expiry() -> None:
    known = [
        _credit(1, 0, 10),
        _credit(2, 1, 10, expires=20),
        _credit(3, 2, 10, expires=5),
        _credit(4, 2, 10, expires=19),
    ]
    assert _replayed(known, [(3, 12)]).left == {
        "crd_001": 10,
        "crd_002": 8,
        "crd_003": 0,
        "crd_004": 10,
    }


def test_later_grant_does_not_pay_for_earlier_usage() -> None:
    known = [_credit(1, 0, 10), _credit(2, 5, 10, expires=2)]
    assert _replayed(known, [(1, 8), (6, 3)]).left == {"crd_001": 2, "crd_002": 7}


def test_expired_grant_pays_only_if_no_other_can() -> None:
    known = [_credit(1, 0, 10), _credit(2, 0, 10, expires=2)]
    assert _replayed(known, [(3, 4)]).left == {"crd_001": 6, "crd_002": 10}
    assert _replayed(known, [(3, 13)]).left == {"crd_001": 0, "crd_002": 7}


def test_new_credit_pays_debts_first() -> None:
    funds = _replayed([_credit(1, 0, 3), _credit(2, 5, 10)], [(1, 7)])
    assert (funds.left, funds.debt) == ({"crd_001": 0, "crd_002": 6}, 0)
    assert _replayed([_credit(1, 0, 3)], [(1, 7)]).debt == 4
