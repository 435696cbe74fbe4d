"""A tenant cannot fill the database with keys, projects and members."""

import asyncio
from types import MappingProxyType

import pytest
from redis.asyncio import Redis

from gateway.accounts import changes as capacity
from gateway.accounts.keys.service import KeyService
from gateway.accounts.members import MemberService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.tenants.service import TenantService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import ApiKeyRow, MemberRow, ProjectRow
from gateway.records.errors import ConflictError
from gateway.records.scopes import Role
from tests.support.kinds import every_database


@every_database
@pytest.mark.parametrize("kind", ["keys", "projects", "members"])
async def test_numbers_of_a_tenants_resources_are_bounded(
    database: Database,
    redis: "Redis",
    tenants: TenantService,
    keys: KeyService,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    few = MappingProxyType({ApiKeyRow: 3, MemberRow: 3, ProjectRow: 3})
    monkeypatch.setattr(capacity, "MOST_OF_TENANT", few)
    announcer = ChangeAnnouncer(redis)
    await tenants.create("Acme", tenant_id="acme")
    await tenants.create("Other", tenant_id="other")

    async def add(tenant: str, number: int) -> None:
        if kind == "keys":
            await keys.create(tenant, name="x")
        elif kind == "projects":
            await ProjectService(database, announcer).create(tenant, name="x")
        else:
            members = MemberService(database, announcer)
            await members.add(tenant, subject=f"s{number}", role=Role.OWNER)

    results = await asyncio.gather(*(add("acme", n) for n in range(6)), return_exceptions=True)
    refused = [result for result in results if result is not None]
    assert len(refused) == 3
    for error in refused:
        assert isinstance(error, ConflictError)
        assert error.message == f'The tenant "acme" already has 3 {kind}, the maximum.'
    await add("other", 0)
