"""Fixtures that every folder of tests uses."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from tests.support.redis_server import RedisServer, running_redis


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis 6.2 for tests that do not care about its version; empty at the start of each test."""
    with running_redis() as server:
        yield server


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator["Redis"]:
    """A client of an empty server."""
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    yield client
    await client.aclose()
