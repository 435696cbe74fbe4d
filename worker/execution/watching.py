"""Events that end running jobs early: cancellations, lost leases, deadlines, dead gateways."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from common import clock
from contract import keys
from contract.outcomes import FailureCode
from worker.execution import tracing
from worker.execution.jobs import DEADLINE_MESSAGE, RunningJobs
from worker.execution.submission import Submitter
from worker.queue.link import GONE_SECONDS, GRACE_SECONDS, Link

_log = logging.getLogger(__name__)

_CONTROL_TIMEOUT_SECONDS = 3
_RENEWALS_PER_LEASE = 3
_CHECK_SECONDS = 1.0


@dataclass(eq=False)
class Watcher:
    """Ends jobs that must not run any longer. Each method does one round, to be repeated."""

    _link: Link
    _jobs: RunningJobs
    _submitter: Submitter
    _wait_claimed: Callable[[], Awaitable[None]]

    async def watch_cancellations(self) -> None:
        """Wait for the next cancellation on the control list and drop its job."""
        key = keys.control(self._link.queue.model, self._link.worker)
        entry: Any = await self._link.redis.blpop([key], timeout=_CONTROL_TIMEOUT_SECONDS)
        if entry is None:
            return
        job_id = entry[1].decode()
        if job_id not in self._jobs.by_id:
            # The reply to the claim of this job may still be on its way.
            await self._wait_claimed()
        if (generation := self._jobs.by_id.get(job_id)) is not None:
            # The client pays for a prompt in progress; otherwise disconnecting would be free.
            generation.count_prompt()
            self._jobs.drop(generation, FailureCode.CANCELLED.value)
            await self._submitter.apply_ends()

    async def extend_leases(self) -> None:
        """Extend all leases and drop the jobs whose leases are lost."""
        await asyncio.sleep(self._link.lease_ms / 1000 / _RENEWALS_PER_LEASE)
        running = [each.report for each in self._jobs.by_id.values()]
        for report in await self._link.leases.extend(running):
            generation = self._jobs.by_id.get(report.job_id)
            if generation is not None and generation.attempt == report.attempt:
                self._jobs.drop(generation, tracing.LOST)
        await self._submitter.apply_ends()

    async def watch_overflow(self) -> None:
        """Drop all jobs when too many of their deltas are unwritten."""
        writer, jobs = self._link.writer, self._jobs
        await writer.overflowed.wait()
        writer.overflowed.clear()
        if not jobs.by_id:
            return
        _log.error("Redis was unavailable for too long: returning %d jobs", len(jobs.by_id))
        generations = list(jobs.by_id.values())
        for gateway in {generation.job.gateway for generation in generations}:
            outbox = writer.outbox(gateway)
            outbox.drop({each.job.handle for each in generations if each.outbox is outbox})
        for generation in generations:
            jobs.drop_unsent(generation)

    async def check_jobs(self) -> None:
        """End the jobs whose deadlines have passed or whose gateways are dead."""
        await asyncio.sleep(_CHECK_SECONDS)
        now = clock.now_ms()
        for generation in list(self._jobs.by_id.values()):
            if generation.job.deadline_ms <= now:
                self._jobs.fail(generation, FailureCode.DEADLINE_EXCEEDED, DEADLINE_MESSAGE)
        self._link.writer.flush()
        await self._submitter.apply_ends()
        await self._check_gateways()

    async def _check_gateways(self) -> None:
        gateways, writer = self._link.gateways, self._link.writer
        in_use = {each.job.gateway for each in self._jobs.by_id.values()}
        await gateways.check(in_use.union(writer.gateways))
        dead = gateways.missing_for(GRACE_SECONDS)
        for generation in list(self._jobs.by_id.values()):
            if generation.job.gateway in dead:
                self._jobs.abandon(generation)
        writer.flush()
        for gateway in gateways.missing_for(GONE_SECONDS) - in_use:
            writer.remove(gateway)
        await self._submitter.apply_ends()
