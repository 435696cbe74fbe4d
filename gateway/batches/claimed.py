"""Claimed batches: background jobs that work on batches side by side, each apart from the others.

A process claims due batches in turns of their tenants, and renews the claims while it works. If it
dies, its claims end by time. A batch that fails is due again after a pause that doubles.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, and_

from contract.tasks import end_task
from gateway.batches.store import CLAIM, BatchStore
from gateway.database.engine import Database
from gateway.database.tables import BatchRow
from gateway.errors import StoreUnavailableError
from gateway.tenancy.batches import Batch
from gateway.tenancy.times import utc_now

TURN_SECONDS: Final = 1.0
"""How long a run claims batches and waits for the work on them, which may outlast it."""
LOOK_SECONDS: Final = 0.2
RENEW_SECONDS: Final = CLAIM.total_seconds() / 4
PAUSES: Final = 8
"""Pauses after failures, from a second on, of which each is twice the one before."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Claim:
    batch: Batch
    until: datetime


class ClaimedBatches:
    """The batches on which this process does one kind of work."""

    def __init__(
        self,
        database: Database,
        work: Callable[[Batch], Awaitable[float]],
        is_due: Callable[[datetime], ColumnElement[bool]],
        *,
        at_once: int,
        limit_seconds: float = 600.0,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Create it.

        Args:
            database: stores the batches.
            work: works on a batch, and returns the seconds until the batch is due again.
            is_due: returns the condition for batches that are due at a time.
            at_once: batches on which it works at a time, at least 2; one slot of them is for a
                tenant that has no other.
            limit_seconds: after this time, the work on a batch has failed.
            prepare: is called before batches are claimed; if it fails, none is.
        """
        self._database = database
        self._work = work
        self._is_due = is_due
        self._at_once = at_once
        self._limit_seconds = limit_seconds
        self._prepare = prepare
        self._running: dict[asyncio.Task[None], _Claim] = {}
        self._renewed_at = 0.0
        self._lock = asyncio.Lock()
        """Held while the ends of claims change."""

    async def run(self) -> int:
        """Work for about a second, or until nothing is due; return how many batches were claimed.

        Raises StoreUnavailableError if batches cannot be claimed.
        """
        end, claimed = time.monotonic() + TURN_SECONDS, 0
        while True:
            await self._renew()
            claimed += await self._claim()
            left = min(end - time.monotonic(), LOOK_SECONDS)
            if not self._running or left <= 0:
                return claimed
            await asyncio.wait(self._running, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def aclose(self) -> None:
        """Stop, and leave the batches to other processes."""
        await end_task(*self._running)

    async def _claim(self) -> int:
        now, room = utc_now(), self._at_once - len(self._running)
        if room <= 0:
            return 0
        is_due = self._is_due(now)
        if room == 1:
            # The last one is for another tenant, however slow the work for the others is.
            served = {claim.batch.tenant_id for claim in self._running.values()}
            is_due = and_(is_due, BatchRow.tenant_id.not_in(served))
        async with self._database.reading() as transaction:
            if not await BatchStore(transaction).has_claimable(is_due, now):
                return 0
        if self._prepare is not None:
            await self._prepare()
        async with self._database.writing() as transaction:
            claimed = await BatchStore(transaction).claim(is_due, now, limit=max(room - 1, 1))
        for batch in claimed:
            claim = _Claim(batch, now + CLAIM)
            task = asyncio.create_task(self._run(claim))
            self._running[task] = claim
            task.add_done_callback(self._running.pop)
        return len(claimed)

    async def _renew(self) -> None:
        if not self._running or time.monotonic() < self._renewed_at + RENEW_SECONDS:
            return
        self._renewed_at, until = time.monotonic(), utc_now() + CLAIM
        running, renewed = list(self._running.items()), set[str]()
        async with self._lock:
            async with self._database.writing() as transaction:
                store = BatchStore(transaction)
                for _, claim in running:
                    batch_id = claim.batch.id
                    if await store.change_claimed(batch_id, claim.until, claimed_until=until):
                        renewed.add(batch_id)
            for task, claim in running:
                if claim.batch.id in renewed:
                    claim.until = until
                else:
                    task.cancel()  # Another process works on it, or a customer has cancelled it.

    async def _run(self, claim: _Claim) -> None:
        batch, attempts = claim.batch, claim.batch.attempts
        pause = 2.0 ** (min(attempts, PAUSES) - 1)
        try:
            async with asyncio.timeout(self._limit_seconds):
                pause = await self._work(batch)
            attempts = 0
        except (StoreUnavailableError, TimeoutError) as error:
            logger.warning("the work on %s failed and is repeated: %r", batch.id, error)
        except asyncio.CancelledError:
            attempts, pause = attempts - 1, 0.0
            raise
        except Exception:
            logger.exception("the work on %s failed and is repeated", batch.id)
        finally:
            await asyncio.shield(self._give_back(claim, attempts, pause))

    async def _give_back(self, claim: _Claim, attempts: int, pause: float) -> None:
        now = utc_now()
        values = {"claimed_until": now, "due_at": now + timedelta(seconds=pause)}
        try:
            async with self._lock, self._database.writing() as transaction:
                await BatchStore(transaction).change_claimed(
                    claim.batch.id, claim.until, attempts=attempts, **values
                )
        except StoreUnavailableError as error:
            logger.warning("the claim on %s ends by time: %s", claim.batch.id, error)
