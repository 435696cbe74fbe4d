"""Which parameters of a chat a model supports."""

from dataclasses import replace
from typing import Any

import pytest

from contract.messages import Feature
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.parameters import NEEDS, check_supported, supported_chat_parameters
from gateway.dialects.request import SWITCHES, GenerationRequest
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.chat_reading import image, read_chat
from tests.gateway.dialects.reading import LLAMACPP
from tests.support.cases import all_cases

TOOLS = [{"type": "function", "function": {"name": "f"}}]
STRICT = [{"type": "function", "function": {"name": "f", "strict": True}}]
IMAGE = [{"role": "user", "content": [image(), image("https://example.com/a.png")]}]

LACKS: list[tuple[str, dict[str, Any], Feature]] = [
    ("messages", {}, Feature.CHAT),
    ("messages", {"messages": IMAGE}, Feature.IMAGES),
    ("tools", {"tools": TOOLS}, Feature.TOOLS),
    ("functions", {"functions": [{"name": "f"}]}, Feature.TOOLS),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "required"}, Feature.STRUCTURE),
    (
        "function_call",
        {"functions": [{"name": "f"}], "function_call": {"name": "f"}},
        Feature.STRUCTURE,
    ),
    ("response_format", {"response_format": {"type": "json_object"}}, Feature.STRUCTURE),
    ("mirostat", {"mirostat": 2}, Feature.SAMPLER_CHAIN),
]
"""Parameter, request, and the feature without which it is refused."""


def served(request: GenerationRequest, lack: Feature | None = None) -> GenerationRequest:
    """Check a request against a model that may lack one feature."""
    return check_supported(request, [feature for feature in Feature if feature is not lack])


@all_cases(("param", "given", "lack"), LACKS)
def test_unsupported_parameter_is_refused_naming_the_missing_feature(
    param: str, given: dict[str, Any], lack: Feature
) -> None:
    request = read_chat(**given)
    assert served(request) is request
    with pytest.raises(BadRequestError) as caught:
        served(request, lack)
    assert caught.value.message.startswith(
        f"'{param}' is not supported by this model. It requires a"
    )
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


@all_cases(
    "given",
    [
        {},
        {"tools": TOOLS, "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"reasoning_effort": "high", "include_reasoning": False},
        {"response_format": {"type": "text"}},
    ],
)
def test_parameters_that_every_chat_model_supports_are_served(given: dict[str, Any]) -> None:
    request = read_chat(**given)
    assert check_supported(request, [Feature.CHAT]) is request


@all_cases(
    ("given", "param"),
    [
        ({"thinking_budget": 0}, "thinking_budget"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"thinking": {"budget_tokens": 5}}, "thinking.budget_tokens"),
    ],
)
def test_thinking_budget_is_enforced_refused_or_without_effect(
    given: dict[str, Any], param: str
) -> None:
    request = read_chat(**given, zeta=1)
    switches = dict.fromkeys(SWITCHES, True) if request.sampling.thinking_budget else {}
    for argument in ({}, {"enable_thinking": False}):
        limited = read_chat(**given, chat_template_kwargs=argument)
        assert limited.chat
        # A bound turns reasoning on, unless another parameter turns it off.
        known = served(limited)
        assert known.chat == replace(limited.chat, template_arguments=argument or switches)
        assert known.sampling == limited.sampling
    with pytest.raises(BadRequestError, match=f"'{param}' is not supported by this model"):
        served(request, Feature.THINKING_BUDGET)
    plain = check_supported(request, [Feature.CHAT])
    assert (plain.sampling.thinking_budget, plain.chat) == (None, request.chat)
    assert set(plain.ignored_parameters) == {param, "zeta"}


def test_dialect_default_is_dropped_if_the_engine_has_no_sampler_chain() -> None:
    plain = served(read_chat(LLAMACPP), Feature.SAMPLER_CHAIN)
    assert plain.sampling.chain is None


def test_more_images_than_the_model_accepts_are_refused() -> None:
    request = read_chat(messages=IMAGE)
    assert check_supported(request, list(Feature), max_images=2)
    with pytest.raises(BadRequestError) as caught:
        check_supported(request, list(Feature), max_images=1)
    assert caught.value.message == (
        "'messages' must have at most 1 images per prompt of this model. Given: 2."
    )


@all_cases(
    "given",
    [
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"tools": STRICT},
        {"tools": STRICT, "tool_choice": "required"},
        {"tools": STRICT, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": STRICT, "response_format": {"type": "json_object"}},
        {"functions": [{"name": "f"}]},
        {"functions": [{"name": "f"}], "function_call": {"name": "f"}},
    ],
)
def test_no_request_requires_an_enforceable_call_format(
    given: dict[str, Any],
) -> None:
    request = read_chat(**given)
    assert served(request, Feature.STRICT_TOOLS) is request


def test_model_with_every_ability_serves_every_parameter() -> None:
    names = supported_chat_parameters(ChatCompletionRequest.model_fields, list(Feature))
    assert names == sorted(ChatCompletionRequest.model_fields)


def test_chat_model_without_features_serves_the_rest() -> None:
    names = set(supported_chat_parameters(ChatCompletionRequest.model_fields, [Feature.CHAT]))
    assert names == ChatCompletionRequest.model_fields.keys() - NEEDS.keys()
    assert {"messages", "reasoning_effort", "top_logprobs", "temperature"} <= names
    lacking = {"tools", "functions", "thinking_budget", "include_reasoning", "response_format"}
    assert not lacking & names


def test_model_without_a_template_serves_no_chat() -> None:
    others = [feature for feature in Feature if feature is not Feature.CHAT]
    assert supported_chat_parameters(ChatCompletionRequest.model_fields, others) == []
