"""Delivery of settlements and releases to Redis, with retries until Redis confirms them."""

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Final

import msgspec
from redis.exceptions import RedisError

from common.tasks import Backoff, TaskSet, end_task, wait_for_end
from gateway.limits.store import QuotaStore
from gateway.records.usage_record import UsageRecord

WAIT_SECONDS: Final = 0.25
"""How long the caller waits for an ending, before it continues in the background."""
MOST_ENDINGS: Final = 100_000
"""Maximum number of stored endings.

The sweep of reservations with expired leases handles the rest.
"""
MOST_RELEASES: Final = 10_000
"""Number of endings above which a release is tried only once.

While Redis is down, most releases have nothing to release.
"""
MOST_AT_ONCE: Final = 200
CONFIRMED_SECONDS: Final = 10.0
"""How long a confirmed ending is kept.

This is longer than a replica lags its master, or the ledger lags Redis.
"""
MOST_CONFIRMED: Final = 20_000
FIRST_PAUSE_SECONDS: Final = 0.25
LONGEST_PAUSE_SECONDS: Final = 5.0

logger = logging.getLogger(__name__)


class ReservationEnd(msgspec.Struct, frozen=True):
    """The end of a reservation: settled with a record, or released without one."""

    tenant_id: str
    request_id: str
    record: UsageRecord | None = None


class Endings:
    """The endings of one process that Redis has not confirmed yet."""

    def __init__(self, store: QuotaStore) -> None:
        self._store = store
        # A plain dictionary finds its oldest key more slowly, the more were removed before it.
        self._pending: OrderedDict[str, ReservationEnd] = OrderedDict()
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._confirmed: OrderedDict[str, tuple[float, ReservationEnd]] = OrderedDict()
        self._followers = TaskSet()
        self._is_failing = False

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def begin(self, ending: ReservationEnd) -> None:
        """Send an ending in the background; the first ending of a request wins."""
        _ = self._begin(ending)

    def begin_after(self, ending: ReservationEnd) -> None:
        """Send an ending in the background after the request's earlier ending has arrived."""
        self._followers.start(self._follow(ending))

    def repeat_confirmed(self) -> None:
        """Resend recently confirmed endings, which Redis may have lost.

        Each one still counts once.
        """
        confirmed, self._confirmed = self._confirmed, OrderedDict()
        for _, ending in confirmed.values():
            self.begin(ending)

    def drop_confirmed(self) -> None:
        """Drop endings whose confirmation is older than CONFIRMED_SECONDS."""
        deadline = time.monotonic() - CONFIRMED_SECONDS
        while self._confirmed:
            request_id, (confirmed_at, _) = next(iter(self._confirmed.items()))
            if confirmed_at > deadline:
                return
            del self._confirmed[request_id]

    async def send(self, ending: ReservationEnd) -> bool:
        """Send an ending, retrying until it arrives. Return whether it does within WAIT_SECONDS."""
        await wait_for_end(self._begin(ending), timeout_seconds=WAIT_SECONDS)
        return ending.request_id not in self._pending

    async def run(self) -> None:
        """Retry unconfirmed endings until cancelled."""
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            await asyncio.sleep(backoff.next_seconds())
            await self._send_some()
            if len(self._pending) == len(self._attempts):
                backoff.reset()

    async def aclose(self, *, seconds: float) -> None:
        """Send unconfirmed endings, for at most this many seconds."""
        deadline = time.monotonic() + seconds
        while self._pending and time.monotonic() < deadline:
            await self._send_some(deadline - time.monotonic())
            if self._pending:
                await asyncio.sleep(0.05)
        await end_task(*self._attempts.values())
        await self._followers.cancel()
        if self._pending:
            logger.error("%d reservations could not be ended and will expire", len(self._pending))

    async def _send_some(self, seconds: float | None = None) -> None:
        """Send every ending that is not in flight; after a failure the others wait too."""
        waiting = list(self._pending.values())
        for start in range(0, len(waiting), MOST_AT_ONCE):
            some = waiting[start : start + MOST_AT_ONCE]
            attempts = [self._attempt(each) for each in some if each.request_id in self._pending]
            if attempts:
                await asyncio.wait(attempts, timeout=seconds)
            if any(ending.request_id in self._pending for ending in some):
                return

    def _begin(self, ending: ReservationEnd) -> "asyncio.Task[None]":
        known = self._pending.get(ending.request_id)
        if known is None:
            self._add(ending)
        return self._attempt(known or ending)

    def _add(self, ending: ReservationEnd) -> None:
        if ending.record is None and len(self._pending) >= MOST_RELEASES:
            return
        if len(self._pending) >= MOST_ENDINGS:
            self._pending.popitem(last=False)
            logger.error("too many unconfirmed endings: dropped one, its reservation will expire")
        self._pending[ending.request_id] = ending

    def _attempt(self, ending: ReservationEnd) -> "asyncio.Task[None]":
        task = self._attempts.get(ending.request_id)
        if task is None:
            task = asyncio.create_task(self._end(ending))
            self._attempts[ending.request_id] = task
        return task

    async def _end(self, ending: ReservationEnd) -> None:
        try:
            if ending.record is not None:
                await self._store.settle(ending.record)
            else:
                await self._store.release(ending.tenant_id, ending.request_id)
        except RedisError as error:
            if not self._is_failing:
                logger.warning("cannot end reservations, retrying: %s", type(error).__name__)
            self._is_failing = True
        else:
            self._is_failing = False
            self._pending.pop(ending.request_id, None)
            self._note_confirmed(ending)
        finally:
            del self._attempts[ending.request_id]

    def _note_confirmed(self, ending: ReservationEnd) -> None:
        # Keep the order of arrival: a release after a settlement must not replace it.
        if ending.request_id not in self._confirmed:
            self._confirmed[ending.request_id] = (time.monotonic(), ending)
        if len(self._confirmed) > MOST_CONFIRMED:
            self._confirmed.popitem(last=False)

    async def _follow(self, ending: ReservationEnd) -> None:
        while True:
            await asyncio.sleep(FIRST_PAUSE_SECONDS)
            if ending.request_id not in self._pending:
                self.begin(ending)
                return
