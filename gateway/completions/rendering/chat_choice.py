"""Chat choices: assistant messages with reasoning, content and tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from typing_extensions import override

from common.not_none import not_none
from contract.messages import CallPiece, Delta, TokenLogprob, decode_logprobs
from contract.outcomes import FinishReason
from gateway.completions.rendering.choice import FAILED, FUNCTION_CALL, TOOL_CALLS, Choice
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.logprobs import ContentTokens, encoded_tokens, logprobs_body
from gateway.completions.rendering.prompt_logprobs import EncodedPrompt
from gateway.completions.rendering.tool_calls import (
    ReturnedCalls,
    TextArgument,
    call_id,
    custom_call,
    function_call,
    merged,
    text_argument,
)
from gateway.dialects.request import GenerationRequest, ToolMode


class _Piece(msgspec.Struct):
    """The new part of a choice that the client receives."""

    content: str
    reasoning: str
    calls: list[CallPiece]
    """At most one for each call."""
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: bytes
    """Encoded tokens."""
    token_ids: list[int]

    @property
    def is_empty(self) -> bool:
        """Whether it contains nothing for the client."""
        return not (
            self.content
            or self.reasoning
            or self.calls
            or self.finish_reason is not None
            or self.logprobs
            or self.token_ids
        )


class ChatChoice(Choice):
    """Turns the deltas of one choice into a message.

    Each chunk contains one part, because some clients read only one: first the role, then a part of
    the reasoning, of the content or of one call, and finally the finish reason. The token members
    (`logprobs`, `token_ids`) are in the first chunk that a delta makes, after the role's chunk.
    """

    PLAIN_START: ClassVar[bytes] = b',"delta":{"content":'
    PLAIN_END: ClassVar[bytes] = b'},"logprobs":null,"finish_reason":null}'

    def __init__(self, completion: Completion, index: int) -> None:
        request = completion.request
        chat, use = not_none(request.chat), request.tool_use
        self._index = index
        self._request: GenerationRequest = request
        self._request_id = completion.id
        self._members: dict[str, Any] = {}
        self._prompt_token_ids: dict[str, msgspec.Raw] = {}
        if request.return_token_ids:
            ids = {"prompt_token_ids": completion.prompt_ids_of_choice(index)}
            if request.profile.has_prompt_ids_beside_choices:
                self._members |= ids
            else:
                self._prompt_token_ids = ids
        self._is_legacy = chat.uses_legacy_functions
        self._visible = None if chat.shows_reasoning else _VisibleTokens()
        self._content = ContentTokens() if request.profile.scores_only_content else None
        self._has_begun = False
        self._has_calls = False
        self._calls = ReturnedCalls(
            allowed=() if use is None else use.allowed,
            returns_one=self._is_legacy or (use is not None and not use.is_parallel),
        )
        self._pieces: list[_Piece] = []
        self._texts = frozenset(() if use is None else use.texts)
        self._text: _TextCall | None = None
        """The call that gets a text, while it is streamed."""

    @classmethod
    @override
    def plain_reasoning_starts(cls, request: GenerationRequest) -> list[bytes]:
        if request.chat is None or not request.chat.shows_reasoning:
            return []
        first, *others = (b'"%s":' % each.encode() for each in request.profile.reasoning_members)
        return [b',"delta":{' + first, *(b"," + each for each in others)]

    @override
    def take_prompt_logprobs(self, encoded: EncodedPrompt) -> None:
        if encoded.scores:
            self._members["prompt_logprobs"] = msgspec.Raw(encoded.scores)

    @override
    def take_members(self) -> dict[str, Any]:
        members, self._members = self._members, {}
        return members

    @override
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        piece = self._piece(delta)
        if piece.is_empty:
            return []
        chunks = [self._chunk(part) for part in self._parts(piece)]
        if piece.finish_reason is not None:
            chunks.append(self._chunk({}, piece.finish_reason))
            if piece.stop_reason is not None:
                chunks[-1]["stop_reason"] = piece.stop_reason
        elif not chunks:
            chunks.append(self._chunk({}))  # Tokens without text, such as the markers of a call.
        if piece.logprobs:
            chunks[0]["logprobs"] = logprobs_body([piece.logprobs])
        if self._request.return_token_ids:
            chunks[0]["token_ids"] = piece.token_ids
        return chunks if self._has_begun else [self._opening(), *chunks]

    @override
    def without_tokens(self) -> dict[str, Any]:
        return self._chunk({}) if self._has_begun else self._opening()

    @override
    def failed(self) -> dict[str, Any]:
        return self._chunk({}, FAILED)

    @override
    def add(self, delta: Delta) -> None:
        self._pieces.append(self._piece(delta))

    @override
    def whole(self) -> dict[str, Any]:
        pieces, last = self._pieces, self._pieces[-1]
        body: dict[str, Any] = {
            "index": self._index,
            "message": self._message(),
            "logprobs": None,
            "finish_reason": last.finish_reason,
        }
        if self._request.logprobs is not None:
            body["logprobs"] = logprobs_body(each.logprobs for each in pieces)
        if self._request.return_token_ids:
            body["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        body |= self._prompt_token_ids
        return body | {"stop_reason": last.stop_reason}

    def _piece(self, delta: Delta) -> _Piece:
        request = self._request
        if self._visible is None:
            token_ids, logprobs = delta.token_ids, decode_logprobs(delta.logprobs)
        else:
            token_ids, logprobs = self._visible.take(delta)
        scored: Iterable[tuple[int, TokenLogprob]] = zip(token_ids, logprobs, strict=False)
        if self._content is not None and request.logprobs is not None:
            scored = self._content.take(delta)
        calls = self._calls.of(delta.calls)
        self._has_calls = self._has_calls or bool(calls)
        return _Piece(
            delta.text,
            delta.reasoning if self._visible is None else "",
            calls,
            self._finish_reason(delta),
            delta.stop_reason,
            b""
            if request.logprobs is None
            else encoded_tokens(
                scored,
                alternatives=request.logprobs,
                names_by_id=request.names_tokens_by_id,
            ),
            list(token_ids) if request.return_token_ids else [],
        )

    def _finish_reason(self, delta: Delta) -> str | None:
        use = self._request.tool_use
        is_named = use is not None and use.mode is ToolMode.NAMED
        # A client that named the function expects the call, and OpenAI returns `stop`.
        if delta.finish_reason is FinishReason.STOP and self._has_calls and not is_named:
            return FUNCTION_CALL if self._is_legacy else TOOL_CALLS
        return delta.finish_reason

    def _opening(self) -> dict[str, Any]:
        self._has_begun = True
        return self._chunk({"role": "assistant", "content": ""}) | self._prompt_token_ids

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def _parts(self, piece: _Piece) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        if piece.reasoning:
            parts.append(self._reasoning(piece.reasoning))
        if piece.content:
            parts.append({"content": piece.content})
        for call in piece.calls:
            parts += self._text_parts(call) if self._texts else [self._call_part(call)]
        if piece.finish_reason is not None:
            parts += self._end_of_text()
        return parts

    def _reasoning(self, text: str | None) -> dict[str, Any]:
        return dict.fromkeys(self._request.profile.reasoning_members, text)

    def _call_part(self, call: CallPiece) -> dict[str, Any]:
        function = {"arguments": call.arguments}
        if call.name:
            function = {"name": call.name, **function}
        if self._is_legacy:
            return {"function_call": function}
        part: dict[str, Any] = {"index": call.index}
        if call.name:
            part |= {"id": self._call_id(call.index), "type": "function"}
        return {"tool_calls": [part | {"function": function}]}

    def _text_parts(self, call: CallPiece) -> list[dict[str, Any]]:
        """Return the parts of a call, which may be one that gets a text."""
        parts: list[dict[str, Any]] = []
        if self._text is not None and self._text.index != call.index:
            parts += self._end_of_text()
        if call.name in self._texts:
            self._text = _TextCall(call.index)
            begun = custom_call(self._call_id(call.index), call.name, "")
            parts.append({"tool_calls": [{"index": call.index, **begun}]})
        if self._text is None:
            return [*parts, self._call_part(call)]
        self._text.arguments += call.arguments
        return [*parts, *self._text.parts(self._text.reader.add(call.arguments))]

    def _end_of_text(self) -> list[dict[str, Any]]:
        call, self._text = self._text, None
        return [] if call is None else call.parts(call.reader.finish(call.arguments))

    def _call_id(self, call: int) -> str:
        return call_id(self._request_id, self._index, call)

    def _message(self) -> dict[str, Any]:
        profile = self._request.profile
        content = "".join(piece.content for piece in self._pieces)
        reasoning = "".join(piece.reasoning for piece in self._pieces)
        calls = merged(call for piece in self._pieces for call in piece.calls)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if reasoning or profile.has_null_parts:
            message |= self._reasoning(reasoning or None)
        if calls and self._is_legacy:
            (call,) = calls
            message["function_call"] = {"name": call.name, "arguments": call.arguments}
        elif calls or profile.has_null_parts:
            message["tool_calls"] = [self._whole_call(call) for call in calls] or None
        return message

    def _whole_call(self, call: CallPiece) -> dict[str, Any]:
        id_, name = self._call_id(call.index), call.name
        if name in self._texts:
            return custom_call(id_, name, text_argument(call.arguments))
        return function_call(id_, name, call.arguments)


@dataclass(eq=False, slots=True)
class _TextCall:
    """A call that gets a text, as the text of its arguments arrives."""

    index: int
    reader: TextArgument = field(default_factory=TextArgument)
    arguments: str = ""

    def parts(self, text: str) -> list[dict[str, Any]]:
        """Return the part of a message with a new text, if there is any."""
        return [{"tool_calls": [{"index": self.index, "custom": {"input": text}}]}] * bool(text)


@dataclass(eq=False, slots=True)
class _VisibleTokens:
    """Finds the tokens that are not reasoning, for clients that do not receive the reasoning.

    A worker may send a token before it is clear what the token belongs to. Tokens are held back
    until content or a call arrives, after the reasoning. Blank lines may precede it.
    """

    _is_responding: bool = False
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, delta: Delta) -> tuple[list[int], list[TokenLogprob]]:
        """Return the tokens that can be sent with a delta."""
        token_ids = [*self._token_ids, *delta.token_ids][delta.reasoning_tokens :]
        logprobs = [*self._logprobs, *decode_logprobs(delta.logprobs)][delta.reasoning_tokens :]
        self._is_responding = self._is_responding or bool(delta.text.strip() or delta.calls)
        if self._is_responding:
            self._token_ids, self._logprobs = [], []
            return token_ids, logprobs
        self._token_ids, self._logprobs = token_ids, logprobs
        return [], []
