"""Fixtures of the background jobs' tests: a real Redis, SQLite and PostgreSQL."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from contract import keys
from gateway.records.usage_record import UsageRecord, encode_usage

Append = Callable[..., Awaitable[None]]


@pytest.fixture
def append(redis: Redis) -> Append:
    """Append usage records to their streams, as a settle does."""

    async def add(*records: UsageRecord) -> None:
        pipeline = redis.pipeline(transaction=False)
        for record in records:
            stream = keys.usage(keys.bucket_of(record.tenant_id))
            pipeline.execute_command("XADD", stream, "*", "u", encode_usage(record))
        await pipeline.execute()

    return add


async def undrained(redis: Redis) -> int:
    """Return the number of entries in all streams."""
    return sum([await redis.xlen(keys.usage(bucket)) for bucket in range(keys.BUCKETS)])


async def command(redis: Any, *words: Any) -> Any:
    """Send one command."""
    return await redis.execute_command(*words)
