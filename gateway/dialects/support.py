"""Supported features of a model: reported on `/v1/models` and enforced for requests."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from contract.messages import Feature
from contract.sampling import DEFAULT_SAMPLERS, SamplerChain
from gateway.dialects.chat.request import ChatCompletionRequest, tool_choice_param, tools_param
from gateway.dialects.chat.tools import ChatToolParameters
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.images import ImageParameters
from gateway.dialects.profile import Profile
from gateway.dialects.request import GenerationRequest, ToolMode
from gateway.dialects.sampling.chain_parameters import ChainParameters
from gateway.dialects.sampling.parameters import SamplingParameters
from gateway.dialects.structured.structures import StructureParameters
from gateway.dialects.structured.tools import ToolParameters
from gateway.errors import (
    MAX_SHOWN_CHARACTERS,
    InvalidParameterError,
    UnknownParameterError,
    UnsupportedParameterError,
)


class Need(StrEnum):
    """What a parameter requires of a model; the values appear in error messages."""

    SAMPLER_CHAIN = "an engine with the sampler chain"
    STRUCTURE = "an engine with structured output"
    IMAGES = "a model with image input"
    INFILL = "a model with infill tokens"
    TOOLS = "a model with a tool call format"
    CHAT = "a model with a chat template"
    CALLS = "a model with a tool call parser"
    STRICT_CALLS = "a model whose tool call format can be enforced"
    REASONING = "a model with a reasoning parser"
    THINKING_BUDGET = "an engine with reasoning budgets"


_SHARED_NEEDS: Mapping[str, Need] = {
    **dict.fromkeys(
        ChainParameters.model_fields.keys() - SamplingParameters.model_fields.keys(),
        Need.SAMPLER_CHAIN,
    ),
    **dict.fromkeys(StructureParameters.model_fields, Need.STRUCTURE),
}

NEEDS: Mapping[str, Need] = {
    **_SHARED_NEEDS,
    **dict.fromkeys(ImageParameters.model_fields, Need.IMAGES),
    **dict.fromkeys(ToolParameters.model_fields, Need.TOOLS),
    "suffix": Need.INFILL,
}
"""Parameters of completions that not every model supports."""

CHAT_NEEDS: Mapping[str, Need] = {
    **_SHARED_NEEDS,
    **dict.fromkeys(ChatToolParameters.model_fields, Need.CALLS),
    "include_reasoning": Need.REASONING,
    "thinking_budget": Need.THINKING_BUDGET,
    "thinking_token_budget": Need.THINKING_BUDGET,
    "reasoning_budget_tokens": Need.THINKING_BUDGET,
}
"""Parameters of chats that not every model with a chat template supports."""

_FEATURES = {
    Feature.SAMPLER_CHAIN: Need.SAMPLER_CHAIN,
    Feature.STRUCTURE: Need.STRUCTURE,
    Feature.IMAGES: Need.IMAGES,
    Feature.CHAT: Need.CHAT,
    Feature.TOOLS: Need.CALLS,
    Feature.STRICT_TOOLS: Need.STRICT_CALLS,
    Feature.REASONING: Need.REASONING,
    Feature.THINKING_BUDGET: Need.THINKING_BUDGET,
}


def supported_parameters(
    features: Iterable[Feature], *, has_infill: bool, has_tools: bool
) -> list[str]:
    """Return the completion parameters that a model supports, in alphabetical order."""
    met = _met(features, has_infill=has_infill, has_tools=has_tools)
    return sorted(
        name for name in CompletionRequest.model_fields if NEEDS.get(name) in (None, *met)
    )


def supported_chat_parameters(features: Iterable[Feature]) -> list[str]:
    """Return the chat parameters that a model supports; empty if it has no chat template."""
    met = _met(features)
    if Need.CHAT not in met:
        return []
    return sorted(
        name for name in ChatCompletionRequest.model_fields if CHAT_NEEDS.get(name) in (None, *met)
    )


def check_supported(
    request: GenerationRequest,
    features: Iterable[Feature],
    *,
    has_infill: bool = False,
    has_tools: bool = False,
    max_images: int | None = None,
) -> GenerationRequest:
    """Return the request in a form that the model can serve.

    Raises a BadRequestError if the model cannot serve it.

    The result drops at most two things. One is a convention of the dialect: if an engine has no
    sampler chain, plain sampling follows the engine's own order. The other is a reasoning budget
    where no engine can enforce it; the budget then becomes one of the ignored parameters.
    `has_infill` and `has_tools` concern completions only. `max_images` limits the images of one
    prompt.
    """
    asked, sampling = _asked(request), request.sampling
    # Most completions need no feature.
    if not asked and sampling.chain is None and sampling.thinking_budget is None:
        return request
    met = _met(features, has_infill=has_infill, has_tools=has_tools)
    for param, need in asked:
        if need not in met:
            raise UnsupportedParameterError(
                f"'{param}' is not supported by this model. It requires {need}.", param=param
            )
    _check_images(request, max_images)
    if request.sampling.chain is not None and Need.SAMPLER_CHAIN not in met:
        sampling = msgspec.structs.replace(request.sampling, chain=None)
        request = msgspec.structs.replace(request, sampling=sampling)
    if request.sampling.thinking_budget is not None and Need.THINKING_BUDGET not in met:
        request = _without_thinking_budget(request)
    return request


def reject_ignored(names: Sequence[str]) -> None:
    """Raise UnknownParameterError if `names`, the parameters without effect, is not empty."""
    if names:
        first = names[0][:MAX_SHOWN_CHARACTERS]
        raise UnknownParameterError(
            f"'{first}' is unknown or has no effect; this account rejects such parameters.",
            param=first,
        )


def _met(
    features: Iterable[Feature],
    *,
    has_infill: bool = False,
    has_tools: bool = False,
) -> set[Need]:
    met = {_FEATURES[feature] for feature in features}
    if has_infill:
        met.add(Need.INFILL)
    if has_tools:
        met.add(Need.TOOLS)
    return met


def _without_thinking_budget(request: GenerationRequest) -> GenerationRequest:
    param = request.chat.thinking_budget_param if request.chat else ""
    return msgspec.structs.replace(
        request,
        sampling=msgspec.structs.replace(request.sampling, thinking_budget=None),
        ignored_parameters=tuple(sorted({*request.ignored_parameters, param})),
    )


def _asked(request: GenerationRequest) -> list[tuple[str, Need]]:
    asked: list[tuple[str, Need]] = []
    if request.structure is not None:
        asked.append((request.structure.param, Need.STRUCTURE))
    asked += _asked_of_completions(request) if request.chat is None else _asked_of_chats(request)
    if request.sampling.chain is not None:
        asked += [
            (param, Need.SAMPLER_CHAIN)
            for param in _chain_parameters(request.sampling.chain, request.profile)
        ]
    return asked


def _asked_of_completions(request: GenerationRequest) -> Iterable[tuple[str, Need]]:
    if request.tool_use is not None:
        yield "tools", Need.TOOLS
        if request.tool_use.is_constraint:
            yield "tools", Need.STRUCTURE
    if any(request.images):
        yield "images", Need.IMAGES
    if request.infill_param:
        yield request.infill_param, Need.INFILL


def _asked_of_chats(request: GenerationRequest) -> Iterable[tuple[str, Need]]:
    yield "messages", Need.CHAT
    if _image_count(request):
        yield "messages", Need.IMAGES
    if request.tool_use is not None:
        yield tools_param(request), Need.CALLS
        if request.tool_use.mode is not ToolMode.AUTO:
            yield tool_choice_param(request), Need.STRUCTURE
        elif any(tool.is_strict for tool in request.tool_use.tools) and not request.structure:
            yield tools_param(request), Need.STRICT_CALLS


def _chain_parameters(chain: SamplerChain, profile: Profile) -> list[str]:
    """Return the parameters that requested the chain; empty if only the dialect requires it."""
    asked = {
        "mirostat": chain.mirostat is not None,
        "post_sampling_probs": chain.reports_probabilities,
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
    given = _image_count(request)
    if most is not None and given > most:
        param = "images" if request.chat is None else "messages"
        raise InvalidParameterError(
            f"'{param}' must have at most {most} images per prompt of this model. Given: {given}.",
            param=param,
        )


def _image_count(request: GenerationRequest) -> int:
    """Return the highest image count of any prompt; for a chat, images to be fetched count too."""
    unfetched = len(request.chat.image_sources) if request.chat else 0
    return max([unfetched, *map(len, request.images)])
