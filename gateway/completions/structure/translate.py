"""Translate every kind of structure into Lark."""

import re
from typing import Any, Literal

from gateway.completions.structure import lark
from gateway.completions.structure.clients_lark import from_lark, from_llguidance
from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.gbnf.compile import from_gbnf
from gateway.completions.structure.gbnf.regular import literal_expression
from gateway.completions.structure.limits import MAX_CHOICE_CHARACTERS, MAX_CHOICES
from gateway.completions.structure.patterns import LOOKS_AROUND, translated
from gateway.completions.structure.schemas import Schemas
from gateway.dialects.request import Structure, StructureKind

_PlainKind = Literal[
    StructureKind.JSON_OBJECT,
    StructureKind.REGEX,
    StructureKind.CHOICE,
]

_REFERS_BACK = re.compile(r"\\[1-9]|\\k<|\(\?P=")


def to_lark(structure: Structure, schemas: Schemas | None = None) -> str:
    """Return one Lark grammar for llguidance that matches the structure.

    `schemas` translates its schema. Raises RefusedError. The grammar is not compiled yet and may
    still be invalid or too large.
    """
    match structure.kind:
        case StructureKind.GBNF:
            return from_gbnf(_text(structure.source))
        case StructureKind.LARK:
            return from_lark(_text(structure.source))
        case StructureKind.LLGUIDANCE:
            return from_llguidance(structure.source, structure.place)
        case StructureKind.JSON_SCHEMA:
            schemas = schemas or Schemas()
            source, place = structure.source, structure.place
            return lark.document(schemas.json(source, place, is_strict=structure.is_strict))
        case _:
            return lark.document(_start(structure.kind, structure.source))


def _start(kind: _PlainKind, source: Any) -> str:
    match kind:
        case StructureKind.JSON_OBJECT:
            return lark.json_value({"type": "object"})
        case StructureKind.REGEX:
            return regex_terminal(_text(source))
        case StructureKind.CHOICE:
            return _choice(source)


def _text(source: object) -> str:
    if not isinstance(source, str) or not source:
        raise RefusedError("a non-empty string is expected")
    return source


def _choice(source: object) -> str:
    if not isinstance(source, list) or not all(isinstance(choice, str) for choice in source):
        raise RefusedError("a list of strings is expected")
    if not 1 <= len(source) <= MAX_CHOICES:
        raise RefusedError(f"there must be 1 to {MAX_CHOICES} choices. Given: {len(source)}")
    longest = max(map(len, source))
    if longest > MAX_CHOICE_CHARACTERS:
        raise RefusedError(
            f"a choice must not be longer than {MAX_CHOICE_CHARACTERS} characters. Given: {longest}"
        )
    # One expression, because each alternative of the grammar would add cost at every step.
    return f"/{'|'.join(map(literal_expression, source))}/" if any(source) else lark.literal("")


def regex_terminal(expression: str) -> str:
    """Return Lark for a text that an expression in Rust's syntax matches completely.

    Anchors at both ends are redundant and are dropped.
    """
    if "\0" in expression:
        raise RefusedError("a regular expression must not contain a NUL character")
    plain = _without_escaped_backslashes(expression)
    if LOOKS_AROUND.search(plain):
        expression = translated(expression)
    if _REFERS_BACK.search(plain):
        raise RefusedError("a regular expression must not use backreferences")
    return lark.regex(_without_anchors(expression))


def _without_escaped_backslashes(expression: str) -> str:
    return expression.replace("\\\\", "  ")


def _without_anchors(expression: str) -> str:
    expression = expression.removeprefix("^").removeprefix(r"\A")
    plain = _without_escaped_backslashes(expression)
    if plain.endswith((r"\z", r"\Z")):
        return expression[:-2]
    if plain.endswith("$") and not plain.endswith(r"\$"):
        return expression[:-1]
    return expression
