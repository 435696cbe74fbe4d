"""What a GBNF grammar is parsed into."""

from dataclasses import dataclass

MAX_CODE_POINT = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Characters:
    """One character out of inclusive ranges of code points, sorted and apart from each other."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """Whatever a rule matches."""

    rule: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Parts one behind the other; none match the empty text."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of several."""

    options: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """A part several times."""

    part: "Node"
    least: int
    most: int | None
    """None stands for any number."""


Node = Characters | Reference | Sequence | Alternatives | Repetition

Grammar = dict[str, Node]
"""Rules by name; `root` is where the text starts."""


def character_class(ranges: list[tuple[int, int]], *, is_negated: bool = False) -> Characters:
    """Return a character out of any ranges, or out of none of them."""
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
    """Return a literal as its characters."""
    return Sequence(tuple(Characters(((ord(letter), ord(letter)),)) for letter in value))
