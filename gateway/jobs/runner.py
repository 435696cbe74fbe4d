"""Task runner: jobs run side by side on one event loop, in its own thread beside Celery's."""

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from redis.exceptions import RedisError

from common import clock
from common.tasks import end_task
from gateway.jobs import telemetry
from gateway.jobs.observing import Observer
from gateway.jobs.schedule import TASKS, Task
from gateway.jobs.services import Services, open_services
from gateway.platform.settings import Settings
from gateway.platform.store_errors import cause_of
from gateway.records.errors import StoreUnavailableError

GRACE_SECONDS: Final = 5.0
"""How long jobs may continue when the process is shutting down."""
RESPONSE_SECONDS: Final = 2.0
"""How long the loop may take to respond before the process counts as stuck."""
BLOCKING_CALLS: Final = 64
"""Threads for files, object stores and name resolution: more than all jobs use at once."""
SUCCEEDED: Final = "succeeded"
FAILED: Final = "failed"

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Runner:
    """Runs each job at most once at a time in this process. Called from other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, services: Services) -> None:
        self._loop = loop
        self._services = services
        self._running: dict[str, asyncio.Task[None]] = {}
        self._failing: set[str] = set()
        for task in TASKS:
            for outcome in (SUCCEEDED, FAILED):
                telemetry.TASKS.labels(task.name, outcome)  # Exported even while it is 0.

    def start(self, task: Task) -> None:
        """Start a job unless it is running, once the loop responds.

        If Redis or the database is unavailable, the job ends quietly. That is logged once until the
        job succeeds again.
        """
        self._call(self._start(task))

    def run(self, task: Task) -> None:
        """Start a job unless it is running, and wait for its end."""

        async def run() -> None:
            await asyncio.wait([await self._start(task)])

        self._call(run())

    def stop(self) -> None:
        """Wait for the ends of running jobs; cancel them after the grace period."""

        async def stop() -> None:
            if self._running:
                await asyncio.wait(self._running.values(), timeout=GRACE_SECONDS)
            await end_task(*self._running.values())

        self._call(stop())

    def is_responsive(self) -> bool:
        """Whether the loop responds."""
        reply = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            reply.result(RESPONSE_SECONDS)
        except TimeoutError:
            return False
        return True

    def _call(self, work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self, task: Task) -> asyncio.Task[None]:
        if task.name not in self._running:
            self._running[task.name] = asyncio.create_task(self._run(task))
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
        finally:
            del self._running[task.name]
            telemetry.TASKS.labels(task.name, outcome).inc()
            telemetry.TASK_DURATION.labels(task.name).observe(time.perf_counter() - began)


@contextmanager
def running(settings: Settings) -> Iterator[Runner]:
    """Start a loop with the services of jobs; stop both at the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="jobs", daemon=True)
    thread.start()
    opened = open_services(settings)

    def call(work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        services = call(opened.__aenter__())
        observing = call(_begin(Observer(services.redis, services.database)))
        try:
            yield Runner(loop, services)
        finally:
            call(end_task(observing))
            call(opened.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _begin(observer: Observer) -> asyncio.Task[None]:
    # Each item of a job may block a thread for as long as its store or name server takes.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(BLOCKING_CALLS))
    return asyncio.create_task(observer.run())
