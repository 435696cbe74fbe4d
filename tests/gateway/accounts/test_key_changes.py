"""Changing and rotating keys, and who may do it."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import update

from gateway.accounts.keys.rules import MAX_GRACE, MadeKeys, read_addresses
from gateway.accounts.keys.service import CreatedKey, KeyService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.tenants.service import TenantService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import PageRequest
from gateway.platform.database.tables import ApiKeyRow
from gateway.platform.redis_client import connect
from gateway.records.errors import (
    AuthenticationError,
    BadRequestError,
    ChangeNotAnnouncedError,
    InvalidParameterError,
    NotFoundError,
    PermissionDeniedError,
)
from gateway.records.grants import BOUNDS
from gateway.records.limits import FromPlan, LimitName, Limits
from gateway.records.scopes import DEFAULT_SCOPES, TENANT_SCOPES, Scope
from tests.gateway.accounts.changes import announced, audited, grant
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
async def test_invalid_change_is_refused(
    keys: KeyService, key: CreatedKey, redis: Redis, options: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        # Each case has its own types.
        await keys.update("acme", key.record.id, **options)  # type: ignore[arg-type]
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
    assert (await keys.page("acme", PageRequest())).entries == []


async def test_rotation_changes_only_the_secret(
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


async def test_rotation_without_grace_deletes_the_old_secret(
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
    # Every rotation continued from the one before it, so none was lost.
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


async def test_ended_key_cannot_be_changed_or_rotated(
    keys: KeyService, key: CreatedKey, database: Database
) -> None:
    await keys.revoke("acme", key.record.id)
    with pytest.raises(BadRequestError, match="is revoked: create a new key"):
        await keys.rotate("acme", key.record.id)
    with pytest.raises(BadRequestError, match="is revoked"):
        await keys.update("acme", key.record.id, name="x")
    expired = await keys.create("acme", name="short")
    async with database.writing() as transaction:
        past = datetime(2020, 1, 1, tzinfo=UTC)
        is_it = ApiKeyRow.id == expired.record.id
        await transaction.execute(update(ApiKeyRow).where(is_it).values(expires_at=past))
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
    assert [(row.action, row.actor, row.tenant) for row in rows] == [
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


HELD: dict[str, Any] = {
    "scopes": frozenset({Scope.KEYS, Scope.COMPLETIONS}),
    "allowed_models": frozenset({"a", "b"}),
    "allowed_addresses": read_addresses(["10.0.0.0/8"]),
    "expires_at": datetime(2199, 1, 1, tzinfo=UTC),
    "limits": Limits(requests_per_minute=60, budget_micros=7),
}
"""A bound of each kind except the project, which must exist."""
WIDER: dict[str, Any] = {
    "scopes": frozenset({Scope.COMPLETIONS, Scope.MEMBERS}),
    "allowed_models": None,
    "allowed_addresses": None,
    "expires_at": None,
    "limits": {LimitName.BUDGET: FromPlan.FROM_PLAN},
}
WITHIN: dict[str, Any] = {
    "scopes": frozenset({Scope.COMPLETIONS}),
    "allowed_models": frozenset({"a"}),
    "allowed_addresses": read_addresses(["10.1.0.0/16"]),
    "expires_at": datetime(2198, 1, 1, tzinfo=UTC),
    "limits": {LimitName.REQUESTS_PER_MINUTE: 60, LimitName.BUDGET: 5},
}


async def test_new_key_inherits_the_bounds_of_its_creator(
    keys: KeyService, projects: ProjectService
) -> None:
    assert {"project_id", *HELD} == BOUNDS.keys()
    project = await projects.create("acme", name="shop")
    maker = grant(project_id=project.id, **HELD)
    made = (await keys.create("acme", name="x", grantor=maker)).record
    assert made == await keys.get("acme", made.id)
    limits = {LimitName.REQUESTS_PER_MINUTE: 60, LimitName.BUDGET: 7}
    scopes = DEFAULT_SCOPES
    expected = HELD | {"project_id": project.id, "scopes": scopes, "limits": limits}
    assert {name: getattr(made, name) for name in BOUNDS} == expected
    narrower = (await keys.create("acme", name="x", grantor=maker, **WITHIN)).record
    assert {name: getattr(narrower, name) for name in WITHIN} == WITHIN


@pytest.mark.parametrize("name", HELD)
async def test_credential_cannot_grant_more_rights_than_it_has(keys: KeyService, name: str) -> None:
    holder = grant(**{name: HELD[name]})
    wider = {name: WIDER[name]}
    with pytest.raises(PermissionDeniedError, match=f"'{name}.* must not exceed"):
        await keys.create("acme", name="x", grantor=holder, **wider)
    within = {name: WITHIN[name]}
    own = (await keys.create("acme", name="own", grantor=holder, **within)).record
    with pytest.raises(PermissionDeniedError, match=f"'{name}.* must not exceed"):
        await keys.update("acme", own.id, grantor=holder, **wider)
    assert (await keys.page("acme", PageRequest())).entries == [own]
    strong = (await keys.create("acme", name="strong", **wider)).record
    for attempt in (
        keys.update("acme", strong.id, name="mine", grantor=holder),
        keys.update("acme", strong.id, grantor=holder, **within),
        keys.rotate("acme", strong.id, grantor=holder),
        keys.revoke("acme", strong.id, grantor=holder),
    ):
        with pytest.raises(PermissionDeniedError, match=f'cannot manage the key "{strong.id}"'):
            await attempt
    assert (await keys.page("acme", PageRequest())).entries == [own, strong]
    await keys.update("acme", own.id, name="other", grantor=holder)
    await keys.rotate("acme", own.id, grantor=holder)
    await keys.revoke("acme", own.id, grantor=holder)


async def test_credential_of_a_project_manages_only_its_keys(
    keys: KeyService, projects: ProjectService
) -> None:
    mine, others = [await projects.create("acme", name=name) for name in ("mine", "others")]
    holder = grant(project_id=mine.id)
    inside = (await keys.create("acme", name="in", project_id=mine.id)).record
    for project_id in (None, others.id):
        with pytest.raises(PermissionDeniedError) as caught:
            await keys.create("acme", name="x", project_id=project_id, grantor=holder)
        assert caught.value.param == "project_id"
        outside = (await keys.create("acme", name="out", project_id=project_id)).record
        for attempt in (
            keys.get("acme", outside.id, grantor=holder),
            keys.get("acme", outside.prefix, grantor=holder),
            keys.update("acme", outside.id, name="mine", grantor=holder),
            keys.rotate("acme", outside.id, grantor=holder),
            keys.revoke("acme", outside.id, grantor=holder),
        ):
            with pytest.raises(NotFoundError, match="has no key"):
                await attempt
        with pytest.raises(InvalidParameterError, match="'after'"):
            await keys.page("acme", PageRequest(after=outside.id), grantor=holder)
        assert await keys.get("acme", outside.id) == outside
    assert (await keys.page("acme", PageRequest(), grantor=holder)).entries == [inside]
    assert await keys.get("acme", inside.id, grantor=holder) == inside
    await keys.rotate("acme", inside.id, grantor=holder)


async def test_key_cannot_change_its_own_bounds(keys: KeyService, key: CreatedKey) -> None:
    itself = replace(grant(), credential_id=key.record.id)
    for name, value in WITHIN.items():
        with pytest.raises(
            PermissionDeniedError, match=f"cannot change its own '{name}'"
        ) as caught:
            await keys.update("acme", key.record.id, grantor=itself, **{name: value})
        assert caught.value.param == name
    await keys.update("acme", key.record.id, name="renamed", grantor=itself)
    await keys.rotate("acme", key.record.id, grantor=itself)
    await keys.revoke("acme", key.record.id, grantor=itself)


@every_database
async def test_keys_are_revoked_with_the_key_that_made_them(keys: KeyService) -> None:
    async def made(maker: CreatedKey, *, in_grace: bool = False) -> CreatedKey:
        id_ = maker.record.id
        grantor = replace(grant(), credential_id=id_, is_former_secret=in_grace)
        return await keys.create("acme", name="made", grantor=grantor, actor=f"key:{id_}")

    async def revoked(which: MadeKeys) -> set[str]:
        key, *others = await keys.revoke("acme", maker.record.id, made_keys=which)
        assert key.id == maker.record.id
        assert all(each.revoked_at for each in others)
        return {each.id for each in others}

    maker = await keys.create("acme", name="web")
    child = await made(maker)
    grandchild, unrelated = await made(child), await keys.create("acme", name="unrelated")
    await keys.rotate("acme", maker.record.id)
    stolen = await made(maker, in_grace=True)
    loot = await made(stolen)
    assert await revoked(MadeKeys.NONE) == set()
    assert await revoked(MadeKeys.IN_GRACE) == {stolen.record.id, loot.record.id}
    with pytest.raises(AuthenticationError):
        await made(stolen)
    family = {each.record.id for each in (child, grandchild, stolen, loot)}
    assert (await keys.get("acme", child.record.id)).revoked_at is None
    assert await revoked(MadeKeys.ALL) == family
    ended = {key.id for key in (await keys.page("acme", PageRequest())).entries if key.revoked_at}
    assert ended == {*family, maker.record.id}

    # A former secret gets no secret that outlives it, not even of its own key.
    thief = replace(grant(), credential_id=unrelated.record.id, is_former_secret=True)
    for victim in (unrelated, await keys.create("acme", name="victim")):
        with pytest.raises(PermissionDeniedError, match="former secret cannot rotate"):
            await keys.rotate("acme", victim.record.id, grantor=thief)

    # A rotation ends the former secret, and what it made.
    await keys.rotate("acme", unrelated.record.id)
    stolen = await made(unrelated, in_grace=True)
    await keys.rotate("acme", unrelated.record.id)
    assert (await keys.get("acme", stolen.record.id)).revoked_at is not None
    assert (await keys.get("acme", unrelated.record.id)).revoked_at is None

    # The current secret was stolen, before a rotation that no longer has an old one.
    stolen = await made(unrelated)
    loot = await made(stolen)
    await keys.rotate("acme", unrelated.record.id, grace=timedelta(0))
    assert (await keys.get("acme", stolen.record.id)).revoked_at is None
    await keys.rotate("acme", unrelated.record.id, made_keys=MadeKeys.ALL)
    for each in (stolen, loot):
        assert (await keys.get("acme", each.record.id)).revoked_at is not None
    assert (await keys.get("acme", unrelated.record.id)).revoked_at is None


async def test_error_about_a_key_does_not_repeat_it(keys: KeyService, key: CreatedKey) -> None:
    whole = key.key.reveal()
    for name in (whole, whole[:-1], f"{whole}x", whole[3:], f"{whole}\x00", whole[1:]):
        with pytest.raises(NotFoundError) as caught:
            await keys.get("other", name)
        assert whole[16:40] not in caught.value.message


@every_database
async def test_invalid_key_name_is_not_found(keys: KeyService) -> None:
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
    assert first.entries + second.entries == (await keys.page("acme", PageRequest())).entries
