"""Days and months in Python and in the scripts, which read the time in one place."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from gateway.limits import store as store_module
from gateway.limits.counters import day_of, day_start_ms, month_of, month_start_ms
from gateway.limits.store import QuotaStore
from tests.gateway.limits.building import SCRIPTS, Desk, TestClock, key_of, project_of, tenant_of
from tests.support.cases import all_cases


def unix_ms(moment: datetime) -> int:
    return int(moment.timestamp()) * 1000


@all_cases("year", [1999, 2000, 2027, 2028, 2100])
def test_days_and_months_are_those_of_utc(year: int) -> None:
    for month in range(1, 13):
        first = datetime(year, month, 1, tzinfo=UTC)
        for moment in (first, first + timedelta(days=17, hours=5), first + timedelta(days=27)):
            now = unix_ms(moment) + 999
            assert month_of(now) == year * 100 + month
            assert month_start_ms(now) == unix_ms(first)
            assert day_start_ms(now) == unix_ms(moment.replace(hour=0))
            assert day_of(now) * 86_400_000 == day_start_ms(now)


@pytest.mark.parametrize(
    "years",
    [
        # The years around a leap year, and the last ones, before 2100, which is none.
        range(2026, 2030),
        range(2095, 2100),
        pytest.param(range(2026, 2100), marks=pytest.mark.long),
    ],
    ids=str,
)
async def test_scripts_know_every_month_until_2100(
    store: QuotaStore, clock: TestClock, years: range
) -> None:
    one = Desk(store, (key_of(), project_of(), tenant_of(budget_micros=1)))
    months = [datetime(year, month, 1, tzinfo=UTC) for year in years for month in range(1, 13)]
    await clock.set(unix_ms(months[0]))
    await one.seed(now_ms=clock.now_ms)
    for first, following in pairwise(months):
        await clock.set(unix_ms(first))
        await one.admit(first.isoformat(), cost=1)
        await clock.set(unix_ms(following) - 1)
        assert (await one.refuse(cost=1)).retry_ms == 1


@all_cases("name", SCRIPTS)
def test_scripts_read_the_time_once_and_where_tests_can_set_it(name: str) -> None:
    source = getattr(store_module, name).source
    assert source.count(b"'TIME'") == source.count(b"local time = redis.call('TIME')") <= 1
