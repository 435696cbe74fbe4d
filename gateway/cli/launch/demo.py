"""The demo tenant and its keys, which `sluice up` prepares."""

from typing import Final, NamedTuple

from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.auth.api_key import ApiKey
from gateway.auth.authenticator import Authenticator
from gateway.console.sessions import KeyLogin, make_link
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from gateway.records.errors import ApiError, NotFoundError
from gateway.records.scopes import DEFAULT_SCOPES, Scope

TENANT_ID: Final = "demo"


class DemoKeys(NamedTuple):
    """The keys, or None where there is none."""

    key: str | None
    """Uses the models."""
    admin_key: str | None
    """Manages the tenant and, as an operator, every tenant."""


class ConsoleLinks(NamedTuple):
    """Links that log in once, as paths."""

    customers: str
    operators: str


async def prepare_keys(database_url: str, redis_url: str, earlier: DemoKeys) -> tuple[str, str]:
    """Return the keys of the demo tenant: earlier ones if they still work, else new ones."""
    database = Database(database_url)
    redis = connect(redis_url, max_connections=1)
    announcer = ChangeAnnouncer(redis)
    try:
        await _ensure_tenant(TenantService(database, announcer))
        keys = KeyService(database, announcer)

        async def prepare(key: str | None, name: str, scopes: frozenset[Scope]) -> str:
            if key is not None and await _works(database, key, scopes):
                return key
            return (await keys.create(TENANT_ID, name=name, scopes=scopes)).key.reveal()

        return (
            await prepare(earlier.key, "sluice up", DEFAULT_SCOPES),
            await prepare(earlier.admin_key, "sluice up, for the console", frozenset(Scope)),
        )
    finally:
        await redis.aclose()
        await database.aclose()


async def make_console_links(redis_url: str, admin_key: str) -> ConsoleLinks:
    """Return links with which a browser logs in to each console, once. Raises RedisError."""
    key = ApiKey.parse(admin_key)
    login = KeyLogin(key.prefix, key.digest())
    redis = connect(redis_url, max_connections=1)
    try:
        return ConsoleLinks(*[await make_link(redis, login) for _ in ConsoleLinks._fields])
    finally:
        await redis.aclose()


async def _works(database: Database, key: str, scopes: frozenset[Scope]) -> bool:
    authenticator = Authenticator(database, verifier=None, ttl_seconds=0, max_entries=1)
    try:
        principal = await authenticator.authenticate(f"Bearer {key}")
    except ApiError:
        return False
    is_whole = principal.tenant_id == TENANT_ID and principal.allowed_models is None
    return is_whole and scopes <= principal.scopes


async def _ensure_tenant(tenants: TenantService) -> None:
    try:
        await tenants.get(TENANT_ID)
    except NotFoundError:
        await tenants.create("Demo", tenant_id=TENANT_ID)
