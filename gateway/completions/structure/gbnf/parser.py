"""Parser for GBNF, the grammar language of llama.cpp.

It also accepts what llama.cpp does not: a literal in single quotes, an empty alternative, and an
alternative that starts on a new line.
"""

import re
from typing import Final, NoReturn

from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.gbnf.tree import (
    MAX_CODE_POINT,
    Alternatives,
    Characters,
    Concatenation,
    Grammar,
    Node,
    Reference,
    Repetition,
    character_class,
    text,
)
from gateway.completions.structure.limits import MAX_NESTING, MAX_REPETITIONS

_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANKS_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NUMBER = re.compile(r"[0-9]{1,9}")
_SIMPLE_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9A-Fa-f]+")
_PLAIN_ESCAPES: Final = frozenset("\\\"'[]-^/.()|*+?{}")


class Scanner:
    """A text and the current position in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    @property
    def current(self) -> str:
        """The next character, or an empty string at the end."""
        return self.text[self.position : self.position + 1]

    def take(self, expected: str) -> bool:
        """Consume `expected` if it is next, and return whether it was."""
        if not self.text.startswith(expected, self.position):
            return False
        self.position += len(expected)
        return True

    def expect(self, expected: str) -> None:
        """Consume `expected`, or fail if it is not next."""
        if not self.take(expected):
            self.fail(f"expected '{expected}'")

    def skip_blanks(self, *, over_lines: bool) -> None:
        """Skip blanks and comments, and with `over_lines` line ends too."""
        pattern = _BLANKS_AND_LINES if over_lines else _BLANKS
        if found := pattern.match(self.text, self.position):
            self.position = found.end()

    def name(self) -> str:
        """Read a rule name."""
        return self._match(_NAME, "expected a rule name")

    def peek_name(self) -> bool:
        """Return whether a name is next."""
        return _NAME.match(self.text, self.position) is not None

    def number(self) -> int:
        """Read a number."""
        return int(self._match(_NUMBER, "expected a number"))

    def letter(self) -> str:
        """Read one character of a literal or class, which may be an escape."""
        letter = self.current
        if not letter or letter in "\r\n":
            self.fail("a literal or character class is not closed")
        self.position += 1
        return self._escaped() if letter == "\\" else letter

    def fail(self, message: str) -> NoReturn:
        """Raise RefusedError with line and column."""
        before = self.text[: self.position]
        line = before.count("\n") + 1
        column = self.position - before.rfind("\n")
        raise RefusedError(f"line {line}, column {column}: {message}")

    def _escaped(self) -> str:
        letter = self.current
        self.position += 1
        if letter in _SIMPLE_ESCAPES:
            return _SIMPLE_ESCAPES[letter]
        if letter in _PLAIN_ESCAPES:
            return letter
        if letter in _HEX_DIGITS:
            return self._code_point(_HEX_DIGITS[letter])
        self.position -= 1
        return self.fail("unknown escape")

    def _code_point(self, digits: int) -> str:
        written = self.text[self.position : self.position + digits]
        if len(written) != digits or not _HEX.fullmatch(written):
            self.fail(f"expected {digits} hexadecimal digits")
        value = int(written, 16)
        if value > MAX_CODE_POINT or 0xD800 <= value <= 0xDFFF:
            self.fail(f"{written} is not a Unicode character")
        self.position += digits
        return chr(value)

    def _match(self, pattern: re.Pattern[str], message: str) -> str:
        found = pattern.match(self.text, self.position)
        if found is None:
            self.fail(message)
        self.position = found.end()
        return found.group()


_ANY_CHARACTER = Characters(((0, MAX_CODE_POINT),))
_SIMPLE_REPETITIONS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse_gbnf(source: str) -> Grammar:
    """Return a grammar's rules. Raise RefusedError with line and column if it is invalid."""
    return _Parser(source).grammar()


class _Parser:
    """Recursive-descent parser; each method starts and ends between two tokens."""

    def __init__(self, source: str) -> None:
        self._scanner = Scanner(source)
        self._depth = 0
        self._references: dict[str, int] = {}
        """The first place where each rule is named."""

    def grammar(self) -> Grammar:
        scanner, rules = self._scanner, Grammar()
        scanner.skip_blanks(over_lines=True)
        while scanner.current:
            start = scanner.position
            name, node = self._rule()
            if name in rules:
                scanner.position = start
                scanner.fail(f"rule '{name}' is defined twice")
            rules[name] = node
            scanner.skip_blanks(over_lines=True)
        self._check(rules)
        return rules

    def _check(self, rules: Grammar) -> None:
        if "root" not in rules:
            raise RefusedError("a GBNF grammar must have a rule 'root'")
        for name, position in self._references.items():
            if name not in rules:
                self._scanner.position = position
                self._scanner.fail(f"rule '{name}' is not defined")

    def _rule(self) -> tuple[str, Node]:
        scanner = self._scanner
        name = scanner.name()
        scanner.skip_blanks(over_lines=False)
        scanner.expect("::=")
        scanner.skip_blanks(over_lines=True)
        node = self._alternatives()
        if scanner.current and scanner.current not in "\r\n" and not self._rule_is_next():
            scanner.fail("expected the end of the rule")
        return name, node

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._bar_is_next():
            self._scanner.skip_blanks(over_lines=True)
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alternatives(tuple(options))

    def _bar_is_next(self) -> bool:
        """Read `|`, on this line or at the start of a later one; return whether it was there."""
        before = self._scanner.position
        self._scanner.skip_blanks(over_lines=True)
        if self._scanner.take("|"):
            return True
        self._scanner.position = before
        return False

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while (part := self._item()) is not None:
            parts.append(self._repeated(part))
            self._scanner.skip_blanks(over_lines=self._depth > 0)
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _item(self) -> Node | None:
        scanner = self._scanner
        if scanner.current and scanner.current in "\"'":
            return self._literal(scanner.current)
        if scanner.take("["):
            return self._class()
        if scanner.take("."):
            return _ANY_CHARACTER
        if scanner.take("("):
            return self._group()
        if scanner.peek_name() and not self._rule_is_next():
            start = scanner.position
            name = scanner.name()
            self._references.setdefault(name, start)
            return Reference(name)
        return None

    def _rule_is_next(self) -> bool:
        """Return whether a name followed by `::=` is next, which starts a rule."""
        scanner, before = self._scanner, self._scanner.position
        if not scanner.peek_name():
            return False
        scanner.name()
        scanner.skip_blanks(over_lines=False)
        is_rule = scanner.take("::=")
        scanner.position = before
        return is_rule

    def _literal(self, quote: str) -> Node:
        scanner, letters = self._scanner, []
        scanner.expect(quote)
        while not scanner.take(quote):
            letters.append(scanner.letter())
        return text("".join(letters))

    def _class(self) -> Node:
        scanner = self._scanner
        is_negated = scanner.take("^")
        ranges: list[tuple[int, int]] = []
        while not scanner.take("]"):
            low = scanner.letter()
            has_range = scanner.current == "-" and scanner.text[scanner.position + 1 :][:1] != "]"
            high = scanner.letter() if has_range and scanner.take("-") else low
            if high < low:
                scanner.fail("a character range must be in ascending order")
            ranges.append((ord(low), ord(high)))
        node = character_class(ranges, is_negated=is_negated)
        if not node.ranges:
            scanner.fail("a character class must not be empty")
        return node

    def _group(self) -> Node:
        scanner = self._scanner
        self._depth += 1
        if self._depth > MAX_NESTING:
            scanner.fail(f"groups must not be nested deeper than {MAX_NESTING} levels")
        scanner.skip_blanks(over_lines=True)
        node = self._alternatives()
        scanner.skip_blanks(over_lines=True)
        scanner.expect(")")
        self._depth -= 1
        return node

    def _repeated(self, part: Node) -> Node:
        scanner, times = self._scanner, 0
        scanner.skip_blanks(over_lines=False)
        while scanner.current and scanner.current in "*+?{":
            times += 1
            if times > MAX_NESTING:
                scanner.fail(f"at most {MAX_NESTING} repetition operators may follow one another")
            part = Repetition(part, *self._bounds())
            scanner.skip_blanks(over_lines=False)
        return part

    def _bounds(self) -> tuple[int, int | None]:
        scanner = self._scanner
        sign = scanner.current
        scanner.position += 1
        if sign != "{":
            return _SIMPLE_REPETITIONS[sign]
        scanner.skip_blanks(over_lines=False)
        least = 0 if scanner.current == "," else scanner.number()
        most: int | None = least
        scanner.skip_blanks(over_lines=False)
        if scanner.take(","):
            scanner.skip_blanks(over_lines=False)
            most = None if scanner.current == "}" else scanner.number()
            scanner.skip_blanks(over_lines=False)
        scanner.expect("}")
        if most is not None and most < least:
            scanner.fail("the maximum of a repetition must be at least its minimum")
        if max(least, most or 0) > MAX_REPETITIONS:
            scanner.fail(f"a repetition count must be at most {MAX_REPETITIONS}")
        return least, most
