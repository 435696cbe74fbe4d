"""Observer: update the gauges for alerts on pending usage, open reservations and expiring keys."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.metrics import UNKNOWN
from gateway.accounts.keys.service import count_expiring_keys
from gateway.batches.store import BatchStore
from gateway.billing.exports.store import ExportStore
from gateway.billing.ledger.pending import pending_usage
from gateway.jobs import telemetry
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import observe_servers
from gateway.records.batches import BatchStatus
from gateway.records.errors import StoreUnavailableError
from gateway.records.times import utc_now

UPDATE_SECONDS: Final = 5.0
"""Interval of the gauges that are read from Redis."""
KEYS_SECONDS: Final = 60.0
"""Interval of the gauge of expiring keys."""
MEMORY_TIMEOUT_SECONDS: Final = 5.0
LINE_STATES: Final = ("waiting", "running", "done")
"""Names of the counts of `BatchStore.lines_of`."""
MOST_BATCHES: Final = 1_000
"""Running batches whose lines are counted, the earliest deadlines first."""
WITHIN: Final = {"1d": timedelta(days=1), "7d": timedelta(days=7)}

logger = logging.getLogger(__name__)


class Observer:
    """Sets gauges. A value that cannot be read is set to unknown, not left as it was."""

    def __init__(self, redis: Redis, database: Database) -> None:
        self._redis = redis
        self._database = database
        self._keys_are_due_at = -math.inf

    async def run(self) -> None:
        """Update the gauges periodically until cancelled."""
        while True:
            try:
                await self.update()
            except Exception:
                logger.exception("the gauges cannot be updated")
            await asyncio.sleep(UPDATE_SECONDS)

    async def update(self) -> None:
        """Update the gauges once."""
        await observe_servers(self._redis, timeout_seconds=MEMORY_TIMEOUT_SECONDS)
        await self._update_buckets()
        if time.monotonic() >= self._keys_are_due_at:
            self._keys_are_due_at = time.monotonic() + KEYS_SECONDS
            await self._update_keys()
        await self._update_batches()
        await self._update_exports()

    async def _update_buckets(self) -> None:
        try:
            lag, pending, opened, overdue = await pending_usage(self._redis)
        except (RedisError, OSError):
            lag = pending = opened = overdue = UNKNOWN
        telemetry.LEDGER_LAG.set(lag)
        telemetry.PENDING_RECORDS.set(pending)
        telemetry.OPEN_RESERVATIONS.set(opened)
        telemetry.OVERDUE_RESERVATIONS.set(overdue)

    async def _update_batches(self) -> None:
        counts: Mapping[BatchStatus, float] = dict.fromkeys(BatchStatus, UNKNOWN)
        lines: Sequence[float] = (UNKNOWN,) * len(LINE_STATES)
        slack = starved = UNKNOWN
        with suppress(StoreUnavailableError):
            async with self._database.reading() as transaction:
                store = BatchStore(transaction)
                counts = await store.counts()
                batches = await store.in_progress(limit=MOST_BATCHES)
                lines = await store.lines_of([batch.id for batch in batches])
            now = utc_now()
            ends = [(batch.expires_at, batch.projected_end(now)) for batch in batches]
            left = [(limit - end).total_seconds() for limit, end in ends if end is not None]
            times = [batch.progressed_at for batch in batches]
            slack = min(left, default=math.inf)
            starved = max(((now - at).total_seconds() for at in times if at), default=0.0)
        for status in BatchStatus:
            if not status.is_end:
                telemetry.BATCHES.labels(status).set(counts.get(status, 0))
        for state, number in zip(LINE_STATES, lines, strict=True):
            telemetry.BATCH_LINES.labels(state).set(number)
        telemetry.BATCH_SLACK.set(slack)
        telemetry.BATCH_STARVED.set(starved)

    async def _update_exports(self) -> None:
        try:
            async with self._database.reading() as transaction:
                states = await ExportStore(transaction).states()
        except StoreUnavailableError:
            states = []
        # A sink that was removed, and one that cannot be read, has no values.
        for gauge in (
            telemetry.EXPORT_LAG_ROWS,
            telemetry.EXPORT_LAG,
            telemetry.EXPORT_BATCHES,
            telemetry.EXPORT_HELD,
        ):
            gauge.clear()
        now = utc_now()
        for state in states:
            lag = 0.0 if state.oldest_at is None else (now - state.oldest_at).total_seconds()
            telemetry.EXPORT_LAG_ROWS.labels(state.name).set(state.lag_rows)
            telemetry.EXPORT_LAG.labels(state.name).set(max(lag, 0.0))
            telemetry.EXPORT_HELD.labels(state.name).set(state.held_micros)
            for name, count in state.batches.items():
                telemetry.EXPORT_BATCHES.labels(state.name, name).set(count)

    async def _update_keys(self) -> None:
        now = utc_now()
        for name, within in WITHIN.items():
            try:
                expiring: float = await count_expiring_keys(self._database, now, within)
            except StoreUnavailableError:
                expiring = UNKNOWN
            telemetry.EXPIRING_KEYS.labels(name).set(expiring)
