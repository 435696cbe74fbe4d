"""Failures of responses, in the words by which agents decide what to do.

An agent waits after `rate_limit_exceeded` as long as the message says, compacts its conversation
after `context_length_exceeded`, and stops after `insufficient_quota` and `invalid_prompt`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import msgspec

from common.clock import now_seconds
from contract.tier import ServiceTier
from gateway.records.errors import (
    ApiError,
    BadRequestError,
    ContextLengthExceededError,
    InsufficientQuotaError,
    OverloadedError,
    RateLimitError,
)

DEFAULTS: Final[Mapping[str, Any]] = {
    "background": False,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "store": False,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""The members of a response that repeat those of a request without them."""

_AGAIN: Final = "Please try again in"
_TOO_MANY: Final = RateLimitError.status


def failure_of(error: ApiError) -> dict[str, str]:
    """Return `error` of a failed response."""
    code, message = "server_error", error.message
    if error.type == InsufficientQuotaError.type:
        code = InsufficientQuotaError.type
    elif isinstance(error, ContextLengthExceededError):
        code = error.code
    elif isinstance(error, OverloadedError):
        code = "server_is_overloaded"
    elif error.status == _TOO_MANY and error.should_retry is not False:
        code = "rate_limit_exceeded"
        # The message of what ends a running stream is the same in every API.
        if error.retry_after_seconds is not None and _AGAIN not in message:
            wait = math.ceil(round(error.retry_after_seconds * 10, 3)) / 10
            message = f"{message} {_AGAIN} {wait:.1f}s."
    elif error.status == _TOO_MANY or isinstance(error, BadRequestError):
        code = "invalid_prompt"
    return {"code": code, "message": message}


def failed_stream(error: ApiError, request_id: str, model: str) -> bytes | None:
    """Return the events of a stream that is refused; None if the error keeps its HTTP status.

    Codex takes the statuses of limits and of too long prompts as final.
    """
    is_shown = isinstance(error, ContextLengthExceededError | InsufficientQuotaError)
    if not (is_shown or isinstance(error, OverloadedError) or error.status == _TOO_MANY):
        return None
    response: dict[str, Any] = {
        "id": request_id,
        "object": "response",
        "created_at": now_seconds(),
        "completed_at": None,
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "usage": None,
        "service_tier": ServiceTier.DEFAULT,
        **DEFAULTS,
    }
    described: dict[str, Any] = {**failure_of(error)}
    if error.availability is not None:
        described["availability"] = asdict(error.availability)
    failed = {**response, "status": "failed", "error": described}
    return event("response.created", 0, {"response": response}) + event(
        "response.failed", 1, {"response": failed}
    )


def event(kind: str, sequence: int, members: dict[str, Any]) -> bytes:
    """Return an event."""
    return event_data(kind, sequence, members) + b"\n\n"


def event_data(kind: str, sequence: int, members: dict[str, Any]) -> bytes:
    """Return an event without its end."""
    body = msgspec.json.encode({"type": kind, "sequence_number": sequence, **members})
    return b"event: %s\ndata: %s" % (kind.encode(), body)
