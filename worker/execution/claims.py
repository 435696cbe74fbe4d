"""Claims of jobs from the queue: as many as the engine has room for, each one validated."""

import asyncio
import logging
import time
from typing import Any

import msgspec
from tokenizers import Tokenizer

from contract import clock, keys
from contract.logs import about
from contract.messages import JobFailed
from contract.outcomes import FailureCode
from contract.queue import Claim, Room, let_others_run
from worker import telemetry
from worker.engine.base import Engine, InvalidRequestError
from worker.execution import tracing
from worker.execution.checks import check_job
from worker.execution.generation import Generation, report_before
from worker.execution.jobs import DEADLINE_MESSAGE, UNDECODABLE_MESSAGE, RunningJobs
from worker.execution.logprobs import TokenTexts
from worker.execution.submission import Submitter
from worker.queue.link import Link

_log = logging.getLogger(__name__)

MOST_JOBS_PER_CLAIM = 16
_WAIT_SECONDS = 3
"""Longest wait for the doorbell, or for room in the engine, before the next claim."""


class Claimer:
    """Claims jobs of one model for one engine until it is stopped."""

    def __init__(self, link: Link, engine: Engine, jobs: RunningJobs, submitter: Submitter) -> None:
        self._link = link
        self._engine = engine
        self._jobs = jobs
        self._submitter = submitter
        self._tokenizer = Tokenizer.from_buffer(engine.info.tokenizer_json)
        self._texts = TokenTexts(self._tokenizer)
        self._claiming = asyncio.Lock()
        self.is_stopping = False
        """Whether `stop` was called."""
        self._ring: asyncio.Future[Any] | None = None
        """The last wait for the doorbell."""

    def stop(self) -> None:
        """Claim no more jobs, except those of a claim in progress."""
        self.is_stopping = True
        if self._ring is not None:
            self._ring.cancel()

    async def wait_stopped(self) -> None:
        """Wait until a claim in progress has ended."""
        async with self._claiming:
            return

    async def claim(self) -> None:
        """Claim jobs once, then wait until another claim may return some."""
        if self.is_stopping:
            await asyncio.Event().wait()
        self._jobs.room_changed.clear()
        room = self._room()
        if room.sequences <= 0:
            await self._wait_for_room()
            return
        async with self._claiming:
            if self.is_stopping:
                return
            link, asked_at = self._link, time.monotonic()
            try:
                result = await link.queue.claim(
                    link.worker, room, most_jobs=MOST_JOBS_PER_CLAIM, lease_ms=link.lease_ms
                )
            except msgspec.MsgspecError:
                # The leases expire and the gateways decide what happens; all other jobs continue.
                _log.exception("Claimed jobs that this version cannot decode")
                return
            await self._start(result.claims, asked_at)
        if result.blocked:
            await self._wait_for_room()
        elif len(result.claims) < MOST_JOBS_PER_CLAIM and not self.is_stopping:
            await self._wait_for_doorbell()

    def _room(self) -> Room:
        info, jobs = self._engine.info, self._jobs
        # The engine's last report is stale once the engine has nothing left to step.
        used = jobs.kv_usage * info.kv_cache_tokens if jobs.by_id else 0.0
        return Room(
            tokens=max(int(info.kv_cache_tokens - used - jobs.reserved_tokens), 0),
            sequences=info.max_sequences - len(jobs.by_sequence),
            most_sequences=max(1, info.max_sequences // 4),
            empty=not jobs.by_id,
        )

    async def _wait_for_room(self) -> None:
        try:
            await asyncio.wait_for(self._jobs.room_changed.wait(), _WAIT_SECONDS)
        except TimeoutError:
            return

    async def _wait_for_doorbell(self) -> None:
        doorbell = keys.doorbell(self._link.queue.model)
        ring = self._ring = self._link.blocking.execute_command("BLPOP", doorbell, _WAIT_SECONDS)
        try:
            # `stop` cancels this future, but not this task.
            await asyncio.wait([ring])
            if not ring.cancelled():
                ring.result()
        finally:
            if ring.cancelled() or ring.cancel():
                # Otherwise Redis could still give a ring to this worker.
                await self._link.blocking.aclose()

    async def _start(self, claims: list[Claim], asked_at: float) -> None:
        # Register all jobs before submitting any: if the engine dies, registered jobs are returned.
        started = []
        for claim in claims:
            telemetry.JOBS_CLAIMED.inc()
            if claim.waited_seconds is not None:
                telemetry.QUEUE_WAIT.observe(claim.waited_seconds)
            if not await self._link.gateways.is_alive(claim.job.gateway):
                self._abandon(claim)
            elif (generation := self._begin(claim, asked_at)) is not None:
                started.append(generation)
            if claim.job.resumption is not None:
                # Replaying a resumption may take long: let running sequences proceed between jobs.
                await asyncio.sleep(0)
            await let_others_run(claim.job)
        await self._submitter.submit(started)
        self._link.writer.flush()

    def _abandon(self, claim: Claim) -> None:
        """End a claim whose gateway is dead. Another gateway takes over a background job."""
        telemetry.JOBS_ENDED.labels(tracing.ABANDONED).inc()
        if claim.job.is_background:
            self._link.leases.release([report_before(claim)])
        else:
            self._link.leases.end([report_before(claim)])

    def _begin(self, claim: Claim, asked_at: float) -> Generation | None:
        """Return the generation of a claimed job; None if the job has ended already."""
        if earlier := self._jobs.by_id.get(claim.job.id):
            # The lease expired, and the same worker claimed the job again.
            self._jobs.drop(earlier, tracing.LOST)
        generation = self._validated(claim, asked_at)
        if generation is None:
            return None
        generation.begin()
        if generation.is_done:
            self._link.leases.hold_until_written(generation.report)
            telemetry.JOBS_ENDED.labels(tracing.FINISHED).inc()
            tracing.attempt_ended(generation, tracing.FINISHED)
            return None
        self._jobs.add(generation)
        return generation

    def _validated(self, claim: Claim, asked_at: float) -> Generation | None:
        """Return the generation of a claimed job; None if the job failed."""
        job = claim.job
        if job.deadline_ms <= clock.now_ms():
            self._fail(claim, FailureCode.DEADLINE_EXCEEDED, DEADLINE_MESSAGE)
            return None
        try:
            check_job(job, self._engine.info)
            return Generation(
                claim,
                self._link.writer.outbox(job.gateway),
                tokenizer=self._tokenizer,
                texts=self._texts,
                parsers=self._engine.parsers,
                asked_at=asked_at,
            )
        except InvalidRequestError as error:
            self._fail(claim, FailureCode.INVALID_REQUEST, str(error), param=error.param)
        except Exception:  # One job's bytes must not end all jobs.
            _log.exception("Job %s: could not decode its tokens", job.id, extra=about(job))
            self._fail(claim, FailureCode.ENGINE_ERROR, UNDECODABLE_MESSAGE)
        return None

    def _fail(
        self, claim: Claim, code: FailureCode, message: str, *, param: str | None = None
    ) -> None:
        job, report = claim.job, report_before(claim)
        failed = JobFailed(job.handle, claim.attempt, code, message, param=param)
        self._link.writer.outbox(job.gateway).fail(failed, report)
        self._link.leases.hold_until_written(report)
        telemetry.JOBS_ENDED.labels(code.value).inc()
