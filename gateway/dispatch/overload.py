"""Overload: reject requests when a queue is full, and report shed jobs."""

import logging
from collections import defaultdict
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract.messages import JobFailed
from contract.outcomes import FailureCode
from contract.queue import EnqueueReport, EnqueueResult
from gateway.dispatch.notices import send_notices
from gateway.errors import OverloadedError, TenantQueueFullError

SHORTEST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 60.0
"""OpenAI's client libraries ignore a longer Retry-After."""
UNKNOWN_RETRY_SECONDS: Final = 2.0
"""Retry-After before the throughput of a queue has been measured."""

_FIRST_ATTEMPT: Final = 1

logger = logging.getLogger(__name__)


def require_enqueued(report: EnqueueReport, model: str, max_of_tenant: int) -> None:
    """Raise OverloadedError or TenantQueueFullError if a request was rejected.

    The error has a Retry-After.
    """
    if report.result in (EnqueueResult.ENQUEUED, EnqueueResult.DUPLICATE):
        # A duplicate is our own enqueue, retried because the first reply was lost.
        return
    retry_after_seconds = _retry_after_seconds(report)
    match report.result:
        case EnqueueResult.MODEL_FULL:
            raise OverloadedError(
                f"The queue of the model '{model}' is full.",
                retry_after_seconds=retry_after_seconds,
            )
        case EnqueueResult.TENANT_FULL:
            raise TenantQueueFullError(
                "Too many prompts are waiting for this account: "
                f"the limit is {max_of_tenant} for each model.",
                retry_after_seconds=retry_after_seconds,
            )
        case EnqueueResult.TOO_LATE:
            raise OverloadedError(
                f"The request would wait too long in the queue of the model '{model}'.",
                retry_after_seconds=retry_after_seconds,
            )


async def notify_shed(client: "Redis", sender: str, report: EnqueueReport) -> None:
    """Notify the gateways of the jobs that were shed.

    A gateway that misses the notice finds its job missing and enqueues it again, so it is not lost.
    """
    failed: defaultdict[str, list[JobFailed]] = defaultdict(list)
    retry_after_seconds = _retry_after_seconds(report)
    for gateway, handle in report.shed:
        notice = JobFailed(handle, _FIRST_ATTEMPT, FailureCode.SHED, "", retry_after_seconds)
        failed[gateway].append(notice)
    try:
        for gateway, notices in failed.items():
            await send_notices(client, gateway, sender=sender, failed=notices)
    except RedisError as error:
        logger.warning("cannot notify gateways of shed jobs: %s", type(error).__name__)


def _retry_after_seconds(report: EnqueueReport) -> float:
    known = report.retry_after_seconds
    seconds = UNKNOWN_RETRY_SECONDS if known is None else known
    return min(max(seconds, SHORTEST_RETRY_SECONDS), LONGEST_RETRY_SECONDS)
