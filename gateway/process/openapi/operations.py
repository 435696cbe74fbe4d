"""OpenAPI descriptions of the endpoints that read their requests without FastAPI."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from gateway.completions.endpoints.event_ids import LAST_EVENT_ID_HEADER
from gateway.dialects.endpoint import (
    CHATS,
    CLASSIFY,
    COMPLETIONS,
    COUNTED_MESSAGES,
    EMBEDDINGS,
    INVOCATIONS,
    MESSAGES,
    POOLING_ENDPOINTS,
    RERANK,
    RESPONSES,
    SCORE,
    Endpoint,
)
from gateway.dialects.json_types import Schema, reference
from gateway.dialects.parameters import Endpoints, rejected_by
from gateway.process.openapi.schemas import (
    HEADER_TEXT,
    ID_TEXT,
    LIMIT_TEXT,
    OTHER_TEXT,
    error_response,
    header_objects,
    table_schemas,
)

_NATIVE_TAG: Final = "llama.cpp"
_POOLING_TAG: Final = "Embeddings and ranks"
GENERATION_TAGS: Final = (
    "Completions",
    "Chat",
    "Messages",
    "Responses",
    _POOLING_TAG,
    "Models",
    "Tokenization",
    _NATIVE_TAG,
)
"""Tags of the generation API, in the order of the page."""

Operation = dict[str, Any]

_SEA: Final = '[{"role": "user", "content": "Write one line about the sea."}]'
_EXAMPLES: Final[dict[str, dict[str, Operation]]] = json.loads(
    r"""
{"CompletionRequest": {
  "openai": {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0},
  "fireworks": {"prompt": "A product:", "max_tokens": 60, "response_format": {
    "type": "json_object",
    "schema": {"type": "object", "properties": {"name": {"type": "string"}}}}},
  "llamacpp": {"prompt": "Write a creative story:", "max_tokens": 200, "mirostat": 2,
    "mirostat_tau": 5.0, "mirostat_eta": 0.1},
  "mistralrs": {"prompt": "The answer is", "max_tokens": 16,
    "grammar": {"type": "regex", "value": " (yes|no)"}, "truncate_sequence": true},
  "omlx": {"prompt": "The quick brown fox", "max_tokens": 50, "xtc_probability": 0.5,
    "xtc_threshold": 0.1},
  "vllm": {"prompt": "Yes or no?", "structured_outputs": {"choice": [" yes", " no"]}}
}, "ChatCompletionRequest": {
  "openai": {"messages": SEA, "max_completion_tokens": 40, "temperature": 0},
  "fireworks": {"messages": SEA, "max_tokens": 60, "response_format": {"type": "json_object"}},
  "llamacpp": {"messages": SEA, "max_tokens": 60, "top_k": 40, "min_p": 0.1},
  "mistralrs": {"messages": SEA, "max_tokens": 16,
    "grammar": {"type": "regex", "value": "(yes|no)"}},
  "omlx": {"messages": SEA, "max_tokens": 60, "thinking_budget": 30},
  "vllm": {"messages": [{"role": "user", "content": "What is 2 plus 3?"}], "tools": [
    {"type": "function", "function": {
      "name": "add", "description": "Add two integers.", "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"]}}}],
    "chat_template_kwargs": {"enable_thinking": false}}
}, "MessageRequest": {
  "openai": {"max_tokens": 40, "messages": SEA}
}, "ResponseRequest": {
  "openai": {"input": "Write one line about the sea.", "max_output_tokens": 40}
}, "EmbeddingRequest": {
  "openai": {"input": ["Once upon a time", "The capital of France"]}
}, "ClassificationRequest": {
  "vllm": {"input": "Once upon a time"}
}, "ScoreRequest": {
  "vllm": {"text_1": "France", "text_2": ["The capital of France", "Once upon a time"]}
}, "RerankRequest": {
  "vllm": {"query": "France", "documents": ["Once upon a time", "The capital of France"]}
}, "InfillRequest": {
  "llamacpp": {"input_prefix": "def add(a, b):\n", "input_suffix": "\n    return c\n",
    "n_predict": 16}
}, "Template": {
  "llamacpp": {"messages": SEA}
}}""".replace("SEA", _SEA)
)
"""Bodies by schema and dialect."""

_ALWAYS: Final = {
    "401": "No valid API key or token.",
    "403": "The key does not permit the request.",
}
_OF_MODELS: Final = _ALWAYS | {
    "404": "The model does not exist, or the key has no access to it.",
    "503": "The request cannot run at the moment; retry after `retry-after` seconds.",
}
_OF_BODIES: Final = _OF_MODELS | {
    "400": "A parameter is invalid, or the context window is exceeded.",
    "402": "A budget or the credit balance is insufficient; 429 in dialect `openai`.",
    "408": "The body did not arrive in time.",
    "409": "The Idempotency-Key has another body, or its request is still being admitted.",
    "413": "The body is too large.",
    "415": "The body is not JSON in UTF-8, or its Content-Encoding is unknown.",
    "422": "The same as 400, in dialect `mistralrs`.",
    "429": "A rate limit is exceeded, or too many requests of the account are waiting.",
    "504": "The request exceeded its time limit.",
}
_OF_STORED: Final = _ALWAYS | {
    "400": "A parameter is invalid; `param` names it.",
    "404": "The response does not exist, has expired, or belongs to another account.",
    "429": "The response stopped when its client disconnected, and a limit does not allow it to "
    "resume.",
    "503": "Redis cannot be reached; retry later.",
}
_CREATED_TEXT: Final = HEADER_TEXT | LIMIT_TEXT | OTHER_TEXT
_STATUS: Final = "CompletionStatus"
_READY: Final = "Check whether the gateway is ready"
_UNREADY: Final = "The gateway drains, or Redis does not accept writes; `status` names the reason."


class _Kind(NamedTuple):
    """A form of responses."""

    endpoint: Endpoint
    """Determines the ids of the responses."""
    tag: str
    noun: str
    schema: str
    stream: str
    """What a stream consists of."""
    events: str
    """What the data of an event is."""
    rejecting: Endpoints = Endpoints.NONE
    status: str = _STATUS
    """The schema of a response that has not finished."""


def _kind(endpoint: Endpoint, tag: str, noun: str, rejecting: Endpoints) -> _Kind:
    schema = noun.title().replace(" ", "")
    stream = f", each a `{schema}Chunk`, and finally `data: [DONE]`"
    events = f"a `{schema}Chunk` or an `Error` as JSON, and finally `[DONE]`."
    return _Kind(endpoint, tag, noun, schema, stream, events, rejecting)


_COMPLETIONS: Final = _kind(COMPLETIONS, "Completions", "completion", Endpoints.COMPLETIONS)
_CHATS: Final = _kind(CHATS, "Chat", "chat completion", Endpoints.CHATS)
_MESSAGES: Final = _Kind(
    *(MESSAGES, "Messages", "message", "Message"),
    stream=", as in Anthropic's API",
    events="an event of Anthropic's API.",
)
_RESPONSES: Final = _Kind(
    *(RESPONSES, "Responses", "response", "Response"),
    stream=", as in OpenAI's Responses",
    events="an event of OpenAI's Responses.",
    status="Response",
)
_NATIVE: Final = _Kind(
    *(COMPLETIONS, _NATIVE_TAG, "result", "NativeResponse"),
    stream=": partial results and a final result of each choice, without `[DONE]`",
    events="a `NativePartialResult`, a `NativeResult` or an `Error` as JSON.",
)


def generation_operations() -> dict[str, Operation]:
    """Return the operations of the generation API by method and path."""
    completion, chat = _body("CompletionRequest"), _body("ChatCompletionRequest")
    own = _body("NativeCompletionRequest", "llamacpp", like="CompletionRequest")
    create_own = "Create a completion in llama.cpp's own form"
    infill = "Complete the text between a prefix and a suffix, in llama.cpp's own form"
    either = "Create a completion, or a chat completion if the body has `messages`"
    native_chats = _CHATS._replace(tag=_NATIVE_TAG, rejecting=Endpoints.NONE)
    return {
        **_operations_of(_COMPLETIONS, "Create a completion of one or more prompts", completion),
        **_operations_of(_CHATS, "Create a chat completion", chat),
        f"post {INVOCATIONS.path}": _creation(
            _COMPLETIONS, either, "invoke", _body("CompletionRequest", "openai")
        ),
        **_of_messages(),
        **_of_responses(),
        "post /completion": _creation(_NATIVE, create_own, "create_native_completion", own),
        "post /completions": _creation(_NATIVE, create_own, "create_native_completions", own),
        "post /infill": _creation(_NATIVE, infill, "create_native_infill", _body("InfillRequest")),
        "post /chat/completions": _creation(
            native_chats,
            "Create a chat completion, as at `/v1/chat/completions`",
            "create_native_chat_completion",
            _body("ChatCompletionRequest", "llamacpp"),
        ),
        "post /apply-template": _operation(
            "Render the prompt of a chat",
            "apply_template",
            _NATIVE_TAG,
            _response("The prompt.", "RenderedPrompt"),
            body=_body("ChatCompletionRequest", like="Template"),
        ),
        "get /models": _native_reading("List available models", "list_native_models", "ModelList"),
        "get /props": _native_reading(
            "Properties of a model", "get_native_props", "NativeProps", "_ModelName"
        ),
        **_pooling_operations(),
        "post /tokenize": _operation(
            "Tokenize a text or a chat, in vLLM's or llama.cpp's format",
            "tokenize",
            "Tokenization",
            _response("The tokens, in the request's format.", "Tokens"),
            body=_body("TokenizeRequest"),
        ),
        "post /detokenize": _operation(
            "Detokenize tokens, in vLLM's or llama.cpp's format",
            "detokenize",
            "Tokenization",
            _response("The text, in the request's format.", "Detokenized"),
            body=_body("DetokenizeRequest"),
        ),
        "get /tokenizer_info": _reading(
            "The configuration of a model's tokenizer.", "TokenizerInfo"
        ),
        "get /v1/models": _reading("Models that workers announce.", "ModelList"),
        "get /v1/models/{model_id}": _reading("Models that workers announce.", "Model"),
        "get /health": _public(_READY, "health", "GatewayStatus", _UNREADY),
        "get /v1/health": _public(_READY, "v1_health", "GatewayStatus", _UNREADY),
        "get /load": _public("Count the running requests", "load", "GatewayLoad"),
        "get /ping": _public(_READY, "ping", "GatewayStatus", _UNREADY),
        "post /ping": _public(_READY, "invoke_ping", "GatewayStatus", _UNREADY),
        "get /version": _public("Get the gateway's version", "version", "GatewayVersion"),
    }


def _of_messages() -> dict[str, Operation]:
    """Return the operations of Anthropic's API, with its form of errors."""
    body = _body("MessageRequest", "openai")
    counting = _operation(
        "Count the tokens of a message's prompt",
        "count_message_tokens",
        _MESSAGES.tag,
        _response("The number of tokens.", "MessageTokens"),
        body=body,
    )
    operations = {
        **_operations_of(_MESSAGES, "Create a message, as in Anthropic's API", body),
        f"post {COUNTED_MESSAGES.path}": counting,
    }
    for operation in operations.values():
        responses = operation["responses"]
        responses.pop("422", None)
        if "503" in responses:
            responses["529"] = responses.pop("503")
        for status, response in responses.items():
            if int(status) >= 400:
                response["content"] = {"application/json": {"schema": reference("MessageFailure")}}
    return operations


def _of_responses() -> dict[str, Operation]:
    """Return the operations of OpenAI's Responses."""
    body, path = _body("ResponseRequest", "openai"), RESPONSES.path
    operations = _operations_of(_RESPONSES, "Create a response, as in OpenAI's Responses", body)
    create = operations[f"post {path}"]
    stored = f"{path}/{{completion_id}}"
    return {
        **operations,
        f"post {path}/input_tokens": _operation(
            "Count the tokens of a response's prompt",
            "count_response_tokens",
            _RESPONSES.tag,
            _response("The number of tokens.", "ResponseTokens"),
            body=body,
        ),
        f"delete {stored}": _operation(
            "Cancel and delete a stored response",
            "delete_response",
            _RESPONSES.tag,
            _response("The response is deleted.", "DeletedResponse"),
            parameters=operations[f"get {stored}"]["parameters"][:1],
            errors=_OF_STORED,
        ),
        "post /responses": {
            **create,
            "operationId": "create_native_response",
            "tags": [_NATIVE_TAG],
            "summary": "Create a response, as at `/v1/responses`",
        },
    }


def _pooling_operations() -> dict[str, Operation]:
    """Return the operations of models that generate no text, at all of their paths."""
    texts = {
        EMBEDDINGS.name: ("Embed texts", "EmbeddingRequest", "Embeddings"),
        CLASSIFY.name: ("Classify texts", "ClassificationRequest", "Labels"),
        SCORE.name: ("Score documents by their relevance", "ScoreRequest", "Scores"),
        RERANK.name: ("Rank documents by their relevance", "RerankRequest", "Ranking"),
    }
    operations = {}
    for each in POOLING_ENDPOINTS:
        summary, body, response = texts[each.name]
        name = "_".join(each.path.strip("/").split("/"))
        operations[f"post {each.path}"] = _operation(
            summary,
            name,
            _POOLING_TAG,
            _response(f"{response}.", response, headers=_CREATED_TEXT),
            body=_body(body),
            parameters=_parameters("header", "_CreationHeaders"),
        ) | _refusals(Endpoints.POOLING)
        operations[f"post {each.path}:estimate"] = _estimate(
            "a request", name, _POOLING_TAG, _body(body)
        )
    return operations


def _operations_of(kind: _Kind, summary: str, body: Operation) -> dict[str, Operation]:
    """Return the operations of an endpoint, and those of its stored responses."""
    path, noun, name = kind.endpoint.path, kind.noun, kind.noun.replace(" ", "_")
    stored = f"{path}/{{completion_id}}"
    completion_id = _text(kind.endpoint.id_pattern, f"The id of the {noun}.")
    given = _parameters("path", completion_id=completion_id)
    last = _last_event_id(kind, "Id of the last received event; overrides `starting_after`.")
    whole = f"The whole {noun} if it has finished, else its status; with `stream`, its chunks."
    received = {"description": "With `stream`: the client has received every event."}
    reading = _operation(
        f"Retrieve a stored {noun}: streamed, in the background, or with an Idempotency-Key",
        f"get_{name}",
        kind.tag,
        _response(whole, kind.schema, kind.status, events=kind.events),
        parameters=[*given, *_parameters("query", "_Position"), *last],
        errors=_OF_STORED,
    )
    reading["responses"]["204"] = received
    return {
        f"post {path}": _creation(kind, summary, f"create_{name}", body),
        f"post {path}:estimate": _estimate(f"a {noun}", name, kind.tag, body),
        f"get {stored}": reading,
        f"post {stored}/cancel": _operation(
            f"Cancel a stored {noun}",
            f"cancel_{name}",
            kind.tag,
            _response("Its status, which does not change if it has already ended.", kind.status),
            parameters=given,
            errors=_OF_STORED,
        ),
    }


def _estimate(what: str, name: str, tag: str, body: Operation) -> Operation:
    response = _response("Token counts, cost and effective parameters.", "CompletionEstimate")
    return _operation(
        f"Estimate the tokens and cost of {what}", f"estimate_{name}", tag, response, body=body
    )


def _creation(kind: _Kind, summary: str, operation_id: str, body: Operation) -> Operation:
    """Return an operation that creates a response."""
    last = _last_event_id(kind, "Resume a stream after this event. The request's body is ignored.")
    text = (
        f"The {kind.noun}. With `stream: true`, server-sent events{kind.stream}. "
        "With `background: true`, its status."
    )
    operation = _operation(
        summary,
        operation_id,
        kind.tag,
        _response(text, kind.schema, kind.status, events=kind.events, headers=_CREATED_TEXT),
        body=body,
        parameters=[*_parameters("header", "_CreationHeaders"), *last],
    )
    return operation | (_refusals(kind.rejecting) if kind.rejecting else {})


def _operation(
    summary: str,
    operation_id: str,
    tag: str,
    response: Operation,
    *,
    body: Operation | None = None,
    parameters: Sequence[Operation] | None = None,
    errors: Mapping[str, str] = _OF_BODIES,
) -> Operation:
    """Return an operation; without `parameters`, with the headers of every request with a body."""
    operation = _responses(response, errors) | {
        "summary": summary,
        "operationId": operation_id,
        "tags": [tag],
        "parameters": _parameters("header", "_BodyHeaders") if parameters is None else parameters,
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    if tag == _NATIVE_TAG:
        operation["description"] = "In dialects llamacpp and llamacpp-2026 only."
    return operation


def _responses(response: Operation, errors: Mapping[str, str]) -> Operation:
    described = {status: error_response(text) for status, text in errors.items()}
    return {"responses": {"200": response, **described}, "security": [{"bearer": []}]}


def _reading(description: str, schema: str) -> Operation:
    """Return what FastAPI does not know of an operation that has a route of FastAPI."""
    return _responses(_response(description, schema), _OF_MODELS)


def _native_reading(summary: str, operation_id: str, schema: str, *queries: str) -> Operation:
    """Return an operation of llama.cpp that has no body."""
    return _operation(
        summary,
        operation_id,
        _NATIVE_TAG,
        _response(f"{summary}.", schema),
        parameters=[*_parameters("header", "_RequestHeaders"), *_parameters("query", *queries)],
        errors=_OF_MODELS,
    )


def _public(summary: str, operation_id: str, schema: str, unready: str = "") -> Operation:
    """Return an operation without a credential; `unready` is why its status may be 503."""
    texts = {"200": "Success."} | ({"503": unready} if unready else {})
    return {
        "summary": summary,
        "operationId": operation_id,
        "tags": ["Operations"],
        "responses": {status: _response(text, schema) for status, text in texts.items()},
        "security": [],
    }


def _response(
    text: str, *schemas: str, events: str = "", headers: Mapping[str, str] = ID_TEXT
) -> Operation:
    """Return a response with one of these schemas, or with a stream of `events`."""
    [first, *others] = map(reference, dict.fromkeys(schemas))
    content = {"application/json": {"schema": {"anyOf": [first, *others]} if others else first}}
    if events:
        event = {"description": f"One server-sent event: {events}"}
        content["text/event-stream"] = {"schema": reference("ServerSentEvent") | event}
    return {"description": text, "headers": header_objects(headers), "content": content}


def _body(schema: str, *dialects: str, like: str = "") -> Operation:
    """Return a body with its examples, or those of some dialects; `like` has them instead."""
    examples = {
        dialect: {
            "summary": f"With X-Api-Dialect: {dialect}",
            "value": {"model": "sluice-tiny", **example},
        }
        for dialect, example in _EXAMPLES.get(like or schema, {}).items()
        if not dialects or dialect in dialects
    }
    return {"schema": reference(schema)} | ({"examples": examples} if examples else {})


def _parameters(place: str, *tables: str, **schemas: Schema) -> list[Operation]:
    """Return the parameters of objects of the table, and others by name."""
    named = [*schemas.items()]
    for table in tables:
        named += table_schemas()[table]["properties"].items()
    return [
        {
            "name": name,
            "in": place,
            "required": place == "path",
            "description": schema["description"],
            "schema": {key: value for key, value in schema.items() if key != "description"},
        }
        for name, schema in named
    ]


def _last_event_id(kind: _Kind, description: str) -> list[Operation]:
    pattern = rf"{kind.endpoint.id_pattern}:[0-9]{{1,15}}"
    return _parameters("header", **{LAST_EVENT_ID_HEADER: _text(pattern, description)})


def _text(pattern: str, description: str) -> Schema:
    return {"type": "string", "pattern": f"^{pattern}$", "description": description}


def _refusals(endpoint: Endpoints) -> Operation:
    """Return a description of the parameters that an endpoint rejects, as Markdown."""
    lines = ["Parameters that are rejected with `unsupported_parameter`:", ""]
    for name, row in rejected_by(endpoint).items():
        values = f" other than `{row.accepted_json}`" if row.accepted else ""
        lines.append(f"- `{name}`{values}: {row.markdown}")
    return {"description": "\n".join(lines)}
