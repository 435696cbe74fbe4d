"""Queues whose scripts run by a clock that the test sets."""

import pytest
from redis.asyncio import Redis

from contract import keys
from contract import queue as queue_module
from contract.scripts import LuaScript
from tests.contract.test_queue import MODEL
from tests.gateway.limits.building import TestClock, with_test_clock


@pytest.fixture
async def clock(any_redis: "Redis", monkeypatch: pytest.MonkeyPatch) -> TestClock:
    """The scripts' time, which stands at noon."""
    for name, value in list(vars(queue_module).items()):
        if isinstance(value, LuaScript):
            monkeypatch.setattr(queue_module, name, with_test_clock(value))
    clock = TestClock(any_redis, prefix=keys.leases(MODEL).removesuffix("leases"))
    await clock.set(clock.now_ms)
    return clock
