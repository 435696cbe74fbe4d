"""Plans: default limits for groups of tenants."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import pytest
from redis.asyncio import Redis

from contract.keys import KEY_EVENTS
from gateway.accounts.audit.log import AuditLog
from gateway.accounts.plans.service import PlanService
from gateway.accounts.plans.spending import read_spend_limits
from gateway.accounts.spend_limits import SpendLimitService
from gateway.accounts.tenants.service import TenantService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.holders import spend_limits_of
from gateway.platform.database.tables import SpendLimitRow
from gateway.records.errors import (
    ConflictError,
    InvalidParameterError,
    NotFoundError,
    StateConflictError,
)
from gateway.records.limits import LimitName, LimitScope, SpendScope, Window
from gateway.records.spending import SpendLimit
from tests.support.cases import all_cases
from tests.support.kinds import every_database

RPM, BUDGET = LimitName.REQUESTS_PER_MINUTE, LimitName.BUDGET
NOTHING: dict[LimitName, int | None] = {}


@pytest.fixture
def plans(database: Database, redis: Redis) -> PlanService:
    return PlanService(database, ChangeAnnouncer(redis))


async def _events(redis: Redis) -> list[dict[bytes, bytes]]:
    entries: Any = await redis.xrange(KEY_EVENTS)
    return [fields for _, fields in entries]


@every_database
async def test_plan_is_stored_with_its_limits(plans: PlanService) -> None:
    created = await plans.create(
        "starter",
        limits={LimitScope.KEY: {RPM: 60}, LimitScope.TENANT: {BUDGET: 5_000_000, RPM: None}},
    )
    assert created.name == "starter"
    assert created.limits == {
        LimitScope.KEY: {RPM: 60},
        LimitScope.PROJECT: {},
        LimitScope.TENANT: {BUDGET: 5_000_000},
    }
    assert await plans.get("starter") == created
    assert await plans.list_all() == [created]


async def test_change_merges_limits_by_name_and_none_removes(
    plans: PlanService, redis: Redis
) -> None:
    await plans.create("p", limits={LimitScope.KEY: {RPM: 60, BUDGET: 1}})
    changed = await plans.update(
        "p", limits={LimitScope.KEY: {RPM: None}, LimitScope.PROJECT: {BUDGET: 7}}
    )
    assert changed.limits[LimitScope.KEY] == {BUDGET: 1}
    assert changed.limits[LimitScope.PROJECT] == {BUDGET: 7}
    assert await plans.get("p") == changed
    assert (await plans.update("p", name="Pro")).name == "Pro"
    assert await _events(redis) == [{b"all": b"plans"}] * 2


@every_database
async def test_concurrent_changes_are_all_stored(plans: PlanService) -> None:
    await plans.create("p")
    names = list(LimitName)
    await asyncio.gather(*(plans.update("p", limits={LimitScope.KEY: {n: 1}}) for n in names))
    assert (await plans.get("p")).limits[LimitScope.KEY] == dict.fromkeys(names, 1)


async def test_changes_are_audited(plans: PlanService, database: Database) -> None:
    await plans.create("p", actor="cli:ada")
    await plans.update("p", limits={LimitScope.KEY: {RPM: 5}}, actor="cli:bob")
    async with database.reading() as transaction:
        newest, first = await AuditLog(transaction).entries()
    assert (first.action, first.subject, first.actor) == ("plan.create", "p", "cli:ada")
    assert (newest.action, newest.actor) == ("plan.update", "cli:bob")
    assert newest.details["key_limits"] == {"requests_per_minute": 5}


@all_cases("plan_id", ["", "Pro", "a b", "x" * 64, "a\0"])
async def test_id_outside_the_alphabet_is_refused(plans: PlanService, plan_id: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        await plans.create(plan_id)
    assert caught.value.param == "id"


async def test_existing_id_is_refused(plans: PlanService, database: Database) -> None:
    await plans.create("p")
    with pytest.raises(ConflictError, match='"p" already exists'):
        await plans.create("p")
    async with database.reading() as transaction:
        assert len(await AuditLog(transaction).entries()) == 1


async def test_empty_change_and_unknown_id_are_refused(plans: PlanService, redis: Redis) -> None:
    with pytest.raises(InvalidParameterError, match="Nothing to change"):
        await plans.update("p", limits={LimitScope.KEY: NOTHING})
    for plan_id in ("p", "a\0b"):
        with pytest.raises(NotFoundError, match="There is no plan"):
            await plans.update(plan_id, name="x")
        with pytest.raises(NotFoundError, match="There is no plan"):
            await plans.get(plan_id)
    assert await _events(redis) == []


@every_database
async def test_tenants_have_the_spend_limits_of_their_plan(
    plans: PlanService, database: Database, redis: Redis
) -> None:
    announcer = ChangeAnnouncer(redis)
    tenants = TenantService(database, announcer)
    service = SpendLimitService(database, announcer, AsyncMock())
    service.uses = AsyncMock(side_effect=lambda _, limits: limits)  # type: ignore[method-assign]

    async def limits_of(tenant_id: str) -> dict[str, SpendLimit]:
        async with database.reading() as transaction:
            found = await spend_limits_of(transaction, SpendLimitRow.tenant_id == tenant_id)
        return {f"{each.scope} {each.window} {each.model}": each for each in found}

    async def amounts_of(tenant_id: str) -> dict[str, int | None]:
        return {name: each.amount_micros for name, each in (await limits_of(tenant_id)).items()}

    await plans.create("pro", spend_limits={"tenant/month": 500, "user/day/org/m": 9})
    await tenants.create("Acme", tenant_id="acme", plan_id="pro")
    await tenants.create("Late", tenant_id="late")
    assert await amounts_of("acme") == {"tenant month None": 500, "user day org/m": 9}
    before = (await limits_of("acme"))["tenant month None"]
    await plans.update(
        "pro", spend_limits={"tenant/month": 700, "user/day/org/m": None, "tenant/hour": 3}
    )
    changed = {"tenant month None": 700, "tenant hour None": 3}
    assert await amounts_of("acme") == changed
    after = (await limits_of("acme"))["tenant month None"]
    assert (after.id, after.is_operators) == (before.id, True)
    assert await amounts_of("late") == {}
    await tenants.update("late", plan_id="pro")
    assert await amounts_of("late") == changed
    with pytest.raises(StateConflictError, match="change the plan"):
        await service.update("acme", after.id, amount_micros=10**6)
    with pytest.raises(StateConflictError, match="change the plan"):
        await service.remove("acme", after.id)
    await service.lift("acme", after.id)
    await service.add("acme", scope=SpendScope.TENANT, window=Window.MONTH, amount_micros=1)
    await tenants.update("acme", plan_id=None)
    assert await amounts_of("acme") == {"tenant month None": 1}


@all_cases("name", ["tenant", "key/month", "tenant/year", "tenant/month/"])
def test_unknown_spend_limit_is_refused(name: str) -> None:
    with pytest.raises(InvalidParameterError, match="spend_limits"):
        read_spend_limits({name: 5})
