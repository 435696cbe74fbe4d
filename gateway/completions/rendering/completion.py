"""Completion: the parts shared by all chunks of a response, and its usage and cost."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from contract.messages import Delta, JobFinished, JobStarted
from gateway.dialects.request import GenerationRequest
from gateway.records.usage_record import MICRO


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as needed to render its response."""

    id: str
    model: str
    created: int
    fingerprint: str
    """Identifies the model and the engine's version, but not its exactness class."""
    request: GenerationRequest
    prompt_token_ids: Sequence[Sequence[int]]
    """Token ids of each prompt as they were sent to the worker."""
    prompt_texts: list[str]
    """The text of each prompt that the response contains: echoed (see
    `gateway.completions.prompt.preparation`), or in llama.cpp's own form."""
    generation_settings: dict[str, Any] = {}
    """The parameters that a response in llama.cpp's own form contains; else empty."""
    cost_of: Callable[["Usage"], int] | None = None
    """Returns the cost of a usage in micro-dollars, if the response shows the cost."""
    seal: Callable[[str, int], str] | None = None
    """Seals the reasoning of a part of the response (`gateway.completions.sealing`), by its number,
    if the form of the response contains sealed reasoning."""
    started_at: float = msgspec.field(default_factory=time.monotonic)
    """Monotonic time in seconds at which the client began to wait."""

    _classes: list[str] = []
    _encoded_ids: dict[int, msgspec.Raw] = {}

    def prompt_ids_of_choice(self, index: int) -> msgspec.Raw:
        """Return the token ids of a choice's prompt in JSON, encoded once for all its choices."""
        prompt_index = index // self.request.n
        if prompt_index not in self._encoded_ids:
            ids = list(self.prompt_token_ids[prompt_index])
            self._encoded_ids[prompt_index] = msgspec.Raw(msgspec.json.encode(ids))
        return self._encoded_ids[prompt_index]

    def note_class(self, message: JobStarted | JobFinished) -> bool:
        """Add the exactness class of an engine to the fingerprint. Return whether it was new."""
        exactness_class = message.exactness_class
        is_new = exactness_class not in ("", *self._classes)
        if is_new:
            self._classes.append(exactness_class)
        return is_new

    def choice_index(self, prompt_index: int, choice: int) -> int:
        """Return the index of a choice in the response."""
        return prompt_index * self.request.n + choice

    @property
    def choices(self) -> int:
        """Number of choices of the whole response."""
        return len(self.request.prompts) * self.request.n

    def head(self, *, is_chunk: bool = False) -> dict[str, Any]:
        """Return the first members of a whole response or of every chunk."""
        head: dict[str, Any] = {
            "id": self.id,
            "object": self._object_name(is_chunk=is_chunk),
            "created": self.created,
            "model": self.model,
            "system_fingerprint": "-".join([self.fingerprint, *self._classes]),
        }
        if self.request.service_tier is not None:
            head["service_tier"] = self.request.service_tier
        return head

    def new_usage(self) -> "Usage":
        """Return the usage of a response that has not begun."""
        return Usage(reasoning_tokens=None if self.request.chat is None else 0)

    def cost(self, usage: "Usage") -> dict[str, Any]:
        """Return the `cost` member of `usage`, in dollars; empty if it was not requested."""
        return {} if self.cost_of is None else {"cost": self.cost_of(usage) / MICRO}

    def _object_name(self, *, is_chunk: bool) -> str:
        if self.request.pooling is not None:
            return "list"
        if self.request.chat is None:
            return "text_completion"
        return "chat.completion.chunk" if is_chunk else "chat.completion"


class Usage(msgspec.Struct):
    """Token counts, summed over the prompts as their jobs finish."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    discarded_tokens: int = 0
    """Completion tokens of the sequences that `best_of` discarded."""
    reasoning_tokens: int | None = None
    """Reasoning tokens of chats, counted as they arrive; None for a completion."""

    def add(self, finished: JobFinished) -> None:
        """Count one finished job."""
        self.prompt_tokens += finished.prompt_tokens
        self.completion_tokens += finished.completion_tokens
        self.cached_tokens += finished.cached_tokens

    def add_reasoning(self, delta: Delta) -> None:
        """Count the reasoning tokens of one delta of a chat."""
        if self.reasoning_tokens is not None:
            self.reasoning_tokens += delta.reasoning_tokens

    def body(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        details: dict[str, int] = {}
        if self.reasoning_tokens is not None:
            details["reasoning_tokens"] = self.reasoning_tokens
        if self.discarded_tokens:
            details["best_of_tokens"] = self.discarded_tokens
        if details:
            body["completion_tokens_details"] = details
        return body
