"""The runner loops of one engine: claim jobs, step the engine, and drop jobs that nobody waits for.

Every loop blocks on an event (a doorbell list, a control list, the engine's next step), so an idle
worker costs nothing. Timeouts are a safety net for lost events.
"""

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from tokenizers import Tokenizer

from contract import clock, keys
from contract.logs import about
from contract.messages import GenerationJob, JobFailed, ReturnReason
from contract.outcomes import FailureCode
from contract.queue import Claim, Room
from worker import telemetry
from worker.backoff import keep_doing
from worker.engine.base import (
    Engine,
    EngineDeadError,
    EngineStats,
    EngineStep,
    InvalidRequestError,
    SequenceEnd,
    SequenceOutput,
)
from worker.execution import tracing
from worker.execution.checks import check_job
from worker.execution.generation import Generation, report_before
from worker.execution.logprobs import TokenTexts
from worker.execution.pace import Pace
from worker.execution.suspects import Suspects
from worker.queue.gateways import FORGOTTEN_SECONDS, GRACE_SECONDS
from worker.queue.link import Link
from worker.tasks import cancel

_log = logging.getLogger(__name__)

MOST_JOBS_PER_CLAIM = 16
MOST_OUTPUTS_PER_READ = 32
_RING_TIMEOUT_SECONDS = 3
_RENEWALS_PER_LEASE = 3
_WATCH_SECONDS = 1.0
_HAND_BACK_SECONDS = 5.0
_ABORT_SECONDS = 1.0
_STALL_LOOK_SECONDS = 1.0

DEADLINE_MESSAGE = "The request was not finished before its deadline."
UNDECODABLE_MESSAGE = "The output could not be decoded."


class Runner:
    """Runs jobs of one model on one engine."""

    def __init__(
        self, link: Link, engine: Engine, *, gather_seconds: float, stall_seconds: float
    ) -> None:
        self._redis = link.redis
        self._queue = link.queue
        self._worker = link.worker
        self._lease_ms = link.lease_ms
        self._leases = link.leases
        self._gateways = link.gateways
        self._writer = link.writer
        self._writer.on_overflow = self._give_everything_up
        self._engine = engine
        self._stall_seconds = stall_seconds
        self._tokenizer = Tokenizer.from_buffer(engine.info.tokenizer_json)
        self._texts = TokenTexts(self._tokenizer)
        self._pace = Pace(gather_seconds)
        self._suspects = Suspects()
        self._generations: dict[str, Generation] = {}
        self._by_sequence: dict[str, Generation] = {}
        self._unwanted: list[str] = []
        self._apart: set[asyncio.Task[None]] = set()
        # One thread: more would only take turns with each other and leave the event loop less time.
        self._reading = ThreadPoolExecutor(1, "read-answers")
        self._stats = EngineStats(0, 0, 0.0)
        self._steps = 0
        self._claiming = asyncio.Lock()
        self._room_changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Run jobs until stopped or until the engine dies, then give the remaining jobs back.

        Raises EngineDeadError, also if the engine hangs.
        """
        tasks = [
            asyncio.create_task(loop)
            for loop in (
                self._step(),
                self._watch_for_stalls(),
                keep_doing("extend leases", self._extend_leases),
                keep_doing("check gateways and deadlines", self._watch),
                keep_doing("receive cancellations", self._obey),
                keep_doing("claim jobs", self._claim),
            )
        ]
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            await self._give_everything_back(is_engine_dead=done != {stopped})
            for task in done:
                task.result()
        finally:
            await cancel([*tasks, stopped, *self._apart])
            self._reading.shutdown(wait=False, cancel_futures=True)

    async def drain(self, grace_seconds: float) -> None:
        """Stop claiming jobs, let running jobs finish, then stop."""
        self._stopping.set()
        self._room_changed.set()
        try:
            async with asyncio.timeout(grace_seconds):
                async with self._claiming:
                    _log.info("Draining: %d jobs to finish", len(self._generations))
                await self._idle.wait()
        except TimeoutError:
            _log.info("Handing back %d jobs", len(self._generations))
        self.stop()

    def stop(self) -> None:
        """Stop immediately."""
        self._stopping.set()
        self._room_changed.set()
        self._stopped.set()

    # --- claiming ------------------------------------------------------------------------------

    async def _claim(self) -> None:
        if self._stopping.is_set():
            await asyncio.Event().wait()
        self._room_changed.clear()
        room = self._room()
        if room.sequences <= 0:
            await self._wait_for_room()
            return
        async with self._claiming:
            if self._stopping.is_set():
                return
            asked_at = time.monotonic()
            try:
                result = await self._queue.claim(
                    self._worker, room, most_jobs=MOST_JOBS_PER_CLAIM, lease_ms=self._lease_ms
                )
            except msgspec.MsgspecError:
                # The leases expire and the gateways decide what happens; all other jobs continue.
                _log.exception("Claimed jobs that this version cannot decode")
                return
            await self._start(result.claims, asked_at)
        if result.blocked:
            await self._wait_for_room()
        elif len(result.claims) < MOST_JOBS_PER_CLAIM:
            await self._wait_for_ring()

    def _room(self) -> Room:
        info = self._engine.info
        # The engine's last report is stale once the engine has nothing left to step.
        used = self._stats.kv_usage * info.kv_cache_tokens if self._generations else 0.0
        reserved = sum(each.reserved_tokens for each in self._generations.values())
        return Room(
            tokens=max(int(info.kv_cache_tokens - used - reserved), 0),
            sequences=info.max_sequences - len(self._by_sequence),
            most_sequences=max(1, info.max_sequences // 4),
            empty=not self._generations,
        )

    async def _wait_for_room(self) -> None:
        try:
            await asyncio.wait_for(self._room_changed.wait(), _RING_TIMEOUT_SECONDS)
        except TimeoutError:
            return

    async def _wait_for_ring(self) -> None:
        ring = asyncio.ensure_future(
            self._redis.blpop([keys.doorbell(self._queue.model)], timeout=_RING_TIMEOUT_SECONDS)
        )
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait({ring, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if ring in done:
                ring.result()
        finally:
            await cancel([ring, stopping])

    async def _start(self, claims: list[Claim], asked_at: float) -> None:
        # Register all jobs before submitting any: if the
        # engine dies, registered jobs are given back.
        taken = []
        for claim in claims:
            telemetry.JOBS_CLAIMED.inc()
            if claim.waited_seconds is not None:
                telemetry.QUEUE_WAIT.observe(claim.waited_seconds)
            if not await self._gateways.is_alive(claim.job.gateway):
                self._turn_away(claim)
            elif (generation := self._take_in(claim, asked_at)) is not None:
                taken.append(generation)
            if claim.job.resumption is not None:
                # Replaying a resumption may take long: let running sequences proceed between jobs.
                await asyncio.sleep(0)
        for generation in taken:
            if generation.job.is_suspect:
                self._suspects.add(generation)
            elif generation.takes_time_to_submit:
                # Preprocessing images or compiling a grammar must not delay other jobs.
                self._keep(asyncio.create_task(self._submit_apart(generation)))
            else:
                await self._submit(generation)
        self._admit_suspect()
        await self._abort_unwanted()
        self._writer.flush()

    def _admit_suspect(self) -> None:
        generation = self._suspects.next()
        if generation is not None:
            self._keep(asyncio.create_task(self._submit_apart(generation)))

    def _turn_away(self, claim: Claim) -> None:
        telemetry.JOBS_ENDED.labels("abandoned").inc()
        if claim.job.is_background:
            self._leases.hand_back([report_before(claim)])
        else:
            self._leases.end([report_before(claim)])

    def _take_in(self, claim: Claim, asked_at: float) -> Generation | None:
        job = claim.job
        if before := self._generations.get(job.id):
            # The lease expired, and the same worker claimed the job again.
            self._drop(before, "lost")
        outbox = self._writer.outbox(job.gateway)
        generation, param = None, None
        if job.deadline_ms <= clock.now_ms():
            code, message = FailureCode.DEADLINE_EXCEEDED, DEADLINE_MESSAGE
        else:
            try:
                check_job(job, self._engine.info)
                generation = Generation(
                    claim,
                    outbox,
                    tokenizer=self._tokenizer,
                    texts=self._texts,
                    parsers=self._engine.parsers,
                    asked_at=asked_at,
                )
            except InvalidRequestError as error:
                code, message, param = FailureCode.INVALID_REQUEST, str(error), error.param
            except Exception:  # noqa: BLE001  (one job's bytes must not end everybody's)
                _log.exception("Job %s: could not decode its tokens", job.id, extra=about(job))
                code, message = FailureCode.ENGINE_ERROR, UNDECODABLE_MESSAGE
        if generation is None:
            report = report_before(claim)
            failed = JobFailed(job.handle, claim.attempt, code, message, param=param)
            outbox.fail(failed, report)
            self._leases.hold_until_written(report)
            telemetry.JOBS_ENDED.labels(code.value).inc()
            return None
        generation.begin()
        if generation.is_done:
            self._leases.hold_until_written(generation.report)
            telemetry.JOBS_ENDED.labels("finished").inc()
            tracing.attempt_ended(generation, "finished")
            return None
        self._generations[job.id] = generation
        self._idle.clear()
        telemetry.JOBS_RUNNING.set(len(self._generations))
        return generation

    async def _submit(self, generation: Generation) -> None:
        if not self._is_running(generation):
            return
        requests = generation.requests()
        self._by_sequence.update((request.id, generation) for request in requests)
        try:
            await self._engine.submit(requests)
            generation.is_submitted = True
            generation.release_images()
        except InvalidRequestError as error:
            if self._is_running(generation):
                self._fail(generation, FailureCode.INVALID_REQUEST, str(error), param=error.param)
        if not self._is_running(generation):
            # The job ended during submission, when the
            # engine did not have all of its sequences yet.
            self._unwanted += [each.id for each in requests if each.id not in self._by_sequence]

    async def _submit_apart(self, generation: Generation) -> None:
        try:
            await self._submit(generation)
            await self._abort_unwanted()
        except EngineDeadError:
            return  # The step loop raises the same error and ends all jobs.
        except Exception:  # noqa: BLE001  (one job must not end everybody's)
            _log.exception(
                "Job %s could not be submitted", generation.job.id, extra=about(generation.job)
            )
            if self._is_running(generation):
                self._fail(
                    generation, FailureCode.ENGINE_ERROR, "The engine could not read the job."
                )
        self._writer.flush()

    def _keep(self, submitting: "asyncio.Task[None]") -> None:
        self._apart.add(submitting)
        submitting.add_done_callback(self._apart.discard)

    # --- stepping ------------------------------------------------------------------------------

    async def _step(self) -> None:
        while True:
            step = await self._engine.step()
            self._steps += 1
            self._apply(step)
            self._writer.flush()
            if self._suspects.are_waiting:
                self._admit_suspect()
            if self._unwanted:
                await self._abort_unwanted()

    def _apply(self, step: EngineStep) -> None:
        # First: the engine's counts still include sequences that this step ends at a stop string.
        telemetry.note_step(step)
        is_due = self._pace.is_due(time.monotonic(), len(self._by_sequence))
        for output in step.outputs:
            generation = self._by_sequence.get(output.sequence_id)
            if generation is not None:
                self._hand_over(output, generation, is_due=is_due)
        if step.stats is not None:
            self._stats = step.stats

    def _hand_over(self, output: SequenceOutput, generation: Generation, *, is_due: bool) -> None:
        if output.end is SequenceEnd.ABORTED:
            self._give_back(generation, ReturnReason.DRAINING)
            return
        if output.end is SequenceEnd.ERROR:
            self._fail(generation, *_why_engine_gave_up(generation.job))
            return
        if generation.takes_long:
            self._put_off(output, generation)
            return
        try:
            has_ended = generation.receive(output, is_due=is_due)
        except Exception:  # noqa: BLE001  (one job's bytes must not end everybody's)
            self._fail_undecodable(generation)
            return
        if has_ended:
            self._end_sequence(output, generation)

    def _end_sequence(self, output: SequenceOutput, generation: Generation) -> None:
        self._by_sequence.pop(output.sequence_id, None)
        self._room_changed.set()
        if output.end is None:
            self._unwanted.append(output.sequence_id)
        if generation.is_done:
            self._leases.hold_until_written(generation.report)
            self._remove(generation, "finished")

    def _fail_undecodable(self, generation: Generation) -> None:
        job = generation.job
        _log.exception("Job %s: could not decode its output", job.id, extra=about(job))
        self._fail(generation, FailureCode.ENGINE_ERROR, UNDECODABLE_MESSAGE)

    # --- parsing slow responses in a thread ----------------------------------------------------

    def _put_off(self, output: SequenceOutput, generation: Generation) -> None:
        generation.put_off(output)
        if output.end is not None:
            # The engine has no more steps for this sequence: its silence is not a stall.
            self._by_sequence.pop(output.sequence_id, None)
        if not generation.is_being_read:
            generation.is_being_read = True
            self._keep(asyncio.create_task(self._read(generation)))

    async def _read(self, generation: Generation) -> None:
        """Parse the backlog of a job, in order, in another thread."""
        backlog, loop = generation.backlog, asyncio.get_running_loop()
        while backlog and self._is_running(generation):
            outputs = [backlog.popleft() for _ in range(min(len(backlog), MOST_OUTPUTS_PER_READ))]
            try:
                await loop.run_in_executor(self._reading, generation.read, outputs)
                if self._is_running(generation):
                    self._tell_read(outputs, generation)
            except Exception:  # noqa: BLE001  (one job's bytes must not end everybody's)
                if self._is_running(generation):
                    self._fail_undecodable(generation)
            self._writer.flush()
            await self._abort_unwanted()
        generation.is_being_read = False

    def _tell_read(self, outputs: list[SequenceOutput], generation: Generation) -> None:
        for output in {each.sequence_id: each for each in outputs}.values():
            if generation.tell_read(output.sequence_id):
                self._end_sequence(output, generation)

    def _is_running(self, generation: Generation) -> bool:
        return self._generations.get(generation.job.id) is generation

    async def _abort_unwanted(self) -> None:
        unwanted, self._unwanted = self._unwanted, []
        if unwanted:
            # The step loop raises the same error when the engine dies.
            with contextlib.suppress(EngineDeadError):
                await self._engine.abort(unwanted)

    # --- ending --------------------------------------------------------------------------------

    def _fail(
        self, generation: Generation, code: FailureCode, message: str, *, param: str | None = None
    ) -> None:
        job = generation.job
        report = generation.report
        failed = JobFailed(job.handle, generation.attempt, code, message, param=param)
        generation.outbox.fail(failed, report)
        self._leases.hold_until_written(report)
        self._remove(generation, code.value)

    def _give_back(self, generation: Generation, reason: ReturnReason) -> None:
        generation.give_back(reason)
        self._leases.hold_until_written(generation.report)
        self._remove(generation, "handed_back")

    def _drop(self, generation: Generation, outcome: str) -> None:
        """End a job without a reply; its receipt has the counts if this worker holds the lease."""
        self._remove(generation, outcome)
        self._leases.end([generation.report])

    def _leave(self, generation: Generation) -> None:
        """Stop a job whose gateway is gone. Another gateway takes over a background job."""
        if not generation.job.is_background:
            self._drop(generation, "abandoned")
            return
        generation.tell_everything()
        report = generation.report
        generation.outbox.hand_back(report)
        self._leases.hold_until_written(report)
        self._remove(generation, "handed_back")

    def _remove(self, generation: Generation, outcome: str) -> None:
        if self._is_running(generation):
            del self._generations[generation.job.id]
        for sequence_id in generation.open_sequences:
            self._by_sequence.pop(sequence_id, None)
            self._unwanted.append(sequence_id)
        telemetry.JOBS_ENDED.labels(outcome).inc()
        telemetry.JOBS_RUNNING.set(len(self._generations))
        telemetry.JOB_SECONDS.observe(generation.age_seconds)
        tracing.attempt_ended(generation, outcome)
        self._room_changed.set()
        if not self._by_sequence:
            # No further engine step updates the gauge.
            telemetry.SEQUENCES_RUNNING.set(0)
        if not self._generations:
            self._idle.set()
        self._suspects.discard(generation)
        self._admit_suspect()

    def _give_everything_up(self) -> None:
        if not self._generations:
            return
        _log.error(
            "Redis was unavailable for too long: handing back %d jobs", len(self._generations)
        )
        generations = list(self._generations.values())
        for gateway in {generation.job.gateway for generation in generations}:
            outbox = self._writer.outbox(gateway)
            outbox.drop({each.job.handle for each in generations if each.outbox is outbox})
        for generation in generations:
            self._remove(generation, "replies_lost")
            self._leases.hand_back([generation.report])

    async def _give_everything_back(self, *, is_engine_dead: bool) -> None:
        self.stop()
        # Wait for a claim that is in progress, unless the engine blocks it for good.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._claiming.acquire(), _HAND_BACK_SECONDS)
        self._suspects.clear()
        for generation in list(self._generations.values()):
            # A job that was not submitted to the engine did not cause its death.
            is_to_blame = is_engine_dead and any(
                map(self._by_sequence.get, generation.open_sequences)
            )
            reason = ReturnReason.ENGINE_DIED if is_to_blame else ReturnReason.DRAINING
            self._give_back(generation, reason)
        self._writer.flush()
        if not is_engine_dead:
            # Not `wait_for`, which would let the engine make another step first.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS):
                    await self._abort_unwanted()
        await self._writer.drain(_HAND_BACK_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._leases.settled.wait(), _HAND_BACK_SECONDS)

    # --- watching ------------------------------------------------------------------------------

    async def _obey(self) -> None:
        key = keys.control(self._queue.model, self._worker)
        rung: Any = await self._redis.blpop([key], timeout=_RING_TIMEOUT_SECONDS)
        if rung is not None and (generation := self._generations.get(rung[1].decode())):
            # The client pays for a prompt in progress;
            # otherwise disconnecting would make prompts free.
            generation.count_prompt()
            self._drop(generation, "cancelled")
            await self._abort_unwanted()

    async def _extend_leases(self) -> None:
        await asyncio.sleep(self._lease_ms / 1000 / _RENEWALS_PER_LEASE)
        running = [each.report for each in self._generations.values()]
        for report in await self._leases.extend(running):
            generation = self._generations.get(report.job_id)
            if generation is not None and generation.attempt == report.attempt:
                self._drop(generation, "lost")
        await self._abort_unwanted()

    async def _watch_for_stalls(self) -> None:
        # Count checks, not time: a suspended worker process has received no steps either.
        pause = min(_STALL_LOOK_SECONDS, self._stall_seconds / 2)
        looks, silent_looks = self._stall_seconds / pause, 0
        while silent_looks < looks:
            steps = self._steps
            await asyncio.sleep(pause)
            is_silent = self._steps == steps and bool(self._by_sequence)
            silent_looks = silent_looks + 1 if is_silent else 0
        raise EngineDeadError(f"no step for {self._stall_seconds:g} s")

    async def _watch(self) -> None:
        await asyncio.sleep(_WATCH_SECONDS)
        now = clock.now_ms()
        for generation in list(self._generations.values()):
            if generation.job.deadline_ms <= now:
                self._fail(generation, FailureCode.DEADLINE_EXCEEDED, DEADLINE_MESSAGE)
        self._writer.flush()
        await self._abort_unwanted()
        await self._watch_gateways()

    async def _watch_gateways(self) -> None:
        in_use = {each.job.gateway for each in self._generations.values()}
        await self._gateways.look(in_use.union(self._writer.gateways))
        dead = self._gateways.missing_for(GRACE_SECONDS)
        for generation in list(self._generations.values()):
            if generation.job.gateway in dead:
                self._leave(generation)
        self._writer.flush()
        for gateway in self._gateways.missing_for(FORGOTTEN_SECONDS) - in_use:
            self._writer.forget(gateway)
        await self._abort_unwanted()


def _why_engine_gave_up(job: GenerationJob) -> tuple[FailureCode, str]:
    if not job.grammar:
        return FailureCode.ENGINE_ERROR, "The engine gave up on this prompt."
    return (
        FailureCode.INVALID_REQUEST,
        "The grammar became too complex, or it and the forbidden tokens left no token to go on with.",
    )
