"""Usage that is not in the ledger yet, and open reservations."""

from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from redis.asyncio import Redis

from contract import keys
from gateway.billing.ledger.drain import read_usage
from gateway.platform.redis_client import any_exists

OVERDUE_MS: Final = 60_000
"""Renewals and sweeps come every few seconds; a lease that ran out this long ago is a fault."""


class Pending(NamedTuple):
    """Sums over all buckets."""

    lag_seconds: float
    """Age of the oldest record that is not in the ledger; 0 without one."""
    records: float
    reservations: float
    overdue_reservations: float
    """Those that no gateway has renewed."""


async def pending_usage(redis: "Redis") -> Pending:
    """Return what waits for the ledger and the sweep. Raises RedisError."""
    seconds, micros = await redis.time()
    now_ms = seconds * 1000 + micros // 1000
    oldest, failed = await read_usage(redis, range(keys.BUCKETS), most=1)
    for error in failed.values():
        raise error
    reservations = [keys.open_requests(bucket) for bucket in range(keys.BUCKETS)]
    if not await any_exists(redis, reservations):
        reservations = []
    pipeline = redis.pipeline(transaction=False)
    for bucket in oldest:
        pipeline.execute_command("XLEN", keys.usage(bucket))
    for each in reservations:
        pipeline.execute_command("ZCARD", each)
    for each in reservations:
        pipeline.execute_command("ZCOUNT", each, "-inf", now_ms - OVERDUE_MS)
    replies: Iterator[int] = iter(await pipeline.execute())
    records, opened = sum(islice(replies, len(oldest))), sum(islice(replies, len(reservations)))
    times_ms = [int(page[0][0].partition(b"-")[0]) for page in oldest.values()]
    lag_seconds = max(now_ms - min(times_ms), 0) / 1000 if times_ms else 0.0
    return Pending(lag_seconds, records, opened, sum(replies))
