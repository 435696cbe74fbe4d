"""Run a line of a batch in a gateway, as the same request over HTTP would run."""

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

from redis.exceptions import RedisError

from common import logs
from common.not_none import not_none
from common.tasks import end_task
from contract.tier import TIER_RANKS, ServiceTier
from gateway.batches.finishing import end_code_of
from gateway.batches.lines import (
    ENDPOINTS_BY_PATH,
    Result,
    custom_id_of,
    decode_line,
    failed,
    finished,
    line_id_of,
    unfinished,
)
from gateway.batches.principals import without_rights
from gateway.completions.admission.call import BatchLine, Call
from gateway.completions.admission.check import RequestChecker
from gateway.completions.admission.continuing import Continuations
from gateway.completions.admission.idempotency import EarlierResponses, IdempotentRequest
from gateway.completions.admission.model_choice import Models
from gateway.completions.admission.submit import RequestSubmitter, Submission
from gateway.completions.rendering.assembler import WholeResponse
from gateway.completions.rendering.form_registry import collect
from gateway.completions.stored.head import ResponseHead, cost_by
from gateway.completions.stored.service import Responses
from gateway.completions.stored.store import StoredResponse
from gateway.dialects.endpoint import Endpoint
from gateway.dialects.wire import StructureMeter, parse_object
from gateway.models.catalogue import Catalogue
from gateway.platform.concurrency.fair_turns import FairTurns
from gateway.platform.concurrency.large_work import INLINE_SIZE, LargeWork
from gateway.platform.settings import Settings
from gateway.records.batches import Batch, BatchStatus
from gateway.records.errors import (
    ApiError,
    ErrorStyle,
    GenerationTimeoutError,
    RequestCancelledError,
)
from gateway.records.principal import Principal
from gateway.records.times import to_ms

MOST_STARTING: Final = 8
"""Lines that are checked and submitted at once; tenants take turns."""
GRACE_MS: Final = 60_000
"""Before this time after its deadline, a batch stops its lines itself."""

_CANCELLED: Final = "The line was cancelled."

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class BatchState:
    """A batch as it was last read, and whether its lines must stop."""

    batch: Batch
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    tier: ServiceTier = ServiceTier.BATCH
    """The tier to which its waiting jobs were last promoted."""
    jobs: set[tuple[str, str]] = field(default_factory=set)
    """Model and id of its jobs that this gateway follows."""

    def note(self, batch: Batch) -> None:
        """Record the batch as it was read now."""
        self.batch = batch
        if batch.status is not BatchStatus.IN_PROGRESS:
            self.stop.set()


@dataclass(frozen=True)
class Line:
    """A line of a batch."""

    state: BatchState
    number: int
    """Counted from 1."""
    content: bytes

    @property
    def batch(self) -> Batch:
        """The batch as it was last read."""
        return self.state.batch

    @property
    def id(self) -> str:
        """The identity of the line."""
        return line_id_of(self.batch.id, self.number)

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that serves the line."""
        return ENDPOINTS_BY_PATH[self.batch.endpoint]

    @property
    def request_id(self) -> str:
        """Id of its response and its usage record, however often it runs."""
        return self.endpoint.id_of(self.id)

    @cached_property
    def custom_id(self) -> str:
        """The customer's name of the line."""
        return custom_id_of(self.content)

    @cached_property
    def idempotent(self) -> IdempotentRequest:
        """What makes its request run once, however often and wherever it is submitted."""
        batch, digest = self.batch, hashlib.sha256(self.content).hexdigest()
        # A client's key has no space, so it never stands for a line.
        return IdempotentRequest.of(batch.tenant_id, batch.project_id, f"line {self.id}", digest)


class LineRun(NamedTuple):
    """The result of a line, and the response that can be deleted once the result is stored."""

    result: Result
    head: ResponseHead | None = None


@dataclass(eq=False)
class LineRunner:
    """Runs lines in this process. A line that another gateway began is continued."""

    _settings: Settings
    _large_work: LargeWork
    _models: Models
    _continuations: Continuations
    _checker: RequestChecker
    _submitter: RequestSubmitter
    _earlier: EarlierResponses
    _responses: Responses
    _catalogue: Catalogue

    def __post_init__(self) -> None:
        # Without it, hundreds of released lines would start in one turn of the event loop.
        self._starting = FairTurns(
            MOST_STARTING, most_waiting_size=0, wait_seconds=None, what="lines"
        )

    async def run(
        self, line: Line, principal: Principal | None, tier: ServiceTier
    ) -> LineRun | None:
        """Run a line in a tier of the queue until it ends or must stop; return its result.

        Without a principal, a line that has not begun does not run: return None, or the result of
        a line that must stop. Raises an ApiError if the request is refused or fails, and
        RedisError.
        """
        logs.request_id.set(line.id)
        tenant_id = line.batch.tenant_id
        await self._starting.take(tenant_id, size=0)
        began = time.perf_counter()
        try:
            call = await self._call(line, principal or without_rights(line.batch), tier)
            found = await self._find_or_submit(line, call, begins=principal is not None)
        finally:
            self._starting.give_back(tenant_id, seconds=time.perf_counter() - began)
        if found is None:
            if not line.state.stop.is_set():
                return None
            return _stopped(line)
        if isinstance(found, Submission):
            return await self._follow(line, found)
        return await self._continue(line, found)

    async def promote(self, state: BatchState, tier: ServiceTier) -> None:
        """Raise the waiting jobs of a batch to a tier, unless they were raised before."""
        if TIER_RANKS[tier] >= TIER_RANKS[state.tier]:
            return
        try:
            for model in {model for model, _ in state.jobs}:
                job_ids = sorted(job_id for of, job_id in state.jobs if of == model)
                queue = self._catalogue.queue(model)
                await queue.promote(job_ids, state.batch.tenant_id, tier)
            state.tier = tier
        except RedisError as error:
            logger.warning("lines of a batch cannot be promoted: %s", type(error).__name__)

    async def forget(self, run: LineRun) -> None:
        """Delete the stored response of a line whose result is stored. It expires otherwise."""
        if run.head is None:
            return
        try:
            await self._responses.forget(run.head)
        except RedisError as error:
            logger.warning("cannot delete the response of a line: %s", type(error).__name__)

    async def _call(self, line: Line, principal: Principal, tier: ServiceTier) -> Call:
        found = decode_line(line.content)
        content = bytes(found.body)
        beside = self._large_work.of(principal.tenant_id, size=len(content))
        body: dict[str, Any] = await beside(partial(self._parse, content))
        choice, profile = await self._models.choose(principal, body, header=None)
        deadline_ms = to_ms(line.batch.expires_at) + GRACE_MS
        batch_line = BatchLine(line.id, line.request_id, deadline_ms, tier)
        return Call(principal, profile, choice, body, beside, line=batch_line)

    def _parse(self, content: bytes) -> dict[str, Any]:
        if len(content) > INLINE_SIZE:
            meter = StructureMeter(most_items=self._settings.max_body_items)
            meter.feed(content)
            while meter.is_in_doubt:
                meter.count()
        return parse_object(content)

    async def _find_or_submit(
        self, line: Line, call: Call, *, begins: bool
    ) -> StoredResponse | Submission | None:
        """Return the earlier response of a line, or submit it; None if it must not begin to run."""
        endpoint, request_id = line.endpoint, line.endpoint.new_id()
        earlier = await self._earlier.find(call, line.idempotent, request_id)
        if earlier is not None:
            return earlier
        if line.state.stop.is_set() or not begins:
            await self._earlier.release(line.idempotent, request_id)
            return None
        try:
            return await self._submit(call, endpoint, request_id, line.idempotent)
        except BaseException:
            await asyncio.shield(self._earlier.release(line.idempotent, request_id))
            raise

    async def _submit(
        self, call: Call, endpoint: Endpoint, request_id: str, idempotent: IdempotentRequest
    ) -> Submission:
        call = await self._continuations.continued(call, endpoint)
        checked = await self._checker.check(call, endpoint)
        return await self._submitter.submit(
            call,
            checked,
            request_id=request_id,
            shows_cost=call.principal.shows_cost,
            idempotent=idempotent,
        )

    async def _follow(self, line: Line, submission: Submission) -> LineRun:
        """Return the result of a line that this gateway has just submitted."""
        responses, response = self._responses, not_none(submission.response)
        model, jobs = submission.checked.card.model, submission.generation.jobs
        own = {(model, job.id) for job in jobs}
        line.state.jobs |= own
        collecting = asyncio.create_task(collect(submission.completion, submission.generation))
        try:
            whole = await self._collected(collecting, response, line.state.stop)
            await responses.of(submission.settlement).finish()
            if not submission.settlement.is_finished and not await responses.settled(response):
                # It was cancelled when its last token had arrived, and is not charged.
                raise RequestCancelledError(_CANCELLED)
        except asyncio.CancelledError:
            # The gateway stops: the response continues at another one.
            responses.of(submission.settlement).leave()
            raise
        except BaseException as error:
            responses.of(submission.settlement).fail(error)
            raise
        finally:
            line.state.jobs -= own
            await end_task(collecting)
        return _finished(line, response, whole)

    async def _continue(self, line: Line, response: StoredResponse) -> LineRun:
        """Return the result of a line that was submitted before."""
        reader = await self._responses.attach(response)
        collecting = asyncio.create_task(collect(reader.completion, reader.generation))
        try:
            whole = await self._collected(collecting, response, line.state.stop)
        finally:
            await end_task(collecting)
            await asyncio.shield(reader.aclose())
        if not await self._responses.settled(response):
            raise RequestCancelledError(_CANCELLED)
        return _finished(line, response, whole)

    async def _collected(
        self, collecting: asyncio.Task[WholeResponse], response: StoredResponse, stop: asyncio.Event
    ) -> WholeResponse:
        """Wait for a response; cancel it if the line must stop before. Raises an ApiError."""
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({collecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                await self._responses.cancel(response)
        finally:
            stopping.cancel()
        return await collecting


def refused(line: Line, error: ApiError, style: ErrorStyle) -> LineRun:
    """Return the result of a line whose request was refused or failed for good."""
    if isinstance(error, RequestCancelledError | GenerationTimeoutError):
        return _stopped(line)
    return LineRun(failed(line.id, line.custom_id, request_id=line.id, error=error, style=style))


def _stopped(line: Line) -> LineRun:
    return LineRun(unfinished(line.id, line.custom_id, end_code_of(line.batch)))


def _finished(line: Line, response: StoredResponse, whole: WholeResponse) -> LineRun:
    result = finished(
        line.id,
        line.custom_id,
        request_id=line.request_id,
        body=whole.content,
        usage=whole.usage,
        cost_micros=cost_by(response.head.record)(whole.usage),
    )
    return LineRun(result, response.head)
