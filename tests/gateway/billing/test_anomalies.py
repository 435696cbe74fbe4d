"""Automatic spend limits: what they learn, whom they stop, and how often by mistake."""

import json
import math
import random
from bisect import bisect_left, bisect_right
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import AsyncMock

import pytest
from redis.asyncio import Redis

from gateway.accounts.keys.service import KeyService
from gateway.accounts.spend_limits import SpendLimitService
from gateway.accounts.tenants.service import TenantService
from gateway.accounts.webhooks.service import WebhookService
from gateway.billing.alerts import find_alerts
from gateway.billing.anomalies import LEARNING, LEAST_MICROS, learn_limits, learned_micros
from gateway.jobs.webhooks import lock_due
from gateway.limits.store import QuotaStore
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.holders import spend_limits_of
from gateway.platform.database.paging import PageRequest
from gateway.platform.database.tables import SpendLimitRow
from gateway.records.errors import StateConflictError
from gateway.records.limits import SpendScope, Window
from gateway.records.records import AnomalyAction
from gateway.records.spending import SpendLimit, applied
from gateway.records.times import to_ms, utc_now
from tests.support.cases import all_cases
from tests.support.kinds import every_database
from tests.support.ledger import use
from tests.support.secret_box import BOX

NOW = datetime(2026, 11, 30, 10, 20, tzinfo=UTC)
"""A Monday."""
HOUR = timedelta(hours=1)
MONTHS_HOURS = 24 * 90


def customer(kind: str, rng: random.Random) -> dict[datetime, int]:
    """Return what a key of an ordinary customer spends in each hour of three months."""
    began, costs = NOW.replace(minute=0) - MONTHS_HOURS * HOUR, dict[datetime, int]()
    for number in range(MONTHS_HOURS):
        at = began + number * HOUR
        noise = rng.lognormvariate(0, 0.4)
        office = at.weekday() < 5 and 8 <= at.hour < 18
        rate = {
            "web site": 1 + math.sin((at.hour - 9) / 24 * 2 * math.pi),
            "office": 2.0 if office else 0.02,
            "nightly batch": 20.0 if at.hour == 2 else 0.0,
            "weekly report": 50.0 if (at.weekday(), at.hour) == (0, 6) else 0.0,
            "growing": 1.05 ** (number / 24),
            "sporadic": 10.0 if rng.random() < 0.02 else 0.0,
        }[kind]
        if micros := int(rate * noise * 1_000_000):
            costs[at] = micros
    return costs


@all_cases("kind", ["web site", "office", "nightly batch", "weekly report", "growing", "sporadic"])
def test_ordinary_customers_are_rarely_stopped(kind: str) -> None:
    """At a factor of 5, at most one hour of two months is a false alarm."""
    costs, alarms = customer(kind, random.Random(1)), 0
    hours, rows = [*costs], [*costs.items()]
    for index in range(bisect_left(hours, NOW - timedelta(days=60)), len(rows)):
        at, cost = rows[index]
        recent = dict(rows[bisect_right(hours, at - timedelta(days=29)) : index])
        limit = learned_micros(recent, at, 5)
        assert limit is not None
        alarms += cost > limit
    assert alarms <= 1


@all_cases("kind", ["web site", "office", "nightly batch", "growing"])
def test_runaway_key_is_stopped_within_the_hour(kind: str) -> None:
    """It spends thirty times of what it has spent in its dearest hour of a usual day."""
    costs = customer(kind, random.Random(1))
    hour = NOW.replace(minute=0)
    limit = learned_micros(costs, hour, 5)
    dearest = max(cost for at, cost in costs.items() if at >= hour - timedelta(days=7))
    assert limit is not None
    assert LEAST_MICROS <= limit < 30 * dearest


def test_new_key_has_no_limit() -> None:
    recent = {NOW.replace(minute=0) - LEARNING + HOUR: 10**6}
    assert learned_micros(recent, NOW.replace(minute=0), 5) is None


@pytest.fixture
async def key(database: Database, tenants: TenantService, keys: KeyService) -> str:
    """A key that has spent a dollar an hour for two weeks."""
    await tenants.create("Acme", tenant_id="acme", anomaly_factor=5)
    created = await keys.create("acme", name="app")
    at = NOW.replace(minute=0)
    for hours in range(1, 24 * 14, 6):
        await use(database, "acme", 10**6, at=at - hours * HOUR, credential_id=created.record.id)
    return created.record.id


@every_database
async def test_limits_are_learned_kept_and_removed(
    database: Database, redis: Redis, tenants: TenantService, key: str
) -> None:
    announcer = ChangeAnnouncer(redis)
    service = SpendLimitService(database, announcer, AsyncMock())

    async def learn(now: datetime = NOW) -> list[SpendLimit]:
        await learn_limits(database, announcer, now)
        service.uses = AsyncMock(side_effect=lambda _, limits: limits)  # type: ignore[method-assign]
        page: Any = await service.page("acme", PageRequest(None, 9))
        return list(page.entries)

    [limit] = await learn()
    assert (limit.holder, limit.amount_micros, limit.is_automatic) == (key, 5 * 10**6, True)
    assert await learn_limits(database, announcer, NOW) == 0
    with pytest.raises(StateConflictError, match="lift it"):
        await service.remove("acme", limit.id)
    now_ms = to_ms(utc_now())
    [subject] = applied((limit,), now_ms, model="m", user="")
    assert subject.spending is not None
    assert subject.spending.is_automatic
    await tenants.update("acme", anomaly_action=AnomalyAction.REPORT)
    [reported] = await learn()
    assert (reported.id, reported.is_enforced) == (limit.id, False)
    assert applied((reported,), now_ms, model="m", user="") == ()
    await tenants.update("acme", anomaly_factor=8)
    [larger] = await learn()
    assert (larger.id, larger.amount_micros) == (limit.id, 8 * 10**6)
    await tenants.update("acme", anomaly_factor=None, anomaly_repeats=9)
    [repeated] = await learn()
    assert (repeated.id, repeated.amount_micros, repeated.repeats) == (limit.id, None, 9)
    # Nothing is reserved in it.
    enforced = replace(repeated, is_enforced=True)
    assert applied((enforced,), now_ms, model="m", user="") == ()
    await tenants.update("acme", anomaly_repeats=None)
    assert await learn() == []


async def test_anomaly_is_reported_once_in_an_hour(
    database: Database, redis: Redis, tenants: TenantService, key: str
) -> None:
    await tenants.update("acme", anomaly_action=AnomalyAction.REPORT, anomaly_repeats=3)
    await WebhookService(database, BOX).create("acme", "https://example.com/", thresholds=[50])
    await learn_limits(database, ChangeAnnouncer(redis), NOW)
    quotas = QuotaStore(redis)
    async with database.reading() as transaction:
        [limit] = await spend_limits_of(transaction, SpendLimitRow.holder == key)
    await use(database, "acme", 3_900_000, at=NOW, credential_id=key)
    await quotas.repeat("acme", limit, b"one")
    await quotas.repeat("acme", limit, b"one")
    assert await quotas.repeat("acme", limit, b"two") == 1
    assert await find_alerts(database, quotas, NOW) == 0
    await use(database, "acme", 200_000, at=NOW, credential_id=key)
    assert await quotas.repeat("acme", limit, b"one") == 3
    assert [await find_alerts(database, quotas, NOW) for _ in range(2)] == [2, 0]
    async with database.writing() as transaction:
        events = await lock_due(transaction, utc_now() + HOUR, 9)
        bodies = [json.loads(event.body) for event in events]
    assert {(body["type"], body["data"]["holder"]) for body in bodies} == {("key.anomaly", key)}
    found = sorted((body["data"] for body in bodies), key=lambda data: data["threshold"])
    assert (found[0]["amount_micros"], found[0]["used_micros"]) == (5_000_000, 4_100_000)
    assert (found[1]["repeats"], found[1]["repeated"]) == (3, 3)


async def test_most_repeated_requests_stay_counted(redis: Redis) -> None:
    quotas, limit = QuotaStore(redis), limit_of_repeats()
    for number in range(1_000):
        await quotas.repeat("acme", limit, f"other {number}".encode())
        if number % 50 == 0:
            await quotas.repeat("acme", limit, b"one")
    assert await quotas.most_repeated("acme", [limit]) == [20]
    [kept] = await redis.keys("*repeats*")
    assert await redis.zcard(kept) <= 256
    assert 0 < await redis.pttl(kept) <= 3_600_000


def limit_of_repeats() -> SpendLimit:
    return SpendLimit(
        id="spl_1",
        tenant_id="acme",
        scope=SpendScope.KEY,
        holder="key_1",
        model=None,
        window=Window.HOUR,
        starts_on=1,
        amount_micros=None,
        repeats=20,
        created_at=NOW,
    )
