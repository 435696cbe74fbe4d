"""A queue that gets many times the work of its capacity, by a clock that the test sets.

The test simulates clients and worker, so that the pace is the same on every machine.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from redis.asyncio import Redis

from contract.queue import EnqueueReport, EnqueueResult, JobQueue, LeaseReport, Room
from gateway.completions.queue.dispatcher import SHORTEST_RETRY_SECONDS, UNKNOWN_RETRY_SECONDS
from tests.contract.test_queue import LEASE_MS, MODEL, admit, job
from tests.gateway.limits.building import NOON, TestClock

SEQUENCES, SECONDS_OF_JOB = 4, 0.6
MOST_OF_TENANT = 8
CAPACITY = SEQUENCES + MOST_OF_TENANT
PATIENCE_SECONDS = 3.0
PRESSING = 60
"""Clients that retry a second after each refusal."""
KNOWN_AFTER_SECONDS = 10.0
"""The pace of the queue, which counts once it was measured for five seconds."""
COUNTED = 500
"""Refusals."""


@dataclass
class Play:
    """Events by their second, in order."""

    queue: JobQueue
    clock: TestClock
    limits: dict[str, float]
    now: float = 0.0
    waiting: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    """The callback at the end of each waiting job."""
    _events: list[tuple[float, int, Callable[[], Awaitable[None]]]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _running: int = 0

    def at(self, second: float, event: Callable[[], Awaitable[None]]) -> None:
        """Schedule an event."""
        heapq.heappush(self._events, (second, next(self._numbers), event))

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Run the events in order."""
        while not is_over() and self._events:
            self.now, _, event = heapq.heappop(self._events)
            await self.clock.set(NOON + round(self.now * 1000))
            await event()

    async def ask(self, then: Callable[[], Awaitable[None]]) -> tuple[str, EnqueueReport]:
        """Enqueue a job if there is room; `then` follows the job's end."""
        job_id = f"job-{next(self._numbers)}"
        report = await admit(self.queue, job(job_id), **self.limits)  # type: ignore[arg-type]
        if report.result is EnqueueResult.ENQUEUED:
            self.waiting[job_id] = then
            await self._claim()
        return job_id, report

    async def _claim(self) -> None:
        room = Room(10**9, SEQUENCES - self._running, SEQUENCES, empty=not self._running)
        result = await self.queue.claim("w1", room, most_jobs=SEQUENCES, lease_ms=LEASE_MS)
        for claim in result.claims:
            self._running += 1
            then = self.waiting.pop(claim.job.id)

            async def end(
                job_id: str = claim.job.id, then: Callable[[], Awaitable[None]] = then
            ) -> None:
                self._running -= 1
                assert await self.queue.finish("w1", LeaseReport(job_id, 1, 60))
                await self._claim()
                await then()

            self.at(self.now + SECONDS_OF_JOB, end)


@pytest.fixture
def queue(any_redis: "Redis") -> JobQueue:
    """An empty queue."""
    return JobQueue(any_redis, MODEL)


@pytest.mark.parametrize("times", [5, 10])
async def test_client_that_retries_at_its_retry_time_is_admitted_soon(
    clock: TestClock, queue: JobQueue, times: int
) -> None:
    play = Play(queue, clock, {"most_waiting": 16, "most_waiting_of_tenant": MOST_OF_TENANT})
    pauses: list[list[float]] = []
    """Seconds after which each client was to retry, for each of its refusals."""
    served = 0

    async def count() -> None:
        nonlocal served
        served += 1

    def insist(mine: list[float]) -> Callable[[], Awaitable[None]]:
        async def ask() -> None:
            _, report = await play.ask(count)
            assert report.waiting_jobs <= MOST_OF_TENANT
            if report.result is not EnqueueResult.ENQUEUED:
                assert report.result is EnqueueResult.TENANT_FULL
                seconds = report.retry_after_seconds or UNKNOWN_RETRY_SECONDS
                mine.append(max(seconds, SHORTEST_RETRY_SECONDS))
                play.at(play.now + mine[-1], ask)

        return ask

    # A backlog that is long enough to measure the pace of the queue.
    for _ in range(CAPACITY):
        play.at(0.0, insist([]))
    await play.run(lambda: served == CAPACITY)
    began, served = play.now, 0
    for _ in range(times * CAPACITY):
        pauses.append([])
        play.at(began, insist(pauses[-1]))
    await play.run(lambda: served == len(pauses))
    assert served == len(pauses)
    took = play.now - began
    refused = [each for each in pauses if each]
    assert len(refused) == (times - 1) * CAPACITY
    # Their pauses spread them over the time of the whole backlog.
    assert max(each[0] for each in refused) > took / 2
    returns = Counter(map(len, refused))
    assert returns[1] >= 0.9 * len(refused), returns
    assert max(returns) <= 2, returns


async def test_request_that_would_time_out_in_the_queue_is_refused(
    clock: TestClock, queue: JobQueue
) -> None:
    """No request waits for the whole queue timeout only to be refused then."""
    play = Play(queue, clock, {"longest_wait_seconds": PATIENCE_SECONDS})
    refusals = Counter[str]()

    async def refuse(why: str) -> None:
        refusals[why] += 1
        play.at(play.now + 1, press)

    async def press() -> None:
        job_id, report = await play.ask(press)
        if report.result is not EnqueueResult.ENQUEUED:
            assert report.result is EnqueueResult.TOO_LATE
            await refuse("would wait too long")
            return

        async def give_up() -> None:
            if play.waiting.pop(job_id, None):
                assert await queue.cancel(job_id, "a")
                await refuse("waited too long")

        play.at(play.now + PATIENCE_SECONDS, give_up)

    for _ in range(PRESSING):
        play.at(0.0, press)
    # At first no pace has been measured.
    await play.run(lambda: play.now >= KNOWN_AFTER_SECONDS)
    refusals.clear()
    await play.run(lambda: refusals.total() == COUNTED)
    assert refusals["waited too long"] <= 0.1 * COUNTED, refusals
