"""The step loop: the outputs of each engine step become replies to the gateways."""

import asyncio
import time
from dataclasses import dataclass

from contract.messages import GenerationJob, ReturnReason
from contract.outcomes import FailureCode
from worker import telemetry
from worker.engine.base import Engine, EngineDeadError, EngineStep, SequenceEnd, SequenceOutput
from worker.execution.jobs import RunningJobs
from worker.execution.running_job import RunningJob
from worker.execution.submission import ParserThread, Submitter
from worker.queue.replies import ReplyWriter

SECONDS_PER_SEQUENCE = 0.000625
"""Pause per running sequence: with few sequences, the text of every step is sent at once."""

MANY_OUTPUTS = 32
"""If a step has so many other outputs, its first tokens are sent before them, in their own frame. A
gateway passes them on before it decodes and writes the text of the others."""

_STALL_CHECK_SECONDS = 1.0


class Pace:
    """Decides for each engine step whether to send the collected text.

    A delta has a fixed cost whatever its length: its entry in a frame, a wake-up in the gateway,
    and a write to the client's socket. A worker with fast steps and many sequences therefore
    combines the text of several steps in one delta. First tokens and ends of sequences are sent
    immediately.
    """

    def __init__(self, longest_seconds: float) -> None:
        self._longest_seconds = longest_seconds
        self._sent_at = 0.0

    def is_due(self, now: float, sequences: int) -> bool:
        """Whether to send at `now` (monotonic seconds), with this many running sequences."""
        pause = min(self._longest_seconds, sequences * SECONDS_PER_SEQUENCE)
        if now - self._sent_at < pause:
            return False
        self._sent_at = now
        return True


@dataclass(eq=False)
class StepLoop:
    """Steps the engine and distributes its outputs to the running jobs."""

    _engine: Engine
    _jobs: RunningJobs
    _submitter: Submitter
    _parser_thread: ParserThread
    _writer: ReplyWriter
    _pace: Pace
    _steps: int = 0

    async def step(self) -> None:
        """Wait for the engine's next step and send its outputs. Raises EngineDeadError."""
        step = await self._engine.step()
        self._steps += 1
        self._apply(step)
        self._writer.flush()
        if self._submitter.has_work:
            await self._submitter.apply_ends()

    async def watch_stalls(self, stall_seconds: float) -> None:
        """Raise EngineDeadError if the engine has sequences but makes no step for this long."""
        # Count checks, not time: a suspended worker process has received no steps either.
        pause = min(_STALL_CHECK_SECONDS, stall_seconds / 2)
        checks, silent_checks = stall_seconds / pause, 0
        while silent_checks < checks:
            steps = self._steps
            await asyncio.sleep(pause)
            is_running = bool(self._jobs.by_sequence) or self._jobs.probe is not None
            is_silent = self._steps == steps and is_running
            silent_checks = silent_checks + 1 if is_silent else 0
        raise EngineDeadError(f"no step for {stall_seconds:g} s")

    def _apply(self, step: EngineStep) -> None:
        # First: the engine's counts still include sequences that this step ends at a stop string.
        telemetry.note_step(step)
        by_sequence = self._jobs.by_sequence
        is_due = self._pace.is_due(time.monotonic(), len(by_sequence))
        beginning, others = list[SequenceOutput](), list[SequenceOutput]()
        for output in step.outputs:
            generation = by_sequence.get(output.sequence_id)
            begins = generation is not None and generation.first_token_at is None
            (beginning if begins else others).append(output)
        self._distribute(beginning, is_due=is_due)
        if beginning and len(others) >= MANY_OUTPUTS:
            self._writer.end_frames()
        self._distribute(others, is_due=is_due)
        self._jobs.note_change()
        if step.stats is not None:
            self._jobs.kv_usage = step.stats.kv_usage

    def _distribute(self, outputs: list[SequenceOutput], *, is_due: bool) -> None:
        """Give outputs to their jobs, unless these have ended."""
        for output in outputs:
            generation = self._jobs.by_sequence.get(output.sequence_id)
            if generation is not None:
                try:
                    self._receive(output, generation, is_due=is_due)
                except Exception:  # One job's bytes must not end all jobs.
                    self._jobs.fail_broken(generation)
            elif (probe := self._jobs.probe) is not None and output.sequence_id == probe.id:
                probe.outputs.put_nowait(output)

    def _receive(self, output: SequenceOutput, generation: RunningJob, *, is_due: bool) -> None:
        if output.end is not None:
            if output.end is SequenceEnd.ABORTED:
                self._jobs.return_job(generation, ReturnReason.DRAINING)
                return
            if output.end in (SequenceEnd.ERROR, SequenceEnd.STUCK):
                self._jobs.fail(generation, *_failure(generation.job, output.end))
                return
        if generation.is_slow_to_parse:
            self._parser_thread.defer(output, generation)
        elif generation.receive(output, is_due=is_due):
            self._jobs.end_sequence(output, generation)


def _failure(job: GenerationJob, end: SequenceEnd) -> tuple[FailureCode, str]:
    """Return the error of a job of which the engine ended a sequence."""
    names = [*["the grammar"] * bool(job.grammar), *job.sampling.bans]
    if end is SequenceEnd.STUCK:
        return FailureCode.INVALID_REQUEST, f"No next token was left by {' and '.join(names)}."
    if not job.grammar:
        return FailureCode.ENGINE_ERROR, "The engine gave up on this prompt."
    bans = " and ".join(job.sampling.bans) or "the forbidden tokens"
    message = f"The grammar became too complex, or it and {bans} left no next token."
    return FailureCode.INVALID_REQUEST, message
