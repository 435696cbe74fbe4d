"""Types that are written as in Python become JSON schemas."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from gateway.dialects.json_types import Schema, or_null, schema_of
from tests.support.cases import all_cases


@all_cases(
    ("kind", "fitting", "others"),
    [
        ("str", [""], [5, None]),
        ("str[1:2]", ["a", "ab"], ["", "abc"]),
        ("int[-1:5]", [-1, 5], [-2, 6, 2.5]),
        ("float[:0.5]", [-7, 0.5], [0.6, "0"]),
        ("bool | None", [True, None], [0]),
        ("int | str", [5, "a"], [2.5, None]),
        ("list[int[0:], 1:2]", [[0], [0, 1]], [[], [0, 1, 2], [-1], 5]),
        ("dict[str, int, :1]", [{}, {"a": 5}], [{"a": "b"}, {"a": 5, "b": 5}, []]),
        ("dict[str[:2], Any]", [{"ab": None}], [{"abc": 5}]),
        ('{"a": str, "b?": int | None}', [{"a": ""}, {"a": "", "b": None}], [{}, {"a": 5}]),
        ('"a"', ["a"], ["b", None]),
        ('"a" | "b" | None', ["a", "b", None], ["c", 5]),
        ('"a" | "b" | {"c": False}', ["b", {"c": False}], ["c", None, {"c": True}]),
        ("float | False", [5, False], [True, None]),
        ('match("^a+$")', ["aa"], ["ab", 5]),
        ("other | None", ["b", None], ["", 5]),
    ],
)
def test_type_describes_its_values(kind: str, fitting: list[Any], others: list[Any]) -> None:
    schema = schema_of(kind, other={"type": "string", "minLength": 1})
    Draft202012Validator.check_schema(schema)
    assert [
        value for value in fitting + others if Draft202012Validator(schema).is_valid(value)
    ] == fitting


@all_cases(
    "schema",
    [
        {"type": "integer"},
        {"type": "object", "oneOf": [{"required": ["a"]}]},
        {"const": 5},
    ],
)
def test_null_is_added_to_any_schema(schema: Schema) -> None:
    assert Draft202012Validator(or_null(schema)).is_valid(None)


def test_unreadable_types_are_errors() -> None:
    for kind in ("int[", "int.real", "set[int]"):
        with pytest.raises((SyntaxError, ValueError, KeyError)):
            schema_of(kind)
