"""`POST /v1/completions`: the body, and the request that it stands for.

The parameters and their meaning are spread over the modules of this room by topic; here they come
together, and here stand the rules that concern more than one topic.
"""

from typing import Any

import msgspec
from pydantic import Field

from contract.sampling import SamplingSpec
from gateway.dialects.chain import read_sampling
from gateway.dialects.chain_parameters import ChainParameters
from gateway.dialects.choices import ChoiceParameters, read_fan_out, read_logprobs
from gateway.dialects.images import ImageParameters, read_images
from gateway.dialects.lengths import (
    LengthParameters,
    read_context_length_behavior,
    read_includes_stop,
    read_max_tokens,
    read_min_tokens,
    read_repetition_detection,
    read_stop,
    read_stop_token_ids,
)
from gateway.dialects.logit_bias import (
    LogitBias,
    TokenChoiceParameters,
    read_allowed_token_ids,
    read_bad_words,
    read_logit_bias,
)
from gateway.dialects.profile import Profile
from gateway.dialects.prompts import (
    PromptParameters,
    read_echo,
    read_prompt_tokens_kept,
    read_prompts,
    read_suffix,
)
from gateway.dialects.refused import nested_extra, read_extra
from gateway.dialects.request import GenerationRequest, Prompt, Structure, ToolUse
from gateway.dialects.stream_options import (
    AnswerParameters,
    read_cache_isolation_key,
    read_service_tier,
    read_stream_options,
)
from gateway.dialects.structured_outputs import unknown_options
from gateway.dialects.structures import StructureParameters, read_structure
from gateway.dialects.tools import ToolParameters, read_tool_use
from gateway.errors import InvalidParameterError, MissingParameterError, shown


class CompletionRequest(
    AnswerParameters,
    ToolParameters,
    StructureParameters,
    TokenChoiceParameters,
    ChainParameters,
    ChoiceParameters,
    LengthParameters,
    ImageParameters,
    PromptParameters,
):
    """Body of `POST /v1/completions`. Null means absent for every parameter."""

    model: str | None = Field(
        default=None,
        description="Model to use, from `GET /v1/models`. Required in dialects openai, fireworks and "
        "omlx; in others your account's default model is taken.",
    )


def to_generation_request(
    body: CompletionRequest, profile: Profile, *, max_prompts: int
) -> GenerationRequest:
    """Resolve shapes, aliases and defaults. Raises a BadRequestError naming the parameter."""
    ignored = _ignored(body)
    prompts = read_prompts(body, profile, max_prompts=max_prompts)
    images = read_images(body, prompts)
    is_echoed, echo_last = read_echo(body)
    n, best_of, ranking = read_fan_out(body, profile, is_streamed=bool(body.stream))
    _check_fan_out(prompts, best_of, max_prompts=max_prompts)
    max_tokens = read_max_tokens(body, profile, is_echoed=is_echoed)
    logprobs = read_logprobs(body, profile)
    options = read_stream_options(body, profile)
    structure, tool_use = read_structure(body), read_tool_use(body)
    bias = read_logit_bias(body.logit_bias)
    request = GenerationRequest(
        profile=profile,
        model=read_model(body.model, profile),
        prompts=prompts,
        suffix=read_suffix(body, profile, prompts, has_images=any(images)),
        images=images,
        adds_special_tokens=body.add_special_tokens is not False,
        prompt_tokens_kept=read_prompt_tokens_kept(body),
        max_tokens=max_tokens,
        context_length_behavior=read_context_length_behavior(body, profile),
        n=n,
        best_of=best_of,
        ranking=ranking,
        stop=read_stop(body, profile),
        includes_stop=read_includes_stop(body, profile),
        logprobs=logprobs,
        echo=is_echoed,
        echo_last=echo_last,
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        include_obfuscation=bool(options.include_obfuscation),
        structure=structure,
        tool_use=tool_use,
        sampling=_sampling(body, profile, bias, max_tokens=max_tokens),
        bias_texts=bias.texts,
        reads_prefix_cache=body.cache_prompt is not False,
        cache_isolation_key=read_cache_isolation_key(body),
        return_token_ids=bool(body.return_token_ids or body.return_tokens),
        shows_special_tokens=body.skip_special_tokens is False,
        wants_timings=bool(body.perf_metrics_in_response or body.timings_per_token),
        timings_per_token=bool(body.timings_per_token),
        max_predict_ms=max(body.t_max_predict_ms or 0, 0),
        service_tier=read_service_tier(body),
        is_background=bool(body.background),
        ignored_parameters=ignored,
    )
    _check_combinations(request)
    return request


def read_model(value: object, profile: Profile) -> str | None:
    """Return the model that is asked for, None for the default one. Raises a BadRequestError."""
    if value is None:
        if profile.is_model_required:
            raise MissingParameterError("model")
        return None
    if not isinstance(value, str):
        raise InvalidParameterError(
            f"'model' must be a string. Given: {shown(value)}.", param="model"
        )
    return value


def require_model(body: dict[str, Any], profile: Profile) -> str | None:
    """Return the model a body asks for, before anything else of it is looked at.

    None stands for the tenant's default model. Raises a BadRequestError.
    """
    return read_model(body.get("model"), profile)


def _ignored(body: CompletionRequest) -> tuple[str, ...]:
    ignored = read_extra(body.model_extra or {})
    if body.stream_options is not None:
        ignored += nested_extra("stream_options", body.stream_options.model_extra)
    if body.repetition_detection is not None:
        ignored += nested_extra("repetition_detection", body.repetition_detection.model_extra)
    ignored += nested_extra("structured_outputs", unknown_options(body.structured_outputs))
    return tuple(sorted(ignored))


def _sampling(
    body: CompletionRequest, profile: Profile, bias: LogitBias, *, max_tokens: int
) -> SamplingSpec:
    return msgspec.structs.replace(
        read_sampling(body, profile),
        logit_bias=bias.ids,
        ignore_eos=bool(body.ignore_eos),
        min_tokens=read_min_tokens(body, max_tokens=max_tokens),
        stop_token_ids=read_stop_token_ids(body),
        allowed_token_ids=read_allowed_token_ids(body.allowed_token_ids, bias),
        bad_words=read_bad_words(body.bad_words),
        repetition_detection=read_repetition_detection(body),
    )


def _check_fan_out(prompts: list[Prompt], best_of: int, *, max_prompts: int) -> None:
    if len(prompts) * best_of > max_prompts:
        raise InvalidParameterError(
            f"'prompt' must have at most {max_prompts} prompts, times best_of (or n). "
            f"Given: {len(prompts)} prompts, best_of {best_of}.",
            param="prompt",
        )


def _check_combinations(request: GenerationRequest) -> None:
    if request.echo and request.logprobs is not None and any(request.images):
        raise InvalidParameterError(
            "'images' cannot be combined with 'echo' and 'logprobs': images have no log-probabilities.",
            param="images",
        )
    constraint = _constraint(request.structure, request.tool_use)
    if constraint is None:
        return
    ends = "the text ends where its structure is complete."
    for name, is_given, why in (
        ("ignore_eos", request.sampling.ignore_eos, ends),
        ("min_tokens", request.sampling.min_tokens > 0, ends),
        (
            "allowed_token_ids",
            bool(request.sampling.allowed_token_ids),
            "they may leave no token to go on with.",
        ),
    ):
        if is_given:
            raise InvalidParameterError(
                f"'{name}' cannot be combined with '{constraint}': {why}", param=name
            )


def _constraint(structure: Structure | None, tool_use: ToolUse | None) -> str | None:
    """Return the parameter that says what the text must match."""
    is_tool_forced = tool_use is not None and tool_use.is_constraint
    if structure is not None and is_tool_forced:
        raise InvalidParameterError(
            f"'{structure.param}' cannot be combined with tools that constrain the text.",
            param=structure.param,
        )
    if structure is not None:
        return structure.param
    return "tools" if is_tool_forced else None
