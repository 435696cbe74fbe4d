"""The end of an admitted request: what it used is settled exactly once, whichever way it ends (room 11)."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

import msgspec
from redis.exceptions import RedisError

from contract import clock
from contract.receipts import JobReceipt, JobState
from gateway.accounts.usage import Outcome, UsageRecord
from gateway.dispatch.catalogue import Catalogue
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.generation import Generation
from gateway.errors import ApiError, GenerationTimeoutError, InternalError, SlowReaderError
from gateway.quota.reservations import Admission, Reservations
from gateway.stream.completion import Usage
from gateway.tasks import raise_if_cancelled

RECEIPT_PATIENCE_SECONDS: Final = 30.0
"""How long the engine's counts of a cancelled job are waited for: longer than a dead worker's lease."""
FIRST_LOOK_SECONDS: Final = 0.02
LAST_LOOK_SECONDS: Final = 0.5
FORGET_SECONDS: Final = 1.0
"""How often receipts of settled jobs are dropped."""
FORGET_BATCH: Final = 500
MAX_TO_FORGET: Final = 100_000
"""Receipts that wait to be dropped while Redis is away; the rest expires by itself."""
CLOSE_SECONDS: Final = 5.0

logger = logging.getLogger(__name__)


class _Counts(NamedTuple):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class SettlementDesk:
    """All accounts of one gateway process."""

    def __init__(
        self, reservations: Reservations, dispatcher: Dispatcher, catalogue: Catalogue
    ) -> None:
        self.reservations = reservations
        self.dispatcher = dispatcher
        self.catalogue = catalogue
        self._work: set[asyncio.Task[None]] = set()
        self._to_forget: defaultdict[str, list[str]] = defaultdict(list)

    def open(self, record: UsageRecord, admission: Admission, generation: Generation) -> "Account":
        """Return the account of a request that was admitted just now."""
        record = msgspec.structs.replace(record, created_ms=admission.created_ms)
        return Account(self, record, admission, generation)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something to its end, even if whoever started it goes away."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._done)

    def forget(self, model: str, job_ids: list[str]) -> None:
        """Drop the receipts of jobs that are settled, soon."""
        if sum(map(len, self._to_forget.values())) < MAX_TO_FORGET:
            self._to_forget[model] += job_ids

    async def run(self) -> None:
        """Drop receipts until cancelled."""
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            await self._forget_all()
            raise_if_cancelled()

    async def aclose(self) -> None:
        """Finish what is being settled, within bounds; a sweep settles the rest."""
        if self._work:
            await asyncio.wait(self._work, timeout=CLOSE_SECONDS)
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

    def _done(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request could not be settled; a sweep will do it", exc_info=error)


class Account:
    """What was reserved for one admitted request, and what it came to. It ends once; the first end counts."""

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
        self._generation = generation
        self._opened_at = time.monotonic()
        self._first_token_ms = 0
        self._has_ended = False

    def replied(self) -> None:
        """A worker was heard of; the first time counts."""
        if not self._first_token_ms:
            self._first_token_ms = max(int(self._age_ms()), 1)

    def cost_of(self, usage: Usage) -> int:
        """Return what the usage of the finished request costs in micro-dollars."""
        return self.record.cost_of(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )

    async def finish(self) -> None:
        """Settle a request whose jobs have all finished, before its client learns of it.

        What it held is free then, so that a client can send its next request at once.
        """
        if self._has_ended:
            return
        self._has_ended = True
        finished = self._generation.finished.values()
        if not self._first_token_ms:
            # Nobody read along; the worker knows how long it has generated since its first token.
            generated_ms = max(each.generation_ms for each in finished)
            self._first_token_ms = max(int(self._age_ms() - generated_ms), 1)
        counts = [
            _Counts(each.prompt_tokens, each.cached_tokens, each.completion_tokens)
            for each in finished
        ]
        await self._settle(Outcome.FINISHED, "", counts)

    def end(self, outcome: Outcome, code: str = "") -> None:
        """Settle a request that ends in any other way, as soon as its engine has told its counts."""
        if not self._has_ended:
            self._has_ended = True
            self._desk.start(self._end(outcome, code))

    def fail(self, error: BaseException) -> None:
        """Settle a request that ends with an error."""
        if isinstance(error, SlowReaderError):
            self.end(Outcome.CANCELLED, error.code)
        elif isinstance(error, GenerationTimeoutError):
            self.end(Outcome.TIMED_OUT, error.code)
        else:
            code = error.code if isinstance(error, ApiError) else InternalError.code
            self.end(Outcome.FAILED, code)

    def _age_ms(self) -> float:
        return (time.monotonic() - self._opened_at) * 1000

    async def _end(self, outcome: Outcome, code: str) -> None:
        await self._desk.dispatcher.cancel(self._generation)
        await self._settle(outcome, code, await self._counts())

    async def _settle(self, outcome: Outcome, code: str, counts: list[_Counts]) -> None:
        totals = _Counts(*map(sum, zip(*counts, strict=True)))
        record = msgspec.structs.replace(
            self.record,
            outcome=outcome,
            code=code,
            ended_ms=clock.now_ms(),
            first_token_ms=self._first_token_ms,
            **totals._asdict(),
        )
        await self._desk.reservations.settle(record.priced())
        self._desk.forget(record.model, [ticket.job.id for ticket in self._generation.tickets])

    async def _counts(self) -> list[_Counts]:
        """Return what the engine counted for each job, and never less than what was received of it."""
        tickets = self._generation.tickets
        receipts = await self._receipts([ticket.job.id for ticket in tickets])
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

    def _counts_of(self, index: int, receipt: JobReceipt) -> _Counts:
        finished = self._generation.finished.get(index)
        if finished is not None:
            return _Counts(
                finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens
            )
        received = self._generation.received_tokens[index]
        prompt_tokens = receipt.prompt_tokens
        if received and not prompt_tokens:
            prompt_tokens = len(self._generation.tickets[index].job.prompt_token_ids)
        return _Counts(
            prompt_tokens, receipt.cached_tokens, max(receipt.completion_tokens, received)
        )
