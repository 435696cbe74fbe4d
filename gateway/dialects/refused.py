"""Unsupported parameters: reject those that would change the response, report the others."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from gateway.errors import UnsupportedParameterError, shown

MAX_NAMED_ENTRIES = 32
"""Maximum entries per object that are reported as having no effect."""

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values that request nothing, for every parameter."""

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "adapter": (),
    "adaptive_target": (-1, -1.0),
    "documents": (),
    "ebnf": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "grammar_lazy": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_json_object": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": (),
    "lora": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "post_sampling_probs": (),
    "priority": (0, 0.0),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "return_tokens_as_token_ids": (),
    "structural_tag": (),
    "truncation_side": ("left",),
    "use_beam_search": (),
    "vllm_xargs": (),
    "watermarking": (),
}
"""Parameters that would change the response, and the values with which they would not."""

_OF_COMPLETIONS_ONLY: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "best_of": (1, 1.0),
    "echo": (),
    "echo_last": (0, 0.0),
    "images": (),
    "prompt": (),
    "suffix": (),
}

REFUSED_IN_CHATS: Mapping[str, tuple[Any, ...]] = {
    **{
        name: values
        for name, values in REFUSED.items()
        if name not in {"functions", "function_call"}
    },
    **_OF_COMPLETIONS_ONLY,
    "audio": (),
    "chat_template": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_format": ("auto", "deepseek"),
    "reasoning_history": (),
    "speculation": (),
    "store": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""The same for chats."""


def read_extra(
    extra: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]] = REFUSED
) -> list[str]:
    """Return the parameters that have no effect here.

    Raises UnsupportedParameterError for a rejected parameter.
    """
    ignored: list[str] = []
    for name, value in extra.items():
        if name in refused:
            if not _is_one_of(value, (*_NOTHING, *refused[name])):
                raise UnsupportedParameterError(_refusal(name, value, refused[name]), param=name)
        else:
            ignored.append(name)
    return ignored


def _refusal(name: str, value: object, values: tuple[Any, ...]) -> str:
    if not values:
        return f"'{name}' is not supported."
    allowed = " or ".join(map(shown, values))
    return f"'{name}' must be {allowed}; other values are not supported. Given: {shown(value)}."


def is_nothing(value: object) -> bool:
    """Return whether a value requests nothing, for every parameter."""
    return _is_one_of(value, _NOTHING)


def nested_extra(name: str, extra: Mapping[str, Any] | None) -> Iterable[str]:
    """Return the paths of an object's first entries that have no effect here."""
    paths = (f"{name}.{key}" for key, value in (extra or {}).items() if value is not None)
    return islice(paths, MAX_NAMED_ENTRIES)


def _is_one_of(value: object, values: tuple[Any, ...]) -> bool:
    # False == 0 in Python, but 0 may request something where false does not.
    return any(type(value) is type(other) and value == other for other in values)
