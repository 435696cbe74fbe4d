"""The OpenAPI schema of a chat's body allows exactly the accepted bodies."""

from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.chat_reading import PNG_URI, USER, image, read_chat, text
from tests.gateway.dialects.reading import OPENAI, VLLM
from tests.support.cases import all_cases

FUNCTION: dict[str, Any] = {"name": "f", "description": None, "parameters": {}, "strict": None}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def said(**message: Any) -> list[dict[str, Any]]:
    """Return a conversation with one message of the assistant."""
    return [USER, {"role": "assistant", "content": "a"} | message]


VALUES: dict[str, list[Any]] = {
    "messages": [
        [USER],
        [],
        [USER] * 2049,
        5,
        [5],
        [{}],
        [{"role": "bot", "content": "a"}],
        [{"role": "b" * 257, "content": "a"}],
        [{"role": "", "content": "a"}],
        [{"role": 5, "content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [
            {
                "role": "user",
                "content": [text(), image(), {"type": "image_url", "image_url": PNG_URI}],
            }
        ],
        [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": [text(5)]}],
        [{"role": "user", "content": [{"type": "input_audio"}]}],
        [{"role": "user", "content": [image(detail=None)]}],
        [{"role": "user", "content": [image(detail="original")]}],
        [{"role": "user", "content": [image(detail="tiny")]}],
        [{"role": "user", "content": [image(5)]}],
        [{"role": "user", "content": "a", "name": ""}],
        [{"role": "user", "content": "a", "name": None}],
        said(tool_calls=[CALL], content=None),
        said(tool_calls=[CALL | {"type": "custom"}]),
        said(tool_calls=[{"id": "a"}]),
        said(tool_calls=[CALL] * 129),
        said(tool_calls=5),
        said(reasoning_content="a", refusal=None, partial=True),
        said(reasoning=5),
        said(partial=1),
        said(refusal=5),
        [{"role": "tool", "content": "a", "tool_call_id": "x"}],
        [{"role": "tool", "content": "a", "tool_call_id": 5}],
    ],
    "tools": [[TOOL], [], [5], [{}], [TOOL | {"type": "custom"}], 5],
    "functions": [[FUNCTION], [], [5], [{}], [{"name": "a b"}], [FUNCTION | {"strict": 5}], 5],
    "function_call": ["none", "auto", "required", 5, {}, {"name": 5}],
    "tool_choice": ["none", "auto", "tool", 5, {}, {"type": "function"}],
    "top_logprobs": [0, -1, 21, 2.5, "5"],
    "logprobs": [True, False, 5, 5.0, 21, -1, "5"],
    "reasoning_effort": [
        "none",
        "max",
        "default",
        "huge",
        True,
        5,
        5.0,
        -1,
        -2,
        2**31,
        2.5,
        [],
        {},
    ],
    "thinking": [
        {},
        {"type": "enabled"},
        {"type": None, "budget_tokens": 5},
        {"type": "on"},
        {"budget_tokens": -2},
        {"budget_tokens": "5"},
        5,
        [],
    ],
    "enable_thinking": [True, 1],
    "reasoning": [
        {},
        {"effort": "low", "enabled": True, "max_tokens": 5, "exclude": None},
        {"effort": "huge"},
        {"enabled": 1},
        {"exclude": "a"},
        {"max_tokens": -2},
        "low",
        [],
    ],
    "thinking_budget": [-1, 0, 5, -2, 2**31, "5", 2.5],
    "chat_template_kwargs": [
        {},
        {"enable_thinking": True, "a": None, "b": "c", "d": 1.5},
        {"a b": 1},
        {"messages": 1},
        {"a": []},
        {"a": "b" * 1025},
        {"a": 1e30},
        {f"a{number}": 1 for number in range(33)},
        5,
        [],
    ],
    "metadata": [
        {},
        {"a": "b"},
        {"a": 5},
        {"a": "b" * 513},
        {"a" * 65: "b"},
        {str(number): "" for number in range(17)},
        5,
    ],
    "max_tokens": [-1, 5, -2, 2**31, "5"],
    "n": [1, 128, 0, 129],
    "include_reasoning": [True, 1],
    "add_generation_prompt": [True, "true"],
    "continue_final_message": [False, 0],
    "safety_identifier": ["a", 5],
    "prompt_cache_key": ["a", 5],
    "parallel_tool_calls": [False, True, 0],
    "stop": ["x", ["x", "y"], 5],
    "response_format": [{"type": "json_object"}, {"type": "xml"}],
}


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    """The schema of the body."""
    schema = ChatCompletionRequest.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@all_cases("name", ChatCompletionRequest.model_fields)
def test_schema_agrees_with_the_accepted_bodies(
    validator: jsonschema.Draft202012Validator, name: str
) -> None:
    absent = [] if name == "messages" else [None]
    for value in VALUES.get(name, []) + absent:
        body = {"model": "m", "messages": [USER], name: value}
        try:
            # Dialect vllm rejects an empty list.
            read_chat(OPENAI if name == "tools" else VLLM, **body)
        except BadRequestError as error:
            # Both outcomes are correct.
            assert not validator.is_valid(body), (str(value)[:60], error.message)  # noqa: PT017
        else:
            validator.validate(body)


def test_every_value_is_one_of_a_parameter() -> None:
    assert VALUES.keys() <= ChatCompletionRequest.model_fields.keys()


@all_cases(
    "given",
    [
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": NAMED},
        {"tools": [TOOL], "tool_choice": "any"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [NAMED]},
            },
        },
        {"functions": [FUNCTION], "function_call": {"name": "f"}},
        {"logprobs": True, "top_logprobs": 5},
    ],
)
def test_documentation_allows_parameters_that_need_others(
    validator: jsonschema.Draft202012Validator, given: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": [USER]} | given
    assert read_chat(VLLM, **body)
    validator.validate(body)


def test_documented_defaults_are_the_applied_ones() -> None:
    for name, field in ChatCompletionRequest.model_fields.items():
        assert field.default is None, name
        assert field.description, name
