"""Which request each Idempotency-Key of a project stands for, in Redis, for a day by default.

A key is claimed for a new request before that is admitted, so that of two requests that come at the same
moment to two gateways one runs. Keys themselves are not stored, only their digests.
"""

import hashlib
from datetime import timedelta
from typing import NamedTuple

from contract import keys
from contract.scripts import CommandExecutor, LuaScript

_PACKAGE = "gateway.idempotency.scripts"
_CLAIM = LuaScript("idempotency_claim", _PACKAGE)
_RELEASE = LuaScript("idempotency_release", _PACKAGE)


class IdempotentRequest(NamedTuple):
    """A request that came with an Idempotency-Key."""

    tenant_id: str
    project_id: str | None
    """Keys of one project mean nothing in another one, nor outside of all."""
    key: str
    body_digest: str
    """Equal for two requests that ask for the same."""


class Claim(NamedTuple):
    """The request that a key stands for."""

    request_id: str
    body_digest: str
    age_ms: int
    """Milliseconds since the key was claimed for it."""


class IdempotencyRegistry:
    """Claims on keys. All methods raise RedisError when Redis does not answer."""

    def __init__(self, executor: CommandExecutor, *, retention: timedelta) -> None:
        self._executor = executor
        self._retention_ms = int(retention.total_seconds() * 1000)

    async def claim(
        self, request: IdempotentRequest, request_id: str, *, in_place_of: str = ""
    ) -> Claim:
        """Let the key stand for `request_id` unless it stands for another request; return what it stands for.

        It takes the place of the request `in_place_of`, whose answer is of no use.
        """
        claimed, body_digest, age_ms = await _CLAIM.run(
            self._executor,
            [_entry(request)],
            [request_id, request.body_digest, self._retention_ms, in_place_of],
        )
        return Claim(claimed.decode(), body_digest.decode(), int(age_ms))

    async def release(self, request: IdempotentRequest, request_id: str) -> None:
        """Free the key if it stands for `request_id`."""
        await _RELEASE.run(self._executor, [_entry(request)], [request_id])


def _entry(request: IdempotentRequest) -> str:
    bucket = keys.bucket_of(request.tenant_id)
    # No project's id and no key has a space.
    name = request.key if request.project_id is None else f"{request.project_id} {request.key}"
    digest = hashlib.sha256(name.encode()).hexdigest()
    return keys.idempotency(bucket, request.tenant_id, digest)
