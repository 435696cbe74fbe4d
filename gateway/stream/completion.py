"""The shapes of a completion: what all chunks share, choices, log-probabilities, usage."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from contract.messages import Delta, JobFinished, TokenLogprob
from gateway.dialects.request import GenerationRequest

LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What stays the same in every part of one answer."""

    id: str
    model: str
    created: int
    fingerprint: str
    request: GenerationRequest
    prompt_texts: list[str]
    """Text of each prompt, echoed if the request says so; empty if it does not."""

    def choice_index(self, prompt_index: int, choice: int) -> int:
        """Return the index that the client sees."""
        return prompt_index * self.request.n + choice

    @property
    def choices(self) -> int:
        """Number of choices of the whole answer."""
        return len(self.request.prompts) * self.request.n


@dataclass(slots=True)
class Usage:
    """Token counts, summed over the prompts as their jobs finish."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, finished: JobFinished) -> None:
        """Count one finished job."""
        self.prompt_tokens += finished.prompt_tokens
        self.completion_tokens += finished.completion_tokens
        self.cached_tokens += finished.cached_tokens

    def body(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class LogprobLists:
    """OpenAI's four parallel lists."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def extend(self, logprobs: list[TokenLogprob], *, base: int) -> None:
        """Append tokens; `base` is where their text starts in the text that is returned."""
        for entry in logprobs:
            self.tokens.append(entry.token)
            self.token_logprobs.append(
                None if entry.logprob is None else max(entry.logprob, LOGPROB_FLOOR)
            )
            self.top_logprobs.append(None if entry.top is None else _by_token(entry.top))
            self.text_offset.append(base + entry.offset)

    def extend_with_prompt(self, logprobs: list[TokenLogprob], prompt_text: str) -> None:
        """Append the tokens of an echoed prompt."""
        end = logprobs[-1].offset + len(logprobs[-1].token)
        # A begin-of-text token that the tokenizer put before the client's text is not echoed.
        unseen = max(end - len(prompt_text), 0)
        self.extend(logprobs, base=-unseen)
        self.text_offset = [max(offset, 0) for offset in self.text_offset]

    def body(self) -> dict[str, Any]:
        """Return the `logprobs` object of a choice."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


@dataclass(slots=True)
class Choice:
    """One choice of an answer that is returned whole."""

    texts: list[str] = field(default_factory=list)
    logprobs: LogprobLists = field(default_factory=LogprobLists)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta, *, prompt_characters: int) -> None:
        """Append what a delta brought."""
        self.texts.append(delta.text)
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs, base=prompt_characters)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def body(self, index: int, *, with_logprobs: bool) -> dict[str, Any]:
        """Return the choice as the API shows it."""
        return {
            "index": index,
            "text": "".join(self.texts),
            "logprobs": self.logprobs.body() if with_logprobs else None,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


def whole_body(completion: Completion, choices: list[Choice], usage: Usage) -> bytes:
    """Return the JSON of an answer that is not streamed."""
    with_logprobs = completion.request.logprobs is not None
    return msgspec.json.encode(
        {
            "id": completion.id,
            "object": "text_completion",
            "created": completion.created,
            "model": completion.model,
            "system_fingerprint": completion.fingerprint,
            "choices": [
                choice.body(index, with_logprobs=with_logprobs)
                for index, choice in enumerate(choices)
            ],
            "usage": usage.body(),
        }
    )


def _by_token(top: list[tuple[str, float]]) -> dict[str, float]:
    # Different tokens may have the same text; the likeliest comes first and is the one to keep.
    by_token: dict[str, float] = {}
    for token, logprob in top:
        by_token.setdefault(token, max(logprob, LOGPROB_FLOOR))
    return by_token
