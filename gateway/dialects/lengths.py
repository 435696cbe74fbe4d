"""Length and stop parameters: where a completion ends."""

from typing import Annotated, Any, Final

from pydantic import Field

from contract.sampling import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MIN_TOKENS,
    Range,
    RepetitionDetection,
)
from gateway.dialects.fields import (
    COUNT,
    Parameters,
    agreed,
    bounded,
    check_length,
    typed,
)
from gateway.dialects.json_types import schema_of
from gateway.dialects.profile import ContextLengthBehavior, Profile
from gateway.dialects.wire import INTEGRAL
from gateway.records.errors import InvalidParameterError, invalid, must

MAX_TOKENS = Range(-1, 2**31 - 1)
PATTERN_SIZE = Range(0, 128)
PATTERN_COUNT = Range(0, 1024)

_STOP: Final = f"str[1:{MAX_STOP_CHARACTERS}]"


class RepetitionDetectionParameters(Parameters):
    """When a choice counts as repetitive."""

    max_pattern_size: Annotated[int, bounded(PATTERN_SIZE), INTEGRAL] | None = None
    """Longest pattern to detect, in tokens; 0 disables detection."""
    min_pattern_size: Annotated[int, bounded(PATTERN_SIZE), INTEGRAL] | None = None
    """Shortest pattern to detect, in tokens; 0 means 1."""
    min_count: Annotated[int, bounded(PATTERN_COUNT), INTEGRAL] | None = None
    """Consecutive repetitions of the pattern that end the choice; at least 2."""


MAX_TOKENS_NAMES: Final = ("max_output_tokens", "max_tokens", "max_completion_tokens", "n_predict")


class LengthParameters(Parameters):
    """The length of a completion, and what ends it."""

    max_tokens: Annotated[int, bounded(MAX_TOKENS), INTEGRAL] | None = None
    """Maximum tokens to generate for each choice. -1: as many as fit into the context window. 0:
    none; requires `echo` except in dialect llamacpp. Default: 16; dialects llamacpp and mistralrs:
    -1; omlx: 32768."""
    max_completion_tokens: Annotated[int, bounded(MAX_TOKENS), INTEGRAL] | None = None
    """Another name of `max_tokens`."""
    n_predict: Annotated[int, bounded(MAX_TOKENS), INTEGRAL] | None = None
    """Another name of `max_tokens`; dialect llamacpp uses it if both are given."""
    min_tokens: Annotated[int, bounded(MIN_TOKENS), INTEGRAL] | None = None
    """Minimum tokens before the end-of-text token or a stop token. Default: 0."""
    context_length_exceeded_behavior: (
        Annotated[ContextLengthBehavior, Field(strict=False)] | None
    ) = None
    """If prompt and max_tokens exceed the context window: `truncate` lowers max_tokens, `error`
    rejects the request. Default: error; dialects fireworks, llamacpp, omlx and vllm: truncate."""
    stop: Any = Field(
        default=None,
        description="Strings at which generation ends; the returned text ends before them. At most "
        f"4 in dialect openai, {MAX_STOP_STRINGS} in others.",
        json_schema_extra=schema_of(f"{_STOP} | list[{_STOP}, :{MAX_STOP_STRINGS}] | None"),
    )
    include_stop_str_in_output: bool | None = None
    """Whether the returned text includes the stop string that ended it. Default: false; dialect
    fireworks: true."""
    stop_token_ids: Annotated[Any, typed(f"list[int[0:], :{MAX_STOP_TOKEN_IDS}] | None")] = None
    """Token ids at which generation ends."""
    ignore_eos: bool | None = None
    """Continue after the end-of-text token. Default: false."""
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=COUNT.maximum), INTEGRAL] | None = None
    """Milliseconds after which generation ends at the next line break; 0 and -1: no limit. Default:
    0."""
    repetition_detection: RepetitionDetectionParameters | None = None
    """End a choice that repeats itself. Default: none."""


class ChatLengthParameters(LengthParameters):
    """The length of a chat response."""

    max_tokens: Annotated[int, bounded(MAX_TOKENS), INTEGRAL] | None = None
    """Maximum tokens to generate for each choice, including reasoning. -1: as many as fit into the
    context window. 0: none, in dialect llamacpp only. Default: -1; dialect omlx: 32768."""


def read_max_tokens(body: LengthParameters, profile: Profile, *, is_echoed: bool) -> int:
    """Return the requested maximum of completion tokens; -1 means all that fit."""
    given = _given_max_tokens(body, profile)
    max_tokens = profile.max_tokens if given is None else given
    if max_tokens == 0 and not is_echoed and not profile.allows_empty_completion:
        raise must(name_of_max_tokens(body, profile), "be at least 1, unless 'echo' is true", 0)
    return max_tokens


def read_chat_max_tokens(body: LengthParameters, profile: Profile) -> int:
    """Return the maximum tokens of a chat response; -1 means all that fit."""
    given = _given_max_tokens(body, profile)
    max_tokens = profile.chat_max_tokens if given is None else given
    if max_tokens == 0 and not profile.allows_empty_completion:
        raise must(name_of_max_tokens(body, profile), "be at least 1, or -1", 0)
    return max_tokens


def _given_max_tokens(body: LengthParameters, profile: Profile) -> int | None:
    if profile.prefers_n_predict and body.n_predict is not None:
        return body.n_predict
    return agreed(
        max_tokens=body.max_tokens,
        max_completion_tokens=body.max_completion_tokens,
        n_predict=body.n_predict,
    )


def name_of_max_tokens(body: LengthParameters, profile: Profile) -> str:
    """Return the name under which the request gives `max_tokens`, or may give it."""
    if profile.prefers_n_predict and body.n_predict is not None:
        return "n_predict"
    names = [name for name in MAX_TOKENS_NAMES if hasattr(body, name)]
    return next((name for name in names if getattr(body, name) is not None), names[0])


def read_min_tokens(body: LengthParameters, profile: Profile, *, max_tokens: int) -> int:
    """Return the minimum number of completion tokens.

    Raises InvalidParameterError if it is above `max_tokens`.
    """
    min_tokens = body.min_tokens or 0
    if 0 <= max_tokens < min_tokens:
        name = name_of_max_tokens(body, profile)
        raise must("min_tokens", f"be at most {name} ({max_tokens})", min_tokens)
    return min_tokens


def read_stop(body: LengthParameters, profile: Profile) -> list[str]:
    """Return the stop strings. Raises InvalidParameterError."""
    value = body.stop
    if value is None:
        return []
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise must("stop", "be a string or an array of strings", value)
    if len(strings) > profile.most_stop_strings:
        raise _too_many_stop_strings(len(strings), profile)
    for item in strings:
        check_length(item, "stop", longest=MAX_STOP_CHARACTERS)
    return strings


def _too_many_stop_strings(given: int, profile: Profile) -> InvalidParameterError:
    most = profile.most_stop_strings
    if most == MAX_STOP_STRINGS:
        return must("stop", f"have at most {most} strings", given)
    return invalid(
        "stop",
        f"must have at most {most} strings in dialect {profile.name}. Given: {given}. Other "
        f"dialects allow {MAX_STOP_STRINGS}: select one by the header X-Api-Dialect, or ask the "
        "operator for another default.",
    )


def read_repetition_detection(body: LengthParameters) -> RepetitionDetection | None:
    """Return when a choice counts as repetitive, or None for never.

    Raises InvalidParameterError.
    """
    given = body.repetition_detection
    if given is None or not given.max_pattern_size:
        return None
    least, count = given.min_pattern_size or 1, given.min_count or 0
    if least > given.max_pattern_size:
        raise must(
            "repetition_detection.min_pattern_size",
            f"be at most max_pattern_size ({given.max_pattern_size})",
            least,
        )
    if count < 2:
        raise must("repetition_detection.min_count", "be at least 2", count)
    return RepetitionDetection(
        max_pattern_size=given.max_pattern_size, min_pattern_size=least, min_count=count
    )
