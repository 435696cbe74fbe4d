"""Unsupported parameters: reject those that would change the response, report the others."""

from collections.abc import Iterable, Mapping
from enum import Flag, auto
from itertools import islice
from typing import Any, NamedTuple

from gateway.errors import UnsupportedParameterError, shown

MAX_NAMED_ENTRIES = 32
"""Maximum entries per object that are reported as having no effect."""

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values that request nothing, for every parameter."""


class Endpoints(Flag):
    """The endpoints that reject a parameter."""

    COMPLETIONS = auto()
    CHATS = auto()
    BOTH = COMPLETIONS | CHATS


_BOTH, _COMPLETIONS, _CHATS = Endpoints.BOTH, Endpoints.COMPLETIONS, Endpoints.CHATS


class Refusal(NamedTuple):
    """Why a parameter that would change the response is rejected."""

    endpoints: Endpoints
    accepted: tuple[Any, ...]
    """Values that are accepted, because they request nothing."""
    reason: str
    """Sentences that give the reason and what to use instead; names are in single quotes."""


REFUSALS: Mapping[str, Refusal] = {
    "adapter": Refusal(
        _BOTH, (), "A request cannot load weights. Name a model that has them as 'model'."
    ),
    "adaptive_target": Refusal(
        _BOTH, (-1, -1.0), "The sampler chain has no adaptive-p step. Use 'mirostat'."
    ),
    "add_special_tokens": Refusal(
        _CHATS, (), "The model's chat template writes the special tokens."
    ),
    "audio": Refusal(
        _BOTH, (), "Models return only text. Convert the text to speech in another service."
    ),
    "best_of": Refusal(_CHATS, (1, 1.0), "Use 'n' with 'logprobs', and choose among the choices."),
    "chat_template": Refusal(
        _CHATS,
        (),
        "The model's own template renders the messages. Set its variables with "
        "'chat_template_kwargs', or render the prompt yourself for POST /v1/completions.",
    ),
    "documents": Refusal(
        _BOTH, (), "Put the documents into the prompt or the messages, or offer 'tools'."
    ),
    "ebnf": Refusal(_BOTH, (), "Use 'grammar'."),
    "echo": Refusal(_CHATS, (), "A chat's prompt is not returned. Use POST /v1/completions."),
    "echo_last": Refusal(
        _CHATS, (0, 0.0), "A chat's prompt is not returned. Use POST /v1/completions."
    ),
    "function_call": Refusal(_COMPLETIONS, ("none", "auto"), "Use 'tool_choice'."),
    "functions": Refusal(_COMPLETIONS, (), "Use 'tools'."),
    "grammar_lazy": Refusal(
        _BOTH, (), "A 'grammar' applies from the first token. Use 'tools' to constrain calls only."
    ),
    "guided_choice": Refusal(_BOTH, (), "Use 'structured_outputs.choice'."),
    "guided_decoding_backend": Refusal(
        _BOTH, (), "All constraints are compiled by one backend. Omit the parameter."
    ),
    "guided_grammar": Refusal(_BOTH, (), "Use 'structured_outputs.grammar'."),
    "guided_json": Refusal(_BOTH, (), "Use 'structured_outputs.json'."),
    "guided_json_object": Refusal(_BOTH, (), "Use 'structured_outputs.json_object'."),
    "guided_regex": Refusal(_BOTH, (), "Use 'structured_outputs.regex'."),
    "guided_whitespace_pattern": Refusal(
        _BOTH, (), "Constrained JSON has no optional whitespace. For other forms, use 'grammar'."
    ),
    "images": Refusal(_CHATS, (), "Put images into 'messages', as parts of type image_url."),
    "kv_transfer_params": Refusal(
        _BOTH, (), "Only the engine's operator configures transfers of its cache."
    ),
    "length_penalty": Refusal(
        _BOTH, (1, 1.0), "It belongs to beam search, which is not available."
    ),
    "logprob_token_ids": Refusal(
        _BOTH, (), "Use 'logprobs' (in chats 'top_logprobs') for the likeliest tokens."
    ),
    "lora": Refusal(
        _BOTH, (), "A request cannot load weights. Name a model that has them as 'model'."
    ),
    "media_io_kwargs": Refusal(
        _BOTH, (), "Images are decoded in one way for all requests. Resize them before the request."
    ),
    "mm_processor_kwargs": Refusal(
        _BOTH, (), "Only the model's operator configures its image processor."
    ),
    "modalities": Refusal(_BOTH, (["text"],), "Models return only text."),
    "moderation": Refusal(_BOTH, (), "Texts are not moderated. Moderate them in another service."),
    "post_sampling_probs": Refusal(
        _BOTH, (), "Use POST /completion in dialect llamacpp, or 'logprobs' for the model's own."
    ),
    "prediction": Refusal(
        _BOTH, (), "It cannot speed up the response here. Without it, the response is the same."
    ),
    "priority": Refusal(_BOTH, (0, 0.0), "Use 'service_tier'."),
    "prompt": Refusal(_CHATS, (), "Use 'messages', or POST /v1/completions."),
    "prompt_embeds": Refusal(
        _BOTH, (), "Prompts are text or token ids. Use 'prompt' (in chats 'messages')."
    ),
    "reasoning_format": Refusal(
        _CHATS,
        ("auto", "deepseek"),
        "Reasoning is always separate from the content; 'include_reasoning' false hides it.",
    ),
    "reasoning_history": Refusal(
        _CHATS, (), "Omit from 'messages' the reasoning that the model should not see."
    ),
    "regex": Refusal(_BOTH, (), "Use 'structured_outputs.regex'."),
    "speculation": Refusal(
        _BOTH, (), "It cannot speed up the response here. Without it, the response is the same."
    ),
    "store": Refusal(
        _BOTH,
        (),
        "Responses are kept by 'background' or the header Idempotency-Key; nothing else is stored.",
    ),
    "structural_tag": Refusal(
        _BOTH, (), "Use 'tools' with 'strict' for calls, and 'grammar' for other texts."
    ),
    "suffix": Refusal(_CHATS, (), "Use POST /v1/completions."),
    "use_beam_search": Refusal(
        _BOTH, (), "In completions, 'best_of' returns the likeliest of several samples."
    ),
    "vllm_xargs": Refusal(
        _BOTH, (), "Only the engine's operator configures its extensions. Use named parameters."
    ),
    "watermarking": Refusal(_BOTH, (), "The sampler has no watermarks."),
    "web_search_options": Refusal(
        _BOTH, (), "Nothing searches the web here. Offer a search as one of the 'tools'."
    ),
}
"""Parameters that would change the response, and that no model supports."""


def refused_by(endpoint: Endpoints) -> Mapping[str, Refusal]:
    """Return the refusals of one endpoint, by parameter."""
    return {name: each for name, each in REFUSALS.items() if endpoint in each.endpoints}


REFUSED = refused_by(Endpoints.COMPLETIONS)
REFUSED_IN_CHATS = refused_by(Endpoints.CHATS)


def read_extra(extra: Mapping[str, Any], refused: Mapping[str, Refusal] = REFUSED) -> list[str]:
    """Return the parameters that have no effect here.

    Raises UnsupportedParameterError for a rejected parameter.
    """
    ignored: list[str] = []
    for name, value in extra.items():
        if name in refused:
            if not _is_one_of(value, (*_NOTHING, *refused[name].accepted)):
                raise UnsupportedParameterError(_message(name, value, refused[name]), param=name)
        else:
            ignored.append(name)
    return ignored


def _message(name: str, value: object, refusal: Refusal) -> str:
    if not refusal.accepted:
        return f"'{name}' is not supported. {refusal.reason}"
    allowed = accepted_values(refusal)
    return (
        f"'{name}' must be {allowed}; other values are not supported. Given: {shown(value)}. "
        f"{refusal.reason}"
    )


def accepted_values(refusal: Refusal) -> str:
    """Return the accepted values as JSON; empty if only values that request nothing are."""
    values = refusal.accepted
    return " or ".join(shown(each) for at, each in enumerate(values) if each not in values[:at])


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
