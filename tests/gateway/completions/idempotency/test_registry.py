"""The registry of Idempotency-Keys on every kind of Redis."""

import asyncio
import hashlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from common.tasks import TaskSet
from contract import keys
from gateway.completions.admission import idempotency
from gateway.completions.admission.idempotency import EarlierResponses
from gateway.completions.idempotency.registry import (
    RETIRED_MS,
    IdempotencyRegistry,
    IdempotentRequest,
    KeyedRequest,
)
from gateway.platform.redis_client import MeasuredConnection
from gateway.records.errors import StoreUnavailableError, queue_unavailable
from tests.support.kinds import every_redis
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer

RETENTION = timedelta(hours=24)
ASKED = IdempotentRequest("acme", None, "order-17", "digest-1")


@pytest.fixture
def registry(any_redis: "Redis") -> IdempotencyRegistry:
    """A registry of one gateway."""
    return IdempotencyRegistry(any_redis, gateway="gw-1", retention=RETENTION)


async def test_key_belongs_to_the_first_request(registry: IdempotencyRegistry) -> None:
    assert await registry.claim(ASKED, "cmpl-1") == KeyedRequest("cmpl-1", "digest-1", 0, "gw-1")
    other = ASKED._replace(body_digest="digest-2")
    claim = await registry.claim(other, "cmpl-2")
    assert (claim.request_id, claim.body_digest) == ("cmpl-1", "digest-1")
    assert claim.age_ms >= 0
    # A client that missed the reply and retries still has it.
    assert (await registry.claim(ASKED, "cmpl-1")).request_id == "cmpl-1"


async def test_one_of_concurrent_claims_succeeds(registry: IdempotencyRegistry) -> None:
    claims = await asyncio.gather(*(registry.claim(ASKED, f"cmpl-{i}") for i in range(20)))
    assert len({claim.request_id for claim in claims}) == 1


async def test_keys_of_tenants_and_projects_are_separate(registry: IdempotencyRegistry) -> None:
    await registry.claim(ASKED, "cmpl-1")
    for number, other in enumerate(
        (
            ASKED._replace(tenant_id="other"),
            ASKED._replace(key="order-18"),
            ASKED._replace(project_id="prj_1"),
            ASKED._replace(project_id="prj_2"),
        ),
        start=2,
    ):
        assert (await registry.claim(other, f"cmpl-{number}")).request_id == f"cmpl-{number}"


@every_redis
async def test_released_key_is_free(registry: IdempotencyRegistry) -> None:
    await registry.claim(ASKED, "cmpl-1")
    await registry.release(ASKED, "cmpl-1")
    assert (await registry.claim(ASKED, "cmpl-2")).request_id == "cmpl-2"


@every_redis
async def test_retired_key_stays_taken_for_a_minute(
    registry: IdempotencyRegistry, any_redis: "Redis"
) -> None:
    await registry.claim(ASKED, "cmpl-1")
    await registry.retire(ASKED, "cmpl-1")
    claim = await registry.claim(ASKED, "cmpl-2")
    assert (claim.request_id, claim.gateway) == ("cmpl-1", "")
    (entry,) = await any_redis.keys("*")
    assert 0 < await any_redis.pttl(entry) <= RETIRED_MS


async def test_key_is_released_by_its_own_request_only(registry: IdempotencyRegistry) -> None:
    await registry.claim(ASKED, "cmpl-1")
    await registry.release(ASKED, "cmpl-2")
    await registry.release(ASKED._replace(key="never claimed"), "cmpl-2")
    assert (await registry.claim(ASKED, "cmpl-3")).request_id == "cmpl-1"


@every_redis
async def test_unusable_request_is_replaced_once(registry: IdempotencyRegistry) -> None:
    await registry.claim(ASKED, "cmpl-1")
    claims = await asyncio.gather(
        *(registry.claim(ASKED, f"cmpl-{i}", in_place_of="cmpl-1") for i in range(2, 12))
    )
    assert len({claim.request_id for claim in claims}) == 1
    assert claims[0].request_id != "cmpl-1"


@pytest.mark.parametrize("least", [timedelta(0), timedelta(days=7)], ids=["request", "line"])
async def test_entry_expires_and_holds_no_key(
    registry: IdempotencyRegistry, any_redis: "Redis", least: timedelta
) -> None:
    await registry.claim(ASKED._replace(least_ms=int(least.total_seconds() * 1000)), "cmpl-1")
    entry = keys.idempotency(
        keys.bucket_of("acme"), "acme", hashlib.sha256(b"order-17").hexdigest()
    )
    assert await any_redis.keys("*") == [entry.encode()]
    most = (RETENTION + least).total_seconds()
    assert most - 60 < await any_redis.ttl(entry) <= most
    assert "order-17" not in repr(await any_redis.hgetall(entry))


async def test_claim_returns_its_age(registry: IdempotencyRegistry) -> None:
    await registry.claim(ASKED, "cmpl-1")
    await asyncio.sleep(0.05)
    assert (await registry.claim(ASKED, "cmpl-2")).age_ms >= 40


async def test_claim_that_redis_executes_after_its_timeout_frees_the_key(
    any_redis: "Redis", any_redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "RELEASE_SECONDS", 0.05)
    executor = MeasuredConnection(any_redis, timeout_seconds=0.2)
    registry = IdempotencyRegistry(executor, gateway="gw-1", retention=RETENTION)
    tasks = TaskSet()
    call: Any = None
    settlements: Any = SimpleNamespace(tasks=tasks)
    earlier = EarlierResponses(registry, call, call, settlements)
    await registry.claim(ASKED._replace(key="order-16"), "cmpl-0")  # Redis knows the script now.
    any_redis_server.freeze()
    try:
        with pytest.raises(StoreUnavailableError):
            await earlier.find(call, ASKED, "cmpl-1")
    finally:
        any_redis_server.thaw()

    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await any_redis.ping()
        await tasks.finish(PATIENCE_SECONDS)
    assert await earlier.find(call, ASKED, "cmpl-2") is None, "the key stands for the next request"
    await executor.aclose()


async def test_key_of_a_response_that_a_new_redis_may_lack_is_not_free(
    registry: IdempotencyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "ADMISSION_SECONDS", -1.0)
    is_intact = False

    async def find(*_: object, **__: object) -> None:
        """Nothing is stored."""

    async def require_intact() -> None:
        if not is_intact:
            raise queue_unavailable()

    any_other: Any = None

    async def is_deleted(_: str) -> bool:
        return False

    store = SimpleNamespace(is_deleted=is_deleted)
    responses: Any = SimpleNamespace(find=find, require_intact=require_intact, store=store)
    earlier = EarlierResponses(registry, responses, any_other, any_other)
    await registry.claim(ASKED, "cmpl-1")
    with pytest.raises(StoreUnavailableError):
        await earlier.find(any_other, ASKED, "cmpl-2")
    assert (await registry.claim(ASKED, "cmpl-3")).request_id == "cmpl-1"
    is_intact = True
    assert await earlier.find(any_other, ASKED, "cmpl-4") is None
