"""Scanner that reads a GBNF grammar character by character."""

import re
from typing import Final, NoReturn

from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.gbnf.tree import MAX_CODE_POINT

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
