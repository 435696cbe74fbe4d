"""An object has only the properties that its schema names, however the schema composes them."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.completions.structure import lark
from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.schemas import Schemas
from tests.support.cases import all_cases

Schema = dict[str, Any]

INTEGER = {"type": "integer"}


def with_properties(*names: str, **keywords: Any) -> Schema:
    """Return the schema of an object with integers."""
    return {"type": "object", "properties": dict.fromkeys(names, INTEGER), **keywords}


A, B, C = with_properties("a"), with_properties("b"), with_properties("c")
A_REQUIRED, B_REQUIRED = ({**each, "required": [*each["properties"]]} for each in (A, B))
REF_A = {"$ref": "#/$defs/a"}
DEFS = {"$defs": {"a": A}}
LIST = {"$defs": {"list": {"properties": {"a": INTEGER, "next": {"$ref": "#/$defs/list"}}}}}
REF_LIST = {"$ref": "#/$defs/list"}
KEYWORDS = {"type": "object", "properties": {"properties": A, "$ref": INTEGER, "allOf": INTEGER}}


@all_cases(
    ("schema", "good", "bad"),
    [
        (A, ["{}", '{"a":1}'], ['{"a":1,"b":1}', '{"b":1}']),
        ({"properties": {}}, ["{}", "1"], ['{"a":1}']),
        ({}, ['{"a":{"b":1}}'], []),
        ({"type": "object", "required": ["a"]}, ['{"a":1,"b":1}'], ["{}"]),
        ({**A, "required": ["z"]}, ['{"z":"x"}', '{"a":1,"z":1}'], ["{}", '{"z":1,"b":1}']),
        # Explicit rules for other properties remain.
        ({**A, "additionalProperties": True}, ['{"a":1,"b":"x"}'], []),
        ({**A, "additionalProperties": INTEGER}, ['{"a":1,"b":1}'], ['{"a":1,"b":"x"}']),
        ({**A, "additionalProperties": B}, ['{"x":{"b":1}}'], ['{"x":{"c":1}}']),
        ({**A, "patternProperties": {"^x": INTEGER}}, ['{"a":1,"x1":1}'], ['{"b":1}']),
        ({"patternProperties": {"^x": B}}, ['{"x":{"b":1}}'], ['{"b":1}', '{"x":{"c":1}}']),
        (
            {"patternProperties": {"^x": INTEGER}, "required": ["x1"]},
            ['{"x1":1}'],
            ['{"x1":"x"}', "{}"],
        ),
        ({**A, "unevaluatedProperties": True}, ['{"a":1,"b":1}'], []),
        ({"allOf": [A, B], "unevaluatedProperties": True}, ['{"c":1}'], []),
        ({**A, "unevaluatedProperties": False}, ['{"a":1}'], ['{"b":1}']),
        ({"type": "object", "unevaluatedProperties": False}, ["{}"], ['{"b":1}']),
        ({**A, "const": {"a": 1, "b": 2}}, ['{"a":1,"b":2}'], ['{"a":1}']),
        ({"properties": {"o": {"enum": [{"properties": {}}]}}}, ['{"o":{"properties":{}}}'], []),
        # Everything that a schema contains is closed.
        ({"items": A}, ['[{"a":1}]'], ['[{"b":1}]']),
        ({"prefixItems": [A, B]}, ['[{"a":1},{"b":1}]'], ['[{"b":1}]']),
        ({"properties": {"o": A}}, ['{"o":{"a":1}}'], ['{"o":{"b":1}}']),
        (KEYWORDS, ['{"properties":{"a":1},"$ref":1}'], ['{"properties":{"b":1}}', '{"x":1}']),
        # Compositions: the names of all schemas of an object.
        ({"anyOf": [A, {"type": "null"}]}, ['{"a":1}', "null"], ['{"b":1}']),
        ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}']),
        ({"oneOf": [A_REQUIRED, B_REQUIRED]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}']),
        ({"allOf": [A, B]}, ['{"a":1,"b":1}', '{"a":1}'], ['{"c":1}', '{"a":1,"b":"x"}']),
        ({"allOf": [{"type": "object"}, A]}, ['{"a":1}'], ['{"b":1}']),
        ({"allOf": [A, {"additionalProperties": INTEGER}]}, ['{"a":1,"b":1}'], ['{"b":"x"}']),
        ({"allOf": [A, {"patternProperties": {"^x": INTEGER}}]}, ['{"a":1,"x":1}'], ['{"b":1}']),
        ({"allOf": [A, {"required": ["z"]}]}, ['{"a":1,"z":1}'], ['{"a":1}', '{"b":1,"z":1}']),
        ({**C, "allOf": [{"allOf": [A]}, B]}, ['{"c":1,"a":1,"b":1}'], ['{"d":1}']),
        (
            {**C, "anyOf": [A, B_REQUIRED]},
            ['{"c":1}', '{"c":1,"a":1}', '{"c":1,"b":1}'],
            ['{"c":1,"a":1,"b":1}', '{"d":1}'],
        ),
        (
            {"allOf": [{"anyOf": [A, B]}, C]},
            ['{"a":1,"c":1}', '{"b":1,"c":1}'],
            ['{"a":1,"b":1,"c":1}'],
        ),
        (
            {**with_properties("a", "b"), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
            ["{}", '{"a":1,"c":1}'],
        ),
        # References
        ({**DEFS, **REF_A}, ['{"a":1}'], ['{"b":1}']),
        ({**DEFS, **REF_A, "properties": {"b": INTEGER}}, ['{"a":1,"b":1}'], ['{"c":1}']),
        (
            {**DEFS, "allOf": [REF_A, B], "properties": {"c": REF_A}},
            ['{"a":1,"b":1,"c":{"a":1}}'],
            ['{"a":"x"}', '{"d":1}', '{"c":{"b":1}}'],
        ),
        ({**LIST, **REF_LIST}, ['{"next":{"a":1}}'], ['{"next":{"b":1}}']),
        (
            {**LIST, "allOf": [REF_LIST, B]},
            ['{"a":1,"next":{"a":1},"b":1}'],
            ['{"next":{"b":1}}', '{"c":1}'],
        ),
        ({"properties": {"o": {"$ref": "#"}}}, ['{"o":{"o":{}}}'], ['{"o":{"a":1}}']),
        ({"x": {"a/b": A}, "$ref": "#/x/a~1b"}, ['{"a":1}'], ['{"b":1}']),
        ({"$ref": "#i", "$defs": {"i": {**A, "$anchor": "i"}}}, ['{"a":1}'], ['{"b":1}']),
        (
            {**A, "$ref": "#x", "$defs": {"x": {**B, "$anchor": "x"}}},
            ['{"a":1,"b":1}'],
            ['{"c":1}'],
        ),
    ],
)
def test_only_named_properties_are_accepted(
    accepts: Callable[[str, str], bool], schema: Schema, good: list[str], bad: list[str]
) -> None:
    grammar = lark.document(Schemas().json(schema, "json_schema"))
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@all_cases(
    ("schema", "reason"),
    [
        ({"allOf": [with_properties(f"p{n}") for n in range(1000)]}, "name too many properties"),
        ({"$defs": {"a": {"anyOf": [{"allOf": [REF_A, B]}, C]}}, **REF_A}, "refers to itself"),
        ({**A, "$ref": "#/$defs/b"}, 'same document.*Given: "#/.defs/b"'),
    ],
)
def test_schema_that_cannot_be_closed_is_rejected(schema: Schema, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        Schemas().json(schema, "json_schema")
