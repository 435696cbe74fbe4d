"""Settlement sweep: settle requests of dead gateways, whose leases are no longer renewed.

The sweep cancels their jobs, reads the engine's counts from the receipts and settles the requests
as lost; they are paused then. A stream pays for its tokens: clients have received them, or can
resume it. A gateway that returns may settle the same requests: the ledger adds what is new. A
gateway that takes a request over renews its lease first; then the sweep does not settle it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common import clock
from common.tasks import each_apart
from contract import keys
from contract.outcomes import JobReceipt, JobState
from contract.queue import JobQueue
from gateway.limits.replies import ExpiredReservation, RequestEnd, RequestState
from gateway.limits.store import QuotaStore
from gateway.platform.redis_client import any_exists, shared_connection
from gateway.records.usage_record import (
    LOST_CODE,
    Counts,
    Outcome,
    UsageRecord,
    readable_usage,
)

PATIENCE_MS: Final = 600_000
"""After this long without renewal, the request is settled even if its gateway is alive.

The engine's last reported counts are then final.
"""
AT_ONCE: Final = 500
"""Limit of reservations of one bucket that are read at once."""
_OPEN_REQUESTS: Final = [keys.open_requests(bucket) for bucket in range(keys.BUCKETS)]

logger = logging.getLogger(__name__)


class _Abandoned(NamedTuple):
    request_id: str
    record: UsageRecord
    expired_ms: int
    """When its lease expired."""


class Sweep:
    """Finds and settles abandoned reservations in all buckets."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._executor = shared_connection(redis)
        self._store = QuotaStore(self._executor)
        self.lost_micros = 0
        """Cost in micro-dollars of all tokens that were settled free of charge."""
        self.settled_requests = 0
        self._errors: dict[str, RedisError] = {}
        """By model that did not respond in this run; its other requests wait for the next one."""

    async def run(self, *, seconds: float = 20.0) -> int:
        """Settle abandoned requests whose jobs have ended, and cancel the jobs of the others.

        Looks past those that cannot be settled, until `seconds` are over. Returns how many requests
        were settled, or released because their drafts cannot be read. Raises RedisError at the end,
        if a bucket or a model did not respond.
        """
        if not await any_exists(self._redis, _OPEN_REQUESTS):
            return 0
        before = self.settled_requests
        self._errors.clear()
        run = partial(self._run, deadline=time.monotonic() + seconds)
        await each_apart(run, range(keys.BUCKETS), at_once=keys.BUCKETS)
        for error in self._errors.values():
            raise error
        return self.settled_requests - before

    async def _run(self, bucket: int, *, deadline: float) -> None:
        kept, is_last = 0, False
        while not is_last and time.monotonic() < deadline:
            page = await self._store.expired(bucket, most=AT_ONCE, skip=kept)
            found = [each for each in map(_abandoned, page) if each is not None]
            alive = await self._store.living({each.record.gateway for each in found})
            ended = sum([await self._try_to_end(each, alive) for each in found])
            ended += await self._set_aside(bucket, page)
            self.settled_requests += ended
            kept += len(page) - ended
            is_last = len(page) < AT_ONCE

    async def _try_to_end(self, abandoned: _Abandoned, alive: set[str]) -> bool:
        if abandoned.record.model in self._errors:
            return False
        try:
            return await self._end(abandoned, alive)
        except (RedisConnectionError, RedisTimeoutError) as error:
            self._errors[abandoned.record.model] = error
            return False
        except Exception:
            # A faulty record must not block the others.
            logger.exception("request %s cannot be settled", abandoned.record.request_id)
            return False

    async def _set_aside(self, bucket: int, page: Sequence[ExpiredReservation]) -> int:
        """Release overdue reservations whose drafts cannot be read. Return how many."""
        released, overdue_ms = 0, clock.now_ms() - PATIENCE_MS
        for each in page:
            if each.expired_ms < overdue_ms and readable_usage(each.record) is None:
                try:
                    released += await self._store.set_aside(bucket, each)
                except (RedisConnectionError, RedisTimeoutError):
                    raise
                except Exception:
                    logger.exception("request %s cannot be released", each.request_id)
                else:
                    logger.error(
                        "the draft of request %s cannot be read: it was moved to %s, and nobody "
                        "pays for the request",
                        each.request_id,
                        keys.unreadable_usage(bucket),
                    )
        return released

    async def _end(self, abandoned: _Abandoned, alive: set[str]) -> bool:
        record = abandoned.record
        is_overdue = clock.now_ms() - abandoned.expired_ms > PATIENCE_MS
        if record.gateway in alive and not is_overdue:
            return False
        queue = JobQueue(self._executor, record.model)
        job_ids = record.job_ids
        receipts = await self._cancel(queue, record.tenant_id, job_ids)
        if not is_overdue and not all(map(_has_ended, receipts)):
            return False
        # Does nothing if another gateway has taken the request over in the meantime.
        settled = _settled(record, receipts)
        is_settled = await self._store.end(
            RequestEnd(
                tenant_id=record.tenant_id,
                request_id=abandoned.request_id,
                # A line runs again, and is recorded then.
                record=None if record.line else settled,
                state=RequestState.PAUSED,
                settled=Counts.total([record.counts, settled.paid]),
                expired_ms=abandoned.expired_ms,
            )
        )
        if not record.line:
            self.lost_micros += is_settled * settled.free_micros
        if is_settled:
            await queue.forget(job_ids)
        return is_settled

    async def _cancel(
        self, queue: JobQueue, tenant_id: str, job_ids: Sequence[str]
    ) -> list[JobReceipt]:
        """Cancel jobs that have not ended; return the receipts afterwards."""
        receipts = await queue.receipts(job_ids)
        waiting = [
            job_id
            for job_id, receipt in zip(job_ids, receipts, strict=True)
            if not _has_ended(receipt)
        ]
        if not waiting:
            return receipts
        await asyncio.gather(*(queue.cancel(job_id, tenant_id) for job_id in waiting))
        return await queue.receipts(job_ids)


def _abandoned(expired: ExpiredReservation) -> _Abandoned | None:
    draft = readable_usage(expired.record)
    if draft is None:
        return None
    if not draft.created_ms:  # No other gateway has taken the request over.
        draft = msgspec.structs.replace(draft, created_ms=expired.created_ms)
    return _Abandoned(expired.request_id, draft, expired.expired_ms)


def _has_ended(receipt: JobReceipt) -> bool:
    return receipt.state in (JobState.ENDED, JobState.ABSENT)


def _settled(draft: UsageRecord, receipts: Sequence[JobReceipt]) -> UsageRecord:
    counts = [
        draft.job_counts(index, each.prompt_tokens, each.cached_tokens, each.completion_tokens)
        for index, each in enumerate(receipts)
    ]
    free = [each for each in counts if draft.is_whole or not each.completion_tokens]
    return draft.ended(
        Counts.total(counts),
        free=Counts.total([Counts(), *free]),
        outcome=Outcome.LOST,
        code=LOST_CODE,
        engines=[receipt.engine for receipt in receipts],
    )
