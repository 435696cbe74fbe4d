"""Settlement: settle the usage of an admitted request exactly once, however it ends."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import msgspec
from redis.exceptions import RedisError

from common import tracing as names
from common.tasks import Backoff, TaskSet, each_apart, repeat, tolerating_outage
from contract.dialect import Dialect
from contract.messages import JobFailed
from contract.outcomes import FailureCode, JobReceipt, JobState
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.queue.generation import Generation
from gateway.limits.replies import (
    Kept,
    RequestEnd,
    RequestState,
    ReservationRequest,
    sees_key,
)
from gateway.limits.reservations import Admission, Reservations
from gateway.limits.stored_bytes import Storage
from gateway.models.catalogue import Catalogue
from gateway.platform import telemetry, tracing
from gateway.records.errors import (
    ApiError,
    GenerationTimeoutError,
    InsufficientQuotaError,
    InternalError,
    RateLimitError,
    RequestCancelledError,
    ServiceUnavailableError,
    SlowReaderError,
    StoreUnavailableError,
)
from gateway.records.limits import SubjectLimits
from gateway.records.usage_record import Counts, Outcome, UsageRecord

SLICE_TOKENS: Final = 4_096
"""Completion tokens of a sequence that are reserved at once, for a stream that is reserved in
slices. The next slice is reserved when half of them are left."""
SLICE_SECONDS: Final = 0.5
"""How often it is checked which streams need their next slice."""
RECEIPT_PATIENCE_SECONDS: Final = 30.0
"""Wait for the engine's counts of a cancelled job: longer than a dead worker's lease."""
FIRST_LOOK_SECONDS: Final = 0.02
LAST_LOOK_SECONDS: Final = 0.5
DROP_SECONDS: Final = 1.0
"""How often receipts of settled jobs are dropped."""
DROP_BATCH: Final = 500
MODELS_AT_ONCE: Final = 64
MAX_RECEIPTS_TO_DROP: Final = 100_000
"""Receipts that wait to be dropped while Redis is unavailable; others expire."""
CLOSE_SECONDS: Final = 5.0
CANCELLED_CODE: Final = "cancelled"
_OUR_FAULT: Final = 500
"""The lowest status of errors that are not the client's fault."""


class Ending(NamedTuple):
    """How a request ends if its jobs do not all finish."""

    outcome: Outcome
    code: str = ""
    """The error code in the usage record."""
    is_our_fault: bool = False
    """Whether tokens that the client did not receive are free."""
    is_temporary: bool = False
    """Whether the same request may succeed later."""

    @classmethod
    def of_error(cls, error: BaseException) -> Self:
        """Return the end of a request that fails with this error."""
        if isinstance(error, SlowReaderError):
            return cls(Outcome.CANCELLED, error.code)
        if isinstance(error, RequestCancelledError):
            return cls(Outcome.CANCELLED, CANCELLED_CODE)
        if isinstance(error, GenerationTimeoutError):
            return cls(Outcome.TIMED_OUT, error.code)
        if isinstance(error, ApiError):
            return cls(Outcome.FAILED, error.code, error.status >= _OUR_FAULT, is_temporary(error))
        return cls(
            Outcome.FAILED,
            InternalError.code,
            is_our_fault=True,
            is_temporary=is_temporary(error),
        )


def is_temporary(error: BaseException) -> bool:
    """Return whether a request that fails with this error may succeed later."""
    # Without Redis, or when the gateway stops, it is unknown whether the jobs are enqueued.
    return isinstance(error, ServiceUnavailableError | RedisError | asyncio.CancelledError)


@dataclass(eq=False)
class Slices:
    """The part of a stream's tokens that is reserved, and grows with what it generates.

    A response without a limit of its own may use the rest of the window, but rarely does: so that
    it does not exhaust the limits of tokens, only the next tokens are reserved.
    """

    _subjects: tuple[SubjectLimits, ...]
    _most: Counts
    """The most to reserve in all."""
    sequences: int

    def __post_init__(self) -> None:
        self.reserved = self.first.completion_tokens
        """Completion tokens that are reserved, with those of earlier reservations."""
        self.is_extending = False
        """Whether more are being reserved."""

    @property
    def first(self) -> Counts:
        """What is reserved before the request begins."""
        tokens = min(self._most.completion_tokens, self.sequences * SLICE_TOKENS)
        return self._most._replace(completion_tokens=tokens)

    def next(self, received: int) -> int:
        """Return the completion tokens that must be reserved soon; 0 if no more are needed."""
        most = self._most.completion_tokens
        if self.reserved >= min(most, received + self.sequences * SLICE_TOKENS // 2):
            return 0
        return min(most, received + self.sequences * SLICE_TOKENS)

    def are_used(self, received: int) -> bool:
        """Return whether the next tokens may be more than those that are reserved."""
        return self.reserved <= received + self.sequences * (SLICE_TOKENS // 16)

    def request(self, draft: UsageRecord, tokens: int, kept: Kept | None) -> ReservationRequest:
        """Return the reservation of so many completion tokens."""
        # A resumed request has settled a part of its tokens.
        new = draft.used(self._most._replace(completion_tokens=tokens))
        return ReservationRequest.of(draft, self._subjects, new, kept=kept)


@dataclass(eq=False)
class SettlementService:
    """Opens settlements, and drops the receipts of settled jobs."""

    reservations: Reservations
    dispatcher: Dispatcher
    catalogue: Catalogue
    storage: Storage

    def __post_init__(self) -> None:
        self.tasks = TaskSet()
        """Work that outlives its request: settlements, and writes of stored responses."""
        self._sliced: dict[Settlement, Slices] = {}
        self._to_drop: defaultdict[str, list[str]] = defaultdict(list)
        self.trims_replies = False
        """Whether a request has ended whose replies may not stay in Redis."""

    def open(
        self,
        record: UsageRecord,
        admission: Admission,
        generation: Generation,
        *,
        kept: Kept | None = None,
    ) -> "Settlement":
        """Return the settlement of a request that was just admitted."""
        record = msgspec.structs.replace(record, created_ms=admission.created_ms)
        return Settlement(self, record, admission, generation, kept)

    def drop_receipts(self, model: str, job_ids: list[str]) -> None:
        """Drop the receipts of settled jobs with the next batch."""
        if sum(map(len, self._to_drop.values())) < MAX_RECEIPTS_TO_DROP:
            self._to_drop[model] += job_ids

    def reserve_in_slices(self, settlement: "Settlement", slices: Slices) -> None:
        """Extend the reservation of a stream while it runs; end it if a limit does not allow it."""
        self._sliced[settlement] = slices

    async def run(self) -> None:
        """Drop receipts and extend reservations until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(repeat("drop receipts", self._drop_all, seconds=DROP_SECONDS))
            tasks.create_task(repeat("reserve slices", self._extend_all, seconds=SLICE_SECONDS))

    async def _extend_all(self) -> None:
        self._sliced = {each: its for each, its in self._sliced.items() if not each.has_ended}
        for settlement, slices in self._sliced.items():
            if not slices.is_extending and (tokens := slices.next(settlement.received_tokens())):
                self.tasks.start(settlement.extend(slices, tokens))

    async def aclose(self) -> None:
        """Finish pending work within CLOSE_SECONDS; a sweep settles the remaining requests."""
        await self.tasks.finish(CLOSE_SECONDS)
        with tolerating_outage("drop receipts"):
            await self._drop_all()

    async def _drop_all(self) -> None:
        await each_apart(self._drop, list(self._to_drop), at_once=MODELS_AT_ONCE)

    async def _drop(self, model: str) -> None:
        while job_ids := self._to_drop[model][:DROP_BATCH]:
            await self.catalogue.queue(model).forget(job_ids)
            del self._to_drop[model][: len(job_ids)]
        del self._to_drop[model]


@dataclass(eq=False)
class Settlement:
    """The reservation and the usage of one admitted request. It ends once; the first end counts."""

    _service: SettlementService
    record: UsageRecord
    admission: Admission
    generation: Generation
    kept: Kept | None

    def __post_init__(self) -> None:
        self._opened_at = time.monotonic()
        # The settlement belongs to the trace of the request, whatever task ends it.
        self._trace = tracing.here()
        self._first_token_ms = 0
        self.leaves_replies = True
        """Whether its replies may stay in Redis for a while after its end."""
        self.has_ended = False
        """Whether it is settled, or being settled."""
        self.is_finished = False
        """Whether it is settled with a whole response."""

    async def withdraw(self) -> None:
        """End a request whose jobs were not enqueued: nothing of it counts, or is recorded."""
        self.has_ended = True
        await self._service.reservations.end(self._end())

    def hand_over(self) -> None:
        """Leave the request to another gateway, which settles it."""
        self.has_ended = True
        self._service.reservations.hand_over(self.record.admitted_id)

    @property
    def is_confirmed(self) -> bool:
        """Whether Redis has confirmed the end of the request."""
        return not self._service.reservations.is_ending(self.record.admitted_id)

    async def confirmed(self) -> None:
        """Wait until Redis has confirmed the end of the request."""
        await self._service.reservations.confirmed(self.record.admitted_id)

    def received_tokens(self) -> int:
        """Return the completion tokens of all jobs that the gateway has received."""
        return sum(self.generation.received_tokens.values())

    async def extend(self, slices: Slices, tokens: int) -> None:
        """Extend the reservation to so many completion tokens.

        If a limit does not allow it, the response ends once it has used what is reserved. Until
        then each check tries again.
        """
        slices.is_extending = True
        try:
            await self._service.reservations.extend_to(
                slices.request(self.record, tokens, self.kept),
                is_openai=self.record.dialect == Dialect.OPENAI,
                sees=sees_key,
            )
            slices.reserved = tokens
        except RateLimitError as error:
            seconds = error.retry_after_seconds
            again = "" if seconds is None else f" Please try again in {seconds:.1f}s."
            message = f"The response has ended early. {error}{again}"
            self._fail_if_used(slices, FailureCode.RATE_LIMITED, message, seconds)
        except InsufficientQuotaError:
            message = "The budget or the credit allows the response no further tokens."
            self._fail_if_used(slices, FailureCode.OUT_OF_QUOTA, message)
        except (RedisError, StoreUnavailableError):
            pass  # The next check tries again.
        finally:
            slices.is_extending = False

    def _fail_if_used(
        self,
        slices: Slices,
        code: FailureCode,
        message: str,
        retry_after_seconds: float | None = None,
    ) -> None:
        if not self.has_ended and slices.are_used(self.received_tokens()):
            self.generation.push(0, JobFailed(0, 0, code, message, retry_after_seconds))

    def replied(self) -> None:
        """Record the time of the first worker reply; later calls do nothing."""
        if not self._first_token_ms:
            self._first_token_ms = max(int(self._age_ms()), 1)

    async def finish(
        self, state: RequestState | None = None, *, stored_bytes: int | None = None
    ) -> None:
        """Settle a request whose jobs have all finished, before the client receives its end.

        This frees its reservation, so that the client can send its next request at once. The record
        of a stored response has this `state` then, and its `stored_bytes` count.
        """
        if not self.begin_end():
            return
        finished = self.generation.finished.values()
        if not self._first_token_ms:
            # No consumer recorded it. The worker reports the time since its first token.
            generated_ms = max(each.generation_ms for each in finished)
            self._first_token_ms = max(int(self._age_ms() - generated_ms), 1)
        absent = JobReceipt(JobState.ABSENT)
        counts = [self._counts_of(index, absent) for index in self.generation.finished]
        engines = [each.engine for each in finished]
        record = await self._settle(
            Outcome.FINISHED,
            "",
            counts,
            free=Counts(),
            engines=engines,
            state=state,
            stored_bytes=stored_bytes,
        )
        self._service.drop_receipts(record.model, record.job_ids)
        self.generation.release()
        self.is_finished = True

    def fail(self, error: BaseException) -> None:
        """Settle a request that ends with an error, in the background."""
        self.end(Ending.of_error(error))

    def leave(self) -> None:
        """Settle a request whose client has disconnected, in the background."""
        self.end(Ending(Outcome.CANCELLED))

    def end(self, ending: Ending) -> None:
        """Settle a request that ends in any other way than `finish`, in the background."""
        if self.begin_end():
            self._service.tasks.start(self.settle(ending))

    def begin_end(self) -> bool:
        """Mark the request as ended. Return False if it has already ended."""
        if self.has_ended:
            return False
        self.has_ended = True
        return True

    async def settle(
        self,
        ending: Ending,
        state: RequestState | None = None,
        *,
        stored_bytes: int | None = None,
        reads_again: bool = True,
    ) -> None:
        """Cancel the jobs of an ended request, wait for the engine's counts, and settle.

        The tenant is charged for the engine's work. A response with a `state` is stored: clients
        can still receive its output. If it is paused, the tenant pays again for prompts that the
        engine `reads_again`. A line of a batch is charged only for a whole result, and is not
        recorded if it runs again.
        """
        is_stored = state is not None
        await self._service.dispatcher.cancel(self.generation)
        receipts = await self._receipts(self.record.job_ids)
        counts = [self._counts_of(index, each) for index, each in enumerate(receipts)]
        engines = [each.engine for each in receipts]
        engines += [each.engine for each in self.generation.finished.values()]
        free = self._undelivered(counts, is_stored=is_stored) if ending.is_our_fault else Counts()
        runs_again = False
        if self.record.line:
            free, runs_again = Counts.total(counts), ending.is_temporary
        record = await self._settle(
            ending.outcome,
            ending.code,
            counts,
            free=free,
            engines=engines,
            is_recorded=not runs_again,
            state=state,
            stored_bytes=stored_bytes,
            reads_again=reads_again,
        )
        if is_stored:
            # A stored response may soon resume with jobs of the same ids.
            with tolerating_outage("drop receipts"):
                await self._service.catalogue.queue(record.model).forget(record.job_ids)
        else:
            self._service.drop_receipts(record.model, record.job_ids)
        self.generation.release()

    def _age_ms(self) -> float:
        return (time.monotonic() - self._opened_at) * 1000

    async def _settle(
        self,
        outcome: Outcome,
        code: str,
        counts: Sequence[Counts],
        *,
        free: Counts,
        engines: Sequence[str],
        is_recorded: bool = True,
        state: RequestState | None = None,
        stored_bytes: int | None = None,
        reads_again: bool = True,
    ) -> UsageRecord:
        record = self.record.ended(
            Counts.total(counts),
            free=free,
            outcome=outcome,
            code=code,
            first_token_ms=self._first_token_ms,
            engines=engines,
            preempted=self.generation.preempted,
            classes=[[name for name, _ in each] for each in self.generation.classes.values()],
        )
        self._service.trims_replies |= not self.leaves_replies
        telemetry.used(
            record.model,
            record.tenant_id,
            prompt=record.prompt_tokens,
            cached=record.cached_tokens,
            completion=record.completion_tokens,
            cost_micros=record.cost_micros,
        )
        telemetry.preempted(record.tenant_id, record.preemptions, record.recomputed_tokens)
        telemetry.CLASS_CROSSINGS.labels(record.model).inc(record.class_crossings)
        settled = Counts()
        if state is RequestState.PAUSED:
            # What was free is charged once it is delivered.
            settled = Counts.total([self.record.counts, record.paid])
            if reads_again:
                settled = settled._replace(prompt_tokens=0, cached_tokens=0)
        ending = self._end(
            record if is_recorded else None,
            state=state,
            settled=settled,
            stored_bytes=stored_bytes,
        )
        if self._trace is None:
            await self._service.reservations.end(ending)
            return record
        tracing.note(
            {
                names.GEN_AI_USAGE_INPUT_TOKENS: record.prompt_tokens,
                names.GEN_AI_USAGE_CACHED_TOKENS: record.cached_tokens,
                names.GEN_AI_USAGE_OUTPUT_TOKENS: record.completion_tokens,
            },
            self._trace,
        )
        with tracing.span_in(self._trace, names.SETTLE):
            tracing.note(
                {
                    names.GEN_AI_RESPONSE_ID: record.request_id,
                    names.OUTCOME: outcome.value,
                    names.CODE: code,
                }
            )
            await self._service.reservations.end(ending)
        return record

    def _end(self, record: UsageRecord | None = None, **others: Any) -> RequestEnd:
        draft = self.record
        return RequestEnd(
            tenant_id=draft.tenant_id,
            request_id=draft.admitted_id,
            record=record,
            kept=self.kept,
            **others,
        )

    def _undelivered(self, counts: Sequence[Counts], *, is_stored: bool) -> Counts:
        """Return the tokens of each job that no client has received or can still receive."""
        if not (self.record.is_streamed or is_stored):
            return Counts.total(counts)
        return Counts.total(
            [self._undelivered_of(index, each) for index, each in enumerate(counts)]
        )

    def _undelivered_of(self, index: int, counts: Counts) -> Counts:
        if index in self.generation.finished:
            return Counts()
        delivered = self.generation.delivered_tokens(index)
        if not delivered:
            return counts
        return Counts(completion_tokens=counts.completion_tokens - delivered)

    async def _receipts(self, job_ids: list[str]) -> list[JobReceipt]:
        queue = self._service.catalogue.queue(self.record.model)
        receipts = [JobReceipt(JobState.ABSENT)] * len(job_ids)
        deadline = time.monotonic() + RECEIPT_PATIENCE_SECONDS
        backoff = Backoff(FIRST_LOOK_SECONDS, LAST_LOOK_SECONDS)
        while time.monotonic() < deadline:
            with tolerating_outage("read receipts"):
                receipts = await queue.receipts(job_ids)
                if all(each.state in (JobState.ENDED, JobState.ABSENT) for each in receipts):
                    break
            await asyncio.sleep(backoff.next_seconds())
        return receipts

    def _counts_of(self, index: int, receipt: JobReceipt) -> Counts:
        """Return the engine's counts of a job, but at least the tokens received of it."""
        finished = self.generation.finished.get(index)
        if finished is not None:
            return self.record.job_counts(
                index, finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens
            )
        received = self.generation.received_tokens[index]
        prompt_tokens = receipt.prompt_tokens
        settled_before = self.record.completion_tokens
        if received and not prompt_tokens and self.received_tokens() > settled_before:
            # A job that was never followed has no prompt here.
            prompt_tokens = sum(
                len(job.prompt_token_ids) for job in self.generation.jobs[index : index + 1]
            )
        completion_tokens = max(receipt.completion_tokens, received)
        return self.record.job_counts(
            index, prompt_tokens, receipt.cached_tokens, completion_tokens
        )
