"""Stored bytes of a tenant are counted by request, limited, and expire."""

import itertools
from contextlib import suppress
from unittest.mock import AsyncMock

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from contract import keys
from gateway.limits import stored_bytes as storage_module
from gateway.limits.counters import AccountNumbers
from gateway.limits.replies import RequestState
from gateway.limits.store import QuotaStore
from gateway.limits.stored_bytes import (
    SMALL_BYTES,
    SMALL_STEP,
    USER_BYTES,
    Holder,
    Storage,
    Use,
    names_of_counted,
)
from gateway.records.errors import RateLimitError, StoreUnavailableError
from gateway.records.limits import (
    LimitName,
    Limits,
    LimitScope,
    SpendScope,
    SubjectLimits,
    Window,
)
from tests.gateway.limits.building import (
    BUCKET,
    NOON,
    TENANT,
    Desk,
    TestClock,
    kept,
    key_of,
    project_of,
    record,
    release_of,
    settlement,
    spend_limit,
    tenant_of,
)
from tests.support.kinds import every_redis

MOST = 100
SUBJECTS = (key_of(), project_of(), tenant_of())
NEIGHBOUR = next(name for name in map(str, itertools.count()) if keys.bucket_of(name) == BUCKET)
"""Another tenant with the same clock."""


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
    await clock.advance(10_000 + 10_000 // 64)
    await take(storage, "r3", 61)
    assert await used(storage) == [0, 0, 100]
    subject = tenant_of().subject
    ends, sizes = keys.stored_ends(BUCKET, subject), keys.stored_bytes(BUCKET, subject)
    assert sorted((await any_redis.hgetall(sizes)).values()) == [b"100", b"39", b"61"]
    await clock.advance(60_000 + 60_000 // 64)
    assert await used(storage) == [0, 0, 0]
    assert not await any_redis.exists(ends, sizes)


async def test_tenants_share_the_memory_of_redis_and_never_take_all_of_it(redis: "Redis") -> None:
    storage = Storage(redis, most_of_tenant=1_000_000_000)
    used = (await redis.info("memory"))["used_memory"]
    most = used + 400_000_000
    await redis.config_set("maxmemory", most)
    taken: list[int] = []
    try:
        for tenant in map(str, range(5)):
            subject, size = SubjectLimits(LimitScope.TENANT, tenant, Limits()), 0
            while True:
                holder = Holder(tenant, [subject], f"{tenant} {size}")
                try:
                    size += await storage.take(holder, 1_000_000, live_ms=60_000)
                except RateLimitError as error:
                    assert "stored bytes" in error.message  # noqa: PT017 - the end of the loop
                    break
            taken.append(size)
        # A tenant may use half of what is left, and then a third of it is taken.
        assert taken[0] == pytest.approx(0.75 * 400_000_000 / 3, rel=0.1)
        assert taken == sorted(taken, reverse=True)
        assert taken[4] > 10_000_000
        assert sum(taken) < 0.75 * most
        running = Holder("new", [SubjectLimits(LimitScope.TENANT, "new", Limits())], "r")
        await storage.take(running, 30_000_000, live_ms=60_000, use=Use.RUNNING)
        # There will be room for it.
        with pytest.raises(RateLimitError) as caught:
            await storage.take(running, 100_000_000, live_ms=60_000)
        assert caught.value.headers()["x-should-retry"] == "true"
    finally:
        await redis.config_set("maxmemory", 0)


async def test_small_responses_count_at_their_end_and_are_refused_near_the_limit(
    any_redis: "Redis", storage: Storage
) -> None:
    subjects = (tenant_of(stored_bytes=16 * SMALL_STEP),)
    desk, own = Desk(QuotaStore(any_redis), subjects), kept(stored_for=names_of_counted(subjects))
    small = SMALL_BYTES // 4
    taken = 0
    with suppress(RateLimitError):
        while taken < 40 * SMALL_STEP:
            request_id = f"r{taken}"
            await desk.admit(request_id, kept=own)
            holder = Holder(TENANT, subjects, request_id)
            await storage.take(holder, small, live_ms=60_000, is_brief=True)
            finished = settlement(record(request_id), kept=own, state=RequestState.FINISHED)
            await desk.store.end(msgspec.structs.replace(finished, stored_bytes=small))
            taken += small
    # It is found late by what is not read, at most.
    assert 16 * SMALL_STEP - small <= taken <= 17 * SMALL_STEP
    assert await used(storage, *subjects) == [taken]
    assert await any_redis.hlen(keys.stored_bytes(BUCKET, subjects[0].subject)) <= 1 + 64
    # What is not stored is bounded by the number of waiting jobs.
    holder = Holder(TENANT, subjects, "plain")
    assert await storage.take(holder, small, live_ms=60_000, use=Use.RUNNING) == 0


@every_redis
async def test_a_full_redis_can_be_read_settled_and_emptied(
    storage: Storage, any_redis: "Redis"
) -> None:
    quotas = QuotaStore(any_redis)
    desk = Desk(quotas, (tenant_of(requests_per_minute=9, concurrent_requests=9),))
    own = kept(stored_for=names_of_counted(desk.subjects))
    for request_id in ("r1", "r2", "r3"):
        await take(storage, request_id, 20)
        await desk.admit(request_id, kept=own)
    await any_redis.config_set("maxmemory", 1)
    try:
        assert await used(storage) == [0, 0, 60]
        (status,) = await quotas.status(TENANT, desk.subjects)
        assert status.used(LimitName.CONCURRENT_REQUESTS) == 3
        assert await quotas.renew(BUCKET, ["r1", "r2", "r3"], owner="g1", lease_ms=60_000) == []
        finished = settlement(record("r1"), kept=own, state=RequestState.FINISHED)
        assert await quotas.end(finished)
        assert await used(storage) == [0, 0, 60]
        await quotas.forget(TENANT, "r1")
        assert await used(storage) == [0, 0, 40]
        forgotten = await quotas.read(TENANT, "r1")
        assert forgotten is not None
        assert forgotten.state is RequestState.DELETED
        assert await quotas.end(release_of("r2"))
        next_term = kept(2, owner="g2")
        assert await quotas.adopt(desk.request("r3"), next_term, lease_ms=60_000) == 20
        await storage.settle(Holder(TENANT, SUBJECTS, "r3"), 30, live_ms=60_000)
        assert await used(storage) == [0, 0, 30]
    finally:
        await any_redis.config_set("maxmemory", 0)
    assert await any_redis.xlen(keys.usage(BUCKET)) == 1


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


async def test_accounts_of_end_users_count_until_they_expire(
    storage: Storage, store: QuotaStore, clock: TestClock, any_redis: "Redis"
) -> None:
    """So that one tenant's users do not fill Redis."""
    limit = spend_limit(scope=SpendScope.USER, window=Window.HOUR, amount_micros=1)
    roomy = Storage(any_redis, most_of_tenant=2 * USER_BYTES)
    users = [limit.subject_at(NOON, user=name) for name in ("ada", "bob", "eve")]
    for user in (users[0], users[1], users[0]):
        await roomy.take_for_user(TENANT, SUBJECTS, user)
        await store.seed(TENANT, user, AccountNumbers(), version=0, stays_ms=60_000)
        size = await any_redis.memory_usage(keys.account(BUCKET, user.subject))
        assert size is not None
        assert USER_BYTES - 256 < size < USER_BYTES
    with pytest.raises(RateLimitError, match="stored bytes"):
        await roomy.take_for_user(TENANT, SUBJECTS, users[2])
    assert await roomy.used(TENANT, SUBJECTS) == [0, 0, 2 * USER_BYTES]
    assert await any_redis.exists(keys.account(BUCKET, users[2].subject)) == 0
    await clock.advance(2 * 3_700_000 + 10**12)
    assert await roomy.used(TENANT, SUBJECTS) == [0, 0, 0]
