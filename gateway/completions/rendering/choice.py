"""Choice of a response: render the deltas of one choice.

Completions and chats differ only in this object. It takes deltas one by one, for the chunks of a
stream, or all of them, for a whole response. The chunks of a stream add up to the whole response.
"""

from typing import Any, ClassVar, Protocol

from contract.messages import Delta, JobFinished
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.prompt_logprobs import EncodedPrompt
from gateway.dialects.request import GenerationRequest

TOOL_CALLS = "tool_calls"
"""Finish reason of a choice that stops by itself and calls tools."""

FUNCTION_CALL = "function_call"
"""TOOL_CALLS for clients of the legacy `functions` parameter."""

FAILED = "error"
"""Finish reason of a choice whose request failed, in dialects that have one."""


class Choice(Protocol):
    """Renders the deltas of one choice."""

    PLAIN_START: ClassVar[bytes] = b""
    """JSON between the index and the text, in a chunk with nothing but text."""
    PLAIN_END: ClassVar[bytes] = b""
    """JSON after that text, or after reasoning, up to the end of the choice."""

    def __init__(self, completion: Completion, index: int) -> None: ...

    @classmethod
    def plain_reasoning_starts(cls, request: GenerationRequest) -> list[bytes]:
        """Return the JSON before each copy of the text in chunks with nothing but reasoning.

        Empty if there are no such chunks.
        """
        del request
        return []

    def take_prompt_logprobs(self, encoded: EncodedPrompt) -> None:
        """Store the log-probabilities of the prompt's tokens for the first chunk, if it has any."""

    def take_finished(self, finished: JobFinished) -> None:
        """Store the counts of the job that has finished, in a choice that reports them itself."""

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Return what a delta adds: one choice object for each chunk, none if nothing is sent."""

    def without_tokens(self) -> dict[str, Any]:
        """Return the choice object of a chunk before the first token."""

    def take_members(self) -> dict[str, Any]:
        """Return the members beside `choices` that the first chunk or a whole response has.

        Later calls return nothing.
        """
        return {}

    def failed(self) -> dict[str, Any]:
        """Return the choice object of a failed request's chunk."""

    def add(self, delta: Delta) -> None:
        """Store a delta for `whole`."""

    def whole(self) -> dict[str, Any]:
        """Return the choice object of a whole response. At least the last delta must be added."""
