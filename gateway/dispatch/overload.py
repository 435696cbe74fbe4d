"""What a full queue means to those who are refused, and to those who lose their place in it."""

import logging
from collections import defaultdict
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import keys, messages
from contract.messages import Frame, JobFailed
from contract.outcomes import FailureCode
from contract.queue import EnqueueReport, EnqueueResult
from gateway.errors import OverloadedError, TenantQueueFullError

SHORTEST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 60.0
"""Clients of OpenAI believe no longer time than this one."""
UNKNOWN_RETRY_SECONDS: Final = 2.0
"""What is told before the pace of a queue has been measured."""

_FIRST_ATTEMPT: Final = 1

logger = logging.getLogger(__name__)


def require_enqueued(report: EnqueueReport, model: str, most_of_tenant: int) -> None:
    """Raise OverloadedError or TenantQueueFullError if a request was refused, saying when to come back."""
    retry_after_seconds = _retry_after_seconds(report)
    match report.result:
        case EnqueueResult.MODEL_FULL:
            raise OverloadedError(
                f"The queue of the model '{model}' is full.",
                retry_after_seconds=retry_after_seconds,
            )
        case EnqueueResult.TENANT_FULL:
            raise TenantQueueFullError(
                f"Too many prompts are waiting for this account: the limit is {most_of_tenant} for each model.",
                retry_after_seconds=retry_after_seconds,
            )
        case EnqueueResult.TOO_LATE:
            raise OverloadedError(
                f"The request would wait too long in the queue of the model '{model}'.",
                retry_after_seconds=retry_after_seconds,
            )
        case EnqueueResult.ENQUEUED | EnqueueResult.DUPLICATE:
            # A duplicate is our own enqueue, repeated because its first answer got lost.
            return


async def tell_shed(client: "Redis", sender: str, report: EnqueueReport) -> None:
    """Tell the gateways of the jobs that were shed.

    A gateway that is not reached finds its job gone, and puts it on the queue again: it waits, and is not lost.
    """
    failed: defaultdict[str, list[JobFailed]] = defaultdict(list)
    retry_after_seconds = _retry_after_seconds(report)
    for gateway, handle in report.shed:
        notice = JobFailed(handle, _FIRST_ATTEMPT, FailureCode.SHED, "", retry_after_seconds)
        failed[gateway].append(notice)
    try:
        for gateway, notices in failed.items():
            frame = messages.encode(Frame(sender, 0, failed=notices))
            await client.xadd(keys.replies(gateway), {"f": frame})
    except RedisError as error:
        logger.warning("cannot tell of jobs that were shed: %s", type(error).__name__)


def _retry_after_seconds(report: EnqueueReport) -> float:
    known = report.retry_after_seconds
    seconds = UNKNOWN_RETRY_SECONDS if known is None else known
    return min(max(seconds, SHORTEST_RETRY_SECONDS), LONGEST_RETRY_SECONDS)
