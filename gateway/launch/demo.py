"""The demo tenant and its key, which `sluice up` prepares."""

from typing import Final

from gateway.auth.authenticator import Authenticator
from gateway.database.engine import Database
from gateway.errors import ApiError, NotFoundError
from gateway.management.keys.service import KeyService
from gateway.management.tenants.service import TenantService
from gateway.redis_client import connect
from gateway.tenancy.changes import ChangeAnnouncer
from gateway.tenancy.scopes import Scope

TENANT_ID: Final = "demo"


async def prepare_key(database_url: str, redis_url: str, earlier_key: str | None) -> str:
    """Return a key of the demo tenant: the earlier one if it still works, else a new one."""
    database = Database(database_url)
    redis = connect(redis_url, max_connections=1)
    announcer = ChangeAnnouncer(redis)
    try:
        if earlier_key is not None and await _works(database, earlier_key):
            return earlier_key
        await _ensure_tenant(TenantService(database, announcer))
        created = await KeyService(database, announcer).create(TENANT_ID, name="sluice up")
        return created.key.reveal()
    finally:
        await redis.aclose()
        await database.aclose()


async def _works(database: Database, key: str) -> bool:
    authenticator = Authenticator(database, verifier=None, ttl_seconds=0, max_entries=1)
    try:
        principal = await authenticator.authenticate(f"Bearer {key}")
        principal.require_scope(Scope.COMPLETIONS)
    except ApiError:
        return False
    return principal.tenant_id == TENANT_ID and principal.allowed_models is None


async def _ensure_tenant(tenants: TenantService) -> None:
    try:
        await tenants.get(TENANT_ID)
    except NotFoundError:
        await tenants.create("Demo", tenant_id=TENANT_ID)
