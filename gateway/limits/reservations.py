"""Open reservations of one gateway process: reserve, renew, settle and release."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from redis.exceptions import RedisError

from common.tasks import raise_if_cancelled
from contract import keys
from gateway.limits.endings import Endings, ReservationEnd
from gateway.limits.headers import headers_of
from gateway.limits.refusals import refusal_error
from gateway.limits.replies import (
    Admitted,
    NeedsSeed,
    Refused,
    ReservationRequest,
    ReserveReply,
    SeesUse,
    sees_all,
)
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.records.errors import StoreUnavailableError
from gateway.records.usage_record import UsageRecord

AT_ONCE: Final = 100

logger = logging.getLogger(__name__)

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
CONFIRM_SECONDS: Final = 0.25
"""How often a settlement that has to be confirmed is tried again."""
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

    def __init__(self, store: QuotaStore, seeder: Seeder) -> None:
        self._store = store
        self._seeder = seeder
        self._endings = Endings(store)
        self._open: dict[str, tuple[str, ReservationRequest | None]] = {}
        """Tenant and reservation by request; None for a request that only settles."""
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
        sees: SeesUse = sees_all,
    ) -> Admission:
        """Reserve the maximum usage of a request in all of its limits, or in none.

        Raises RateLimitError or InsufficientQuotaError; `is_openai` selects the status and code for
        lack of money, `is_anthropic` the names of the headers. Raises StoreUnavailableError if the
        limits cannot be checked. After an error nothing is reserved.
        """
        reply = await self._ask(request)
        if isinstance(reply, NeedsSeed):
            reply = await self._seeded(request, reply, self._ask)
        if isinstance(reply, Refused):
            raise refusal_error(reply, is_openai=is_openai, is_anthropic=is_anthropic, sees=sees)
        if not isinstance(reply, Admitted):
            raise _unavailable()
        self._open[request.request_id] = request.tenant_id, request
        headers = headers_of(reply, sees, is_anthropic=is_anthropic)
        return Admission(reply.created_ms, headers)

    async def extend_to(
        self, request: ReservationRequest, *, is_openai: bool, sees: SeesUse
    ) -> None:
        """Reserve for an admitted request as much as this, or leave its reservation as it is.

        Raises RateLimitError or InsufficientQuotaError if a limit does not allow it, RedisError or
        StoreUnavailableError if that is unknown.
        """
        extend = partial(self._store.reserve, lease_ms=LEASE_MS, extends=True)
        reply = await self._seeded(request, await extend(request), extend)
        if isinstance(reply, Refused):
            raise refusal_error(reply, is_openai=is_openai, sees=sees)
        if isinstance(reply, Admitted) and request.request_id in self._open:
            self._open[request.request_id] = request.tenant_id, request

    async def take_over(self, request: ReservationRequest) -> int | None:
        """Take over a request whose reservation another gateway made, with the draft in `request`.

        Return the completion tokens that it reserves, or None if it is not open any more. Raises
        StoreUnavailableError.
        """
        try:
            reserved = await self._store.take_over(request, lease_ms=LEASE_MS)
        except RedisError:
            raise _unavailable() from None
        if reserved is not None:
            self._open[request.request_id] = request.tenant_id, request
        return reserved

    def hand_over(self, request_id: str) -> None:
        """Leave a reservation to another gateway, or to the sweep."""
        self._open.pop(request_id, None)

    def settle(self, record: UsageRecord) -> Coroutine[Any, Any, bool]:
        """Settle a reservation of this process with the actual usage; a second call does nothing.

        Return whether Redis confirms within a quarter of a second. If not, the settlement is
        retried in the background, even if the caller disconnects. The first ending of a request
        counts.
        """
        return self._end(ReservationEnd(record.tenant_id, record.request_id, record))

    async def settle_surely(self, record: UsageRecord) -> None:
        """Settle a reservation of this process; return when Redis has confirmed it."""
        is_confirmed = await self.settle(record)
        while not is_confirmed:
            await asyncio.sleep(CONFIRM_SECONDS)
            is_confirmed = await self.settle(record)

    def adopt(self, tenant_id: str, request_id: str) -> None:
        """Let this process settle a request that has ended, although no reservation is open."""
        self._open[request_id] = tenant_id, None

    def release(self, tenant_id: str, request_id: str) -> Coroutine[Any, Any, bool]:
        """Release a reservation of this process whose request was not admitted.

        Return value as for `settle`.
        """
        return self._end(ReservationEnd(tenant_id, request_id))

    async def withdraw(self, tenant_id: str, request_id: str) -> bool:
        """Keep a request of another process from being admitted; return False if it is admitted.

        Raises RedisError.
        """
        return await self._store.withdraw(tenant_id, request_id)

    async def run(self) -> None:
        """Retry endings that did not arrive or were lost, until cancelled.

        `gateway.process.heartbeat` renews leases.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_server())
            tasks.create_task(self._endings.run())

    async def aclose(self, *, seconds: float = 3.0) -> None:
        """Send endings that have not arrived yet, for at most this many seconds."""
        await self._endings.aclose(seconds=seconds)

    async def renew(self) -> None:
        """Renew the lease of every open reservation and restore lost ones. Raises RedisError."""
        await self.restore(await self.extend(self._store))

    async def extend(self, store: QuotaStore) -> list[str]:
        """Renew the lease of every open reservation, and return those that Redis does not have.

        May be called in another event loop, with a store that belongs to that loop. Raises
        RedisError.
        """
        by_bucket: dict[int, list[str]] = defaultdict(list)
        # Iterate over a copy: another thread adds and removes requests meanwhile.
        for request_id, (tenant_id, _) in list(self._open.items()):
            by_bucket[keys.bucket_of(tenant_id)].append(request_id)
        unknown: list[str] = []
        for bucket, request_ids in by_bucket.items():
            for start in range(0, len(request_ids), RENEW_BATCH):
                batch = request_ids[start : start + RENEW_BATCH]
                unknown += await store.renew(bucket, batch, lease_ms=LEASE_MS)
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
        again = [self._open[each][1] for each in lost if each not in self._restoring]
        requests = [each for each in again if each is not None]
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
                self._endings.begin_after(ReservationEnd(request.tenant_id, request_id))

    async def _ask(self, request: ReservationRequest) -> ReserveReply:
        try:
            return await self._store.reserve(request, lease_ms=LEASE_MS)
        except BaseException as error:
            # It is unknown whether Redis has reserved.
            self._endings.begin(ReservationEnd(request.tenant_id, request.request_id))
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
                    await self._seeder.seed(request.tenant_id, reply.subjects)
            except TimeoutError:
                raise _unavailable() from None
            reply = await ask(request)
        return reply

    async def _end(self, ending: ReservationEnd) -> bool:
        if (
            self._open.pop(ending.request_id, None) is None
            and ending.request_id not in self._endings
        ):
            return True
        if ending.request_id in self._restoring:
            self._late.add(ending.request_id)
        return await self._endings.send(ending)

    async def _watch_server(self) -> None:
        known: str | None = None
        while True:
            try:
                server = await self._store.server_id()
                if known not in (None, server):
                    logger.warning("Redis was restarted or replaced; resending recent endings")
                    self._endings.repeat_confirmed()
                    await self.renew()
                known = server
                self._endings.drop_confirmed()
            except RedisError as error:
                logger.debug("cannot query Redis: %s", type(error).__name__)
            raise_if_cancelled()
            await asyncio.sleep(WATCH_SECONDS)


def _unavailable() -> StoreUnavailableError:
    return StoreUnavailableError(
        "The limits cannot be checked.", retry_after_seconds=RETRY_AFTER_SECONDS
    )
