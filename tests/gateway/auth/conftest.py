"""Fixtures of the authentication's tests: a real SQLite file, two tenants, a key."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.accounts.keys.service import CreatedKey, KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.auth.authenticator import Authenticator
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from tests.gateway.auth.gateways import Gateway, have_found_their_place
from tests.support.redis_server import RedisServer


@pytest.fixture
async def database(tmp_path: Path, copy_sqlite: Callable[[Path], str]) -> AsyncIterator[Database]:
    """A database with the current schema."""
    database = Database(copy_sqlite(tmp_path / "sluice.db"))
    yield database
    await database.aclose()


@pytest.fixture
async def tenants(database: Database, redis: Redis) -> TenantService:
    """The rules of tenants; `acme` (weight 2) and `other` exist."""
    tenants = TenantService(database, ChangeAnnouncer(redis))
    await tenants.create("Acme", tenant_id="acme", weight=2.0)
    await tenants.create("Other", tenant_id="other")
    return tenants


@pytest.fixture
def keys(database: Database, redis: Redis, tenants: TenantService) -> KeyService:
    """The rules of keys."""
    return KeyService(database, ChangeAnnouncer(redis))


@pytest.fixture
async def key(keys: KeyService) -> CreatedKey:
    """A key of `acme`."""
    return await keys.create("acme", name="web")


@pytest.fixture
def authenticator(database: Database) -> Authenticator:
    """An authenticator for API keys with an empty cache."""
    return Authenticator(database, verifier=None, ttl_seconds=60, max_entries=100)


@pytest.fixture
async def gateways(
    database: Database, redis_server: RedisServer, redis: Redis
) -> AsyncIterator[list[Gateway]]:
    """Two gateways that listen."""
    gateways = [Gateway(database, redis_server.url) for _ in range(2)]
    for gateway in gateways:
        gateway.listener.start()
    await have_found_their_place(gateways)
    yield gateways
    for gateway in gateways:
        await gateway.aclose()
