"""Claims of jobs from the queue: as many as the engine has room for, each one validated."""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass

from tokenizers import Tokenizer

from common import clock
from contract.messages import JobFailed, JobReturned, ReturnReason, about
from contract.outcomes import FailureCode
from contract.queue import (
    Affinity,
    ClaimResult,
    JobClaim,
    LeaseReport,
    NextJob,
    Room,
    let_others_run,
    received_counts,
)
from contract.tier import Lane
from worker import telemetry
from worker.engine.base import Engine, InvalidRequestError
from worker.execution import tracing
from worker.execution.adapters import Adapters
from worker.execution.checks import check_job
from worker.execution.jobs import DEADLINE_MESSAGE, RunningJobs
from worker.execution.logprobs import TokenTexts
from worker.execution.preemption import Preemption
from worker.execution.running_job import PrefillPace, RunningJob
from worker.execution.submission import Submitter
from worker.queue.doorbells import OWN, Bell, Doorbells
from worker.queue.link import Link
from worker.queue.replies import UNDECODABLE_MESSAGE
from worker.redis_client import REDIS_TIMEOUT_SECONDS

_log = logging.getLogger(__name__)

MOST_JOBS_PER_CLAIM = 16

PASSED_SECONDS = 1.0
"""Longest time for which a job is passed over for cached ones of its tenant."""

CHECK_SECONDS = 0.1
"""How often it is checked whether the next job of the queue has a right to room, and how often a
full worker publishes what tenants use, at most."""

FRESH_SECONDS = 0.5
"""Time after which a full worker claims again: another one may have been woken for a new tenant.

So does a worker with a tenant that has a model share, which the tenant's tokens may exceed.
"""

SLOT_SECONDS = 0.05
"""Time after which a worker claims again whose adapters use all slots, if no job ends before."""


@dataclass(eq=False)
class Claimer:
    """Claims jobs of one model for one engine until it is stopped."""

    _link: Link
    _engine: Engine
    _jobs: RunningJobs
    _submitter: Submitter
    _adapters: Adapters
    _preemption: Preemption
    affinity_seconds: InitVar[float]
    _start_units: float
    """What the tenant of the next job is charged for the start of this worker."""

    def __post_init__(self, affinity_seconds: float) -> None:
        link = self._link
        self._tokenizer = Tokenizer.from_buffer(self._engine.info.tokenizer_json)
        self._texts = TokenTexts(self._tokenizer)
        self._keep_ms = round(affinity_seconds * 1000)
        self._patience_ms = round(min(affinity_seconds, PASSED_SECONDS) * 1000)
        self._prefill_pace = PrefillPace()
        self._doorbells = Doorbells(
            link.redis, link.queue.model, link.worker, timeout_seconds=REDIS_TIMEOUT_SECONDS
        )
        self._has_rung = False
        self._next_jobs: Sequence[NextJob] = ()
        """The next jobs of the queue, if there was no room for them."""
        self._claimed_at = self._published_at = 0.0
        self._only = ""
        """The tenant for which there is room."""
        self._is_known_full = False
        """Whether its own doorbell rings when a tenant begins to wait."""
        self._has_changed = False
        """Whether jobs were claimed since the use of the full engine was published."""
        self._claiming = asyncio.Lock()
        self.is_stopping = False
        """Whether `stop` was called."""

    def stop(self) -> None:
        """Claim no more jobs; a claim in progress may still return some."""
        self.is_stopping = True
        self._jobs.room_changed.set()
        self._doorbells.cancel()

    async def wait_claimed(self) -> None:
        """Wait until a claim in progress has ended and its jobs are registered."""
        async with self._claiming:
            return

    async def aclose(self) -> None:
        """Wait for jobs no longer."""
        await self._doorbells.aclose()

    async def claim(self) -> None:
        """Claim jobs once, then wait until another claim may return some."""
        self._jobs.room_changed.clear()
        if self._preemption.keep_shares():
            await self._apply_preemptions()
        await self._submitter.submit_again(self._preemption.seat(self._next_jobs))
        if self.is_stopping:
            # Jobs that run may still have parked sequences.
            await self.aclose()
            self._next_jobs = ()
            await self._jobs.room_changed.wait()
            return
        room = self._preemption.room()
        is_full = room.sequences + room.preemptible_sequences <= 0
        now = time.monotonic()
        is_fresh = self._is_known_full and now - self._claimed_at < FRESH_SECONDS
        is_awaited = is_full and is_fresh and not self._has_news
        if (
            self._has_rung
            or not is_awaited
            or any(map(self._preemption.has_right, self._next_jobs))
        ):
            self._has_rung = False
            if (is_full or self._is_known_full) and (self._only or self._may_publish):
                self._published_at, self._has_changed = now, False
                room = self._preemption.published(room)
            if is_full or self._is_known_full:
                room = room._replace(rights=self._preemption.rights())
            others = [each for each in self._next_jobs if self._only not in ("", each.tenant)]
            result = await self._claim(room)
            if await self._makes_room():
                return
            if result.claims and any(map(self._preemption.has_right, others)):
                # Room was made for one tenant, and others wait for it.
                self._has_rung = True
                return
            await self._wait_after(result)
        else:
            await self._wait([OWN])

    @property
    def _may_publish(self) -> bool:
        return time.monotonic() - self._published_at >= CHECK_SECONDS

    @property
    def _has_news(self) -> bool:
        """Whether other workers should know what has filled the engine."""
        return self._is_known_full and self._has_changed and self._may_publish

    async def _claim(self, room: Room) -> ClaimResult:
        async with self._claiming:
            if self.is_stopping:
                return ClaimResult([])
            link, asked_at = self._link, time.monotonic()
            self._claimed_at = asked_at
            result = await link.queue.claim(
                link.worker,
                room,
                most_jobs=MOST_JOBS_PER_CLAIM,
                lease_ms=link.lease_ms,
                affinity=Affinity(
                    self._patience_ms, self._prefill_pace.microseconds, self._keep_ms
                ),
                adapters=self._adapters.room(),
                engine=self._engine.info.name,
                only=self._only,
            )
            self._next_jobs, self._only = result.next_jobs, ""
            self._preemption.waiting = {each.tenant for each in result.next_jobs}
            if result.others is not None:
                self._preemption.note_others(result.others)
            telemetry.PASSED_JOBS.inc(result.passed_jobs)
            telemetry.KEPT_JOBS.inc(result.kept_jobs)
            telemetry.AFFINITY_WAIT.inc(result.affinity_seconds)
            taken = sum(min(each.job.sequences, room.most_sequences) for each in result.claims)
            is_full = room.sequences + room.preemptible_sequences <= taken
            self._is_known_full = is_full or result.blocked is Lane.REQUESTS
            self._has_changed = self._has_changed or bool(result.claims)
            await self._start(result.claims, asked_at)
            if result.claims and self._start_units:
                units, self._start_units = self._start_units, 0.0
                first = result.claims[0]
                await link.queue.charge(link.worker, first.job.id, first.attempt, units)
            return result

    async def _wait_after(self, result: ClaimResult) -> None:
        if self._has_news:
            return
        is_done = len(result.claims) < MOST_JOBS_PER_CLAIM and not self.is_stopping
        has_shares = is_done and self._preemption.has_shares
        if result.waits_for_slot:
            # Other workers need the doorbell, which rings for the job that waits.
            await self._doorbells.wait([], self._jobs.room_changed, seconds=SLOT_SECONDS)
        elif result.blocked is not None or self._is_known_full or has_shares:
            # What waits for a share must not keep this worker awake, but may interest others.
            deaf = {*Lane} if self._is_known_full else {result.blocked, *result.capped}
            bells: list[Bell] = [each for each in Lane if each not in deaf]
            if Lane.REQUESTS in deaf:
                bells.append(OWN)
            await self._wait(bells, kept_seconds=result.kept_seconds)
        elif is_done:
            event = self._jobs.room_changed if self._jobs.parked else None
            self._has_rung = await self._doorbells.wait(Lane, event, seconds=result.kept_seconds)
        # If it has no room when a kept job is free, its claim wakes another worker.
        self._has_rung = self._has_rung or result.kept_seconds > 0

    async def _makes_room(self) -> bool:
        """Preempt sequences for the first of the next jobs that has a right to room.

        Room is left for its tenant until there is enough. Return whether there is more room now.
        """
        for job in self._next_jobs:
            preempted = self._preemption.make_room_for(job)
            if preempted is not None:
                self._only = job.tenant
                if preempted:
                    await self._apply_preemptions()
                return preempted > 0
        return False

    async def _apply_preemptions(self) -> None:
        self._link.writer.flush()
        await self._submitter.apply_ends()

    async def _wait(self, bells: Iterable[Bell], *, kept_seconds: float = 0.0) -> None:
        """Wait for room in the engine, for these doorbells, or until a kept job is free."""
        pauses = (
            self._preemption.pause_seconds,
            kept_seconds,
            CHECK_SECONDS * bool(self._next_jobs or self._has_changed),
            FRESH_SECONDS * (self._is_known_full or self._preemption.has_shares),
        )
        self._has_rung = await self._doorbells.wait(
            bells, self._jobs.room_changed, seconds=min(filter(None, pauses), default=0.0)
        )

    async def _start(self, claims: list[JobClaim], asked_at: float) -> None:
        # Register all jobs before submitting any: if the engine dies, registered jobs are returned.
        started = []
        for claim in claims:
            telemetry.JOBS_CLAIMED.inc()
            if claim.waited_seconds is not None and not claim.is_preemptible:
                telemetry.QUEUE_WAIT.observe(claim.waited_seconds)
            try:
                generation = await self._begin(claim, asked_at)
            except Exception:  # One job's bytes must not end all jobs.
                job = claim.job
                _log.exception("Job %s: could not begin it", job.id, extra=about(job))
                self._fail(claim, FailureCode.ENGINE_ERROR, UNDECODABLE_MESSAGE)
                continue
            if generation is not None:
                started.append(generation)
                await let_others_run(generation.job)
            if claim.job.resumption is not None:
                # Replaying a resumption may take long: let running sequences proceed between jobs.
                await asyncio.sleep(0)
        self._preemption.make_room(started)
        if self._submitter.has_work:
            # The engine must have room before it gets the jobs.
            await self._submitter.apply_ends()
        await self._submitter.submit(started)
        self._link.writer.flush()

    def _abandon(self, claim: JobClaim) -> None:
        """End a claim whose gateway is dead. Another gateway takes over a background job."""
        telemetry.JOBS_ENDED.labels(tracing.ABANDONED).inc()
        if claim.job.is_background:
            self._link.leases.release([_report_before(claim)])
        else:
            self._link.leases.end([_report_before(claim)])

    def _give_back(self, claim: JobClaim) -> None:
        """Return a job whose prompt is incomplete, so that its gateway sends all of it."""
        job, report = claim.job, _report_before(claim)
        returned = JobReturned(job.handle, claim.attempt, ReturnReason.PROMPT_LOST, False)
        self._link.writer.outbox(job.gateway).return_job(returned, report)
        self._link.leases.hold_until_written(report)
        telemetry.JOBS_ENDED.labels(tracing.RETURNED).inc()

    async def _begin(self, claim: JobClaim, asked_at: float) -> RunningJob | None:
        """Return the generation of a claimed job; None if the job has ended already."""
        if not await self._link.gateways.is_alive(claim.job.gateway):
            self._abandon(claim)
            return None
        job = await self._link.prompts.whole(claim.job)
        if job is None:
            self._give_back(claim)
            return None
        claim = claim._replace(job=job)
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

    def _validated(self, claim: JobClaim, asked_at: float) -> RunningJob | None:
        """Return the generation of a claimed job; None if the job failed."""
        job = claim.job
        if job.deadline_ms <= clock.now_ms():
            self._fail(claim, FailureCode.DEADLINE_EXCEEDED, DEADLINE_MESSAGE)
            return None
        try:
            check_job(job, self._engine.info)
            return RunningJob(
                claim,
                self._link.writer.outbox(job.gateway),
                tokenizer=self._tokenizer,
                texts=self._texts,
                engine=self._engine.info.name,
                exactness_class=self._jobs.class_of(self._engine),
                parsers=self._engine.parsers,
                asked_at=asked_at,
                on_prefilled=self._jobs.room_changed.set if claim.is_preemptible else None,
                prefill_pace=self._prefill_pace,
            )
        except InvalidRequestError as error:
            self._fail(claim, FailureCode.INVALID_REQUEST, str(error), param=error.param)
        return None

    def _fail(
        self, claim: JobClaim, code: FailureCode, message: str, *, param: str | None = None
    ) -> None:
        job, report = claim.job, _report_before(claim)
        failed = JobFailed(job.handle, claim.attempt, code, message, param=param)
        self._link.writer.outbox(job.gateway).fail(failed, report)
        self._link.leases.hold_until_written(report)
        telemetry.JOBS_ENDED.labels(code.value).inc()


def _report_before(claim: JobClaim) -> LeaseReport:
    """Return the lease report of a job that did not start: the counts of earlier attempts."""
    return LeaseReport(claim.job.id, claim.attempt, *received_counts(claim.job))
