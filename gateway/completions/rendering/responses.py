"""Responses of OpenAI's Responses API: the parts of a choice as items, streamed or whole.

Every event has a `sequence_number`, from 0 without gaps. A keep-alive takes a number, too. If the
stream can be resumed, it repeats the last one instead: there, numbers follow from the tokens alone.
"""

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from typing_extensions import override

from contract.outcomes import FinishReason
from contract.tier import ServiceTier
from gateway.completions.queue.generation import Turn
from gateway.completions.rendering.assembler import PartsAssembler, WholeResponse, in_turn
from gateway.completions.rendering.completion import Completion, Usage
from gateway.completions.rendering.content_parts import Part, PartKind, PartStream
from gateway.completions.rendering.events import PartsRenderer
from gateway.completions.rendering.tool_calls import (
    TextArgument,
    call_id,
    decoded,
    text_argument,
)
from gateway.dialects.json_styles import style_of
from gateway.dialects.request import (
    CACHE_CHANGES,
    CacheDiagnosis,
    CacheMiss,
    CallForm,
    CallKind,
    ResponsesOptions,
)
from gateway.dialects.responses.failures import event, event_data, failure_of
from gateway.dialects.responses.items import item_id
from gateway.records.errors import ApiError

_json = msgspec.json.Encoder().encode

_PREFIXES: Final = {
    PartKind.REASONING: "rs_",
    PartKind.TEXT: "msg_",
    CallKind.FUNCTION: "fc_",
    CallKind.CUSTOM: "ctc_",
    CallKind.TOOL_SEARCH: "tsc_",
    CallKind.LOCAL_SHELL: "lsh_",
    CallKind.SHELL: "sh_",
}
_TEXT_INPUT: Final = "custom_tool_call_input"
_NO_ITEM: Final = Part(-1, PartKind.REASONING)
"""The reasoning of a model that wrote none."""


class ResponseObjects:
    """Makes the objects of one response: itself, and its items."""

    def __init__(self, completion: Completion) -> None:
        options = completion.request.form_options
        assert isinstance(options, ResponsesOptions)  # noqa: S101 - it is the response's form
        self.options = options
        self._completion = completion

    def response(
        self,
        status: str,
        output: Iterable[dict[str, Any]] = (),
        *,
        usage: Usage | None = None,
        error: ApiError | None = None,
        ended_at: int = 0,
    ) -> msgspec.Raw:
        """Return the response. `ended_at` is a Unix time in seconds, if it is completed."""
        completion = self._completion
        is_complete, created = status == "completed", completion.created
        body = {
            "id": completion.id,
            "object": "response",
            "created_at": created,
            # Clocks of machines differ.
            "completed_at": max(ended_at, created) if is_complete else None,
            "status": status,
            "model": completion.model,
            "output": list(output),
            "error": None if error is None else failure_of(error),
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "usage": None if usage is None else _usage(usage) | completion.cost(usage),
            "service_tier": completion.request.service_tier or ServiceTier.DEFAULT,
            "store": self.options.is_kept,
        }
        if completion.request.compared_id is not None:
            body["prompt_cache_diagnostics"] = usage and self._diagnosed(usage)
        return msgspec.Raw(_json(body)[:-1] + b"," + self.options.echo[1:])

    def _diagnosed(self, usage: Usage) -> dict[str, Any] | None:
        """Return the cache diagnostics, which need the tokens that were cached."""
        match self._completion.request.cache_diagnosis:
            case None:
                return None
            case CacheDiagnosis(miss=miss, tokens=tokens) if miss in CACHE_CHANGES:
                reason = CACHE_CHANGES[miss]
                return {"type": "cache_miss", "reason": reason, "cache_missed_tokens": tokens}
            case CacheDiagnosis(miss=CacheMiss.NONE) if usage.cached_tokens:
                return {"type": "cache_hit"}
            case CacheDiagnosis(miss=CacheMiss.NOT_FOUND):
                return {"type": "comparison_response_not_found"}
            case CacheDiagnosis(miss=CacheMiss.NONE) as diagnosis:
                missed = diagnosis.not_found(usage.cached_tokens)
                if missed:
                    missed["cache_missed_tokens"] = missed.pop("tokens")
                return {"type": "unavailable", **missed}
            case _:
                return {"type": "unavailable"}

    def form_of(self, part: Part) -> CallForm:
        """Return how a call is returned."""
        return self.options.calls.get(part.name) or CallForm(CallKind.FUNCTION, part.name)

    def id_of(self, part: Part) -> str:
        """Return the id of an item."""
        kind = self.form_of(part).kind if part.kind is PartKind.CALL else part.kind
        return item_id(_PREFIXES[kind], self._completion.id, str(part.number))

    def content(self, part: Part, text: str) -> dict[str, Any]:
        """Return the only content of reasoning or of a message."""
        if part.kind is PartKind.TEXT:
            logprobs = _array(part.logprobs if text else ())
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        kind = "summary_text" if self.options.has_summaries else "reasoning_text"
        return {"type": kind, "text": text}

    def item(self, part: Part, status: str) -> dict[str, Any]:
        """Return an item; one in progress is empty."""
        is_begun = status == "in_progress"
        head: dict[str, Any] = {"id": self.id_of(part)}
        if part.kind is PartKind.CALL:
            return head | self._call(part, self.form_of(part), status)
        text = "" if is_begun else part.text
        content = [self.content(part, text)] if text else []
        if part.kind is PartKind.TEXT:
            head |= {"type": "message", "role": "assistant"}
            return {**head, "status": status, "content": content}
        if is_begun:
            return {**head, "type": "reasoning", "summary": []}
        summary, content = (content, []) if self.options.has_summaries else ([], content)
        item: dict[str, Any] = {**head, "type": "reasoning", "summary": summary}
        if content:
            item["content"] = content
        if self.options.has_sealed_reasoning:
            seal = self._completion.seal
            if text and seal:
                item["encrypted_content"] = seal(text, part.number)
        return {**item, "status": status}

    def _call(self, part: Part, form: CallForm, status: str) -> dict[str, Any]:
        call: dict[str, Any] = {
            "type": form.kind,
            "call_id": call_id(self._completion.id, 0, part.call),
        }
        if form.kind is CallKind.CUSTOM:
            call["call_id"] += style_of(part.text, is_whole=True) or ""
        arguments = "" if status == "in_progress" else part.text
        match form.kind:
            case CallKind.FUNCTION:
                call |= {"name": form.name, "arguments": arguments, "status": status}
            case CallKind.CUSTOM:
                text = text_argument(arguments)
                call |= {"name": form.name, "input": text, "status": status}
            case CallKind.TOOL_SEARCH:
                given = _given(arguments)
                call |= {"execution": "client", "arguments": given, "status": status}
            case CallKind.LOCAL_SHELL:
                action = {"type": "exec", "command": [], "env": {}, **_given(arguments)}
                call |= {"action": action, "status": status}
            case CallKind.SHELL:
                call |= {"action": {"commands": [], **_given(arguments)}, "status": status}
        return call | {"namespace": form.namespace} if form.namespace else call


def is_incremental(kind: CallKind) -> bool:
    """Whether the input of a call is streamed; others are sent when they are complete."""
    return kind in (CallKind.FUNCTION, CallKind.CUSTOM)


def _given(arguments: str) -> dict[str, Any]:
    given = decoded(arguments)
    return given if isinstance(given, dict) else {}


def _array(encoded: Iterable[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[%b]" % b",".join(encoded))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _status(stream: PartStream, part: Part) -> str:
    """Return the status of an ended part: incomplete if the end of the response cut it off."""
    is_cut = stream.finish_reason is FinishReason.LENGTH and part is stream.parts[-1]
    if is_cut and part.kind is PartKind.CALL:
        is_cut = decoded(part.text) is None
    return "incomplete" if is_cut else "completed"


def _whole_status(stream: PartStream) -> str:
    return "incomplete" if stream.finish_reason is FinishReason.LENGTH else "completed"


def _output(stream: PartStream, objects: ResponseObjects) -> list[dict[str, Any]]:
    items = [objects.item(part, _status(stream, part)) for part in stream.parts]
    if _lacks_reasoning(stream, objects):
        items.insert(0, objects.item(_NO_ITEM, "completed"))
    return items


def _lacks_reasoning(stream: PartStream, objects: ResponseObjects) -> bool:
    is_first = stream.parts and stream.parts[0].kind is PartKind.REASONING
    return objects.options.wants_reasoning and not is_first


class ResponseAssembler(PartsAssembler):
    """Collects a whole response."""

    @override
    async def response(self, turn: Turn) -> WholeResponse:
        objects = ResponseObjects(self.completion)

        def content() -> bytes:
            status, output = _whole_status(self.stream), _output(self.stream, objects)
            ended_at = self.stopwatch.ended_at
            return bytes(objects.response(status, output, usage=self.usage, ended_at=ended_at))

        size = self.size + len(objects.options.echo)
        return WholeResponse(await in_turn(turn, content, size=size), self.usage, {})


class ResponseRenderer(PartsRenderer):
    """Renders the events of a response."""

    def __init__(self, completion: Completion, *, skip: int = 0, has_ids: bool = False) -> None:
        super().__init__(completion, skip=skip, has_ids=has_ids)
        self._objects = ResponseObjects(completion)
        self._is_resumable = has_ids or completion.request.is_background
        self._keep_alives = 0
        """Events that only this stream has."""
        self._first = 0
        """Index of the first part among the items."""
        self._text: TextArgument | None = None
        """Reads the open call if its input is a text."""
        self._held: str | None = None
        """The text of a call that waits for the style of its JSON."""
        self._head = b""
        """What the events with text of the open part have before it; empty if there are none."""
        self._has_logprobs = False
        """Whether these events have log-probabilities."""

    @override
    def keep_alive(self) -> bytes:
        if self._is_resumable:
            sequence = max(self.number, self._skip) - 1
        else:
            sequence = self._sequence()
            self._keep_alives += 1
        response = self._objects.response("in_progress")
        return event("response.in_progress", sequence, {"response": response})

    @override
    def render_failure(self, error: ApiError) -> bytes:
        return self.opening() + super().render_failure(error)

    @override
    def _failure_events(self, error: ApiError) -> list[bytes]:
        response = self._objects.response(
            "failed", _output(self._stream, self._objects), error=error, usage=self.usage_so_far()
        )
        return [event_data("response.failed", self._sequence(), {"response": response})]

    @override
    def _finish(self, parts: list[bytes]) -> None:
        self._begin(parts)
        if not self._stream.parts:
            self._add_missing_reasoning(parts)
        status, output = _whole_status(self._stream), _output(self._stream, self._objects)
        ended_at = self._stopwatch.ended_at
        response = self._objects.response(status, output, usage=self.usage, ended_at=ended_at)
        self.whole = bytes(response)
        self._add(f"response.{status}", {"response": response}, parts)

    @override
    def _add_opening(self, parts: list[bytes]) -> None:
        response = self._objects.response("in_progress")
        for kind in ("created", "in_progress"):
            self._add(f"response.{kind}", {"response": response}, parts)

    def _add_missing_reasoning(self, parts: list[bytes]) -> None:
        if _lacks_reasoning(self._stream, self._objects):
            for change, status in (("added", "in_progress"), ("done", "completed")):
                item = {"output_index": 0, "item": self._objects.item(_NO_ITEM, status)}
                self._add(f"response.output_item.{change}", item, parts)
            self._first = 1

    @override
    def _add_begun(self, part: Part, parts: list[bytes]) -> None:
        if part.number == 0:
            self._add_missing_reasoning(parts)
        name, members = self._delta(part)
        self._text = TextArgument() if name == _TEXT_INPUT else None
        self._head, self._has_logprobs = b"", part.kind is PartKind.TEXT
        if name:
            kind = f"response.{name}.delta"
            self._head = b'event: %b\ndata: %b,"delta":' % (
                kind.encode(),
                _json({"type": kind, **members})[:-1],
            )
        if part.kind is PartKind.CALL:
            if self._text is not None:
                self._held = ""
            elif is_incremental(self._objects.form_of(part).kind):
                self._add_item("added", part, "in_progress", parts)
            return
        self._add_item("added", part, "in_progress", parts)
        name, members = self._content(part)
        content = self._objects.content(part, "")
        self._add(f"response.{name}_part.added", {**members, "part": content}, parts)

    @override
    def _add_text(self, part: Part, text: str, logprobs: bytes, parts: list[bytes]) -> None:
        if self._text is not None:
            text = self._text.add(text)
        if self._held is not None:
            self._held += text
            if style_of(part.text, is_whole=False) is None:
                return
            text = self._begin_held(part, parts)
        if self._head and (text or logprobs):
            more = b',"logprobs":[%b]' % logprobs if self._has_logprobs else b""
            end = b'%b%b,"sequence_number":%d}' % (_json(text), more, self._sequence())
            self._add_event(self._head + end, parts)

    @override
    def _add_ended(self, part: Part, parts: list[bytes]) -> None:
        name, members = self._delta(part)
        status, text = _status(self._stream, part), part.text
        if self._text is not None:
            rest = self._text.finish(text)
            if self._held is not None:
                rest = self._begin_held(part, parts) + rest
            if rest:
                self._add(f"response.{name}.delta", {**members, "delta": rest}, parts)
            self._add(f"response.{name}.done", {**members, "input": self._text.text}, parts)
        elif name == "function_call_arguments":
            done = {**members, "name": self._objects.form_of(part).name, "arguments": text}
            self._add(f"response.{name}.done", done, parts)
        elif name:
            done = {**members, "text": text}
            if self._has_logprobs:
                done["logprobs"] = _array(part.logprobs)
            self._add(f"response.{name}.done", done, parts)
            container, place = self._content(part)
            content = {**place, "part": self._objects.content(part, text)}
            self._add(f"response.{container}_part.done", content, parts)
        else:
            self._add_item("added", part, "in_progress", parts)
        self._add_item("done", part, status, parts)

    def _begin_held(self, part: Part, parts: list[bytes]) -> str:
        """Add the beginning of a call that has waited, and return its text so far."""
        text, self._held = self._held or "", None
        self._add_item("added", part, "in_progress", parts)
        return text

    def _place(self, part: Part) -> dict[str, Any]:
        place = {"item_id": self._objects.id_of(part)}
        return {**place, "output_index": self._first + part.number}

    def _content(self, part: Part) -> tuple[str, dict[str, Any]]:
        """Return what the content of a part is called, and the members of its events."""
        if part.kind is PartKind.REASONING and self._objects.options.has_summaries:
            return "reasoning_summary", {**self._place(part), "summary_index": 0}
        return "content", {**self._place(part), "content_index": 0}

    def _delta(self, part: Part) -> tuple[str, dict[str, Any]]:
        """Return what the text of a part is called, and the members of its events."""
        container, place = self._content(part)
        if part.kind is PartKind.TEXT:
            return "output_text", place
        if part.kind is PartKind.REASONING:
            is_content = container == "content"
            return "reasoning_text" if is_content else "reasoning_summary_text", place
        kind = self._objects.form_of(part).kind
        if not is_incremental(kind):
            return "", {}
        is_text = kind is CallKind.CUSTOM
        return _TEXT_INPUT if is_text else "function_call_arguments", self._place(part)

    def _add_item(self, change: str, part: Part, status: str, parts: list[bytes]) -> None:
        item = self._objects.item(part, status)
        members = {"output_index": self._first + part.number, "item": item}
        self._add(f"response.output_item.{change}", members, parts)

    def _add(self, kind: str, members: dict[str, Any], parts: list[bytes]) -> None:
        if self.number < self._skip:
            self.number += 1
        else:
            self._add_event(event_data(kind, self._sequence(), members), parts)

    def _sequence(self) -> int:
        """Return the number of the next event."""
        return self.number + self._keep_alives
