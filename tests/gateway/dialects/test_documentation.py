"""The OpenAPI schemas of bodies allow exactly the accepted bodies."""

from functools import cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from pydantic import BaseModel

from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.chat_reading import PNG_URI, USER, image, read_chat, text
from tests.gateway.dialects.reading import OPENAI, VLLM, read
from tests.support.cases import all_cases

FUNCTION: dict[str, Any] = {"name": "f", "description": None, "parameters": {}, "strict": None}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def said(**message: Any) -> list[dict[str, Any]]:
    """Return a conversation with one message of the assistant."""
    return [USER, {"role": "assistant", "content": "a"} | message]


COMPLETION_VALUES: dict[str, list[Any]] = {
    "prompt": [
        "a",
        ["a", "b"],
        [5, 6],
        [[5], [6]],
        [5, "a"],
        ["a", 5],
        {},
        5,
        True,
        [[True]],
        {"prompt_string": "a"},
        ["a", {"prompt_string": "b"}],
        {"prompt_string": 5},
    ],
    "stop": ["x", ["x", "y"], ["a"] * 64, ["a"] * 65, "", [""], "x" * 513, 5, [5]],
    "logit_bias": [
        {"5": 1},
        {"5": False},
        {"5": True},
        {"5": "1"},
        {"a": 200},
        [[5, 1], ["a", False]],
        [[5]],
        [[5, 1, 1]],
        [5],
        [[-1, 1]],
        [[5, True]],
        5,
        {str(token): 1 for token in range(1025)},
    ],
    "logprobs": [0, 20, 21, -1, True, False, "5", 2.0, 2.5],
    "allowed_token_ids": [[1], [1.0], [-1], ["1"], 5, [1] * 1025],
    "stop_token_ids": [[], [1], [-1], [True], 5, [1] * 129],
    "bad_words": [[], ["a"], [""], ["a" * 129], [5], "a"],
    "dry_sequence_breakers": [[], ["a"], [""], ["a" * 41], [5], "a", ["a"] * 17],
    "samplers": [[], ["top_k"], "kp", 5, [5], {}],
    "grammar": [
        "root ::= x",
        {"type": "regex", "value": "a"},
        {"type": "gbnf", "value": "a"},
        {"value": "a"},
        5,
        [],
    ],
    "grammar_syntax": ["gbnf", "lark", "ebnf", 5],
    "json_schema": [{}, {"type": "object"}, True, "x", ' {"type": "object"}', 5, []],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_object", "schema": {}},
        {"type": "json_object", "schema": 5},
        {"type": "json_object", "value": 5},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": 5},
        {"type": "json_schema", "json_schema": {"type": "object"}},
        {"type": "json_schema", "value": True},
        {"type": "xml"},
        5,
        [],
    ],
    "structured_outputs": [
        {"regex": "a"},
        {"json": {}},
        {"json": 5},
        {"choice": ["a"]},
        {"choice": [5]},
        {"choice": []},
        {"json_object": 1},
        {"regex": "a", "choice": ["a"]},
        {"regex": ""},
        {},
        5,
    ],
    "tools": [[TOOL], [], [5], [{}], [{"type": "function", "function": {}}], 5],
    "tool_choice": ["none", "auto", "tool", 5, {}, {"type": "function"}],
    "images": [[], 5, "x", [5], ["http://localhost/"], [["x"]]],
    "stream_options": [{}, {"include_usage": None}, {"continuous_usage_stats": 1}, 5, []],
    "repetition_detection": [{}, {"max_pattern_size": 129}, {"min_count": "a"}, 5],
    "context_length_exceeded_behavior": ["truncate", "error", "trim", 5],
    "truncation_side": ["left", "right", "middle", 5],
    "model": ["m", 5, ["m"]],
    "top_k": [-1, 0, 5.0, 5.5, "5", True],
    "temperature": [0, 2, 2.1, -0.1, "1", True],
    "stream": [True, False, 1, "true"],
    "suffix": ["", "x", 5],
    "echo_last": [0, 5, -1],
    "max_tokens": [-1, 5, -2, 2**31],
}

CHAT_VALUES: dict[str, list[Any]] = {
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
BODIES: tuple[tuple[type[BaseModel], dict[str, Any], dict[str, list[Any]]], ...] = (
    (CompletionRequest, {"model": "m", "prompt": "x", "stream": True}, COMPLETION_VALUES),
    (ChatCompletionRequest, {"model": "m", "messages": [USER]}, CHAT_VALUES),
)
"""Each kind of body, a plain one, and values of its parameters."""


@cache
def validator(kind: type[BaseModel]) -> jsonschema.Draft202012Validator:
    """Return the schema of a kind of body."""
    schema = kind.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@all_cases(
    ("kind", "plain", "name", "values"),
    [
        (kind, plain, name, values.get(name, []))
        for kind, plain, values in BODIES
        for name in kind.model_fields
    ],
)
def test_schema_agrees_with_the_accepted_bodies(
    kind: type[BaseModel], plain: dict[str, Any], name: str, values: list[Any]
) -> None:
    is_chat = kind is ChatCompletionRequest
    for value in [*values, *([] if name in ("prompt", "messages") else [None])]:
        body = plain | {name: value}
        try:
            if is_chat:
                # Dialect vllm rejects an empty list.
                read_chat(OPENAI if name == "tools" else VLLM, **body)
            else:
                read(VLLM, **body)
        except BadRequestError as error:
            # Both outcomes are correct.
            assert not validator(kind).is_valid(body), (str(value)[:60], error.message)  # noqa: PT017
        else:
            validator(kind).validate(body)


def test_every_value_is_one_of_a_parameter() -> None:
    for kind, _, values in BODIES:
        assert values.keys() <= kind.model_fields.keys()


def test_images_of_the_documentation_are_accepted() -> None:
    for images in ([PNG_URI], [[PNG_URI]]):
        body = {"model": "m", "prompt": "<image>", "images": images}
        assert read(**body).images
        validator(CompletionRequest).validate(body)


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
def test_documentation_allows_parameters_that_need_others(given: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [USER]} | given
    assert read_chat(VLLM, **body)
    validator(ChatCompletionRequest).validate(body)


def test_documented_defaults_are_the_applied_ones() -> None:
    for kind, *_ in BODIES:
        for name, field in kind.model_fields.items():
            assert field.default is None, name
            assert not field.is_required(), name
            assert field.description or kind is CompletionRequest, name
