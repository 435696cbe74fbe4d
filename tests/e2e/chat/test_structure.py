"""Structured responses through OpenAI's client, parsed by it or compared with their schema."""

import json
import re
from typing import Any, Literal

import jsonschema  # type: ignore[import-untyped]
import pytest
from openai import BadRequestError, LengthFinishReasonError, OpenAI
from pydantic import BaseModel, Field

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.chat.chats import (
    THINKING,
    chat,
    chat_both_ways,
    parameters,
    reasoning_of,
    text_of,
)
from tests.e2e.chat.tools import WEATHER, calls_of, check_fits

pytestmark = pytest.mark.e2e

ASKED = "Describe a person as JSON."


class Place(BaseModel):
    """An object within an object."""

    city: Literal["Oslo", "Rome"]
    digits: str = Field(pattern="^[0-9]{2}$")


class Person(BaseModel):
    """The client makes a schema of it."""

    name: Literal["Ada", "Grace"]
    age: int = Field(ge=0, le=150)
    places: list[Place] = Field(max_length=2)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a `response_format`."""
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": schema},
    }


def test_client_parses_a_strict_schema(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        **parameters(ASKED, {"max_tokens": 200}), response_format=Person
    )

    [choice] = answer.choices
    assert isinstance(choice.message.parsed, Person)
    assert choice.message.refusal is None
    assert choice.finish_reason == "stop"


def test_client_parses_a_stream(client: OpenAI) -> None:
    arguments = parameters(ASKED, {"max_tokens": 200})
    with client.chat.completions.stream(**arguments, response_format=Person) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message.parsed
    whole = client.chat.completions.parse(**arguments, response_format=Person)

    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert streamed == whole.choices[0].message.parsed


def test_client_reports_a_truncated_response(client: OpenAI) -> None:
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(
            **parameters(ASKED, {"max_tokens": 3}), response_format=Person
        )


@each_at_once("temperature", [0, 1])
@each_at_once("seed", range(3))
def test_schema_holds(client: OpenAI, temperature: float, seed: int) -> None:
    options = {"temperature": temperature, "seed": seed}
    answer = chat(client, "What is 27 + 35?", response_format=json_schema(SCHEMA), **options)
    jsonschema.validate(json.loads(text_of(answer)), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"


@each_at_once("seed", range(10))
def test_schema_without_additional_properties_is_closed(client: OpenAI, seed: int) -> None:
    # Unlike the client's parse(), pydantic adds no `additionalProperties`.
    structure = json_schema(Person.model_json_schema())
    answer = chat(client, ASKED, response_format=structure, seed=seed, temperature=1)

    person = json.loads(text_of(answer))
    assert person.keys() == Person.model_fields.keys()
    assert all(place.keys() == Place.model_fields.keys() for place in person["places"])


def test_structure_follows_the_reasoning(client: OpenAI) -> None:
    answer = chat_both_ways(
        client, "What is 27 + 35?", response_format=json_schema(SCHEMA), max_tokens=200, **THINKING
    )

    assert reasoning_of(answer) == "\n20 + 30 = 50, 7 + 5 = 12, 50 + 12 = 62\n"
    jsonschema.validate(json.loads(text_of(answer)), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"


def test_json_object_is_an_object(client: OpenAI) -> None:
    answer = chat_both_ways(client, ASKED, response_format={"type": "json_object"}, max_tokens=400)

    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(text_of(answer)), dict)


@each_at_once(
    "structure, pattern",
    [
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"choice": ["red", "blue"]}, "red|blue"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json": SCHEMA}, r'\{"sum": ?\d+\}'),
    ],
)
@each_at_once("how", [{}, THINKING])
def test_structured_outputs_hold(
    client: OpenAI, how: dict[str, Any], structure: dict[str, Any], pattern: str
) -> None:
    answer = chat_both_ways(
        client, "What is 27 + 35?", structured_outputs=structure, max_tokens=200, **how
    )

    assert re.fullmatch(pattern, text_of(answer).strip())


def test_grammars_refer_to_each_other(client: OpenAI) -> None:
    # The form of mistral.rs's example for llguidance.
    grammars = [
        {"lark_grammar": 'start: "Reasoning: " /.+/ "\\nJSON: " @sum'},
        {"name": "sum", "json_schema": SCHEMA},
    ]
    answer = chat_both_ways(
        client,
        "What is 27 + 35?",
        grammar={"type": "llguidance", "value": {"grammars": grammars}},
        max_tokens=256,
        frequency_penalty=1.0,
        top_p=0.1,
        temperature=0,
    )
    assert re.fullmatch(r'Reasoning: .+\nJSON: \{"sum": ?\d+\}', text_of(answer))


def test_response_is_a_call_or_the_structure(client: OpenAI) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "response_format": json_schema(SCHEMA)}
    calls, structured = at_once(
        lambda: chat_both_ways(client, "What is the weather in Paris?", max_tokens=100, **options),
        lambda: chat_both_ways(client, "What is 7 + 8?", max_tokens=100, **options),
    )

    check_fits(calls_of(calls), WEATHER)
    assert calls.choices[0].finish_reason == "tool_calls"
    for answer in (calls, structured):
        if not calls_of(answer):
            jsonschema.validate(json.loads(text_of(answer)), SCHEMA)


def test_forced_call_wins_over_the_structure(client: OpenAI) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "response_format": json_schema(SCHEMA)}
    answer = chat_both_ways(client, ASKED, max_tokens=100, tool_choice="required", **options)

    check_fits(calls_of(answer), WEATHER)


@each_at_once(
    "structure, param",
    [
        (json_schema({"type": "nothing"}), "response_format.json_schema.schema.type"),
        (json_schema({"items": {"not": {}}}), "response_format.json_schema.schema.items.not"),
        ({"type": "grammar", "grammar": "root ::= x"}, "response_format.grammar"),
    ],
)
def test_unsupported_structure_is_rejected(client: OpenAI, structure: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(client, ASKED, response_format=structure)

    assert caught.value.param == param
    assert f"'{param}' was rejected" in caught.value.message
