"""OpenAPI descriptions of the endpoints that read and cancel stored responses."""

from dataclasses import dataclass
from typing import Any, Final

from gateway.delivery.event_ids import EVENT_IDS_HEADER, LAST_EVENT_ID_HEADER
from gateway.dialects.endpoint import Endpoint
from gateway.generation.idempotency import HEADER as IDEMPOTENCY_KEY_HEADER
from gateway.openapi.described import HEADER_TEXT, error_response, header_objects
from gateway.openapi.schemas import Schema, reference

_IDEMPOTENCY_KEY: Final[dict[str, Any]] = {
    "name": IDEMPOTENCY_KEY_HEADER,
    "in": "header",
    "required": False,
    "description": "Later requests with the same key and body get the same response and do not run "
    "again.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
}

_EVENT_IDS: Final[dict[str, Any]] = {
    "name": EVENT_IDS_HEADER,
    "in": "header",
    "required": False,
    "description": "Whether the events of a stream have an `id`. Default: only with `background` "
    "or an Idempotency-Key. Events of a resumed stream always have one.",
    "schema": {"type": "string", "enum": ["true", "false"]},
}

_PLACE: Final[list[dict[str, Any]]] = [
    {
        "name": "stream",
        "in": "query",
        "required": False,
        "description": "Whether to stream the response.",
        "schema": {"type": "boolean", "default": False},
    },
    {
        "name": "starting_after",
        "in": "query",
        "required": False,
        "description": "With `stream`: number of the last received event.",
        "schema": {"type": "integer", "minimum": 0, "default": 0},
    },
]

_ERRORS: Final = {
    "400": "A parameter is invalid; `param` names it.",
    "401": "No valid API key or token.",
    "403": "The key does not permit the request.",
    "404": "The completion does not exist, has expired, or belongs to another account.",
    "429": "The completion stopped when its client disconnected, and a limit does not allow it to "
    "resume.",
    "503": "Redis cannot be reached; retry later.",
}


@dataclass(frozen=True, slots=True)
class ResponsePages:
    """OpenAPI descriptions of one endpoint's responses."""

    endpoint: Endpoint
    tag: str
    operation: str
    """Suffix of operation names."""
    noun: str
    response: str
    """Schema of a whole response."""
    chunk: str

    @property
    def event(self) -> Schema:
        """The schema of a stream event."""
        return {
            "description": f"One server-sent event: a `{self.chunk}` or an `Error` as JSON, and "
            "finally `[DONE]`.",
            "type": "object",
            "required": ["data"],
            "properties": {
                "data": {"type": "string"},
                "id": {
                    "type": "string",
                    "description": "Id of the response, a colon, and the event's number from 1; "
                    f"only on request (see `{EVENT_IDS_HEADER}`).",
                },
            },
        }

    @property
    def headers(self) -> list[dict[str, Any]]:
        """Headers of a generation request."""
        description = "Resume a stream after this event. The request's body is ignored."
        return [_IDEMPOTENCY_KEY, _EVENT_IDS, self._last_event_id(description)]

    def _last_event_id(self, description: str) -> dict[str, Any]:
        return {
            "name": LAST_EVENT_ID_HEADER,
            "in": "header",
            "required": False,
            "description": description,
            "schema": {
                "type": "string",
                "pattern": rf"^{self.endpoint.id_pattern}:[0-9]{{1,15}}$",
            },
        }

    @property
    def paths(self) -> dict[str, dict[str, Any]]:
        """OpenAPI descriptions of the endpoints that read a kept response, by method."""
        path = f"{self.endpoint.path}/{{completion_id}}"
        return {path: {"get": self._reading()}, f"{path}/cancel": {"post": self._cancelling()}}

    def _reading(self) -> dict[str, Any]:
        last_event_id = self._last_event_id(
            "Id of the last received event; overrides `starting_after`."
        )
        return self._operation(
            f"Retrieve a stored {self.noun}: streamed, in the background, or with an "
            "Idempotency-Key",
            f"get_{self.operation}",
            [self._id(), *_PLACE, last_event_id],
            {
                "200": _respond(
                    f"The whole {self.noun} if it has finished, else its status; with `stream`, "
                    "its chunks.",
                    json={"anyOf": [reference(self.response), reference("CompletionStatus")]},
                    events=self.event,
                ),
                "204": {"description": "With `stream`: the client has received every event."},
            },
        )

    def _cancelling(self) -> dict[str, Any]:
        return self._operation(
            f"Cancel a stored {self.noun}",
            f"cancel_{self.operation}",
            [self._id()],
            {
                "200": _respond(
                    "Its status, which does not change if it has already ended.",
                    json=reference("CompletionStatus"),
                )
            },
        )

    def _id(self) -> dict[str, Any]:
        return {
            "name": "completion_id",
            "in": "path",
            "required": True,
            "description": f"The id of the {self.noun}.",
            "schema": {"type": "string", "pattern": f"^{self.endpoint.id_pattern}$"},
        }

    def _operation(
        self,
        summary: str,
        operation_id: str,
        parameters: list[dict[str, Any]],
        responses: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "summary": summary,
            "operationId": operation_id,
            "tags": [self.tag],
            "parameters": parameters,
            "responses": responses
            | {status: error_response(text) for status, text in _ERRORS.items()},
            "security": [{"bearer": []}],
        }


def _respond(description: str, **content: Schema) -> dict[str, Any]:
    return {
        "description": description,
        "headers": header_objects({"x-request-id": HEADER_TEXT["x-request-id"]}),
        "content": {"application/json": {"schema": content["json"]}}
        | ({"text/event-stream": {"schema": content["events"]}} if "events" in content else {}),
    }
