"""Parsing of slow responses in another thread, so that they do not delay other jobs."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from common.tasks import TaskSet
from worker.engine.base import SequenceOutput
from worker.execution.generation import RunningJob
from worker.execution.jobs import RunningJobs
from worker.execution.submission import Submitter
from worker.queue.replies import ReplyWriter

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
