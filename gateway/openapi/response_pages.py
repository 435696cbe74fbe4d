"""OpenAPI descriptions of kept completions."""

from dataclasses import dataclass
from typing import Any, Final

from gateway.delivery.event_ids import LAST_EVENT_ID_HEADER
from gateway.dialects.endpoint import Endpoint
from gateway.generation.idempotency import HEADER as IDEMPOTENCY_KEY_HEADER
from gateway.openapi.described import HEADER_TEXT, error_response, header_objects
from gateway.openapi.schemas import Schema, reference

_IDEMPOTENCY_KEY: Final[dict[str, Any]] = {
    "name": IDEMPOTENCY_KEY_HEADER,
    "in": "header",
    "required": False,
    "description": "A request with the same key and body gets the same answer, without running again.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
}

_PLACE: Final[list[dict[str, Any]]] = [
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
]

_ERRORS: Final = {
    "400": "A parameter is wrong; `param` names it.",
    "401": "No valid API key or token.",
    "403": "The key does not allow this.",
    "404": "There is no such completion, it is not kept any more, or it is not yours.",
    "429": "The completion has stopped because its client left, and a limit does not allow it to go on now.",
    "503": "Redis cannot be reached; try again later.",
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
            "description": f"One server-sent event: a `{self.chunk}` or an `Error` as JSON, and at the end "
            "`[DONE]`.",
            "type": "object",
            "required": ["data", "id"],
            "properties": {
                "data": {"type": "string"},
                "id": {
                    "type": "string",
                    "description": "The answer's id, a colon and the event's number from 1.",
                },
            },
        }

    @property
    def headers(self) -> list[dict[str, Any]]:
        """Headers of a generation request."""
        goes_on = (
            "Goes on with a stream behind this event; the body is not run, and may be anything."
        )
        return [_IDEMPOTENCY_KEY, self._last_event_id(goes_on)]

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
        last_event_id = self._last_event_id("The same as an id; wins over `starting_after`.")
        return self._operation(
            f"Read a {self.noun} that is kept: a stream, a background one, or one with an Idempotency-Key",
            f"get_{self.operation}",
            [self._id(), *_PLACE, last_event_id],
            {
                "200": _respond(
                    f"The whole {self.noun} if it has finished, else how it stands; with `stream` its chunks.",
                    json={"anyOf": [reference(self.response), reference("CompletionStatus")]},
                    events=self.event,
                ),
                "204": {"description": "With `stream`: every event was received already."},
            },
        )

    def _cancelling(self) -> dict[str, Any]:
        return self._operation(
            f"End a {self.noun} that is kept",
            f"cancel_{self.operation}",
            [self._id()],
            {
                "200": _respond(
                    "How it stands. One that had ended stays as it was.",
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
