"""Idempotency-Keys: a key stands for one request, and lives exactly as long as its record."""

import asyncio

import pytest
from redis.asyncio import Redis

from contract import keys
from gateway.limits.replies import RequestState, Withdrawn
from gateway.limits.store import QuotaStore
from tests.gateway.limits.building import (
    BUCKET,
    LEASE_MS,
    TENANT,
    Desk,
    kept,
    key_of,
    record,
    release_of,
    settlement,
    tenant_of,
)
from tests.support.kinds import every_redis

OWN = kept(key="order-17")


@pytest.fixture
def store(any_redis: "Redis") -> QuotaStore:
    """An empty store."""
    return QuotaStore(any_redis)


@pytest.fixture
def desk(store: QuotaStore) -> Desk:
    """Requests of a tenant without limits."""
    return Desk(store, (key_of(), tenant_of()))


async def claim(store: QuotaStore, request_id: str, **others: str) -> str:
    """Claim the key; return the request for which it stands."""
    return (await store.claim(TENANT, request_id, OWN, **others)).request_id


@every_redis
async def test_key_stands_for_the_first_request(store: QuotaStore) -> None:
    claims = await asyncio.gather(*(store.claim(TENANT, f"r{i}", OWN) for i in range(20)))
    assert {each.request_id for each in claims} == {"r0"}
    found = claims[-1]
    assert (found.body_digest, found.state, found.gateway) == ("body", RequestState.CLAIMED, "g1")
    assert 0 <= found.age_ms < 60_000
    # A client that missed the reply and retries still has it.
    assert await claim(store, "r0") == "r0"
    assert (await store.claim(TENANT, "x", kept(key="order-18"))).request_id == "x"


@pytest.mark.parametrize("state", ["claimed", "running"])
async def test_key_of_a_released_request_is_free(desk: Desk, state: str) -> None:
    await claim(desk.store, "r1")
    if state == "running":
        await desk.admit("r1", kept=OWN)
    await desk.store.end(release_of("r1", kept=OWN))
    assert await claim(desk.store, "r2") == "r2"
    # The first one may still be on its way.
    if state == "claimed":
        assert await desk.reserve("r1", kept=OWN) == Withdrawn()
    # Another request does not free it.
    await desk.store.end(release_of("r3", kept=OWN))
    assert await claim(desk.store, "r4") == "r2"


@every_redis
async def test_key_lives_as_long_as_the_record_of_its_request(
    desk: Desk, any_redis: "Redis"
) -> None:
    async def lifetimes() -> list[int]:
        return [await any_redis.pttl(each) for each in (OWN.entry, record_key)]

    record_key = keys.request(BUCKET, "r1")
    await claim(desk.store, "r1")
    for each in await lifetimes():
        assert 0 < each <= OWN.retention_ms
    await desk.admit("r1", kept=OWN)
    assert await lifetimes() == [-1, -1], "it may wait in the queue for days"
    await desk.store.end(settlement(record("r1"), kept=OWN, state=RequestState.PAUSED))
    for each in await lifetimes():
        assert 0 < each <= OWN.retention_ms
    await desk.admit("r1", kept=kept(2, owner="g2"))
    assert await lifetimes() == [-1, -1]
    finished = settlement(record("r1"), kept=kept(2), state=RequestState.FINISHED)
    await desk.store.end(finished)
    await desk.store.forget(TENANT, "r1", most_ms=1_000)
    for each in await lifetimes():
        assert 0 < each <= 1_000
    found = await desk.store.claim(TENANT, "r2", OWN)
    assert (found.request_id, found.state) == ("r1", RequestState.DELETED)


@pytest.mark.parametrize("state", [RequestState.FAILED, RequestState.PAUSED, None])
async def test_unusable_request_is_replaced_once(desk: Desk, state: RequestState | None) -> None:
    await claim(desk.store, "r1")
    if state is not None:
        await desk.admit("r1", kept=OWN)
        assert await claim(desk.store, "x", in_place_of="r1") == "r1", "a running one is not"
        await desk.store.stop(TENANT, "r1", 1, RequestState.CANCELLED)
        assert await claim(desk.store, "x", in_place_of="r1") == "r1", "it still holds amounts"
        await desk.store.end(settlement(record("r1"), kept=OWN, state=state))
    claims = await asyncio.gather(
        *(claim(desk.store, f"r{i}", in_place_of="r1") for i in range(2, 12))
    )
    assert {*claims} == {"r2"}
    # Its gateway was only slow.
    next_term = kept(2) if state is RequestState.PAUSED else OWN
    assert await desk.reserve("r1", kept=next_term) == Withdrawn()


async def test_key_that_redis_has_lost_is_restored_with_its_request(
    desk: Desk, any_redis: "Redis"
) -> None:
    await claim(desk.store, "r1")
    request = desk.request("r1", kept=OWN)
    await desk.store.reserve(request, lease_ms=LEASE_MS)
    await any_redis.flushall()
    await desk.store.reserve(request, lease_ms=LEASE_MS)
    assert await claim(desk.store, "r2") == "r1"


@pytest.mark.parametrize("is_whole", [True, False], ids=["record", "admission"])
async def test_request_that_a_failover_has_lost_is_settled_with_its_key(
    desk: Desk, any_redis: "Redis", *, is_whole: bool
) -> None:
    await claim(desk.store, "r1")
    if is_whole:
        await any_redis.delete(keys.request(BUCKET, "r1"), OWN.entry)
    ended = settlement(record("r1", completion_tokens=7), kept=OWN, state=RequestState.FINISHED)
    await desk.store.end(ended)
    assert await any_redis.xlen(keys.usage(BUCKET)) == 1
    found = await desk.store.claim(TENANT, "r2", OWN)
    assert (found.request_id, found.body_digest) == ("r1", OWN.body_digest)
    assert found.state is RequestState.FINISHED
