"""Changes of tenants in a running deployment, as by `sluice tenants set`."""

import asyncio
from typing import Unpack

from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from gateway.records.records import TenantOptions
from tests.gateway.callers import status_with
from tests.gateway.conftest import eventually
from tests.support.stack import Stack


async def change_tenant(stack: Stack, tenant: str, **options: Unpack[TenantOptions]) -> None:
    """Change options of a tenant; gateways receive the change a moment later."""
    database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
    try:
        await TenantService(database, ChangeAnnouncer(redis)).update(tenant, **options)
    finally:
        await redis.aclose()
        await database.aclose()


async def all_have_received_changes(stack: Stack) -> None:
    """Wait until every gateway has received all changes so far: they arrive in order."""
    await asyncio.to_thread(stack.key, "acme")  # So that the tenant exists.
    database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
    try:
        service = KeyService(database, ChangeAnnouncer(redis))
        created = await service.create("acme", name="last change")
        urls, text = stack.gateways[:2], created.key.reveal()

        async def all_answer(status: int) -> bool:
            answers = [status_with(url, text) for url in urls]
            return set(await asyncio.gather(*answers)) == {status}

        assert await all_answer(200)
        await service.revoke("acme", created.record.id)
        await eventually(lambda: all_answer(401), what="the change taking effect")
    finally:
        await redis.aclose()
        await database.aclose()
