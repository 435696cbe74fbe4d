"""Structures: every parameter that constrains the text."""

import json
from dataclasses import replace
from typing import Any

from gateway.dialects.parameters import PARAMETERS
from gateway.dialects.request import Structure, StructureKind
from tests.gateway.dialects.reading import read, refusal
from tests.support.cases import all_cases

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NESTED_TEXT = '{"a":' * 70 + "1" + "}" * 70


@all_cases(
    "given",
    [
        {},
        {"grammar": ""},
        {"response_format": {"type": "text"}},
        {"response_format": {}},
        {"response_format": {"type": "text"}, "grammar": ""},
    ],
)
def test_request_without_structure_has_none(given: dict[str, Any]) -> None:
    assert read(**given).structure is None


@all_cases(
    ("given", "kind", "source"),
    [
        ({"type": "json_object"}, StructureKind.JSON_OBJECT, None),
        ({"type": "json_object", "schema": None}, StructureKind.JSON_OBJECT, None),
        ({"type": "json_object", "schema": {}}, StructureKind.JSON_SCHEMA, {}),
        ({"type": "json_object", "schema": SCHEMA}, StructureKind.JSON_SCHEMA, SCHEMA),
        ({"type": "json_object", "value": SCHEMA}, StructureKind.JSON_SCHEMA, SCHEMA),
        ({"type": "json_object", "json_schema": SCHEMA}, StructureKind.JSON_SCHEMA, SCHEMA),
        ({"type": "json_schema", "schema": SCHEMA}, StructureKind.JSON_SCHEMA, SCHEMA),
        ({"type": "json_schema", "json_schema": SCHEMA}, StructureKind.JSON_SCHEMA, SCHEMA),
        ({"type": "json_schema", "value": SCHEMA}, StructureKind.JSON_SCHEMA, SCHEMA),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "value": SCHEMA}},
            StructureKind.JSON_SCHEMA,
            SCHEMA,
        ),
        (
            {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}},
            StructureKind.JSON_SCHEMA,
            SCHEMA,
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
            StructureKind.JSON_SCHEMA,
            SCHEMA,
        ),
        ({"type": "json_schema", "json_schema": {"schema": True}}, StructureKind.JSON_SCHEMA, True),
        *(
            (given, StructureKind.JSON_SCHEMA, SCHEMA)
            for text in [json.dumps(SCHEMA)]
            for given in (
                {"type": "json_schema", "json_schema": text},
                {"type": "json_schema", "json_schema": {"name": "x", "schema": text}},
                {"type": "json_object", "schema": text},
            )
        ),
        ({"type": "grammar", "grammar": 'root ::= "a"'}, StructureKind.GBNF, 'root ::= "a"'),
    ],
)
def test_response_format_is_read(given: dict[str, Any], kind: StructureKind, source: Any) -> None:
    structure = read(response_format=given).structure
    assert structure is not None
    assert replace(structure, is_strict=True) == Structure(kind, source, "response_format")


STRICT = {"schema": {}, "strict": True}


@all_cases(
    ("given", "is_strict"),
    [
        ({"response_format": {"type": "json_object", "schema": {}}}, False),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, False),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "strict": True},
                }
            },
            True,
        ),
        ({"json_schema": {}}, True),
        ({"structured_outputs": {"json": {}}}, True),
    ],
)
def test_schema_of_a_response_format_is_strict_only_if_it_says_so(
    given: dict[str, Any], is_strict: bool
) -> None:
    structure = read(**given).structure
    assert structure is not None
    assert structure.is_strict is is_strict


@all_cases(
    ("given", "kind", "source"),
    [
        ({"json": SCHEMA}, StructureKind.JSON_SCHEMA, SCHEMA),
        ({"json": '{"type": "object"}'}, StructureKind.JSON_SCHEMA, {"type": "object"}),
        ({"json": True}, StructureKind.JSON_SCHEMA, True),
        ({"json_object": True}, StructureKind.JSON_OBJECT, None),
        ({"regex": "a+"}, StructureKind.REGEX, "a+"),
        ({"regex": "a+", "json_object": False, "json": None}, StructureKind.REGEX, "a+"),
        ({"choice": ["yes", "no"]}, StructureKind.CHOICE, ["yes", "no"]),
        ({"grammar": "root ::= x"}, StructureKind.GBNF, "root ::= x"),
        ({"grammar": "start: x"}, StructureKind.LARK, "start: x"),
        ({"grammar": 'start: "a=b"'}, StructureKind.LARK, 'start: "a=b"'),
    ],
)
def test_structured_outputs_are_read(
    given: dict[str, Any], kind: StructureKind, source: Any
) -> None:
    structure = read(structured_outputs=given).structure
    assert structure is not None
    assert (structure.kind, structure.source) == (kind, source)
    assert structure.param.partition(".")[0] == "structured_outputs"
    assert given[structure.param.partition(".")[2]] not in (None, False)


@all_cases("schema", [{}, SCHEMA, True, False])
def test_json_schema_is_an_object_or_a_boolean(schema: Any) -> None:
    expected = Structure(StructureKind.JSON_SCHEMA, schema, "json_schema")
    assert read(json_schema=schema).structure == expected
    if isinstance(schema, dict):
        assert read(json_schema=json.dumps(schema)).structure == expected


WRONG: list[tuple[dict[str, Any], str, str]] = [
    (
        {"response_format": {"type": "xml"}},
        "response_format.type",
        (
            "'response_format.type' must be one of text, json_object, json_schema, grammar. "
            'Given: "xml".'
        ),
    ),
    (
        {"response_format": {"schema": {}}},
        "response_format.type",
        (
            "'response_format.type' must be one of text, json_object, json_schema, grammar. "
            "Given: null."
        ),
    ),
    (
        {"response_format": {"type": "json_object", "schema": "x"}},
        "response_format.schema",
        "'response_format.schema' must be a JSON schema of at most 64 levels. Given: \"x\".",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "'response_format.json_schema' must be a JSON schema: an object or a boolean. Given: null.",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        (
            "'response_format.json_schema.schema' must be a JSON schema: an object or a boolean. "
            "Given: null."
        ),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": []}},
        "response_format.json_schema",
        "'response_format.json_schema' must be a JSON schema: an object or a boolean. Given: [].",
    ),
    (
        {"response_format": {"type": "grammar"}},
        "response_format.grammar",
        "'response_format.grammar' must be a non-empty string. Given: null.",
    ),
    (
        {"structured_outputs": {}},
        "structured_outputs",
        (
            "'structured_outputs' must have exactly one of json, json_object, regex, "
            "choice, grammar. Given: none."
        ),
    ),
    (
        {"structured_outputs": {"json_object": False}},
        "structured_outputs",
        (
            "'structured_outputs' must have exactly one of json, json_object, regex, "
            "choice, grammar. Given: none."
        ),
    ),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs",
        (
            "'structured_outputs' must have exactly one of json, json_object, regex, "
            "choice, grammar. Given: regex, choice."
        ),
    ),
    (
        {"structured_outputs": {"json_object": 1}},
        "structured_outputs.json_object",
        "'structured_outputs.json_object' must be a boolean. Given: 1.",
    ),
    (
        {"structured_outputs": {"regex": ""}},
        "structured_outputs.regex",
        "'structured_outputs.regex' must be a non-empty string. Given: \"\".",
    ),
    (
        {"structured_outputs": {"json": "[1"}},
        "structured_outputs.json",
        "'structured_outputs.json' must be a JSON schema of at most 64 levels. Given: \"[1\".",
    ),
    (
        {"structured_outputs": {"choice": []}},
        "structured_outputs.choice",
        "'structured_outputs.choice' must have at least one string. Given: [].",
    ),
    (
        {"structured_outputs": {"choice": ["a", 5]}},
        "structured_outputs.choice",
        "'structured_outputs.choice' must be an array of strings. Given: 5 in it.",
    ),
    (
        {"structured_outputs": {"choice": ["a"] * 1025}},
        "structured_outputs.choice",
        "'structured_outputs.choice' must have at most 1024 entries. Given: 1025.",
    ),
    (
        {"grammar": {"type": "gbnf", "value": "x"}},
        "grammar.type",
        "'grammar.type' must be one of regex, lark, json_schema, llguidance. Given: \"gbnf\".",
    ),
    (
        {"grammar": {"type": ["regex"], "value": "x"}},
        "grammar.type",
        "'grammar.type' must be one of regex, lark, json_schema, llguidance. Given: [\"regex\"].",
    ),
    (
        {"grammar": {"type": "regex", "value": {}}},
        "grammar.value",
        "'grammar.value' must be a non-empty string. Given: {}.",
    ),
    (
        {"grammar": {"type": "llguidance", "value": {}}},
        "grammar.value",
        "'grammar.value' must be a non-empty string or object. Given: {}.",
    ),
    (
        {"grammar": {"type": "json_schema"}},
        "grammar.value",
        "'grammar.value' must be a JSON schema: an object or a boolean. Given: null.",
    ),
    (
        {"grammar": {"type": "regex", "value": "x"}, "grammar_syntax": "lark"},
        "grammar_syntax",
        "'grammar_syntax' is only allowed with a 'grammar' that is a string.",
    ),
    (
        {"grammar": "x", "grammar_syntax": "ebnf"},
        "grammar_syntax",
        "'grammar_syntax' must be one of 'gbnf' or 'lark'. Given: \"ebnf\".",
    ),
]


@all_cases(("given", "param", "message"), WRONG)
def test_invalid_structure_is_refused(given: dict[str, Any], param: str, message: str) -> None:
    error = refusal(**given)
    assert (error.message, error.param) == (message, param)
    assert error.code == "invalid_value"


def test_schema_in_a_string_is_read_to_a_bounded_depth() -> None:
    error = refusal(structured_outputs={"json": NESTED_TEXT})
    assert error.message.startswith(
        "'structured_outputs.json' must be a JSON schema of at most 64 levels. Given: "
    )
    assert error.param == "structured_outputs.json"


@all_cases("name", ["response_format", "structured_outputs"])
def test_structural_tags_are_refused(name: str) -> None:
    given = {"type": "structural_tag", "structural_tag": {"structures": []}}
    error = refusal(**{name: given})
    assert error.code == "unsupported_parameter"
    assert "structural_tag" in error.message
    assert error.message.endswith(PARAMETERS["structural_tag"].reason)


STRUCTURES: dict[str, Any] = {
    "grammar": 'root ::= "a"',
    "json_schema": {},
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
}
PAIRS = [(a, b) for a in STRUCTURES for b in STRUCTURES if a < b]


@all_cases(("first", "second"), PAIRS)
def test_second_structure_is_refused_naming_both(first: str, second: str) -> None:
    assert read(**{first: STRUCTURES[first]}).structure
    error = refusal(**{name: STRUCTURES[name] for name in (first, second)})
    assert f"'{first}" in error.message
    assert f"'{second}" in error.message
    assert "cannot be combined: a text can have only one structure." in error.message


TOOLS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
}


@all_cases("constraint", [*STRUCTURES, "tools"])
@all_cases(
    ("name", "value", "why"),
    [
        ("ignore_eos", True, "constrained text ends as soon as it is complete."),
        ("min_tokens", 3, "constrained text ends as soon as it is complete."),
        ("allowed_token_ids", [5], "the allowed tokens may not suffice to complete the text."),
    ],
)
def test_parameters_that_conflict_with_a_structure_are_refused(
    constraint: str, name: str, value: Any, why: str
) -> None:
    fields = TOOLS if constraint == "tools" else {constraint: STRUCTURES[constraint]}
    assert read(**fields)
    assert read(**{name: value})
    error = refusal(**fields, **{name: value})
    assert error.message.startswith(f"'{name}' cannot be combined with '{constraint}")
    assert error.message.endswith(why)
    assert error.param == name


def test_tools_without_constraint_may_have_allowed_tokens() -> None:
    assert read(tools=TOOLS["tools"], allowed_token_ids=[5]).sampling.allowed_token_ids == [5]


def test_options_of_structured_outputs_are_named_as_ignored() -> None:
    request = read(structured_outputs={"regex": "a", "disable_fallback": True, "json": None})
    assert request.ignored_parameters == ("structured_outputs.disable_fallback",)
    error = refusal(structured_outputs={"json": {}, "whitespace_pattern": " "})
    assert error.param == "structured_outputs.whitespace_pattern"
