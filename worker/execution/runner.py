"""The run of one engine: claim jobs, step the engine, and end jobs that must not run any longer.

Every loop blocks on an event (a doorbell list, a control list, the engine's next step), so an idle
worker costs nothing. Timeouts are a safety net for lost events.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from common import clock
from common.tasks import TaskSet, end_task
from contract import keys
from contract.affinity import class_digest
from contract.messages import ReturnReason
from contract.outcomes import FailureCode
from worker.adapters.files import AdapterFiles
from worker.engine.base import Engine, EngineDeadError
from worker.execution import tracing
from worker.execution.adapters import Adapters
from worker.execution.canary import Canary
from worker.execution.claims import Claimer
from worker.execution.jobs import DEADLINE_MESSAGE, RunningJobs
from worker.execution.preemption import Preemption
from worker.execution.running_job import RunningJob
from worker.execution.steps import Pace, StepLoop
from worker.execution.submission import ParserThread, Submitter
from worker.queue.link import GONE_SECONDS, GRACE_SECONDS, Link
from worker.retries import repeat

_log = logging.getLogger(__name__)

_CONTROL_TIMEOUT_SECONDS = 3
_RENEWALS_PER_LEASE = 3
_CHECK_SECONDS = 1.0


@dataclass(eq=False)
class Watcher:
    """Ends jobs that must not run any longer: cancelled or late ones, those with lost leases, and
    those of dead gateways. Each method does one round, to be repeated.
    """

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
        """Drop the jobs of gateways with late frames when too many deltas are unwritten."""
        writer, jobs = self._link.writer, self._jobs
        await writer.overflowed.wait()
        writer.overflowed.clear()
        generations = [each for each in jobs.by_id.values() if each.job.gateway in writer.late]
        if not generations:
            return
        _log.error("Redis was unavailable for too long: returning %d jobs", len(generations))
        for gateway in {generation.job.gateway for generation in generations}:
            outbox = writer.outbox(gateway)
            outbox.drop({each.job.handle for each in generations if each.outbox is outbox})
        for generation in generations:
            jobs.drop_unsent(generation)

    async def check_deadlines(self) -> None:
        """End the jobs whose deadlines have passed."""
        await asyncio.sleep(_CHECK_SECONDS)
        now = clock.now_ms()
        for generation in list(self._jobs.by_id.values()):
            if generation.job.deadline_ms <= now:
                self._jobs.fail(generation, FailureCode.DEADLINE_EXCEEDED, DEADLINE_MESSAGE)
        self._link.writer.flush()
        await self._submitter.apply_ends()

    async def check_gateways(self) -> None:
        """End the jobs whose gateways are dead."""
        await asyncio.sleep(_CHECK_SECONDS)
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


_RETURN_SECONDS = 5.0
_ABORT_SECONDS = 1.0
_MOST_BUGS = 5
_BUGS_SECONDS = 60.0
"""The run ends with the last of `_MOST_BUGS` bugs in so many seconds."""
_PUBLISH_SECONDS = 0.1
"""Time for which Redis may lag behind what the engine has cached."""


@dataclass(eq=False)
class Runner:
    """Runs jobs of one model on one engine."""

    link: Link
    engine: Engine
    _: KW_ONLY
    gather_seconds: float
    stall_seconds: float
    preempted_share: float = 1.0
    affinity_seconds: float = 0.0
    adapter_files: AdapterFiles | None = None
    adapter_load_units: float = 0.0
    on_adapters_changed: Callable[[list[str]], None] = lambda _: None
    start_units: float = 0.0
    canary: Canary | None = None

    def __post_init__(self) -> None:
        link, engine = self.link, self.engine
        self._tasks = TaskSet()
        self._jobs = jobs = RunningJobs(link.leases)
        self._adapters = Adapters(
            engine,
            jobs,
            self.adapter_files,
            link.held,
            self._charge_load,
            self.on_adapters_changed,
        )
        self._submitter = submitter = Submitter(
            engine, jobs, link.writer, self._adapters, self._tasks
        )
        self._parser_thread = ParserThread(jobs, submitter, link.writer, self._tasks)
        preemption = Preemption(engine, jobs, share=self.preempted_share)
        self._claimer = Claimer(
            link,
            engine,
            jobs,
            submitter,
            self._adapters,
            preemption,
            self.affinity_seconds,
            self.start_units,
        )
        self._watcher = Watcher(link, jobs, submitter, self._claimer.wait_claimed)
        self._step_loop = StepLoop(
            engine, jobs, submitter, self._parser_thread, link.writer, Pace(self.gather_seconds)
        )
        if self.canary is not None:
            self.canary.attach(engine, jobs)
        self._stopped = asyncio.Event()
        self._bugs: deque[float] = deque(maxlen=_MOST_BUGS)
        """`time.monotonic` times of the last bugs in loops."""

    async def run(self) -> None:
        """Run jobs until stopped or until the engine dies, then return the remaining jobs.

        Raises EngineDeadError, also if the engine hangs. Raises other errors if loops fail too
        often.
        """
        watcher = self._watcher
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "step the engine": self._step_loop.step,
            "watch for stalls": partial(self._step_loop.watch_stalls, self.stall_seconds),
            "extend leases": watcher.extend_leases,
            "check deadlines": watcher.check_deadlines,
            "check gateways": watcher.check_gateways,
            "receive cancellations": watcher.watch_cancellations,
            "claim jobs": self._claimer.claim,
            "drop jobs": watcher.watch_overflow,
            "publish what is cached": self._publish_cache,
        }
        if self.canary is not None:
            loops["check the engine's results"] = self.canary.watch
        tasks = [
            asyncio.create_task(repeat(name, action, on_bug=self._on_bug))
            for name, action in loops.items()
        ]
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            errors = [error for task in done if (error := task.exception()) is not None]
            death = next((each for each in errors if isinstance(each, EngineDeadError)), None)
            await self._return_jobs(is_engine_dead=death is not None)
            if errors:
                raise death or errors[0]
        finally:
            await end_task(*tasks, stopped)
            await self._claimer.aclose()
            await self._tasks.cancel()
            await self._adapters.aclose()
            self._parser_thread.close()
            self.link.held.clear()

    async def _publish_cache(self) -> None:
        await asyncio.sleep(_PUBLISH_SECONDS)
        self.link.held.keep(class_digest(self._jobs.class_of(self.engine)))
        await self.engine.read_cache(self.link.held)
        # A worker that stops needs no jobs.
        if not self._claimer.is_stopping:
            await self.link.held.publish()

    async def sleep(self) -> None:
        """Unload all adapters and put the engine to sleep, after `run`. Raises EngineDeadError."""
        await self._adapters.unload()
        await self.engine.sleep()

    async def drain(self, grace_seconds: float) -> None:
        """Stop claiming jobs, let running jobs finish, then stop."""
        self._claimer.stop()
        try:
            async with asyncio.timeout(grace_seconds):
                await self._claimer.wait_claimed()
                _log.info("Draining: %d jobs to finish", len(self._jobs.by_id))
                await self._jobs.idle.wait()
        except TimeoutError:
            _log.info("Grace period over: returning %d jobs", len(self._jobs.by_id))
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop immediately."""
        self._claimer.stop()
        self._stopped.set()

    async def _charge_load(self, generation: RunningJob, seconds: float) -> None:
        link, units = self.link, self.adapter_load_units * seconds
        try:
            await link.queue.charge(link.worker, generation.job.id, generation.attempt, units)
        except (RedisError, OSError) as error:
            _log.warning("Cannot charge the load of an adapter: %s", type(error).__name__)

    async def _on_bug(self, error: Exception) -> None:
        """Return all jobs, of which the failed round of a loop may have lost something.

        Raises the error if the engine is dead, or after too many bugs.
        """
        bugs, now = self._bugs, time.monotonic()
        bugs.append(now)
        is_often = len(bugs) == _MOST_BUGS and now - bugs[0] < _BUGS_SECONDS
        if is_often or isinstance(error, EngineDeadError):
            raise error
        self._jobs.return_all(ReturnReason.DRAINING)
        self.link.writer.flush()
        await self._submitter.apply_ends()

    async def _return_jobs(self, *, is_engine_dead: bool) -> None:
        self.stop()
        # Wait for a claim that is in progress, unless the engine blocks it for good.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._claimer.wait_claimed(), _RETURN_SECONDS)
        self._jobs.return_all(ReturnReason.ENGINE_DIED if is_engine_dead else ReturnReason.DRAINING)
        self.link.writer.flush()
        if not is_engine_dead:
            # Not `wait_for`, which would let the engine make another step first.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS):
                    await self._submitter.apply_ends()
        await self.link.writer.drain(_RETURN_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.link.leases.settled.wait(), _RETURN_SECONDS)
