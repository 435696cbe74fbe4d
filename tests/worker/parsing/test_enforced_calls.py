"""Calls that a grammar enforces in a model's own format: vLLM's parsers read them."""

import json
import random
from functools import cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from llguidance import LLMatcher, LLTokenizer

from contract.grammar import ENFORCED_PARSERS, HERMES_PARSERS
from contract.messages import Parsing
from gateway.completions.structure.constraint import Constraint, added_tokens, to_grammar
from gateway.completions.structure.formats import FORMATS
from gateway.completions.structure.schemas import Schemas
from gateway.dialects.request import Tool, ToolMode, ToolUse
from tests.worker.parsing.cases import (
    CALL_BEGIN,
    CALL_END,
    CALLS,
    CASES,
    THINK,
    TOOLS,
    make_tokenizer,
    read_whole,
    tokens_of,
)
from worker.engine.vllm.parsers import VllmParsers

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENIZER = make_tokenizer()
FILE = TOKENIZER.to_str().encode()
END = TOKENIZER.encode("</s>").ids[0]
OTHERS = sorted(ENFORCED_PARSERS - HERMES_PARSERS)
SHORT = {"type": "string", "maxLength": 5}
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": SHORT,
        "kind": {"enum": ["a", "b\nc"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "ratio": {"type": ["boolean", "null"]},
        "note": {"anyOf": [SHORT, {"type": "null"}]},
        "place": {"$ref": "#/$defs/Place"},
        "tag": {"const": 5},
        "any": {"enum": ["x", 7, None]},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "place"],
    "$defs": {
        "Place": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    },
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


@cache
def ll_tokenizer() -> LLTokenizer:
    return LLTokenizer(FILE.decode(), eos_token=END)


def use(mode: ToolMode, *, is_parallel: bool = True) -> ToolUse:
    tools = [Tool("act", ARGUMENTS, is_strict=True), Tool("now", NOTHING, is_strict=True)]
    return ToolUse(tools, mode, "now" if mode is ToolMode.NAMED else None, is_parallel=is_parallel)


def grammar(name: str, tool_use: ToolUse, schemas: Schemas | None = None) -> str:
    return to_grammar(
        Constraint(None, tool_use, None, call_format=name), added_tokens(FILE), schemas
    )


def accepts(lark: str, text: str) -> bool:
    matcher = LLMatcher(ll_tokenizer(), LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = [each for each, _ in tokens_of(TOKENIZER, text)]
    ids = ids[:-1] if ids and ids[-1] == END else ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(lark: str, seed: int) -> str:
    """Return a text of random tokens that the grammar permits, ended as soon as possible."""
    choice = random.Random(seed)
    matcher = LLMatcher(ll_tokenizer(), LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    while not matcher.is_accepting() and len(ids) < 600:
        mask = matcher.compute_bitmask()
        size = TOKENIZER.get_vocab_size()
        permitted = [each for each in range(size) if mask[each // 8] >> each % 8 & 1]
        ids.append(choice.choice(permitted))
        matcher.consume_token(ids[-1])
    assert matcher.is_accepting(), TOKENIZER.decode(ids, skip_special_tokens=False)[-200:]
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def calls_in(name: str, text: str) -> list[tuple[str, str]]:
    described = [
        {"type": "function", "function": {"name": each.name, "parameters": each.parameters}}
        for each in use(ToolMode.AUTO).tools
    ]
    make = VllmParsers(name, "", FILE).prepare(Parsing(tools=described), [])
    assert make is not None
    return read_whole(make(), tokens_of(TOKENIZER, text)).calls


def test_every_enforced_parser_has_a_format() -> None:
    assert FORMATS.keys() == ENFORCED_PARSERS


@pytest.mark.parametrize("name", OTHERS)
def test_parser_reads_what_the_grammar_permits(name: str) -> None:
    seen = set()
    for seed in range(12):
        mode = ToolMode.NAMED if seed % 4 == 3 else ToolMode.REQUIRED
        text = written(grammar(name, use(mode)), seed)
        calls = calls_in(name, text)
        form = FORMATS[name]
        heads = [f"{form.before}{each}{form.between}" for each in ("act", "now")]
        assert len(calls) == sum(map(text.count, heads)) > 0, (text, calls)
        for function, arguments in calls:
            seen.add(function)
            schema = ARGUMENTS if function == "act" else {**NOTHING, "additionalProperties": False}
            jsonschema.validate(json.loads(arguments), schema)
    assert seen == {"act", "now"}


@pytest.mark.parametrize("name", OTHERS)
def test_several_calls_and_text_are_permitted_as_the_model_writes_them(name: str) -> None:
    case = next(each for each in CASES if each.tool == name.replace("llama4", "llama3"))
    text = case.text.removeprefix(THINK).strip()
    if name == "deepseek_v3":
        text = text.replace(f"{CALL_END}{CALL_BEGIN}", f"{CALL_END}\n{CALL_BEGIN}")
    described: Any = TOOLS
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in described}
    tools = [Tool(each, schema, is_strict=True) for each, schema in schemas.items()]
    free = grammar(name, ToolUse(tools, ToolMode.AUTO))
    assert accepts(free, text)
    assert accepts(free, "Hi!")
    assert not accepts(free, text.replace(CALLS[0][0], "other"))
    assert not accepts(grammar(name, ToolUse(tools, ToolMode.AUTO, is_parallel=False)), text)
    assert not accepts(grammar(name, ToolUse(tools, ToolMode.REQUIRED)), "Hi!")


def test_elements_name_what_they_cannot_enforce_even_if_strict() -> None:
    texts = {f"t{length}": {"type": "string", "maxLength": length} for length in range(12)}
    schema = {
        "type": "object",
        "properties": {**texts, "a b": {"type": "string", "pattern": "^x$", "format": "date"}},
    }
    union = {"anyOf": [schema, NOTHING]}
    places = [f"tools[{index}].parameters" for index in range(2)]
    tools = [
        Tool(f"f{index}", each, is_strict=True, place=place)
        for index, (each, place) in enumerate(zip((schema, union), places, strict=True))
    ]
    schemas = Schemas()
    lark = grammar("qwen3_coder", ToolUse(tools, ToolMode.REQUIRED), schemas)
    of_text = f"{places[0]}.properties.*"
    assert sorted(schemas.unenforced) == [f"{of_text}.format", f"{of_text}.pattern", places[1]]
    call = "<tool_call>\n<function=f0>\n{}</function>\n</tool_call>"
    element = "<parameter=t2>\n{}\n</parameter>\n"
    assert accepts(lark, call.format(element.format("ab")))
    assert not accepts(lark, call.format(element.format("abc")))
