"""Usage that is not in the ledger yet, and open reservations."""

from typing import Any, Final, NamedTuple

from redis.asyncio import Redis

from contract import keys

OVERDUE_MS: Final = 60_000
"""Renewals and sweeps come every few seconds; a lease that ran out this long ago is a fault."""
_COMMANDS = 4
"""For each bucket."""


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
    pipeline = redis.pipeline(transaction=False)
    for bucket in range(keys.BUCKETS):
        usage, reservations = keys.usage(bucket), keys.open_requests(bucket)
        pipeline.execute_command("XRANGE", usage, "-", "+", "COUNT", 1)
        pipeline.execute_command("XLEN", usage)
        pipeline.execute_command("ZCARD", reservations)
        pipeline.execute_command("ZCOUNT", reservations, "-inf", now_ms - OVERDUE_MS)
    replies: list[Any] = await pipeline.execute()
    oldest, records, opened, overdue = (replies[i::_COMMANDS] for i in range(_COMMANDS))
    times_ms = [int(page[0][0].partition(b"-")[0]) for page in oldest if page]
    lag_seconds = max(now_ms - min(times_ms), 0) / 1000 if times_ms else 0.0
    return Pending(lag_seconds, sum(records), sum(opened), sum(overdue))
