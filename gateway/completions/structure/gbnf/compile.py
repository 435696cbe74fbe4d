"""Translate GBNF grammars into Lark.

llguidance's lexer takes the longest token that the grammar allows and never backtracks. With a
grammar such as "letters, then an x", it never reaches the x. Two such tokens are in conflict, which
automata of the regular parts show, and must be split.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from gateway.completions.structure import lark
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

MAX_POSITIONS = 600
"""Larger automata are not examined."""
_MAX_STEPS = 4000

States = frozenset[int]


class TooLargeError(Exception):
    """An automaton has too many states to be examined."""


class Alphabet:
    """Splits Unicode into the fewest sets that a grammar distinguishes; bit masks select sets."""

    def __init__(self, classes: Iterable[Characters]) -> None:
        edges = {edge for item in classes for low, high in item.ranges for edge in (low, high + 1)}
        self._index = {edge: index for index, edge in enumerate(sorted(edges))}

    def mask(self, characters: Characters) -> int:
        """Return the sets that make up a character class."""
        mask = 0
        for low, high in characters.ranges:
            first, last = self._index[low], self._index[high + 1]
            mask |= (1 << last) - (1 << first)
        return mask


class Automaton:
    """A nondeterministic automaton for one regular node."""

    def __init__(self, node: Node, alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._jumps: list[list[int]] = []
        self._moves: list[tuple[int, int] | None] = []
        """For each state, the characters it reads and the states they lead to."""
        start, self._end = self._build(node)
        self.start = self._closed({start})
        self.after = cache(self._after)

    def accepts(self, states: States) -> bool:
        """Return whether the text read so far may be complete."""
        return self._end in states

    def readable(self, states: States) -> int:
        """Return the characters that may come next."""
        mask = 0
        for state in states:
            if move := self._moves[state]:
                mask |= move[0]
        return mask

    def _after(self, states: States, letter: int) -> States:
        moves = (self._moves[state] for state in states)
        return self._closed({move[1] for move in moves if move and move[0] & letter})

    def _state(self) -> int:
        if len(self._moves) >= MAX_POSITIONS:
            raise TooLargeError
        self._jumps.append([])
        self._moves.append(None)
        return len(self._moves) - 1

    def _build(self, node: Node) -> tuple[int, int]:
        start, end = self._state(), self._state()
        match node:
            case Characters():
                self._moves[start] = (self._alphabet.mask(node), end)
            case Concatenation(parts):
                self._chain(start, end, parts)
            case Alternatives(options):
                for option in options:
                    self._chain(start, end, (option,))
            case Repetition():
                self._repeat(start, end, node)
            case _:
                raise AssertionError
        return start, end

    def _chain(self, start: int, end: int, parts: tuple[Node, ...]) -> None:
        for part in parts:
            first, last = self._build(part)
            self._jumps[start].append(first)
            start = last
        self._jumps[start].append(end)

    def _repeat(self, start: int, end: int, node: Repetition) -> None:
        copies = max(node.least, 1) if node.most is None else node.most
        for copy in range(copies):
            if copy >= node.least:
                self._jumps[start].append(end)
            first, last = self._build(node.part)
            self._jumps[start].append(first)
            if node.most is None and copy == copies - 1:
                self._jumps[last].append(first)
            start = last
        self._jumps[start].append(end)

    def _closed(self, states: set[int]) -> States:
        pending = list(states)
        while pending:
            for target in self._jumps[pending.pop()]:
                if target not in states:
                    states.add(target)
                    pending.append(target)
        return frozenset(states)


def are_in_conflict(shorter: Automaton, longer: Automaton, followers: int) -> bool:
    """Return whether the lexer may continue in `longer` where `shorter` should end.

    `followers` are the characters that may follow `shorter`. If the check takes too long, the
    result is True.
    """
    pair = (shorter.start, longer.start)
    seen, pending, is_first = {pair}, [pair], True
    while pending:
        left, right = pending.pop()
        if not is_first and shorter.accepts(left) and longer.readable(right) & followers:
            return True
        is_first = False
        if len(seen) > _MAX_STEPS:
            return True
        for letter in _bits(shorter.readable(left) & longer.readable(right)):
            pair = (shorter.after(left, letter), longer.after(right, letter))
            if pair not in seen:
                seen.add(pair)
                pending.append(pair)
    return False


def _bits(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest


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
                if (reach := self._reached(node)) != self._reach[name]:
                    self._reach[name], self._changed = reach, True
        self._changed = True
        while self._changed:
            self._changed = False
            for name, node in self._grammar.items():
                self._follow(node, self._rules[name])
        return self._tokens

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
