"""Calls of tools: the grammars for them, and reading them."""

import json
import time
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from gateway.completions.structure.constraint import Constraint, added_tokens, to_grammar
from gateway.completions.structure.lark import TokenIds
from gateway.completions.structure.tools import ToolCall, parse_tool_calls
from gateway.dialects.request import Structure, StructureKind, Tool, ToolMode, ToolUse
from tests.support.cases import all_cases

Accepts = Callable[[str, str], bool]

SPELLED_OUT: TokenIds = {}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def use(mode: ToolMode, *, is_strict: bool = True, parameters: Any = CITY) -> ToolUse:
    tools = [Tool("weather", parameters, is_strict), Tool("now", True, is_strict=False)]
    return ToolUse(tools, mode, "weather" if mode is ToolMode.NAMED else None)


def grammar(tool_use: ToolUse, token_ids: TokenIds) -> str:
    return to_grammar(Constraint(None, tool_use, None), token_ids)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


WEATHER = call("weather", '{"city": "Oslo"}')
NOW = call("now", "{}")
WRONG = call("weather", '{"town": 1}')
MORE = call("weather", '{"city": "Oslo", "town": 1}')
NO_ARGUMENTS = call("weather", "{}")
UNKNOWN = call("rain", "{}")


@all_cases(
    ("tool_use", "good", "bad"),
    [
        (use(ToolMode.NAMED), [WEATHER], ["", "Hi", NOW, WRONG, MORE, WEATHER + WEATHER]),
        (use(ToolMode.NAMED, parameters={}), [NO_ARGUMENTS], [WEATHER]),
        (
            use(ToolMode.NAMED, parameters={"$ref": "#/$defs/a", "$defs": {"a": CITY}}),
            [WEATHER],
            [MORE, NO_ARGUMENTS],
        ),
        (use(ToolMode.NAMED, parameters={"additionalProperties": True}), [NO_ARGUMENTS, MORE], []),
        (
            use(ToolMode.REQUIRED),
            [WEATHER, NOW, WEATHER + "\n" + NOW],
            ["", "Hi", WRONG, UNKNOWN, "Hi" + WEATHER],
        ),
        (
            use(ToolMode.AUTO),
            ["", "Hi!\nYou", WEATHER, "Hi\n" + WEATHER + NOW + "so"],
            [WRONG, MORE, UNKNOWN, "Hi<tool_call>x", "a" + WRONG],
        ),
        (use(ToolMode.AUTO, is_strict=False), [MORE, call("weather", '{"a": 1}')], [UNKNOWN]),
    ],
    ids=[
        "named",
        "no properties",
        "reference",
        "open",
        "required",
        "auto",
        "auto not strict",
    ],
)
def test_calls_spelled_out_match(
    accepts: Accepts, tool_use: ToolUse, good: list[str], bad: list[str]
) -> None:
    lark = grammar(tool_use, SPELLED_OUT)
    assert [text for text in good if not accepts(lark, text)] == []
    assert [text for text in bad if accepts(lark, text)] == []


def test_calls_use_the_tokens_that_a_tokenizer_has(
    tokenizer_json: bytes, tokenizer: Tokenizer, accepts_ids: Callable[[str, list[int]], bool]
) -> None:
    tags = added_tokens(tokenizer_json)
    assert tags["<tool_call>"] == tokenizer.token_to_id("<tool_call>")
    for mode, good, bad in (
        (ToolMode.NAMED, [WEATHER, WEATHER.replace("\n", "")], ["Hi", NOW, WRONG]),
        (ToolMode.REQUIRED, [WEATHER + NOW], ["Hi" + WEATHER, WRONG]),
        (ToolMode.AUTO, ["Hi", "Hi" + WEATHER + NOW], ["Hi" + WRONG, UNKNOWN]),
    ):
        lark = grammar(use(mode), tags)
        ids = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in good + bad}
        assert [text for text in good if not accepts_ids(lark, ids[text])] == []
        assert [text for text in bad if accepts_ids(lark, ids[text])] == []


def test_free_text_cannot_spell_out_a_tag_that_is_a_token(
    tokenizer_json: bytes, accepts: Accepts
) -> None:
    lark = grammar(use(ToolMode.AUTO), added_tokens(tokenizer_json))
    assert accepts(lark, "a < b <tool_cal>")
    assert not accepts(lark, WRONG)


@all_cases(
    ("text", "calls"),
    [
        ("no call", []),
        (WEATHER, [ToolCall("weather", '{"city": "Oslo"}')]),
        (f"Let me see. {WEATHER}\n{NOW} Done", [("weather", '{"city": "Oslo"}'), ("now", "{}")]),
        ('<tool_call>{"name": "now"}</tool_call>', [("now", "{}")]),
        (call("now", json.dumps('{"a": 1}')), [("now", '{"a": 1}')]),
        (call("now", '{"a": "</tool_call>"}'), [("now", '{"a": "</tool_call>"}')]),
        (
            call("now", '{"a": "\\"<tool_call></tool_call><tool_call>{"}') + NOW,
            [("now", '{"a": "\\"<tool_call></tool_call><tool_call>{"}'), ("now", "{}")],
        ),
        (WEATHER[:-3], []),
        ("<tool_call>junk</tool_call>" + NOW, [("now", "{}")]),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "a", "arguments": ' + "[" * 5000 + "</tool_call>", []),
    ],
)
def test_calls_are_read_out_of_a_text(text: str, calls: list[Any]) -> None:
    expected = [found if isinstance(found, ToolCall) else ToolCall(*found) for found in calls]
    assert parse_tool_calls(text) == expected


def test_reading_calls_takes_linear_time() -> None:
    start = time.process_time()
    assert parse_tool_calls('<tool_call>{"name": "' * 50_000) == []
    assert parse_tool_calls("<tool_call>" + "</tool_call>" * 100_000) == []
    assert parse_tool_calls('<tool_call>\\"' * 50_000) == []
    assert time.process_time() - start < 2


PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
"""The most of the grammar of Codex's tool."""


def test_text_of_a_tool_matches_its_grammar_as_it_is(
    tokenizer_json: bytes, tokenizer: Tokenizer, accepts_ids: Callable[[str, list[int]], bool]
) -> None:
    added = '*** Begin Patch\n*** Add File: a "b".txt\n+{"é": "\\n"}}\n+\n*** End Patch\n'
    changed = "*** Begin Patch\n*** Update File: a\n@@ def f():\n-\tx\n+}\n*** End Patch"
    for kind, source, good, bad in (
        (StructureKind.LARK, PATCH, [added, changed], ["", "{}", "*** Begin Patch\n", added + "x"]),
        (StructureKind.REGEX, "(?s).*", ["", "}\n", "\n  a", "</tool_call"], []),
        (StructureKind.REGEX, r"^\d+}$", ["12}"], ["12", "}", "12}\n"]),
    ):
        matched = Structure(kind, source, "tools", "[1].format")
        text = Tool("patch", CITY, is_strict=False, grammar=matched)
        for mode in (ToolMode.AUTO, ToolMode.REQUIRED, ToolMode.NAMED):
            tools = [text, Tool("now", True, is_strict=False)]
            name = "patch" if mode is ToolMode.NAMED else None
            lark = grammar(ToolUse(tools, mode, name), added_tokens(tokenizer_json))
            for each in good + bad:
                written = f'<tool_call>\n{{"name": "patch", "arguments": {each}</tool_call>'
                ids = tokenizer.encode(written, add_special_tokens=False).ids
                assert accepts_ids(lark, ids) is (each in good), (mode, each)
