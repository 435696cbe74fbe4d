"""Syntax tree of a GBNF grammar."""

from dataclasses import dataclass

MAX_CODE_POINT = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Characters:
    """One character from inclusive code point ranges, which are sorted and disjoint."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a rule."""

    rule: str


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Parts in order; an empty sequence matches the empty text."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of several nodes."""

    options: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """A repeated part."""

    part: "Node"
    least: int
    most: int | None
    """None means no upper limit."""


Node = Characters | Reference | Concatenation | Alternatives | Repetition

Grammar = dict[str, Node]
"""Rules by name; the text starts at `root`."""


def character_class(ranges: list[tuple[int, int]], *, is_negated: bool = False) -> Characters:
    """Return one character from any of the ranges or, if negated, from outside all of them."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return Characters(tuple(_complement(merged) if is_negated else merged))


def _complement(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    gaps, free = [], 0
    for low, high in ranges:
        if low > free:
            gaps.append((free, low - 1))
        free = high + 1
    if free <= MAX_CODE_POINT:
        gaps.append((free, MAX_CODE_POINT))
    return gaps


def text(value: str) -> Node:
    """Return a literal as a sequence of characters."""
    return Concatenation(tuple(Characters(((ord(letter), ord(letter)),)) for letter in value))
