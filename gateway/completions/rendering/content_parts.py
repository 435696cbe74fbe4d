"""The parts of a choice: reasoning, text and calls, in the order in which the model wrote them.

Messages shows them as content blocks, Responses as items. Which parts there are follows only from
the deltas and their order, so every gateway that replays a response finds the same parts.
"""

from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from contract.messages import Delta, TokenLogprob
from contract.outcomes import FinishReason
from gateway.completions.rendering.logprobs import ContentTokens, encoded_tokens
from gateway.completions.rendering.tool_calls import ReturnedCalls
from gateway.dialects.request import GenerationRequest


class PartKind(Enum):
    """What a part contains."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class Part(msgspec.Struct):
    """One part of a choice."""

    number: int
    """Counted from 0."""
    kind: PartKind
    call: int = 0
    """Number of a call among the calls of the choice."""
    name: str = ""
    """The called tool."""
    pieces: list[str] = []
    """The text, or the arguments of a call, as far as it has arrived."""
    logprobs: list[bytes] = []
    """The encoded tokens of a text, if log-probabilities were requested."""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


class Change(Enum):
    """What happens to a part."""

    BEGUN = auto()
    GROWN = auto()
    ENDED = auto()


class PartEvent(NamedTuple):
    """A change of one part."""

    change: Change
    part: Part
    text: str = ""
    """The new text of a part that has GROWN."""
    logprobs: bytes = b""
    """The encoded tokens of that text; see `Part.logprobs`."""


class PartStream:
    """Finds the parts in the deltas of one choice. One part is open at a time.

    White space alone makes no part: it is held back until text follows, and dropped before a call
    and at the end, with the log-probabilities of its tokens.
    """

    def __init__(self, request: GenerationRequest) -> None:
        use = request.tool_use
        self._shows_reasoning = request.chat is None or request.chat.shows_reasoning
        self._calls = ReturnedCalls(
            allowed=() if use is None else use.allowed,
            returns_one=use is not None and not use.is_parallel,
        )
        self._alternatives = request.logprobs
        self._tokens = ContentTokens()
        self._unplaced: list[tuple[int, TokenLogprob]] = []
        """The tokens of the text that waits for its part."""
        self._open: Part | None = None
        self._blank = ""
        self.parts: list[Part] = []
        """All parts so far."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        """See `Delta.stop_reason`."""

    def add(self, delta: Delta) -> list[PartEvent]:
        """Return what a delta changes."""
        events: list[PartEvent] = []
        pieces = self._calls.of(delta.calls)
        if self._alternatives is not None:
            self._unplaced += self._tokens.take(delta)
        if delta.reasoning and self._shows_reasoning:
            events += self._grow(PartKind.REASONING, delta.reasoning)
        # The end of a call comes before the text after it, and the text before the next call.
        open_call = self._open.call if self._open and self._open.kind is PartKind.CALL else None
        for piece in pieces:
            if piece.index == open_call:
                events += self._grow(PartKind.CALL, piece.arguments, call=piece.index)
        if delta.text:
            events += self._add_text(delta.text)
        for piece in pieces:
            if piece.index != open_call:
                self._blank, self._unplaced = "", []
                events += self._grow(
                    PartKind.CALL, piece.arguments, call=piece.index, name=piece.name
                )
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            events += self._end()
        return events

    def grow(self, delta: Delta) -> tuple[Part, str] | None:
        """Add a delta that only grows the open part. Return the part and its new text.

        Returns None, changing nothing, for any other delta.
        """
        part, text = self._open, ""
        if part is None or delta.finish_reason is not None or self._alternatives is not None:
            return None
        if delta.calls:
            if part.kind is PartKind.CALL and not (delta.text or delta.reasoning):
                text = self._calls.grown(delta.calls, part.call)
        elif part.kind is PartKind.TEXT:
            text = "" if delta.reasoning or delta.reasoning_tokens else delta.text
        elif part.kind is PartKind.REASONING and not delta.text:
            text = delta.reasoning
        if not text:
            return None
        part.pieces.append(text)
        return part, text

    def _add_text(self, text: str) -> Iterable[PartEvent]:
        if self._open is not None and self._open.kind is PartKind.TEXT:
            return self._grow(PartKind.TEXT, text)
        text, self._blank = self._blank + text, ""
        if not text.isspace():
            return self._grow(PartKind.TEXT, text)
        self._blank = text
        return ()

    def _grow(
        self, kind: PartKind, text: str, *, call: int = 0, name: str = ""
    ) -> Iterable[PartEvent]:
        part = self._open
        if part is None or part.kind is not kind or part.call != call:
            yield from self._end()
            part = self._open = Part(len(self.parts), kind, call, name)
            self.parts.append(part)
            yield PartEvent(Change.BEGUN, part)
        logprobs = b""
        if self._unplaced and kind is PartKind.TEXT:
            logprobs = encoded_tokens(self._unplaced, alternatives=self._alternatives or 0)
            part.logprobs.append(logprobs)
            self._unplaced = []
        if text:
            part.pieces.append(text)
            yield PartEvent(Change.GROWN, part, text, logprobs)

    def _end(self) -> Iterable[PartEvent]:
        part, self._open = self._open, None
        if part is not None:
            yield PartEvent(Change.ENDED, part)
