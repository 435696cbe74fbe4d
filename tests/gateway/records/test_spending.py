"""Windows of spend limits, and which limits apply to a request."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from gateway.records.limits import SpendScope, Window
from gateway.records.spending import applied, missed
from gateway.records.times import to_ms
from tests.gateway.limits.building import NOON, record, spend_limit
from tests.support.cases import all_cases


@all_cases(
    ("window", "starts_on", "zone", "moment", "starts"),
    [
        (Window.HOUR, 1, "Asia/Kathmandu", "2027-01-15 12:34", "2027-01-15 12:00"),
        (Window.DAY, 1, "UTC", "2028-02-29 23:59", "2028-02-29 00:00"),
        # Half past eight in UTC is a quarter past two in the afternoon in Kathmandu.
        (Window.DAY, 1, "Asia/Kathmandu", "2027-01-15 18:14", "2027-01-14 18:15"),
        (Window.DAY, 1, "Asia/Kathmandu", "2027-01-15 18:15", "2027-01-15 18:15"),
        # The day has 23 hours, and the one in autumn 25.
        (Window.DAY, 1, "America/New_York", "2027-03-14 20:00", "2027-03-14 05:00"),
        (Window.DAY, 1, "America/New_York", "2027-11-08 04:30", "2027-11-07 04:00"),
        # A week that spans two months, from Wednesday on.
        (Window.WEEK, 3, "UTC", "2027-03-02 00:00", "2027-02-24 00:00"),
        (Window.WEEK, 7, "UTC", "2027-03-07 00:00", "2027-03-07 00:00"),
        (Window.MONTH, 28, "UTC", "2028-03-27 23:00", "2028-02-28 00:00"),
        (Window.MONTH, 15, "UTC", "2027-01-14 12:00", "2026-12-15 00:00"),
        (Window.MONTH, 1, "Pacific/Auckland", "2027-01-31 11:30", "2027-01-31 11:00"),
    ],
)
def test_window_begins_in_the_time_zone(
    window: Window, starts_on: int, zone: str, moment: str, starts: str
) -> None:
    at, start = (to_ms(datetime.fromisoformat(f"{each}+00:00")) for each in (moment, starts))
    bounds = spend_limit(window=window, starts_on=starts_on, time_zone=zone).bounds_at(at)
    assert bounds.start * 1000 == start


@all_cases("window", list(Window))
@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Australia/Lord_Howe"])
def test_windows_follow_each_other_without_gaps(window: Window, zone: str) -> None:
    for starts_on in (1, 7):
        own = spend_limit(window=window, starts_on=starts_on, time_zone=zone)
        moment = datetime(2026, 12, 30, 1, 7, tzinfo=ZoneInfo(zone)).astimezone(UTC)
        for hours in range(0, 9_900, 11):
            bounds = own.bounds_at(to_ms(moment + timedelta(hours=hours)))
            assert list(bounds) == sorted(set(bounds))
            assert own.bounds_at(bounds.end * 1000 - 1) == bounds
            assert own.bounds_at(bounds.end * 1000)[:3] == bounds[1:]


def test_raise_ends_by_itself() -> None:
    until = datetime(2027, 1, 15, 12, tzinfo=UTC)
    raised = spend_limit(raised_micros=900, raised_until=until, raise_reason="launch")
    assert [raised.amount_at(to_ms(until) + each) for each in (-1, 0)] == [900, 100]


def test_limits_of_a_request_are_those_of_its_model_and_user() -> None:
    limits = (
        spend_limit("all"),
        spend_limit("model", model="m"),
        spend_limit("adapter", model="m:shop"),
        spend_limit("users", scope=SpendScope.USER),
        spend_limit("ada", scope=SpendScope.USER, holder="ada", window=Window.DAY),
    )

    def names(model: str, user: str) -> list[str]:
        found = applied(limits, NOON, model=model, user=user)
        return [each.spending.limit_id for each in found if each.spending is not None]

    assert names("m", "") == ["all", "model"]
    assert names("m:shop", "") == ["all", "adapter"]
    assert names("n", "bob") == ["all", "users"]
    assert names("n", "ada") == ["all", "ada"]
    bob, eve = (applied(limits, NOON, model="n", user=each)[1] for each in ("bob", "eve"))
    assert bob.subject != eve.subject
    assert not record("r", model="n", end_user="eve").counts_for(bob)
    assert record("r", model="n", end_user="bob").counts_for(bob)


def test_limit_is_missed_by_a_request_that_did_not_know_it() -> None:
    others = (SpendScope.KEY, SpendScope.MEMBER, SpendScope.PROJECT)
    limits = [spend_limit("all"), *(spend_limit(each, scope=each, holder="x") for each in others)]
    assert missed(limits, record("r")) == {"s:all"}
    assert missed(limits, record("r", spend_limits=("s:all",))) == set()
