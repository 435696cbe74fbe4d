"""JSON schemas of responses for the OpenAPI page."""

from typing import Any

from contract.dialect import Dialect
from contract.tier import ServiceTier
from gateway.dialects.chat.messages import MESSAGES_SCHEMA
from gateway.dialects.chat.template_arguments import KWARGS_SCHEMA
from gateway.dialects.fields import array_schema
from gateway.dialects.structured.tools import MAX_TOOLS, TOOL_SCHEMA
from gateway.tenancy.limits import LimitScope

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
_DIALECT: Schema = {"type": "string", "enum": [each.value for each in Dialect]}
TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def reference(name: str) -> Schema:
    """Return a reference to a schema of the page."""
    return {"$ref": f"#/components/schemas/{name}"}


def object_of(required: dict[str, Schema], **optional: Schema) -> Schema:
    """Return the schema of an object with these members."""
    return {"type": "object", "required": list(required), "properties": required | optional}


_LOGPROBS: Schema = object_of(
    {
        "tokens": {"type": "array", "items": TEXT},
        "token_logprobs": {
            "type": "array",
            "items": {"type": ["number", "null"]},
            "description": "Null for the first token of an echoed prompt.",
        },
        "top_logprobs": {
            "type": "array",
            "items": {"type": ["object", "null"], "additionalProperties": NUMBER},
        },
        "text_offset": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "description": "Code points of the returned text before the token.",
        },
    },
    token_ids=TOKEN_IDS,
)

TOOL_CALL: Schema = object_of(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": object_of({"name": TEXT, "arguments": TEXT}),
    },
)

USAGE: Schema = object_of(
    {
        "prompt_tokens": INTEGER,
        "completion_tokens": {
            "type": "integer",
            "description": "Tokens of all sequences, including those that `best_of` discarded.",
        },
        "total_tokens": INTEGER,
    },
    prompt_tokens_details=object_of({"cached_tokens": INTEGER}),
    completion_tokens_details=object_of(
        {},
        best_of_tokens={"type": "integer", "description": "Tokens that `best_of` discarded."},
        reasoning_tokens={"type": "integer", "description": "Reasoning tokens of chats."},
    ),
    cached_tokens={"type": "integer", "description": "In dialect `omlx`."},
    cost={
        "type": "number",
        "description": "Cost in dollars, if the account or the request enables it.",
    },
)

PROMPT_LOGPROBS: Schema = {
    "type": "array",
    "items": {
        "anyOf": [
            {
                "type": "object",
                "additionalProperties": object_of(
                    {
                        "logprob": {"type": "number"},
                        "rank": {"type": "integer", "description": "1 is the likeliest."},
                        "decoded_token": TEXT,
                    }
                ),
                "description": "By token id: the prompt's token first, then the likeliest.",
            },
            {"type": "null"},
        ]
    },
    "description": "With `prompt_logprobs`; null for the first token.",
}

_CHOICE: Schema = object_of(
    {
        "index": {"type": "integer", "description": "prompt index * n + choice"},
        "text": TEXT,
        "logprobs": {"anyOf": [_LOGPROBS, {"type": "null"}]},
        "finish_reason": {
            "type": ["string", "null"],
            "enum": ["stop", "length", "tool_calls", None],
            "description": "Null in a stream until the choice ends.",
        },
    },
    stop_reason={
        "type": ["string", "integer", "null"],
        "description": "The stop string, or the id of the stop token, that ended the text.",
    },
    token_ids=TOKEN_IDS | {"description": "With `return_token_ids`."},
    prompt_token_ids=TOKEN_IDS | {"description": "With `return_token_ids`."},
    prompt_logprobs=PROMPT_LOGPROBS,
    tool_calls={"type": "array", "items": TOOL_CALL},
)

_COMMON: dict[str, Schema] = {
    "id": {"type": "string", "pattern": "^cmpl-"},
    "object": {"type": "string", "const": "text_completion"},
    "created": {"type": "integer", "description": "Unix time in seconds."},
    "model": {"type": "string", "description": "The model as the request named it."},
    "choices": {"type": "array", "items": _CHOICE},
}

TIMES: dict[str, Schema] = {
    "system_fingerprint": TEXT,
    "timings": {"type": "object", "description": "In dialect `llamacpp`."},
    "perf_metrics": {
        "type": ["object", "null"],
        "description": "In dialect `fireworks`, with `perf_metrics_in_response`.",
    },
    "metrics": {"type": ["object", "null"], "description": "In dialect `vllm`."},
}

PROGRESS: Schema = {
    "description": "With `return_progress`, before the first token.",
    **object_of(dict.fromkeys(("total", "cache", "processed", "time_ms"), INTEGER)),
}

COMPLETION: Schema = object_of(_COMMON | {"usage": USAGE}, **TIMES)

COMPLETION_STATUS: Schema = object_of(
    {
        "id": {"type": "string", "pattern": "^(chat)?cmpl-"},
        "object": {"type": "string", "enum": ["text_completion", "chat.completion"]},
        **{name: _COMMON[name] for name in ("created", "model")},
        "background": {"type": "boolean"},
        "status": {
            "type": "string",
            "enum": ["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"],
            "description": "`incomplete`: its client disconnected; reading it resumes it.",
        },
    },
    error={"type": "object", "description": "The error of a failed completion, as in `Error`."},
)

CHUNK: Schema = {
    **object_of(
        _COMMON,
        **TIMES,
        usage={"anyOf": [USAGE, {"type": "null"}]},
        obfuscation={"type": "string", "description": "Padding, with `include_obfuscation`."},
        prompt_progress=PROGRESS,
    ),
    "description": "One `data:` line of a stream.",
}

_UNLESS_HIDDEN: Schema = {
    "type": ["integer", "null"],
    "description": "Null for a budget or credit whose use the credential may not see.",
}

_LIMIT: dict[str, Schema] = {
    "limit": {"type": "string", "description": "Name of the limit that rejected the request."},
    "scope": {"type": "string", "enum": [each.value for each in LimitScope]},
    "limit_value": _UNLESS_HIDDEN,
    "used": _UNLESS_HIDDEN,
    "reset_seconds": {
        "type": ["number", "null"],
        "description": "Seconds until the limit allows the request; null if never or unknown.",
    },
}

_OPENAI_ERROR: Schema = object_of(
    {
        "message": TEXT,
        "type": TEXT,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    },
    **_LIMIT,
)

_LLAMACPP_ERROR: Schema = object_of(
    {"code": INTEGER, "message": TEXT, "type": TEXT}, n_prompt_tokens=INTEGER, n_ctx=INTEGER
)

_VLLM_ERROR: Schema = object_of(
    {"message": TEXT, "type": TEXT, "param": {"type": ["string", "null"]}, "code": INTEGER}
)

ERROR: Schema = {
    **object_of({"error": {"anyOf": [_OPENAI_ERROR, _LLAMACPP_ERROR, _VLLM_ERROR]}}),
    "description": "`code` is a word, or the HTTP status in dialects `llamacpp` and `vllm`.",
}

ESTIMATE: Schema = object_of(
    {
        "object": {"const": "completion.estimate"},
        "model": TEXT,
        "dialect": _DIALECT,
        "prompt_tokens": {
            "type": "integer",
            "description": "Tokens of all prompts, after truncation.",
        },
        "prompt_truncated": {"type": "integer", "description": "Truncated prompt tokens."},
        "max_tokens": {
            "type": "integer",
            "description": "The lowest effective value of any prompt.",
        },
        "completion_tokens_max": {
            "type": "integer",
            "description": "Maximum tokens to generate, including those that `best_of` discards.",
        },
        "total_tokens_max": INTEGER,
        "parameters": {
            "type": "object",
            "description": "Effective parameters, including defaults.",
        },
        "ignored_parameters": {"type": "array", "items": TEXT},
        "context_window": INTEGER,
        "service_tier": {"type": "string", "enum": [each.value for each in ServiceTier]},
        "cost": object_of(
            {
                "prompt_micros": {"type": "integer", "description": "Cost of the prompt alone."},
                "max_micros": {"type": "integer", "description": "Maximum cost."},
            }
        )
        | {"description": "Micro-dollars."},
        "limits": {
            "type": "object",
            "description": "Limits of the server, and those of `key`, `project` and `tenant`.",
            "additionalProperties": {"anyOf": [INTEGER, {"type": "object"}]},
        },
    }
)

_MODEL_NAME: Schema = {
    "type": "string",
    "description": "Default: the account's default or only model.",
}

TOKENIZE_REQUEST: Schema = {
    "type": "object",
    "properties": {
        "model": _MODEL_NAME,
        "prompt": {"type": "string", "description": "The text, under vLLM's name."},
        "add_special_tokens": {
            "type": "boolean",
            "description": "Default: true for a prompt, false for messages.",
        },
        "return_token_strs": {"type": "boolean", "default": False},
        "messages": MESSAGES_SCHEMA
        | {"description": "In vLLM's format: a chat, rendered with the model's template."},
        "tools": array_schema(TOOL_SCHEMA, most=MAX_TOOLS),
        "chat_template_kwargs": KWARGS_SCHEMA,
        "add_generation_prompt": {"type": "boolean", "default": True},
        "continue_final_message": {"type": "boolean", "default": False},
        "content": {"type": "string", "description": "The text, under llama.cpp's name."},
        "add_special": {"type": "boolean", "default": False},
        "parse_special": {"type": "boolean", "default": True},
        "with_pieces": {"type": "boolean", "default": False},
    },
    "anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}, {"required": ["content"]}],
}

_PIECE: Schema = object_of({"id": INTEGER, "piece": {"type": ["string", "array"]}})

TOKENS: Schema = object_of(
    {"tokens": {"type": "array", "items": {"anyOf": [INTEGER, _PIECE]}}},
    count=INTEGER,
    max_model_len=INTEGER,
    token_strs={"type": ["array", "null"], "items": TEXT},
)

DETOKENIZE_REQUEST: Schema = object_of({"tokens": TOKEN_IDS}, model=_MODEL_NAME)

DETOKENIZED: Schema = {
    "type": "object",
    "properties": {
        "prompt": {
            "type": "string",
            "description": "The text, in dialect `vllm` or if the request names a model.",
        },
        "content": {
            "type": "string",
            "description": "The text in all other cases, as in llama.cpp.",
        },
    },
}

TOKENIZER_INFO: Schema = object_of(
    {
        "tokenizer_class": TEXT,
        "model_max_length": INTEGER,
        "added_tokens_decoder": {
            "type": "object",
            "additionalProperties": TEXT,
            "description": "Texts of the added tokens by token id.",
        },
    },
    bos_token=TEXT,
    chat_template={
        "type": ["string", "array"],
        "items": object_of({"name": TEXT, "template": TEXT}),
        "description": "The template's source; of several templates, each with its name.",
    },
)

MODEL: Schema = object_of(
    {
        "id": TEXT,
        "aliases": {
            "type": "array",
            "items": TEXT,
            "description": "Other names of the model in requests.",
        },
        "object": {"const": "model"},
        "created": INTEGER,
        "owned_by": TEXT,
        "root": {
            "type": "string",
            "description": "The model; of an adapter, `sha256:` and the digest of its files.",
        },
        "parent": {
            "type": ["string", "null"],
            "description": "The base model of an adapter; null for other models.",
        },
        "context_window": {"type": "integer", "description": "Prompt and completion tokens."},
        "max_model_len": {"type": "integer", "description": "The same, under vLLM's name."},
        "meta": object_of({"n_vocab": INTEGER, "n_ctx": INTEGER, "n_ctx_train": INTEGER})
        | {"description": "Sizes of the vocabulary and of the context, as in llama.cpp."},
        "ready": {"type": "boolean", "description": "Whether a worker currently serves it."},
        "state": {
            "enum": ["ready", "sleeping", "model_loading", "no_worker"],
            "description": "`sleeping`: a request starts a worker and waits for it. "
            "`model_loading`: a worker is being started. `no_worker`: requests get 503.",
        },
        "loading_seconds": {
            "type": ["integer", "null"],
            "description": "Seconds that the last worker took to load the model; null if unknown.",
        },
        "dialect": _DIALECT,
        "features": {"type": "array", "items": TEXT},
        "supported_parameters": {
            "type": "array",
            "items": TEXT,
            "description": "Parameters of `POST /v1/completions`.",
        },
        "supported_chat_parameters": {
            "type": "array",
            "items": TEXT,
            "description": "Parameters of `POST /v1/chat/completions`; empty if the model has no "
            "chat template.",
        },
        "unsupported_parameters": {
            "type": "array",
            "items": TEXT,
            "description": "Parameters that `POST /v1/completions` rejects for every model.",
        },
        "unsupported_chat_parameters": {
            "type": "array",
            "items": TEXT,
            "description": "Parameters that `POST /v1/chat/completions` rejects for every model.",
        },
        "pricing": {
            "type": ["object", "null"],
            "description": "Micro-dollars per million tokens, by service tier: `prompt_micros`, "
            "`cached_micros`, `completion_micros`.",
        },
    },
    resolves_to={
        "type": "string",
        "description": "Of an alias that an operator has defined: the model that runs the "
        "requests of this tenant.",
    },
    sunset_at={
        "type": ["string", "null"],
        "format": "date-time",
        "description": "When requests for this alias begin to fail.",
    },
)

MODEL_LIST: Schema = object_of(
    {"object": {"const": "list"}, "data": {"type": "array", "items": reference("Model")}}
)

COMPONENTS: dict[str, Schema] = {
    "Completion": COMPLETION,
    "CompletionChunk": CHUNK,
    "CompletionStatus": COMPLETION_STATUS,
    "CompletionEstimate": ESTIMATE,
    "Error": ERROR,
    "Model": MODEL,
    "ModelList": MODEL_LIST,
    "TokenizeRequest": TOKENIZE_REQUEST,
    "Tokens": TOKENS,
    "DetokenizeRequest": DETOKENIZE_REQUEST,
    "Detokenized": DETOKENIZED,
    "TokenizerInfo": TOKENIZER_INFO,
}
