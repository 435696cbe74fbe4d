"""Dialect profiles: the differences between the supported APIs.

Every parameter works in every profile. A profile only defines the defaults and the shape of the
response. Six profiles follow the documentation of their APIs. Two more, named `fireworks-2026` and
`llamacpp-2026`, follow the current behavior of these servers.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from contract.dialect import Dialect
from contract.sampling import MAX_STOP_STRINGS
from gateway.records.errors import ErrorStyle

__all__ = ["ALL_THAT_FIT", "PROFILES", "Dialect", "MirostatUnit", "Profile", "TimingShape"]

ALL_THAT_FIT = -1
"""The max_tokens value for all tokens that fit into the context window."""
SHORT_DEFAULT = 16
"""The max_tokens of completions in most dialects."""


class ContextLengthBehavior(StrEnum):
    """What happens if prompt and max_tokens together exceed the context window."""

    TRUNCATE = "truncate"  # max_tokens is lowered to what fits.
    ERROR = "error"  # The request is rejected.


class TimingShape(StrEnum):
    """The format of timings in a response (docs/api.md)."""

    NONE = "none"
    FIREWORKS = "fireworks"  # Headers, and `perf_metrics` on request.
    LLAMACPP = "llamacpp"  # `timings`
    MISTRALRS = "mistralrs"  # `usage.avg_tok_per_sec` and similar.
    OMLX = "omlx"  # `usage.time_to_first_token` and similar.
    VLLM = "vllm"  # `metrics`


class MirostatUnit(StrEnum):
    """The unit of `mirostat_target`."""

    PERPLEXITY = "perplexity"
    BITS = "bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Defaults, limits, conventions and response format of one dialect."""

    name: Dialect

    # Parameter defaults.
    max_tokens: int = SHORT_DEFAULT
    chat_max_tokens: int = ALL_THAT_FIT
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    context_length_behavior: ContextLengthBehavior = ContextLengthBehavior.ERROR
    logprobs_true: int = 1
    """Number of alternatives for `logprobs: true`."""

    # Limits.
    most_stop_strings: int = MAX_STOP_STRINGS
    most_logprobs: int = 20
    most_top_logprobs: int = 20
    """For chats."""
    most_xtc_threshold: float = 1.0

    # Conventions.
    is_model_required: bool = True
    allows_missing_prompt: bool = False
    """Whether a request without a prompt starts from the model's begin-of-text token."""
    prefers_n_predict: bool = False
    """Whether `n_predict` wins over other names of max_tokens with different values."""
    takes_any_model_name: bool = False
    """Whether an unknown name means the only model that the principal can use."""
    uses_sampler_chain: bool = False
    """Whether even plain sampling uses llama.cpp's order, and penalties use its window."""
    penalty_last_n: int = -1
    penalizes_prompt: bool = False
    """Whether presence and frequency penalties count tokens of the prompt."""
    spares_special_tokens_in_xtc: bool = False
    includes_stop: bool = False
    """Whether the text includes the stop string that ended it."""
    is_suffix_literal: bool = False
    """Whether `suffix` is appended to the completion, instead of being the target of infill."""
    best_of_keeps: bool = False
    """Whether `best_of` is how many of `n` are kept, not how many are sampled to keep `n`."""
    allows_empty_completion: bool = False
    """Whether `max_tokens` 0 is accepted without `echo`."""
    allows_stream_options_without_stream: bool = False
    separates_thinking: bool = False
    """Whether a chat cannot have both `thinking` and `reasoning_effort`."""
    takes_any_role: bool = False
    """Whether the role of a chat message may be any text, which only the chat template checks."""
    rejects_empty_values: bool = False
    """Whether empty `tools` of a chat, and an empty `cache_salt`, are rejected."""
    mirostat_unit: MirostatUnit = MirostatUnit.PERPLEXITY
    continues_assistant_message: bool = False
    """Whether a chat whose last message is the assistant's continues that message by default."""
    has_native_paths: bool = False
    """Whether llama.cpp's own paths exist, such as `/completion`."""

    # Response format.
    keeps_usage_in_final_chunk: bool = False
    """Whether the last chunk with a finish reason has `usage` even before OpenAI's extra chunk."""
    ends_choices_with_error: bool = False
    """Whether a failed stream sends finish reason `error` for every unfinished choice."""
    reasoning_members: tuple[str, ...] = ("reasoning_content",)
    """The fields that contain the reasoning in a chat response, each with all of it."""
    has_prompt_ids_beside_choices: bool = False
    """Whether `prompt_token_ids` of a chat are beside its choices, and not in them."""
    has_null_parts: bool = False
    """Whether a chat message has null for absent reasoning and calls."""
    has_scored_objects: bool = False
    """Whether `logprobs: true` of a completion returns objects as in chats, and not lists."""
    scores_only_content: bool = False
    """Whether the tokens of the log-probabilities of a chat are those of its content, and others,
    such as the end of the text, have none."""
    timing: TimingShape = TimingShape.NONE
    error_style: ErrorStyle = ErrorStyle.OPENAI


_FIREWORKS = Profile(
    name=Dialect.FIREWORKS,
    context_length_behavior=ContextLengthBehavior.TRUNCATE,
    most_logprobs=5,
    most_top_logprobs=5,
    includes_stop=True,
    separates_thinking=True,
    allows_stream_options_without_stream=True,
    keeps_usage_in_final_chunk=True,
    ends_choices_with_error=True,
    timing=TimingShape.FIREWORKS,
)

_LLAMACPP = Profile(
    name=Dialect.LLAMACPP,
    max_tokens=ALL_THAT_FIT,
    temperature=0.8,
    top_p=0.95,
    top_k=40,
    min_p=0.05,
    repetition_penalty=1.1,
    context_length_behavior=ContextLengthBehavior.TRUNCATE,
    is_model_required=False,
    prefers_n_predict=True,
    takes_any_model_name=True,
    uses_sampler_chain=True,
    penalty_last_n=64,
    penalizes_prompt=True,
    allows_empty_completion=True,
    allows_stream_options_without_stream=True,
    continues_assistant_message=True,
    has_native_paths=True,
    timing=TimingShape.LLAMACPP,
    error_style=ErrorStyle.LLAMACPP,
)

PROFILES: dict[Dialect, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name=Dialect.OPENAI,
            most_stop_strings=4,
            most_logprobs=5,
            allows_missing_prompt=True,
            scores_only_content=True,
        ),
        _FIREWORKS,
        replace(
            _FIREWORKS,
            name=Dialect.FIREWORKS_2026,
            includes_stop=False,
            has_scored_objects=True,
            mirostat_unit=MirostatUnit.BITS,
        ),
        _LLAMACPP,
        replace(_LLAMACPP, name=Dialect.LLAMACPP_2026, repetition_penalty=1.0),
        Profile(
            name=Dialect.MISTRALRS,
            max_tokens=ALL_THAT_FIT,
            is_model_required=False,
            is_suffix_literal=True,
            best_of_keeps=True,
            timing=TimingShape.MISTRALRS,
            error_style=ErrorStyle.MISTRALRS,
        ),
        Profile(
            name=Dialect.OMLX,
            max_tokens=32_768,
            chat_max_tokens=32_768,
            context_length_behavior=ContextLengthBehavior.TRUNCATE,
            most_xtc_threshold=0.5,
            spares_special_tokens_in_xtc=True,
            allows_stream_options_without_stream=True,
            has_null_parts=True,
            timing=TimingShape.OMLX,
        ),
        Profile(
            name=Dialect.VLLM,
            context_length_behavior=ContextLengthBehavior.TRUNCATE,
            is_model_required=False,
            takes_any_role=True,
            rejects_empty_values=True,
            reasoning_members=("reasoning", "reasoning_content"),
            has_prompt_ids_beside_choices=True,
            timing=TimingShape.VLLM,
            error_style=ErrorStyle.VLLM,
        ),
    )
}
