"""Open reservations of one gateway process: reserve, renew, settle and release."""

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import msgspec
from redis.exceptions import RedisError

from common.tasks import (
    Backoff,
    TaskSet,
    each_apart,
    end_task,
    raise_if_cancelled,
    tolerating_outage,
    wait_for_end,
)
from contract import keys
from gateway.limits.headers import headers_of
from gateway.limits.refusals import refusal_error
from gateway.limits.replies import (
    Admitted,
    Kept,
    NeedsSeed,
    Refused,
    RequestEnd,
    ReservationRequest,
    ReserveReply,
    SeesUse,
    sees_all,
)
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.limits.stored_bytes import Storage
from gateway.records.errors import StoreUnavailableError

WAIT_SECONDS: Final = 0.25
"""How long the caller waits for an ending, before it continues in the background."""
MOST_ENDINGS: Final = 100_000
"""Maximum number of stored endings.

The sweep of reservations with expired leases handles the rest.
"""
MOST_RELEASES: Final = 10_000
"""Number of endings above which a release is tried only once.

While Redis is down, most releases have nothing to release.
"""
MOST_AT_ONCE: Final = 32
"""Endings of one bucket."""
CONFIRMED_SECONDS: Final = 10.0
"""How long a confirmed ending is kept.

This is longer than a replica lags its master, or the ledger lags Redis.
"""
MOST_CONFIRMED: Final = 20_000
FIRST_PAUSE_SECONDS: Final = 0.25
LONGEST_PAUSE_SECONDS: Final = 5.0

logger = logging.getLogger(__name__)


class Endings:
    """The endings of one process that Redis has not confirmed yet."""

    def __init__(self, store: QuotaStore) -> None:
        self._store = store
        # A plain dictionary finds its oldest key more slowly, the more were removed before it.
        self._pending: OrderedDict[str, RequestEnd] = OrderedDict()
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._confirmed: OrderedDict[str, tuple[float, RequestEnd]] = OrderedDict()
        self._followers = TaskSet()
        self._is_failing = False

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def begin(self, ending: RequestEnd) -> None:
        """Send an ending in the background; the first ending of a request wins."""
        _ = self._begin(ending)

    def begin_after(self, ending: RequestEnd) -> None:
        """Send an ending in the background after the request's earlier ending has arrived."""
        self._followers.start(self._follow(ending))

    def repeat_confirmed(self) -> None:
        """Resend recently confirmed endings, which Redis may have lost.

        Each one still counts once.
        """
        confirmed, self._confirmed = self._confirmed, OrderedDict()
        for _, ending in confirmed.values():
            self.begin(ending)

    def drop_confirmed(self) -> None:
        """Drop endings whose confirmation is older than CONFIRMED_SECONDS."""
        deadline = time.monotonic() - CONFIRMED_SECONDS
        while self._confirmed:
            request_id, (confirmed_at, _) = next(iter(self._confirmed.items()))
            if confirmed_at > deadline:
                return
            del self._confirmed[request_id]

    async def send(self, ending: RequestEnd) -> bool:
        """Send an ending, retrying until it arrives. Return whether it does within WAIT_SECONDS."""
        await wait_for_end(self._begin(ending), timeout_seconds=WAIT_SECONDS)
        return ending.request_id not in self._pending

    async def confirmed(self, request_id: str) -> None:
        """Wait until Redis has confirmed the ending of a request, if there is one."""
        while (ending := self._pending.get(request_id)) is not None:
            await self.send(ending)
            await asyncio.sleep(FIRST_PAUSE_SECONDS)

    async def run(self) -> None:
        """Retry unconfirmed endings until cancelled."""
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            await asyncio.sleep(backoff.next_seconds())
            await self._send_some()
            if len(self._pending) == len(self._attempts):
                backoff.reset()

    async def aclose(self, *, seconds: float) -> None:
        """Send unconfirmed endings, for at most this many seconds."""
        deadline = time.monotonic() + seconds
        while self._pending and time.monotonic() < deadline:
            await self._send_some(deadline - time.monotonic())
            if self._pending:
                await asyncio.sleep(0.05)
        await end_task(*self._attempts.values())
        await self._followers.cancel()
        if self._pending:
            logger.error("%d reservations could not be ended and will expire", len(self._pending))

    async def _send_some(self, seconds: float | None = None) -> None:
        """Send every ending that is not in flight; after a failure others of its bucket wait."""
        by_bucket: defaultdict[int, list[RequestEnd]] = defaultdict(list)
        for ending in self._pending.values():
            by_bucket[keys.bucket_of(ending.tenant_id)].append(ending)
        send = partial(self._send_some_of, seconds=seconds)
        await each_apart(send, by_bucket.values(), at_once=keys.BUCKETS)

    async def _send_some_of(self, waiting: Sequence[RequestEnd], *, seconds: float | None) -> None:
        for start in range(0, len(waiting), MOST_AT_ONCE):
            some = waiting[start : start + MOST_AT_ONCE]
            attempts = [self._attempt(each) for each in some if each.request_id in self._pending]
            if attempts:
                await asyncio.wait(attempts, timeout=seconds)
            if any(ending.request_id in self._pending for ending in some):
                return

    def _begin(self, ending: RequestEnd) -> "asyncio.Task[None]":
        known = self._pending.get(ending.request_id)
        if known is None:
            self._add(ending)
        return self._attempt(known or ending)

    def _add(self, ending: RequestEnd) -> None:
        if ending.record is None and len(self._pending) >= MOST_RELEASES:
            return
        if len(self._pending) >= MOST_ENDINGS:
            self._pending.popitem(last=False)
            logger.error("too many unconfirmed endings: dropped one, its reservation will expire")
        self._pending[ending.request_id] = ending

    def _attempt(self, ending: RequestEnd) -> "asyncio.Task[None]":
        task = self._attempts.get(ending.request_id)
        if task is None:
            task = asyncio.create_task(self._end(ending))
            self._attempts[ending.request_id] = task
        return task

    async def _end(self, ending: RequestEnd) -> None:
        try:
            await self._store.end(ending)
        except RedisError as error:
            if not self._is_failing:
                logger.warning("cannot end reservations, retrying: %s", type(error).__name__)
            self._is_failing = True
        else:
            self._is_failing = False
            self._pending.pop(ending.request_id, None)
            self._note_confirmed(ending)
        finally:
            del self._attempts[ending.request_id]

    def _note_confirmed(self, ending: RequestEnd) -> None:
        # Keep the order of arrival: a release after a settlement must not replace it.
        if ending.request_id not in self._confirmed:
            self._confirmed[ending.request_id] = (time.monotonic(), ending)
        if len(self._confirmed) > MOST_CONFIRMED:
            self._confirmed.popitem(last=False)

    async def _follow(self, ending: RequestEnd) -> None:
        while True:
            await asyncio.sleep(FIRST_PAUSE_SECONDS)
            if ending.request_id not in self._pending:
                self.begin(ending)
                return


AT_ONCE: Final = 100

LEASE_MS: Final = 30_000
"""Lease of a reservation.

Without renewal for this long, it is abandoned and no longer counts as a concurrent request.
"""
RENEW_BATCH: Final = 200
"""Reservations that one command renews; a larger batch would block Redis."""
MOST_SEEDINGS: Final = 5
"""How often one request may trigger seeding.

Counters may be unseeded again, or a new day may begin.
"""
SEED_PATIENCE_SECONDS: Final = 3.0
"""How long a request waits for the counters of its subjects.

Each attempt to derive them takes several queries, and settlements of other requests, such as the
lines of batches, make attempts void. Seeding continues after a request has stopped waiting.
"""
WATCH_SECONDS: Final = 1.0
"""Interval of the check whether Redis is still the same process."""
RETRY_AFTER_SECONDS: Final = 1.0


class Admission(msgspec.Struct, frozen=True):
    """An admitted request."""

    created_ms: int
    """Unix time of the admission in milliseconds, by the Redis clock."""
    headers: dict[str, str]
    """Rate limit headers for the response."""


class Reservations:
    """Open reservations of this process. Limits that cannot be checked fail closed: they reject."""

    def __init__(
        self, store: QuotaStore, seeder: Seeder, gateway: str, storage: Storage | None = None
    ) -> None:
        """With a storage, the accounts of end users count as stored bytes."""
        self._store = store
        self._storage = storage
        self._gateway = gateway
        self._seeder = seeder
        self._endings = Endings(store)
        self._open: dict[str, ReservationRequest] = {}
        self._restoring: set[str] = set()
        self._late: set[str] = set()
        """Requests that ended while their reservation was being restored."""

    @property
    def open_requests(self) -> int:
        """Number of admitted requests that are neither settled nor released."""
        return len(self._open)

    async def reserve(
        self,
        request: ReservationRequest,
        *,
        is_openai: bool,
        is_anthropic: bool = False,
        max_tokens_param: str = "max_tokens",
        sees: SeesUse = sees_all,
    ) -> Admission:
        """Reserve the maximum usage of a request in all of its limits, or in none.

        Raises RateLimitError or InsufficientQuotaError; `is_openai` selects the status and code for
        lack of money, `is_anthropic` the names of the headers, and `max_tokens_param` is the
        client's name of `max_tokens`. Raises StoreUnavailableError if the
        limits cannot be checked. After an error nothing is reserved.
        """
        reply = await self._ask(request)
        if isinstance(reply, NeedsSeed):
            reply = await self._seeded(request, reply, self._ask)
        if isinstance(reply, Refused):
            raise refusal_error(
                reply,
                is_openai=is_openai,
                is_anthropic=is_anthropic,
                max_tokens_param=max_tokens_param,
                sees=sees,
            )
        if not isinstance(reply, Admitted):
            raise _unavailable()
        self._open[request.request_id] = request
        headers = headers_of(reply, sees, is_anthropic=is_anthropic)
        return Admission(reply.created_ms, headers)

    async def extend_to(
        self, request: ReservationRequest, *, is_openai: bool, sees: SeesUse
    ) -> None:
        """Reserve for an admitted request as much as this, or leave its reservation as it is.

        Raises RateLimitError or InsufficientQuotaError if a limit does not allow it, RedisError or
        StoreUnavailableError if that is unknown, or if Redis has no such reservation: it has ended,
        or `restore` reserves again.
        """
        extend = partial(self._store.reserve, lease_ms=LEASE_MS, extends=True)
        reply = await self._seeded(request, await extend(request), extend)
        if isinstance(reply, Refused):
            raise refusal_error(reply, is_openai=is_openai, sees=sees)
        if not isinstance(reply, Admitted):
            raise _unavailable()
        if request.request_id in self._open:
            self._open[request.request_id] = request

    async def resume(self, request: ReservationRequest, *, is_openai: bool, sees: SeesUse) -> bool:
        """Reserve for a paused request, which begins its next term with this process as the owner.

        Return False if it is not paused any more, or of another term. Raises what `reserve` raises.
        It is unknown after an error whether the term has begun: then it can be taken over.
        """
        ask = partial(self._store.reserve, lease_ms=LEASE_MS)
        try:
            reply = await self._seeded(request, await ask(request), ask)
        except RedisError:
            raise _unavailable() from None
        if isinstance(reply, Refused):
            raise refusal_error(reply, is_openai=is_openai, sees=sees)
        if isinstance(reply, NeedsSeed):
            raise _unavailable()
        if isinstance(reply, Admitted):
            self._open[request.request_id] = request
        return isinstance(reply, Admitted)

    async def adopt(self, request: ReservationRequest, kept: Kept) -> int | None:
        """Take over a running request of another gateway, with the draft in `request`.

        Return the completion tokens that it reserves; None if it is not running any more, or not of
        the term before that of `kept`. Raises StoreUnavailableError.
        """
        try:
            reserved = await self._store.adopt(request, kept, lease_ms=LEASE_MS)
        except RedisError:
            raise _unavailable() from None
        if reserved is not None:
            self._open[request.request_id] = request
        return reserved

    def hand_over(self, request_id: str) -> None:
        """Leave a request to another gateway, or to the sweep."""
        self._open.pop(request_id, None)

    async def end(self, ending: RequestEnd) -> bool:
        """End a request of this process; a second call does nothing.

        Return whether Redis confirms within a quarter of a second. If not, the end is retried in
        the background, even if the caller disconnects. The first end of a request counts.
        """
        request_id = ending.request_id
        if self._open.pop(request_id, None) is None and request_id not in self._endings:
            return True
        if request_id in self._restoring:
            self._late.add(request_id)
        return await self._endings.send(ending)

    async def release(self, request_id: str, *, tenant_id: str, kept: Kept) -> None:
        """Release a request that has claimed its Idempotency-Key, and was not admitted.

        If Redis does not confirm within a quarter of a second, this continues in the background.
        """
        await self._endings.send(RequestEnd(tenant_id=tenant_id, request_id=request_id, kept=kept))

    def is_ending(self, request_id: str) -> bool:
        """Return whether Redis has not confirmed the end of a request of this process yet."""
        return request_id in self._endings

    async def confirmed(self, request_id: str) -> None:
        """Wait until Redis has confirmed the end of a request of this process."""
        await self._endings.confirmed(request_id)

    async def run(self) -> None:
        """Retry endings that did not arrive or were lost, until cancelled.

        `gateway.process.heartbeat` renews leases.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_server())
            tasks.create_task(self._endings.run())

    @property
    def are_confirmed(self) -> bool:
        """Whether Redis has confirmed every ending so far."""
        return not self._endings

    async def aclose(self, *, seconds: float = 3.0) -> None:
        """Send endings that have not arrived yet, for at most this many seconds."""
        await self._endings.aclose(seconds=seconds)

    async def renew(self) -> None:
        """Renew the lease of every open reservation, and restore lost ones."""
        await self.restore(await self.extend(self._store))

    async def extend(self, store: QuotaStore) -> list[str]:
        """Renew the lease of every open reservation, and return those that Redis does not have.

        May be called in another event loop, with a store that belongs to that loop. If Redis does
        not respond for a bucket, the next call renews its reservations.
        """
        by_bucket: defaultdict[int, list[str]] = defaultdict(list)
        # Iterate over a copy: another thread adds and removes requests meanwhile.
        for request_id, request in list(self._open.items()):
            by_bucket[keys.bucket_of(request.tenant_id)].append(request_id)
        unknown: list[str] = []

        async def renew(bucket: int) -> None:
            request_ids = by_bucket[bucket]
            for start in range(0, len(request_ids), RENEW_BATCH):
                batch = request_ids[start : start + RENEW_BATCH]
                unknown.extend(
                    await store.renew(bucket, batch, owner=self._gateway, lease_ms=LEASE_MS)
                )

        with tolerating_outage("renew reservations"):
            await each_apart(renew, list(by_bucket), at_once=keys.BUCKETS)
        return unknown

    async def restore(self, unknown: Sequence[str]) -> None:
        """Reserve again for those requests that are still open, if the limits allow it.

        If other requests have used up a limit in the meantime, the request continues without a
        reservation, and is settled like any other.
        """
        lost = [request_id for request_id in unknown if request_id in self._open]
        if not lost:
            return
        # Redis was emptied, or another process considered this gateway dead. The usage is recorded
        # anyway.
        logger.warning("Redis has lost the reservations of %d open requests", len(lost))
        requests = [self._open[each] for each in lost if each not in self._restoring]
        restored = 0
        for start in range(0, len(requests), AT_ONCE):
            some = requests[start : start + AT_ONCE]
            replies = await asyncio.gather(*map(self._restore, some))
            restored += sum(isinstance(reply, Admitted) for reply in replies)
        if requests:
            logger.warning("restored %d of %d lost reservations", restored, len(requests))

    async def _restore(self, request: ReservationRequest) -> ReserveReply | None:
        request_id = request.request_id
        reserve = partial(self._store.reserve, lease_ms=LEASE_MS)
        self._restoring.add(request_id)
        try:
            return await self._seeded(request, await reserve(request), reserve)
        except (RedisError, StoreUnavailableError) as error:
            # The next renewal tries again.
            logger.warning("cannot restore a reservation: %s", type(error).__name__)
            return None
        finally:
            self._restoring.discard(request_id)
            if request_id in self._late:
                self._late.discard(request_id)
                # The reservation may arrive after the request's end, and then nothing else would
                # end it.
                self._endings.begin_after(_release_of(request))

    async def _ask(self, request: ReservationRequest) -> ReserveReply:
        try:
            return await self._store.reserve(request, lease_ms=LEASE_MS)
        except BaseException as error:
            # It is unknown whether Redis has reserved.
            self._endings.begin(_release_of(request))
            if isinstance(error, RedisError):
                raise _unavailable() from None
            raise

    async def _seeded(
        self,
        request: ReservationRequest,
        reply: ReserveReply,
        ask: Callable[[ReservationRequest], Awaitable[ReserveReply]],
    ) -> ReserveReply:
        """Seed subjects with incomplete counters, and call `ask` again."""
        deadline = asyncio.get_running_loop().time() + SEED_PATIENCE_SECONDS
        for _ in range(MOST_SEEDINGS):
            if not isinstance(reply, NeedsSeed):
                break
            try:
                async with asyncio.timeout_at(deadline):
                    if self._storage is not None:
                        for user in reply.subjects:
                            await self._storage.take_for_user(
                                request.tenant_id, request.subjects, user
                            )
                    await self._seeder.seed(request.tenant_id, reply.subjects)
            except TimeoutError:
                raise _unavailable() from None
            reply = await ask(request)
        return reply

    async def _watch_server(self) -> None:
        while True:
            try:
                if await self._store.was_replaced():
                    logger.warning("Redis was restarted or replaced; resending recent endings")
                    self._endings.repeat_confirmed()
                    await self.renew()
                self._endings.drop_confirmed()
            except RedisError as error:
                logger.debug("cannot query Redis: %s", type(error).__name__)
            raise_if_cancelled()
            await asyncio.sleep(WATCH_SECONDS)


def _release_of(request: ReservationRequest) -> RequestEnd:
    return RequestEnd(tenant_id=request.tenant_id, request_id=request.request_id, kept=request.kept)


def _unavailable() -> StoreUnavailableError:
    return StoreUnavailableError(
        "The limits cannot be checked.", retry_after_seconds=RETRY_AFTER_SECONDS
    )
