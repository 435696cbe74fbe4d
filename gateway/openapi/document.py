"""OpenAPI descriptions of endpoints that read their bodies without FastAPI."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from contract.dialect import Dialect
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.endpoint import CHATS, COMPLETIONS, INVOCATIONS
from gateway.dialects.parameters import Endpoints, rejected_by
from gateway.openapi.chat_schemas import CHAT_COMPONENTS
from gateway.openapi.described import (
    HEADER_TEXT,
    LIMIT_TEXT,
    OTHER_TEXT,
    error_response,
    header_objects,
)
from gateway.openapi.management_pages import describe_management
from gateway.openapi.native_schemas import NATIVE_COMPONENTS
from gateway.openapi.response_pages import ResponsePages
from gateway.openapi.schemas import COMPONENTS, INTEGER, TEXT, Schema, object_of, reference

_NATIVE_TAG: Final = "llama.cpp"
GENERATION_TAGS: Final = ("Completions", "Chat", "Models", "Tokenization", _NATIVE_TAG)
"""Tags of the generation API, in the order of the page."""

_REFERENCE = "#/components/schemas/{model}"

_REQUEST_HEADERS: list[dict[str, Any]] = [
    {
        "name": "X-Api-Dialect",
        "in": "header",
        "required": False,
        "description": "API for which the client was written; determines defaults and the response "
        "format. Default: the dialect of the key, else of the tenant, the model or the server.",
        "schema": {"type": "string", "enum": [each.value for each in Dialect]},
    },
    {
        "name": "X-Request-Id",
        "in": "header",
        "required": False,
        "description": "Id of the request, returned in the response if it is well-formed.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
    },
    {
        "name": "X-Include-Cost",
        "in": "header",
        "required": False,
        "description": "Whether the response includes its cost. Default: the account's setting.",
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
    "400": "A parameter is invalid, or the context window is exceeded.",
    "401": "No valid API key or token.",
    "402": "A budget or the credit balance is insufficient; 429 in dialect `openai`.",
    "403": "The key does not permit the request.",
    "404": "The model does not exist, or the key has no access to it.",
    "408": "The body did not arrive in time.",
    "409": "The Idempotency-Key has another body, or its request is still being admitted.",
    "413": "The body is too large.",
    "415": "The body is not JSON in UTF-8, or its Content-Encoding is unknown.",
    "422": "The same as 400, in dialect `mistralrs`.",
    "429": "A rate limit is exceeded, or too many requests of the account are waiting.",
    "503": "The request cannot run at the moment; retry after `retry-after` seconds.",
    "504": "The request exceeded its time limit.",
}


def _operation(
    summary: str,
    operation_id: str,
    *,
    body: dict[str, Any],
    response: dict[str, Any],
    headers: Sequence[dict[str, Any]] = (),
    tag: str,
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


def _refusals(endpoint: Endpoints) -> str:
    """Return the parameters that an endpoint rejects, as Markdown."""
    lines = ["Parameters that are rejected with `unsupported_parameter`:", ""]
    for name, row in rejected_by(endpoint).items():
        values = f" other than `{row.accepted_json}`" if row.accepted else ""
        lines.append(f"- `{name}`{values}: {row.markdown}")
    return "\n".join(lines)


def _generation(
    pages: ResponsePages, summary: str, body: dict[str, Any], rejecting: Endpoints
) -> dict[str, dict[str, Any]]:
    """Return the operations of an endpoint that generates text."""
    response = {
        "description": f"The {pages.noun}. With `stream: true`, server-sent events, each a "
        f"`{pages.chunk}`, and finally `data: [DONE]`. With `background: true`, its status.",
        "headers": header_objects(HEADER_TEXT | LIMIT_TEXT | OTHER_TEXT),
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
        )
        | {"description": _refusals(rejecting)},
        f"{pages.endpoint.path}:estimate": _operation(
            f"Estimate the tokens and cost of a {pages.noun}",
            f"estimate_{pages.operation}",
            body=body,
            response=_json_response(
                "Token counts, cost and effective parameters.", "CompletionEstimate"
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

_NATIVE: Final[dict[str, Any]] = {
    "tags": [_NATIVE_TAG],
    "description": "In dialects llamacpp and llamacpp-2026 only.",
}


def _native(summary: str, operation_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the operation of a path whose response has llama.cpp's own form."""
    response = {
        "description": "The result. With `stream: true`, server-sent events: partial results and a "
        "final result of each choice, without `[DONE]`. With `background: true`, its status.",
        "headers": header_objects(HEADER_TEXT | LIMIT_TEXT | OTHER_TEXT),
        "content": {
            "application/json": {
                "schema": {"anyOf": [reference("NativeResponse"), reference("CompletionStatus")]}
            },
            "text/event-stream": {
                "schema": {
                    **_COMPLETION_PAGES.event,
                    "description": "One server-sent event: a `NativePartialResult`, a "
                    "`NativeResult` or an `Error` as JSON.",
                }
            },
        },
    }
    return (
        _operation(
            summary,
            operation_id,
            body=body,
            response=response,
            headers=_COMPLETION_PAGES.headers,
            tag=_NATIVE_TAG,
        )
        | _NATIVE
    )


def _native_read(summary: str, operation_id: str, name: str) -> dict[str, Any]:
    errors = {status: error_response(_ERRORS[status]) for status in ("401", "403", "404", "503")}
    return {
        "summary": summary,
        "operationId": operation_id,
        **_NATIVE,
        "parameters": _REQUEST_HEADERS[:2],
        "responses": {"200": _json_response(f"{summary}.", name), **errors},
        "security": [{"bearer": []}],
    }


_MODEL_OF_PROPS = {
    "name": "model",
    "in": "query",
    "required": False,
    "description": "The model. Default: the account's default or only model.",
    "schema": {"type": "string"},
}

OPERATIONS: dict[str, dict[str, Any]] = {
    **_generation(
        _COMPLETION_PAGES,
        "Create a completion of one or more prompts",
        _body(CompletionRequest, _EXAMPLES),
        Endpoints.COMPLETIONS,
    ),
    **_generation(
        _CHAT_PAGES,
        "Create a chat completion",
        _body(ChatCompletionRequest, _CHAT_EXAMPLES),
        Endpoints.CHATS,
    ),
    INVOCATIONS.path: _generation(
        _COMPLETION_PAGES,
        "Create a completion, or a chat completion if the body has `messages`",
        _body(CompletionRequest, {"openai": _EXAMPLES["openai"]}),
        Endpoints.COMPLETIONS,
    )[COMPLETIONS.path]
    | {"operationId": "invoke"},
    "/tokenize": _operation(
        "Tokenize a text or a chat, in vLLM's or llama.cpp's format",
        "tokenize",
        body={"schema": reference("TokenizeRequest")},
        response=_json_response("The tokens, in the request's format.", "Tokens"),
        tag="Tokenization",
    ),
    "/detokenize": _operation(
        "Detokenize tokens, in vLLM's or llama.cpp's format",
        "detokenize",
        body={"schema": reference("DetokenizeRequest")},
        response=_json_response("The text, in the request's format.", "Detokenized"),
        tag="Tokenization",
    ),
    **{
        path: _native(
            "Create a completion in llama.cpp's own form",
            operation_id,
            _body(CompletionRequest, {"llamacpp": _EXAMPLES["llamacpp"]})
            | {"schema": reference("NativeCompletionRequest")},
        )
        for path, operation_id in (
            ("/completion", "create_native_completion"),
            ("/completions", "create_native_completions"),
        )
    },
    "/infill": _native(
        "Complete the text between a prefix and a suffix, in llama.cpp's own form",
        "create_native_infill",
        {
            "schema": reference("InfillRequest"),
            "examples": {
                "llamacpp": {
                    "summary": "With X-Api-Dialect: llamacpp",
                    "value": {
                        "model": "sluice-tiny",
                        "input_prefix": "def add(a, b):\n",
                        "input_suffix": "\n    return c\n",
                        "n_predict": 16,
                    },
                }
            },
        },
    ),
    "/chat/completions": _generation(
        _CHAT_PAGES,
        "Create a chat completion, as at `/v1/chat/completions`",
        _body(ChatCompletionRequest, {"llamacpp": _CHAT_EXAMPLES["llamacpp"]}),
        Endpoints.CHATS,
    )[CHATS.path]
    | {"operationId": "create_native_chat_completion", **_NATIVE},
    "/apply-template": _operation(
        "Render the prompt of a chat",
        "apply_template",
        body=_body(ChatCompletionRequest, {"llamacpp": {"messages": _MESSAGES}}),
        response=_json_response("The prompt.", "RenderedPrompt"),
        tag=_NATIVE_TAG,
    )
    | _NATIVE,
}
"""OpenAPI descriptions of each POST endpoint."""

_NATIVE_PATHS: dict[str, dict[str, Any]] = {
    "/models": {"get": _native_read("List available models", "list_native_models", "ModelList")},
    "/props": {
        "get": _native_read("Properties of a model", "get_native_props", "NativeProps")
        | {"parameters": [*_REQUEST_HEADERS[:2], _MODEL_OF_PROPS]}
    },
}

KEPT_PATHS: dict[str, dict[str, Any]] = _COMPLETION_PAGES.paths | _CHAT_PAGES.paths
"""OpenAPI descriptions of the endpoints that read a kept response, by method."""


def _public(
    summary: str, operation_id: str, member: str, kind: Schema = TEXT, reason: str = ""
) -> dict[str, Any]:
    """Return an operation without a credential that responds with one value.

    The `reason` is why the status may be 503.
    """
    content = {"application/json": {"schema": object_of({member: kind})}}
    headers = header_objects({"x-request-id": HEADER_TEXT["x-request-id"]})
    texts = {"200": "Success."} | ({"503": reason} if reason else {})
    return {
        "summary": summary,
        "operationId": operation_id,
        "tags": ["Operations"],
        "responses": {
            status: {"description": text, "headers": headers, "content": content}
            for status, text in texts.items()
        },
        "security": [],
    }


def _readiness(operation_id: str) -> dict[str, Any]:
    reason = "The gateway drains, or Redis does not accept writes; `status` names the reason."
    return _public("Check whether the gateway is ready", operation_id, "status", reason=reason)


_PUBLIC_PATHS = {
    "/health": {"get": _readiness("health")},
    "/v1/health": {"get": _readiness("v1_health")},
    "/load": {"get": _public("Count the running requests", "load", "server_load", INTEGER)},
    "/ping": {"get": _readiness("ping"), "post": _readiness("invoke_ping")},
    "/version": {"get": _public("Get the gateway's version", "version", "version")},
}
"""OpenAPI descriptions of the endpoints that need no credential."""

_ANNOUNCED: Final = "Models that workers announce."
_MODEL_PAGES: Final = {
    "/v1/models": (_ANNOUNCED, "ModelList"),
    "/v1/models/{model_id}": (_ANNOUNCED, "Model"),
    "/tokenizer_info": ("The configuration of a model's tokenizer.", "TokenizerInfo"),
}


def _model_page(description: str, name: str) -> dict[str, Any]:
    errors = {status: error_response(_ERRORS[status]) for status in ("401", "403", "404", "503")}
    return {
        "responses": {"200": _json_response(description, name), **errors},
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
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
    )
    by_hand = _add_generation(schema) if generates else set()
    describe_management(schema, apart_from=by_hand)
    schema["paths"] = dict(sorted(schema["paths"].items(), key=_place))
    components = schema.setdefault("components", {})
    schemas: dict[str, Schema] = components.setdefault("schemas", {})
    # All errors have one shape; FastAPI's own shape is never sent.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = COMPONENTS["Error"]
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return schema


def _place(path: tuple[str, dict[str, Any]]) -> int:
    """Return the position of a path's tag; management follows generation in its own order."""
    [tag] = next(iter(path[1].values()))["tags"]
    return GENERATION_TAGS.index(tag) if tag in GENERATION_TAGS else len(GENERATION_TAGS)


def _add_generation(schema: dict[str, Any]) -> set[str]:
    """Add the generation endpoints, and return their paths."""
    _, definitions = models_json_schema(
        [(CompletionRequest, "validation"), (ChatCompletionRequest, "validation")],
        ref_template=_REFERENCE,
    )
    for path, operation in OPERATIONS.items():
        schema["paths"][path] = {"post": operation}
    schema["paths"] |= KEPT_PATHS | _PUBLIC_PATHS | _NATIVE_PATHS
    for path, page in _MODEL_PAGES.items():
        schema["paths"][path]["get"] |= _model_page(*page)
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas.update({name: _plain(model) for name, model in definitions["$defs"].items()})
    schemas.update(COMPONENTS | CHAT_COMPONENTS | NATIVE_COMPONENTS)
    return {*OPERATIONS, *KEPT_PATHS, *_PUBLIC_PATHS, *_MODEL_PAGES, *_NATIVE_PATHS}


def _plain(model: Schema) -> Schema:
    """Return a body's schema with each parameter's type and bounds in one place.

    "Null or a number from 0 to 2" becomes a number from 0 to 2 with two types. The schema omits a
    default of null, which means absent: the description states the effective default.
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
