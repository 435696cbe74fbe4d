"""Responses in the form of Anthropic's Messages: the events of a stream, and the whole message."""

from typing import Any, Final

import msgspec
from pydantic_core import from_json
from typing_extensions import override

from contract.outcomes import FinishReason
from contract.tier import ServiceTier
from gateway.completions.rendering.assembler import PartsAssembler
from gateway.completions.rendering.completion import Completion, Usage
from gateway.completions.rendering.content_parts import Part, PartKind, PartStream
from gateway.completions.rendering.events import EVENT_END, PartsRenderer
from gateway.completions.rendering.tool_calls import decoded, derived_id
from gateway.dialects.json_styles import style_of
from gateway.dialects.request import CACHE_CHANGES, CacheDiagnosis, CacheMiss, MessagesOptions
from gateway.records.errors import ApiError, ErrorStyle

_TIERS: Final = {ServiceTier.DEFAULT: "standard"}
"""Anthropic's names of tiers that have others."""

_json = msgspec.json.Encoder().encode


def event(kind: str, **members: Any) -> bytes:
    """Return the lines of an event."""
    return b"event: %b\ndata: %b" % (kind.encode(), _json({"type": kind, **members}))


PING: Final = event("ping") + EVENT_END
_DELTA: Final = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
)
_DELTA_TYPES: Final = {
    PartKind.REASONING: (b"thinking_delta", b"thinking"),
    PartKind.TEXT: (b"text_delta", b"text"),
    PartKind.CALL: (b"input_json_delta", b"partial_json"),
}
"""The type of the deltas of a part, and their member with new text."""
_EMPTY: Final = Part(0, PartKind.TEXT)
"""The only block of a message in which the model wrote nothing."""


class _Blocks:
    """The parts of a response as content blocks."""

    def __init__(self, completion: Completion) -> None:
        options = completion.request.form_options
        self._completion = completion
        self.omits_thinking = isinstance(options, MessagesOptions) and options.omits_thinking
        self.management: dict[str, Any] = {}
        """The member that names the edits of the conversation, if the request has some."""
        if isinstance(options, MessagesOptions) and options.applied_edits is not None:
            self.management = {"context_management": {"applied_edits": options.applied_edits}}

    def opening(self, part: Part, style: str = "") -> dict[str, Any]:
        """Return the block as it begins; `style` is that of a call's input."""
        match part.kind:
            case PartKind.REASONING:
                return {"type": "thinking", "thinking": "", "signature": ""}
            case PartKind.TEXT:
                return {"type": "text", "text": ""}
            case PartKind.CALL:
                id_ = derived_id("toolu_", self._completion.id, 0, part.call)
                return {"type": "tool_use", "id": id_ + style, "name": part.name, "input": {}}

    def signature(self, part: Part) -> str | None:
        """Return the signature of reasoning, which is the reasoning itself, sealed."""
        if part.kind is not PartKind.REASONING:
            return None
        seal = self._completion.seal
        return "" if seal is None else seal(part.text, part.number)

    def whole(self, part: Part) -> dict[str, Any]:
        """Return the whole block, which is what its events add up to."""
        text = part.text
        block = self.opening(part, style_of(text, is_whole=True) or "")
        match part.kind:
            case PartKind.REASONING:
                thinking = "" if self.omits_thinking else text
                return block | {"thinking": thinking, "signature": self.signature(part)}
            case PartKind.TEXT:
                return block | {"text": text}
            case PartKind.CALL:
                return block | {"input": _read_input(text)}

    def diagnostics(self, usage: Usage | None) -> dict[str, Any]:
        """Return the member with the cache diagnostics, if the request has asked for some.

        Without usage, it is not known what the cache had.
        """
        request = self._completion.request
        if request.compared_id is None:
            return {}
        return {"diagnostics": _diagnosed(request.cache_diagnosis, usage)}

    def head(self, content: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        """Return the members that a message has from its beginning."""
        return {
            "id": self._completion.id,
            "type": "message",
            "role": "assistant",
            "model": self._completion.model,
            "content": content,
            **self.diagnostics(usage),
        }

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Return Anthropic's usage, in which cached tokens are no input tokens."""
        tier = self._completion.request.service_tier
        named = {} if tier is None else {"service_tier": _TIERS.get(ServiceTier(tier), tier)}
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens or 0},
            **named,
            **self._completion.cost(usage),
        }

    def ending(self, stream: PartStream, usage: Usage) -> dict[str, str | None]:
        """Return why the message ends."""
        request, sequence = self._completion.request, None
        if stream.finish_reason is FinishReason.LENGTH:
            # max_tokens may be more than the window had room for.
            is_cut = usage.completion_tokens >= request.max_tokens
            reason = "max_tokens" if is_cut else "model_context_window_exceeded"
        elif any(
            part.kind is PartKind.CALL and decoded(part.text or "{}") is not None
            for part in stream.parts
        ):
            reason = "tool_use"
        elif isinstance(stream.stop_reason, str) and stream.stop_reason in request.stop:
            reason, sequence = "stop_sequence", stream.stop_reason
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _diagnosed(diagnosis: CacheDiagnosis | None, usage: Usage | None) -> dict[str, Any] | None:
    if diagnosis is None:
        return None
    if diagnosis.miss is CacheMiss.NONE:
        missed = {} if usage is None else diagnosis.not_found(usage.cached_tokens)
        if not missed:
            return None
        reason = {"type": CacheMiss.UNAVAILABLE, "detail": missed["detail"]}
        return {"cache_miss_reason": {**reason, "cache_missed_input_tokens": missed["tokens"]}}
    reason = {"type": diagnosis.miss}
    if diagnosis.miss in CACHE_CHANGES:
        reason["cache_missed_input_tokens"] = diagnosis.tokens
    return {"cache_miss_reason": reason}


class MessageRenderer(PartsRenderer):
    """Renders the events of a message."""

    def __init__(self, completion: Completion, *, skip: int = 0, has_ids: bool = False) -> None:
        super().__init__(completion, skip=skip, has_ids=has_ids)
        self._blocks = _Blocks(completion)
        self._delta = b""
        """The beginning of the deltas of the open block."""
        self._held: str | None = None
        """The input of a call whose block waits for its style."""

    @override
    def keep_alive(self) -> bytes:
        return PING

    @override
    def _finish(self, parts: list[bytes]) -> None:
        self._begin(parts)
        if not self._stream.parts:
            self._add_begun(_EMPTY, parts)
            self._add_ended(_EMPTY, parts)
        blocks, usage = self._blocks, self.usage
        ending = blocks.ending(self._stream, usage)
        more = {"usage": blocks.usage(usage), **blocks.management}
        if (diagnosed := blocks.diagnostics(usage)) != blocks.diagnostics(None):
            more |= diagnosed
        self._add_event(event("message_delta", delta=ending, **more), parts)
        self._add_event(event("message_stop"), parts)

    @override
    def _failure_events(self, error: ApiError) -> list[bytes]:
        body = error.body(ErrorStyle.ANTHROPIC)
        return [event("error", error=body["error"])]

    @override
    def _add_opening(self, parts: list[bytes]) -> None:
        # The cached tokens are not known yet.
        prompt = Usage(prompt_tokens=sum(map(len, self._completion.prompt_token_ids)))
        unknown = {"stop_reason": None, "stop_sequence": None, "usage": self._blocks.usage(prompt)}
        self._add_event(event("message_start", message=self._blocks.head([]) | unknown), parts)

    @override
    def _add_begun(self, part: Part, parts: list[bytes]) -> None:
        if part.kind is PartKind.CALL:
            self._held = ""
        else:
            self._open(part, "", parts)

    def _open(self, part: Part, style: str, parts: list[bytes]) -> None:
        block = self._blocks.opening(part, style)
        self._add_event(event("content_block_start", index=part.number, content_block=block), parts)
        self._delta = _DELTA % (part.number, *_DELTA_TYPES[part.kind])

    @override
    def _add_text(self, part: Part, text: str, logprobs: bytes, parts: list[bytes]) -> None:
        if self._held is not None:
            self._held += text
            self._open_call(part, parts, is_whole=False)
        elif not (self._blocks.omits_thinking and part.kind is PartKind.REASONING):
            self._add_event(b"%b%b}}" % (self._delta, _json(text)), parts)

    @override
    def _add_ended(self, part: Part, parts: list[bytes]) -> None:
        self._open_call(part, parts, is_whole=True)
        signature = self._blocks.signature(part)
        if signature is not None:
            delta = {"type": "signature_delta", "signature": signature}
            self._add_event(event("content_block_delta", index=part.number, delta=delta), parts)
        self._add_event(event("content_block_stop", index=part.number), parts)

    def _open_call(self, part: Part, parts: list[bytes], *, is_whole: bool) -> None:
        """Add the beginning of a call's block once the style of its input is known."""
        if self._held is None or (style := style_of(self._held, is_whole=is_whole)) is None:
            return
        text, self._held = self._held, None
        self._open(part, style, parts)
        if text:
            self._add_text(part, text, b"", parts)


class MessageAssembler(PartsAssembler):
    """Makes a whole message."""

    @override
    def body(self) -> dict[str, Any]:
        blocks, stream, usage = _Blocks(self.completion), self.stream, self.usage
        content = [blocks.whole(part) for part in stream.parts or (_EMPTY,)]
        return {
            **blocks.head(content, usage),
            **blocks.ending(stream, usage),
            "usage": blocks.usage(usage),
            **blocks.management,
        }


def _read_input(arguments: str) -> Any:
    """Return the arguments of a call, as far as the model has written them.

    Clients read the arguments of a stream with the same parser.
    """
    try:
        return from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
