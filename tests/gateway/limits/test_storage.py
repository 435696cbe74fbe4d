"""Stored bytes of a tenant are counted by request, limited, and expire."""

import itertools
from unittest.mock import AsyncMock

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from contract import keys
from gateway.limits import storage as storage_module
from gateway.limits.storage import Holder, Storage
from gateway.records.errors import RateLimitError, StoreUnavailableError
from gateway.records.limits import Limits, LimitScope, SubjectLimits
from tests.gateway.limits.building import (
    BUCKET,
    TENANT,
    TestClock,
    key_of,
    project_of,
    tenant_of,
    with_test_clock,
)
from tests.support.kinds import every_redis

MOST = 100
SUBJECTS = (key_of(), project_of(), tenant_of())
NEIGHBOUR = next(name for name in map(str, itertools.count()) if keys.bucket_of(name) == BUCKET)
"""Another tenant with the same clock."""


@pytest.fixture
async def clock(any_redis: "Redis", monkeypatch: pytest.MonkeyPatch) -> TestClock:
    """The time of the script."""
    monkeypatch.setattr(storage_module, "_KEEP", with_test_clock(storage_module._KEEP))
    clock = TestClock(any_redis)
    await clock.set(clock.now_ms)
    return clock


@pytest.fixture
def storage(any_redis: "Redis", clock: TestClock) -> Storage:
    """Stored bytes of tenants."""
    del clock
    return Storage(any_redis, most_of_tenant=MOST)


async def take(
    storage: Storage,
    request_id: str,
    size: int,
    *subjects: SubjectLimits,
    live_ms: int = 60_000,
) -> None:
    await storage.take(Holder(TENANT, subjects or SUBJECTS, request_id), size, live_ms=live_ms)


async def used(storage: Storage, *subjects: SubjectLimits) -> list[int]:
    return await storage.used(TENANT, subjects or SUBJECTS)


@every_redis
async def test_requests_above_the_limit_are_refused_until_others_expire(
    storage: Storage, clock: TestClock, any_redis: "Redis"
) -> None:
    await take(storage, "r1", 60, live_ms=10_000)
    await take(storage, "r2", 39)
    with pytest.raises(RateLimitError, match=": 1 remain, and the request needs 2") as caught:
        await take(storage, "r3", 2)
    assert caught.value.body()["error"] | {"message": ""} == {
        "message": "",
        "type": "rate_limit_error",
        "code": "stored_bytes",
        "param": None,
        "limit": "stored_bytes",
        "scope": "tenant",
        "limit_value": MOST,
        "used": 99,
        "reset_seconds": None,
    }
    neighbour = SubjectLimits(LimitScope.TENANT, NEIGHBOUR, Limits())
    await storage.take(Holder(NEIGHBOUR, [neighbour], "r4"), MOST, live_ms=60_000)
    await clock.advance(10_000)
    await take(storage, "r3", 61)
    assert await used(storage) == [0, 0, 100]
    subject = tenant_of().subject
    ends, sizes = keys.stored_ends(BUCKET, subject), keys.stored_bytes(BUCKET, subject)
    assert await any_redis.hgetall(sizes) == {b"": b"100", b"r2": b"39", b"r3": b"61"}
    await clock.advance(60_000)
    assert await used(storage) == [0, 0, 0]
    assert not await any_redis.exists(ends, sizes)


async def test_a_tenant_may_take_a_quarter_of_a_small_redis(redis: "Redis") -> None:
    storage = Storage(redis, most_of_tenant=1_000_000_000)
    await redis.config_set("maxmemory", 400_000_000)
    try:
        await take(storage, "r1", 100_000_000)
        with pytest.raises(RateLimitError, match="limit of 100000000"):
            await take(storage, "r2", 1)
    finally:
        await redis.config_set("maxmemory", 0)


@every_redis
async def test_limits_of_key_project_and_tenant_all_apply(storage: Storage) -> None:
    limited = (key_of(stored_bytes=20), project_of(stored_bytes=50), tenant_of(stored_bytes=80))
    others = (key_of(), *limited[1:])
    await take(storage, "r1", 20, *limited)
    for subjects, scope, more in ((limited, "key", 1), (others, "project", 31)):
        with pytest.raises(RateLimitError) as caught:
            await take(storage, "r2", more, *subjects)
        assert caught.value.body()["error"]["scope"] == scope
        assert await used(storage, *limited) == [20, 20, 20]
    await take(storage, "r2", 30, *others)
    await storage.settle(Holder(TENANT, limited, "r1"), 0, live_ms=0)
    assert await used(storage, *limited) == [0, 30, 30]


async def test_actual_size_counts_whatever_the_limit(storage: Storage) -> None:
    await take(storage, "r1", 60)
    # Taken twice, it counts once.
    await take(storage, "r1", 60)
    await storage.settle(Holder(TENANT, SUBJECTS, "r1"), 170, live_ms=60_000)
    assert await used(storage) == [0, 0, 170]
    with pytest.raises(RateLimitError):
        await take(storage, "r2", 1)
    for _ in range(2):
        await storage.settle(Holder(TENANT, SUBJECTS, "r1"), 0, live_ms=0)
    assert await used(storage) == [0, 0, 0]


async def test_a_request_larger_than_the_limit_never_fits(storage: Storage) -> None:
    with pytest.raises(RateLimitError, match="exceeds the limit") as caught:
        await take(storage, "r1", MOST + 1)
    assert caught.value.headers()["x-should-retry"] == "false"


async def test_redis_outage_refuses_and_loses_nothing() -> None:
    away = Storage(Redis.from_url("redis://127.0.0.1:1"), most_of_tenant=MOST)
    with pytest.raises(StoreUnavailableError):
        await take(away, "r1", 1)
    await away.settle(Holder(TENANT, SUBJECTS, "r1"), 0, live_ms=0)


async def test_a_server_without_these_bytes_may_be_away(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        storage_module, "ask_every_server", AsyncMock(side_effect=RedisConnectionError)
    )
    await take(storage, "r1", 1)
    assert await used(storage) == [0, 0, 1]
