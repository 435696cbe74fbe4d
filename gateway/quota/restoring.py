"""Restore open reservations that Redis has lost, after a flush or a failover."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from redis.exceptions import RedisError

from gateway.errors import StoreUnavailableError
from gateway.quota.endings import Ending, Endings
from gateway.quota.replies import Admitted, ReservationRequest, ReserveReply

AT_ONCE: Final = 100

logger = logging.getLogger(__name__)


class Restoring:
    """Reservations of open requests, kept for as long as they may have to be restored.

    If other requests have used up a limit in the meantime, the request continues without a
    reservation, and is settled like any other.
    """

    def __init__(
        self, reserve: Callable[[ReservationRequest], Awaitable[ReserveReply]], endings: Endings
    ) -> None:
        self._reserve = reserve
        self._endings = endings
        self._requests: dict[str, ReservationRequest] = {}
        self._running: set[str] = set()
        self._late: set[str] = set()
        """Requests that ended while their reservation was being restored."""

    def add(self, request: ReservationRequest) -> None:
        """Store the reservation of an admitted request."""
        self._requests[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """Drop a request that another gateway has taken over."""
        self._requests.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """End the request: a reservation that is restored later is released."""
        self.remove(request_id)
        if request_id in self._running:
            self._late.add(request_id)

    async def restore(self, request_ids: Sequence[str]) -> None:
        """Reserve again for the requests that are still open, if the limits allow it."""
        requests = [self._requests[each] for each in request_ids if each in self._requests]
        requests = [each for each in requests if each.request_id not in self._running]
        restored = 0
        for start in range(0, len(requests), AT_ONCE):
            some = requests[start : start + AT_ONCE]
            replies = await asyncio.gather(*(self._restore(request) for request in some))
            restored += sum(isinstance(reply, Admitted) for reply in replies)
        if requests:
            logger.warning("restored %d of %d lost reservations", restored, len(requests))

    async def _restore(self, request: ReservationRequest) -> ReserveReply | None:
        request_id = request.request_id
        self._running.add(request_id)
        try:
            return await self._reserve(request)
        except (RedisError, StoreUnavailableError) as error:
            # The next renewal tries again.
            logger.warning("cannot restore a reservation: %s", type(error).__name__)
            return None
        finally:
            self._running.discard(request_id)
            if request_id in self._late:
                self._late.discard(request_id)
                # The reservation may arrive after the request's end, and then nothing else would
                # end it.
                self._endings.begin_after(Ending(request.tenant_id, request_id))
