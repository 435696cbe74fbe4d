"""Schemas of published tools: the rest is enforced, or a strict tool is rejected with the path."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.completions.structure import lark
from gateway.completions.structure.constraint import Constraint
from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.sandbox import messages
from gateway.completions.structure.sandbox.messages import CompileTask, Tokenizer, Verdict
from gateway.completions.structure.sandbox.pool import SandboxSettings
from gateway.completions.structure.sandbox.program import Compiler
from gateway.completions.structure.schemas import Schemas
from gateway.dialects.request import Structure, StructureKind, Tool, ToolMode, ToolUse
from tests.gateway.completions.structure.conftest import EOS_ID
from tests.gateway.completions.structure.published_tools import PUBLISHED, STRING, listed, of
from tests.support.cases import all_cases

Compile = Callable[[Constraint], Verdict]
Accepts = Callable[[str, str], bool]

LOOK_AHEAD = {**STRING, "pattern": "^(?!ab)c"}


@pytest.fixture(scope="module")
def compiled(tokenizer_json: bytes) -> Compile:
    settings = SandboxSettings()
    compiler = Compiler(cpu_seconds=60, most_compile_seconds=settings.compile_seconds)
    compiler.run(Tokenizer("demo", tokenizer_json, [EOS_ID], 2048))

    def run(constraint: Constraint) -> Verdict:
        return compiler.run(CompileTask("demo", messages.encode(constraint)))

    return run


def forced(*tools: tuple[Any, bool]) -> Constraint:
    """Return a forced call of one of some tools, given by their schemas and whether strict."""
    listed_tools = [
        Tool(f"f{index}", schema, is_strict, f"tools[{index}].parameters")
        for index, (schema, is_strict) in enumerate(tools)
    ]
    return Constraint(None, ToolUse(listed_tools, ToolMode.REQUIRED), None)


def test_published_tool_is_enforced_or_rejected_with_its_path(compiled: Compile) -> None:
    assert len(PUBLISHED) >= 40
    for name, (schema, paths) in PUBLISHED.items():
        places = [f"tools[1].parameters{path}" for path in paths]
        lenient = compiled(forced((of(x=STRING), True), (schema, False)))
        assert lenient.grammar, (name, lenient)
        assert sorted(lenient.unenforced) == sorted(places), name
        strict = compiled(forced((of(x=STRING), True), (schema, True)))
        assert bool(strict.grammar) is not bool(places), (name, strict)
        assert strict.param in (places or [""]), (name, strict)
        keyword = strict.param.rpartition(".")[2]
        assert keyword in strict.refusal or "look-around" in strict.refusal, (name, strict)


def test_tools_of_a_whole_agent_are_forced(compiled: Compile) -> None:
    schemas = [schema for schema, _ in PUBLISHED.values()] * 2
    described = [{**schema, "description": "d" * 3200} for schema in schemas[:60]]
    assert len(json.dumps(described)) > 200_000
    verdict = compiled(forced(*((schema, False) for schema in described)))
    assert verdict.grammar, verdict
    assert all(path.count(".") >= 2 for path in verdict.unenforced), verdict.unenforced


@all_cases(
    ("schema", "good", "bad"),
    [
        # What is left out of a closed object does not close it against what the part names.
        (
            {**of("a", a=STRING), "if": {"required": ["a"]}, "then": of("b", b=STRING)},
            ['{"a":"x"}', '{"a":"x","b":1}'],
            ["{}", '{"a":"x","c":1}'],
        ),
        (
            {"type": "object", "patternProperties": {"(?=ab)b": {}}, "additionalProperties": False},
            ['{"b":1}'],
            ["1"],
        ),
        ({"oneOf": [STRING, {"minLength": 1, **STRING}]}, ['""'], ["1"]),
        ({"type": ["string", "x"], "maxLength": 1}, ['"a"'], ['"ab"']),
        ({"enum": [], "type": "integer"}, ["1"], ['"a"']),
        (listed({"$ref": "#/$defs/x"}, minItems=1), ["[1]"], ["[]"]),
        ({"properties": {"a": 1}, "type": "object"}, ['{"a":1}'], ['{"b":1}']),
    ],
)
def test_rest_of_a_lenient_schema_is_enforced(
    compiled: Compile, accepts: Accepts, schema: Any, good: list[str], bad: list[str]
) -> None:
    structure = Structure(StructureKind.JSON_SCHEMA, schema, "response_format", is_strict=False)
    verdict = compiled(Constraint(structure, None, None))
    assert verdict.unenforced, verdict
    assert [text for text in good if not accepts(verdict.grammar, text)] == []
    assert [text for text in bad if accepts(verdict.grammar, text)] == []


def test_all_lenient_schemas_are_left_out_if_they_are_too_complex_together(
    compiled: Compile,
) -> None:
    texts = {f"p{index}": [f"{index}-{n:0>99}" for n in range(100)] for index in range(30)}
    huge = of(**{name: {"enum": enum} for name, enum in texts.items()})
    verdict = compiled(forced((huge, False), (huge, False), (of("x", x=STRING), True)))
    assert verdict.unenforced == ["tools[0].parameters", "tools[1].parameters"]
    assert "x" in verdict.grammar


NODE = of("next", next={"$ref": "#/$defs/a"})
LIST = listed({"$ref": "#/$defs/a"}, minItems=1)


@all_cases(
    "definition",
    [
        {"$ref": "#/$defs/a"},
        NODE,
        LIST,
        {"allOf": [{"$ref": "#/$defs/a"}, NODE]},
        {"anyOf": [NODE, LIST]},
        {**NODE, "properties": {}, "additionalProperties": {"$ref": "#/$defs/a"}},
    ],
)
def test_endless_schema_is_rejected_even_if_lenient(compiled: Compile, definition: Any) -> None:
    schema = {"$defs": {"a": definition}, **of(x={"$ref": "#/$defs/a"})}
    verdict = compiled(forced((schema, False)))
    assert verdict.param == "tools[0].parameters.$defs.a"
    assert "requires itself without an end" in verdict.refusal


@all_cases(
    "schema",
    [
        {"$defs": {"a": {"anyOf": [NODE, {"type": "null"}]}}, **of(x={"$ref": "#/$defs/a"})},
        of(next={"$ref": "#"}),
        {"$defs": {"a": listed({"$ref": "#/$defs/a"})}, **of(x={"$ref": "#/$defs/a"})},
        {"$defs": {"a": {**NODE, "type": ["object", "null"]}}, **of(x={"$ref": "#/$defs/a"})},
    ],
)
def test_recursion_with_an_end_is_enforced(compiled: Compile, schema: Any) -> None:
    assert compiled(forced((schema, True))).grammar


def in_schema(pattern: str) -> str:
    return lark.document(Schemas().json({**STRING, "pattern": pattern}, "json_schema"))


@all_cases(
    ("pattern", "good", "bad"),
    [
        (r"^(?!-)[a-z-]+$", ["a", "a-"], ["-", "-a", ""]),
        (r"^(?!a|b)[a-d]{1,2}$", ["c", "ca"], ["a", "ac", "ccc"]),
        (r"^(?![0-9])\w*$", ["", "a1"], ["1", "1a", "-"]),
        (r"^(?=[a-c]).{2}$", ["ax"], ["xa", "a"]),
        (r"x(?!\d)[0-9a]y", ["xay", "-xay-"], ["x1y"]),
        (r"\A\d{2}\Z", ["12"], ["1", "123", "١٢"]),
        (r"^\p{Lu}\p{L}*$", ["É", "Éa"], ["a", "1"]),
        (r"^[[\]&&~~]$", ["[", "]", "&", "~"], ["a"]),
        (r"^[+--]$", [",", "-"], ["."]),
        (r"^[^]{1}{a}$", ["x{a}"], ["{a}"]),
        ("^\\ud83d\\ude00\\u00e9\\x41$", ["😀éA"], ["é"]),
        (r"^\cJ|\/$", ["/"], ["j"]),
    ],
)
def test_pattern_is_translated(
    accepts: Accepts, pattern: str, good: list[str], bad: list[str]
) -> None:
    grammar = in_schema(pattern)
    assert [
        text for text in good if not accepts(grammar, json.dumps(text, ensure_ascii=False))
    ] == []
    assert [text for text in bad if accepts(grammar, json.dumps(text, ensure_ascii=False))] == []


@all_cases(
    ("pattern", "reason"),
    [
        (r"(?<=a)b", "look-around"),
        (r"(?!ab)c", "look-around"),
        (r"(?!a)[a-z]*b", "look-around"),
        (r"(?!a)(b)", "look-around"),
        (r"(?!a", "look-around"),
        (r"(a)\1", "backreferences"),
        (r"(?<n>a)\k<n>", "backreferences"),
        (r"\bfoo", "word boundary"),
    ],
)
def test_pattern_without_an_equivalent_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason) as raised:
        in_schema(pattern)
    assert raised.value.param == "json_schema.pattern"
