"""A Redis of each kind that the scripts must run on."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from tests.support.redis_server import BUNDLED, SYSTEM, RedisServer, running_redis

KINDS = {
    "redis-6.2": (BUNDLED, False),
    "redis-6.2-cluster": (BUNDLED, True),
    "redis-7": (SYSTEM, False),
    "redis-7-cluster": (SYSTEM, True),
}


@pytest.fixture(scope="session", params=KINDS)
def any_redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of every kind in turn. Cluster mode refuses scripts that touch a second slot."""
    executable, cluster = KINDS[request.param]
    if executable is None:
        pytest.skip("redis-server of the system (Debian's redis-server package) is not installed")
    with running_redis(executable, cluster=cluster) as server:
        yield server


@pytest.fixture
async def any_redis(any_redis_server: RedisServer) -> AsyncIterator["Redis"]:
    """A client of an empty server of each kind."""
    client = Redis.from_url(any_redis_server.url)
    await client.flushall()
    yield client
    await client.aclose()
