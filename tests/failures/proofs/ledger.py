"""Reads the ledger with plain SQL, and the records that are still on their way to it."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis
from sqlalchemy import text

from contract import keys
from gateway.limits.counters import AUDIO_FIELD, FIELD, AccountNumbers
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack

Row = dict[str, Any]

LEASE_AND_SWEEP_SECONDS = PATIENCE_SECONDS
"""Only a failure takes that long: leases and sweeps are far shorter."""


class Books:
    """The ledger and the Redis of a stack."""

    def __init__(self, database: Database, redis: "Redis") -> None:
        self.database = database
        self.redis = redis

    async def rows(self, tenant: str | None = None) -> list[Row]:
        """Return all rows of the ledger, or a tenant's."""
        rows = await self.select("SELECT * FROM usage_ledger ORDER BY created_at")
        return [row for row in rows if tenant in (None, row["tenant_id"])]

    async def select(self, statement: str) -> list[Row]:
        """Return the rows of any query."""
        async with self.database.reading() as transaction:
            result = await transaction.execute(text(statement))
            return [dict(row) for row in result.mappings()]

    async def undrained(self) -> int:
        """Return the number of records that have not reached the ledger."""
        pipeline = self.redis.pipeline(transaction=False)
        for bucket in range(keys.BUCKETS):
            pipeline.execute_command("XLEN", keys.usage(bucket))
        return sum(await pipeline.execute())

    async def open_requests(self) -> list[str]:
        """Return the ids of all open reservations."""
        pipeline = self.redis.pipeline(transaction=False)
        for bucket in range(keys.BUCKETS):
            pipeline.execute_command("ZRANGE", keys.open_requests(bucket), 0, -1)
        return [request_id.decode() for found in await pipeline.execute() for request_id in found]

    async def opened(self, number: int = 1) -> None:
        """Wait until so many requests are admitted and not settled. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(await self.open_requests()) < number:
                await asyncio.sleep(0.01)

    async def open_at_most(self, number: int) -> None:
        """Wait until at most so many requests are not settled. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(await self.open_requests()) > number:
                await asyncio.sleep(0.01)

    async def expire_leases(self) -> None:
        """Expire the leases of all jobs, as happens some time after their worker was killed."""
        leases: Any = await self.redis.zrange(keys.leases(MODEL), 0, -1)
        assert leases
        await self.redis.zadd(keys.leases(MODEL), dict.fromkeys(leases, 1), xx=True)

    async def settled(self, *, seconds: float = LEASE_AND_SWEEP_SECONDS) -> float:
        """Wait until nothing is open and everything is in the ledger; return the seconds it took.

        Raises TimeoutError.
        """
        began = time.monotonic()
        while (still_open := await self.open_requests()) or await self.undrained():
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"open: {still_open}, undrained: {await self.undrained()}")
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    async def leftovers(self) -> list[str]:
        """Return everything in Redis that only an open request may have there."""
        found = [f"open: {request_id}" for request_id in await self.open_requests()]
        for name in await self.keys("{b:*}:request:*"):
            # The record of an ended request holds nothing, and expires.
            holds, lives_ms = await self.redis.hexists(name, "amounts"), await self.redis.pttl(name)
            found += [f"request: {name}"] * bool(holds or lives_ms == -1)
        for name in await self.keys("{b:*}:running:*"):
            found += [f"{name}: {each!r}" for each in await self.redis.zrange(name, 0, -1)]
        for name in await self.keys("{b:*}:subject:*"):
            fields: Any = await self.redis.hmget(name, FIELD, AUDIO_FIELD)
            packed, audio = fields
            account = AccountNumbers() if packed is None else AccountNumbers.decode(packed, audio)
            held = [getattr(account, n) for n in account._fields if n.startswith("reserved")]
            found += [f"{name} holds {held}"] * any(held)
        return found + await self._jobs()

    async def _jobs(self) -> list[str]:
        found = []
        for name in await self.keys(f"{keys.job.prefix(MODEL)}*"):
            has_ended, lives_ms = (
                await self.redis.hexists(name, "ended"),
                await self.redis.pttl(name),
            )
            kind = "receipt" if has_ended and lives_ms > 0 else "job"
            found.append(f"{kind}: {name.removeprefix(keys.job.prefix(MODEL))}")
        for name in (keys.leases(MODEL), keys.active_tenants(MODEL)):
            found += [f"{name}: {each!r}" for each in await self.redis.zrange(name, 0, -1)]
        waiting = int(await self.redis.get(keys.waiting(MODEL)) or 0)
        return found + [f"waiting: {waiting}"] * bool(waiting)

    async def living_gateways(self) -> set[str]:
        """Return the ids of the gateways that are alive."""
        return {name[len("{g:") : -len("}:alive")] for name in await self.keys("{g:*}:alive")}

    async def keys(self, pattern: str) -> list[str]:
        """Return the names of all keys that match a pattern, on every server."""
        every = getattr(self.redis, "servers", None)
        servers = [self.redis] if every is None else await every()
        return [
            name.decode() for each in servers async for name in each.scan_iter(pattern, count=1000)
        ]

    async def nothing_left(
        self, *, seconds: float = PATIENCE_SECONDS, but: Collection[str] = ()
    ) -> None:
        """Wait until Redis holds nothing of any request beyond what it held before.

        Raises AssertionError with the leftovers.
        """
        deadline = time.monotonic() + seconds
        while left := [each for each in await self.leftovers() if each not in but]:
            assert time.monotonic() < deadline, left[:20]
            await asyncio.sleep(0.2)


@asynccontextmanager
async def open_books(stack: Stack) -> AsyncIterator[Books]:
    """Open the ledger and Redis of a stack for the length of a block."""
    database = Database(stack.database_url, statement_timeout_seconds=60)
    # Unlike a plain client, it survives a restart of the server.
    redis = connect(stack.redis.url, max_connections=16)
    try:
        yield Books(database, redis)
    finally:
        await redis.aclose()
        await database.aclose()


def totals(rows: list[Row], *by: str) -> dict[tuple[Any, ...], dict[str, int]]:
    """Return sums of rows, grouped by some of their columns."""
    sums: defaultdict[tuple[Any, ...], defaultdict[str, int]] = defaultdict(
        lambda: defaultdict(int)
    )
    for row in rows:
        group = sums[tuple(row[name] for name in by)]
        group["requests"] += 1
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_micros"):
            group[name] += row[name]
    return {group: dict(values) for group, values in sums.items()}
