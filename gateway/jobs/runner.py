"""Task runner: the jobs of a track run side by side on an event loop in a thread of its own."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any, Final, TypeVar

from redis.exceptions import RedisError

from common import clock
from common.tasks import end_task
from contract import keys
from gateway.jobs import telemetry
from gateway.jobs.deployment_gauges import Observer
from gateway.jobs.schedule import TASKS, JobServices, Task, Track
from gateway.platform.settings import Settings
from gateway.platform.store_errors import cause_of
from gateway.records.errors import StoreUnavailableError

GRACE_SECONDS: Final = 5.0
"""How long jobs may continue when the process is shutting down."""
RESPONSE_SECONDS: Final = 2.0
"""How long the loop may take to respond before the process counts as stuck."""
BLOCKING_CALLS: Final = 64
"""Threads of a track for files, stores and name resolution: more than its jobs use at once."""
SQL_CONNECTIONS: Final = {Track.LEDGER: 8, Track.LONG: 24}
"""More than a track has jobs, so that none waits for the statements of others."""
LISTED_SECONDS: Final = 5.0
"""Interval at which the successes of a job are written for operators: some jobs run each second."""
SUCCEEDED: Final = "succeeded"
FAILED: Final = "failed"

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class TrackRunner:
    """Runs each job of a track at most once at a time. Called from other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, services: JobServices) -> None:
        self._loop = loop
        self._services = services
        self._running: dict[str, asyncio.Task[None]] = {}
        self._failing: set[str] = set()
        self._listed_at = dict.fromkeys((task.name for task in TASKS), -math.inf)
        """When the successes in `keys.JOBS_DONE` were written, in `time.monotonic`."""

    def start(self, task: Task) -> None:
        """Let a job start unless it is running. Does not wait, not even for a loop that is stuck.

        If Redis or the database is unavailable, the job ends quietly. That is logged once until the
        job succeeds again.
        """
        self._loop.call_soon_threadsafe(self._start, task)

    def run(self, task: Task) -> None:
        """Start a job unless it is running, and wait for its end."""

        async def run() -> None:
            await asyncio.wait([self._start(task)])

        self._submit(run()).result()

    def stop(self) -> Future[None]:
        """Wait for the ends of running jobs; cancel them after the grace period."""

        async def stop() -> None:
            if self._running:
                await asyncio.wait(self._running.values(), timeout=GRACE_SECONDS)
            await end_task(*self._running.values())

        return self._submit(stop())

    def is_responsive(self) -> bool:
        """Whether the loop responds."""
        return not wait([self._submit(asyncio.sleep(0))], RESPONSE_SECONDS).not_done

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _start(self, task: Task) -> asyncio.Task[None]:
        if task.name not in self._running:
            self._running[task.name] = self._loop.create_task(self._run(task))
        return self._running[task.name]

    async def _run(self, task: Task) -> None:
        began = time.perf_counter()
        outcome = FAILED
        try:
            async with asyncio.timeout(task.limit_seconds):
                await task.run(self._services)
        except (RedisError, OSError, StoreUnavailableError, TimeoutError) as error:
            if task.name not in self._failing:
                reason = str(error) if isinstance(error, StoreUnavailableError) else cause_of(error)
                store = "Redis: " if isinstance(error, RedisError) else ""
                logger.warning(
                    "background job %s failed and is retried: %s%s", task.name, store, reason
                )
            self._failing.add(task.name)
        except asyncio.CancelledError:
            logger.warning("background job %s was cancelled", task.name)
        except Exception:
            logger.exception("background job %s failed", task.name)
        else:
            self._failing.discard(task.name)
            outcome = SUCCEEDED
            telemetry.LAST_SUCCESS.labels(task.name).set(clock.now_ms() / 1000)
            with suppress(RedisError, OSError):
                await self._list_success(task.name)
        finally:
            del self._running[task.name]
            telemetry.TASKS.labels(task.name, outcome).inc()
            telemetry.TASK_DURATION.labels(task.name).observe(time.perf_counter() - began)

    async def _list_success(self, name: str) -> None:
        now = time.monotonic()
        if now >= self._listed_at[name] + LISTED_SECONDS:
            listed: Any = self._services.redis.hset(keys.JOBS_DONE, name, str(clock.now_ms()))
            await listed
            self._listed_at[name] = now


def stop_all(runners: Iterable[TrackRunner]) -> None:
    """Wait for the ends of running jobs for the grace period. A track that is stuck is left."""
    wait([runner.stop() for runner in runners], GRACE_SECONDS + RESPONSE_SECONDS)


@contextmanager
def running(settings: Settings, track: Track) -> Iterator[TrackRunner]:
    """Start a loop with the services of a track; stop both at the end of the block."""
    for task in TASKS:
        for outcome in (SUCCEEDED, FAILED):
            telemetry.TASKS.labels(task.name, outcome)  # Exported even while it is 0.
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=track, daemon=True)
    thread.start()
    opened = _opened(settings, track)

    def call(work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        services = call(opened.__aenter__())
        try:
            yield TrackRunner(loop, services)
        finally:
            call(opened.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def _opened(settings: Settings, track: Track) -> AsyncIterator[JobServices]:
    # Each item of a job may block a thread for as long as its store or name server takes.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(BLOCKING_CALLS))
    async with aclosing(JobServices(settings, most_connections=SQL_CONNECTIONS[track])) as services:
        observer = Observer(services.redis, services.database)
        # The gauges are of the deployment, so one track is enough.
        observing = [asyncio.create_task(observer.run())] if track is Track.LEDGER else []
        try:
            yield services
        finally:
            await end_task(*observing)
