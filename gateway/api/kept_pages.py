"""What the OpenAPI page says about completions that clients come back for."""

from typing import Any, Final

from gateway.api.described import HEADER_TEXT, error_answer, header_answers
from gateway.api.event_ids import LAST_EVENT_ID_HEADER, REQUEST_ID
from gateway.api.idempotency import HEADER as IDEMPOTENCY_KEY_HEADER
from gateway.api.schemas import Schema, reference

EVENT: Final[Schema] = {
    "description": "One server-sent event: a `CompletionChunk` or an `Error` as JSON, and at the end `[DONE]`.",
    "type": "object",
    "required": ["data", "id"],
    "properties": {
        "data": {"type": "string"},
        "id": {
            "type": "string",
            "description": "The completion's id, a colon and the event's number from 1.",
        },
    },
}

_LAST_EVENT_ID: Final[dict[str, Any]] = {
    "name": LAST_EVENT_ID_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": rf"^{REQUEST_ID.pattern}:[0-9]{{1,15}}$"},
}

HEADERS: Final[list[dict[str, Any]]] = [
    {
        "name": IDEMPOTENCY_KEY_HEADER,
        "in": "header",
        "required": False,
        "description": "A request with the same key and body gets the same answer, without running again.",
        "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    },
    _LAST_EVENT_ID
    | {
        "description": "Goes on with a stream behind this event; the body is not run, and may be anything."
    },
]
"""Headers of `POST /v1/completions`."""

_COMPLETION_ID: Final[dict[str, Any]] = {
    "name": "completion_id",
    "in": "path",
    "required": True,
    "description": "The completion's id.",
    "schema": {"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"},
}

_READING: Final[list[dict[str, Any]]] = [
    _COMPLETION_ID,
    {
        "name": "stream",
        "in": "query",
        "required": False,
        "description": "Whether to read it as a stream.",
        "schema": {"type": "boolean", "default": False},
    },
    {
        "name": "starting_after",
        "in": "query",
        "required": False,
        "description": "With `stream`: number of the last event that was received.",
        "schema": {"type": "integer", "minimum": 0, "default": 0},
    },
    _LAST_EVENT_ID | {"description": "The same as an id; wins over `starting_after`."},
]

_ERRORS: Final = {
    "400": "A parameter is wrong; `param` names it.",
    "401": "No valid API key or token.",
    "403": "The key does not allow this.",
    "404": "There is no such completion, it is not kept any more, or it is not yours.",
    "429": "The completion has stopped because its client left, and a limit does not allow it to go on now.",
    "503": "Redis cannot be reached; try again later.",
}


def _operation(
    summary: str, operation_id: str, parameters: list[dict[str, Any]], answers: dict[str, Any]
) -> dict[str, Any]:
    return {
        "summary": summary,
        "operationId": operation_id,
        "tags": ["Completions"],
        "parameters": parameters,
        "responses": answers | {status: error_answer(text) for status, text in _ERRORS.items()},
        "security": [{"bearer": []}],
    }


def _answer(description: str, **content: Schema) -> dict[str, Any]:
    return {
        "description": description,
        "headers": header_answers({"x-request-id": HEADER_TEXT["x-request-id"]}),
        "content": {"application/json": {"schema": content["json"]}}
        | ({"text/event-stream": {"schema": content["events"]}} if "events" in content else {}),
    }


PATHS: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions/{completion_id}": {
        "get": _operation(
            "Read a completion that is kept: a stream, a background one, or one with an Idempotency-Key",
            "get_completion",
            _READING,
            {
                "200": _answer(
                    "The whole completion if it has finished, else how it stands; with `stream` its chunks.",
                    json={"anyOf": [reference("Completion"), reference("CompletionStatus")]},
                    events=EVENT,
                ),
                "204": {"description": "With `stream`: every event was received already."},
            },
        )
    },
    "/v1/completions/{completion_id}/cancel": {
        "post": _operation(
            "End a completion that is kept",
            "cancel_completion",
            [_COMPLETION_ID],
            {
                "200": _answer(
                    "How it stands. One that had ended stays as it was.",
                    json=reference("CompletionStatus"),
                )
            },
        )
    },
}
"""What is said about each endpoint, by method."""
