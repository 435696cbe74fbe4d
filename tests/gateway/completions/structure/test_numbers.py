"""A schema's numbers are those that the client sent, also beyond 2^53, or the schema is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.completions.structure import lark
from gateway.completions.structure.clients_lark import from_lark
from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.schemas import Schemas
from tests.support.cases import all_cases

INT64, UINT64 = 2**63 - 1, 2**64 - 1
LEAST = 1024 - 2**63
ROUNDED = 2**53 + 1


def ranged(least: Any, most: Any, kind: Any = "integer") -> dict[str, Any]:
    """Return the schema of a range."""
    return {"type": kind, "minimum": least, "maximum": most}


@all_cases(
    ("schema", "good", "bad"),
    [
        ({"enum": [1234567890123456768, -5]}, ["1234567890123456768", "-5"], ["-4"]),
        ({"const": {"a": [2**53]}}, [f'{{"a":[{2**53}]}}'], [f'{{"a":[{ROUNDED}]}}']),
        ({"const": INT64}, [str(INT64)], [str(INT64 - 1), str(INT64 + 1)]),
        # The ranges of 64-bit integers
        (ranged(-(2**63), INT64), [str(LEAST), "0", str(INT64)], [str(LEAST - 1), str(INT64 + 1)]),
        (ranged(0, UINT64), ["0", "1234567890123456789", str(INT64)], ["-1", str(UINT64 + 1)]),
        (ranged(-(2**63), INT64, ["integer", "null"]), ["null", str(INT64)], [str(INT64 + 1)]),
        (ranged(-(2**63), 0), [str(LEAST), "0"], ["1"]),
        ({"type": "integer", "exclusiveMaximum": INT64 + 1}, [str(INT64)], [str(INT64 + 1)]),
        ({"type": "integer", "exclusiveMinimum": -(2**63) - 1}, [str(LEAST)], [str(LEAST - 1)]),
        ({"type": "integer", "exclusiveMaximum": 2**53}, [str(2**53 - 1)], [str(2**53)]),
        ({"type": "integer", "exclusiveMinimum": -(2**53)}, ["0"], [str(-(2**53))]),
        (ranged(-3.4e38, 3.4e38, "number"), ["0.5", "-2", str(10**18)], ["x"]),
        ({"minimum": -(2**63), "maximum": INT64}, ["5", '"a"'], []),
        (ranged(-(2**53) + 1, 2**53 - 1), [str(2**53 - 1)], [str(2**53)]),
        # Numbers that do not count
        ({"type": "integer", "default": ROUNDED, "examples": [ROUNDED]}, ["1"], []),
        ({"properties": {"const": ranged(0, UINT64)}}, ['{"const":1}'], ['{"const":-1}']),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, ["1"], ["0"]),
        ({"type": "number", "multipleOf": 0.01}, ["0.05"], ["0.055"]),
    ],
)
def test_numbers_of_a_schema_are_exact(
    accepts: Callable[[str, str], bool], schema: Any, good: list[str], bad: list[str]
) -> None:
    grammar = lark.document(Schemas().json(schema, "json_schema"))
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@all_cases(
    ("schema", "named"),
    [
        ({"enum": [1234567890123456789]}, "1234567890123456789 of 'enum'"),
        ({"enum": ["a", {"b": [ROUNDED]}]}, f"{ROUNDED} of 'enum'"),
        ({"const": -ROUNDED}, f"-{ROUNDED} of 'const'"),
        ({"const": -(2**63)}, "of 'const'"),
        ({"const": UINT64}, "of 'const'"),
        (ranged(ROUNDED, INT64), f"{ROUNDED} of 'minimum'"),
        (ranged(0, ROUNDED), f"{ROUNDED} of 'maximum'"),
        ({"type": "integer", "exclusiveMaximum": 2**53 + 2}, "of 'exclusiveMaximum'"),
        ({"type": "integer", "exclusiveMaximum": INT64}, "of 'exclusiveMaximum'"),
        ({"type": "integer", "exclusiveMinimum": -ROUNDED}, "of 'exclusiveMinimum'"),
        (
            {"type": "integer", "exclusiveMinimum": 2**53},
            "from -9007199254740991 to 9007",
        ),
        ({"type": "integer", "exclusiveMinimum": 2.0**53}, "of 'exclusiveMinimum'"),
        ({"type": "integer", "exclusiveMaximum": -(2**53)}, "of 'exclusiveMaximum'"),
        ({"type": "integer", "minimum": 2**53, "exclusiveMinimum": True}, "of 'minimum'"),
        ({"type": "integer", "multipleOf": ROUNDED}, f"at most 429496728. Given: {ROUNDED}"),
        ({"type": "number", "multipleOf": 4294.96729}, "at most 429496728. Given: 4294.96729"),
        ({"multipleOf": 1e9}, "at most 429496728"),
        ({"properties": {"a": {"items": {"anyOf": [{"const": ROUNDED}]}}}}, "of 'const'"),
        ({"$defs": {"a": {"const": ROUNDED}}, "$ref": "#/$defs/a"}, "of 'const'"),
    ],
)
def test_number_that_would_change_is_refused(schema: Any, named: str) -> None:
    with pytest.raises(RefusedError, match=named):
        Schemas().json(schema, "json_schema")
    # A Lark grammar may have schemas too.
    with pytest.raises(RefusedError, match=named):
        from_lark(f'start: "%json {{" %json{json.dumps(schema, indent=1)} // %json {{')


def test_schema_in_a_lark_grammar_is_refused_beyond_the_ranges_of_the_compiler() -> None:
    for schema in (ranged(-(2**63), 0), ranged(0, UINT64)):
        with pytest.raises(RefusedError, match="cannot be beyond"):
            from_lark(f"start: a\na: %json {json.dumps(schema)}")
    with pytest.raises(RefusedError, match="nested too deeply"):
        from_lark("start: %json " + "[" * 100_000)
    assert "%json [" in from_lark("start: %json [1, x")
