"""Idempotency-Key: run a request, or return the response of an earlier one.

A new request claims its key before it is admitted. If two equal requests reach two gateways at the
same moment, only one runs. Redis has only digests of keys.
"""

import asyncio
import hashlib
import re
import time
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
from fastapi import Request
from redis.exceptions import RedisError

from contract import keys
from gateway.completions.admission.call import IDEMPOTENCY_HEADER as HEADER
from gateway.completions.admission.call import Call
from gateway.completions.stored.service import Responses
from gateway.completions.stored.store import StoredResponse
from gateway.limits.replies import Claim, Kept, RequestState
from gateway.limits.reservations import Reservations
from gateway.limits.store import QuotaStore
from gateway.platform.settings import Settings
from gateway.records.errors import (
    IdempotencyConflictError,
    IdempotencyInProgressError,
    InvalidParameterError,
    ResponseDeletedError,
    queue_unavailable,
    shown,
)

REPLAYED_HEADER: Final = "idempotent-replayed"

ADMISSION_SECONDS: Final = 60.0
"""Maximum time to admit a request, if it is unknown whether its gateway is alive."""
WAIT_SECONDS: Final = 2.0
"""How long a request waits while another one with its key is being admitted."""
_POLL_SECONDS: Final = 0.05

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


class IdempotentRequest(NamedTuple):
    """A request with an Idempotency-Key."""

    tenant_id: str
    entry: str
    """Redis key of the Idempotency-Key."""
    body_digest: str
    """Fingerprint of the content, equal for equal requests."""

    @classmethod
    def of(
        cls, tenant_id: str, project_id: str | None, key: str, body_digest: str
    ) -> "IdempotentRequest":
        """Return the request with a key of a project.

        The same key in another project, or without a project, is a different key.
        """
        # Project ids and keys never contain spaces.
        name = key if project_id is None else f"{project_id} {key}"
        digest = hashlib.sha256(name.encode()).hexdigest()
        bucket = keys.bucket_of(tenant_id)
        return cls(tenant_id, keys.idempotency(bucket, tenant_id, digest), body_digest)


async def read_idempotent_request(request: Request, call: Call) -> IdempotentRequest | None:
    """Return the key and digest that identify a request; None without a key.

    Raises InvalidParameterError.
    """
    key = request.headers.get(HEADER)
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise InvalidParameterError(
            f"The header '{HEADER}' must have 1 to 255 visible ASCII characters. "
            f"Given: {shown(key)} ({len(key)} characters).",
            param=HEADER,
        )
    digest = hashlib.sha256(f"{request.url.path} {call.profile.name}\n".encode())
    await call.beside(lambda: digest.update(content_of(call)))
    return IdempotentRequest.of(
        call.principal.tenant_id, call.principal.project_id, key, digest.hexdigest()
    )


def content_of(call: Call) -> bytes:
    """Return the content of a request's body, equal for equal requests."""
    # Null means absent, so drop it.
    body = {name: value for name, value in call.body.items() if value is not None}
    return msgspec.json.encode(body, order="deterministic")


@dataclass(eq=False)
class EarlierResponses:
    """The responses of earlier requests with the same Idempotency-Key."""

    _settings: Settings
    _requests: QuotaStore
    _responses: Responses
    _reservations: Reservations

    async def find(
        self, call: Call, idempotent: IdempotentRequest, request_id: str
    ) -> StoredResponse | None:
        """Return the response for the key; None if the key now stands for `request_id`.

        A failed response counts as none. Raises IdempotencyConflictError if the key stands for a
        different request, ResponseDeletedError if its response was deleted,
        IdempotencyInProgressError if that request is not admitted soon, and StoreUnavailableError.
        """
        try:
            return await self._find(call, idempotent, request_id)
        except (RedisError, asyncio.CancelledError) as error:
            # Redis may have mapped the key to this request, or may still do so.
            await self._release(idempotent, request_id)
            if isinstance(error, RedisError):
                raise queue_unavailable() from None
            raise

    async def release(self, idempotent: IdempotentRequest, request_id: str) -> None:
        """Free the key of a request that was not admitted.

        A request whose jobs may be in the queue keeps its key: whoever repeats it gets its
        response, which resumes, instead of a second one.
        """
        if not self._responses.may_run(request_id):
            await self._release(idempotent, request_id)

    async def _release(self, idempotent: IdempotentRequest, request_id: str) -> None:
        await self._reservations.release(
            request_id, tenant_id=idempotent.tenant_id, kept=self._kept(idempotent)
        )

    def _kept(self, idempotent: IdempotentRequest) -> Kept:
        return Kept(
            self._responses.dispatcher.gateway,
            1,
            is_background=False,
            retention_ms=int(self._settings.idempotency_retention.total_seconds() * 1000),
            entry=idempotent.entry,
            body_digest=idempotent.body_digest,
        )

    async def _find(
        self, call: Call, idempotent: IdempotentRequest, request_id: str
    ) -> StoredResponse | None:
        deadline, tenant_id = time.monotonic() + WAIT_SECONDS, idempotent.tenant_id
        unusable_id, kept = "", self._kept(idempotent)
        while True:
            claim = await self._requests.claim(tenant_id, request_id, kept, in_place_of=unusable_id)
            if claim.request_id == request_id:
                return None
            if claim.body_digest != idempotent.body_digest:
                raise IdempotencyConflictError
            response = await self._response_of(claim, call, tenant_id)
            if response is not None:
                return response
            if await self._is_unusable(claim):
                unusable_id = claim.request_id
            elif time.monotonic() > deadline:
                raise IdempotencyInProgressError
            else:
                await asyncio.sleep(_POLL_SECONDS)

    async def _response_of(self, claim: Claim, call: Call, tenant_id: str) -> StoredResponse | None:
        """Return the response of a claim, or None.

        Raises ResponseDeletedError, IdempotencyConflictError and RedisError.
        """
        if claim.state is RequestState.CLAIMED:
            return None
        if claim.state is RequestState.DELETED:
            # Another gateway has stored the result of a line.
            raise (
                IdempotencyInProgressError if call.line else ResponseDeletedError(claim.request_id)
            )
        response = await self._responses.find(claim.request_id, tenant_id=tenant_id)
        if response is None or response.state is RequestState.FAILED:
            return None
        # A line that has run keeps its result if its key loses the model later.
        if call.line is None and not response.is_readable_by(call.principal):
            # A request without a model in its body uses the default of this credential.
            raise IdempotencyConflictError
        return response

    async def _is_unusable(self, claim: Claim) -> bool:
        """Return whether a request without a response never gets one, unless it runs by now.

        Its gateway has died, or has had enough time. If it has admitted the request before, the
        lease has to expire first. Raises RedisError, and StoreUnavailableError if Redis may lack
        the response for the moment.
        """
        if claim.state is RequestState.RUNNING:
            return False
        if claim.age_ms > ADMISSION_SECONDS * 1000:
            await self._responses.require_intact()
            return True
        return await self._responses.is_gone(claim.gateway)
