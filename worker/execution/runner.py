"""The run of one engine: claim jobs, step the engine, and end jobs that must not run any longer.

Every loop blocks on an event (a doorbell list, a control list, the engine's next step), so an idle
worker costs nothing. Timeouts are a safety net for lost events.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from redis.exceptions import RedisError

from contract.messages import ReturnReason
from contract.tasks import TaskSet, end_task
from worker.adapters.files import AdapterFiles
from worker.engine.base import Engine
from worker.execution.adapters import Adapters
from worker.execution.claims import Claimer
from worker.execution.generation import Generation
from worker.execution.jobs import RunningJobs
from worker.execution.parsing import ParserThread
from worker.execution.preemption import Preemption
from worker.execution.steps import StepLoop
from worker.execution.submission import Submitter
from worker.execution.watching import Watcher
from worker.queue.link import Link
from worker.retries import repeat

_log = logging.getLogger(__name__)

_RETURN_SECONDS = 5.0
_ABORT_SECONDS = 1.0
_PUBLISH_SECONDS = 0.1
"""Time for which Redis may lag behind what the engine has cached."""


class Runner:
    """Runs jobs of one model on one engine."""

    def __init__(
        self,
        link: Link,
        engine: Engine,
        *,
        gather_seconds: float,
        stall_seconds: float,
        preempted_share: float = 1.0,
        affinity_seconds: float = 0.0,
        adapter_files: AdapterFiles | None = None,
        adapter_load_units: float = 0.0,
        on_adapters_changed: Callable[[list[str]], None] = lambda _: None,
        start_units: float = 0.0,
    ) -> None:
        self._link = link
        self._engine = engine
        self._stall_seconds = stall_seconds
        self._tasks = TaskSet()
        self._jobs = jobs = RunningJobs(link.leases)
        self._adapter_load_units = adapter_load_units
        self._adapters = Adapters(
            engine,
            jobs,
            adapter_files,
            held=link.held,
            charge=self._charge_load,
            on_change=on_adapters_changed,
        )
        self._submitter = submitter = Submitter(
            engine, jobs, link.writer, adapters=self._adapters, tasks=self._tasks
        )
        self._parser_thread = ParserThread(jobs, submitter, link.writer, tasks=self._tasks)
        preemption = Preemption(engine, jobs, share=preempted_share)
        self._claimer = Claimer(
            link,
            engine,
            jobs,
            submitter,
            adapters=self._adapters,
            preemption=preemption,
            affinity_seconds=affinity_seconds,
            start_units=start_units,
        )
        self._watcher = Watcher(link, jobs, submitter, wait_claimed=self._claimer.wait_claimed)
        self._step_loop = StepLoop(
            engine,
            jobs,
            submitter,
            parser_thread=self._parser_thread,
            writer=link.writer,
            gather_seconds=gather_seconds,
        )
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Run jobs until stopped or until the engine dies, then return the remaining jobs.

        Raises EngineDeadError, also if the engine hangs.
        """
        watcher = self._watcher
        loops = (
            self._step_loop.run(),
            self._step_loop.watch_stalls(self._stall_seconds),
            repeat("extend leases", watcher.extend_leases),
            repeat("check gateways and deadlines", watcher.check_jobs),
            repeat("receive cancellations", watcher.watch_cancellations),
            repeat("claim jobs", self._claimer.claim),
            repeat("drop jobs", watcher.watch_overflow),
            repeat("publish what is cached", self._publish_cache),
        )
        tasks = [asyncio.create_task(loop) for loop in loops]
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            await self._return_jobs(is_engine_dead=done != {stopped})
            for task in done:
                task.result()
        finally:
            await end_task(*tasks, stopped)
            await self._claimer.aclose()
            await self._tasks.cancel()
            await self._adapters.aclose()
            self._parser_thread.close()
            self._link.held.clear()

    async def _publish_cache(self) -> None:
        await asyncio.sleep(_PUBLISH_SECONDS)
        await self._engine.read_cache(self._link.held)
        # A worker that stops needs no jobs.
        if not self._claimer.is_stopping:
            await self._link.held.publish()

    async def sleep(self) -> None:
        """Unload all adapters and put the engine to sleep, after `run`. Raises EngineDeadError."""
        await self._adapters.unload()
        await self._engine.sleep()

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
        self.stop()

    def stop(self) -> None:
        """Stop immediately."""
        self._claimer.stop()
        self._stopped.set()

    async def _charge_load(self, generation: Generation, seconds: float) -> None:
        link, units = self._link, self._adapter_load_units * seconds
        try:
            await link.queue.charge(link.worker, generation.job.id, generation.attempt, units)
        except (RedisError, OSError) as error:
            _log.warning("Cannot charge the load of an adapter: %s", type(error).__name__)

    async def _return_jobs(self, *, is_engine_dead: bool) -> None:
        self.stop()
        # Wait for a claim that is in progress, unless the engine blocks it for good.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._claimer.wait_claimed(), _RETURN_SECONDS)
        jobs = self._jobs
        for generation in list(jobs.by_id.values()):
            # A job that was not submitted to the engine did not cause its death.
            is_to_blame = is_engine_dead and any(
                map(jobs.by_sequence.get, generation.open_sequences)
            )
            reason = ReturnReason.ENGINE_DIED if is_to_blame else ReturnReason.DRAINING
            jobs.return_job(generation, reason)
        self._link.writer.flush()
        if not is_engine_dead:
            # Not `wait_for`, which would let the engine make another step first.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS):
                    await self._submitter.apply_ends()
        await self._link.writer.drain(_RETURN_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._link.leases.settled.wait(), _RETURN_SECONDS)
