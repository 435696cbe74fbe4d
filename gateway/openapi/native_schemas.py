"""JSON schemas of llama.cpp's own paths for the OpenAPI page."""

from gateway.dialects.native import MAX_FILES
from gateway.openapi.schemas import (
    INTEGER,
    NUMBER,
    PROGRESS,
    TEXT,
    TOKEN_IDS,
    Schema,
    object_of,
    reference,
)

_BOOLEAN: Schema = {"type": "boolean"}
_TOKEN: Schema = {
    "id": INTEGER,
    "token": TEXT,
    "bytes": {"type": ["array", "null"], "items": INTEGER},
}
_LOGPROB: Schema = _TOKEN | {"logprob": NUMBER}
_PROBABILITY: Schema = _TOKEN | {"prob": {"type": "number", "minimum": 0, "maximum": 1}}
_SLOT: Schema = {"type": "integer", "const": -1, "description": "Requests have no slots."}
_PROBABILITIES: Schema = {
    "type": "array",
    "description": "With `n_probs`, one item for each token; in a stream, of the new tokens.",
    "items": {
        "anyOf": [
            object_of(
                {
                    **_LOGPROB,
                    "top_logprobs": {"type": "array", "items": object_of(_LOGPROB)},
                }
            ),
            {
                **object_of(
                    {
                        **_PROBABILITY,
                        "top_probs": {"type": "array", "items": object_of(_PROBABILITY)},
                    }
                ),
                "description": "With `post_sampling_probs`.",
            },
        ]
    },
}
_POST_SAMPLING: Schema = {
    "type": ["boolean", "null"],
    "description": "Return probabilities after the samplers instead of the model's own "
    "log-probabilities; requires `n_probs`. Default: false.",
}
_SETTINGS: Schema = {
    "type": "object",
    "description": "Effective parameters by llama.cpp's names, and `n_ctx`.",
}

_PARTIAL: Schema = object_of(
    {
        "index": {"type": "integer", "description": "prompt index * n + choice"},
        "content": TEXT,
        "tokens": TOKEN_IDS,
        "stop": {"const": False},
        "id_slot": _SLOT,
        "tokens_predicted": INTEGER,
        "tokens_evaluated": INTEGER,
    },
    completion_probabilities=_PROBABILITIES,
    timings={"type": "object", "description": "With `timings_per_token`."},
    prompt_progress=PROGRESS,
)

_FINAL: Schema = object_of(
    {
        "index": {"type": "integer", "description": "prompt index * n + choice"},
        "content": {"type": "string", "description": "Empty in a stream."},
        "tokens": TOKEN_IDS | {"description": "With `return_tokens`; empty in a stream."},
        "id_slot": _SLOT,
        "stop": {"const": True},
        "model": TEXT,
        "tokens_predicted": INTEGER,
        "tokens_evaluated": {"type": "integer", "description": "Tokens of the prompt."},
        "generation_settings": _SETTINGS,
        "prompt": {"type": "string", "description": "The text of the prompt's tokens."},
        "has_new_line": _BOOLEAN,
        "truncated": {
            "type": "boolean",
            "description": "Whether the text ended because the context window is full.",
        },
        "stop_type": {"type": "string", "enum": ["eos", "word", "limit"]},
        "stopping_word": TEXT,
        "tokens_cached": {"type": "integer", "description": "Cached tokens of the prompt."},
        "timings": {"type": "object"},
    },
    completion_probabilities=_PROBABILITIES,
)

_INFILL: Schema = object_of(
    {"input_prefix": TEXT, "input_suffix": TEXT},
    input_extra={
        "type": "array",
        "description": "Files that precede the prefix as context.",
        "items": object_of({"text": TEXT}, filename=TEXT),
        "maxItems": MAX_FILES,
    },
    prompt={"type": "string", "description": "Text after the prefix. Default: empty."},
    post_sampling_probs=_POST_SAMPLING,
)

_PROPS: Schema = object_of(
    {
        "default_generation_settings": object_of({"n_ctx": INTEGER, "params": _SETTINGS}),
        "total_slots": {
            "type": "integer",
            "description": "Requests that the ready workers of the model run at once.",
        },
        "model_alias": TEXT,
        "model_path": {"type": "string", "description": "The name of the model."},
        "modalities": object_of({"vision": _BOOLEAN, "audio": {"const": False}}),
        "chat_template": {"type": "string", "description": "Empty if the model has none."},
        "bos_token": TEXT,
        "eos_token": TEXT,
        "build_info": TEXT,
        "is_sleeping": {"type": "boolean"},
    }
)

NATIVE_COMPONENTS: dict[str, Schema] = {
    "NativeResult": _FINAL,
    "NativePartialResult": _PARTIAL,
    "NativeCompletionRequest": {
        "allOf": [
            reference("CompletionRequest"),
            object_of({}, post_sampling_probs=_POST_SAMPLING),
        ]
    },
    "InfillRequest": {
        "description": "The parameters of `CompletionRequest`, except `suffix` and `images`, and:",
        **_INFILL,
    },
    "NativeProps": _PROPS,
    "RenderedPrompt": object_of({"prompt": TEXT}),
    "NativeResponse": {
        "anyOf": [
            reference("NativeResult"),
            {
                "type": "array",
                "items": reference("NativeResult"),
                "description": "The results of several choices.",
            },
        ]
    },
}
