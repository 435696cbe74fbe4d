"""Counts of rejected requests and of aliases, over gateways and periods."""

import pytest
from redis.asyncio import Redis

from common import clock
from gateway.limits import refusal_log as period_counts
from gateway.limits.refusal_log import Period, PeriodCounts
from gateway.platform.redis_client import MeasuredConnection

HOUR = 3600
NOON = 1_800_014_400


async def test_counts_of_all_gateways_add_up_until_their_period_has_left(
    redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = MeasuredConnection(redis)
    gateways = [PeriodCounts(executor) for _ in range(2)]

    async def at(seconds: int) -> None:
        for gateway in gateways:
            await gateway.flush()
        monkeypatch.setattr(clock, "now_seconds", lambda: seconds)

    await at(NOON)
    for gateway in gateways:
        gateway.refused("acme", "requests")
        gateway.refused("", "invalid_api_key")
        gateway.alias_admitted("chat", "llama")
    await at(NOON + 23 * HOUR)
    gateways[0].refused("acme", "tokens")
    await at(NOON + 23 * HOUR + 1)
    one = gateways[1]
    expected = {("acme", "requests"): 2, ("", "invalid_api_key"): 2, ("acme", "tokens"): 1}
    assert await one.refusals(Period.HOUR) == (expected, True)
    assert await one.refusals(Period.DAY) == (expected, True)
    assert await one.aliases(Period.HOUR) == ({("chat", "llama"): 2}, True)
    of_tenant = {("requests",): 2, ("tokens",): 1}
    assert await one.refusals(Period.HOUR, tenant_id="acme") == (of_tenant, True)
    assert await one.refusals(Period.HOUR, tenant_id="other") == ({}, True)
    await at(NOON + 24 * HOUR)
    assert await one.refusals(Period.HOUR) == ({("acme", "tokens"): 1}, True)
    for key in await redis.keys("console:counts:*"):
        assert 0 < await redis.ttl(key) <= 8 * 24 * HOUR
    # Of each day, only the largest count.
    monkeypatch.setattr(period_counts, "MOST_READ", 1)
    counts, is_complete = await one.refusals(Period.DAY)
    assert (counts.total(), is_complete) == (3, False)
    await executor.aclose()


async def test_pending_counts_are_bounded(redis: "Redis", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(period_counts, "MOST_PENDING", 4)
    executor = MeasuredConnection(redis)
    counts = PeriodCounts(executor)
    for number in range(10):
        counts.refused(f"t{number}", "requests")
    counts.refused("t0", "requests")
    await counts.flush()
    found = await counts.refusals(Period.HOUR)
    assert found.counts == {("t0", "requests"): 2, ("t1", "requests"): 1}
    await executor.aclose()
