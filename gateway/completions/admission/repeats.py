"""A key that repeats one request: count equal requests of an hour before they cost anything."""

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from redis.exceptions import RedisError

from common import clock
from gateway.completions.admission.call import Call
from gateway.completions.admission.check import CheckedRequest
from gateway.completions.admission.idempotency import content_of
from gateway.limits.refusal_log import Refusals
from gateway.limits.store import QuotaStore
from gateway.records.errors import RateLimitError, RefusingLimit, queue_unavailable
from gateway.records.limits import SpendScope
from gateway.records.spending import SpendLimit
from gateway.records.usage_record import UsageRecord

CODE: Final = "repeats"
_DIGEST_BYTES: Final = 12


@dataclass(eq=False)
class Repeats:
    """Counts equal requests of the keys that have such a limit."""

    _quotas: QuotaStore
    _refusals: Refusals

    @asynccontextmanager
    async def counting(
        self, call: Call, checked: CheckedRequest, draft: Callable[[], UsageRecord]
    ) -> AsyncIterator[None]:
        """Count a request, unless the block fails or the key's limit is lifted.

        `draft` returns its usage record, for the log of rejections.

        Raises RateLimitError, and StoreUnavailableError if Redis does not respond.
        """
        limit = next((each for each in call.principal.spend_limits if each.repeats), None)
        most = None if limit is None else limit.repeats_at(clock.now_ms())
        if limit is None or most is None:
            yield
            return
        tenant_id = call.principal.tenant_id
        digest = hashlib.blake2b(
            f"{checked.endpoint.name} {call.profile.name}\n".encode(), digest_size=_DIGEST_BYTES
        )
        await call.beside(lambda: digest.update(content_of(call)))
        try:
            count = await self._quotas.repeat(tenant_id, limit, digest.digest())
        except RedisError:
            raise queue_unavailable() from None
        try:
            if count > most and limit.is_enforced:
                error = _refusal(limit, most)
                self._refusals.by_limit(draft(), error)
                raise error
            yield
        except BaseException:
            with suppress(RedisError):
                await self._quotas.repeat(tenant_id, limit, digest.digest(), by=-1)
            raise


def _refusal(limit: SpendLimit, most: int) -> RateLimitError:
    now_ms = clock.now_ms()
    reset_seconds = (limit.bounds_at(now_ms).end * 1000 - now_ms) / 1000
    return RateLimitError(
        f"The key '{limit.holder}' has sent this request {most} times in this {limit.window}, the "
        f"most that its account allows. POST /v1/spend_limits/{limit.id}/lift allows any number "
        f"for a day; the limit resets in {reset_seconds:.1f} s.",
        refusing=RefusingLimit(
            limit=CODE,
            scope=SpendScope.KEY.value,
            limit_value=most,
            used=most,
            reset_seconds=reset_seconds,
        ),
        code=CODE,
        is_retryable=False,
        headers={},
    )
