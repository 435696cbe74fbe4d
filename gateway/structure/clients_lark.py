"""Client grammars in llguidance's own languages: Lark and JSON."""

import json
import re
from typing import Any

from gateway.structure import lark
from gateway.structure.errors import RefusedError
from gateway.structure.schemas import json_from_schema

_OPTIONS_LINE = re.compile(r"^\s*%llguidance\s*\{[^\n]*\}[ \t]*$", re.MULTILINE)
_START = re.compile(r"^\s*\??start\s*(?:\[[^\]\n]*\]\s*)?:", re.MULTILINE)


def from_lark(source: str) -> str:
    """Return a client's Lark grammar with the gateway's options instead of the client's."""
    if not _START.search(source):
        raise RefusedError("a Lark grammar must have a rule 'start'")
    return lark.HEADER + _OPTIONS_LINE.sub("", source)


def from_llguidance(source: Any) -> str:
    """Return Lark for llguidance's JSON, or for a string that is already Lark.

    Only one grammar is accepted: a Lark grammar can embed others with `%json` and `%lark`.
    """
    if isinstance(source, str):
        if not source.lstrip().startswith("{"):
            return from_lark(source)
        source = _decoded(source)
    grammars = source.get("grammars") if isinstance(source, dict) else None
    if not isinstance(grammars, list) or len(grammars) != 1 or not isinstance(grammars[0], dict):
        raise RefusedError("'grammars' must be a list of exactly one object")
    return _from_grammar(grammars[0])


def _decoded(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        raise RefusedError("the grammar begins with '{' but is not valid JSON") from None


def _from_grammar(grammar: dict[str, Any]) -> str:
    if isinstance(text := grammar.get("lark_grammar"), str):
        return from_lark(text)
    if "json_schema" in grammar:
        return lark.document(json_from_schema(grammar["json_schema"]))
    raise RefusedError("a grammar must have 'lark_grammar' (a string) or 'json_schema'")
