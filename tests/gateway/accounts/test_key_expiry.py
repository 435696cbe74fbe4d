"""Expired keys are in the audit log, each expiry once."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import update

from gateway.accounts.audit.log import AuditEntryBody, AuditLog, AuditService
from gateway.accounts.keys import service as key_expiry
from gateway.accounts.keys.service import KeyService, audit_expired_keys
from gateway.accounts.tenants.service import TenantService
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import ApiKeyRow
from gateway.records.times import utc_now
from tests.support.kinds import every_database

HOUR = timedelta(hours=1)


@pytest.fixture
async def key_ids(tenants: TenantService, keys: KeyService) -> list[str]:
    """Keys that expire in an hour, and one that never does."""
    await tenants.create("Acme", tenant_id="acme")
    soon = utc_now() + HOUR
    created = [await keys.create("acme", name=str(n), expires_at=soon) for n in range(5)]
    await keys.create("acme", name="for ever")
    return [each.record.id for each in created]


async def _entries(database: Database) -> list[AuditEntryBody]:
    async with database.reading() as transaction:
        found = await AuditLog(transaction).entries(tenant_id="acme", limit=1000)
    return [entry for entry in found if entry.action == "key.expired"]


@every_database
async def test_each_expired_key_is_audited_once(
    database: Database, key_ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_expiry, "AT_ONCE", 2)
    now = utc_now()
    assert await audit_expired_keys(database, now) == 0
    for key_id in key_ids:
        await _expire(database, key_id, minutes=5)
    await asyncio.gather(*(audit_expired_keys(database, now) for _ in range(3)))
    await audit_expired_keys(database, now)
    assert sorted(entry.subject for entry in await _entries(database)) == sorted(key_ids)


async def test_revoked_key_is_not_audited_and_a_second_expiry_is(
    database: Database, key_ids: list[str], keys: KeyService
) -> None:
    past = utc_now() - HOUR
    await _expire(database, key_ids[0], minutes=60)
    await keys.revoke("acme", key_ids[1])
    async with database.writing() as transaction:
        await transaction.execute(
            update(ApiKeyRow).where(ApiKeyRow.id == key_ids[1]).values(expires_at=past)
        )
    assert await audit_expired_keys(database, utc_now()) == 1
    assert await audit_expired_keys(database, utc_now()) == 0
    await asyncio.sleep(0.05)
    await _expire(database, key_ids[0], minutes=0)
    assert await audit_expired_keys(database, utc_now()) == 1
    entries = await _entries(database)
    assert [(entry.subject, entry.actor) for entry in entries] == [(key_ids[0], "system")] * 2
    assert (await AuditService(database).verify()).broken_at is None


async def _expire(database: Database, key_id: str, *, minutes: int) -> None:
    at = utc_now() - timedelta(minutes=minutes)
    async with database.writing() as transaction:
        await transaction.execute(
            update(ApiKeyRow).where(ApiKeyRow.id == key_id).values(expires_at=at)
        )
