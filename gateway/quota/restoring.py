"""Open reservations that Redis has forgotten, reserved again: it was emptied, or a failover lost them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from redis.exceptions import RedisError

from gateway.errors import StoreUnavailableError
from gateway.quota.answers import Admitted, ReservationRequest, ReserveAnswer
from gateway.quota.endings import Ending, Endings

AT_ONCE: Final = 100

logger = logging.getLogger(__name__)


class Restoring:
    """What open requests reserved, for as long as it may have to be reserved again.

    A limit that others have used up in the meantime stays as it is: the request goes on without a
    reservation, and is settled like any other.
    """

    def __init__(
        self, reserve: Callable[[ReservationRequest], Awaitable[ReserveAnswer]], endings: Endings
    ) -> None:
        self._reserve = reserve
        self._endings = endings
        self._requests: dict[str, ReservationRequest] = {}
        self._running: set[str] = set()
        self._late: set[str] = set()
        """Requests that were ended while they were being reserved again."""

    def remember(self, request: ReservationRequest) -> None:
        """Note what an admitted request has reserved."""
        self._requests[request.request_id] = request

    def forget(self, request_id: str) -> None:
        """The request is another gateway's from now on."""
        self._requests.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """The request ends: what is reserved for it again after that is given back."""
        self.forget(request_id)
        if request_id in self._running:
            self._late.add(request_id)

    async def restore(self, request_ids: Sequence[str]) -> None:
        """Reserve again for these requests, as far as they are still open and the limits allow it."""
        requests = [self._requests[each] for each in request_ids if each in self._requests]
        requests = [each for each in requests if each.request_id not in self._running]
        restored = 0
        for start in range(0, len(requests), AT_ONCE):
            some = requests[start : start + AT_ONCE]
            answers = await asyncio.gather(*(self._restore(request) for request in some))
            restored += sum(isinstance(answer, Admitted) for answer in answers)
        if requests:
            logger.warning("%d of %d lost reservations are restored", restored, len(requests))

    async def _restore(self, request: ReservationRequest) -> ReserveAnswer | None:
        request_id = request.request_id
        self._running.add(request_id)
        try:
            return await self._reserve(request)
        except (RedisError, StoreUnavailableError) as error:
            # It is tried again with the next renewal.
            logger.warning("cannot restore a reservation now: %s", type(error).__name__)
            return None
        finally:
            self._running.discard(request_id)
            if request_id in self._late:
                self._late.discard(request_id)
                # It may have come behind the request's end, and then nobody else would end it.
                self._endings.begin_after(Ending(request.tenant_id, request_id))
