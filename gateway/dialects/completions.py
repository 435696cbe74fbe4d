"""Completions: the body of `POST /v1/completions`, and its conversion to a `GenerationRequest`.

The other modules of this package define the parameters by topic. This module combines them and has
the rules that concern more than one topic.
"""

from typing import Any, Final

import msgspec

from gateway.dialects.bodies import SharedParameters, read_shared, shared_extra, with_one_constraint
from gateway.dialects.choices import ChoiceParameters, read_fan_out, read_logprobs
from gateway.dialects.images import ImageParameters, image_params, read_images
from gateway.dialects.lengths import read_max_tokens
from gateway.dialects.parameters import REJECTED, Endpoints, unread
from gateway.dialects.profile import Profile
from gateway.dialects.prompts import PromptParameters, read_echo, read_prompts, read_suffix
from gateway.dialects.request import GenerationRequest
from gateway.dialects.sampling.parameters import new_seed
from gateway.dialects.structured.tools import ToolParameters, read_tool_use
from gateway.dialects.unknown_members import OBJECTS
from gateway.dialects.wire import validate
from gateway.records.errors import invalid

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
    ignored = unread(body.model_extra, REJECTED) + shared_extra(body)
    prompts = read_prompts(body, profile, max_prompts=max_prompts)
    images = read_images(body, prompts)
    is_echoed, echo_last = read_echo(body)
    n, best_of, ranking = read_fan_out(body, profile, is_streamed=bool(body.stream))
    if len(prompts) * best_of > max_prompts:
        raise invalid(
            "prompt",
            f"must have at most {max_prompts} prompts, multiplied by best_of or n. Given: "
            f"{len(prompts)} prompts, best_of {best_of}.",
        )
    max_tokens = read_max_tokens(body, profile, is_echoed=is_echoed)
    most = profile.most_logprobs
    has_objects = profile.has_scored_objects and body.logprobs is True
    by_default = 0 if has_objects else profile.logprobs_true
    tool_use = read_tool_use(body)
    objects = OBJECTS[Endpoints.COMPLETIONS]
    objects["tools[]"].check(body.tools, "tools", ignored)
    objects["tool_choice"].check(body.tool_choice, "tool_choice", ignored)
    request = msgspec.structs.replace(
        read_shared(body, profile, max_tokens=max_tokens),
        prompts=prompts,
        suffix=read_suffix(body, profile, prompts, has_images=any(images)),
        images=images,
        image_params=image_params(images),
        adds_special_tokens=body.add_special_tokens is not False,
        parses_special_tokens=not body.safe_tokenization,
        n=n,
        best_of=best_of,
        ranking=ranking,
        logprobs=read_logprobs(body, by_default=by_default, most=most),
        has_scored_objects=has_objects,
        echo=is_echoed,
        echo_last=echo_last,
        tool_use=tool_use,
        ignored_parameters=tuple(sorted(ignored)),
    )
    request = with_one_constraint(request)
    _check_combinations(request)
    return request


def _check_combinations(request: GenerationRequest) -> None:
    if any(request.images) and not request.parses_special_tokens:
        raise invalid(
            "safe_tokenization", "cannot be combined with 'images', which special tokens stand for."
        )
    if request.scored_alternatives is not None and any(request.images):
        scores = "'echo' and 'logprobs'" if request.echoes_logprobs else "'prompt_logprobs'"
        raise invalid(
            "images", f"cannot be combined with {scores}: images have no log-probabilities."
        )
    structure, tool_use = request.structure, request.tool_use
    if structure is not None and tool_use is not None and tool_use.is_constraint:
        raise invalid(structure.param, "cannot be combined with tools that constrain the text.")
