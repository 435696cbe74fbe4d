"""`POST /v1/completions`: the parameters of the body and what each of them means."""

import secrets
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from contract import sampling
from contract.sampling import SamplingSpec
from gateway.dialects.request import ContextLengthBehavior, GenerationRequest, Prompt
from gateway.dialects.wire import INTEGRAL
from gateway.errors import (
    BadRequestError,
    InvalidParameterError,
    MissingParameterError,
    shown,
)

DEFAULT_MAX_TOKENS = 16
RANDOM_SEED = -1
"""The seed that asks for none."""

MINIMAL_TOP_P = 1e-6
"""What top_p 0 becomes: so little that only the likeliest token is left."""

REFUSED = frozenset(
    {
        "documents",
        "function_call",
        "functions",
        "grammar",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "images",
        "json_schema",
        "prompt_embeds",
        "response_format",
        "structured_outputs",
        "suffix",
        "tool_choice",
        "tools",
        "use_beam_search",
    }
)
"""Parameters that constrain the answer: ignoring one would give a wrong answer, so they are refused."""

_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})
"""What a refused parameter may be: each of these asks for nothing."""

_NEUTRAL_OF: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
}

_MAX_TOKEN_ID_DIGITS = 20

PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        },
        {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}},
    ]
}

STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string"}, "maxItems": sampling.MAX_STOP_STRINGS},
    ]
}


def _bounded(bounds: sampling.Range, **extra: Any) -> Any:
    return Field(ge=bounds.minimum, le=bounds.maximum, **extra)


class UnsupportedParameterError(BadRequestError):
    """A parameter that would change the answer is not served."""

    code = "unsupported_parameter"


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = Field(
        default=False, description="End the stream with an extra chunk that carries only `usage`."
    )


class CompletionRequest(BaseModel):
    """Body of `POST /v1/completions`. Null means absent for every parameter."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str = Field(description="Model to use, from `GET /v1/models`.")
    prompt: Any = Field(
        description="Text, a list of token ids, a list that mixes both, or a list of such prompts.",
        json_schema_extra=PROMPT_SCHEMA,
    )
    max_tokens: Annotated[int, Field(ge=-1), INTEGRAL] = Field(
        default=DEFAULT_MAX_TOKENS,
        description="Tokens to generate for each choice, at most. -1: all that fit into the context window. "
        "0: none, with `echo` only.",
    )
    context_length_exceeded_behavior: Annotated[ContextLengthBehavior, Field(strict=False)] = Field(
        default=ContextLengthBehavior.TRUNCATE,
        description="When prompt and max_tokens exceed the context window: `truncate` lowers max_tokens, "
        "`error` refuses the request.",
    )
    temperature: Annotated[float, _bounded(sampling.TEMPERATURE)] = Field(
        default=1.0, description="0 always takes the likeliest token."
    )
    top_p: Annotated[float, _bounded(sampling.TOP_P)] = Field(
        default=1.0, description="Keep the likeliest tokens up to this probability mass."
    )
    top_k: Annotated[int, _bounded(sampling.TOP_K), INTEGRAL] = Field(
        default=0, description="Keep this many of the likeliest tokens; 0 and -1 keep all."
    )
    min_p: Annotated[float, _bounded(sampling.MIN_P)] = Field(
        default=0.0,
        description="Keep tokens with at least this share of the likeliest one's probability.",
    )
    n: Annotated[int, _bounded(sampling.N), INTEGRAL] = Field(
        default=1, description="Choices for each prompt."
    )
    best_of: Annotated[int, _bounded(sampling.N), INTEGRAL] | None = Field(
        default=None,
        description="Sample this many (at least `n`) and return the `n` with the highest mean "
        "log-probability; all are billed. Cannot be streamed when larger than `n`.",
    )
    stop: Any = Field(
        default=None,
        description="Up to 4 strings at which generation ends; the text returned ends before them.",
        json_schema_extra=STOP_SCHEMA,
    )
    seed: Annotated[int, _bounded(sampling.SEED), INTEGRAL] | None = Field(
        default=None,
        description="Makes sampling repeatable; choice `i` uses `seed + i`. -1 is the same as none.",
    )
    presence_penalty: Annotated[float, _bounded(sampling.PRESENCE_PENALTY)] = Field(
        default=0.0, description="Subtracted from the logit of every token generated before."
    )
    frequency_penalty: Annotated[float, _bounded(sampling.FREQUENCY_PENALTY)] = Field(
        default=0.0, description="Subtracted for each time the token was generated before."
    )
    repetition_penalty: Annotated[float, _bounded(sampling.REPETITION_PENALTY)] = Field(
        default=1.0, description="Divides the logits of tokens in prompt and completion; 1 is off."
    )
    logit_bias: dict[str, float] | None = Field(
        default=None, description="Token id -> bias from -100 to 100, added to its logit."
    )
    logprobs: Annotated[int, _bounded(sampling.LOGPROBS), INTEGRAL] | None = Field(
        default=None,
        description="Report log-probabilities of the chosen and this many of the likeliest tokens.",
    )
    echo: bool = Field(default=False, description="Put the prompt before the completion.")
    ignore_eos: bool = Field(
        default=False, description="Go on after the model's end-of-text token."
    )
    user: str | None = Field(
        default=None, description="Your end user's id, for abuse tracking; never an identity."
    )
    stream: bool = Field(
        default=False, description="Answer with server-sent events, a chunk for each step."
    )
    stream_options: StreamOptions | None = None


def to_generation_request(body: CompletionRequest, *, max_prompts: int) -> GenerationRequest:
    """Resolve shapes, aliases and defaults. Raises a BadRequestError naming the parameter."""
    ignored = _ignored_parameters(body.model_extra or {})
    prompts = _prompts(body.prompt)
    best_of = _best_of(body)
    if len(prompts) > max_prompts or len(prompts) * best_of > max_prompts:
        raise InvalidParameterError(
            f"'prompt' must have at most {max_prompts} prompts, times best_of (or n). "
            f"Given: {len(prompts)} prompts, best_of {best_of}.",
            param="prompt",
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidParameterError(
            "'max_tokens' must be >= 1, unless 'echo' is true. Given: 0.", param="max_tokens"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidParameterError(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    return GenerationRequest(
        model=body.model,
        prompts=prompts,
        max_tokens=body.max_tokens,
        context_length_behavior=body.context_length_exceeded_behavior,
        n=body.n,
        best_of=best_of,
        stop=_stop(body.stop),
        logprobs=body.logprobs,
        echo=body.echo,
        stream=body.stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        sampling=_sampling(body),
        ignored_parameters=ignored,
    )


def _ignored_parameters(extra: dict[str, Any]) -> tuple[str, ...]:
    for name, value in extra.items():
        if name in REFUSED and value not in (*_NEUTRAL, *_NEUTRAL_OF.get(name, ())):
            raise UnsupportedParameterError(f"'{name}' is not supported.", param=name)
    return tuple(sorted(extra))


def _prompts(value: object) -> list[Prompt]:
    """Dispatch on the shape of `prompt` (docs/api.md): one prompt, or several."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidParameterError(
            f"'prompt' must be a string or an array. Given: {shown(value)}.", param="prompt"
        )
    if not value:
        raise InvalidParameterError("'prompt' must not be empty.", param="prompt")
    if any(isinstance(item, list) for item in value):
        return [_one_prompt(item, f"prompt[{i}]") for i, item in enumerate(value)]
    if all(isinstance(item, str) for item in value):
        return list(value)
    return [_one_prompt(value, "prompt")]


def _one_prompt(value: object, path: str) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidParameterError(
            f"'{path}' must be a string or an array of token ids. Given: {shown(value)}.",
            param="prompt",
        )
    if not value:
        raise InvalidParameterError(f"'{path}' must not be empty.", param="prompt")
    for position, piece in enumerate(value):
        if isinstance(piece, bool) or not isinstance(piece, int | str):
            raise InvalidParameterError(
                f"'{path}[{position}]' must be a token id or a string. Given: {shown(piece)}.",
                param="prompt",
            )
    return value


def _best_of(body: CompletionRequest) -> int:
    best_of = body.best_of if body.best_of is not None else body.n
    if best_of < body.n:
        raise InvalidParameterError(
            f"'best_of' must be >= n ({body.n}). Given: {best_of}.", param="best_of"
        )
    if body.stream and best_of > body.n:
        raise InvalidParameterError(
            f"'best_of' larger than n ({body.n}) cannot be streamed. Given: {best_of}.",
            param="best_of",
        )
    return best_of


def _stop(value: object) -> list[str]:
    if value is None:
        return []
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise InvalidParameterError(
            f"'stop' must be a string or an array of strings. Given: {shown(value)}.", param="stop"
        )
    if len(strings) > sampling.MAX_STOP_STRINGS:
        raise InvalidParameterError(
            f"'stop' must have at most {sampling.MAX_STOP_STRINGS} strings. Given: {len(strings)}.",
            param="stop",
        )
    for item in strings:
        if not 0 < len(item) <= sampling.MAX_STOP_CHARACTERS:
            raise InvalidParameterError(
                f"'stop' must have strings of 1 to {sampling.MAX_STOP_CHARACTERS} characters. "
                f"Given: {len(item)} characters.",
                param="stop",
            )
    return strings


def _sampling(body: CompletionRequest) -> SamplingSpec:
    is_requested = body.seed is not None and body.seed != RANDOM_SEED
    return SamplingSpec(
        seed=body.seed if body.seed is not None and is_requested else secrets.randbits(62),
        is_seed_requested=is_requested,
        temperature=body.temperature,
        top_p=max(body.top_p, MINIMAL_TOP_P),
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        ignore_eos=body.ignore_eos,
    )


def _logit_bias(entries: dict[str, float]) -> dict[int, float]:
    if len(entries) > sampling.MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidParameterError(
            f"'logit_bias' must have at most {sampling.MAX_LOGIT_BIAS_ENTRIES} entries. "
            f"Given: {len(entries)}.",
            param="logit_bias",
        )
    bias: dict[int, float] = {}
    for token, value in entries.items():
        # Only plain decimals are token ids; int() alone would also read "1_0" and " 7", and it refuses
        # thousands of digits.
        if not (token.isascii() and token.isdigit() and len(token) <= _MAX_TOKEN_ID_DIGITS):
            raise InvalidParameterError(
                f"'logit_bias' must have token ids as keys. Given: {shown(token)}.",
                param="logit_bias",
            )
        if not sampling.LOGIT_BIAS.minimum <= value <= sampling.LOGIT_BIAS.maximum:
            raise InvalidParameterError(
                f"'logit_bias' must have values from -100 to 100. Given: {shown(value)} for token {token}.",
                param="logit_bias",
            )
        bias[int(token)] = value
    return bias


def require_model(body: dict[str, Any]) -> str:
    """Return the model a body asks for, before anything else of it is looked at."""
    model = body.get("model")
    if model is None:
        raise MissingParameterError("model")
    if not isinstance(model, str):
        raise InvalidParameterError(
            f"'model' must be a string. Given: {shown(model)}.", param="model"
        )
    return model
