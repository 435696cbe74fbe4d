"""What the OpenAPI page says about endpoints whose bodies are read by hand."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gateway.dialects.completions import CompletionRequest

_REFERENCE = "#/components/schemas/{model}"

_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {
            "type": "integer",
            "description": "Tokens of all sequences, those that best_of discarded included.",
        },
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {
            "type": "object",
            "properties": {"cached_tokens": {"type": "integer"}},
        },
    },
}

_CHOICE = {
    "type": "object",
    "required": ["index", "text", "logprobs", "finish_reason"],
    "properties": {
        "index": {"type": "integer", "description": "prompt index * n + choice"},
        "text": {"type": "string"},
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"type": ["string", "null"], "enum": ["stop", "length", None]},
        "stop_reason": {"type": ["string", "integer", "null"]},
    },
}

COMPLETION_RESPONSE: dict[str, Any] = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string", "const": "text_completion"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "system_fingerprint": {"type": "string"},
        "choices": {"type": "array", "items": _CHOICE},
        "usage": _USAGE,
    },
}

ERROR_RESPONSE: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

COMPLETION_OPENAPI: dict[str, Any] = {
    "summary": "Continue one or more prompts",
    "operationId": "create_completion",
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": _REFERENCE.format(model=CompletionRequest.__name__)}
            }
        },
    },
    "responses": {
        "200": {
            "description": "The completion; with `stream: true` its chunks as server-sent events, "
            "ended by `data: [DONE]`.",
            "content": {
                "application/json": {"schema": COMPLETION_RESPONSE},
                "text/event-stream": {"schema": {"type": "string"}},
            },
        },
        **{
            status: {
                "description": description,
                "content": {"application/json": {"schema": ERROR_RESPONSE}},
            }
            for status, description in {
                "400": "A parameter is wrong, or the context window is exceeded.",
                "401": "No valid API key or token.",
                "403": "The key does not allow this.",
                "404": "The model is unknown, or not for this key.",
                "408": "The body did not arrive in time.",
                "413": "The body is too large.",
                "415": "The body is not JSON.",
                "429": "Too many requests of this account are waiting.",
                "503": "Nobody can run the request now; `Retry-After` says when to try again.",
                "504": "The request took longer than it may.",
            }.items()
        },
    },
    "security": [{"bearer": []}],
}


def install_documentation(app: FastAPI) -> None:
    """Make `app.openapi()` describe the bodies as well."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            _, definitions = models_json_schema(
                [(CompletionRequest, "validation")], ref_template=_REFERENCE
            )
            schema["paths"]["/v1/completions"] = {"post": COMPLETION_OPENAPI}
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {}).update(definitions["$defs"])
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
