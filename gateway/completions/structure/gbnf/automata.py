"""Automata of regular GBNF parts, used to find lexer conflicts.

llguidance's lexer takes the longest token that the grammar allows and never backtracks. With a
grammar such as "letters, then an x", it never reaches the x. Two such tokens are in conflict and
must be split.
"""

from collections.abc import Iterable
from functools import cache

from gateway.completions.structure.gbnf.tree import (
    Alternatives,
    Characters,
    Concatenation,
    Node,
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
