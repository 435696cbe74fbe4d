"""Every kind of structure becomes Lark that llguidance, and so vLLM, reads correctly."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from llguidance.gbnf_to_lark import any_to_lark

from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.translate import to_lark
from gateway.dialects.request import Structure, StructureKind
from tests.support.cases import all_cases

Accepts = Callable[[str, str], bool]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def grammars(*given: Any) -> dict[str, Any]:
    """Return several grammars in llguidance's form."""
    return {"grammars": list(given)}


def lark_of(kind: StructureKind, source: Any) -> str:
    return to_lark(Structure(kind, source, "grammar"))


@all_cases(
    ("kind", "source", "good", "bad"),
    [
        (
            StructureKind.JSON_SCHEMA,
            PERSON,
            ['{"name":"x","age":1}', '{"name": "x", "age": 1}'],
            ['{"name":  "x","age":1}', '{"name":"x",\n"age":1}', ' {"name":"x","age":1}', "{}"],
        ),
        (StructureKind.JSON_SCHEMA, {}, ["1", '"x"', "[1, null]", "{}", "true"], ["", "x", "[1,"]),
        (StructureKind.JSON_SCHEMA, True, ["1", "{}"], ["", "x"]),
        (StructureKind.JSON_SCHEMA, {"const": "a::=b"}, ['"a::=b"'], ['"a"']),
        (StructureKind.JSON_OBJECT, None, ["{}", '{"a": {"b": [1, 2]}}'], ["[]", "1", "{ }"]),
        (
            StructureKind.CHOICE,
            ["yes", "no", "é\n\"'/"],
            ["yes", "no", "é\n\"'/"],
            ["", "ye", "nono"],
        ),
        (StructureKind.CHOICE, ["a", "ab", "abc"], ["a", "ab", "abc"], ["", "b", "abcd"]),
        (StructureKind.CHOICE, ["::=", "start: x"], ["::=", "start: x"], ["x"]),
        (StructureKind.REGEX, "example", ["example"], ["exampl", "examples"]),
        (StructureKind.REGEX, r"^\d{3}-[a-z]+$", ["123-ab"], ["12-ab", "123-", "١٢٣-a"]),
        (StructureKind.REGEX, r"\Aa/b\.c\z", ["a/b.c"], ["a/bxc"]),
        (StructureKind.REGEX, r"a\$", ["a$"], ["a"]),
        (StructureKind.REGEX, r"a\\$", ["a\\"], ["a", "a$"]),
        (StructureKind.REGEX, r"(?i)ab|c", ["AB", "aB", "C"], ["abc"]),
        (StructureKind.REGEX, r"^(?!-)[a-z-]{1,3}$", ["a", "a--"], ["-a", "abcd", ""]),
        (StructureKind.REGEX, "::=\n(x|y)*", ["::=\n", "::=\nxy"], ["::="]),
        (StructureKind.LARK, 'start: "a" x\nx: /b+/ "c"', ["abbc"], ["ac"]),
        (StructureKind.LARK, '%llguidance {}\nstart: "::="', ["::="], [":"]),
        (StructureKind.LARK, '// a ::= b\nstart: %json {"type": "null"}', ["null"], ["1"]),
        (StructureKind.LLGUIDANCE, 'start: "a"', ["a"], ["b"]),
        (StructureKind.LLGUIDANCE, {"grammars": [{"lark_grammar": 'start: "a"'}]}, ["a"], ["b"]),
        (
            StructureKind.LLGUIDANCE,
            json.dumps({"grammars": [{"json_schema": {"type": "integer"}}]}),
            ["1"],
            ["{}"],
        ),
        (
            StructureKind.LLGUIDANCE,
            grammars(
                {"lark_grammar": 'start: "@x" /@x\\//? (@b-1 | @n{2})  // @x "'},
                {"name": "n", "json_schema": {"type": "null"}},
                {"name": "b-1", "lark_grammar": 'start: b @n\nb: %lark {\nstart: "b" @n\n}'},
            ),
            ["@x@x/nullnull", "@xbnullnull", "@xnullnull"],
            ["@xnull", "@xb", "bnullnull"],
        ),
    ],
)
def test_structure_accepts_matching_texts_only(
    accepts: Accepts, kind: StructureKind, source: Any, good: list[str], bad: list[str]
) -> None:
    lark = lark_of(kind, source)
    assert [text for text in good if not accepts(lark, text)] == []
    assert [text for text in bad if accepts(lark, text)] == []
    assert any_to_lark(lark) == lark, "vLLM would take it for GBNF"


def test_choices_and_regexes_agree_with_python(accepts: Accepts) -> None:
    expression = r"(?:[a-c]{1,2}|x\d*)(?:,[a-c])?"
    lark = lark_of(StructureKind.REGEX, expression)
    texts = ["a", "ab", "abc", "x", "x12", "x1,a", "ab,c", ",a", "a,", "x,d", ""]
    assert [text for text in texts if accepts(lark, text)] == [
        text for text in texts if re.fullmatch(expression, text)
    ]


@all_cases(
    ("kind", "source", "message"),
    [
        (StructureKind.JSON_SCHEMA, False, "matches nothing"),
        (StructureKind.JSON_SCHEMA, {"minItems": 10**9}, "'minItems' must be at most 10000"),
        (
            StructureKind.JSON_SCHEMA,
            {"items": {"maxItems": 1e18}},
            "'maxItems' must be at most 10000",
        ),
        (StructureKind.JSON_SCHEMA, {"maxLength": 2**31}, "'maxLength' must be at most 2147483647"),
        (StructureKind.JSON_SCHEMA, json.loads('{"a":' * 70 + "1" + "}" * 70), "nested deeper"),
        (StructureKind.REGEX, "(?=ab)b", "look-around"),
        (StructureKind.REGEX, r"(?<!a)b", "look-around"),
        (StructureKind.REGEX, r"(a)\1", "backreferences"),
        (StructureKind.REGEX, "a\0", "NUL"),
        (StructureKind.CHOICE, [], "1 to 1024 choices. Given: 0"),
        (StructureKind.CHOICE, ["x"] * 1025, "1 to 1024 choices. Given: 1025"),
        (StructureKind.CHOICE, ["x" * 4097], "longer than 4096 characters. Given: 4097"),
        (StructureKind.LARK, 'foo: "a"', "must have a rule 'start'"),
        (StructureKind.LLGUIDANCE, "{", "not valid JSON"),
    ],
)
def test_a_structure_is_refused_for_a_reason(
    kind: StructureKind, source: Any, message: str
) -> None:
    with pytest.raises(RefusedError) as raised:
        lark_of(kind, source)
    assert message in str(raised.value)


X = {"name": "x", "lark_grammar": 'start: "x"'}


@all_cases(
    ("given", "place", "message"),
    [
        ({}, "", "at least one"),
        (grammars(), "", "at least one"),
        (grammars("start: /a/"), "[0]", "either 'lark_grammar' or 'json_schema'"),
        (grammars({"regex": "a"}), "[0]", "either 'lark_grammar' or 'json_schema'"),
        (grammars({**X, "json_schema": {}}), "[0]", "either 'lark_grammar' or 'json_schema'"),
        (grammars({"lark_grammar": 1}), "[0].lark_grammar", "Given: 1"),
        (grammars(X, {"lark_grammar": "a: /a/"}), "[1].lark_grammar", "must have a rule 'start'"),
        (
            grammars(X, {"json_schema": {"minItems": 10**9}}),
            "[1].json_schema.minItems",
            "at most 10000",
        ),
        (grammars(X, X), "[1].name", 'another grammar has the name "x"'),
        (grammars({"lark_grammar": "start: @y"}, X), "[0].lark_grammar", "name of '@y'"),
        (
            grammars({"lark_grammar": "start: @x"}, {**X, "lark_grammar": 'start: "a" | @x'}),
            "[1].lark_grammar",
            "'@x' refers to a grammar that refers to this one",
        ),
        (
            grammars({"lark_grammar": "start: " + "@x " * 9000}, {"name": "x", "json_schema": {}}),
            "[0].lark_grammar",
            "at most 524288 characters",
        ),
    ],
)
def test_error_names_the_grammar_among_several(given: Any, place: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message) as raised:
        to_lark(Structure(StructureKind.LLGUIDANCE, given, "grammar", ".value"))
    assert raised.value.param == f"grammar.value.grammars{place}"


def test_a_client_cannot_turn_enforcement_off(accepts: Accepts) -> None:
    lark = lark_of(
        StructureKind.JSON_SCHEMA,
        {"type": "integer", "x-guidance": {"lenient": True, "whitespace_flexible": True}},
    )
    assert accepts(lark, "1")
    assert not accepts(lark, " 1")


def test_vllm_serializes_and_validates_the_same_text() -> None:
    guidance = pytest.importorskip("vllm.v1.structured_output.backend_guidance")
    params = pytest.importorskip("vllm.sampling_params")
    kinds = {
        StructureKind.CHOICE: ["::=", "a"],
        StructureKind.GBNF: "root ::= '::=' root | 'x'",
        StructureKind.JSON_SCHEMA: {"const": "start ::= x"},
        StructureKind.REGEX: "::=",
    }
    for kind, source in kinds.items():
        lark = lark_of(kind, source)
        sampling = params.SamplingParams(
            structured_outputs=params.StructuredOutputsParams(grammar=lark)
        )
        guidance.validate_guidance_grammar(sampling)
        assert (
            guidance.serialize_guidance_grammar(guidance.StructuredOutputOptions.GRAMMAR, lark)
            == lark
        )
