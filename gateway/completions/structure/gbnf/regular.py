"""Find the regular parts of a GBNF grammar and convert them to regular expressions."""

from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.gbnf.tree import (
    Alternatives,
    Characters,
    Concatenation,
    Grammar,
    Node,
    Reference,
    Repetition,
)

_MAX_INLINED_CHARACTERS = 4096
"""Maximum size of a rule's node that is inlined where the rule is named."""
_MAX_RULE_DEPTH = 200


def references(node: Node) -> set[str]:
    """Return the names of the rules that a node references."""
    if isinstance(node, Reference):
        return {node.rule}
    return {name for child in children(node) for name in references(child)}


def children(node: Node) -> tuple[Node, ...]:
    """Return the direct children of a node."""
    match node:
        case Concatenation(parts):
            return parts
        case Alternatives(options):
            return options
        case Repetition(part):
            return (part,)
        case _:
            return ()


def is_regular(node: Node) -> bool:
    """Return whether a node references no rule."""
    if isinstance(node, Reference):
        return False
    # Fast path: most nodes are single characters, and a grammar may have tens of thousands.
    return all(isinstance(child, Characters) or is_regular(child) for child in children(node))


def inlined(grammar: Grammar) -> Grammar:
    """Return a grammar with regular rules of moderate size inlined where they are referenced."""
    return _Inliner(grammar).grammar()


class _Inliner:
    """Resolves rules bottom-up; a recursive rule stays a rule."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._regular: dict[str, Node | None] = {}
        """The nodes that replace finished rules; None for a rule that stays a rule."""
        self._open: set[str] = set()

    def grammar(self) -> Grammar:
        bodies = {name: self._replace(node, 0) for name, node in self._grammar.items()}
        used, pending = {"root"}, ["root"]
        while pending:
            named = references(bodies[pending.pop()]) - used
            used |= named
            pending += named
        return {name: node for name, node in bodies.items() if name in used}

    def _rule(self, name: str, depth: int) -> Node | None:
        if name in self._open:
            return None
        if depth > _MAX_RULE_DEPTH:
            raise RefusedError(f"rules must not be nested deeper than {_MAX_RULE_DEPTH} levels")
        if name not in self._regular:
            self._open.add(name)
            node = self._replace(self._grammar[name], depth + 1)
            self._open.discard(name)
            is_small = is_regular(node) and size(node) <= _MAX_INLINED_CHARACTERS
            self._regular[name] = node if is_small else None
        return self._regular[name]

    def _replace(self, node: Node, depth: int) -> Node:
        match node:
            case Reference(rule):
                return self._rule(rule, depth) or node
            case Concatenation(parts):
                return Concatenation(tuple(self._replace(part, depth) for part in parts))
            case Alternatives(options):
                return Alternatives(tuple(self._replace(option, depth) for option in options))
            case Repetition(part, least, most):
                return Repetition(self._replace(part, depth), least, most)
            case _:
                return node


def size(node: Node) -> int:
    """Return the number of character ranges in a node; repetitions are not expanded."""
    if isinstance(node, Characters):
        return len(node.ranges)
    return 1 + sum(size(child) for child in children(node))


def literal_text(node: Node) -> str | None:
    """Return the only text that a node matches, or None if it may match others."""
    if isinstance(node, Characters):
        low, high = node.ranges[0]
        return chr(low) if len(node.ranges) == 1 and low == high else None
    if not isinstance(node, Concatenation):
        return None
    texts = [literal_text(part) for part in node.parts]
    return None if None in texts else "".join(filter(None, texts))


def expression(node: Node) -> str:
    """Return a regular node in Rust's regular expression syntax."""
    match node:
        case Characters(ranges):
            return _class(ranges)
        case Concatenation(parts):
            return "".join(_grouped(part) for part in parts)
        case Alternatives(options):
            return "|".join(expression(option) for option in options)
        case Repetition(part, least, most):
            return "" if most == 0 else f"{_atom(part)}{bounds(least, most)}"
        case Reference():
            raise AssertionError


def literal_expression(value: str) -> str:
    """Return a literal in Rust's regular expression syntax."""
    return "".join(
        letter if letter.isalnum() else _class(((ord(letter), ord(letter)),)) for letter in value
    )


def bounds(least: int, most: int | None) -> str:
    """Return the repetition operator, which is the same in Lark and in regular expressions."""
    match (least, most):
        case (0, None):
            return "*"
        case (1, None):
            return "+"
        case (0, 1):
            return "?"
        case (_, None):
            return f"{{{least},}}"
        case _:
            return f"{{{least},{most}}}"


def _grouped(node: Node) -> str:
    return f"(?:{expression(node)})" if isinstance(node, Alternatives) else expression(node)


def _atom(node: Node) -> str:
    return expression(node) if isinstance(node, Characters) else f"(?:{expression(node)})"


def _class(ranges: tuple[tuple[int, int], ...]) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and chr(ranges[0][0]).isalnum():
        return chr(ranges[0][0])
    written = (
        _code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in _legal(ranges)
    )
    return f"[{''.join(written)}]"


def _legal(ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Return ranges without surrogates, which no text contains and Rust rejects."""
    legal = []
    for low, high in ranges:
        if low < 0xD800:
            legal.append((low, min(high, 0xD7FF)))
        if high > 0xDFFF:
            legal.append((max(low, 0xE000), high))
    return legal


def _code(code_point: int) -> str:
    letter = chr(code_point)
    return letter if letter.isalnum() and letter.isascii() else f"\\x{{{code_point:x}}}"
