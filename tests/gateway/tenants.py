"""Changing tenants of a running deployment, as `sluice tenants set` does."""

from typing_extensions import Unpack

from gateway.accounts.changes import ChangeAnnouncer
from gateway.accounts.database import Database
from gateway.accounts.records import TenantOptions
from gateway.accounts.tenant_service import TenantService
from gateway.redis_client import connect
from tests.support.stack import Stack


async def change_tenant(stack: Stack, tenant: str, **options: Unpack[TenantOptions]) -> None:
    """Change options of a tenant; gateways hear of it a moment later."""
    database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
    try:
        await TenantService(database, ChangeAnnouncer(redis)).update(tenant, **options)
    finally:
        await redis.aclose()
        await database.aclose()
