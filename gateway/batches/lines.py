"""Lines of batches: their form in the input file, and their results."""

import hashlib
from typing import Final

import msgspec

from common.not_none import not_none
from gateway.completions.rendering.completion import Usage
from gateway.dialects.endpoint import BATCH_ENDPOINTS, Endpoint
from gateway.records.errors import ApiError, ErrorStyle

MAX_CUSTOM_ID_CHARACTERS: Final = 512
ENDPOINTS_BY_PATH: Final[dict[str, Endpoint]] = {
    each.path: each for each in BATCH_ENDPOINTS.values()
}


class InputLine(msgspec.Struct, frozen=True):
    """A request in an input file."""

    custom_id: str
    method: object
    url: object
    """Both have any type, so that the validation can name a wrong value."""
    body: msgspec.Raw


class CheckedLine(InputLine, frozen=True, forbid_unknown_fields=True):
    """A line when it is validated. One that an older version validated may have more members."""


class _NamedLine(msgspec.Struct, frozen=True):
    custom_id: str


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _LineError(msgspec.Struct, frozen=True):
    code: str
    message: str


class _ResultLine(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: _LineError | None


decode_line = msgspec.json.Decoder(InputLine).decode
_decode_name = msgspec.json.Decoder(_NamedLine).decode
_decode_result = msgspec.json.Decoder(_ResultLine).decode
_encode = msgspec.json.Encoder().encode

_SUCCESS: Final = 200
EXPIRED: Final = "batch_expired"
CANCELLED: Final = "batch_cancelled"
MESSAGE_ENDS: Final = {EXPIRED: "expired", CANCELLED: "canceled"}
"""How a message ended that has neither a response nor an error of its own."""
_MESSAGES: Final = {
    EXPIRED: "The completion window of the batch expired before this request had ended.",
    CANCELLED: "The batch was cancelled before this request had ended.",
}


class Result(msgspec.Struct, frozen=True):
    """How a line ended: one line of a result file."""

    content: bytes
    """The line with its line end."""
    is_success: bool
    is_unfinished: bool = False
    """Whether its batch was cancelled or expired before it had ended."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cost_micros: int = 0


def custom_id_of(line: bytes) -> str:
    """Return the `custom_id` of a line that was validated."""
    return _decode_name(line).custom_id


def finished(
    line_id: str,
    custom_id: str,
    *,
    request_id: str,
    body: bytes,
    usage: Usage,
    cost_micros: int,
) -> Result:
    """Return the result of a line whose response is complete."""
    response = _Response(_SUCCESS, request_id, msgspec.Raw(body))
    return Result(
        _line(line_id, custom_id, response, None),
        is_success=True,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens or 0,
        cost_micros=cost_micros,
    )


def failed(
    line_id: str, custom_id: str, *, request_id: str, error: ApiError, style: ErrorStyle
) -> Result:
    """Return the result of a line whose request was refused or failed."""
    content = msgspec.Raw(error.content(style))
    response = _Response(error.status_for(style), request_id, content)
    return Result(_line(line_id, custom_id, response, None), is_success=False)


def unfinished(line_id: str, custom_id: str, code: str) -> Result:
    """Return the result of a line that did not end before its batch was cancelled or expired."""
    error = _LineError(code, _MESSAGES[code])
    return Result(_line(line_id, custom_id, None, error), is_success=False, is_unfinished=True)


def message_result(line: bytes) -> bytes:
    """Return a line of a result file of messages in the form of Anthropic's API."""
    found = _decode_result(line)
    if found.response is None:
        result: dict[str, object] = {"type": MESSAGE_ENDS[not_none(found.error).code]}
    elif found.response.status_code == _SUCCESS:
        result = {"type": "succeeded", "message": found.response.body}
    else:
        result = {"type": "errored", "error": found.response.body}
    return _encode({"custom_id": found.custom_id, "result": result}) + b"\n"


def line_id_of(batch_id: str, number: int) -> str:
    """Return the identity of a line; numbers count from 1."""
    return f"{batch_id}:{number}"


def _line(
    line_id: str, custom_id: str, response: _Response | None, error: _LineError | None
) -> bytes:
    digest = hashlib.sha256(line_id.encode()).hexdigest()
    return _encode(_ResultLine(f"batch_req_{digest[:32]}", custom_id, response, error)) + b"\n"
