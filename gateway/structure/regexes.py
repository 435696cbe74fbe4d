"""Regular expressions in Rust's syntax; they must match the whole text."""

import re

from gateway.structure import lark
from gateway.structure.errors import RefusedError

_LOOKS_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")
_REFERS_BACK = re.compile(r"\\[1-9]|\\k<|\(\?P=")


def regex_terminal(expression: str) -> str:
    """Return Lark for a text that an expression matches completely.

    Anchors at both ends are redundant and are dropped.
    """
    if "\0" in expression:
        raise RefusedError("a regular expression must not contain a NUL character")
    plain = _without_escaped_backslashes(expression)
    if _LOOKS_AROUND.search(plain):
        raise RefusedError("a regular expression must not use look-around")
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
