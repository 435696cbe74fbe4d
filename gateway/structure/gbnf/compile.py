"""Translate GBNF grammars into Lark."""

from gateway.structure import lark
from gateway.structure.gbnf.lexemes import Lexemes
from gateway.structure.gbnf.parser import parse_gbnf
from gateway.structure.gbnf.regular import bounds, expression, inlined, literal_text
from gateway.structure.gbnf.tree import (
    Alternatives,
    Characters,
    Grammar,
    Node,
    Reference,
    Repetition,
    Sequence,
)


def from_gbnf(source: str) -> str:
    """Return the Lark text equivalent to a GBNF grammar. Raises RefusedError."""
    grammar = inlined(parse_gbnf(source))
    return _Writer(grammar).document()


class _Writer:
    """Writes a grammar as Lark; regular parts become tokens where this is safe."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._lexemes = Lexemes(grammar)
        self._names = {name: f"r{number}" for number, name in enumerate(grammar)}

    def document(self) -> str:
        rules = (f"{self._names[name]}: {self._top(node)}" for name, node in self._grammar.items())
        return lark.document(self._names["root"], *rules)

    def _top(self, node: Node) -> str:
        if isinstance(node, Alternatives) and not self._lexemes.is_token(node):
            return "\n | ".join(self._written(option) for option in node.options)
        return self._written(node)

    def _written(self, node: Node) -> str:
        if self._lexemes.is_token(node):
            return _token(node)
        match node:
            case Reference(rule):
                return self._names[rule]
            case Sequence(parts):
                return " ".join(self._written(part) for part in parts) or '""'
            case Alternatives():
                return f"({self._top(node)})"
            case Repetition(_, _, 0):
                return '""'
            case Repetition(part, least, most):
                return f"({self._written(part)}){bounds(least, most)}"
            case Characters():
                raise AssertionError


def _token(node: Node) -> str:
    letters = literal_text(node)
    # A literal compiles many times faster than an expression of the same length.
    return f"/{expression(node)}/" if letters is None else lark.literal(letters)
