"""Build Lark text for llguidance."""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from llguidance import regex_to_lark

TokenIds = Mapping[str, int]
"""Token ids, by text, of the added tokens that a tokenizer extracts before it splits the rest."""

HEADER: Final = '%llguidance {"no_forcing": true}\n'
"""First line of every grammar.

With it, vLLM always treats the text as Lark. It also disables forcing: otherwise
llguidance computes at every step which text must come next. That takes seconds for a long literal,
and vLLM does not use the result.
"""
HEADER_LINES: Final = HEADER.count("\n")

JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""JSON is compact or has one space after commas and colons: no endless white space."""


class Part(NamedTuple):
    """A part of a grammar: an expression and the rules that it references."""

    expression: str
    rules: tuple[str, ...] = ()


def document(start: str, *rules: str) -> str:
    """Return a complete grammar that starts at `start`."""
    return "\n".join((f"{HEADER}start: {start}", *rules)) + "\n"


def nested(name: str, grammar: str) -> Part:
    """Return a complete grammar as a part of another one, with its own namespace for rules."""
    return Part(name, (f"{name}: {block(grammar)}",))


def block(grammar: str) -> str:
    """Return a complete grammar as an expression."""
    return f"%lark {{\n{grammar.removeprefix(HEADER)}\n}}"


def mark(text: str, token_ids: TokenIds) -> str:
    """Return a match for a special token, or for its text if the tokenizer has no such token."""
    token_id = token_ids.get(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def literal(text: str) -> str:
    """Return a literal; the empty literal matches only the empty text."""
    return json.dumps(text, ensure_ascii=False)


def regex(expression: str) -> str:
    r"""Return a terminal for an expression in Rust's syntax, where `\d` is an ASCII digit."""
    return f"/{regex_to_lark(expression, 'd')}/"


def json_value(schema: dict[str, Any]) -> str:
    """Return JSON that matches a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS}, ensure_ascii=True)}"
