"""Every kind of structure, in the form of its API, on the real engine: the text matches."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.seeds.calling import Body, Caller, finishes, joined, text_of

pytestmark = pytest.mark.e2e

PRODUCT = {
    "type": "object",
    "properties": {
        "name": {"enum": ["lamp", "chair"]},
        "price": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
    },
    "required": ["name", "price", "tags"],
    "additionalProperties": False,
}
SUM = "root ::= '(' [0-9]{1,3} ('+' | '-') [0-9]{1,3} ')'"
WEATHER: Body = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

Check = Callable[[str], object]


def is_product(text: str) -> None:
    jsonschema.validate(json.loads(text), PRODUCT)


def is_reasoned_product(text: str) -> None:
    reasoning, _, product = text.partition("\nJSON: ")
    assert re.fullmatch("Reasoning: [a-z]{5}", reasoning)
    is_product(product)


def is_match(expression: str) -> Check:
    def check(text: str) -> None:
        assert re.fullmatch(expression, text, re.DOTALL)

    return check


def is_any_json(text: str) -> None:
    json.loads(text)


CASES: list[tuple[str, Body, Check]] = [
    ("vllm", {"structured_outputs": {"json": PRODUCT}}, is_product),
    (
        "vllm",
        {"structured_outputs": {"regex": r"^[a-c]{2}-\d{3}$"}},
        is_match(r"[a-c]{2}-[0-9]{3}"),
    ),
    ("vllm", {"structured_outputs": {"choice": ["yes", "yesterday"]}}, is_match("yes|yesterday")),
    ("vllm", {"structured_outputs": {"grammar": SUM}}, is_match(r"\(\d{1,3}[+-]\d{1,3}\)")),
    ("vllm", {"structured_outputs": {"grammar": 'start: "a" /b{2}/'}}, is_match("abb")),
    ("omlx", {"structured_outputs": {"choice": ["one", "two"]}}, is_match("one|two")),
    ("llamacpp", {"grammar": SUM}, is_match(r"\(\d{1,3}[+-]\d{1,3}\)")),
    ("llamacpp", {"json_schema": PRODUCT}, is_product),
    ("mistralrs", {"grammar": {"type": "regex", "value": "example"}}, is_match("example")),
    ("mistralrs", {"grammar": {"type": "lark", "value": 'start: "x" | "y"'}}, is_match("x|y")),
    ("mistralrs", {"grammar": {"type": "json_schema", "value": PRODUCT}}, is_product),
    (
        "mistralrs",
        {"grammar": {"type": "llguidance", "value": {"grammars": [{"json_schema": PRODUCT}]}}},
        is_product,
    ),
    (
        "mistralrs",
        {
            "grammar": {
                "type": "llguidance",
                "value": {
                    "grammars": [
                        {"lark_grammar": 'start: "Reasoning: " /[a-z]{5}/ "\\nJSON: " @product'},
                        {"name": "product", "json_schema": PRODUCT},
                    ]
                },
            }
        },
        is_reasoned_product,
    ),
    ("fireworks", {"response_format": {"type": "json_object", "schema": PRODUCT}}, is_product),
    (
        "fireworks-2026",
        {"response_format": {"type": "grammar", "grammar": SUM}},
        is_match(r"\(.+\)"),
    ),
    (
        "openai",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": PRODUCT},
            }
        },
        is_product,
    ),
    ("openai", {"json_schema": {"const": "a::=b\nstart: c"}}, is_any_json),
]


def asked(body: Body, **more: Any) -> Body:
    return {"prompt": "Describe a product as JSON:", "max_tokens": 60, "seed": 5, **body, **more}


@each_at_once("dialect, body, check", CASES)
@each_at_once("temperature", [1, pytest.param(0, marks=pytest.mark.long)])
def test_text_matches_its_structure(
    caller: Caller, dialect: str, body: Body, check: Check, temperature: float
) -> None:
    # llama.cpp's penalty would make the model avoid the required text.
    body = asked(body, temperature=temperature, repetition_penalty=1.0)
    answer, chunks = at_once(
        lambda: caller.complete(dialect, body), lambda: caller.stream(dialect, body)
    )
    assert answer["choices"][0]["finish_reason"] == "stop"
    check(text_of(answer))
    check(joined(chunks))
    assert finishes(chunks) == [(0, "stop")]


def test_numbers_of_a_schema_are_those_of_the_client(caller: Caller) -> None:
    int64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    uint64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
    constant = {"const": 1234567890123456768}
    names: Body = {"c": constant, "i": int64, "u": uint64}
    schema = {"type": "object", "properties": names, "required": [*names]}
    # Another 9 would exceed the ranges.
    body = asked({"json_schema": schema, "logit_bias": [["9", 100]]}, max_tokens=90)
    answer = json.loads(text_of(caller.complete("openai", body)))
    assert answer["c"] == 1234567890123456768
    assert (abs(answer["i"]), answer["u"]) == (10**18 - 1, 10**18 - 1)


def test_any_json_object_has_no_superfluous_white_space(caller: Caller) -> None:
    body = asked({"response_format": {"type": "json_object"}}, max_tokens=80, temperature=1)
    text = text_of(caller.complete("openai", body))
    assert text.startswith("{")
    outside_strings = re.sub(r'"(?:[^"\\]|\\.)*"?', "", text)
    assert not re.search(r"\s\s|^\s|\n", outside_strings)


@each_at_once(
    "choice, check",
    [
        ("required", is_match(r"(?:.*<tool_call>.*</tool_call>)+")),
        (
            {"type": "function", "function": {"name": "weather"}},
            is_match(
                r'<tool_call>\n?\{"name": ?"weather", ?"arguments": ?\{"city": ?"(Oslo|Rome)"\}\}'
                r"\n?</tool_call>"
            ),
        ),
    ],
)
def test_a_required_tool_is_called_with_arguments_of_its_schema(
    caller: Caller, choice: Any, check: Check
) -> None:
    body = asked({"tools": [WEATHER], "tool_choice": choice}, max_tokens=60)
    answer = caller.complete("mistralrs", body)
    check(text_of(answer))
    call = answer["choices"][0]["tool_calls"][0]["function"]
    assert call["name"] == "weather"
    assert json.loads(call["arguments"])["city"] in ("Oslo", "Rome")


@each_at_once(
    "body, param, reason",
    [
        (
            {"grammar": "root ::= 'a' foo"},
            "grammar",
            "line 1, column 14: rule 'foo' is not defined",
        ),
        ({"json_schema": {"uniqueItems": True}}, "json_schema.uniqueItems", "uniqueItems"),
        (
            {"structured_outputs": {"json": {"enum": [1234567890123456789]}}},
            "structured_outputs.json.enum",
            "1234567890123456789",
        ),
        (
            {"structured_outputs": {"regex": "(?=ab)b"}},
            "structured_outputs.regex",
            "look-around",
        ),
        (
            {
                "tools": [
                    {**WEATHER, "function": {**WEATHER["function"], "parameters": {"not": {}}}}
                ]
            },
            "tools[0].function.parameters.not",
            "not",
        ),
    ],
)
def test_unsupported_structure_is_rejected(
    caller: Caller, body: Body, param: str, reason: str
) -> None:
    error = caller.refused("openai", asked(body))
    assert error["code"] == "invalid_grammar"
    assert error["param"] == param
    assert reason in error["message"]
