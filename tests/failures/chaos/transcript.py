"""What a client received of one completion, chat, message or response, over all its connections."""

from dataclasses import dataclass, field
from typing import Any

from gateway.completions.rendering.tool_calls import call_id

_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content")
"""Lists of log-probabilities: those of completions, and the last one of chats."""
_REASONING = ("reasoning_content", "reasoning")
"""Names of the member with the reasoning, by dialect."""
_PARTS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("reasoning", "thinking"),
    "input_json_delta": ("arguments", "partial_json"),
    "response.output_text.delta": ("text", "delta"),
    "response.reasoning_text.delta": ("reasoning", "delta"),
    "response.function_call_arguments.delta": ("arguments", "delta"),
}
"""Pieces of messages and responses: what they add to, and their member with it."""
_CALLS = ("tool_use", "function_call")
_ENDS = ("message_stop", "response.completed", "response.incomplete")


@dataclass(slots=True)
class ReceivedCall:
    """One tool call, put together from its pieces."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ReceivedChoice:
    """One choice, put together from its pieces."""

    text: str = ""
    """The content, for a chat."""
    reasoning: str = ""
    calls: list[ReceivedCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    has_role: bool = False
    wrong: str = ""
    """Inconsistencies between the pieces of a chat."""

    def add(self, request_id: str, piece: dict[str, Any]) -> None:
        """Append a piece."""
        if "text" in piece:
            self.text += piece["text"]
        elif "delta" in piece:
            self._add_delta(request_id, piece["index"], piece["delta"])
        else:
            self._add_message(request_id, piece["index"], piece["message"])
        self.token_ids += piece.get("token_ids") or []
        lists = piece.get("logprobs") or {}
        for name in _LISTS:
            self.logprobs.setdefault(name, []).extend(lists.get(name) or [])
        self.finish_reason = piece["finish_reason"] or self.finish_reason
        self.stop_reason = piece.get("stop_reason") or self.stop_reason

    @property
    def calls_in_a_row(self) -> str:
        """All calls as one text, which only grows."""
        return "".join(f"\n{call.name} {call.arguments}" for call in self.calls)

    def _add_delta(self, request_id: str, index: int, delta: dict[str, Any]) -> None:
        if self.has_role == ("role" in delta):
            self._add_error("the role comes once, and first")
        self.has_role = True
        reasoning, content = _reasoning(delta), delta.get("content") or ""
        if reasoning and (self.text or self.calls):
            self._add_error("reasoning comes after the answer")
        self.reasoning += reasoning
        self.text += content
        for call in delta.get("tool_calls") or []:
            self._add_call_piece(request_id, index, call)
        if function := delta.get("function_call"):
            self._add_function_piece(function)

    def _add_call_piece(self, request_id: str, index: int, piece: dict[str, Any]) -> None:
        number, function = piece["index"], piece["function"]
        if "name" in function:
            expected = ("function", call_id(request_id, index, number), len(self.calls))
            if (piece.get("type"), piece.get("id"), number) != expected:
                self._add_error(f"call {len(self.calls)} begins with {piece}")
            self.calls.append(ReceivedCall(function["name"]))
        elif "id" in piece or "type" in piece or number != len(self.calls) - 1:
            self._add_error(f"call {len(self.calls) - 1} continues with {piece}")
            return
        self.calls[-1].arguments += function["arguments"]

    def _add_function_piece(self, function: dict[str, str]) -> None:
        if ("name" in function) == bool(self.calls):
            self._add_error(f"a function's call continues with {function}")
            return
        if not self.calls:
            self.calls.append(ReceivedCall(function["name"]))
        self.calls[0].arguments += function["arguments"]

    def _add_message(self, request_id: str, index: int, message: dict[str, Any]) -> None:
        if message["role"] != "assistant":
            self._add_error(f"the role is {message['role']}")
        self.text += message["content"] or ""
        self.reasoning += _reasoning(message)
        for number, call in enumerate(message.get("tool_calls") or []):
            self._add_call_piece(request_id, index, {"index": number, **call})
        if function := message.get("function_call"):
            self._add_function_piece(function)

    def _add_error(self, text: str) -> None:
        self.wrong = self.wrong or text


def _reasoning(delta: dict[str, Any]) -> str:
    return "".join(delta.get(name) or "" for name in _REASONING)


@dataclass(slots=True)
class Transcript:
    """All choices of a response, as far as they were received."""

    choices: dict[int, ReceivedChoice] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    cost_micros: int | None = None
    """What the response says that it costs."""
    reasoning_tokens: int | None = None
    """Of the completion tokens, if the response counts them."""
    error: dict[str, Any] | None = None
    is_done: bool = False
    """Whether everything was received: a whole body, or a stream with its `[DONE]`."""
    after_end: int = 0
    """Pieces of a choice after its finish reason, and events after `[DONE]`."""

    @property
    def tokens(self) -> int:
        """The number of token ids that were received."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def add(self, event: dict[str, Any]) -> None:
        """Record a chunk of a stream, or a whole body."""
        self.error = event.get("error") or self.error
        self.after_end += self.is_done
        for piece in event.get("choices", []):
            choice = self.choices.setdefault(piece["index"], ReceivedChoice())
            self.after_end += choice.finish_reason is not None
            choice.add(event.get("id", ""), piece)
        body: dict[str, Any] = event.get("response") or event
        if event.get("type") == "message" or event.get("object") == "response":
            self._add_whole(event)
        elif "type" in event:
            self._add_part(event["type"], event, body)
        if body.get("usage") and self.error is None:
            self._count(body["usage"])

    def _add_whole(self, body: dict[str, Any]) -> None:
        """Record a whole message or response that consists of text."""
        choice = self.choices.setdefault(0, ReceivedChoice())
        parts = [*body.get("content", ())]
        parts += [part for item in body.get("output", ()) for part in item.get("content", ())]
        choice.text += "".join(part.get("text", "") for part in parts)
        choice.finish_reason = body.get("stop_reason") or body["status"]

    def _add_part(self, kind: str, event: dict[str, Any], body: dict[str, Any]) -> None:
        """Record an event of a message or a response."""
        choice = self.choices.setdefault(0, ReceivedChoice())
        self.error = body.get("error") or self.error
        block = event.get("content_block") or event.get("item") or {}
        if kind in ("content_block_start", "response.output_item.added") and (
            block["type"] in _CALLS
        ):
            choice.calls.append(ReceivedCall(block["name"]))
        piece = event["delta"] if kind == "content_block_delta" else event
        if part := _PARTS.get(piece["type"]):
            member, name = part
            owner = choice.calls[-1] if member == "arguments" else choice
            setattr(owner, member, getattr(owner, member) + piece[name])
        if kind == "message_delta":
            choice.finish_reason = event["delta"]["stop_reason"]
            choice.stop_reason = event["delta"]["stop_sequence"]
        elif kind in _ENDS:
            self.is_done = True
            choice.finish_reason = body.get("status", choice.finish_reason)

    def _count(self, counts: dict[str, Any]) -> None:
        names = ("prompt", "completion") if "prompt_tokens" in counts else ("input", "output")
        prompt, completion = (counts[f"{name}_tokens"] for name in names)
        prompt += counts.get("cache_read_input_tokens", 0)
        if "cost" in counts:
            self.cost_micros = round(counts["cost"] * 1_000_000)
        self.usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        details = counts.get(f"{names[1]}_tokens_details") or {}
        self.reasoning_tokens = details.get("reasoning_tokens")

    def difference(self, expected: "Transcript") -> str:
        """Describe the difference from the expected response; empty if there is none so far.

        A transcript that is done must be complete; any other may end anywhere.
        """
        if self.after_end:
            return f"{self.after_end} pieces after the end"
        if unknown := set(self.choices) - set(expected.choices):
            return f"choices {sorted(unknown)} that were not requested"
        for index in sorted(expected.choices):
            reported, wanted = self.choices.get(index, ReceivedChoice()), expected.choices[index]
            if found := _difference(reported, wanted, is_done=self.is_done):
                return f"choice {index}: {found}"
        if self.is_done and self.usage is not None and self.usage != expected.usage:
            return f"usage is {self.usage} instead of {expected.usage}"
        if self.usage is not None and self.reasoning_tokens != expected.reasoning_tokens:
            return f"{self.reasoning_tokens} of them reason instead of {expected.reasoning_tokens}"
        return ""


def _difference(reported: ReceivedChoice, wanted: ReceivedChoice, *, is_done: bool) -> str:
    if reported.wrong:
        return reported.wrong
    pairs = [
        ("text", reported.text, wanted.text),
        ("reasoning", reported.reasoning, wanted.reasoning),
        ("calls", reported.calls_in_a_row, wanted.calls_in_a_row),
        ("token_ids", reported.token_ids, wanted.token_ids),
        *(
            (name, reported.logprobs.get(name, []), wanted.logprobs.get(name, []))
            for name in _LISTS
        ),
    ]
    is_whole = is_done or reported.finish_reason is not None
    for name, had, full in pairs:
        if had != (full if is_whole else full[: len(had)]):
            return f"{name} {_first_difference(had, full)}"
    ending, wanted_ending = (
        (reported.finish_reason, reported.stop_reason),
        (wanted.finish_reason, wanted.stop_reason),
    )
    if is_whole and ending != wanted_ending:
        return f"ended with {ending} instead of {wanted_ending}"
    return ""


def _first_difference(had: Any, full: Any) -> str:
    """Describe where two texts or lists first differ."""
    at = next((i for i, (a, b) in enumerate(zip(had, full, strict=False)) if a != b), None)
    if at is None:
        return f"has {len(had)} instead of {len(full)}: ...{had[-20:]!r}, ...{full[-20:]!r}"
    begin = max(at - 10, 0)
    return f"differs at {at}: {had[begin : at + 20]!r} instead of {full[begin : at + 20]!r}"
