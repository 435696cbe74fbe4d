"""Stores whose scripts run by a clock that the test sets."""

import pytest
from redis.asyncio import Redis

from gateway.limits import storage as storage_module
from gateway.limits import store as store_module
from gateway.limits.store import QuotaStore
from tests.gateway.limits.building import SCRIPTS, TestClock, with_test_clock


@pytest.fixture
async def clock(any_redis: "Redis", monkeypatch: pytest.MonkeyPatch) -> TestClock:
    """The scripts' time, which stands at noon."""
    for name in SCRIPTS:
        monkeypatch.setattr(store_module, name, with_test_clock(getattr(store_module, name)))
    monkeypatch.setattr(storage_module, "_KEEP", with_test_clock(storage_module._KEEP))
    clock = TestClock(any_redis)
    await clock.set(clock.now_ms)
    return clock


@pytest.fixture
def store(any_redis: "Redis") -> QuotaStore:
    """An empty store."""
    return QuotaStore(any_redis)
