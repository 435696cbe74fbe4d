"""Hands each token to a parser once all its text can be shown, and gathers what the parser tells."""

import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from contract.messages import CallPiece, Delta
from contract.outcomes import FinishReason
from worker.parsing.base import Parsed, Parser

LONG_SECONDS = 0.001
"""Time to read what one step has added beyond which that is a matter for another thread."""

_LONG_READS = 3
"""How often in a row it has to take so long: a single time may be chance."""

_LONG_REPLAY_TOKENS = 2000


@dataclass(slots=True)
class Answer:
    """What has been read of an answer since the last look."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    reasoning_tokens: int = 0

    def __bool__(self) -> bool:
        """Whether it has anything that clients read."""
        return bool(self.content or self.reasoning or self.calls)

    def add(self, parsed: Parsed) -> None:
        """Take in what comes next."""
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
        """Return a delta with what it tells."""
        return msgspec.structs.replace(
            delta,
            text=self.content,
            reasoning=self.reasoning,
            calls=self.calls,
            reasoning_tokens=self.reasoning_tokens,
        )


class Reader:
    """Reads one sequence apart. Stop strings may hold its text back, and cut the end of it off."""

    __slots__ = ("_known", "_long_reads", "_parser", "_ready", "_shown", "_waiting")

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._waiting: deque[tuple[int, int]] = deque()
        """Tokens whose text is held back, with its length."""
        self._shown = ""
        """Text of the first of them that can be shown."""
        self._ready: deque[tuple[int, str]] = deque()
        """Tokens to be read, with their text."""
        self._known = 0
        """How many of them have been told before."""
        self._long_reads = 0

    @property
    def takes_long(self) -> bool:
        """Whether reading holds others up."""
        return self._long_reads >= _LONG_READS or self._known >= _LONG_REPLAY_TOKENS

    def push(self, token_id: int, length: int, shown: str) -> None:
        """Take in a token with text of some length, and all text that can be shown since the last one."""
        if not self._waiting and len(shown) == length:
            self._ready.append((token_id, shown))
            return
        self._waiting.append((token_id, length))
        self.show(shown)

    def show(self, text: str) -> None:
        """Take in text that was held back."""
        text = self._shown + text
        waiting, position = self._waiting, 0
        while waiting and waiting[0][1] <= len(text) - position:
            token_id, length = waiting.popleft()
            self._ready.append((token_id, text[position : position + length]))
            position += length
        self._shown = text[position:]

    def forget_told(self) -> None:
        """Take in that what the tokens so far add has been told by an earlier attempt."""
        self._known = len(self._ready)

    def read(self, answer: Answer) -> None:
        """Add to an answer what has become ready."""
        feed, ready = self._parser.feed, self._ready
        if self._known:
            for _ in range(self._known):
                feed(*ready.popleft())
            self._known = 0
        started = time.perf_counter()
        for token_id, text in ready:
            answer.add(feed(token_id, text))
        ready.clear()
        is_long = time.perf_counter() - started > LONG_SECONDS
        self._long_reads = self._long_reads + 1 if is_long else 0

    def finish(self, reason: FinishReason, answer: Answer) -> None:
        """Add to an answer what is still to be read, and what the parser has held back."""
        self._cut()
        self.read(answer)
        answer.add(self._parser.finish(reason))

    def _cut(self) -> None:
        """Read the token of which a part can be shown with that part; those behind it are not read."""
        if self._shown:
            token_id, _ = self._waiting.popleft()
            self._ready.append((token_id, self._shown))
            self._shown = ""
        self._waiting.clear()
