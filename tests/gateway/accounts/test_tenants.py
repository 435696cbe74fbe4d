"""Creating, suspending and activating tenants."""

import asyncio
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from contract.dialect import Dialect
from contract.keys import KEY_EVENTS
from contract.tier import ServiceTier
from gateway.accounts.tenants.service import TenantService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import PageRequest
from gateway.platform.redis_client import connect
from gateway.records.errors import (
    ChangeNotAnnouncedError,
    ConflictError,
    InvalidParameterError,
    NotFoundError,
)
from gateway.records.limits import FromPlan, LimitName
from gateway.records.records import Billing, TenantStatus
from tests.gateway.accounts.changes import add_plan, announced, audited
from tests.support.cases import case
from tests.support.kinds import every_database
from tests.support.processes import free_port

NO_ORIGINS = (
    ("https://a.example/",),
    ("https://a.example/path",),
    ("https://user@a.example",),
    ("https://*.a.example",),
    ("https://a.example:0",),
    ("https://a.example:65536",),
    ("a.example",),
    ("null",),
    ("",),
    ("https://é.example",),
    ("https://" + "a" * 300,),
    tuple(f"https://a{number}.example" for number in range(101)),
)


async def test_new_tenant_is_active_and_gets_a_random_id(tenants: TenantService) -> None:
    created = await tenants.create("Acme")
    assert re.fullmatch(r"tnt_[0-9a-f]{16}", created.id)
    assert (created.weight, created.status) == (1.0, TenantStatus.ACTIVE)
    assert await tenants.get(created.id) == created


@every_database
async def test_times_are_read_aware_and_in_utc(tenants: TenantService) -> None:
    created = await tenants.create("Acme", tenant_id="acme")
    kept = (await tenants.get("acme")).created_at
    assert kept.tzinfo is UTC
    assert kept == created.created_at
    assert abs(datetime.now(UTC) - kept) < timedelta(minutes=1)


@every_database
async def test_existing_id_is_refused(tenants: TenantService) -> None:
    await tenants.create("Acme", tenant_id="acme")
    with pytest.raises(ConflictError, match='"acme" already exists'):
        await tenants.create("Other", tenant_id="acme")


async def test_id_outside_the_alphabet_is_refused(tenants: TenantService) -> None:
    for tenant_id in ["", "Acme", "a_b", "a" * 64, "a b", "ä", "tnt_1"]:
        with case(tenant_id):
            with pytest.raises(InvalidParameterError, match="1 to 63 characters") as caught:
                await tenants.create("Acme", tenant_id=tenant_id)
            assert caught.value.param == "id"


async def test_weight_out_of_range_is_refused(tenants: TenantService) -> None:
    for weight in [0, -1, float("nan"), float("inf"), 0.0009, 1001]:
        message = f"from 0.001 to 1000. Given: {weight}"
        with case(weight), pytest.raises(InvalidParameterError, match=message):
            await tenants.create("Acme", weight=weight)


async def test_name_out_of_bounds_is_refused(tenants: TenantService) -> None:
    for name in ["", "  ", "x" * 201]:
        with case(name), pytest.raises(InvalidParameterError, match="1 to 200 characters"):
            await tenants.create(name)


async def test_list_is_in_order_of_creation(tenants: TenantService) -> None:
    for tenant_id in ("b", "a", "c"):
        await tenants.create("Name", tenant_id=tenant_id)
        await asyncio.sleep(0.002)
    assert [tenant.id for tenant in (await tenants.page(PageRequest())).entries] == ["b", "a", "c"]


async def test_suspension_is_saved_and_announced(tenants: TenantService, redis: Redis) -> None:
    await tenants.create("Acme", tenant_id="acme")
    assert (await tenants.suspend("acme")).status is TenantStatus.SUSPENDED
    assert (await tenants.get("acme")).status is TenantStatus.SUSPENDED
    assert (await tenants.activate("acme")).status is TenantStatus.ACTIVE
    entries: Any = await redis.xrange(KEY_EVENTS)
    events = [fields for _, fields in entries]
    assert events == [{b"tenant": b"acme"}] * 2


async def test_options_are_stored_changed_one_by_one_and_announced(
    tenants: TenantService, redis: Redis
) -> None:
    await tenants.create(
        "Acme",
        tenant_id="acme",
        dialect=Dialect.OMLX,
        strict_parameters=True,
        default_model="m1",
    )
    made = await tenants.get("acme")
    assert (made.dialect, made.strict_parameters, made.default_model) == (Dialect.OMLX, True, "m1")
    changed = await tenants.update("acme", dialect=Dialect.LLAMACPP_2026)
    assert changed == await tenants.get("acme") == replace(made, dialect=Dialect.LLAMACPP_2026)
    changed = await tenants.update("acme", strict_parameters=False, default_model=None)
    assert (changed.dialect, changed.strict_parameters) == (Dialect.LLAMACPP_2026, False)
    assert (await tenants.get("acme")).default_model is None
    assert (await tenants.update("acme", dialect=None)).dialect is None
    entries: Any = await redis.xrange(KEY_EVENTS)
    assert [fields for _, fields in entries] == [{b"tenant": b"acme"}] * 3


async def test_empty_change_and_unknown_id_are_refused(
    tenants: TenantService, redis: Redis
) -> None:
    with pytest.raises(InvalidParameterError, match="Nothing to change"):
        await tenants.update("acme")
    with pytest.raises(NotFoundError, match='no tenant "acme"'):
        await tenants.update("acme", strict_parameters=True)
    assert await redis.exists(KEY_EVENTS) == 0


@every_database
async def test_every_option_is_stored_and_changed(
    tenants: TenantService, database: Database
) -> None:
    await add_plan(database, "starter")
    made = await tenants.create(
        "Acme",
        tenant_id="acme",
        plan_id="starter",
        limits={LimitName.BUDGET: 5, LimitName.TOKENS_PER_DAY: None},
        billing=Billing.PREPAID,
        service_tier=ServiceTier.FLEX,
        shows_cost=True,
        cors_origins=("https://App.example:443", "*", "https://app.example"),
    )
    assert made.cors_origins == ("https://app.example", "*")
    assert await tenants.get("acme") == made
    assert made.limits == {LimitName.BUDGET: 5, LimitName.TOKENS_PER_DAY: None}
    changed = await tenants.update(
        "acme",
        name="Acme Inc.",
        weight=3.5,
        plan_id=None,
        limits={LimitName.BUDGET: FromPlan.FROM_PLAN, LimitName.REQUESTS_PER_DAY: 9},
        billing=Billing.POSTPAID,
        service_tier=ServiceTier.PRIORITY,
        shows_cost=False,
        cors_origins=(),
    )
    assert changed == await tenants.get("acme")
    assert changed == replace(
        made,
        name="Acme Inc.",
        weight=3.5,
        plan_id=None,
        limits={LimitName.TOKENS_PER_DAY: None, LimitName.REQUESTS_PER_DAY: 9},
        billing=Billing.POSTPAID,
        service_tier=ServiceTier.PRIORITY,
        shows_cost=False,
        cors_origins=(),
    )


async def test_every_change_is_audited_with_its_values(
    tenants: TenantService, database: Database
) -> None:
    await tenants.create("Acme", tenant_id="acme", billing=Billing.PREPAID, actor="cli:ada")
    changes = {LimitName.BUDGET: FromPlan.FROM_PLAN, LimitName.TOKENS_PER_DAY: None}
    await tenants.update("acme", limits=changes, dialect=Dialect.VLLM, actor="key:k")
    for _ in range(2):
        await tenants.suspend("acme", actor="key:k")
    await tenants.activate("acme")
    rows = await audited(database)
    assert [(row.action, row.actor, row.details) for row in rows] == [
        (
            *("tenant.create", "cli:ada"),
            {"name": "Acme", "weight": 1.0, "billing": "prepaid", "limits": {}},
        ),
        (
            *("tenant.update", "key:k"),
            {"dialect": "vllm", "limits": {"budget_micros": "plan", "tokens_per_day": None}},
        ),
        ("tenant.suspend", "key:k", {}),
        ("tenant.activate", "system", {}),
    ]
    assert {(row.tenant, row.subject) for row in rows} == {("acme", "acme")}


async def test_refused_change_leaves_no_audit_entry(
    tenants: TenantService, database: Database, redis: Redis
) -> None:
    made = await tenants.create("Acme", tenant_id="acme")
    refused: list[Any] = [{"name": ""}, {"weight": 0}, {"plan_id": "none"}, {"plan_id": "a\x00"}]
    for options in [*refused, *({"cors_origins": origins} for origins in NO_ORIGINS)]:
        with pytest.raises(InvalidParameterError) as caught:
            await tenants.update("acme", shows_cost=True, **options)
        assert caught.value.param in options
    with pytest.raises(InvalidParameterError, match="'plan_id' must be the id of a plan"):
        await tenants.create("Other", tenant_id="other", plan_id="none")
    assert (await tenants.page(PageRequest())).entries == [made]
    assert len(await audited(database)) == 1
    assert await announced(redis) == []


@every_database
async def test_concurrent_changes_are_all_stored(tenants: TenantService) -> None:
    await tenants.create("Acme", tenant_id="acme")
    await asyncio.gather(*(tenants.update("acme", limits={name: 1}) for name in LimitName))
    assert set((await tenants.get("acme")).limits) == set(LimitName)


@every_database
async def test_pages_follow_each_other_without_gap_or_repetition(tenants: TenantService) -> None:
    await asyncio.gather(*(tenants.create("Name") for _ in range(7)))
    everything = (await tenants.page(PageRequest())).entries
    first = await tenants.page(PageRequest(limit=4))
    second = await tenants.page(PageRequest(after=first.entries[-1].id, limit=4))
    assert (first.has_more, second.has_more) == (True, False)
    assert first.entries + second.entries == everything


@pytest.mark.parametrize("model", ["", "  ", "x" * 201, "a\nb"])
async def test_default_model_out_of_bounds_is_refused(tenants: TenantService, model: str) -> None:
    with pytest.raises(InvalidParameterError, match="characters") as caught:
        await tenants.create("Acme", tenant_id="acme", default_model=model)
    assert caught.value.param == "default_model"
    await tenants.create("Acme", tenant_id="acme")
    with pytest.raises(InvalidParameterError):
        await tenants.update("acme", default_model=model)


async def test_dialect_of_a_later_release_reads_as_none(
    database: Database, tenants: TenantService
) -> None:
    await tenants.create("Acme", tenant_id="acme", dialect=Dialect.VLLM)
    async with database.writing() as transaction:
        await transaction.execute(text("UPDATE tenants SET dialect = 'esperanto'"))
    assert (await tenants.get("acme")).dialect is None


async def test_unknown_tenant_is_not_found(tenants: TenantService, redis: Redis) -> None:
    for action in (tenants.get, tenants.suspend, tenants.activate):
        with pytest.raises(NotFoundError, match='no tenant "nobody"'):
            await action("nobody")
    assert await redis.exists(KEY_EVENTS) == 0


async def test_unannounced_change_is_saved_and_reported(
    database: Database, tenants: TenantService
) -> None:
    await tenants.create("Acme", tenant_id="acme")
    unreachable = connect(f"redis://127.0.0.1:{free_port()}", max_connections=1)
    with pytest.raises(ChangeNotAnnouncedError, match="The change is saved, but gateways"):
        await TenantService(database, ChangeAnnouncer(unreachable)).suspend("acme")
    await unreachable.aclose()
    assert (await tenants.get("acme")).status is TenantStatus.SUSPENDED


@every_database
@pytest.mark.parametrize(("column", "value"), [("weight", "-1"), ("status", "'gone'")])
async def test_database_itself_refuses_impossible_values(
    database: Database, tenants: TenantService, column: str, value: str
) -> None:
    await tenants.create("Acme", tenant_id="acme")
    with pytest.raises(IntegrityError):
        async with database.writing() as transaction:
            await transaction.execute(text(f"UPDATE tenants SET {column} = {value}"))


@every_database
async def test_transactions_that_read_before_they_write_wait_for_each_other(
    tenants: TenantService,
) -> None:
    await tenants.create("Acme", tenant_id="acme")
    await asyncio.gather(
        *(tenants.suspend("acme") for _ in range(8)),
        *(tenants.activate("acme") for _ in range(8)),
    )
    assert (await tenants.get("acme")).id == "acme"
