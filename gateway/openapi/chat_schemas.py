"""JSON schemas of chat responses for the OpenAPI page."""

from gateway.openapi.schemas import (
    INTEGER,
    NUMBER,
    PROGRESS,
    PROMPT_LOGPROBS,
    TEXT,
    TIMES,
    TOKEN_IDS,
    TOOL_CALL,
    USAGE,
    Schema,
)
from gateway.openapi.schemas import object_of as _object

_NULLABLE_TEXT: Schema = {"type": ["string", "null"]}
_REASONING: Schema = {
    **_NULLABLE_TEXT,
    "description": "The model's reasoning; dialect `vllm` has it as `reasoning` too.",
}
_BYTES: Schema = {
    "type": ["array", "null"],
    "items": {"type": "integer", "minimum": 0, "maximum": 255},
    "description": "The token's text in UTF-8; null for an incomplete character.",
}

_ALTERNATIVE: Schema = _object({"token": TEXT, "logprob": NUMBER, "bytes": _BYTES})

_LOGPROBS: Schema = _object(
    {
        "content": {
            "type": "array",
            "items": _object(
                {
                    **_ALTERNATIVE["properties"],
                    "top_logprobs": {"type": "array", "items": _ALTERNATIVE},
                }
            ),
        },
        "refusal": {"type": "null"},
    }
)

_FUNCTION: Schema = _object({"name": TEXT, "arguments": TEXT})

_MESSAGE: Schema = _object(
    {
        "role": {"const": "assistant"},
        "content": {**_NULLABLE_TEXT, "description": "Null if the message has only calls."},
        "refusal": {"type": "null"},
    },
    reasoning_content=_REASONING,
    reasoning=_NULLABLE_TEXT,
    tool_calls={"type": ["array", "null"], "items": TOOL_CALL},
    function_call=_FUNCTION | {"description": "For requests with `functions`."},
)

_CALL_PIECE: Schema = {
    **_object(
        {"index": INTEGER, "function": _object({"arguments": TEXT}, name=TEXT)},
        id=TEXT,
        type={"const": "function"},
    ),
    "description": "Only the first part of a call has `id`, `type` and the function's name.",
}

_DELTA: Schema = {
    **_object(
        {},
        role={"const": "assistant"},
        content=_NULLABLE_TEXT,
        reasoning_content=_REASONING,
        reasoning=_NULLABLE_TEXT,
        tool_calls={"type": "array", "items": _CALL_PIECE},
        function_call=_object({"arguments": TEXT}, name=TEXT),
    ),
    "description": "The first delta of a choice has the role; the last is empty.",
}

_CHOICE_END: dict[str, Schema] = {
    "logprobs": {"anyOf": [_LOGPROBS, {"type": "null"}]},
    "finish_reason": {
        "type": ["string", "null"],
        "enum": ["stop", "length", "tool_calls", "function_call", None],
        "description": "Null in a stream until the choice ends.",
    },
}

_CHOICE_EXTRA: dict[str, Schema] = {
    "stop_reason": {
        "type": ["string", "integer", "null"],
        "description": "The stop string, or the id of the stop token, that ended the choice.",
    },
    "token_ids": TOKEN_IDS | {"description": "With `return_token_ids`."},
    "prompt_token_ids": TOKEN_IDS
    | {"description": "With `return_token_ids`; dialect `vllm` has it beside `choices`."},
}

_PROMPT: dict[str, Schema] = {
    "prompt_token_ids": TOKEN_IDS
    | {"description": "In dialect `vllm`, with `return_token_ids`; in a stream, in first chunks."},
    "prompt_logprobs": PROMPT_LOGPROBS,
}


def _respond(object_name: str, choice: dict[str, Schema]) -> dict[str, Schema]:
    return {
        "id": {"type": "string", "pattern": "^chatcmpl-"},
        "object": {"type": "string", "const": object_name},
        "created": {"type": "integer", "description": "Unix time in seconds."},
        "model": {"type": "string", "description": "The model as the request named it."},
        "choices": {
            "type": "array",
            "items": _object({"index": INTEGER, **choice, **_CHOICE_END}, **_CHOICE_EXTRA),
        },
    }


CHAT_COMPLETION: Schema = _object(
    _respond("chat.completion", {"message": _MESSAGE}) | {"usage": USAGE}, **_PROMPT, **TIMES
)

CHAT_CHUNK: Schema = {
    **_object(
        _respond("chat.completion.chunk", {"delta": _DELTA}),
        **_PROMPT,
        **TIMES,
        usage={"anyOf": [USAGE, {"type": "null"}]},
        obfuscation={"type": "string", "description": "Padding, with `include_obfuscation`."},
        prompt_progress=PROGRESS,
    ),
    "description": "One `data:` line of a stream.",
}

CHAT_COMPONENTS: dict[str, Schema] = {
    "ChatCompletion": CHAT_COMPLETION,
    "ChatCompletionChunk": CHAT_CHUNK,
}
