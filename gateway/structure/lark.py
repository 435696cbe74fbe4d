"""Pieces of Lark text as llguidance reads it."""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from llguidance import regex_to_lark

TokenIds = Mapping[str, int]
"""Ids of the tokens that a tokenizer takes out of a text before it splits the rest, by what they say."""

HEADER: Final = '%llguidance {"no_forcing": true}\n'
"""First line of every grammar.

It makes vLLM take the text for Lark whatever else is in it. Without forcing, llguidance does not work out
in every step which text must come next, which takes seconds for a long literal and has no use in vLLM.
"""
HEADER_LINES: Final = HEADER.count("\n")

JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""JSON is compact, or has one space behind commas and colons: a model cannot write white space for ever."""


class Part(NamedTuple):
    """A part of a grammar: an expression, and the rules that it refers to."""

    expression: str
    rules: tuple[str, ...] = ()


def document(start: str, *rules: str) -> str:
    """Return a whole grammar whose text is `start`."""
    return "\n".join((f"{HEADER}start: {start}", *rules)) + "\n"


def nested(name: str, grammar: str) -> Part:
    """Return a whole grammar as a part of another, in which its rules have names of their own."""
    return Part(name, (f"{name}: %lark {{\n{grammar.removeprefix(HEADER)}\n}}",))


def mark(text: str, token_ids: TokenIds) -> str:
    """Return what matches a token, or its text where the tokenizer spells it out."""
    token_id = token_ids.get(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def literal(text: str) -> str:
    """Return a literal; the empty one matches nothing but the empty text."""
    return json.dumps(text, ensure_ascii=False)


def regex(expression: str) -> str:
    r"""Return a terminal from an expression in Rust's syntax, in which `\d` is an ASCII digit."""
    return f"/{regex_to_lark(expression, 'd')}/"


def json_value(schema: dict[str, Any]) -> str:
    """Return JSON that matches a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS}, ensure_ascii=True)}"
