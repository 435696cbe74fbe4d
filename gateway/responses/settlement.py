"""Settlement: settle the usage of an admitted request exactly once, however it ends."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final, Protocol

import msgspec
from redis.exceptions import RedisError

from contract import clock
from contract.receipts import JobReceipt, JobState
from contract.tracing import (
    CODE,
    GEN_AI_RESPONSE_ID,
    GEN_AI_USAGE_CACHED_TOKENS,
    GEN_AI_USAGE_INPUT_TOKENS,
    GEN_AI_USAGE_OUTPUT_TOKENS,
    OUTCOME,
    SETTLE,
)
from gateway import telemetry, tracing
from gateway.concurrency.tasks import raise_if_cancelled
from gateway.dispatch.catalogue import Catalogue
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.generation import Generation
from gateway.errors import ApiError, GenerationTimeoutError, InternalError, SlowReaderError
from gateway.quota.reservations import Admission, Reservations
from gateway.stream.completion import Usage
from gateway.tenancy.usage_record import Counts, Outcome, UsageRecord

RECEIPT_PATIENCE_SECONDS: Final = 30.0
"""Wait for the engine's counts of a cancelled job: longer than a dead worker's lease."""
FIRST_LOOK_SECONDS: Final = 0.02
LAST_LOOK_SECONDS: Final = 0.5
FORGET_SECONDS: Final = 1.0
"""How often receipts of settled jobs are dropped."""
FORGET_BATCH: Final = 500
MAX_TO_FORGET: Final = 100_000
"""Receipts that wait to be dropped while Redis is unavailable; others expire."""
CLOSE_SECONDS: Final = 5.0
_OUR_FAULT: Final = 500
"""The lowest status of errors that are not the client's fault."""

logger = logging.getLogger(__name__)


class Keeper(Protocol):
    """Keeps an answer for clients that resume it, and is notified when its account ends."""

    def ending(self, outcome: Outcome) -> None:
        """The account ends with this outcome and is being settled."""

    async def may_settle(self) -> bool:
        """Whether this gateway may settle the account: no other one took the answer over."""

    def settled(self, record: UsageRecord) -> None:
        """The account was settled with this record before all output was received."""


class SettlementDesk:
    """All accounts of one gateway process."""

    def __init__(
        self, reservations: Reservations, dispatcher: Dispatcher, catalogue: Catalogue
    ) -> None:
        self.reservations = reservations
        self.dispatcher = dispatcher
        self.catalogue = catalogue
        self._work: set[asyncio.Task[Any]] = set()
        self._to_forget: defaultdict[str, list[str]] = defaultdict(list)

    def open(
        self, record: UsageRecord, admission: Admission, generation: Generation
    ) -> "Settlement":
        """Return the account of a request that was just admitted."""
        record = msgspec.structs.replace(record, created_ms=admission.created_ms)
        return Settlement(self, record, admission, generation)

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine to its end, even if its caller is cancelled."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._done)

    def forget(self, model: str, job_ids: list[str]) -> None:
        """Drop the receipts of settled jobs with the next batch."""
        if sum(map(len, self._to_forget.values())) < MAX_TO_FORGET:
            self._to_forget[model] += job_ids

    async def forget_now(self, model: str, job_ids: list[str]) -> None:
        """Drop the receipts of settled jobs at once, if Redis responds."""
        try:
            await self.catalogue.queue(model).forget(job_ids)
        except RedisError as error:
            logger.warning("cannot drop receipts now: %s", type(error).__name__)

    async def run(self) -> None:
        """Drop receipts until cancelled."""
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            await self._forget_all()
            raise_if_cancelled()

    async def aclose(self) -> None:
        """Finish pending settlements within CLOSE_SECONDS; the settlement sweep does the rest."""
        deadline = time.monotonic() + CLOSE_SECONDS
        # Finished work may start more: an answer that ends is written to its journal.
        while self._work and time.monotonic() < deadline:
            await asyncio.wait(self._work, timeout=deadline - time.monotonic())
        await self._forget_all()

    async def _forget_all(self) -> None:
        try:
            for model in list(self._to_forget):
                while job_ids := self._to_forget[model][:FORGET_BATCH]:
                    await self.catalogue.queue(model).forget(job_ids)
                    del self._to_forget[model][: len(job_ids)]
                del self._to_forget[model]
        except RedisError as error:
            logger.warning("cannot drop receipts now: %s", type(error).__name__)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request could not be settled; a sweep will do it", exc_info=error)


class Settlement:
    """The reservation and the usage of one admitted request. It ends once; the first end counts."""

    def __init__(
        self,
        desk: SettlementDesk,
        record: UsageRecord,
        admission: Admission,
        generation: Generation,
    ) -> None:
        self.admission = admission
        self.record = record
        self._desk = desk
        self.generation = generation
        self._opened_at = time.monotonic()
        # The settlement belongs to the trace of the request, whatever task ends it.
        self._trace = tracing.here()
        self._first_token_ms = 0
        self._has_ended = False
        self._keeper: Keeper | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it is settled, or being settled."""
        return self._has_ended

    def keep(self, keeper: Keeper) -> None:
        """Set the keeper, which is notified when the account ends."""
        self._keeper = keeper

    def hand_over(self) -> None:
        """Leave the request to another gateway, which settles it."""
        self._has_ended = True
        self._desk.reservations.hand_over(self.record.request_id)

    def replied(self) -> None:
        """Record the time of the first worker reply; later calls do nothing."""
        if not self._first_token_ms:
            self._first_token_ms = max(int(self._age_ms()), 1)

    def cost_of(self, usage: Usage) -> int:
        """Return the cost of a finished request's usage in micro-dollars."""
        return self.record.cost_of(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )

    async def finish(self) -> None:
        """Settle a request whose jobs have all finished, before the client receives its end.

        This frees its reservation, so that the client can send its next request at once.
        """
        if self._has_ended:
            return
        self._begin_ending(Outcome.FINISHED)
        finished = self.generation.finished.values()
        if not self._first_token_ms:
            # No consumer noted it; the worker reports how long it generated since its first token.
            generated_ms = max(each.generation_ms for each in finished)
            self._first_token_ms = max(int(self._age_ms() - generated_ms), 1)
        counts = [
            Counts(each.prompt_tokens, each.cached_tokens, each.completion_tokens)
            for each in finished
        ]
        record = await self._settle(Outcome.FINISHED, "", counts, free=Counts())
        self._desk.forget(record.model, record.job_ids)
        self._release()

    def end(self, outcome: Outcome, code: str = "", *, is_our_fault: bool = False) -> None:
        """Settle a request that ends in any other way, once its engine has reported its counts.

        The tenant is charged for the engine's work. If `is_our_fault`, undelivered tokens are free.
        """
        if not self._has_ended:
            self._begin_ending(outcome)
            self._desk.start(self._end(outcome, code, is_our_fault=is_our_fault))

    def fail(self, error: BaseException) -> None:
        """Settle a request that ends with an error."""
        if isinstance(error, SlowReaderError):
            self.end(Outcome.CANCELLED, error.code)
        elif isinstance(error, GenerationTimeoutError):
            self.end(Outcome.TIMED_OUT, error.code)
        elif isinstance(error, ApiError):
            self.end(Outcome.FAILED, error.code, is_our_fault=error.status >= _OUR_FAULT)
        else:
            self.end(Outcome.FAILED, InternalError.code, is_our_fault=True)

    def _begin_ending(self, outcome: Outcome) -> None:
        self._has_ended = True
        if self._keeper is not None:
            self._keeper.ending(outcome)

    def _age_ms(self) -> float:
        return (time.monotonic() - self._opened_at) * 1000

    async def _end(self, outcome: Outcome, code: str, *, is_our_fault: bool) -> None:
        if self._keeper is not None and not await self._keeper.may_settle():
            self.hand_over()
            return
        await self._desk.dispatcher.cancel(self.generation)
        counts = await self._counts()
        free = self._undelivered(counts) if is_our_fault else Counts()
        record = await self._settle(outcome, code, counts, free=free)
        if self._keeper is None:
            self._desk.forget(record.model, record.job_ids)
        else:
            # Once its keeper is notified, the answer may resume with jobs of the same ids.
            await self._desk.forget_now(record.model, record.job_ids)
            self._keeper.settled(record)
        self._release()

    def _release(self) -> None:
        self.generation.release()
        self._keeper = None

    async def _settle(
        self, outcome: Outcome, code: str, counts: Sequence[Counts], *, free: Counts
    ) -> UsageRecord:
        record = msgspec.structs.replace(
            self.record.used(**_total(counts)._asdict()),
            outcome=outcome,
            code=code,
            ended_ms=clock.now_ms(),
            first_token_ms=self._first_token_ms,
        )
        telemetry.tokens_used(
            record.model,
            record.tenant_id,
            prompt=record.prompt_tokens,
            cached=record.cached_tokens,
            completion=record.completion_tokens,
        )
        tracing.note_in(
            self._trace,
            {
                GEN_AI_USAGE_INPUT_TOKENS: record.prompt_tokens,
                GEN_AI_USAGE_CACHED_TOKENS: record.cached_tokens,
                GEN_AI_USAGE_OUTPUT_TOKENS: record.completion_tokens,
            },
        )
        with tracing.span_in(self._trace, SETTLE):
            tracing.note(
                {GEN_AI_RESPONSE_ID: record.request_id, OUTCOME: outcome.value, CODE: code}
            )
            await self._desk.reservations.settle(record.priced(free=free))
        return record

    def _undelivered(self, counts: Sequence[Counts]) -> Counts:
        """Return the tokens of each job that no client has received or can still receive."""
        if not self.record.is_streamed and self._keeper is None:
            return _total(counts)
        return _total([self._undelivered_of(index, each) for index, each in enumerate(counts)])

    def _undelivered_of(self, index: int, counts: Counts) -> Counts:
        if index in self.generation.finished:
            return Counts()
        delivered = self.generation.delivered_tokens(index)
        if not delivered:
            return counts
        return Counts(completion_tokens=counts.completion_tokens - delivered)

    async def _counts(self) -> list[Counts]:
        """Return the engine's counts of each job, but at least the tokens received of it."""
        receipts = await self._receipts(self.record.job_ids)
        return [self._counts_of(index, receipt) for index, receipt in enumerate(receipts)]

    async def _receipts(self, job_ids: list[str]) -> list[JobReceipt]:
        queue = self._desk.catalogue.queue(self.record.model)
        receipts = [JobReceipt(JobState.ABSENT)] * len(job_ids)
        deadline, pause = time.monotonic() + RECEIPT_PATIENCE_SECONDS, FIRST_LOOK_SECONDS
        while time.monotonic() < deadline:
            try:
                receipts = await queue.receipts(job_ids)
                if all(each.state in (JobState.ENDED, JobState.ABSENT) for each in receipts):
                    break
            except RedisError as error:
                logger.warning("cannot read receipts now: %s", type(error).__name__)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_LOOK_SECONDS)
        return receipts

    def _counts_of(self, index: int, receipt: JobReceipt) -> Counts:
        finished = self.generation.finished.get(index)
        if finished is not None:
            return Counts(
                finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens
            )
        received = self.generation.received_tokens[index]
        prompt_tokens = receipt.prompt_tokens
        settled_before = self.record.completion_tokens
        if (
            received
            and not prompt_tokens
            and self.generation.received_tokens.total() > settled_before
        ):
            prompt_tokens = self._prompt_tokens(index)
        return Counts(
            prompt_tokens, receipt.cached_tokens, max(receipt.completion_tokens, received)
        )

    def _prompt_tokens(self, index: int) -> int:
        """Return the length of a prompt whose job was followed."""
        return sum(len(job.prompt_token_ids) for job in self.generation.jobs[index : index + 1])


def _total(counts: Iterable[Counts]) -> Counts:
    return Counts(*map(sum, zip(*counts, strict=True)))
