"""The OpenAPI schema of a completion's body allows exactly the accepted bodies."""

from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from gateway.dialects.completions import CompletionRequest
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.reading import VLLM, read
from tests.support.cases import all_cases

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": None}}
PNG = "data:image/png;base64,iVBORw0KGgo="

VALUES: dict[str, list[Any]] = {
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


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    """The schema of the body."""
    schema = CompletionRequest.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@all_cases("name", CompletionRequest.model_fields)
def test_schema_agrees_with_the_accepted_bodies(
    validator: jsonschema.Draft202012Validator, name: str
) -> None:
    absent = [] if name == "prompt" else [None]
    for value in VALUES.get(name, []) + absent:
        body = {"model": "m", "prompt": "x", "stream": True, name: value}
        try:
            read(VLLM, **body)
        except BadRequestError as error:
            # Both outcomes are correct.
            assert not validator.is_valid(body), (str(value)[:60], error.message)  # noqa: PT017
        else:
            validator.validate(body)


def test_every_value_is_one_of_a_parameter() -> None:
    assert VALUES.keys() <= CompletionRequest.model_fields.keys()


def test_images_of_the_documentation_are_accepted(
    validator: jsonschema.Draft202012Validator,
) -> None:
    for images in ([PNG], [[PNG]]):
        body = {"model": "m", "prompt": "<image>", "images": images}
        assert read(**body).images
        validator.validate(body)


def test_documented_defaults_are_the_applied_ones() -> None:
    for name, field in CompletionRequest.model_fields.items():
        assert field.default is None, name
        assert not field.is_required(), name
