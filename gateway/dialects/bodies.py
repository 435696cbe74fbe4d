"""Parameters and checks that completion and chat bodies share."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from contract.sampling import MAX_STOP_TOKEN_IDS, SamplingSpec
from gateway.dialects.choices import SharedChoiceParameters, read_prompt_logprobs
from gateway.dialects.fields import given_or, read_strings, read_token_ids
from gateway.dialects.lengths import (
    LengthParameters,
    name_of_max_tokens,
    read_min_tokens,
    read_repetition_detection,
    read_stop,
)
from gateway.dialects.parameters import Endpoints
from gateway.dialects.profile import Profile
from gateway.dialects.prompts import (
    TruncationParameters,
    keeps_prompt_start,
    read_prompt_tokens_kept,
    unused_truncation,
)
from gateway.dialects.request import GenerationRequest
from gateway.dialects.sampling.chain import read_sampling
from gateway.dialects.sampling.logit_bias import (
    LogitBias,
    TokenChoiceParameters,
    read_allowed_token_ids,
    read_bad_words,
    read_logit_bias,
)
from gateway.dialects.sampling.parameters import ChainParameters
from gateway.dialects.stream_options import (
    NO_OPTIONS,
    DeliveryParameters,
    read_cache_isolation_key,
    read_service_tier,
    read_stream_options,
)
from gateway.dialects.structured.structures import (
    StructureParameters,
    read_structure,
)
from gateway.dialects.unknown_members import OBJECTS, unread_inside
from gateway.records.errors import MissingParameterError, invalid, must

MOST_MODELS: Final = 8
"""Models that one request may name in `models`."""
_MOST_CHARACTERS: Final = 256

ModelNames = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=_MOST_CHARACTERS)]],
    Field(max_length=MOST_MODELS),
]


class SharedParameters(
    DeliveryParameters,
    StructureParameters,
    TokenChoiceParameters,
    ChainParameters,
    LengthParameters,
    SharedChoiceParameters,
    TruncationParameters,
):
    """Parameters with the same meaning in completions and chats."""

    model: str | None = None
    """The model, from `GET /v1/models`. Required in dialects openai, fireworks and omlx; in others,
    the account's default model is used if absent."""
    models: ModelNames | None = None
    """Models to try in order if `model` has no worker, its queue is full, or its context window is
    too short. Without `model`, the first of them is tried first. The response names the one that
    ran. Default: none."""
    safe_tokenization: bool | None = None
    """Whether the text of a special token in a prompt or in messages is text, and not that token.
    Default: true in chats, false in completions."""


def read_model(value: object, profile: Profile) -> str | None:
    """Return the requested model, or None for the default model. Raises a BadRequestError."""
    if value is None:
        if profile.is_model_required:
            raise MissingParameterError("model")
        return None
    if not isinstance(value, str):
        raise must("model", "be a string", value)
    return value


def read_models(body: Mapping[str, Any]) -> list[str]:
    """Return the models that a body names in `models`. Raises InvalidParameterError."""
    return read_strings(body.get("models"), "models", most=MOST_MODELS, longest=_MOST_CHARACTERS)


def require_model(body: dict[str, Any], profile: Profile) -> str | None:
    """Return the model that a body requests, before the rest of the body is validated.

    None means the tenant's default model. Raises a BadRequestError.
    """
    return read_model(body.get("model"), profile)


def _read_whole_sampling(
    body: SharedParameters, profile: Profile, bias: LogitBias, *, max_tokens: int
) -> SamplingSpec:
    """Return the whole sampling spec, including what ends the text. Raises a BadRequestError."""
    return msgspec.structs.replace(
        read_sampling(body, profile),
        logit_bias=bias.ids,
        ignore_eos=bool(body.ignore_eos),
        min_tokens=read_min_tokens(body, profile, max_tokens=max_tokens),
        stop_token_ids=read_token_ids(
            body.stop_token_ids, "stop_token_ids", most=MAX_STOP_TOKEN_IDS
        ),
        allowed_token_ids=read_allowed_token_ids(body.allowed_token_ids, bias),
        bad_words=read_bad_words(body.bad_words),
        repetition_detection=read_repetition_detection(body),
    )


def read_shared(body: SharedParameters, profile: Profile, *, max_tokens: int) -> GenerationRequest:
    """Return a request with what completions and chats read alike. Raises a BadRequestError."""
    options = read_stream_options(body, profile)
    bias = read_logit_bias(body.logit_bias)
    return GenerationRequest(
        profile=profile,
        model=read_model(body.model, profile),
        prompts=[""],
        images=[[]],
        image_params=[[]],
        prompt_tokens_kept=read_prompt_tokens_kept(body),
        keeps_prompt_start=keeps_prompt_start(body),
        max_tokens=max_tokens,
        max_tokens_param=name_of_max_tokens(body, profile),
        context_length_behavior=given_or(
            body.context_length_exceeded_behavior, profile.context_length_behavior
        ),
        stop=read_stop(body, profile),
        includes_stop=given_or(body.include_stop_str_in_output, profile.includes_stop),
        prompt_logprobs=read_prompt_logprobs(body, is_streamed=bool(body.stream)),
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        hides_usage=options.include_usage is False,
        continuous_usage=bool(options.continuous_usage_stats),
        include_obfuscation=bool(options.include_obfuscation),
        structure=read_structure(body),
        sampling=_read_whole_sampling(body, profile, bias, max_tokens=max_tokens),
        bias_texts=bias.texts,
        reads_prefix_cache=body.cache_prompt is not False,
        cache_isolation_key=read_cache_isolation_key(body, profile),
        return_token_ids=bool(body.return_token_ids or body.return_tokens),
        shows_special_tokens=body.skip_special_tokens is False,
        wants_timings=bool(body.perf_metrics_in_response),
        timings_per_token=bool(body.timings_per_token),
        reports_progress=bool(body.stream and body.return_progress),
        max_predict_ms=max(body.t_max_predict_ms or 0, 0),
        service_tier=read_service_tier(body),
        is_background=bool(body.background),
        ignored_parameters=(),
    )


def shared_extra(body: SharedParameters) -> list[str]:
    """Return the paths of entries in shared parameters that have no effect here."""
    ignored = unread_inside(body, Endpoints.BOTH)
    options = body.stream_options or NO_OPTIONS
    if options.continuous_usage_stats and options.include_usage is False:
        ignored.append("stream_options.continuous_usage_stats")
    if body.return_progress and not body.stream:
        ignored.append("return_progress")
    match body.response_format:
        case {"json_schema": {"schema": _} as wrapper}:
            wrappers = OBJECTS[Endpoints.BOTH]["response_format:wrapper"]
            wrappers.check(wrapper, "response_format.json_schema", ignored)
        case _:
            pass
    return ignored + unused_truncation(body)


def with_one_constraint(request: GenerationRequest) -> GenerationRequest:
    """Return a request whose forced call replaces the structure of its text.

    Many clients send both. There is no text then, so the structure is named as ignored.

    Raises InvalidParameterError for parameters that conflict with the end of constrained text.
    """
    structure, use = request.structure, request.tool_use
    if structure is not None and use is not None and use.is_forced:
        ignored = tuple(sorted({*request.ignored_parameters, structure.param}))
        request = msgspec.structs.replace(request, structure=None, ignored_parameters=ignored)
    if (constraint := _constraint(request)) is None:
        return request
    ends = "constrained text ends as soon as it is complete."
    lacks = "the allowed tokens may not suffice to complete the text."
    for name, why in (("ignore_eos", ends), ("min_tokens", ends), ("allowed_token_ids", lacks)):
        if getattr(request.sampling, name):
            raise invalid(name, f"cannot be combined with '{constraint}': {why}")
    return request


def _constraint(request: GenerationRequest) -> str | None:
    """Return the parameter that constrains the text, or None."""
    if request.structure is not None:
        return request.structure.param
    is_tool_forced = request.tool_use is not None and request.tool_use.is_constraint
    return request.tools_param if is_tool_forced else None
