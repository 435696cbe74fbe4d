"""One choice of an answer: what its deltas add to it as the client sees it.

Completions and chats differ in this one object. It takes the deltas either one by one, for the chunks of a
stream, or all of them, for the whole answer; a stream joins to the whole.
"""

from typing import Any, ClassVar, Protocol

from contract.messages import Delta
from gateway.dialects.request import GenerationRequest
from gateway.stream.completion import Completion

TOOL_CALLS = "tool_calls"
"""Finish reason of a choice that ends by itself and calls tools."""

FUNCTION_CALL = "function_call"
"""The same, told to a client that speaks of functions."""

FAILED = "error"
"""Finish reason of a choice whose request failed, in dialects that have one."""


class Choice(Protocol):
    """What renders the deltas of one choice."""

    PLAIN_START: ClassVar[bytes]
    """JSON between the index and the text, in a chunk that tells nothing but text."""
    PLAIN_END: ClassVar[bytes]
    """JSON behind that text, or behind reasoning, up to the end of the choice."""

    def __init__(self, completion: Completion, index: int) -> None: ...

    @classmethod
    def plain_reasoning_start(cls, request: GenerationRequest) -> bytes:
        """Return what stands for PLAIN_START where nothing but reasoning is told; empty if none ever is."""

    def take_prompt_logprobs(self, encoded: dict[str, bytes]) -> None:
        """Take the log-probabilities of the echoed tokens, to be told with the first chunk."""

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Return what a delta adds: the choice as each of some chunks shows it, none if nothing is told."""

    def failed(self) -> dict[str, Any]:
        """Return the choice as a chunk shows it whose request has failed."""

    def add(self, delta: Delta) -> None:
        """Keep a delta for `whole`."""

    def whole(self) -> dict[str, Any]:
        """Return all that was added, at least the end, as a whole answer shows it."""
