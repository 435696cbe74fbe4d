"""Parser of Hermes tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

It returns what vLLM's parser `hermes` returns for one token at a time, but takes constant time per
token however long the call is. Like vLLM, it returns arguments verbatim, so that the arguments of
an invalid call are invalid. Unlike vLLM, it returns all text that is no call as content: what has
no name of a call between the marks, and text after calls. A mark inside a string of valid JSON does
not end a call, and a call without an end mark ends before the next call.

The only argument of some tools is a text that the model may write as it is, up to the end mark:
`"arguments": ` and the text. It becomes the JSON that the model could have written.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from common.not_none import not_none
from contract.messages import TEXT_ARGUMENT, CallPiece

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"

_MARKS = re.compile(f"{CALL_START}|{CALL_END}")
_STRUCTURE = re.compile(r'["\\{}\[\]]')
_CLOSING = {"{": "}", "[": "]"}


class _Pattern(NamedTuple):
    """A pattern to find in growing text."""

    whole: re.Pattern[str]
    begun: re.Pattern[str]
    """Matches an end of the text that may become a match."""
    mark: str
    """The beginning of each match."""


_NAME = _Pattern(
    re.compile(r'"name"\s*:\s*"([^"]+)"'),
    re.compile(r'"name"\s*(?::\s*(?:"[^"]*)?)?\Z'),
    '"name"',
)
_ARGUMENTS = _Pattern(
    re.compile(r'"arguments"\s*:\s*'), re.compile(r'"arguments"\s*(?::\s*)?\Z'), '"arguments"'
)
_TEXT_OPENING = f'{{"{TEXT_ARGUMENT}": "'
_JSON_BEGUN = _TEXT_OPENING.partition(":")[0]
"""How a text that is written as JSON begins."""


class HermesCalls:
    """Finds the calls in one response; `text_tools` are the tools whose argument is a text."""

    __slots__ = ("_blank", "_call", "_calls", "_held", "_text_tools")

    def __init__(self, text_tools: Iterable[str] = ()) -> None:
        self._text_tools = frozenset(text_tools)
        self._calls = 0
        self._held = ""
        """The end of the text outside of calls, which may begin a call's mark."""
        self._blank = ""
        """White space after a call, which is content only if text follows."""
        self._call: _Call | None = None

    def feed(self, text: str) -> tuple[str, list[CallPiece]]:
        """Parse text. Return the content and the additions to calls."""
        content, pieces = "", list[CallPiece]()
        while text:
            if self._call is None:
                outside, is_call, text = self._leave_content(text)
                content += self._content(outside)
                if is_call:
                    self._call = _Call(self._calls, self._text_tools)
            else:
                rest = self._call.add(text)
                pieces += self._call.take()
                if rest is None:
                    break
                content += self._end_call()
                text = rest
        return content, pieces

    def flush(self) -> str:
        """Return held-back content at the end of the response."""
        return self._content(self._held) if self._call is None else self._end_call()

    def _end_call(self) -> str:
        """Return the text that looked like a call but is none."""
        call, self._call = not_none(self._call), None
        if not call.is_named:
            return self._content(call.written)
        self._calls += 1
        self._blank = ""
        return ""

    def _content(self, text: str) -> str:
        """Return the content that text outside of calls makes."""
        if not self._calls:
            return text
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        return shown

    def _leave_content(self, text: str) -> tuple[str, bool, str]:
        """Return the text before a call, whether a call begins, and the text after its mark."""
        text, self._held = self._held + text, ""
        before, mark, after = text.partition(CALL_START)
        if mark:
            return before, True, after
        begun = _begun(text, CALL_START)
        if begun:
            text, self._held = text[:-begun], text[-begun:]
        return text, False, ""


@dataclass(eq=False, slots=True)
class _Search:
    """Searches for a pattern in growing text without repeating earlier work."""

    _pattern: _Pattern
    _searched: int = 0

    def find(self, text: str, end: int, after: int = 0) -> re.Match[str] | None:
        """Return the first match before `end` that does not begin before `after`."""
        pattern, self._searched = self._pattern, max(self._searched, after)
        found = pattern.whole.search(text, self._searched, end)
        if found is None:
            begun = pattern.begun.search(text, self._searched, end)
            searched = end - len(pattern.mark) + 1 if begun is None else begun.start()
            self._searched = max(searched, self._searched)
        return found


@dataclass(eq=False, slots=True)
class _ClosingBrace:
    """Finds the end of a JSON object in growing text."""

    _looked: int = 0
    _depth: int = 0
    _in_string: bool = False
    _end: int | None = None
    """Position after the last brace of a possible object."""
    _is_valid: bool = False

    def ends(self, text: str, end: int) -> bool:
        """Whether the text before `end`, which follows a brace, is one complete JSON object."""
        if self._end is None:
            self._look(text, end)
        return self._is_valid and self._end == end

    def _look(self, text: str, end: int) -> None:
        position = self._looked
        while (found := _STRUCTURE.search(text, position, end)) is not None:
            position = found.end()
            mark = found.group()
            if mark == "\\":
                # The escaped character is present: the last character is a brace.
                position += 1
            elif mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    self._end = position
                    self._is_valid = _is_object(text[:position])
                    break
        self._looked = end if found is None else position


@dataclass(eq=False, slots=True)
class _Opened:
    """What is open at a place of growing text that is the beginning of JSON."""

    closing: str = ""
    """Closes the open brackets."""
    in_string: bool = False
    _looked: int = 0

    def before(self, text: str, end: int) -> Self:
        """Look at the text before `end`, which was not looked at before, and return itself."""
        position = self._looked
        while (found := _STRUCTURE.search(text, position, end)) is not None:
            position, mark = found.end(), found.group()
            if mark == "\\":
                position += 1
            elif mark == '"':
                self.in_string = not self.in_string
            elif not self.in_string:
                is_opening = mark in _CLOSING
                self.closing = _CLOSING[mark] + self.closing if is_opening else self.closing[1:]
        self._looked = max(position, end)
        return self


@dataclass(eq=False, slots=True)
class _Call:
    """One call, starting after its first mark."""

    _index: int
    _text_tools: frozenset[str]
    is_named: bool = False
    _is_text: bool = False
    """Whether the argument is a text, unless it begins as JSON."""
    _text: str = ""
    _end: int = 0
    """End of the text without trailing white space and without a possible beginning of the end
    mark."""
    _is_closed: bool = False
    _mark: str = ""
    """The end mark, unless the call lacks it."""
    _closing: _ClosingBrace = field(default_factory=_ClosingBrace)
    _name: _Search = field(default_factory=lambda: _Search(_NAME))
    _arguments: _Search = field(default_factory=lambda: _Search(_ARGUMENTS))
    _opened: _Opened = field(default_factory=_Opened)
    _start: int | None = None
    """Start of the arguments."""
    _sent: int = 0
    """Number of their characters that were returned."""

    @property
    def written(self) -> str:
        """The text of the call, with its marks."""
        return CALL_START + self._text + self._mark

    def add(self, text: str) -> str | None:
        """Add text. Return the text after the end of the call, or None if the call continues."""
        searched = max(len(self._text) - len(CALL_END) + 1, 0)
        self._text += text
        found = _MARKS.search(self._text, searched)
        while found is not None and not self._ends_at(found):
            found = _MARKS.search(self._text, found.end())
        rest, begun = None, 0
        if found is not None:
            self._mark = CALL_END if found.group() == CALL_END else ""
            rest = self._text[found.start() + len(self._mark) :]
            self._text = self._text[: found.start()]
            self._is_closed = True
        else:
            begun = _begun(self._text, CALL_START, CALL_END)
        self._end = _stripped(self._text, begun)
        return rest

    def _ends_at(self, mark: re.Match[str]) -> bool:
        """Whether a mark ends the call: an end mark, or that of the next call."""
        is_end = mark.group() == CALL_END
        return (is_end or not self._is_text) and not ends_in_string(self._text[: mark.start()])

    def take(self) -> list[CallPiece]:
        """Return the new pieces of the call."""
        pieces = []
        if not self.is_named:
            found = self._name.find(self._text, self._end)
            # The name of an object in the arguments is not that of the call.
            while found and len(self._opened.before(self._text, found.start()).closing) > 1:
                found = self._name.find(self._text, self._end, after=found.end())
            if found is None:
                return []
            self.is_named = True
            self._is_text = found.group(1) in self._text_tools
            pieces.append(CallPiece(self._index, name=found.group(1)))
        arguments = self._new_text() if self._is_text else self._new_arguments()
        if arguments:
            pieces.append(CallPiece(self._index, arguments=arguments))
        return pieces

    def _new_text(self) -> str:
        """Return what the text adds to the JSON of the arguments."""
        text, opening = self._text, ""
        if self._start is None:
            found = self._arguments.find(text, self._end)
            written = "" if found is None else text[found.end() :].lstrip()
            if found is None or (_JSON_BEGUN.startswith(written) and not self._is_closed):
                return ""
            if written.startswith(_JSON_BEGUN):
                self._is_text = False
                return self._new_arguments()
            self._start = text.index(":", found.start()) + 1
            self._start += text.startswith(" ", self._start)
            opening = _TEXT_OPENING
        held = 0 if self._is_closed else _begun(text, CALL_END)
        new = text[self._start + self._sent : len(text) - held]
        self._sent += len(new)
        return opening + json.dumps(new, ensure_ascii=False)[1:-1] + '"}' * self._is_closed

    def _new_arguments(self) -> str:
        text, end = self._text, self._end
        if self._start is None:
            found = self._arguments.find(text, end)
            if found is None or found.end() == end:
                return ""
            self._start = found.end()
        if text[end - 1] == "}" and (self._is_closed or self._closing.ends(text, end)):
            # Exclude the closing brace of the call from the arguments.
            end = max(_stripped(text, len(text) - end + 1), self._start)
        new = text[self._start + self._sent : end]
        self._sent += len(new)
        return new


def ends_in_string(text: str) -> bool:
    """Whether a text is the beginning of JSON, and ends inside one of its strings."""
    opened = _Opened().before(text, len(text))
    # The string is a value, or else a name.
    return opened.in_string and any(
        _is_object(f'{text}"{rest}{opened.closing}') for rest in ("", ":0")
    )


def _is_object(text: str) -> bool:
    try:
        # Without limits on digits, and with line breaks in strings.
        return isinstance(json.loads(text, parse_int=str, strict=False), dict)
    except (ValueError, RecursionError):
        return False


def _begun(text: str, *marks: str) -> int:
    """Return the length of the end of `text` that begins a mark."""
    start = text.rfind("<", max(len(text) - len(CALL_END) + 1, 0))
    rest = "" if start < 0 else text[start:]
    return len(rest) if any(mark != rest and mark.startswith(rest) for mark in marks) else 0


def _stripped(text: str, cut: int) -> int:
    """Return where `text` ends without its last `cut` characters and white space before them."""
    end = len(text) - cut
    while end > 0 and text[end - 1].isspace():
        end -= 1
    return end
