"""Task runner: run jobs on one event loop in its own thread, while Celery's threads wait."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final

from redis.exceptions import RedisError

from contract import clock
from contract.tasks import end_task
from gateway.errors import StoreUnavailableError
from gateway.jobs import telemetry
from gateway.jobs.observing import Observer
from gateway.jobs.schedule import TASKS, Task
from gateway.jobs.services import Services, open_services
from gateway.settings import Settings
from gateway.store_errors import cause_of

GRACE_SECONDS: Final = 5.0
"""How long jobs may continue when the process is shutting down."""
RESPONSE_SECONDS: Final = 2.0
"""How long the loop may take to respond before the process counts as stuck."""
SUCCEEDED: Final = "succeeded"
FAILED: Final = "failed"

logger = logging.getLogger(__name__)


class Runner:
    """Runs each job at most once at a time in this process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, services: Services) -> None:
        self._loop = loop
        self._services = services
        self._running: dict[str, asyncio.Task[Any] | None] = {}
        self._failing: set[str] = set()
        for task in TASKS:
            for outcome in (SUCCEEDED, FAILED):
                telemetry.TASKS.labels(task.name, outcome)  # Exported even while it is 0.

    def run(self, task: Task) -> None:
        """Run a job and wait for its end, unless it is already running. Called from other threads.

        If Redis or the database is unavailable, it ends quietly. That is logged once until the job
        succeeds again.
        """
        future: Future[None] = asyncio.run_coroutine_threadsafe(self._run(task), self._loop)
        future.result()

    def stop_soon(self) -> None:
        """Cancel running jobs after the grace period. Called from other threads."""
        self._loop.call_soon_threadsafe(self._loop.call_later, GRACE_SECONDS, self._cancel_all)

    def is_responsive(self) -> bool:
        """Whether the loop responds. Called from other threads."""
        reply = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            reply.result(RESPONSE_SECONDS)
        except TimeoutError:
            return False
        return True

    async def _run(self, task: Task) -> None:
        if task.name in self._running:
            return
        self._running[task.name] = asyncio.current_task()
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
        else:
            self._failing.discard(task.name)
            outcome = SUCCEEDED
            telemetry.LAST_SUCCESS.labels(task.name).set(clock.now_ms() / 1000)
        finally:
            del self._running[task.name]
            telemetry.TASKS.labels(task.name, outcome).inc()
            telemetry.TASK_DURATION.labels(task.name).observe(time.perf_counter() - began)

    def _cancel_all(self) -> None:
        for task in self._running.values():
            if task is not None:
                task.cancel()


@contextmanager
def running(settings: Settings) -> Iterator[Runner]:
    """Start a loop with the services of jobs; stop both at the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="jobs", daemon=True)
    thread.start()
    opened = open_services(settings)
    try:
        services = asyncio.run_coroutine_threadsafe(opened.__aenter__(), loop).result()
        observer = Observer(services.redis, services.database)
        observing = asyncio.run_coroutine_threadsafe(_begin(observer), loop).result()
        try:
            yield Runner(loop, services)
        finally:
            asyncio.run_coroutine_threadsafe(end_task(observing), loop).result()
            asyncio.run_coroutine_threadsafe(opened.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _begin(observer: Observer) -> asyncio.Task[None]:
    observing = asyncio.create_task(observer.run())
    observing.add_done_callback(_log_bug)
    return observing


def _log_bug(observing: asyncio.Task[None]) -> None:
    if not observing.cancelled() and (error := observing.exception()) is not None:
        logger.error("the observer failed, gauges are no longer updated", exc_info=error)
