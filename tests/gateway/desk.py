"""A gateway's dispatcher without HTTP, and what its requests receive."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from common import clock
from contract import keys
from contract.messages import Delta, GenerationJob, JobFailed
from contract.outcomes import FailureCode
from contract.prompts import packed
from contract.queue import JobClaim, JobQueue
from contract.sampling import SamplingSpec
from gateway.completions.queue import dispatcher as dispatching
from gateway.completions.queue import lost_jobs, presence
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.queue.generation import Generation
from gateway.completions.queue.ticket import Ticket
from gateway.models.catalogue import Catalogue
from gateway.platform.redis_client import MeasuredConnection
from tests.support.fake_worker import FakeWorker
from tests.support.patience import PATIENCE_SECONDS

MODEL = "m"
GATEWAY = "gw-1"


class Desk:
    """One gateway's dispatcher, and requests made through it."""

    def __init__(self, redis: "Redis", gateway: str, **settings: Any) -> None:
        self.catalogue = Catalogue(MeasuredConnection(redis))
        known: dict[str, Any] = {
            "max_waiting_jobs": 100,
            "max_waiting_jobs_of_tenant": 50,
            "queue_timeout_seconds": 60.0,
            "resume_after_seconds": 0.0,
        }
        self.dispatcher = Dispatcher(
            gateway=gateway, client=redis, catalogue=self.catalogue, **(known | settings)
        )
        self._redis = redis
        self._task: asyncio.Task[None] | None = None
        self._checks = 0
        self._check = self.dispatcher._lost_jobs.check_silent
        self.dispatcher._lost_jobs.check_silent = self._count_check  # type: ignore[method-assign]

    async def _count_check(self) -> None:
        await self._check()
        self._checks += 1

    async def catch_up(self) -> None:
        """Wait until the dispatcher has read every frame sent to its gateway so far."""
        name = keys.replies(self.dispatcher.gateway)
        last: bytes = (await self._redis.xinfo_stream(name))["last-generated-id"]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.dispatcher.reader.last_entry != last:
                await asyncio.sleep(0.002)

    async def look_after_jobs(self) -> None:
        """Wait until the dispatcher has once more looked for silent jobs."""
        checks = self._checks + 2
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self._checks < checks:
                await asyncio.sleep(0.002)

    async def open(self) -> None:
        """Start the loops as the process does."""
        await self.dispatcher.beat()
        await self.catalogue.refresh()
        self._task = asyncio.create_task(self.dispatcher.run())

    async def close(self) -> None:
        """Stop the loops, which must still run."""
        if self._task is not None:
            assert not self._task.done(), "the dispatcher's loops have ended"
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def request(
        self, prompts: int = 1, *, tenant: str = "a", max_unread_bytes: int = 1 << 20, **fields: Any
    ) -> Generation:
        """Enqueue a request; the fields are those of its jobs."""
        generation = Generation(max_unread_bytes=max_unread_bytes)
        jobs = [self.job(tenant, **fields) for _ in range(prompts)]
        await self.dispatcher.enqueue(MODEL, jobs, weight=1.0, generation=generation)
        return generation

    def job(
        self, tenant: str = "a", *, deadline_seconds: float = 60.0, **fields: Any
    ) -> GenerationJob:
        """Make a job of this gateway."""
        handle = self.dispatcher.next_handle()
        known: dict[str, Any] = {
            "cache_salt": "salt",
            "prompt_token_ids": packed([1, 2, 3]),
            "max_tokens": 16,
            "sampling": SamplingSpec(seed=1),
        }
        return GenerationJob(
            id=f"{self.dispatcher.gateway}-{handle}",
            handle=handle,
            gateway=self.dispatcher.gateway,
            tenant=tenant,
            deadline_ms=clock.now_ms() + int(deadline_seconds * 1000),
            **(known | fields),
        )


async def begun(desk: Desk, worker: FakeWorker, **fields: Any) -> tuple[Generation, JobClaim]:
    """Make a request whose worker has sent the first text, `a`."""
    generation = await desk.request(**fields)
    claim = await worker.claim_one()
    await worker.say(claim, "a")
    return generation, claim


async def cancel_unreachable(
    desk: Desk, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancel a request while Redis cannot be reached."""
    failed = []

    async def unreachable(*_arguments: Any) -> bool:
        failed.append(True)
        raise RedisConnectionError

    with monkeypatch.context() as patched:
        patched.setattr(JobQueue, "cancel", unreachable)
        await desk.dispatcher.cancel(generation)
    assert failed


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make dispatchers check their jobs often."""
    monkeypatch.setattr(dispatching, "RECLAIM_SECONDS", 0.05)
    monkeypatch.setattr(dispatching, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(lost_jobs, "SILENCE_SECONDS", 0.2)
    # The test decides when a gateway is dead: a stalled test does not end its heartbeat.
    monkeypatch.setattr(presence, "ALIVE_SECONDS", 600)


def ticket_of(desk: Desk, generation: Generation) -> Ticket:
    """Return the ticket of a request with one job in flight."""
    (job,) = generation.jobs
    return desk.dispatcher._jobs.tickets[job.handle]


async def take(generation: Generation, number: int) -> list[Any]:
    """Wait for a number of messages."""
    taken: list[Any] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(taken) < number:
            taken += [message for _, message in await generation.replies()]
    return taken


def texts(replies: list[Any]) -> list[str]:
    """Return the texts among some messages."""
    return [message.text for message in replies if isinstance(message, Delta)]


async def failure(generation: Generation) -> FailureCode:
    """Wait for the failure that ends a request's next message."""
    (message,) = await take(generation, 1)
    assert isinstance(message, JobFailed)
    return message.code
