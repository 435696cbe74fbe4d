"""Slots for batches: background jobs that work on batches side by side, in turns of their tenants.

A batch that fails is due again after a pause that doubles.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.orm import aliased

from gateway.batches.store import OPEN
from gateway.platform.database.claims import (
    CLAIM,
    Claim,
    LostClaimError,
    Slots,
    lock_in_turns,
)
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import BatchRow
from gateway.records.batches import Batch
from gateway.records.errors import StoreUnavailableError
from gateway.records.times import utc_now

PAUSES: Final = 8
"""Pauses after failures, from a second on, of which each is twice the one before."""

logger = logging.getLogger(__name__)


class BatchSlots(Slots[tuple[Batch, Claim]]):
    """One kind of work on batches. The last free slot is for a tenant that has none.

    Args:
        database: stores the batches.
        work: works on a batch, and returns the seconds until the batch is due again.
        is_due: returns the condition for batches that are due at a time.
        number: the most batches at once, at least 2.
        limit_seconds: after this time, the work on a batch has failed.
        prepare: is called before batches are claimed; if it fails, none is.
    """

    def __init__(
        self,
        database: Database,
        work: Callable[[Batch], Coroutine[Any, Any, float]],
        is_due: Callable[[datetime], ColumnElement[bool]],
        *,
        number: int,
        limit_seconds: float = 600.0,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(number, self._claim_due, self._try)
        self._database = database
        self._work_on = work
        self._is_due = is_due
        self._limit_seconds = limit_seconds
        self._prepare = prepare

    async def _claim_due(self, limit: int, held: Collection[str]) -> dict[str, tuple[Batch, Claim]]:
        now, is_open, mine = utc_now(), BatchRow.status.in_(OPEN), aliased(BatchRow)
        is_free = and_(BatchRow.claimed_until <= now, BatchRow.id.not_in(held))
        is_due = and_(is_open, is_free, self._is_due(now))
        if limit == 1:
            # However slow the work for the other tenants is.
            served = select(mine.tenant_id).where(mine.id.in_(held))
            is_due = and_(is_due, BatchRow.tenant_id.not_in(served))
        async with self._database.reading() as transaction:
            if await transaction.scalar(select(BatchRow.id).where(is_due).limit(1)) is None:
                return {}
        if self._prepare is not None:
            await self._prepare()
        async with self._database.writing() as transaction:
            rows = await lock_in_turns(
                transaction,
                BatchRow,
                is_due=is_due,
                is_held=and_(is_open, BatchRow.claimed_until > now),
                owners=(BatchRow.tenant_id,),
                order=BatchRow.due_at,
                limit=max(limit - 1, 1),
            )
            for row in rows:
                row.attempts += 1
            end, until = BatchRow.claimed_until, now + CLAIM
            return {
                row.id: (row.to_record(), Claim.of(self._database, row, end, until)) for row in rows
            }

    async def _try(self, item: tuple[Batch, Claim]) -> bool:
        batch, claim = item
        attempts, pause = batch.attempts, 2.0 ** (min(batch.attempts, PAUSES) - 1)
        try:
            pause = await claim.hold(self._work_on(batch), seconds=self._limit_seconds)
            attempts = 0
        except LostClaimError:
            return False  # Another process works on it, or a customer has cancelled it.
        except (StoreUnavailableError, TimeoutError) as error:
            logger.warning("the work on %s failed and is repeated: %r", batch.id, error)
        except asyncio.CancelledError:
            attempts, pause = attempts - 1, 0.0
            raise
        except Exception:
            logger.exception("the work on %s failed and is repeated", batch.id)
        finally:
            await asyncio.shield(_give_back(batch, claim, attempts, pause))
        return attempts == 0


async def _give_back(batch: Batch, claim: Claim, attempts: int, pause: float) -> None:
    now = utc_now()
    try:
        await claim.change(
            claimed_until=now, due_at=now + timedelta(seconds=pause), attempts=attempts
        )
    except LostClaimError:
        pass
    except StoreUnavailableError as error:
        logger.warning("the claim on %s ends by time: %s", batch.id, error)
