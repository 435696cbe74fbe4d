"""Redis registry of the request for each Idempotency-Key of a project, stored for a day by default.

A new request claims its key before it is admitted. If two equal requests reach two gateways at the
same moment, only one runs. The registry stores only digests of keys.
"""

import hashlib
from datetime import timedelta
from typing import Final, NamedTuple

from contract import keys
from contract.scripts import CommandExecutor, LuaScript

RETIRED_MS: Final = 60_000

_PACKAGE = "gateway.completions.idempotency.scripts"
_CLAIM = LuaScript("idempotency_claim", _PACKAGE)
_RELEASE = LuaScript("idempotency_release", _PACKAGE)


class IdempotentRequest(NamedTuple):
    """A request with an Idempotency-Key."""

    tenant_id: str
    project_id: str | None
    """Scope of the key: the same key in another project, or without a project, is a different
    key."""
    key: str
    body_digest: str
    """Fingerprint of the content, equal for equal requests."""
    least_ms: int = 0
    """Milliseconds for which the key stays taken at least, beside its retention."""


class KeyedRequest(NamedTuple):
    """The request to which a key maps."""

    request_id: str
    body_digest: str
    age_ms: int
    """Milliseconds since the request claimed the key."""
    gateway: str
    """The gateway that admits the request; empty if it runs an earlier release."""


class IdempotencyRegistry:
    """Claims on keys. All methods raise RedisError if Redis does not respond."""

    def __init__(self, executor: CommandExecutor, *, gateway: str, retention: timedelta) -> None:
        self._executor = executor
        self._gateway = gateway
        self._retention_ms = int(retention.total_seconds() * 1000)

    async def claim(
        self, request: IdempotentRequest, request_id: str, *, in_place_of: str = ""
    ) -> KeyedRequest:
        """Map the key to `request_id` unless it maps to another request; return the claim.

        The claim replaces the request `in_place_of`, whose response is unusable.
        """
        claimed, body_digest, age_ms, gateway = await _CLAIM.run(
            self._executor,
            entry=_entry(request),
            request_id=request_id,
            body_digest=request.body_digest,
            retention_ms=self._retention_ms + request.least_ms,
            in_place_of=in_place_of,
            gateway=self._gateway,
        )
        return KeyedRequest(claimed.decode(), body_digest.decode(), int(age_ms), gateway.decode())

    async def release(self, request: IdempotentRequest, request_id: str) -> bool:
        """Free the key if it maps to `request_id`. Return whether it did."""
        return await self._release(request, request_id, retired_ms=0)

    async def retire(self, request: IdempotentRequest, request_id: str) -> None:
        """Free the key in a minute if it maps to `request_id`, whose response is deleted.

        Until then, a gateway that did not notice the end of the request cannot run it again.
        """
        await self._release(request, request_id, retired_ms=RETIRED_MS)

    async def _release(
        self, request: IdempotentRequest, request_id: str, *, retired_ms: int
    ) -> bool:
        released = await _RELEASE.run(
            self._executor, entry=_entry(request), request_id=request_id, retired_ms=retired_ms
        )
        return bool(released)


def _entry(request: IdempotentRequest) -> str:
    bucket = keys.bucket_of(request.tenant_id)
    # Project ids and keys never contain spaces.
    name = request.key if request.project_id is None else f"{request.project_id} {request.key}"
    digest = hashlib.sha256(name.encode()).hexdigest()
    return keys.idempotency(bucket, request.tenant_id, digest)
