"""A slow and plain recogniser of GBNF, for comparison with the translation."""

from gateway.completions.structure.gbnf.tree import (
    Alternatives,
    Characters,
    Concatenation,
    Grammar,
    Node,
    Reference,
    Repetition,
)


def matches(grammar: Grammar, text: str) -> bool:
    """Return whether a grammar matches a whole text."""
    return len(text) in _Recogniser(grammar, text).ends("root", 0)


class _Recogniser:
    """Grows the set of places where each rule may end from each place, until it is stable."""

    def __init__(self, grammar: Grammar, text: str) -> None:
        self._grammar = grammar
        self._text = text
        self._known: dict[tuple[str, int], frozenset[int]] = {}

    def ends(self, rule: str, place: int) -> frozenset[int]:
        self._known.setdefault((rule, place), frozenset())
        before = None
        while before != self._known:
            before = dict(self._known)
            for name, start in before:
                self._known[name, start] = frozenset(self._ends(self._grammar[name], start))
        return self._known[rule, place]

    def _ends(self, node: Node, place: int) -> set[int]:
        match node:
            case Characters(ranges):
                letter = self._text[place : place + 1]
                fits = letter and any(low <= ord(letter) <= high for low, high in ranges)
                return {place + 1} if fits else set()
            case Reference(rule):
                return set(self._known.setdefault((rule, place), frozenset()))
            case Concatenation(parts):
                places = {place}
                for part in parts:
                    places = {end for start in places for end in self._ends(part, start)}
                return places
            case Alternatives(options):
                return {end for option in options for end in self._ends(option, place)}
            case Repetition(part, least, most):
                return self._repeated(part, least, most, place)

    def _repeated(self, part: Node, least: int, most: int | None, place: int) -> set[int]:
        places, found = {place}, set()
        # More rounds than letters add only empty matches.
        rounds = least + len(self._text) + 1 if most is None else most
        for number in range(rounds + 1):
            if number >= least:
                found |= places
            places = {end for start in places for end in self._ends(part, start)}
        return found
