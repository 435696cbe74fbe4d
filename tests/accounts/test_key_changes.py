"""Changing and rotating keys, and who may do it."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from redis.asyncio import Redis

from gateway.accounts.addresses import read_addresses
from gateway.accounts.changes import ChangeAnnouncer
from gateway.accounts.database import Database
from gateway.accounts.key_store import KeyStore
from gateway.accounts.limits import FromPlan, LimitName
from gateway.accounts.paging import PageRequest
from gateway.accounts.project_service import ProjectService
from gateway.accounts.scopes import DEFAULT_SCOPES, TENANT_SCOPES, Scope
from gateway.accounts.tenant_service import TenantService
from gateway.auth.key_rules import MAX_GRACE
from gateway.auth.key_service import CreatedKey, KeyService
from gateway.auth.principal import Principal
from gateway.errors import (
    BadRequestError,
    ChangeNotAnnouncedError,
    InvalidParameterError,
    NotFoundError,
    PermissionDeniedError,
)
from gateway.redis_client import connect
from tests.accounts.changes import announced, audited
from tests.support.cases import all_cases, case
from tests.support.kinds import every_database
from tests.support.processes import free_port


@pytest.fixture(autouse=True)
async def _two_tenants(tenants: TenantService) -> None:
    await tenants.create("Acme", tenant_id="acme")
    await tenants.create("Other", tenant_id="other")


@pytest.fixture
async def key(keys: KeyService) -> CreatedKey:
    """A key of `acme`."""
    return await keys.create("acme", name="web")


def _principal(scopes: frozenset[Scope], models: frozenset[str] | None = None) -> Principal:
    return Principal(
        tenant_id="acme",
        tenant_weight=1.0,
        credential_id="key_caller",
        scopes=scopes,
        allowed_models=models,
    )


@every_database
async def test_all_options_are_kept_and_changed(
    keys: KeyService, projects: ProjectService, redis: Redis
) -> None:
    project = await projects.create("acme", name="shop")
    expires_at = datetime(2199, 12, 31, tzinfo=UTC)
    made = await keys.create(
        "acme",
        name="web",
        project_id=project.id,
        allowed_addresses=read_addresses(["10.0.0.0/8", "2001:db8::/32"]),
        limits={LimitName.REQUESTS_PER_MINUTE: 5, LimitName.BUDGET: None},
    )
    assert await keys.get("acme", made.record.id) == made.record
    assert made.record.project_id == project.id
    changed = await keys.update(
        "acme",
        made.record.id,
        name="shop",
        scopes=TENANT_SCOPES,
        allowed_models=frozenset({"b", "a"}),
        allowed_addresses=read_addresses(["::ffff:192.0.2.1"]),
        expires_at=expires_at,
        limits={LimitName.BUDGET: FromPlan.FROM_PLAN, LimitName.CONCURRENT_REQUESTS: 1},
    )
    assert changed == await keys.get("acme", made.record.prefix)
    assert changed == replace(
        made.record,
        name="shop",
        scopes=TENANT_SCOPES,
        allowed_models=frozenset({"a", "b"}),
        allowed_addresses=read_addresses(["192.0.2.1"]),
        expires_at=expires_at,
        limits={LimitName.REQUESTS_PER_MINUTE: 5, LimitName.CONCURRENT_REQUESTS: 1},
    )
    taken = await keys.update(
        "acme", made.record.id, allowed_models=None, allowed_addresses=None, expires_at=None
    )
    assert (taken.allowed_models, taken.allowed_addresses, taken.expires_at) == (None, None, None)
    assert await keys.get("acme", made.record.id) == taken
    assert await announced(redis) == [{b"key": made.record.id.encode()}] * 2


@all_cases(
    ("options", "param"),
    [
        ({"name": " "}, "name"),
        ({"scopes": frozenset()}, "scopes"),
        ({"allowed_models": frozenset()}, "allowed_models"),
        ({"expires_at": datetime(2020, 1, 1, tzinfo=UTC)}, "expires_at"),
    ],
)
async def test_senseless_change_is_refused(
    keys: KeyService, key: CreatedKey, redis: Redis, options: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        await keys.update("acme", key.record.id, **options)  # type: ignore[arg-type] # Each case has its own types.
    assert caught.value.param == param
    assert await keys.get("acme", key.record.id) == key.record
    assert await announced(redis) == []


async def test_key_is_made_only_in_an_active_project_of_its_tenant(
    keys: KeyService, projects: ProjectService
) -> None:
    archived = await projects.create("acme", name="old")
    await projects.archive("acme", archived.id)
    with pytest.raises(InvalidParameterError, match="not archived"):
        await keys.create("acme", name="web", project_id=archived.id)
    others = await projects.create("other", name="others")
    for project_id in (others.id, "prj_none", "\x00"):
        with pytest.raises(NotFoundError):
            await keys.create("acme", name="web", project_id=project_id)
    assert await keys.list_of_tenant("acme") == []


async def test_rotation_gives_a_new_secret_and_keeps_everything_else(
    keys: KeyService, key: CreatedKey, redis: Redis
) -> None:
    before = datetime.now(UTC)
    rotated = await keys.rotate("acme", key.record.id, grace=timedelta(hours=2))
    assert rotated.key.prefix != key.key.prefix
    old_expires_at = rotated.record.old_expires_at
    assert old_expires_at is not None
    assert timedelta(0) <= old_expires_at - before - timedelta(hours=2) < timedelta(minutes=1)
    assert rotated.record == replace(
        key.record,
        prefix=rotated.key.prefix,
        digest=rotated.key.digest(),
        old_prefix=key.key.prefix,
        old_digest=key.key.digest(),
        old_expires_at=old_expires_at,
    )
    # The key is found by its id and by the prefix of either secret.
    for name in (key.record.id, key.key.prefix, rotated.key.prefix, key.key.reveal()):
        assert await keys.get("acme", name) == rotated.record
    assert await announced(redis) == [{b"key": key.record.id.encode()}] * 2


async def test_rotation_without_grace_forgets_the_old_secret(
    keys: KeyService, key: CreatedKey
) -> None:
    once = await keys.rotate("acme", key.record.id)
    twice = await keys.rotate("acme", key.record.id, grace=timedelta(0))
    for former in (key, once):
        with pytest.raises(NotFoundError):
            await keys.get("acme", former.key.prefix)
    assert (twice.record.old_prefix, twice.record.old_digest, twice.record.old_expires_at) == (
        *(None, None),
        None,
    )


@all_cases("seconds", [-1, MAX_GRACE.total_seconds() + 1])
async def test_grace_out_of_range_is_refused(
    keys: KeyService, key: CreatedKey, seconds: float
) -> None:
    with pytest.raises(InvalidParameterError, match=r"from 0 to 2592000\. Given: ") as caught:
        await keys.rotate("acme", key.record.id, grace=timedelta(seconds=seconds))
    assert caught.value.param == "grace_seconds"
    assert await keys.get("acme", key.record.id) == key.record


@every_database
async def test_rotations_at_the_same_time_leave_the_two_newest_secrets(
    keys: KeyService, key: CreatedKey
) -> None:
    rotated = await asyncio.gather(*(keys.rotate("acme", key.record.id) for _ in range(5)))
    record = await keys.get("acme", key.record.id)
    prefixes = {each.key.prefix for each in rotated}
    # Every rotation continued from the one before it, so none got lost.
    assert record.prefix in prefixes
    assert record.old_prefix in prefixes
    assert record.prefix != record.old_prefix
    assert {each.record.old_prefix for each in rotated} == {
        key.key.prefix,
        *(prefixes - {record.prefix}),
    }


async def test_rotation_changes_nothing_when_it_cannot_be_announced(
    keys: KeyService, key: CreatedKey, database: Database
) -> None:
    unreachable = connect(f"redis://127.0.0.1:{free_port()}", max_connections=1)
    with pytest.raises(ChangeNotAnnouncedError):
        await KeyService(database, ChangeAnnouncer(unreachable)).rotate("acme", key.record.id)
    await unreachable.aclose()
    assert await keys.get("acme", key.record.id) == key.record


async def test_ended_key_is_neither_changed_nor_rotated(
    keys: KeyService, key: CreatedKey, database: Database
) -> None:
    await keys.revoke("acme", key.record.id)
    with pytest.raises(BadRequestError, match="is revoked: make a new one"):
        await keys.rotate("acme", key.record.id)
    with pytest.raises(BadRequestError, match="is revoked"):
        await keys.update("acme", key.record.id, name="x")
    expired = await keys.create("acme", name="short")
    async with database.writing() as transaction:
        past = datetime(2020, 1, 1, tzinfo=UTC)
        await KeyStore(transaction).change("acme", expired.record.id, {"expires_at": past})
    with pytest.raises(BadRequestError, match="has expired"):
        await keys.rotate("acme", expired.record.id)
    later = datetime(2199, 1, 1, tzinfo=UTC)
    assert (await keys.update("acme", expired.record.id, expires_at=later)).expires_at == later
    await keys.rotate("acme", expired.record.id)


async def test_every_change_is_audited_without_a_secret(
    keys: KeyService, database: Database
) -> None:
    created = await keys.create(
        "acme",
        name="web",
        scopes={Scope.USAGE, Scope.KEYS},
        allowed_addresses=read_addresses(["10.0.0.0/8"]),
        actor="jwt:ada",
    )
    id_ = created.record.id
    changes = {LimitName.BUDGET: FromPlan.FROM_PLAN}
    await keys.update("acme", id_, limits=changes, allowed_models=frozenset({"b", "a"}))
    rotated = await keys.rotate("acme", id_, actor="key:k")
    for _ in range(2):
        await keys.revoke("acme", id_, actor="key:k")
    rows = [row for row in await audited(database) if row.subject == id_]
    assert [(row.action, row.actor, row.tenant_id) for row in rows] == [
        ("key.create", "jwt:ada", "acme"),
        ("key.update", "system", "acme"),
        ("key.rotate", "key:k", "acme"),
        ("key.revoke", "key:k", "acme"),
    ]
    assert rows[0].details == {
        "prefix": created.key.prefix,
        "name": "web",
        "scopes": ["keys", "usage"],
        "allowed_models": None,
        "allowed_addresses": ["10.0.0.0/8"],
        "expires_at": None,
        "dialect": None,
        "project_id": None,
        "limits": {},
    }
    assert rows[1].details == {"limits": {"budget_micros": "plan"}, "allowed_models": ["a", "b"]}
    assert set(rows[2].details) == {"prefix", "old_expires_at"}
    written = str([row.details for row in rows])
    for secret in (created.key, rotated.key):
        assert secret.reveal()[16:] not in written
        assert secret.digest().hex() not in written


@pytest.mark.parametrize("scope", [Scope.MEMBERS, Scope.ADMIN, Scope.ADMIN_READ])
async def test_nobody_gives_a_scope_that_they_lack(keys: KeyService, scope: Scope) -> None:
    grantor = _principal(frozenset({Scope.KEYS, Scope.COMPLETIONS}))
    with pytest.raises(PermissionDeniedError, match=f"with the scope '{scope}'"):
        await keys.create("acme", name="x", scopes={scope}, grantor=grantor)
    own = (await keys.create("acme", name="own", grantor=grantor)).record
    with pytest.raises(PermissionDeniedError, match=f"with the scope '{scope}'"):
        await keys.update("acme", own.id, scopes=frozenset({scope}), grantor=grantor)
    assert await keys.list_of_tenant("acme") == [own]


async def test_operator_scope_is_not_given_by_a_tenants_credential_that_has_it(
    keys: KeyService,
) -> None:
    grantor = _principal(frozenset(Scope))
    with pytest.raises(PermissionDeniedError, match="'admin'"):
        await keys.create("acme", name="x", scopes={Scope.ADMIN}, grantor=grantor)


async def test_key_with_more_rights_is_out_of_reach_but_can_be_ended(keys: KeyService) -> None:
    strong = (await keys.create("acme", name="strong", scopes=TENANT_SCOPES)).record
    grantor = _principal(frozenset({Scope.KEYS}))
    with pytest.raises(PermissionDeniedError):
        await keys.rotate("acme", strong.id, grantor=grantor)
    with pytest.raises(PermissionDeniedError):
        await keys.update("acme", strong.id, scopes=frozenset({Scope.KEYS}), grantor=grantor)
    assert await keys.get("acme", strong.id) == strong
    assert (await keys.revoke("acme", strong.id)).revoked_at is not None


async def test_credential_for_some_models_gives_no_others(keys: KeyService) -> None:
    scopes = DEFAULT_SCOPES | {Scope.KEYS}
    grantor = _principal(scopes, models=frozenset({"a", "b"}))
    for models in (None, ["c"], ["a", "c"]):
        with pytest.raises(PermissionDeniedError, match="'allowed_models' are among its own"):
            await keys.create("acme", name="x", allowed_models=models, grantor=grantor)
    own = await keys.create("acme", name="own", allowed_models=["a"], grantor=grantor)
    with pytest.raises(PermissionDeniedError):
        await keys.update("acme", own.record.id, allowed_models=None, grantor=grantor)
    everything = await keys.create("acme", name="all")
    with pytest.raises(PermissionDeniedError):
        await keys.rotate("acme", everything.record.id, grantor=grantor)
    await keys.rotate("acme", own.record.id, grantor=grantor)


async def test_error_about_a_key_does_not_repeat_it(keys: KeyService, key: CreatedKey) -> None:
    whole = key.key.reveal()
    for name in (whole, whole[:-1], f"{whole}x", whole[3:], f"{whole}\x00", whole[1:]):
        with pytest.raises(NotFoundError) as caught:
            await keys.get("other", name)
        assert whole[16:40] not in caught.value.message


@every_database
async def test_what_is_no_name_of_a_key_is_not_found(keys: KeyService) -> None:
    for name in ["", "\x00", "key_'--", "é", "a" * 5000]:
        with case(name), pytest.raises(NotFoundError, match='"acme" has no'):
            await keys.get("acme", name)


async def test_pages_follow_each_other_without_gap_or_repetition(keys: KeyService) -> None:
    for n in range(5):
        await keys.create("acme", name=f"k{n}")
    await keys.create("other", name="other")
    first = await keys.page("acme", PageRequest(limit=3))
    second = await keys.page("acme", PageRequest(after=first.entries[-1].id, limit=3))
    assert first.has_more
    assert not second.has_more
    assert first.entries + second.entries == await keys.list_of_tenant("acme")
