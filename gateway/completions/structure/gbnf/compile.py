"""Translate GBNF grammars into Lark."""

from dataclasses import dataclass
from typing import TypeVar

from gateway.completions.structure import lark
from gateway.completions.structure.gbnf.automata import (
    Alphabet,
    Automaton,
    TooLargeError,
    are_in_conflict,
)
from gateway.completions.structure.gbnf.parser import parse_gbnf
from gateway.completions.structure.gbnf.regular import (
    bounds,
    children,
    expression,
    inlined,
    is_regular,
    literal_text,
)
from gateway.completions.structure.gbnf.tree import (
    Alternatives,
    Characters,
    Concatenation,
    Grammar,
    Node,
    Reference,
    Repetition,
)

_Key = TypeVar("_Key")
_MAX_PAIRS = 2000
"""Maximum token pairs to examine in one grammar. Above it, every character is a token."""


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
            case Concatenation(parts):
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


@dataclass(frozen=True, slots=True)
class _Reach:
    """The characters a node may start with, and whether it may be empty."""

    first: int
    is_nullable: bool


class Lexemes:
    """The regular nodes that become tokens, chosen so that none conflict in the lexer."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._alphabet = Alphabet(_classes(grammar))
        self._pairs = 0
        self._split: set[Node] = set()
        while conflicts := self._conflicts():
            self._split |= conflicts

    def is_token(self, node: Node) -> bool:
        """Return whether a node is written as one regular expression."""
        return is_regular(node) and node not in self._split

    def mask(self, node: Characters) -> int:
        """Return a character class as a bit mask."""
        return self._alphabet.mask(node)

    def _conflicts(self) -> set[Node]:
        """Return the tokens that must be split."""
        followers = _Followers(self._grammar, self).of_tokens()
        if len(followers) == 1 and not any(followers.values()):
            return set()  # The only token is the whole text.
        automata, conflicts = {}, set()
        for node in followers:
            try:
                automata[node] = Automaton(node, self._alphabet)
            except TooLargeError:
                conflicts.add(node)
        for node, automaton in automata.items():
            for other, longer in automata.items():
                if isinstance(other, Characters) or {node, other} <= conflicts:
                    continue
                if not automaton.readable(automaton.start) & longer.readable(longer.start):
                    continue
                self._pairs += 1
                if self._pairs > _MAX_PAIRS or are_in_conflict(automaton, longer, followers[node]):
                    conflicts |= {
                        each for each in (node, other) if not isinstance(each, Characters)
                    }
        return conflicts


def _classes(grammar: Grammar) -> list[Characters]:
    found, pending = [], list(grammar.values())
    while pending:
        node = pending.pop()
        if isinstance(node, Characters):
            found.append(node)
        pending += children(node)
    return found


class _Followers:
    """Computes the characters that may follow each token, from FIRST and FOLLOW sets."""

    def __init__(self, grammar: Grammar, lexemes: Lexemes) -> None:
        self._grammar = grammar
        self._lexemes = lexemes
        self._reach = dict.fromkeys(grammar, _Reach(0, is_nullable=False))
        self._rules = dict.fromkeys(grammar, 0)
        self._tokens: dict[Node, int] = {}
        self._changed = False

    def of_tokens(self) -> dict[Node, int]:
        self._changed = True
        while self._changed:
            self._changed = False
            for name, node in self._grammar.items():
                self._note_reach(name, self._reached(node))
        self._changed = True
        while self._changed:
            self._changed = False
            for name, node in self._grammar.items():
                self._follow(node, self._rules[name])
        return self._tokens

    def _note_reach(self, name: str, reach: _Reach) -> None:
        if reach != self._reach[name]:
            self._reach[name] = reach
            self._changed = True

    def _reached(self, node: Node) -> _Reach:
        match node:
            case Characters():
                return _Reach(self._lexemes.mask(node), is_nullable=False)
            case Reference(rule):
                return self._reach[rule]
            case Concatenation(parts):
                return self._reached_in_turn(parts)
            case Alternatives(options):
                each = [self._reached(option) for option in options]
                first = 0
                for reach in each:
                    first |= reach.first
                return _Reach(first, any(reach.is_nullable for reach in each))
            case Repetition(part, least, most):
                if most == 0:
                    return _Reach(0, is_nullable=True)
                reach = self._reached(part)
                return _Reach(reach.first, reach.is_nullable or least == 0)

    def _reached_in_turn(self, parts: tuple[Node, ...]) -> _Reach:
        first = 0
        for part in parts:
            reach = self._reached(part)
            first |= reach.first
            if not reach.is_nullable:
                return _Reach(first, is_nullable=False)
        return _Reach(first, is_nullable=True)

    def _follow(self, node: Node, after: int) -> None:
        if self._lexemes.is_token(node):
            self._note(self._tokens, node, after)
            return
        match node:
            case Reference(rule):
                self._note(self._rules, rule, after)
            case Concatenation(parts):
                for part in reversed(parts):
                    self._follow(part, after)
                    reach = self._reached(part)
                    after = reach.first | (after if reach.is_nullable else 0)
            case Alternatives(options):
                for option in options:
                    self._follow(option, after)
            case Repetition(part, _, most):
                again = self._reached(part).first if most != 1 else 0
                self._follow(part, after | again)
            case Characters():
                raise AssertionError

    def _note(self, followers: dict[_Key, int], key: _Key, mask: int) -> None:
        known = followers.get(key)
        if known is None or mask | known != known:
            followers[key] = mask | (known or 0)
            self._changed = True
