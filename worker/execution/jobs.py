"""The jobs that run on one engine, and every way in which a job ends."""

import asyncio
import logging
from dataclasses import dataclass, field

from contract.affinity import INEXACT
from contract.messages import ContextExcess, JobFailed, ReturnReason, about
from contract.outcomes import FailureCode
from worker import telemetry
from worker.engine.base import Engine, SequenceOutput
from worker.execution import tracing
from worker.execution.running_job import RunningJob, Stage
from worker.execution.sequence import Sequence
from worker.execution.uses import Uses
from worker.queue.leases import Leases
from worker.queue.replies import UNDECODABLE_MESSAGE

_log = logging.getLogger(__name__)

DEADLINE_MESSAGE = "The request was not finished before its deadline."


@dataclass(eq=False)
class Probe:
    """A sequence in the engine that belongs to no job, and ends if a job arrives."""

    id: str
    outputs: "asyncio.Queue[SequenceOutput | None]" = field(default_factory=asyncio.Queue)
    """Its outputs; None when a job has arrived."""
    has_ended: bool = False


class RunningJobs:
    """The generations of one engine, from the claim of the job to its end.

    Each method that ends a job leaves its open sequences in `to_abort`. `Submitter.apply_ends`
    aborts them in the engine.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.by_id: dict[str, RunningJob] = {}
        self.batch: dict[str, RunningJob] = {}
        """The batch jobs among them by id, oldest first."""
        self.by_sequence: dict[str, RunningJob] = {}
        """The sequences in the engine that have not ended."""
        self.to_abort: list[str] = []
        self.probe: Probe | None = None
        self.is_exact = True
        """Whether the engine's last results were those of its exactness class."""
        self.kv_usage = 0.0
        """Fraction of the KV cache in use after the last engine step."""
        self.room_changed = asyncio.Event()
        """Set when a sequence or a job ends."""
        self.idle = asyncio.Event()
        """Set while no job runs."""
        self.idle.set()
        self._uses: Uses | None = None

    @property
    def uses(self) -> Uses:
        """What tenants use of the engine, counted once after each change."""
        if self._uses is None:
            self._uses = Uses(self.by_id.values())
        return self._uses

    def note_change(self) -> None:
        """Count the uses again: jobs have begun or ended sequences, or the engine made a step."""
        self._uses = None

    @property
    def parked(self) -> list[RunningJob]:
        """Jobs with sequences that wait for room in the engine, oldest first."""
        return [each for each in self.by_id.values() if each.parked]

    def class_of(self, engine: Engine) -> str:
        """Return the exactness class that the engine has now."""
        return engine.info.exactness.digest + ("" if self.is_exact else INEXACT)

    def add(self, generation: RunningJob) -> None:
        """Add a job that was claimed."""
        self.by_id[generation.job.id] = generation
        self.note_change()
        if self.probe is not None:
            self.to_abort.append(self.probe.id)
            self.probe.outputs.put_nowait(None)
            self.probe = None
        if generation.is_preemptible:
            self.batch[generation.job.id] = generation
            telemetry.BATCH_JOBS_RUNNING.set(len(self.batch))
        self.idle.clear()
        telemetry.JOBS_RUNNING.set(len(self.by_id))

    def end_sequence(self, output: SequenceOutput, generation: RunningJob) -> None:
        """Remove a sequence whose last output was sent, and its job if it was the last one."""
        self.by_sequence.pop(output.sequence_id, None)
        self.note_change()
        self.room_changed.set()
        if output.end is None:
            self.to_abort.append(output.sequence_id)
        if generation.is_done:
            self._leases.hold_until_written(generation.report)
            self._remove(generation, tracing.FINISHED)

    def fail(
        self,
        generation: RunningJob,
        code: FailureCode,
        message: str,
        *,
        param: str | None = None,
        excess: ContextExcess | None = None,
    ) -> None:
        """End a job with an error for the client."""
        handle, report = generation.job.handle, generation.report
        if excess is not None:
            param = "prompt" if generation.job.parsing is None else "messages"
        failed = JobFailed(handle, generation.attempt, code, message, param=param, excess=excess)
        generation.outbox.fail(failed, report)
        self._leases.hold_until_written(report)
        self._remove(generation, code.value)

    def fail_broken(self, generation: RunningJob, message: str = UNDECODABLE_MESSAGE) -> None:
        """End a job that raised the current exception, unless it has ended."""
        _log.exception("Job %s: %s", generation.job.id, message, extra=about(generation.job))
        if not generation.has_ended:
            self.fail(generation, FailureCode.ENGINE_ERROR, message)

    def park(self, generation: RunningJob, leaving: list[Sequence]) -> None:
        """Let some sequences of a job leave the engine, until they are seated again."""
        generation.park(leaving)
        self.note_change()
        for sequence in leaving:
            del self.by_sequence[sequence.id]
            self.to_abort.append(sequence.id)
        self.room_changed.set()

    def return_job(self, generation: RunningJob, reason: ReturnReason) -> None:
        """End a job here and return it to its gateway, which requeues it."""
        generation.return_job(reason)
        self._leases.hold_until_written(generation.report)
        self._remove(generation, tracing.RETURNED)

    def return_all(self, reason: ReturnReason) -> None:
        """Return all jobs. `ENGINE_DIED` blames only those that the engine had."""
        for generation in list(self.by_id.values()):
            is_to_blame = any(map(self.by_sequence.get, generation.open_sequences))
            try:
                self.return_job(generation, reason if is_to_blame else ReturnReason.DRAINING)
            except Exception:  # One job must not keep all others.
                self.fail_broken(generation)

    def drop(self, generation: RunningJob, outcome: str) -> None:
        """End a job without a reply; its receipt has the counts if this worker holds the lease."""
        self._remove(generation, outcome)
        self._leases.end([generation.report])

    def abandon(self, generation: RunningJob) -> None:
        """End a job whose gateway is dead. Another gateway takes over a background job."""
        if not generation.job.is_background:
            self.drop(generation, tracing.ABANDONED)
            return
        generation.send_pending()
        report = generation.report
        generation.outbox.release_lease(report)
        self._leases.hold_until_written(report)
        self._remove(generation, tracing.RETURNED)

    def drop_unsent(self, generation: RunningJob) -> None:
        """End a job whose pending replies were dropped, so that another worker claims it."""
        self._remove(generation, tracing.REPLIES_LOST)
        self._leases.release([generation.report])

    def _remove(self, generation: RunningJob, outcome: str) -> None:
        generation.advance(Stage.ENDED)
        del self.by_id[generation.job.id]
        self.note_change()
        if self.batch.pop(generation.job.id, None) is not None:
            telemetry.BATCH_JOBS_RUNNING.set(len(self.batch))
        for sequence in generation.sequences:
            if self.by_sequence.pop(sequence.id, None) is not None:
                self.to_abort.append(sequence.id)
        telemetry.JOBS_ENDED.labels(outcome).inc()
        telemetry.JOBS_RUNNING.set(len(self.by_id))
        telemetry.JOB_SECONDS.observe(generation.age_seconds)
        tracing.attempt_ended(generation, outcome)
        self.room_changed.set()
        if not self.by_sequence:
            # No further engine step updates the gauge.
            telemetry.SEQUENCES_RUNNING.set(0)
        if not self.by_id:
            self.idle.set()
