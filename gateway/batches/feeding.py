"""Task: release lines of batches, so that a few of each tenant wait in the queue.

The queue shares the workers between tenants. Within a tenant, the batch with the earliest deadline
is fed first. How many lines should wait grows by a constant while the queue runs dry, and is halved
when a gateway has to hold lines back; it never exceeds what workers take in some seconds.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Final

from redis.asyncio import Redis
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from common.tasks import each_apart, tolerating_outage
from contract import keys
from contract.tier import Lane
from gateway.batches.store import BatchStore, Feed
from gateway.models.catalogue import Catalogue
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import BatchFeedRow
from gateway.records.times import EPOCH, utc_now

LEAST_WAITING: Final = 64
"""Lines that may wait whatever the rate is."""
MOST_WAITING: Final = 1_024
STEP: Final = 64
"""Lines by which the target grows while the queue runs dry."""
WAIT_SECONDS: Final = 4.0
"""The target is at most what workers take in this time."""
SMOOTHING: Final = 0.3
"""Weight of the newest rate in the mean."""
PAUSE: Final = timedelta(seconds=5)
"""How long nothing is released after a gateway had to hold a line back. Lines that gateways hold
are in no queue, so their number would otherwise grow without bound."""
MEASURED_AFTER: Final = timedelta(seconds=1)
TENANTS_AT_ONCE: Final = 4


class Feeder:
    """Feeds the batches of all tenants. Two runs at once release too much only for a moment."""

    def __init__(
        self, redis: Redis, database: Database, catalogue: Catalogue, announcer: ChangeAnnouncer
    ) -> None:
        self._redis = redis
        self._database = database
        self._catalogue = catalogue
        self._announcer = announcer
        self._missing: set[str] = set()
        """Gateways that lease chunks, but had no heartbeat in Redis in the last run."""

    async def run(self) -> int:
        """Release lines of all running batches; return how many.

        Also ends the leases of dead gateways. A tenant for which that fails delays no other. Raises
        an ApiError or RedisError.
        """
        async with self._database.reading() as transaction:
            store = BatchStore(transaction)
            feeds, lessees = await store.feeds(), sorted(await store.lessees())
        are_freed = await self._end_leases(lessees)
        if feeds:
            with tolerating_outage("refresh the model catalogue"):
                await self._catalogue.refresh()
        released = list[int]()

        async def feed(tenant_id: str) -> None:
            released.append(await self._feed(tenant_id, feeds[tenant_id]))

        try:
            await each_apart(feed, feeds, at_once=TENANTS_AT_ONCE)
        finally:
            if any(released) or are_freed:
                await self._announcer.lines_released()
        return sum(released)

    async def _end_leases(self, lessees: Sequence[str]) -> bool:
        """End the leases of gateways without a heartbeat in two runs; return whether any has.

        After an outage of Redis, gateways first have to connect again. Even if a gateway is alive,
        each line runs once: its Idempotency-Key is the same at every gateway.
        """
        pipeline = self._redis.pipeline(transaction=False)
        for gateway in lessees:
            pipeline.execute_command("EXISTS", keys.gateway_alive(gateway))
        # A gateway whose server does not respond counts as alive.
        beats = await pipeline.execute(raise_on_error=False) if lessees else []
        missing = {name for name, beat in zip(lessees, beats, strict=True) if not beat}
        if dead := missing & self._missing:
            async with self._database.writing() as transaction:
                await BatchStore(transaction).end_leases(dead, utc_now())
        self._missing = missing
        return bool(dead)

    async def _feed(self, tenant_id: str, feed: Feed) -> int:
        waiting = await self._waiting(tenant_id, feed.models)
        now = utc_now()
        async with self._database.writing() as transaction:
            store = BatchStore(transaction)
            unclaimed = await store.unclaimed_lines(tenant_id)
            row = await _measured(transaction, tenant_id, feed.done, waiting + unclaimed, now)
            room = row.target - waiting - unclaimed
            if now - row.pushed_back_at < PAUSE or room <= 0:
                return 0
            return await store.release(tenant_id, room, now)

    async def _waiting(self, tenant_id: str, names: Collection[str]) -> int:
        """Return the tenant's jobs that wait for a worker, in the longest of its queues."""
        known = [model for name in names if (model := self._catalogue.known(name)) is not None]
        served = known if len(known) == len(names) else self._catalogue.models
        pipeline = self._redis.pipeline(transaction=False)
        for queue in {keys.queue(each.card.model, tenant_id, Lane.BATCH) for each in served}:
            pipeline.execute_command("ZCARD", queue)
        return max(await pipeline.execute(), default=0)


async def _measured(
    transaction: AsyncSession,
    tenant_id: str,
    done: int,
    waiting: int,
    now: datetime,
) -> BatchFeedRow:
    """Return how many lines of a tenant should wait, measured again once a second."""
    feed = await transaction.scalar(
        select(BatchFeedRow).where(BatchFeedRow.tenant_id == tenant_id).with_for_update()
    )
    if feed is None:
        feed = BatchFeedRow(
            tenant_id=tenant_id,
            target=LEAST_WAITING,
            rate=0.0,
            done=done,
            measured_at=now,
            pushed_back_at=EPOCH,
        )
        transaction.add(feed)
    elapsed = now - feed.measured_at
    if elapsed >= MEASURED_AFTER:
        # An ended batch no longer counts, so the difference may be negative.
        rate = max(done - feed.done, 0) / elapsed.total_seconds()
        feed.rate += SMOOTHING * (rate - feed.rate)
        if feed.pushed_back_at > feed.measured_at:
            feed.target //= 2
        elif waiting < feed.target // 2:
            feed.target += STEP
        most = min(max(int(feed.rate * WAIT_SECONDS), LEAST_WAITING), MOST_WAITING)
        feed.target = min(max(feed.target, LEAST_WAITING // 4), most)
        feed.done, feed.measured_at = done, now
    await transaction.flush()
    return feed
