"""Completion choices: text with its finish reason, log-probabilities, token ids and tool calls."""

from typing import Any, ClassVar

import msgspec
from typing_extensions import override

from contract.messages import Delta, decode_logprobs
from contract.outcomes import FinishReason
from gateway.completions.rendering.choice import FAILED, TOOL_CALLS, Choice
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.logprobs import LogprobLists
from gateway.completions.rendering.prompt_logprobs import EncodedPrompt
from gateway.completions.rendering.tool_calls import tool_calls_in
from gateway.dialects.request import GenerationRequest


class _Piece(msgspec.Struct):
    """New text of a choice, and the members sent with it."""

    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: LogprobLists | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw | None = None
    prompt_logprobs: bytes = b""
    """Encoded; empty without them."""
    tool_calls: list[dict[str, Any]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it contains nothing for the client."""
        return (
            not self.text
            and self.finish_reason is None
            and self.logprobs is None
            and not self.token_ids
            and self.prompt_token_ids is None
            and not self.prompt_logprobs
        )

    def body(self, index: int) -> dict[str, Any]:
        """Return the choice object of a chunk."""
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
        if self.prompt_logprobs:
            body["prompt_logprobs"] = msgspec.Raw(self.prompt_logprobs)
        if self.tool_calls is not None:
            body["tool_calls"] = self.tool_calls
        return body


class TextChoice(Choice):
    """Turns the deltas of one choice into text, with echo before and suffix after it."""

    PLAIN_START: ClassVar[bytes] = b',"text":'
    PLAIN_END: ClassVar[bytes] = b',"logprobs":null,"finish_reason":null}'

    def __init__(self, completion: Completion, index: int) -> None:
        request = completion.request
        prompt_index = index // request.n
        self._index = index
        self._request: GenerationRequest = request
        self._request_id = completion.id
        self._echo = completion.prompt_texts[prompt_index] if request.echo else ""
        self._opening = self._echo
        self._prompt_token_ids: msgspec.Raw | None = None
        if request.return_token_ids:
            self._prompt_token_ids = completion.prompt_ids_of_choice(index)
        self._prompt_logprobs = EncodedPrompt()
        self._has_sent_ids = not request.return_token_ids
        self._texts: list[str] | None = None if request.tool_use is None else []
        self._pieces: list[_Piece] = []
        self._logprobs_of_whole: dict[str, list[bytes]] = {}
        """The encoded items of each list."""

    @override
    def take_prompt_logprobs(self, encoded: EncodedPrompt) -> None:
        self._prompt_logprobs = encoded

    @override
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        piece = self._piece(delta)
        return [] if piece.is_empty else [piece.body(self._index)]

    @override
    def without_tokens(self) -> dict[str, Any]:
        return _Piece("").body(self._index)

    @override
    def failed(self) -> dict[str, Any]:
        return _Piece("", FAILED).body(self._index)

    @override
    def add(self, delta: Delta) -> None:
        piece = self._piece(delta)
        if piece.logprobs is not None:
            # As in chats, see `encoded_tokens`.
            for name, items in piece.logprobs.encoded().items():
                self._logprobs_of_whole.setdefault(name, []).append(items)
            piece.logprobs = None
        self._pieces.append(piece)

    @override
    def whole(self) -> dict[str, Any]:
        first, last = self._pieces[0], self._pieces[-1]
        whole = _Piece(
            "".join(piece.text for piece in self._pieces), last.finish_reason, last.stop_reason
        )
        if self._request.logprobs is not None:
            whole.logprobs = self._whole_logprobs()
        if self._request.return_token_ids:
            whole.token_ids = [token for piece in self._pieces for token in piece.token_ids or []]
            whole.prompt_token_ids = first.prompt_token_ids
        whole.prompt_logprobs = first.prompt_logprobs
        whole.tool_calls = last.tool_calls
        # A whole response has null where a chunk omits the member.
        return whole.body(self._index) | {"stop_reason": whole.stop_reason}

    def _piece(self, delta: Delta) -> _Piece:
        piece = _Piece(self._opening + delta.text, delta.finish_reason, delta.stop_reason)
        self._opening = ""
        if self._texts is not None:
            self._texts.append(delta.text)
        if self._request.logprobs is not None:
            piece.logprobs = self._logprobs(delta)
        if self._request.return_token_ids:
            piece.token_ids = list(delta.token_ids)
        piece.prompt_logprobs = self._prompt_logprobs.scores
        self._prompt_logprobs = EncodedPrompt()
        if not self._has_sent_ids:
            piece.prompt_token_ids = self._prompt_token_ids
            self._has_sent_ids = True
        if delta.finish_reason is not None:
            self._end(piece)
        return piece

    def _logprobs(self, delta: Delta) -> LogprobLists | None:
        lists = LogprobLists(before=self._prompt_logprobs.echoed)
        logprobs = decode_logprobs(delta.logprobs)
        lists.extend(logprobs, delta.token_ids, self._request, base=len(self._echo))
        return None if lists.is_empty else lists

    def _whole_logprobs(self) -> LogprobLists:
        before = {
            name: b",".join(filter(None, items)) for name, items in self._logprobs_of_whole.items()
        }
        return LogprobLists(
            token_ids=[] if self._request.return_token_ids else None,
            content=[] if self._request.has_scored_objects else None,
            before=before,
        )

    def _end(self, piece: _Piece) -> None:
        if self._request.profile.is_suffix_literal:
            piece.text += self._request.suffix
        if self._texts is None:
            return
        calls = tool_calls_in("".join(self._texts), self._request_id, self._index)
        piece.tool_calls = calls or None
        if calls and piece.finish_reason == FinishReason.STOP:
            piece.finish_reason = TOOL_CALLS
