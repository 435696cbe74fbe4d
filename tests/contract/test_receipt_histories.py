"""Receipts on random histories, against a plain model of a job's life."""

import random
from dataclasses import dataclass, field

from redis.asyncio import Redis

from contract import keys
from contract.messages import GenerationJob, Resumption, SequenceProgress
from contract.outcomes import JobReceipt, JobState
from contract.queue import EnqueueResult, JobQueue, LeaseReport, RequeueResult
from tests.contract.test_queue import LEASE_MS, MODEL, PLENTY, enqueue, job, text
from tests.support.kinds import histories

ACTIONS = {
    "enqueue": 4,
    "claim": 5,
    "report": 5,
    "finish": 3,
    "cancel": 3,
    "reclaim": 2,
    "requeue": 2,
    "return_": 2,
    "revive": 2,
    "forget": 2,
}
TENANTS = ("a", "b")


@dataclass
class Life:
    """One job in the model."""

    state: JobState = JobState.ABSENT
    attempt: int = 0
    counts: tuple[int, int, int] = (0, 0, 0)
    is_lost: bool = False
    is_cancelled: bool = False
    is_settled: bool = False

    @property
    def receipt(self) -> JobReceipt:
        """The expected receipt."""
        counts = (0, 0, 0) if self.state is JobState.ABSENT else self.counts
        return JobReceipt(self.state, *counts)

    def is_held(self, attempt: int) -> bool:
        """Whether an attempt may report."""
        return self.state is JobState.RUNNING and self.attempt == attempt

    def end(self) -> None:
        """Leave a receipt unless the job is settled."""
        self.state = JobState.ABSENT if self.is_settled else JobState.ENDED

    def wait_again(self, resumption: Resumption | None) -> None:
        """Wait for another worker, which resumes after the received tokens."""
        self.state, self.counts = JobState.WAITING, (0, 0, 0)
        if resumption is not None:
            tokens = len(resumption.sequences[0].token_ids)
            self.counts = (tokens, resumption.prompt_tokens, resumption.cached_tokens)


@dataclass
class History:
    """A queue and the model, to which the same steps apply."""

    queue: JobQueue
    rng: random.Random
    lives: dict[str, Life] = field(default_factory=dict)

    def some_job(self) -> str:
        """Return a job that was enqueued at some time."""
        return self.rng.choice(list(self.lives))

    def some_report(self) -> LeaseReport:
        """Return a report of a random attempt of a random job, also a stale one."""
        job_id = self.some_job()
        life = self.lives[job_id]
        attempt = max(life.attempt - self.rng.choice([0, 0, 0, 1]), 1)
        return LeaseReport(job_id, attempt, life.counts[0] + self.rng.randint(0, 9), 10, 4)

    def some_rest(self) -> GenerationJob:
        """Return a random job as it resumes, also from its beginning."""
        job_id, tokens = self.some_job(), self.rng.randint(0, 3)
        if not tokens:
            return job(job_id, job_id[0])
        resumption = Resumption([SequenceProgress([5] * tokens)], 10, 4)
        return job(job_id, job_id[0], resumption=resumption)

    async def enqueue(self) -> None:
        job_id = f"{self.rng.choice(TENANTS)}{self.rng.randint(0, 30)}"
        result = await enqueue(self.queue, job(job_id, job_id[0]))
        if self.lives.get(job_id, Life()).state is JobState.ABSENT:
            assert result is EnqueueResult.ENQUEUED
            self.lives[job_id] = Life(JobState.WAITING)
        else:
            assert result is EnqueueResult.DUPLICATE

    async def claim(self) -> None:
        most = self.rng.randint(1, 3)
        result = await self.queue.claim("w1", PLENTY, most_jobs=most, lease_ms=LEASE_MS)
        waiting = [life for life in self.lives.values() if life.state is JobState.WAITING]
        assert len(result.claims) == min(most, len(waiting))
        for claimed, attempt, *_ in result.claims:
            life = self.lives[claimed.id]
            assert (life.state, life.attempt + 1) == (JobState.WAITING, attempt)
            life.state, life.attempt = JobState.RUNNING, attempt
            life.is_lost = False

    async def report(self) -> None:
        report, is_last = self.some_report(), self.rng.random() < 0.3
        life = self.lives[report.job_id]
        lost = await self.queue.extend("w1", [report], lease_ms=0 if is_last else LEASE_MS)
        is_held = life.is_held(report.attempt)
        assert lost == ([] if is_held and not life.is_cancelled else [report.job_id])
        if is_held:
            life.counts, life.is_lost = report[2:], is_last

    async def finish(self) -> None:
        report = self.some_report()
        life = self.lives[report.job_id]
        is_held = life.is_held(report.attempt)
        assert await self.queue.finish("w1", report) is is_held
        if is_held:
            life.counts = report[2:]
            life.end()

    async def cancel(self) -> None:
        job_id = self.some_job()
        life = self.lives[job_id]
        is_known = life.state in (JobState.WAITING, JobState.RUNNING)
        assert await self.queue.cancel(job_id, job_id[0]) is is_known
        if life.state is JobState.WAITING and life.counts == (0, 0, 0):
            life.state = JobState.ABSENT
        elif life.state is JobState.WAITING:
            life.end()
        elif life.state is JobState.RUNNING:
            life.is_cancelled = True
            if life.is_lost:
                life.end()

    async def reclaim(self) -> None:
        reported = {lost.job_id for lost in await self.queue.reclaim()}
        lost = {
            job_id: life
            for job_id, life in self.lives.items()
            if life.state is JobState.RUNNING and life.is_lost
        }
        assert reported <= {job_id for job_id, life in lost.items() if not life.is_cancelled}
        for life in lost.values():
            if life.is_cancelled:
                life.end()

    async def requeue(self) -> None:
        await self._requeue(is_returned=False)

    async def return_(self) -> None:
        await self._requeue(is_returned=True)

    async def _requeue(self, *, is_returned: bool) -> None:
        rest = self.some_rest()
        life = self.lives[rest.id]
        attempt = max(life.attempt + self.rng.choice([-1, 0, 0, 0, 1]), 1)
        result = await self.queue.requeue(rest, attempt, is_returned=is_returned)
        assert result is _expected(life, attempt, is_returned=is_returned)
        if result is RequeueResult.REQUEUED:
            life.wait_again(rest.resumption)

    async def revive(self) -> None:
        rest = self.some_rest()
        life = self.lives[rest.id]
        attempt = max(life.attempt + self.rng.choice([-1, 0, 0, 2]), 0)
        over = await self.queue.revive(rest, weight=1.0, attempt=attempt)
        known = 0 if life.state is JobState.ABSENT else life.attempt
        assert over == max(known, attempt)
        life.attempt = over
        life.is_cancelled = life.is_settled = life.is_lost = False
        life.wait_again(rest.resumption)

    async def forget(self) -> None:
        job_id = self.some_job()
        life = self.lives[job_id]
        await self.queue.forget([job_id])
        if life.state is JobState.ENDED:
            life.state = JobState.ABSENT
        else:
            life.is_settled = True


def _expected(life: Life, attempt: int, *, is_returned: bool) -> RequeueResult:
    if life.state is JobState.ABSENT:
        return RequeueResult.UNKNOWN
    if life.state is JobState.ENDED or life.is_cancelled:
        return RequeueResult.ENDED
    if life.attempt < attempt:
        return RequeueResult.UNKNOWN
    if life.state is JobState.WAITING or life.attempt > attempt:
        return RequeueResult.REQUEUED_BEFORE
    return RequeueResult.REQUEUED if is_returned or life.is_lost else RequeueResult.HELD


@histories(6)
async def test_receipts_equal_the_model_on_a_random_history(any_redis: "Redis", seed: int) -> None:
    rng = random.Random(seed)
    history = History(JobQueue(any_redis, MODEL), rng)
    await history.enqueue()
    seen: set[JobState] = set()
    for _ in range(300):
        (action,) = rng.choices(list(ACTIONS), list(ACTIONS.values()))
        await getattr(history, action)()
        lives = history.lives
        receipts = await history.queue.receipts(list(lives))
        assert dict(zip(lives, receipts, strict=True)) == {
            job_id: life.receipt for job_id, life in lives.items()
        }
        seen |= {receipt.state for receipt in receipts}
    assert seen == set(JobState)
    await _check_what_is_left(any_redis, history)


async def _check_what_is_left(redis: "Redis", history: History) -> None:
    """Only waiting, running and ended jobs use memory, and all of it expires."""
    ids: dict[JobState, set[str]] = {state: set() for state in JobState}
    for job_id, life in history.lives.items():
        ids[life.state].add(job_id)
    leases = {text(job_id) for job_id in await redis.zrange(keys.leases(MODEL), 0, -1)}
    queues = [await redis.zrange(keys.queue(MODEL, tenant), 0, -1) for tenant in TENANTS]
    assert leases == ids[JobState.RUNNING]
    assert {text(job_id) for queue in queues for job_id in queue} == ids[JobState.WAITING]
    assert (await history.queue.status()).waiting_jobs == len(ids[JobState.WAITING])
    for job_id, life in history.lives.items():
        has_expiry = await redis.pttl(keys.job(MODEL, job_id)) > 0
        assert has_expiry is (life.state is not JobState.ABSENT)
