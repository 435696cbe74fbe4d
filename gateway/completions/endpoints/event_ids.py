"""Event ids of a stream: whether a client requests them, and the position at which it resumes."""

import re
from typing import Final, NamedTuple

from fastapi import Request

from gateway.dialects.endpoint import ENDPOINTS
from gateway.records.errors import invalid_header, must

EVENT_IDS_HEADER: Final = "X-Event-Ids"
LAST_EVENT_ID_HEADER: Final = "Last-Event-ID"
POSITION_QUERY: Final = ("stream", "starting_after")
"""Parameters of the query of a stored response."""
REQUEST_ID: Final = re.compile(f"(?:{'|'.join(each.id_pattern for each in ENDPOINTS)})")

_EVENT_ID = re.compile(rf"({REQUEST_ID.pattern}):([0-9]{{1,15}})")
_NUMBER = re.compile(r"[0-9]{1,15}")
_BOOLEANS = {"true": True, "false": False}


class Position(NamedTuple):
    """The last event of a request that a client has received."""

    request_id: str
    number: int
    """0 before the first event."""


def read_event_ids(request: Request, *, default: bool) -> bool:
    """Return whether the header requests ids in the events of a new stream.

    Returns `default` without the header. Raises InvalidParameterError.
    """
    value = request.headers.get(EVENT_IDS_HEADER)
    if value is None:
        return default
    if value not in _BOOLEANS:
        raise invalid_header(EVENT_IDS_HEADER, "be true or false", value)
    return _BOOLEANS[value]


def read_last_event_id(request: Request) -> Position | None:
    """Return the position in the header; None without one. Raises InvalidParameterError."""
    value = request.headers.get(LAST_EVENT_ID_HEADER, "")
    if not value:
        return None
    match = _EVENT_ID.fullmatch(value)
    if match is None:
        rule = "be the id of an event of a stream, such as 'cmpl-ID:12' or 'chatcmpl-ID:12'"
        raise invalid_header(LAST_EVENT_ID_HEADER, rule, value)
    return Position(match[1], int(match[2]))


def read_position(request: Request, request_id: str, *, is_from_zero: bool = False) -> int:
    """Return the number of events of a request that its client has received.

    If it `is_from_zero`, the first event has the number 0 in the query. The header overrides
    `starting_after` in the query: a browser that reconnects repeats the query of its first request.
    Raises InvalidParameterError.
    """
    last = read_last_event_id(request)
    if last is None:
        return _read_starting_after(request, is_from_zero=is_from_zero)
    if last.request_id != request_id:
        rule = f"name an event of {request_id}"
        raise invalid_header(LAST_EVENT_ID_HEADER, rule, last.request_id)
    return last.number


def read_stream(request: Request) -> bool:
    """Return whether the query requests a stream. Raises InvalidParameterError."""
    value = request.query_params.get("stream", "false")
    if value not in _BOOLEANS:
        raise must("stream", "be true or false", value)
    return _BOOLEANS[value]


def _read_starting_after(request: Request, *, is_from_zero: bool) -> int:
    value = request.query_params.get("starting_after")
    if value is None:
        return 0
    if not _NUMBER.fullmatch(value):
        raise must(
            "starting_after", "be the number of an event, 0 or more, of at most 15 digits", value
        )
    return int(value) + is_from_zero
