"""Alerts about budgets and credits."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from unittest.mock import AsyncMock

import pytest
from redis.asyncio import Redis

from gateway.accounts.keys.service import KeyService
from gateway.accounts.plans.service import PlanService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.spend_limits import SpendLimitService
from gateway.accounts.tenants.service import TenantService
from gateway.accounts.webhooks.service import WebhookService
from gateway.billing.alerts import find_alerts
from gateway.billing.credits.service import CreditService
from gateway.jobs.webhooks import lock_due
from gateway.limits.store import QuotaStore
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.records.errors import StoreUnavailableError
from gateway.records.limits import LimitName, LimitScope, SpendScope, Window
from gateway.records.records import Billing, Webhook
from gateway.records.times import to_ms, utc_now
from tests.gateway.limits.building import Desk, TestClock
from tests.support.kinds import every_database
from tests.support.ledger import use
from tests.support.postgres_server import NOWHERE
from tests.support.secret_box import BOX

URL = "https://example.com/"
NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
BUDGET = LimitName.BUDGET


@pytest.fixture
def quotas(any_redis: Redis) -> QuotaStore:
    """The accounts of spend limits."""
    return QuotaStore(any_redis)


@pytest.fixture
async def webhook(database: Database, tenants: TenantService) -> Webhook:
    """A webhook of the tenant `acme`."""
    await tenants.create("Acme", tenant_id="acme")
    await tenants.create("Quiet", tenant_id="quiet", limits={BUDGET: 1})
    return await WebhookService(database, BOX).create("acme", URL, thresholds=[50, 80, 100])


async def _pending(database: Database) -> list[dict[str, Any]]:
    """Return the pending alerts in the order of scope and threshold, once each."""
    async with database.writing() as transaction:
        due = await lock_due(transaction, utc_now() + timedelta(days=1), 100)
        for event in due:
            event.next_attempt_at = None
    bodies = [json.loads(event.body) for event in due]
    return sorted(
        bodies, key=lambda body: (body["data"].get("scope", ""), body["data"].get("threshold", 0))
    )


async def _spend(database: Database, cost: int, **options: Any) -> None:
    await use(database, "acme", cost, **{"at": NOW, "is_prepaid": False, **options})


async def test_each_threshold_of_a_tenants_budget_alerts_once(
    database: Database, quotas: QuotaStore, tenants: TenantService, webhook: Webhook
) -> None:
    await tenants.update("acme", limits={BUDGET: 1000})
    await _spend(database, 499)
    assert await find_alerts(database, quotas, NOW) == 0
    await _spend(database, 1)
    assert await find_alerts(database, quotas, NOW) == 1
    assert await find_alerts(database, quotas, NOW) == 0
    (reported,) = await _pending(database)
    assert (reported["type"], reported["tenant"]) == ("budget.threshold", "acme")
    assert reported["data"] == {
        "scope": "tenant",
        "id": "acme",
        "month": "2026-11",
        "threshold": 50,
        "budget_micros": 1000,
        "used_micros": 500,
    }
    await _spend(database, 600)
    assert await find_alerts(database, quotas, NOW) == 2
    assert [body["data"]["threshold"] for body in await _pending(database)] == [80, 100]


@every_database
async def test_concurrent_alerts_are_sent_once(
    database: Database, quotas: QuotaStore, tenants: TenantService, webhook: Webhook
) -> None:
    await tenants.update("acme", limits={BUDGET: 10})
    await _spend(database, 10)
    assert sum(await asyncio.gather(*(find_alerts(database, quotas, NOW) for _ in range(4)))) == 3


async def test_failure_for_one_tenant_delays_no_other(
    database: Database,
    quotas: QuotaStore,
    tenants: TenantService,
    webhook: Webhook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = AsyncMock(side_effect=(ZeroDivisionError, {"t:quiet": 1}))
    monkeypatch.setattr("gateway.billing.alerts.costs_since", costs)
    await WebhookService(database, BOX).create("quiet", URL, thresholds=[100])
    with pytest.raises(ZeroDivisionError):
        await find_alerts(database, quotas, NOW)
    assert [event["tenant"] for event in await _pending(database)] == ["quiet"]


async def test_alerts_start_again_each_month(
    database: Database, quotas: QuotaStore, tenants: TenantService, webhook: Webhook
) -> None:
    await tenants.update("acme", limits={BUDGET: 1000})
    await _spend(database, 800, at=datetime(2026, 10, 31, 23, 59, 59, tzinfo=UTC))
    assert await find_alerts(database, quotas, NOW) == 0
    await _spend(database, 500, at=datetime(2026, 11, 1, tzinfo=UTC))
    assert await find_alerts(database, quotas, NOW) == 1
    december = datetime(2026, 12, 1, tzinfo=UTC)
    assert await find_alerts(database, quotas, december) == 0
    await _spend(database, 500, at=december)
    assert await find_alerts(database, quotas, december) == 1


async def test_projects_and_keys_have_own_budgets_or_those_of_the_plan(
    database: Database,
    quotas: QuotaStore,
    redis: Redis,
    tenants: TenantService,
    keys: KeyService,
    webhook: Webhook,
) -> None:
    announcer = ChangeAnnouncer(redis)
    await PlanService(database, announcer).create("p", limits={LimitScope.KEY: {BUDGET: 100}})
    await tenants.update("acme", plan_id="p")
    project = await ProjectService(database, announcer).create(
        "acme", name="web", limits={BUDGET: 1000}
    )
    by_plan = (await keys.create("acme", name="a")).record
    unlimited = (await keys.create("acme", name="b", limits={BUDGET: None})).record
    revoked = (await keys.create("acme", name="c")).record
    await keys.revoke("acme", revoked.id)
    for key in (by_plan, unlimited, revoked):
        await _spend(database, 200, project_id=project.id, credential_id=key.id)
    assert await find_alerts(database, quotas, NOW) == 4
    reported = [
        (body["data"]["scope"], body["data"]["id"], body["data"]["threshold"])
        for body in await _pending(database)
    ]
    assert reported == [
        ("key", by_plan.id, 50),
        ("key", by_plan.id, 80),
        ("key", by_plan.id, 100),
        ("project", project.id, 50),
    ]


async def test_zero_budget_and_usage_of_other_tenants_send_no_alert(
    database: Database, quotas: QuotaStore, tenants: TenantService, webhook: Webhook
) -> None:
    await tenants.update("acme", limits={BUDGET: 0})
    await use(database, "quiet", 1000, at=NOW)
    assert await find_alerts(database, quotas, NOW) == 0


async def test_every_webhook_except_a_removed_one_gets_alerts(
    database: Database, quotas: QuotaStore, tenants: TenantService, webhook: Webhook
) -> None:
    service = WebhookService(database, BOX)
    await service.create("acme", URL, thresholds=[50])
    removed = await service.create("acme", URL)
    await service.remove("acme", removed.id)
    await tenants.update("acme", limits={BUDGET: 1000})
    await _spend(database, 1000)
    assert await find_alerts(database, quotas, NOW) == 4


async def test_exhausted_credits_alert_once_for_each_grant(
    database: Database, quotas: QuotaStore, redis: Redis, tenants: TenantService, webhook: Webhook
) -> None:
    granting = CreditService(database, ChangeAnnouncer(redis))
    await tenants.update("acme", billing=Billing.PREPAID)
    assert await find_alerts(database, quotas, NOW) == 0
    granted = await granting.grant("acme", 1000)
    await _spend(database, 990, is_prepaid=True)
    assert await find_alerts(database, quotas, NOW) == 0
    await _spend(database, 1, is_prepaid=True)
    assert await find_alerts(database, quotas, NOW) == 1
    assert await find_alerts(database, quotas, NOW) == 0
    (reported,) = await _pending(database)
    assert reported["type"] == "credits.exhausted"
    assert reported["data"] == {"balance_micros": 9, "newest_grant": granted.id}
    await asyncio.sleep(0.002)
    await granting.grant("acme", 100)
    assert await find_alerts(database, quotas, NOW) == 0
    await _spend(database, 109, is_prepaid=True)
    assert await find_alerts(database, quotas, NOW) == 1


async def test_postpaid_tenants_get_no_alerts_of_credits(
    database: Database, quotas: QuotaStore, redis: Redis, webhook: Webhook
) -> None:
    await CreditService(database, ChangeAnnouncer(redis)).grant("acme", 10)
    await _spend(database, 10, is_prepaid=True)
    assert await find_alerts(database, quotas, NOW) == 0


async def test_database_outage_is_reported(quotas: QuotaStore) -> None:
    nowhere = Database(NOWHERE)
    with pytest.raises(StoreUnavailableError):
        await find_alerts(nowhere, quotas, NOW)
    await nowhere.aclose()


async def test_spend_limits_alert_once_in_each_window(
    database: Database,
    any_redis: Redis,
    clock: TestClock,
    quotas: QuotaStore,
    keys: KeyService,
    webhook: Webhook,
) -> None:
    await clock.set(to_ms(NOW))
    key = (await keys.create("acme", name="first")).record.id
    service = SpendLimitService(database, ChangeAnnouncer(any_redis), AsyncMock())
    of_key: dict[str, Any] = {"scope": SpendScope.KEY, "holder": key, "model": "m1"}
    limit = await service.add("acme", **of_key, window=Window.DAY, amount_micros=1_000)
    users = await service.add("acme", scope=SpendScope.USER, window=Window.HOUR, amount_micros=100)
    await _spend(database, 800, credential_id=key)
    await _spend(database, 90, credential_id="key_2", end_user="eve")
    await _spend(database, 40, credential_id="key_2", end_user="bob")
    assert await find_alerts(database, quotas, NOW) == 4
    assert await find_alerts(database, quotas, NOW) == 0
    reported = await _pending(database)
    assert {each["type"] for each in reported} == {"spend_limit.threshold"}
    found = [(e["data"]["spend_limit"], e["data"]["threshold"]) for e in reported]
    assert sorted(found) == sorted(product((limit.id, users.id), (50, 80)))
    assert reported[0]["data"] == {
        "spend_limit": limit.id,
        "scope": "key",
        "holder": key,
        "model": "m1",
        "window": "day",
        "window_starts_at": "2026-11-15T00:00:00+00:00",
        "amount_micros": 1_000,
        "used_micros": 800,
        "threshold": 50,
    }
    assert (reported[2]["data"]["holder"], reported[2]["data"]["used_micros"]) == ("eve", 90)

    async def requests_cost(at: datetime, micros: int) -> list[int]:
        """Return the new events while a request runs, and after its end."""
        await clock.set(to_ms(at))
        desk = Desk(quotas, (limit.subject_at(clock.now_ms),))
        await desk.admit(f"r{micros}", cost=micros)
        running = await find_alerts(database, quotas, at)
        counted = (desk.subjects[0].subject,)
        await desk.settle(f"r{micros}", cost=micros, created_ms=clock.now_ms, spend_limits=counted)
        return [running, await find_alerts(database, quotas, at)]

    # What a request reserves is not spent yet. No row of these requests is in the ledger.
    assert await requests_cost(NOW + timedelta(minutes=1), 200) == [0, 1]
    assert await requests_cost(NOW + timedelta(days=1), 500) == [0, 1]
