"""Redis servers of each kind, and stores whose scripts run by a clock that the test sets."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from gateway.quota import store as store_module
from gateway.quota.store import QuotaStore
from tests.quota.building import SCRIPTS, TestClock, with_test_clock
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


@pytest.fixture
async def clock(any_redis: "Redis", monkeypatch: pytest.MonkeyPatch) -> TestClock:
    """The scripts' time, which stands at noon."""
    for name in SCRIPTS:
        monkeypatch.setattr(store_module, name, with_test_clock(getattr(store_module, name)))
    clock = TestClock(any_redis)
    await clock.set(clock.now_ms)
    return clock


@pytest.fixture
def store(any_redis: "Redis") -> QuotaStore:
    """An empty store."""
    return QuotaStore(any_redis)
