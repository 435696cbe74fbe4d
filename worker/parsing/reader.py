"""Reader: feeds a parser each token once all of its text can be sent, and collects the output.

Parsers drop text that looks like a call but is none. The reader returns it as content.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from contract.messages import CallPiece, Delta
from contract.outcomes import FinishReason
from worker.parsing.base import Parsed, Parser

LONG_SECONDS = 0.001
"""Parsing time per step above which parsing moves to another thread."""

_LONG_READS = 3
"""Number of consecutive slow reads required: a single one may be chance."""

_LONG_REPLAY_TOKENS = 2000


@dataclass(slots=True)
class ParsedOutput:
    """Parsed output of a response that was not taken yet."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    reasoning_tokens: int = 0

    def __bool__(self) -> bool:
        """Whether it contains anything for clients."""
        return bool(self.content or self.reasoning or self.calls)

    def add(self, parsed: Parsed) -> None:
        """Add the next parser output."""
        self.content += parsed.content
        self.reasoning += parsed.reasoning
        self.reasoning_tokens += parsed.is_reasoning
        for piece in parsed.calls:
            last = self.calls[-1] if self.calls else None
            if last is None or piece.name or last.index != piece.index:
                self.calls.append(piece)
            else:
                arguments = last.arguments + piece.arguments
                self.calls[-1] = CallPiece(last.index, last.name, arguments)

    def added_to(self, delta: Delta) -> Delta:
        """Return a copy of a delta with this output."""
        return msgspec.structs.replace(
            delta,
            text=self.content,
            reasoning=self.reasoning,
            calls=self.calls,
            reasoning_tokens=self.reasoning_tokens,
        )


@dataclass(eq=False, slots=True)
class _Unreturned:
    """Text for which a parser has returned nothing so far.

    If a call follows, the text is the markup of the call. If content or the end follows, the text
    is content.
    """

    _pieces: list[tuple[str, str]] = field(default_factory=list)
    """The text, and the text with a _HIDDEN for each character that no output may have."""
    _is_of_call: bool = False
    """Whether the last output was of a call, whose markup follows."""
    _follows_reasoning: bool = False
    """Whether the last token belongs to the reasoning."""
    _named: set[int] = field(default_factory=set)
    """The calls that have a name; others are none."""

    def add(self, text: str, hidden: int) -> None:
        """Add the text of a token, whose last characters may be hidden."""
        if self._is_of_call:
            self._pieces.clear()
        self._pieces.append((text, text[: len(text) - hidden] + _HIDDEN * hidden))

    def completed(self, parsed: Parsed) -> Parsed:
        """Return what a parser returns for the text so far, with the content that it lacks."""
        content, calls = parsed.content, parsed.calls
        if content:
            content = self._content(content)
        if calls:
            self._named.update(each.index for each in calls if each.name)
            calls = [each for each in calls if each.index in self._named]
        self._follows_reasoning = parsed.is_reasoning or bool(parsed.reasoning)
        if calls or self._follows_reasoning:
            self._pieces.clear()
            self._is_of_call = bool(calls)
        return parsed._replace(content=content, calls=calls)

    def rest(self) -> str:
        """Return the content at the end of the response."""
        return "" if self._is_of_call else _visible("".join(shown for _, shown in self._pieces))

    def _content(self, content: str) -> str:
        """Return content with the text before it that is not markup, and without hidden text."""
        text, shown = map("".join, zip(*self._pieces, strict=True)) if self._pieces else ("", "")
        start = 0 if text.startswith(content) else text.rfind(content)
        if start < 0:
            # The content has earlier text, too, or the parser has changed it.
            end = len(text)
            if content.endswith(text):
                content = content[: len(content) - end] + shown.replace(_HIDDEN, "")
        else:
            end = start + len(content)
            content = shown[start:end].replace(_HIDDEN, "")
            if not (self._is_of_call or self._follows_reasoning):
                content = _visible(shown[:start]) + content
        self._pieces = [(text[end:], shown[end:])] if end < len(text) else []
        self._is_of_call = False
        return content


_HIDDEN = "\ud800"
"""A character that no token has: half of a surrogate pair."""


def _visible(shown: str) -> str:
    """Return text without what is hidden; nothing if only white space remains."""
    text = shown.replace(_HIDDEN, "")
    return "" if text.isspace() else text


@dataclass(eq=False, slots=True)
class Reader:
    """Parses one sequence. Stop strings may hold back its text and remove its end.

    Args:
        parser: Receives all tokens.
        hidden: Tokens by id that appear in no output.
    """

    _parser: Parser
    _hidden: Mapping[int, str]
    _waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Tokens whose text is held back, with its length."""
    _shown: str = ""
    """The text of the first of these tokens that can be sent."""
    _ready: deque[tuple[int, str]] = field(default_factory=deque)
    """Tokens to parse, with their text."""
    _unreturned: _Unreturned = field(default_factory=_Unreturned)
    _known: int = 0
    """The number of these tokens that were sent before."""
    _long_reads: int = 0

    @property
    def is_slow(self) -> bool:
        """Whether parsing is slow."""
        return self._long_reads >= _LONG_READS or self._known >= _LONG_REPLAY_TOKENS

    def push(self, token_id: int, length: int, shown: str) -> None:
        """Add a token, the length of its text, and all text that has become ready to send."""
        if not self._waiting and len(shown) == length:
            self._ready.append((token_id, shown))
            return
        self._waiting.append((token_id, length))
        self.show(shown)

    def show(self, text: str) -> None:
        """Add text that was held back before."""
        text = self._shown + text
        waiting, position = self._waiting, 0
        while waiting and waiting[0][1] <= len(text) - position:
            token_id, length = waiting.popleft()
            self._ready.append((token_id, text[position : position + length]))
            position += length
        self._shown = text[position:]

    def mark_sent(self) -> None:
        """Mark the output of all tokens so far as sent by an earlier attempt."""
        self._known = len(self._ready)

    def read(self, parsed_output: ParsedOutput) -> None:
        """Parse all ready tokens and add their output to `parsed_output`."""
        feed, ready = self._feed, self._ready
        if self._known:
            for _ in range(self._known):
                feed(*ready.popleft())
            self._known = 0
        started = time.perf_counter()
        for token_id, text in ready:
            parsed_output.add(feed(token_id, text))
        ready.clear()
        is_long = time.perf_counter() - started > LONG_SECONDS
        self._long_reads = self._long_reads + 1 if is_long else 0

    def finish(self, reason: FinishReason, parsed_output: ParsedOutput) -> None:
        """Add the remaining output, including what the parser held back, to `parsed_output`."""
        self._cut()
        self.read(parsed_output)
        parsed_output.add(self._unreturned.completed(self._parser.finish(reason)))
        parsed_output.add(Parsed(self._unreturned.rest()))

    def _feed(self, token_id: int, text: str) -> Parsed:
        """Parse a token. Return its output without the token itself if it is hidden."""
        parsed, hidden = self._parser.feed(token_id, text), 0
        if text and token_id in self._hidden:
            # A part of the token may be visible.
            special = self._hidden[token_id]
            hidden = len(special) if text.endswith(special) else len(text)
            reasoning = parsed.reasoning.removesuffix(text[-hidden:])
            parsed = parsed._replace(reasoning=reasoning)
        self._unreturned.add(text, hidden)
        return self._unreturned.completed(parsed)

    def _cut(self) -> None:
        """Parse a partly visible token with its visible part; later tokens are not parsed."""
        if self._shown:
            token_id, _ = self._waiting.popleft()
            self._ready.append((token_id, self._shown))
            self._shown = ""
        self._waiting.clear()
