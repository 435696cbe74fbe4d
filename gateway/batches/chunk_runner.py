"""Batch runner of a gateway: claims chunks of lines, runs them, and stores their results."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from redis.exceptions import RedisError
from sqlalchemy import update

from common.tasks import Backoff, TaskSet, end_task, jittered, raise_if_cancelled
from contract.tier import ServiceTier
from gateway.auth.authenticator import Authenticator
from gateway.batches.file_checker import CHUNK_LINES, error_of
from gateway.batches.files.service import FileService
from gateway.batches.finishing import joined, numbered
from gateway.batches.line_runner import BatchState, Line, LineRun, LineRunner, refused
from gateway.batches.lines import ENDPOINTS_BY_PATH
from gateway.batches.principals import for_lines, principal_of
from gateway.batches.results import ResultFiles
from gateway.batches.store import LEASE, BatchStore
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.dialects.profile import PROFILES
from gateway.http.draining import Draining
from gateway.http.services import Services
from gateway.platform import telemetry
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import BatchFeedRow
from gateway.platform.settings import Settings
from gateway.records.batches import Batch, BatchStatus, Chunk
from gateway.records.errors import (
    AccountSuspendedError,
    ApiError,
    AuthenticationError,
    ErrorStyle,
    GenerationFailedError,
    IdempotencyInProgressError,
    InsufficientQuotaError,
    InternalError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    ServiceUnavailableError,
    StoreUnavailableError,
    TakenOverError,
    TenantQueueFullError,
    UnservedModelError,
    queue_unavailable,
)
from gateway.records.principal import Principal
from gateway.records.times import utc_now

LOOK_SECONDS: Final = 0.5
"""How often the runner looks for released lines, and for cancelled batches."""
IDLE_SECONDS: Final = 30.0
"""The longest time between two looks for released lines while it runs none and none are
announced."""
HERD_SECONDS: Final = 0.1
"""Idle gateways look within this time of an announcement, so that not all look at once."""
SPARE_SHARE: Final = 8
"""One of so many chunks is for a tenant that has no other here, however long their lines run."""
RENEW_TURNS: Final = 16
"""Turns after which leases are renewed, a fraction of `LEASE`."""
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 10.0
HELD_ATTEMPTS: Final = 5
"""Attempts of a line for which a limit or the workers have no room, before it is given back."""
MONEY_ATTEMPTS: Final = 8
"""Attempts of a line that lacks money: other requests hold more of it than they will use."""
FAILED_ATTEMPTS: Final = 3
"""Attempts of a line that failed while it ran."""
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
_GIVEN_BACK: Final = (
    OverloadedError,
    RateLimitError,
    TenantQueueFullError,
    UnservedModelError,
)
"""Errors that may last, and after which the line has certainly not run."""

logger = logging.getLogger(__name__)


class LinesReleased(asyncio.Event):
    """Set when lines of batches may be released."""


class _Chunk(NamedTuple):
    """A chunk that this gateway runs, and its batch."""

    chunk: Chunk
    state: BatchState


class BatchRunner:
    """Runs lines of batches in this gateway process."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        authenticator: Authenticator,
        dispatcher: Dispatcher,
        lines: LineRunner,
        released: LinesReleased,
        drain: Draining,
    ) -> None:
        self._settings = settings
        self._authenticator = authenticator
        self._gateway = dispatcher.gateway
        self._released = released
        files = FileService(settings, database)
        self._drain = drain
        self._database = database
        self._reader = files.reader
        self._results = ResultFiles(database, files)
        self._lines = lines
        self._most_chunks = max(settings.batch_lines // CHUNK_LINES, 1)
        self._running: dict[asyncio.Task[None], _Chunk] = {}
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
            except Exception:  # One batch must not end this gateway, and then the others.
                if not self._is_failing:
                    logger.exception("a turn of the batches failed")
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
                await self._released.wait()
        except TimeoutError:
            return
        self._released.clear()
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

    # -- chunks ----------------------------------------------------------------------------------

    async def _turn(self, *, renews: bool) -> None:
        now = utc_now()
        if self._running:
            await self._watch(now, renews=renews)
        room = self._most_chunks - len(self._running)
        if room <= 0 or self._drain.is_draining:
            return
        spare, served = self._most_chunks // SPARE_SHARE, set[str]()
        if room <= spare:
            spare, served = 0, {each.state.batch.tenant_id for each in self._running.values()}
        async with self._database.reading() as transaction:
            if not await BatchStore(transaction).has_claimable_chunk(now):
                return
        async with self._database.writing() as transaction:
            found = await BatchStore(transaction).claim_chunks(
                self._gateway, now, limit=room - spare, besides=served
            )
        running = {(each.batch_id, each.number) for each, _ in self._running.values()}
        states = self._states()
        for batch, chunk in found:
            if (chunk.batch_id, chunk.number) in running:
                continue  # Its lease had ended, but no other gateway has claimed it.
            state = states.setdefault(batch.id, BatchState(batch))
            state.note(batch)
            task = asyncio.create_task(self._run_chunk(chunk, state))
            self._running[task] = _Chunk(chunk, state)
            task.add_done_callback(self._ended)

    def _states(self) -> dict[str, BatchState]:
        """Return the batches of the running chunks, by their ids."""
        return {chunk.batch_id: state for chunk, state in self._running.values()}

    async def _watch(self, now: datetime, *, renews: bool) -> None:
        """Notice which batches must stop, renew leases, and report what was pushed back."""
        chunks, states = [each.chunk for each in self._running.values()], self._states()
        async with self._database.reading() as transaction:
            store = BatchStore(transaction)
            batches = await store.read(states)
            lost = await store.lost(self._gateway, chunks)
        for task, (chunk, _) in self._running.items():
            if (chunk.batch_id, chunk.number) in lost:
                # This gateway had no heartbeat for a while. The other one continues the lines.
                task.cancel()
        for batch in batches:
            states[batch.id].note(batch)
            try:
                await self._lines.promote(states[batch.id], tier_of(batch, now))
            except Exception:  # The lines of other batches need their leases.
                logger.exception("lines of %s cannot be promoted", batch.id)
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

    def _ended(self, task: asyncio.Task[None]) -> None:
        chunk, _ = self._running.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a chunk of %s failed and runs again", chunk.batch_id, exc_info=error)

    async def _run_chunk(self, chunk: Chunk, state: BatchState) -> None:
        """Run the lines of a chunk and store their results. Whatever fails is repeated.

        Lines that have to wait for long are given back, because they would hold the chunk.
        """
        try:
            content = await self._reader.read(state.batch.input_file_id, chunk.start, chunk.size)
        except StoreUnavailableError as error:
            logger.warning("lines of %s cannot be read: %s", chunk.batch_id, error)
            return
        lines = [Line(state, number, line) for number, line in numbered(chunk, content)]
        telemetry.BATCH_LINES_RUNNING.inc(len(lines))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_line(line)) for line in lines]
        finally:
            telemetry.BATCH_LINES_RUNNING.dec(len(lines))
        runs = [task.result() for task in tasks]
        ended = [run for run in runs if run is not None]
        if not await self._store(chunk, state, ended, remaining(chunk, lines, runs)):
            return
        for run in ended:
            telemetry.BATCH_LINES.labels("completed" if run.result.is_success else "failed").inc()
        self._forgetting.start(self._forget(ended))

    async def _forget(self, runs: list[LineRun]) -> None:
        await asyncio.gather(*map(self._lines.forget, runs))

    async def _store(
        self, chunk: Chunk, state: BatchState, runs: list[LineRun], rest: list[Chunk]
    ) -> bool:
        backoff = Backoff(FIRST_PAUSE_SECONDS, LEASE.total_seconds() / 2)
        results = [run.result for run in runs]
        while True:
            try:
                return await self._results.add(
                    state.batch, [chunk], results, rest=rest, gateway=self._gateway
                )
            except StoreUnavailableError as error:
                logger.warning("results of %s cannot be stored: %s", chunk.batch_id, error)
            await asyncio.sleep(backoff.next_seconds())

    # -- lines -----------------------------------------------------------------------------------

    async def _run_line(self, line: Line) -> LineRun | None:
        """Run a line until it has a result; return None if it has to wait for long."""
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
            is_long = pause > LONGEST_PAUSE_SECONDS or failures[type(error)] == HELD_ATTEMPTS
            if is_long and isinstance(error, _GIVEN_BACK) and not line.state.stop.is_set():
                return None
            pause = min(pause, LONGEST_PAUSE_SECONDS)
            await self._pause(line.state, jittered(pause, least=0.5))

    async def _principal(self, state: BatchState) -> Principal | None:
        """Return the principal of a batch's lines; None if none of them may begin to run.

        If the credential has lost its rights, the batch stops.
        """
        batch = state.batch
        if state.stop.is_set():
            return None
        try:
            principal = for_lines(await principal_of(self._authenticator, batch))
            return replace(principal, dialect=batch.dialect or principal.dialect)
        except AccountSuspendedError:
            pass
        except (AuthenticationError, PermissionDeniedError) as error:
            await self._stop(state, error)
        return None

    async def _stop(self, state: BatchState, error: ApiError) -> None:
        """Cancel a batch whose credential has lost its rights."""
        async with self._database.writing() as transaction:
            store = BatchStore(transaction)
            batch = await store.lock(state.batch.id)
            if batch.status is BatchStatus.IN_PROGRESS:
                errors = [error_of(error.message, error.code, None, None)]
                batch = await store.cancel(batch.id, utc_now(), errors=errors)
        state.note(batch)

    async def _pause(self, state: BatchState, seconds: float) -> None:
        """Wait, but no longer than until the lines must stop."""
        if state.stop.is_set():
            await asyncio.sleep(FIRST_PAUSE_SECONDS)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await state.stop.wait()

    def _style(self, line: Line) -> ErrorStyle:
        profile = PROFILES[line.batch.dialect or self._settings.default_dialect]
        return ENDPOINTS_BY_PATH[line.batch.endpoint].error_style_in(profile)


def remaining(chunk: Chunk, lines: Sequence[Line], runs: Sequence[LineRun | None]) -> list[Chunk]:
    """Return the lines of a chunk that have no result, as chunks without gaps."""
    rest, start = [], chunk.start
    for line, run in zip(lines, runs, strict=True):
        size = len(line.content) + 1
        if run is None:
            rest.append(replace(chunk, first_line=line.number, lines=1, start=start, size=size))
        start += size
    return joined(rest)


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
async def running_batches(services: Services, drain: Draining) -> AsyncIterator[None]:
    """Run lines of batches during the block."""
    runner = services.with_others({Draining: drain}).make(BatchRunner)
    task = asyncio.create_task(runner.run())
    try:
        yield
    finally:
        await end_task(task)
        await runner.aclose()
