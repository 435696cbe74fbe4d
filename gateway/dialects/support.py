"""What a model can do of all that may be asked: told on `/v1/models`, and enforced."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

import msgspec

from contract.messages import Feature
from contract.sampling import DEFAULT_SAMPLERS, SamplerChain
from gateway.dialects.chain_parameters import ChainParameters
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.images import ImageParameters
from gateway.dialects.profile import Profile
from gateway.dialects.request import GenerationRequest
from gateway.dialects.sampling import SamplingParameters
from gateway.dialects.structures import StructureParameters
from gateway.dialects.tools import ToolParameters
from gateway.errors import (
    MAX_SHOWN_CHARACTERS,
    InvalidParameterError,
    UnknownParameterError,
    UnsupportedParameterError,
)


class Need(StrEnum):
    """What a parameter needs, in the words of an error."""

    SAMPLER_CHAIN = "an engine with the sampler chain"
    STRUCTURE = "an engine with structured output"
    IMAGES = "a model that sees images"
    INFILL = "a model with tokens for infill"
    TOOLS = "a model with a format for tool calls"


NEEDS: Mapping[str, Need] = {
    **dict.fromkeys(
        ChainParameters.model_fields.keys() - SamplingParameters.model_fields.keys(),
        Need.SAMPLER_CHAIN,
    ),
    **dict.fromkeys(StructureParameters.model_fields, Need.STRUCTURE),
    **dict.fromkeys(ImageParameters.model_fields, Need.IMAGES),
    **dict.fromkeys(ToolParameters.model_fields, Need.TOOLS),
    "suffix": Need.INFILL,
}
"""Parameters that not every model serves."""

_FEATURES = {
    Feature.SAMPLER_CHAIN: Need.SAMPLER_CHAIN,
    Feature.STRUCTURE: Need.STRUCTURE,
    Feature.IMAGES: Need.IMAGES,
}


def supported_parameters(
    features: Iterable[Feature], *, has_infill: bool, has_tools: bool
) -> list[str]:
    """Return the parameters that a model serves, in the order of the alphabet."""
    met = _met(features, has_infill=has_infill, has_tools=has_tools)
    return sorted(
        name for name in CompletionRequest.model_fields if NEEDS.get(name) in (None, *met)
    )


def check_supported(
    request: GenerationRequest,
    features: Iterable[Feature],
    *,
    has_infill: bool,
    has_tools: bool,
    max_images: int | None = None,
) -> GenerationRequest:
    """Return the request as the model can serve it. Raise a BadRequestError if it cannot.

    Only a convention of the dialect is given up: where an engine has no sampler chain, plain sampling
    follows the engine's own order. `max_images` bounds the images of one prompt.
    """
    met = _met(features, has_infill=has_infill, has_tools=has_tools)
    for param, need in _asked(request):
        if need not in met:
            raise UnsupportedParameterError(
                f"'{param}' is not supported by this model: it needs {need}.", param=param
            )
    _check_images(request, max_images)
    if request.sampling.chain is None or Need.SAMPLER_CHAIN in met:
        return request
    return replace(request, sampling=msgspec.structs.replace(request.sampling, chain=None))


def refuse_ignored(names: Sequence[str]) -> None:
    """Raise UnknownParameterError if parameters of these names would have no effect."""
    if names:
        first = names[0][:MAX_SHOWN_CHARACTERS]
        raise UnknownParameterError(
            f"'{first}' is unknown or has no effect here, and none may be ignored.", param=first
        )


def _met(features: Iterable[Feature], *, has_infill: bool, has_tools: bool) -> set[Need]:
    met = {_FEATURES[feature] for feature in features}
    if has_infill:
        met.add(Need.INFILL)
    if has_tools:
        met.add(Need.TOOLS)
    return met


def _asked(request: GenerationRequest) -> list[tuple[str, Need]]:
    asked: list[tuple[str, Need]] = []
    if request.structure is not None:
        asked.append((request.structure.param, Need.STRUCTURE))
    if request.tool_use is not None:
        asked.append(("tools", Need.TOOLS))
        if request.tool_use.is_constraint:
            asked.append(("tools", Need.STRUCTURE))
    if any(request.images):
        asked.append(("images", Need.IMAGES))
    if request.suffix and not request.profile.is_suffix_literal:
        asked.append(("suffix", Need.INFILL))
    if request.sampling.chain is not None:
        asked += [
            (param, Need.SAMPLER_CHAIN)
            for param in _chain_parameters(request.sampling.chain, request.profile)
        ]
    return asked


def _chain_parameters(chain: SamplerChain, profile: Profile) -> list[str]:
    """Return the parameters that asked for the chain, none if only the dialect's conventions did."""
    asked = {
        "mirostat": chain.mirostat is not None,
        "xtc_probability": chain.xtc is not None,
        "dry_multiplier": chain.dry is not None,
        "typical_p": chain.typical_p < 1.0,
        "top_n_sigma": chain.top_n_sigma > 0.0,
        "dynatemp_range": chain.dynatemp_range > 0.0,
        "min_keep": chain.min_keep > 1,
        "samplers": chain.mirostat is None and tuple(chain.order) != DEFAULT_SAMPLERS,
        "repeat_last_n": (
            chain.mirostat is None and chain.penalty_last_n != profile.penalty_last_n
        ),
    }
    return [param for param, is_asked in asked.items() if is_asked]


def _check_images(request: GenerationRequest, most: int | None) -> None:
    given = max(map(len, request.images), default=0)
    if most is not None and given > most:
        raise InvalidParameterError(
            f"'images' must have at most {most} images for a prompt of this model. Given: {given}.",
            param="images",
        )
