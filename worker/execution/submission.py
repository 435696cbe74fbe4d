"""Submission of claimed jobs to the engine, and abortion of the sequences of ended jobs."""

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from common.tasks import TaskSet
from contract.messages import ReturnReason
from contract.outcomes import FailureCode
from contract.queue import let_others_run
from worker.engine.base import (
    Engine,
    EngineDeadError,
    EngineRequest,
    InvalidRequestError,
    SequenceOutput,
)
from worker.execution.adapters import AdapterLoadError, Adapters
from worker.execution.jobs import RunningJobs
from worker.execution.running_job import RunningJob, Stage
from worker.queue.replies import ReplyWriter


class Suspects:
    """Jobs with which an engine has died, submitted to the engine one at a time.

    If two suspects were in an engine that dies, the cause would be ambiguous. A suspect that has
    received a token in this attempt is treated like any other job.
    """

    def __init__(self) -> None:
        self._waiting: deque[RunningJob] = deque()
        self._current: RunningJob | None = None
        """The suspect whose first token is pending."""

    @property
    def are_waiting(self) -> bool:
        """Whether suspects wait for another one's first token."""
        return bool(self._waiting)

    def add(self, generation: RunningJob) -> None:
        """Queue a suspect."""
        self._waiting.append(generation)

    def next(self) -> RunningJob | None:
        """Return the next suspect, or None if none may start yet."""
        current = self._current
        if current is not None and not (current.has_ended or current.has_progressed):
            return None
        self._current = None
        while self._waiting and self._current is None:
            generation = self._waiting.popleft()
            if not generation.has_ended:
                self._current = generation
        return self._current


@dataclass(eq=False)
class Submitter:
    """Keeps the sequences in the engine consistent with the running jobs.

    Args:
        tasks: Contains the tasks of submissions in the background.
    """

    _engine: Engine
    _jobs: RunningJobs
    _writer: ReplyWriter
    _adapters: Adapters
    _tasks: TaskSet

    def __post_init__(self) -> None:
        self._suspects = Suspects()

    @property
    def has_work(self) -> bool:
        """Whether `apply_ends` may have work to do."""
        return bool(self._jobs.to_abort) or self._suspects.are_waiting

    async def submit(self, generations: list[RunningJob]) -> None:
        """Submit running jobs: suspects one at a time, and slow submissions in the background."""
        for generation in generations:
            if generation.job.is_suspect:
                self._suspects.add(generation)
            elif generation.is_slow_to_submit or not self._adapters.is_loaded(generation.job):
                # Preprocessing images, compiling a grammar or loading an adapter must not delay
                # other jobs.
                self._tasks.start(self._submit_alone(generation))
            elif not generation.has_ended:
                await self._submit(generation)
                await let_others_run(generation.job)
        await self.apply_ends()

    async def submit_again(self, generations: list[RunningJob]) -> None:
        """Submit sequences of jobs that return to the engine."""
        for generation in generations:
            if generation.is_slow_to_submit:
                self._tasks.start(self._submit_alone(generation))
            else:
                await self._submit(generation)

    async def apply_ends(self) -> None:
        """Submit the next suspect if it may start, and abort the sequences of ended jobs."""
        suspect = self._suspects.next()
        if suspect is not None:
            self._tasks.start(self._submit_alone(suspect))
        to_abort, self._jobs.to_abort = self._jobs.to_abort, []
        if to_abort:
            try:
                await self._engine.abort(to_abort)
            except EngineDeadError:
                return  # The step loop raises the same error.
            except Exception:
                self._jobs.to_abort += to_abort
                raise

    async def _submit(self, generation: RunningJob) -> None:
        """Submit a job, which alone fails if that is impossible. Raises EngineDeadError."""
        jobs, requests = self._jobs, list[EngineRequest]()
        try:
            is_loaded = generation.job.adapter is None or generation.adapter is not None
            if not is_loaded and not await self._load_adapter(generation):
                return
            requests = generation.requests()
            jobs.by_sequence.update((request.id, generation) for request in requests)
            await self._engine.submit(requests)
            generation.advance(Stage.SUBMITTED)
            generation.release_media()
        except InvalidRequestError as error:
            if not generation.has_ended:
                code = FailureCode.INVALID_REQUEST
                jobs.fail(generation, code, str(error), param=error.param, excess=error.excess)
        except EngineDeadError:
            raise
        except Exception:  # One job must not end all jobs.
            jobs.fail_broken(generation, "The engine could not accept the job.")
        # Some ended or were parked when the engine did not have them yet.
        jobs.to_abort += [each.id for each in requests if each.id not in jobs.by_sequence]

    async def _load_adapter(self, generation: RunningJob) -> bool:
        """Load the adapter of a job. Return False if the job has ended."""
        try:
            generation.adapter = await self._adapters.load(generation)
        except AdapterLoadError as error:
            if not generation.has_ended and error.is_permanent:
                self._jobs.fail(generation, FailureCode.ADAPTER_FAILED, str(error))
            elif not generation.has_ended:
                self._jobs.return_job(generation, ReturnReason.ADAPTER_FAILED)
        return not generation.has_ended

    async def _submit_alone(self, generation: RunningJob) -> None:
        if not generation.has_ended:
            # The step loop raises the same error and ends all jobs.
            with suppress(EngineDeadError):
                await self._submit(generation)
        await self.apply_ends()
        self._writer.flush()


MOST_OUTPUTS_PER_CALL = 32


@dataclass(eq=False)
class ParserThread:
    """Parses the backlogs of jobs, each in order.

    Args:
        tasks: Contains a task for each job that has a backlog.
    """

    _jobs: RunningJobs
    _submitter: Submitter
    _writer: ReplyWriter
    _tasks: TaskSet

    def __post_init__(self) -> None:
        # One thread: more would only take turns with each other and leave the event loop less time.
        self._thread = ThreadPoolExecutor(1, "parse-responses")

    def defer(self, output: SequenceOutput, generation: RunningJob) -> None:
        """Parse one step's output of a sequence later."""
        generation.defer(output)
        if output.end is not None:
            # The engine has no more steps for this sequence: its silence is not a stall.
            self._jobs.by_sequence.pop(output.sequence_id, None)
        if not generation.is_parsing:
            generation.is_parsing = True
            self._tasks.start(self._parse_backlog(generation))

    def close(self) -> None:
        """Stop parsing, without waiting for a call in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _parse_backlog(self, generation: RunningJob) -> None:
        backlog, loop = generation.backlog, asyncio.get_running_loop()
        while backlog and not generation.has_ended:
            outputs = [backlog.popleft() for _ in range(min(len(backlog), MOST_OUTPUTS_PER_CALL))]
            try:
                await loop.run_in_executor(self._thread, generation.parse, outputs)
                if not generation.has_ended:
                    self._send(outputs, generation)
            except Exception:  # One job's bytes must not end all jobs.
                self._jobs.fail_broken(generation)
            self._writer.flush()
            await self._submitter.apply_ends()
        generation.is_parsing = False

    def _send(self, outputs: list[SequenceOutput], generation: RunningJob) -> None:
        for output in {each.sequence_id: each for each in outputs}.values():
            if generation.send_parsed(output.sequence_id):
                self._jobs.end_sequence(output, generation)
