"""An empty store."""

import pytest
from redis.asyncio import Redis

from gateway.limits.store import QuotaStore


@pytest.fixture
def store(any_redis: "Redis") -> QuotaStore:
    """An empty store."""
    return QuotaStore(any_redis)
