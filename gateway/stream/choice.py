"""One choice of an answer: what its deltas add to it as the client sees it.

Streamed and whole answers are made of the same pieces, so that a stream joins to the whole.
"""

from dataclasses import dataclass
from typing import Any

from contract.messages import Delta
from contract.outcomes import FinishReason
from gateway.dialects.request import GenerationRequest
from gateway.stream.completion import Completion
from gateway.stream.logprobs import LogprobLists
from gateway.stream.tool_calls import told_tool_calls

TOOL_CALLS = "tool_calls"
"""Finish reason of a choice that ends by itself and calls tools."""


@dataclass(slots=True)
class Piece:
    """New text of a choice, and what is told with it."""

    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: LogprobLists | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether a client would learn nothing from it."""
        return (
            not self.text
            and self.finish_reason is None
            and self.logprobs is None
            and not self.token_ids
            and self.prompt_token_ids is None
        )

    def body(self, index: int) -> dict[str, Any]:
        """Return the choice as a chunk shows it."""
        body: dict[str, Any] = {
            "index": index,
            "text": self.text,
            "logprobs": None if self.logprobs is None else self.logprobs.body(),
            "finish_reason": self.finish_reason,
        }
        if self.stop_reason is not None:
            body["stop_reason"] = self.stop_reason
        if self.token_ids is not None:
            body["token_ids"] = self.token_ids
        if self.prompt_token_ids is not None:
            body["prompt_token_ids"] = self.prompt_token_ids
        if self.tool_calls is not None:
            body["tool_calls"] = self.tool_calls
        return body


class Choice:
    """Turns the deltas of one choice into pieces: echo before the first one, suffix behind the last."""

    __slots__ = (
        "_echo",
        "_opening",
        "_prompt_logprobs",
        "_prompt_token_ids",
        "_request",
        "_spoken",
        "_told_ids",
        "index",
    )

    def __init__(self, completion: Completion, index: int) -> None:
        request = completion.request
        prompt_index = index // request.n
        self.index = index
        self._request: GenerationRequest = request
        self._echo = completion.prompt_texts[prompt_index] if request.echo else ""
        self._opening = self._echo
        self._prompt_token_ids = completion.prompt_token_ids[prompt_index]
        self._prompt_logprobs: dict[str, bytes] | None = None
        self._told_ids = not request.return_token_ids
        self._spoken: list[str] | None = None if request.tool_use is None else []

    def take_prompt_logprobs(self, encoded: dict[str, bytes]) -> None:
        """Take the log-probabilities of the echoed tokens, to be told with the first piece."""
        self._prompt_logprobs = encoded

    def piece(self, delta: Delta) -> Piece:
        """Return what a delta adds."""
        piece = Piece(self._opening + delta.text, delta.finish_reason, delta.stop_reason)
        self._opening = ""
        if self._spoken is not None:
            self._spoken.append(delta.text)
        if self._request.logprobs is not None:
            piece.logprobs = self._logprobs(delta)
        if self._request.return_token_ids:
            piece.token_ids = list(delta.token_ids)
        if not self._told_ids:
            piece.prompt_token_ids = self._prompt_token_ids
            self._told_ids = True
        if delta.finish_reason is not None:
            self._end(piece)
        return piece

    def _logprobs(self, delta: Delta) -> LogprobLists | None:
        lists = LogprobLists(before=self._prompt_logprobs)
        self._prompt_logprobs = None
        lists.extend(
            delta.logprobs or [],
            base=len(self._echo),
            token_ids=delta.token_ids if self._request.return_token_ids else None,
        )
        return None if lists.is_empty else lists

    def _end(self, piece: Piece) -> None:
        if self._request.profile.is_suffix_literal:
            piece.text += self._request.suffix
        if self._spoken is None:
            return
        piece.tool_calls = told_tool_calls("".join(self._spoken)) or None
        if piece.tool_calls and piece.finish_reason == FinishReason.STOP:
            piece.finish_reason = TOOL_CALLS
