"""Creating, listing and revoking keys."""

import hashlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import text, update
from sqlalchemy.exc import IntegrityError

from contract.dialect import Dialect
from contract.keys import KEY_EVENTS
from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import PageRequest
from gateway.platform.database.tables import ApiKeyRow
from gateway.records.errors import InvalidParameterError, NotFoundError
from gateway.records.scopes import DEFAULT_SCOPES, Scope
from tests.support.cases import case
from tests.support.kinds import every_database


@pytest.fixture(autouse=True)
async def _two_tenants(tenants: TenantService) -> None:
    await tenants.create("Acme", tenant_id="acme")
    await tenants.create("Other", tenant_id="other")


@every_database
async def test_created_key_has_all_its_options(keys: KeyService) -> None:
    expires_at = datetime(2199, 12, 31, 23, 59, 59, 123000, tzinfo=UTC)
    created = await keys.create(
        "acme",
        name="web",
        scopes={Scope.ADMIN, Scope.COMPLETIONS},
        allowed_models=["a", "b"],
        expires_at=expires_at,
        dialect=Dialect.FIREWORKS_2026,
    )
    assert (await keys.page("acme", PageRequest())).entries == [created.record]
    assert created.record.expires_at == expires_at
    assert created.record.allowed_models == frozenset({"a", "b"})
    assert created.record.scopes == {Scope.ADMIN, Scope.COMPLETIONS}
    assert created.record.dialect is Dialect.FIREWORKS_2026


async def test_default_key_has_completions_all_models_and_no_expiry(keys: KeyService) -> None:
    record = (await keys.create("acme", name="web")).record
    assert record.scopes == DEFAULT_SCOPES == {Scope.COMPLETIONS}
    assert record.allowed_models is None
    assert record.expires_at is None
    assert record.revoked_at is None
    assert record.dialect is None


async def test_database_holds_the_hash_and_not_the_key(
    keys: KeyService, database: Database
) -> None:
    created = await keys.create("acme", name="web")
    async with database.reading() as transaction:
        row = (await transaction.execute(text("SELECT * FROM api_keys"))).one()
    whole = created.key.reveal()
    assert row.digest == hashlib.sha256(whole.encode()).digest()
    assert row.prefix == whole[3:15]
    secret = whole[16:]
    assert not any(secret[-4:] in str(value) for value in row)


async def test_tenants_do_not_see_each_others_keys(keys: KeyService) -> None:
    key = await keys.create("acme", name="web")
    assert (await keys.page("other", PageRequest())).entries == []
    for name in (key.record.id, key.record.prefix):
        with pytest.raises(NotFoundError):
            await keys.revoke("other", name)
    assert [each.revoked_at for each in (await keys.page("acme", PageRequest())).entries] == [None]


@pytest.mark.parametrize("by", ["id", "prefix"])
async def test_revocation_is_saved_once_and_announced_each_time(
    keys: KeyService, redis: Redis, by: str
) -> None:
    key = (await keys.create("acme", name="web")).record
    await keys.revoke("acme", getattr(key, by))
    [revoked] = (await keys.page("acme", PageRequest())).entries
    assert revoked.revoked_at is not None
    await keys.revoke("acme", getattr(key, by))
    assert (await keys.page("acme", PageRequest())).entries == [revoked]
    entries: Any = await redis.xrange(KEY_EVENTS)
    events = [fields for _, fields in entries]
    assert events == [{b"key": key.id.encode()}] * 2


@pytest.mark.parametrize("by", ["id", "prefix"])
async def test_dialect_is_changed_and_announced(keys: KeyService, redis: Redis, by: str) -> None:
    key = (await keys.create("acme", name="web")).record
    other = (await keys.create("acme", name="other")).record
    changed = await keys.update("acme", getattr(key, by), dialect=Dialect.VLLM)
    assert changed == replace(key, dialect=Dialect.VLLM)
    assert {each.id: each.dialect for each in (await keys.page("acme", PageRequest())).entries} == {
        key.id: Dialect.VLLM,
        other.id: None,
    }
    assert (await keys.update("acme", key.id, dialect=None)).dialect is None
    assert (await keys.page("acme", PageRequest())).entries == [key, other]
    entries: Any = await redis.xrange(KEY_EVENTS)
    assert [fields for _, fields in entries] == [{b"key": key.id.encode()}] * 2


async def test_empty_change_and_change_of_anothers_key_are_refused(
    keys: KeyService, redis: Redis
) -> None:
    key = (await keys.create("acme", name="web")).record
    with pytest.raises(InvalidParameterError, match="Nothing to change"):
        await keys.update("acme", key.id)
    with pytest.raises(NotFoundError, match="has no key"):
        await keys.update("other", key.id, dialect=Dialect.VLLM)
    assert await redis.exists(KEY_EVENTS) == 0


async def test_unknown_tenant_is_not_found(keys: KeyService) -> None:
    with pytest.raises(NotFoundError, match='no tenant "nobody"'):
        await keys.create("nobody", name="web")
    with pytest.raises(NotFoundError, match='no tenant "nobody"'):
        await keys.page("nobody", PageRequest())


async def test_invalid_keys_are_refused(keys: KeyService) -> None:
    for given, message in [
        ({"name": ""}, "1 to 200 characters"),
        ({"name": "web", "scopes": []}, "at least one scope"),
        ({"name": "web", "allowed_models": []}, "1 to 1000 models. Given: 0"),
        ({"name": "web", "allowed_models": ["a", ""]}, "1 to 200 characters"),
        ({"name": "web", "allowed_models": ["a\x00"]}, "control characters"),
        ({"name": "web", "expires_at": datetime(2020, 1, 1, tzinfo=UTC)}, "in the future"),
        (
            {
                "name": "web",
                "expires_at": datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))),
            },
            "in the future",
        ),
        ({"name": "a\x1b[31m"}, "control characters"),
        ({"name": "admin\u202enimda"}, "control characters"),
        ({"name": "ad\u200bmin"}, "control characters"),
        ({"name": "web", "allowed_models": ["a\u2066"]}, "control characters"),
    ]:
        with case((given, message)):
            with pytest.raises(InvalidParameterError, match=message):
                # Each case has its own types.
                await keys.create("acme", **given)  # type: ignore[arg-type]
            assert (await keys.page("acme", PageRequest())).entries == []


async def test_time_without_zone_is_refused(keys: KeyService, database: Database) -> None:
    key = (await keys.create("acme", name="web")).record
    naive = (datetime.now(UTC) + timedelta(days=1)).replace(tzinfo=None)
    with pytest.raises(InvalidParameterError, match="with a time zone"):
        await keys.update("acme", key.id, expires_at=naive)
    with pytest.raises(Exception, match="must have a time zone"):
        async with database.writing() as transaction:
            await transaction.execute(update(ApiKeyRow).values(revoked_at=naive))


@every_database
async def test_tenant_with_keys_cannot_be_deleted(keys: KeyService, database: Database) -> None:
    await keys.create("acme", name="web")
    with pytest.raises(IntegrityError):
        async with database.writing() as transaction:
            await transaction.execute(text("DELETE FROM tenants WHERE id = 'acme'"))
