"""OpenAPI descriptions of endpoints that read their bodies without FastAPI."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from contract.dialect import Dialect
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.endpoint import CHATS, COMPLETIONS
from gateway.openapi.chat_schemas import CHAT_COMPONENTS
from gateway.openapi.described import HEADER_TEXT, LIMIT_TEXT, error_response, header_objects
from gateway.openapi.management_pages import describe_management
from gateway.openapi.response_pages import ResponsePages
from gateway.openapi.schemas import COMPONENTS, Schema, reference

_REFERENCE = "#/components/schemas/{model}"

_OTHER_TEXT = {
    "x-cost": "Dollars, where the account or the request asks for it; not in streams.",
    "idempotent-replayed": "`true` where an earlier request with the same Idempotency-Key is answered.",
}

_REQUEST_HEADERS: list[dict[str, Any]] = [
    {
        "name": "X-Api-Dialect",
        "in": "header",
        "required": False,
        "description": "Whose API the client was written for: sets defaults and the shape of the "
        "answer. Without it the key's dialect holds, then the tenant's, the model's, the server's.",
        "schema": {"type": "string", "enum": [each.value for each in Dialect]},
    },
    {
        "name": "X-Request-Id",
        "in": "header",
        "required": False,
        "description": "Comes back in the answer if it is well-formed.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
    },
    {
        "name": "X-Include-Cost",
        "in": "header",
        "required": False,
        "description": "Whether the answer says what it cost; without it the account decides.",
        "schema": {"type": "string", "enum": ["true", "false"]},
    },
]

_EXAMPLES: dict[str, dict[str, Any]] = {
    "openai": {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0},
    "fireworks": {
        "prompt": "A product:",
        "max_tokens": 60,
        "response_format": {
            "type": "json_object",
            "schema": {"type": "object", "properties": {"name": {"type": "string"}}},
        },
    },
    "llamacpp": {
        "prompt": "Write a creative story:",
        "max_tokens": 200,
        "mirostat": 2,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
    },
    "mistralrs": {
        "prompt": "The answer is",
        "max_tokens": 16,
        "grammar": {"type": "regex", "value": " (yes|no)"},
        "truncate_sequence": True,
    },
    "omlx": {
        "prompt": "The quick brown fox",
        "max_tokens": 50,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.1,
    },
    "vllm": {"prompt": "Yes or no?", "structured_outputs": {"choice": [" yes", " no"]}},
}

_MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Write one line about the sea."}]
_ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}

_CHAT_EXAMPLES: dict[str, dict[str, Any]] = {
    "openai": {"messages": _MESSAGES, "max_completion_tokens": 40, "temperature": 0},
    "fireworks": {
        "messages": _MESSAGES,
        "max_tokens": 60,
        "response_format": {"type": "json_object"},
    },
    "llamacpp": {"messages": _MESSAGES, "max_tokens": 60, "top_k": 40, "min_p": 0.1},
    "mistralrs": {
        "messages": _MESSAGES,
        "max_tokens": 16,
        "grammar": {"type": "regex", "value": "(yes|no)"},
    },
    "omlx": {"messages": _MESSAGES, "max_tokens": 60, "thinking_budget": 30},
    "vllm": {
        "messages": [{"role": "user", "content": "What is 2 plus 3?"}],
        "tools": [_ADD],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}

_ERRORS = {
    "400": "A parameter is wrong, or the context window is exceeded.",
    "401": "No valid API key or token.",
    "402": "A budget or the credits do not allow the request; 429 in the dialect `openai`.",
    "403": "The key does not allow this.",
    "404": "The model is unknown, or not for this key.",
    "408": "The body did not arrive in time.",
    "409": "The Idempotency-Key stands for another body, or its request is being admitted right now.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "422": "In the dialect `mistralrs`, what is 400 in the others.",
    "429": "A limit does not allow the request now, or too many of this account's are waiting.",
    "503": "Nobody can run the request now; `retry-after` says when to try again.",
    "504": "The request took longer than it may.",
}


def _operation(
    summary: str,
    operation_id: str,
    *,
    body: dict[str, Any],
    response: dict[str, Any],
    headers: Sequence[dict[str, Any]] = (),
    tag: str = "Completions",
) -> dict[str, Any]:
    errors = {status: error_response(text) for status, text in _ERRORS.items()}
    return {
        "summary": summary,
        "operationId": operation_id,
        "tags": [tag],
        "parameters": [*_REQUEST_HEADERS, *headers],
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": response, **errors},
        "security": [{"bearer": []}],
    }


def _body(model: type[BaseModel], examples: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "schema": reference(model.__name__),
        "examples": {
            dialect: {
                "summary": f"With X-Api-Dialect: {dialect}",
                "value": {"model": "sluice-tiny", **parameters},
            }
            for dialect, parameters in examples.items()
        },
    }


def _json_response(description: str, name: str) -> dict[str, Any]:
    return {
        "description": description,
        "headers": header_objects({"x-request-id": HEADER_TEXT["x-request-id"]}),
        "content": {"application/json": {"schema": reference(name)}},
    }


def _generation(
    pages: ResponsePages, summary: str, body: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the operations of an endpoint that generates text."""
    response = {
        "description": f"The {pages.noun}; with `stream: true` its chunks as server-sent events, each a "
        f"`{pages.chunk}`, ended by `data: [DONE]`; with `background: true` how it stands.",
        "headers": header_objects(HEADER_TEXT | LIMIT_TEXT | _OTHER_TEXT),
        "content": {
            "application/json": {
                "schema": {"anyOf": [reference(pages.response), reference("CompletionStatus")]}
            },
            "text/event-stream": {"schema": pages.event},
        },
    }
    return {
        pages.endpoint.path: _operation(
            summary,
            f"create_{pages.operation}",
            body=body,
            response=response,
            headers=pages.headers,
            tag=pages.tag,
        ),
        f"{pages.endpoint.path}:estimate": _operation(
            f"Tell what a {pages.noun} would take, without running it",
            f"estimate_{pages.operation}",
            body=body,
            response=_json_response(
                "Token counts and the parameters that apply.", "CompletionEstimate"
            ),
            tag=pages.tag,
        ),
    }


_COMPLETION_PAGES = ResponsePages(
    endpoint=COMPLETIONS,
    tag="Completions",
    operation="completion",
    noun="completion",
    response="Completion",
    chunk="CompletionChunk",
)

_CHAT_PAGES = ResponsePages(
    endpoint=CHATS,
    tag="Chat",
    operation="chat_completion",
    noun="chat completion",
    response="ChatCompletion",
    chunk="ChatCompletionChunk",
)

OPERATIONS: dict[str, dict[str, Any]] = {
    **_generation(
        _COMPLETION_PAGES,
        "Continue one or more prompts",
        _body(CompletionRequest, _EXAMPLES),
    ),
    **_generation(
        _CHAT_PAGES,
        "Answer the last message of a conversation",
        _body(ChatCompletionRequest, _CHAT_EXAMPLES),
    ),
    "/tokenize": _operation(
        "Turn text into tokens, as vLLM and llama.cpp do",
        "tokenize",
        body={"schema": reference("TokenizeRequest")},
        response=_json_response("The tokens, in the shape of the request.", "Tokens"),
    ),
    "/detokenize": _operation(
        "Turn tokens into text, as vLLM and llama.cpp do",
        "detokenize",
        body={"schema": reference("DetokenizeRequest")},
        response=_json_response("The text, in the shape of the request.", "Detokenized"),
    ),
}
"""OpenAPI descriptions of each POST endpoint."""

KEPT_PATHS: dict[str, dict[str, Any]] = _COMPLETION_PAGES.paths | _CHAT_PAGES.paths
"""OpenAPI descriptions of the endpoints that read a kept response, by method."""


_MODEL_PAGES = {"/v1/models": "ModelList", "/v1/models/{model_id}": "Model"}


def _model_page(name: str) -> dict[str, Any]:
    errors = {status: error_response(_ERRORS[status]) for status in ("401", "403", "404", "503")}
    return {
        "responses": {"200": _json_response("What workers have announced.", name), **errors},
        "security": [{"bearer": []}],
    }


def install_documentation(app: FastAPI, *, generates: bool) -> None:
    """Make `app.openapi()` describe errors and credentials.

    `generates`: whether to describe the generation endpoints as well.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, generates=generates)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, *, generates: bool) -> dict[str, Any]:
    schema = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    by_hand = _add_generation(schema) if generates else set()
    describe_management(schema, apart_from=by_hand)
    components = schema.setdefault("components", {})
    schemas: dict[str, Schema] = components.setdefault("schemas", {})
    # All errors have one shape; FastAPI's own shape is never sent.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = COMPONENTS["Error"]
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return schema


def _add_generation(schema: dict[str, Any]) -> set[str]:
    """Add the generation endpoints, and return their paths."""
    _, definitions = models_json_schema(
        [(CompletionRequest, "validation"), (ChatCompletionRequest, "validation")],
        ref_template=_REFERENCE,
    )
    for path, operation in OPERATIONS.items():
        schema["paths"][path] = {"post": operation}
    schema["paths"] |= KEPT_PATHS
    for path, name in _MODEL_PAGES.items():
        schema["paths"][path]["get"] |= _model_page(name)
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas.update({name: _plain(model) for name, model in definitions["$defs"].items()})
    schemas.update(COMPONENTS | CHAT_COMPONENTS)
    return {*OPERATIONS, *KEPT_PATHS, *_MODEL_PAGES}


def _plain(model: Schema) -> Schema:
    """Return a body's schema with each parameter's type and bounds in one place.

    "Null or a number from 0 to 2" becomes a number from 0 to 2 with two types. The schema omits a
    default of null, which means absent: the description states what applies then.
    """
    if "properties" not in model:
        return model
    properties = {name: _plain_property(each) for name, each in model["properties"].items()}
    return {**model, "properties": properties}


def _plain_property(schema: Schema) -> Schema:
    plain = {name: value for name, value in schema.items() if (name, value) != ("default", None)}
    alternatives: list[Schema] = plain.get("anyOf", [])
    value = alternatives[0] if alternatives else {}
    if alternatives[1:] != [{"type": "null"}] or "type" not in value or "enum" in value:
        return plain
    del plain["anyOf"]
    return {**plain, **value, "type": [value["type"], "null"]}
