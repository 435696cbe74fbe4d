"""OpenAPI descriptions of the endpoints that read their requests without FastAPI.

A row of a table names what an operation has of its own. The rest follows from its path and schemas,
the endpoints and rejected parameters of `gateway.dialects`, and the classes of errors.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from gateway.completions.endpoints.event_ids import LAST_EVENT_ID_HEADER
from gateway.dialects.endpoint import (
    ENDPOINTS,
    INVOCATIONS,
    NATIVE_ENDPOINTS,
    POOLING_ENDPOINTS,
    SPEECH_ENDPOINTS,
    Endpoint,
)
from gateway.dialects.json_types import Schema, reference
from gateway.dialects.parameters import Endpoints, rejected_by
from gateway.process.openapi.schemas import (
    HEADER_TEXT,
    ID_TEXT,
    LIMIT_TEXT,
    OTHER_TEXT,
    error_responses,
    header_objects,
    table_schemas,
)

_NATIVE_TAG: Final = "llama.cpp"
_POOLING_TAG: Final = "Embeddings and ranks"
_MESSAGES_TAG: Final = "Messages"
GENERATION_TAGS: Final = (
    *("Completions", "Chat", _MESSAGES_TAG, "Responses", "Audio"),
    *(_POOLING_TAG, "Models", "Tokenization", _NATIVE_TAG),
)
"""Tags of the generation API, in the order of the page."""
_PUBLIC_TAG: Final = "Operations"
_SEA: Final = '[{"role": "user", "content": "Write one line about the sea."}]'
_EXAMPLES: Final[dict[str, dict[str, Schema]]] = json.loads(
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
}, "TranscriptionRequest": {
  "openai": {"file": "speech.mp3"}
}, "TranslationRequest": {
  "openai": {"file": "speech.mp3", "response_format": "srt"}
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
}, "apply_template": {
  "llamacpp": {"messages": SEA}
}}""".replace("SEA", _SEA)
)
"""Bodies by dialect, of a schema or of one operation that differs from others with its schema."""

_OF_MODELS: Final = frozenset({"401", "403", "404", "503"})
_OF_STORED: Final = _OF_MODELS | {"400", "429"}
_OF_BODIES: Final = _OF_STORED | {"402", "408", "409", "413", "415", "422", "504"}
"""Statuses of errors."""
_CREATED_TEXT: Final = HEADER_TEXT | LIMIT_TEXT | OTHER_TEXT
_OPERATIONS: Final = """
Completions
post /v1/completions create_completion CompletionRequest Completion
  Create a completion of one or more prompts
post /invocations invoke CompletionRequest Completion
  Create a completion, or a chat completion if the body has `messages`
Chat
post /v1/chat/completions create_chat_completion ChatCompletionRequest ChatCompletion
  Create a chat completion
Messages
post /v1/messages create_message MessageRequest Message
  Create a message, as in Anthropic's API
post /v1/messages/count_tokens count_message_tokens MessageRequest MessageTokens
  Count the tokens of a message's prompt
Responses
post /v1/responses create_response ResponseRequest Response
  Create a response, as in OpenAI's Responses
delete /v1/responses/{completion_id} delete_response - DeletedResponse
  Cancel and delete a stored response
post /v1/responses/input_tokens count_response_tokens ResponseRequest ResponseTokens
  Count the tokens of a response's prompt
Audio
post /v1/audio/transcriptions create_transcription TranscriptionRequest Transcription
  Transcribe the speech of an audio file
post /v1/audio/translations create_translation TranslationRequest Translation
  Translate the speech of an audio file into English
llama.cpp
post /responses create_native_response ResponseRequest Response
  Create a response, as at `/v1/responses`
post /completion create_native_completion NativeCompletionRequest NativeResponse
  Create a completion in llama.cpp's own form
post /completions create_native_completions NativeCompletionRequest NativeResponse
  Create a completion in llama.cpp's own form
post /infill create_native_infill InfillRequest NativeResponse
  Complete the text between a prefix and a suffix, in llama.cpp's own form
post /chat/completions create_native_chat_completion ChatCompletionRequest ChatCompletion
  Create a chat completion, as at `/v1/chat/completions`
post /apply-template apply_template ChatCompletionRequest RenderedPrompt
  Render the prompt of a chat
get /models list_native_models - ModelList
  List available models
get /props get_native_props - NativeProps
  Properties of a model
Tokenization
post /tokenize tokenize TokenizeRequest Tokens
  Tokenize a text or a chat, in vLLM's or llama.cpp's format
post /detokenize detokenize DetokenizeRequest Detokenized
  Detokenize tokens, in vLLM's or llama.cpp's format
Operations
get /health health - GatewayStatus
  Check whether the gateway is ready
get /v1/health v1_health - GatewayStatus
  Check whether the gateway is ready
get /load load - GatewayLoad
  Count the running requests
get /ping ping - GatewayStatus
  Check whether the gateway is ready
post /ping invoke_ping - GatewayStatus
  Check whether the gateway is ready
get /version version - GatewayVersion
  Get the gateway's version
"""
"""By tag: method, path, name, schema of the body, schema of the response, and summary."""
_POOLING: Final = {
    "embeddings": ("EmbeddingRequest", "Embeddings", "Embed texts"),
    "classify": ("ClassificationRequest", "Labels", "Classify texts"),
    "score": ("ScoreRequest", "Scores", "Score documents by their relevance"),
    "rerank": ("RerankRequest", "Ranking", "Rank documents by their relevance"),
}
"""The same by the name of the endpoint."""
_OF_FASTAPI: Final = {
    "get /tokenizer_info": "TokenizerInfo",
    "get /v1/models": "ModelList",
    "get /v1/responses/{completion_id}/input_items": "ResponseItems",
    "get /v1/models/{model_id}": "Model",
}
"""Schemas of the responses of operations that FastAPI describes but for these."""
_EVENTS: Final = {
    "Completion": "a `CompletionChunk` or an `Error` as JSON, and finally `[DONE]`.",
    "ChatCompletion": "a `ChatCompletionChunk` or an `Error` as JSON, and finally `[DONE]`.",
    "Message": "an event of Anthropic's API.",
    "Response": "an event of OpenAI's Responses.",
    "Transcription": "an event of OpenAI's transcriptions.",
    "NativeResponse": "a `NativePartialResult`, a `NativeResult` or an `Error` as JSON; "
    "there is no `[DONE]`.",
}
"""What the data of an event of a stream is, by the schema of the whole response."""
_REJECTING: Final = {
    "Completions": Endpoints.COMPLETIONS,
    "Chat": Endpoints.CHATS,
    _POOLING_TAG: Endpoints.POOLING,
}
_BESIDES: Final = """
post PATH:estimate estimate_NAME BODY CompletionEstimate
  Estimate the tokens and cost of a NOUN
get PATH/{completion_id} get_NAME - SCHEMA
  Retrieve a stored NOUN: streamed, in the background, or with an Idempotency-Key
post PATH/{completion_id}/cancel cancel_NAME - STATUS
  Cancel a stored NOUN; one that has ended stays as it is
"""
"""The same for each endpoint whose responses can be read again, and the first for pooling."""
_CREATING: Final = {
    each.path: each
    for each in (
        *(*ENDPOINTS, INVOCATIONS, *NATIVE_ENDPOINTS, *POOLING_ENDPOINTS, *SPEECH_ENDPOINTS),
    )
}


class _Row(NamedTuple):
    """An operation."""

    tag: str
    method: str
    path: str
    name: str
    body: str
    """Its schema; empty without a body."""
    schema: str
    """That of the response."""
    summary: str


def generation_operations() -> dict[str, Schema]:
    """Return the operations of the generation API by method and path."""
    operations = {f"{each.method} {each.path}": _operation(each) for each in _rows()}
    for name, schema in _OF_FASTAPI.items():
        errors = _OF_STORED if schema == "ResponseItems" else _OF_MODELS | {"400"}
        operations[name] = _responses(_response(schema), errors)
    return operations


def _rows() -> Iterator[_Row]:
    for part in re.split(r"\n(?=[A-Z]|llama)", _OPERATIONS.strip()):
        tag, _, rows = part.partition("\n")
        for row in _read(tag, rows):
            yield row
            if any(row.path == each.path for each in ENDPOINTS):
                yield from _besides(row, row.name.removeprefix("create_"))
    for endpoint in POOLING_ENDPOINTS:
        name = endpoint.path.strip("/").replace("/", "_")
        row = _Row(_POOLING_TAG, "post", endpoint.path, name, *_POOLING[endpoint.name])
        estimate, *_ = _besides(row, name)
        yield from (row, estimate)


def _besides(row: _Row, name: str) -> Iterator[_Row]:
    """Yield the operations of an endpoint besides the one that creates its responses."""
    noun = "request" if row.tag == _POOLING_TAG else name.replace("_", " ")
    texts = {"PATH": row.path, "NAME": name, "NOUN": noun, "BODY": row.body}
    texts |= {"SCHEMA": row.schema, "STATUS": _status(row.schema)}
    return _read(row.tag, re.sub("[A-Z]{4,}", lambda found: texts[found[0]], _BESIDES))


def _read(tag: str, rows: str) -> Iterator[_Row]:
    for heading, summary in re.findall("(.+)\n  (.+)", rows):
        method, path, name, body, schema = heading.split(" ")
        yield _Row(tag, method, path, name, body.strip("-"), schema, summary)


def _operation(row: _Row) -> Schema:
    operation: Schema = {"summary": row.summary, "operationId": row.name, "tags": [row.tag]}
    if row.tag == _PUBLIC_TAG:
        return operation | _public(row)
    if row.path in _CREATING:
        operation |= _creation(row, _CREATING[row.path])
    elif "{" in row.path:
        [endpoint] = [each for each in ENDPOINTS if row.path.startswith(f"{each.path}/")]
        operation |= _of_stored(row, endpoint)
    else:
        headers = _parameters("header", "_BodyHeaders" if row.body else "_RequestHeaders")
        queries = _parameters("query", *["_ModelName"] * (row.path == "/props"))
        errors = _OF_BODIES if row.body else _OF_MODELS
        operation |= _responses(_response(row.schema), errors) | {"parameters": headers + queries}
    if row.body:
        takes_file = row.path in _CREATING and _CREATING[row.path].takes_file
        kind = "multipart/form-data" if takes_file else "application/json"
        operation["requestBody"] = {"required": True, "content": {kind: _body(row)}}
    if row.tag == _NATIVE_TAG:
        operation["description"] = "In dialects llamacpp and llamacpp-2026 only."
    if row.tag == _MESSAGES_TAG:
        use_errors_of_messages(operation["responses"])
    return operation


def _creation(row: _Row, endpoint: Endpoint) -> Schema:
    """Return the parts of an operation that creates a response."""
    parameters, text, schemas = _parameters("header", "_CreationHeaders"), "Success.", [row.schema]
    if events := _EVENTS.get(row.schema, ""):
        parameters += _last_event_id(endpoint, "Resume after it. The request's body is ignored.")
        text = f"The response. With `stream: true`, server-sent events, each {events}"
    if events and not endpoint.takes_file:
        text += " With `background: true`, its status."
        schemas.append(_status(row.schema))
    response = _response(*schemas, text=text, events=events, headers=_CREATED_TEXT)
    if endpoint.takes_file:
        response["content"]["text/plain"] = {"schema": {"type": "string"}}
    refused = _refusals(_REJECTING[row.tag]) if row.tag in _REJECTING else {}
    return _responses(response, _OF_BODIES) | {"parameters": parameters} | refused


def _of_stored(row: _Row, endpoint: Endpoint) -> Schema:
    """Return the parts of an operation on a stored response."""
    completion_id = _text(endpoint.id_pattern, "The id of the response.")
    parameters = _parameters("path", completion_id=completion_id)
    if row.method != "get":
        return _responses(_response(row.schema), _OF_STORED) | {"parameters": parameters}
    events, schemas = _EVENTS[row.schema], (row.schema, _status(row.schema))
    text = "The whole response if it has ended, else its status; with `stream`, its events."
    operation = _responses(_response(*schemas, text=text, events=events), _OF_STORED)
    received = {"description": "With `stream`: the client has received every event."}
    operation["responses"]["204"] = received
    last = _last_event_id(endpoint, "Id of the last received event; overrides `starting_after`.")
    return operation | {"parameters": [*parameters, *_parameters("query", "_Position"), *last]}


def use_errors_of_messages(responses: Schema) -> None:
    """Describe errors as Anthropic's API has them."""
    responses.pop("422", None)
    responses["529"] = responses.pop("503")
    for status, response in responses.items():
        if status >= "4":
            response["content"]["application/json"]["schema"] = reference("MessageFailure")


def _public(row: _Row) -> Schema:
    """Return the parts of an operation without a credential."""
    texts = {"200": "Success."}
    if row.schema == "GatewayStatus":
        texts["503"] = (
            "The gateway drains, or Redis does not accept writes; `status` names the reason."
        )
    responses = {status: _response(row.schema, text=text) for status, text in texts.items()}
    return {"responses": responses, "security": []}


def _status(schema: str) -> str:
    """Return the schema of a response that has not finished."""
    return schema if schema == "Response" else "CompletionStatus"


def _responses(response: Schema, errors: Collection[str]) -> Schema:
    return {"responses": {"200": response, **error_responses(errors)}, "security": [{"bearer": []}]}


def _response(
    *schemas: str,
    text: str = "Success.",
    events: str = "",
    headers: Mapping[str, str] = ID_TEXT,
) -> Schema:
    """Return a response with one of these schemas, or with a stream of `events`."""
    [first, *others] = map(reference, dict.fromkeys(schemas))
    content = {"application/json": {"schema": {"anyOf": [first, *others]} if others else first}}
    if events:
        event = {"description": f"One server-sent event: {events}"}
        content["text/event-stream"] = {"schema": reference("ServerSentEvent") | event}
    return {"description": text, "headers": header_objects(headers), "content": content}


def _body(row: _Row) -> Schema:
    """Return a body with its examples; at llama.cpp's own paths, only those in its dialect."""
    found = _EXAMPLES.get(row.name) or _EXAMPLES.get(row.body.removeprefix("Native"), {})
    examples = {
        dialect: {
            "summary": f"With X-Api-Dialect: {dialect}",
            "value": {"model": "sluice-tiny", **example},
        }
        for dialect, example in found.items()
        if row.tag != _NATIVE_TAG or dialect == "llamacpp" or "llamacpp" not in found
    }
    return {"schema": reference(row.body)} | ({"examples": examples} if examples else {})


def _parameters(place: str, *tables: str, **schemas: Schema) -> list[Schema]:
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


def _last_event_id(endpoint: Endpoint, description: str) -> list[Schema]:
    pattern = rf"{endpoint.id_pattern}:[0-9]{{1,15}}"
    return _parameters("header", **{LAST_EVENT_ID_HEADER: _text(pattern, description)})


def _text(pattern: str, description: str) -> Schema:
    return {"type": "string", "pattern": f"^{pattern}$", "description": description}


def _refusals(endpoint: Endpoints) -> Schema:
    """Return a description of the parameters that an endpoint rejects, as Markdown."""
    lines = ["Parameters that are rejected with `unsupported_parameter`:", ""]
    for name, row in rejected_by(endpoint).items():
        values = f" other than `{row.accepted_json}`" if row.accepted else ""
        lines.append(f"- `{name}`{values}: {row.markdown}")
    return {"description": "\n".join(lines)}
