"""Which parameters of a completion a model supports."""

from typing import Any

import pytest

from contract.messages import Feature
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.chat.tools import ChatToolParameters
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.parameters import NEEDS, Need, check_supported, supported_parameters
from gateway.dialects.profile import Profile
from gateway.dialects.request import GenerationRequest
from gateway.dialects.sampling.parameters import ChainParameters, SamplingParameters
from gateway.dialects.structured.structures import StructureParameters
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.reading import LLAMACPP, MISTRALRS, OPENAI, read
from tests.support.cases import all_cases

ALL: dict[str, Any] = {"features": list(Feature), "has_infill": True, "has_tools": True}
NONE: dict[str, Any] = {"features": [], "has_infill": False, "has_tools": False}
PNG = "data:image/png;base64,iVBORw0KGgo="
TOOLS = [{"type": "function", "function": {"name": "f"}}]

CHAIN: dict[str, dict[str, Any]] = {
    "mirostat": {"mirostat": 2},
    "xtc_probability": {"xtc_probability": 0.5},
    "dry_multiplier": {"dry_multiplier": 1},
    "typical_p": {"typical_p": 0.5},
    "top_n_sigma": {"top_n_sigma": 1},
    "dynatemp_range": {"dynatemp_range": 0.5},
    "min_keep": {"min_keep": 2, "top_k": 5},
    "samplers": {"samplers": ["top_k"]},
    "repeat_last_n": {"repeat_last_n": 5, "repeat_penalty": 1.2},
}
STRUCTURES: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": "root ::= x"},
    "json_schema": {"json_schema": {}},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs.regex": {"structured_outputs": {"regex": "a"}},
}
LACKS = [
    *((name, given, Feature.SAMPLER_CHAIN) for name, given in CHAIN.items()),
    *((name, given, Feature.STRUCTURE) for name, given in STRUCTURES.items()),
    ("images", {"prompt": "<image>", "images": [PNG]}, Feature.IMAGES),
    ("suffix", {"suffix": "end"}, "has_infill"),
    ("tools", {"tools": TOOLS}, "has_tools"),
    ("tools", {"tools": TOOLS, "tool_choice": "required"}, Feature.STRUCTURE),
]


def without(lack: str) -> dict[str, Any]:
    """Return the features of a model that lacks one."""
    if lack in ALL:
        return ALL | {lack: False}
    return ALL | {"features": [feature for feature in Feature if feature != lack]}


def served(request: GenerationRequest, abilities: dict[str, Any]) -> GenerationRequest:
    """Check a request against the features of a model."""
    features = abilities["features"]
    return check_supported(
        request,
        features,
        has_infill=abilities["has_infill"],
        has_tools=abilities["has_tools"],
    )


def parameters_of(abilities: dict[str, Any]) -> list[str]:
    """Return the parameters that a model with these features serves."""
    return supported_parameters(
        CompletionRequest.model_fields,
        abilities["features"],
        has_infill=abilities["has_infill"],
        has_tools=abilities["has_tools"],
    )


@all_cases(("param", "given", "lack"), LACKS)
def test_unsupported_parameter_is_refused_naming_the_missing_feature(
    param: str, given: dict[str, Any], lack: str
) -> None:
    request = read(**given)
    assert served(request, ALL) is request
    with pytest.raises(BadRequestError) as caught:
        served(request, without(lack))
    assert caught.value.message.startswith(
        f"'{param}' is not supported by this model. It requires a"
    )
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
    name = param.partition(".")[0]
    assert name in parameters_of(ALL)
    if given.get("tool_choice") is None:
        assert name not in parameters_of(without(lack))


@all_cases(
    "given",
    [
        {},
        {"tools": TOOLS, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"images": []},
        {"suffix": ""},
        {"mirostat": 0, "xtc_probability": 0, "dry_multiplier": 0, "repeat_last_n": 64},
        {"presence_penalty": 1, "temperature": 0.5, "logit_bias": {"5": 1}},
    ],
)
def test_parameters_without_required_features_are_served_by_every_model(
    given: dict[str, Any],
) -> None:
    request = read(**given)
    assert served(request, NONE) is request


def test_literal_suffix_needs_no_infill() -> None:
    request = read(MISTRALRS, suffix="end")
    assert served(request, NONE) is request


def test_dialect_default_is_dropped_if_the_engine_has_no_sampler_chain() -> None:
    request = read(LLAMACPP)
    assert request.sampling.chain is not None
    plain = served(request, NONE)
    assert plain.sampling.chain is None
    assert (plain.sampling.top_k, plain.sampling.temperature) == (40, 0.8)
    assert served(request, ALL) is request


@all_cases("name", [name for name in CHAIN if name != "mirostat"])
def test_chain_that_a_client_of_llamacpp_asks_for_is_refused_without_it(name: str) -> None:
    with pytest.raises(BadRequestError, match=f"'{name}' is not supported by this model"):
        served(read(LLAMACPP, **CHAIN[name]), NONE)


@all_cases("profile", [OPENAI, LLAMACPP])
def test_mirostat_without_a_chain_is_refused_in_every_dialect(profile: Profile) -> None:
    with pytest.raises(BadRequestError, match="'mirostat' is not supported by this model"):
        served(read(profile, mirostat_target=2), NONE)


def test_more_images_than_the_model_accepts_are_refused() -> None:
    request = read(prompt="<image>" * 3, images=[PNG] * 3)
    features = list(Feature)
    assert check_supported(request, features, has_infill=True, has_tools=True, max_images=3)
    with pytest.raises(BadRequestError) as caught:
        check_supported(request, features, has_infill=True, has_tools=True, max_images=2)
    assert caught.value.message == (
        "'images' must have at most 2 images per prompt of this model. Given: 3."
    )


def test_model_with_every_ability_serves_every_parameter() -> None:
    assert parameters_of(ALL) == sorted(CompletionRequest.model_fields)


def test_model_without_abilities_serves_the_rest() -> None:
    expected = set(CompletionRequest.model_fields) - NEEDS.keys()
    assert parameters_of(NONE) == sorted(expected)
    assert {"prompt", "temperature", "best_of", "repeat_penalty"} <= expected
    assert not {"mirostat_lr", "grammar", "images", "suffix", "tools", "samplers"} & expected


def test_every_required_feature_belongs_to_parameters_of_its_topic() -> None:
    fields = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    assert NEEDS.keys() <= fields
    chain = ChainParameters.model_fields.keys() - SamplingParameters.model_fields.keys()
    for need, names in (
        (Need.SAMPLER_CHAIN, chain),
        (Need.STRUCTURE, StructureParameters.model_fields.keys()),
        (Need.CALLS, ChatToolParameters.model_fields.keys()),
    ):
        assert {name for name in NEEDS if NEEDS[name] is need} == names
