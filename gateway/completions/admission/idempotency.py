"""Idempotency-Key: run a request, or return the response of an earlier one."""

import asyncio
import hashlib
import re
import time
from dataclasses import dataclass
from typing import Final

import msgspec
from fastapi import Request
from redis.exceptions import RedisError

from common.tasks import Backoff, tolerating_outage, wait_for_end
from gateway.completions.admission.call import Call
from gateway.completions.idempotency.registry import (
    IdempotencyRegistry,
    IdempotentRequest,
    KeyedRequest,
)
from gateway.completions.settlement import SettlementService
from gateway.completions.stored.service import Responses
from gateway.completions.stored.store import ResponseState, StoredResponse
from gateway.limits.reservations import Reservations
from gateway.records.errors import (
    IdempotencyConflictError,
    IdempotencyInProgressError,
    InvalidParameterError,
    ResponseDeletedError,
    queue_unavailable,
    shown,
)

HEADER: Final = "Idempotency-Key"
REPLAYED_HEADER: Final = "idempotent-replayed"

ADMISSION_SECONDS: Final = 60.0
"""Maximum time to admit a request, if it is unknown whether its gateway is alive."""
WAIT_SECONDS: Final = 2.0
"""How long a request waits while another one with its key is being admitted."""
RELEASE_SECONDS: Final = 0.25
"""How long a rejected request waits until its key is free, and the first pause between attempts."""
LONGEST_PAUSE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.05

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


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
    # Null means absent, so drop it.
    body = {name: value for name, value in call.body.items() if value is not None}
    digest = hashlib.sha256(f"{request.url.path} {call.profile.name}\n".encode())
    await call.beside(lambda: digest.update(msgspec.json.encode(body, order="deterministic")))
    return IdempotentRequest(
        call.principal.tenant_id, call.principal.project_id, key, digest.hexdigest()
    )


@dataclass(eq=False)
class EarlierResponses:
    """The responses of earlier requests with the same Idempotency-Key."""

    _registry: IdempotencyRegistry
    _responses: Responses
    _reservations: Reservations
    _settlements: SettlementService

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
            await self._free(idempotent, request_id)
            if isinstance(error, RedisError):
                raise queue_unavailable() from None
            raise

    async def release(self, idempotent: IdempotentRequest, request_id: str) -> None:
        """Free the key of a request that was not admitted.

        A request whose jobs may be in the queue keeps its key: whoever repeats it gets its
        response, which resumes, instead of a second one. If Redis does not respond, or does not
        know of the claim yet, this continues in the background.
        """
        if not self._responses.may_run(request_id):
            await self._free(idempotent, request_id)

    async def _free(self, idempotent: IdempotentRequest, request_id: str) -> None:
        releasing = asyncio.create_task(self._release(idempotent, request_id))
        # A gateway that stops waits for it.
        self._settlements.tasks.start(wait_for_end(releasing, timeout_seconds=ADMISSION_SECONDS))
        await wait_for_end(releasing, timeout_seconds=RELEASE_SECONDS)

    async def _find(
        self, call: Call, idempotent: IdempotentRequest, request_id: str
    ) -> StoredResponse | None:
        deadline = time.monotonic() + WAIT_SECONDS
        unusable_id = withdrawn_id = ""
        registry, responses = self._registry, self._responses
        while True:
            claim = await registry.claim(idempotent, request_id, in_place_of=unusable_id)
            if claim.request_id == request_id:
                return None
            if claim.body_digest != idempotent.body_digest:
                raise IdempotencyConflictError
            response = await self._response_of(claim, idempotent.tenant_id)
            if response is not None and response.state is not ResponseState.FAILED:
                # A line that has run keeps its result if its key loses the model later.
                if call.line is None and not response.is_readable_by(call.principal):
                    # A request without a model in its body uses the default of this credential.
                    raise IdempotencyConflictError
                return response
            is_late = claim.age_ms > ADMISSION_SECONDS * 1000
            if response is None and is_late:
                await responses.require_intact()
            if response is not None or is_late or claim.request_id == withdrawn_id:
                unusable_id = claim.request_id
            elif await self._is_withdrawn(idempotent.tenant_id, claim):
                # Its gateway may have stored the response since it was looked for.
                withdrawn_id = claim.request_id
            elif time.monotonic() > deadline:
                raise IdempotencyInProgressError
            else:
                await asyncio.sleep(_POLL_SECONDS)

    async def _response_of(self, claim: KeyedRequest, tenant_id: str) -> StoredResponse | None:
        """Return the response of a claim, or None. Raises ResponseDeletedError and RedisError."""
        response = await self._responses.find(claim.request_id, tenant_id=tenant_id)
        if response is None and await self._responses.store.is_deleted(claim.request_id):
            raise ResponseDeletedError(claim.request_id)
        return response

    async def _is_withdrawn(self, tenant_id: str, claim: KeyedRequest) -> bool:
        """Return whether a request will never be admitted, because its gateway has died before.

        A gateway that was only slow cannot admit the request any more. If it already has, but died
        before it stored the response, the reservation has to expire first. Raises RedisError.
        """
        return (
            claim.gateway != ""
            and await self._responses.is_gone(claim.gateway)
            and await self._reservations.withdraw(tenant_id, claim.request_id)
        )

    async def _release(self, idempotent: IdempotentRequest, request_id: str) -> None:
        """Free a key. If its claim is not found, try once more, because it may still arrive."""
        backoff = Backoff(RELEASE_SECONDS, LONGEST_PAUSE_SECONDS)
        deadline = time.monotonic() + ADMISSION_SECONDS
        tries = 2
        while tries and time.monotonic() < deadline:
            with tolerating_outage("free an Idempotency-Key"):
                if await self._registry.release(idempotent, request_id):
                    return
                tries -= 1
            await asyncio.sleep(backoff.next_seconds())
