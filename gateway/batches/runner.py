"""Batch runner of a gateway: claims chunks of lines, runs them, and stores their results."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from redis.exceptions import RedisError
from sqlalchemy import update

from contract.tasks import Backoff, TaskSet, end_task, jittered, raise_if_cancelled
from contract.tier import ServiceTier
from gateway import telemetry
from gateway.auth.principal import Principal
from gateway.batches.finishing import numbered
from gateway.batches.principals import for_lines, principal_of, without_rights
from gateway.batches.results import ResultFiles
from gateway.batches.running import BatchState, Line, LineRun, LineRunner, refused
from gateway.batches.store import LEASE, BatchStore, Claimed
from gateway.batches.validation import CHUNK_LINES, error_of
from gateway.database.tables import BatchFeedRow
from gateway.dialects.profile import PROFILES
from gateway.errors import (
    AccountSuspendedError,
    ApiError,
    AuthenticationError,
    ErrorStyle,
    GenerationFailedError,
    IdempotencyInProgressError,
    InsufficientQuotaError,
    InternalError,
    PermissionDeniedError,
    RateLimitError,
    ServiceUnavailableError,
    StoreUnavailableError,
    TakenOverError,
    TenantQueueFullError,
    queue_unavailable,
)
from gateway.files.service import FileService
from gateway.http.context import ProcessContext
from gateway.http.draining import Drain
from gateway.tenancy.batches import Batch, BatchStatus
from gateway.tenancy.times import utc_now

LOOK_SECONDS: Final = 0.5
"""How often the runner looks for released lines, and for cancelled batches."""
IDLE_SECONDS: Final = 30.0
"""The longest time between two looks for released lines while it runs none and none are
announced."""
HERD_SECONDS: Final = 0.1
"""Idle gateways look within this time of an announcement, so that not all look at once."""
RENEW_TURNS: Final = 16
"""Turns after which leases are renewed, a fraction of `LEASE`."""
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0
MONEY_ATTEMPTS: Final = 8
"""Attempts of a line that lacks money: other requests hold more of it than they will use."""
FAILED_ATTEMPTS: Final = 3
"""Attempts of a line that failed while it ran."""
SUSPENDED_SECONDS: Final = 3.0
"""Interval at which the lines of a suspended tenant look whether it is active again."""
CLOSE_SECONDS: Final = 2.0
"""Time to delete responses when the gateway stops; others expire."""
FLEX_SHARE: Final = 0.25
DEFAULT_SHARE: Final = 0.1
"""Lines of a batch that will be late are promoted when this share of its window is left."""

_NOT_PUSHED_BACK: Final = (
    GenerationFailedError,
    IdempotencyInProgressError,
    StoreUnavailableError,
)
"""Errors after which a line runs again, and that do not show that too many lines run."""

logger = logging.getLogger(__name__)


class BatchRunner:
    """Runs lines of batches in this gateway process."""

    def __init__(self, context: ProcessContext, drain: Drain) -> None:
        files = FileService.of(context.settings, context.database)
        self._context = context
        self._drain = drain
        self._database = context.database
        self._reader = files.reader
        self._results = ResultFiles(context.database, files)
        self._lines = LineRunner(context)
        self._most_chunks = max(context.settings.batch_lines // CHUNK_LINES, 1)
        self._states: dict[str, BatchState] = {}
        """The batches of its chunks."""
        self._running: dict[asyncio.Task[None], Claimed] = {}
        self._forgetting = TaskSet()
        self._pushed_back: set[str] = set()
        """Tenants whose lines had to wait since the last turn."""
        self._is_failing = False

    async def run(self) -> None:
        """Run lines until cancelled."""
        turn = 0
        while True:
            try:
                await self._turn(renews=turn % RENEW_TURNS == 0)
                self._is_failing = False
            except StoreUnavailableError as error:
                if not self._is_failing:
                    logger.warning("batches cannot be read: %s", error)
                self._is_failing = True
            raise_if_cancelled()
            turn += 1
            if self._running or self._is_failing:
                await asyncio.sleep(LOOK_SECONDS)
            else:
                await self._wait_for_lines()

    async def _wait_for_lines(self) -> None:
        """Wait until lines are announced, or for a while: an announcement may get lost."""
        try:
            async with asyncio.timeout(jittered(IDLE_SECONDS, least=0.5)):
                await self._context.lines_released.wait()
        except TimeoutError:
            return
        self._context.lines_released.clear()
        await asyncio.sleep(jittered(HERD_SECONDS, least=0.0))

    async def aclose(self) -> None:
        """Leave running lines to other gateways."""
        claimed = [each.chunk for each in self._running.values()]
        await end_task(*self._running)
        await self._forgetting.finish(CLOSE_SECONDS)
        if claimed:
            try:
                async with self._database.writing() as transaction:
                    await BatchStore(transaction).renew(
                        self._gateway, claimed, utc_now(), lease=timedelta(0)
                    )
            except StoreUnavailableError as error:
                logger.warning("chunks of batches cannot be given back: %s", error)

    @property
    def _gateway(self) -> str:
        return self._context.dispatcher.gateway

    # -- chunks ----------------------------------------------------------------------------------

    async def _turn(self, *, renews: bool) -> None:
        now = utc_now()
        if self._running:
            await self._watch(now, renews=renews)
        room = self._most_chunks - len(self._running)
        if room <= 0 or self._drain.is_draining:
            return
        async with self._database.reading() as transaction:
            if not await BatchStore(transaction).has_claimable(now):
                return
        async with self._database.writing() as transaction:
            found = await BatchStore(transaction).claim_chunks(self._gateway, now, limit=room)
        running = {(each.chunk.batch_id, each.chunk.number) for each in self._running.values()}
        for claimed in found:
            if (claimed.chunk.batch_id, claimed.chunk.number) in running:
                continue  # Its lease had ended, but no other gateway has claimed it.
            task = asyncio.create_task(self._run_chunk(claimed))
            self._running[task] = claimed
            task.add_done_callback(self._ended)

    async def _watch(self, now: datetime, *, renews: bool) -> None:
        """Notice which batches must stop, renew leases, and report what was pushed back."""
        chunks = [each.chunk for each in self._running.values()]
        async with self._database.reading() as transaction:
            store = BatchStore(transaction)
            batches = await store.read(self._states)
            lost = await store.lost(self._gateway, chunks)
        for task, (_, chunk) in self._running.items():
            if (chunk.batch_id, chunk.number) in lost:
                # This gateway had no heartbeat for a while. The other one continues the lines.
                task.cancel()
        for batch in batches:
            await self._lines.promote(self._note(batch), tier_of(batch, now))
        if not renews and not self._pushed_back:
            return
        pushed_back, self._pushed_back = self._pushed_back, set()
        async with self._database.writing() as transaction:
            if renews:
                await BatchStore(transaction).renew(self._gateway, chunks, now)
            if pushed_back:
                await transaction.execute(
                    update(BatchFeedRow)
                    .where(BatchFeedRow.tenant_id.in_(pushed_back))
                    .values(pushed_back_at=now)
                )

    def _note(self, batch: Batch) -> BatchState:
        state = self._states.get(batch.id)
        if state is None:
            state = self._states[batch.id] = BatchState(batch)
        state.batch = batch
        if batch.status is not BatchStatus.IN_PROGRESS:
            state.stop.set()
        return state

    def _ended(self, task: asyncio.Task[None]) -> None:
        batch_id = self._running.pop(task).batch.id
        if all(each.batch.id != batch_id for each in self._running.values()):
            del self._states[batch_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a chunk of %s failed and runs again", batch_id, exc_info=error)

    async def _run_chunk(self, claimed: Claimed) -> None:
        """Run the lines of a chunk and store their results. Whatever fails is repeated."""
        state, chunk = self._note(claimed.batch), claimed.chunk
        try:
            content = await self._reader.read(claimed.batch.input_file_id, chunk.start, chunk.size)
        except StoreUnavailableError as error:
            logger.warning("lines of %s cannot be read: %s", claimed.batch.id, error)
            return
        lines = [Line(state, number, line) for number, line in numbered(chunk, content)]
        telemetry.BATCH_LINES_RUNNING.inc(len(lines))
        try:
            runs = await asyncio.gather(*map(self._run_line, lines))
        finally:
            telemetry.BATCH_LINES_RUNNING.dec(len(lines))
        if not await self._store(claimed, runs):
            return
        for run in runs:
            telemetry.BATCH_LINES.labels("completed" if run.result.is_success else "failed").inc()
        self._forgetting.start(self._forget(runs))

    async def _forget(self, runs: list[LineRun]) -> None:
        await asyncio.gather(*map(self._lines.forget, runs))

    async def _store(self, claimed: Claimed, runs: list[LineRun]) -> bool:
        backoff = Backoff(FIRST_PAUSE_SECONDS, LEASE.total_seconds() / 2)
        while True:
            try:
                results = [run.result for run in runs]
                return await self._results.add(claimed.batch, [claimed.chunk], results)
            except StoreUnavailableError as error:
                logger.warning("results of %s cannot be stored: %s", claimed.batch.id, error)
            await asyncio.sleep(backoff.next_seconds())

    # -- lines -----------------------------------------------------------------------------------

    async def _run_line(self, line: Line) -> LineRun:
        """Run a line until it has a result, however often it is refused for a moment."""
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        failures = Counter[type[ApiError]]()
        while True:
            try:
                principal = await self._principal(line.state)
                return await self._lines.run(line, principal, tier_of(line.batch, utc_now()))
            except RedisError:
                error: ApiError = queue_unavailable()
            except ApiError as raised:
                error = raised
            except Exception:
                logger.exception("line %s failed", line.id)
                return refused(line, InternalError(), self._style(line))
            failures[type(error)] += 1
            if not runs_again(error, failures[type(error)]):
                return refused(line, error, self._style(line))
            if not isinstance(error, _NOT_PUSHED_BACK):
                self._pushed_back.add(line.batch.tenant_id)
            pause = max(backoff.next_seconds(), error.retry_after_seconds or 0.0)
            await self._pause(line.state, jittered(pause, least=0.5))

    async def _principal(self, state: BatchState) -> Principal:
        """Return the principal of a batch's lines. If it has lost its rights, the batch stops."""
        batch = state.batch
        while not state.stop.is_set():
            try:
                principal = for_lines(await principal_of(self._context.authenticator, batch))
                return replace(principal, dialect=batch.dialect or principal.dialect)
            except AccountSuspendedError:
                self._pushed_back.add(batch.tenant_id)
                await self._pause(state, SUSPENDED_SECONDS)
            except (AuthenticationError, PermissionDeniedError) as error:
                await self._stop(state, error)
        # Lines that have ended or run get their result; no other line runs.
        return without_rights(batch)

    async def _stop(self, state: BatchState, error: ApiError) -> None:
        """Cancel a batch whose credential has lost its rights."""
        async with self._database.writing() as transaction:
            store = BatchStore(transaction)
            batch = await store.lock(state.batch.id)
            if batch.status is BatchStatus.IN_PROGRESS:
                errors = [error_of(error.message, error.code, None, None)]
                await store.change(
                    batch.id,
                    status=BatchStatus.CANCELLING,
                    cancelling_at=utc_now(),
                    errors=errors,
                )
                batch = await store.lock(batch.id)
        self._note(batch)

    async def _pause(self, state: BatchState, seconds: float) -> None:
        """Wait, but no longer than until the lines must stop."""
        if state.stop.is_set():
            await asyncio.sleep(FIRST_PAUSE_SECONDS)
            return
        try:
            async with asyncio.timeout(seconds):
                await state.stop.wait()
        except TimeoutError:
            pass

    def _style(self, line: Line) -> ErrorStyle:
        return PROFILES[line.batch.dialect or self._context.settings.default_dialect].error_style


def tier_of(batch: Batch, now: datetime) -> ServiceTier:
    """Return the tier in the queue of a batch's next lines: higher if the batch will be late."""
    end = batch.projected_end(now)
    if end is None or end <= batch.expires_at:
        return ServiceTier.BATCH
    left = (batch.expires_at - now) / (batch.expires_at - batch.created_at)
    if left < DEFAULT_SHARE:
        return ServiceTier.DEFAULT
    return ServiceTier.FLEX if left < FLEX_SHARE else ServiceTier.BATCH


def runs_again(error: ApiError, times: int) -> bool:
    """Return whether a line that was refused or failed so many times like this runs again."""
    if isinstance(error, GenerationFailedError) and not isinstance(error, TakenOverError):
        return times < FAILED_ATTEMPTS
    if isinstance(error, InsufficientQuotaError):
        return error.should_retry is not False and times < MONEY_ATTEMPTS
    if isinstance(error, RateLimitError):
        return error.should_retry is not False
    # A gateway that died while it admitted the line blocks the key until its heartbeat is missing.
    temporary = (ServiceUnavailableError, TenantQueueFullError, IdempotencyInProgressError)
    return isinstance(error, temporary)


@asynccontextmanager
async def running_batches(
    context: ProcessContext, drain: Drain, *, on_failure: Callable[[], None]
) -> AsyncIterator[None]:
    """Run lines of batches during the block. Calls `on_failure` if a bug ends the loop."""
    runner = BatchRunner(context, drain)
    task = asyncio.create_task(runner.run())

    def report_failure(ended: asyncio.Task[None]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            logger.critical("the batch runner failed; the gateway shuts down", exc_info=error)
            on_failure()

    task.add_done_callback(report_failure)
    try:
        yield
    finally:
        await end_task(task)
        await runner.aclose()
