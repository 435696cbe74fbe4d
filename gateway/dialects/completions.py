"""Completions: the body of `POST /v1/completions`, and its conversion to a `GenerationRequest`.

The other modules of this package define the parameters by topic. This module combines them and has
the rules that concern more than one topic.
"""

from typing import Any, Final

import msgspec

from gateway.dialects.bodies import (
    SharedParameters,
    check_end_is_free,
    read_model,
    read_whole_sampling,
    shared_extra,
)
from gateway.dialects.choices import (
    ChoiceParameters,
    read_fan_out,
    read_logprobs,
    read_prompt_logprobs,
)
from gateway.dialects.images import ImageParameters, image_params, read_images
from gateway.dialects.lengths import (
    read_context_length_behavior,
    read_includes_stop,
    read_max_tokens,
    read_stop,
)
from gateway.dialects.parameters import REJECTED, unread
from gateway.dialects.profile import Profile
from gateway.dialects.prompts import (
    PromptParameters,
    keeps_prompt_start,
    read_echo,
    read_prompt_tokens_kept,
    read_prompts,
    read_suffix,
    unused_truncation,
)
from gateway.dialects.request import GenerationRequest, Prompt
from gateway.dialects.sampling.logit_bias import read_logit_bias
from gateway.dialects.sampling.parameters import new_seed
from gateway.dialects.stream_options import (
    read_cache_isolation_key,
    read_service_tier,
    read_stream_options,
)
from gateway.dialects.structured.structures import read_structure
from gateway.dialects.structured.tools import ToolParameters, read_tool_use
from gateway.dialects.wire import validate
from gateway.errors import InvalidParameterError

MOST_READ: Final = 1_000
"""Combinations of parameters whose requests are kept."""
LONGEST_READ: Final = 1_024
"""Bytes of such a combination, encoded as msgpack."""

_read: Final[dict[bytes, GenerationRequest]] = {}
"""Valid requests without their prompt, by their other parameters."""
_pack: Final = msgspec.msgpack.Encoder().encode


class CompletionRequest(
    SharedParameters,
    ToolParameters,
    ChoiceParameters,
    ImageParameters,
    PromptParameters,
):
    """Body of `POST /v1/completions`. Null means absent for every parameter."""


def read_completion(
    body: dict[str, Any], profile: Profile, *, max_prompts: int
) -> GenerationRequest:
    """Return the request of a body. Raises a BadRequestError.

    Most clients send the same parameters with each prompt. Such parameters are read once: a copy
    of an earlier request gets the new prompt.
    """
    prompt = body.get("prompt")
    packed = _packed(body, profile, max_prompts) if isinstance(prompt, str) else b""
    known = _read.get(packed)
    if known is None:
        wire = validate(CompletionRequest, body)
        request = to_generation_request(wire, profile, max_prompts=max_prompts)
        if packed:
            if len(_read) >= MOST_READ:
                _read.clear()
            _read[packed] = msgspec.structs.replace(request, prompts=[""])
        return request
    sampling = known.sampling
    if not sampling.is_seed_requested:
        sampling = msgspec.structs.replace(sampling, seed=new_seed())
    return msgspec.structs.replace(known, prompts=[prompt], sampling=sampling)


def _packed(body: dict[str, Any], profile: Profile, max_prompts: int) -> bytes:
    """Return what the request depends on besides its prompt; empty if it cannot be kept."""
    if "images" in body:
        return b""
    try:
        packed = _pack((profile.name, max_prompts, {**body, "prompt": None}))
    except (OverflowError, UnicodeEncodeError):
        # Integers beyond 64 bits and lone surrogates have no msgpack.
        return b""
    return packed if len(packed) <= LONGEST_READ else b""


def to_generation_request(
    body: CompletionRequest, profile: Profile, *, max_prompts: int
) -> GenerationRequest:
    """Resolve shapes, aliases and defaults. Raises a BadRequestError that names the parameter."""
    ignored = _ignored(body)
    prompts = read_prompts(body, profile, max_prompts=max_prompts)
    images = read_images(body, prompts)
    is_echoed, echo_last = read_echo(body)
    n, best_of, ranking = read_fan_out(body, profile, is_streamed=bool(body.stream))
    _check_fan_out(prompts, best_of, max_prompts=max_prompts)
    max_tokens = read_max_tokens(body, profile, is_echoed=is_echoed)
    most = profile.most_logprobs
    logprobs = read_logprobs(body, by_default=profile.logprobs_true, most=most)
    options = read_stream_options(body, profile)
    structure, tool_use = read_structure(body), read_tool_use(body)
    bias = read_logit_bias(body.logit_bias)
    request = GenerationRequest(
        profile=profile,
        model=read_model(body.model, profile),
        prompts=prompts,
        suffix=read_suffix(body, profile, prompts, has_images=any(images)),
        images=images,
        image_params=image_params(images),
        adds_special_tokens=body.add_special_tokens is not False,
        parses_special_tokens=not body.safe_tokenization,
        prompt_tokens_kept=read_prompt_tokens_kept(body),
        keeps_prompt_start=keeps_prompt_start(body),
        max_tokens=max_tokens,
        context_length_behavior=read_context_length_behavior(body, profile),
        n=n,
        best_of=best_of,
        ranking=ranking,
        stop=read_stop(body, profile),
        includes_stop=read_includes_stop(body, profile),
        logprobs=logprobs,
        prompt_logprobs=read_prompt_logprobs(body, is_streamed=bool(body.stream)),
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        echo=is_echoed,
        echo_last=echo_last,
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        hides_usage=options.include_usage is False,
        continuous_usage=bool(options.continuous_usage_stats),
        include_obfuscation=bool(options.include_obfuscation),
        structure=structure,
        tool_use=tool_use,
        sampling=read_whole_sampling(body, profile, bias, max_tokens=max_tokens),
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
        ignored_parameters=ignored,
    )
    _check_combinations(request)
    return request


def _ignored(body: CompletionRequest) -> tuple[str, ...]:
    ignored = unread(body.model_extra, REJECTED) + shared_extra(body)
    return tuple(sorted(ignored + unused_truncation(body)))


def _check_fan_out(prompts: list[Prompt], best_of: int, *, max_prompts: int) -> None:
    if len(prompts) * best_of > max_prompts:
        raise InvalidParameterError(
            f"'prompt' must have at most {max_prompts} prompts, multiplied by best_of or n. "
            f"Given: {len(prompts)} prompts, best_of {best_of}.",
            param="prompt",
        )


def _check_combinations(request: GenerationRequest) -> None:
    if any(request.images) and not request.parses_special_tokens:
        raise InvalidParameterError(
            "'safe_tokenization' cannot be combined with 'images', which special tokens stand for.",
            param="safe_tokenization",
        )
    if request.scored_alternatives is not None and any(request.images):
        scores = "'echo' and 'logprobs'" if request.echoes_logprobs else "'prompt_logprobs'"
        raise InvalidParameterError(
            f"'images' cannot be combined with {scores}: images have no log-probabilities.",
            param="images",
        )
    structure, tool_use = request.structure, request.tool_use
    if structure is not None and tool_use is not None and tool_use.is_constraint:
        raise InvalidParameterError(
            f"'{structure.param}' cannot be combined with tools that constrain the text.",
            param=structure.param,
        )
    check_end_is_free(request)
