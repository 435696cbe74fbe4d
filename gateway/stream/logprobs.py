"""Log-probabilities of completions: OpenAI's four parallel lists, with text offsets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import msgspec

from contract.messages import TokenLogprob

LOGPROB_FLOOR = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

REPLACEMENT = "\ufffd"
"""The decoded text of bytes that are not a complete character."""

_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class LogprobLists:
    """The `logprobs` object of a choice or chunk."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    token_ids: list[int] | None = None
    """A fifth list, as in Fireworks' API, if token ids were requested."""
    before: dict[str, bytes] | None = None
    """Encoded lists (see `encoded`) that come first: those of the echoed prompt."""

    def extend(
        self, logprobs: Sequence[TokenLogprob], *, base: int, token_ids: Sequence[int] | None = None
    ) -> None:
        """Append tokens; `base` is where their text starts in the returned text.

        Offsets never point before the returned text.
        """
        for entry in logprobs:
            self.tokens.append(entry.token)
            self.token_logprobs.append(
                None if entry.logprob is None else max(entry.logprob, LOGPROB_FLOOR)
            )
            self.top_logprobs.append(None if entry.top is None else _by_token(entry.top))
            self.text_offset.append(max(base + entry.offset, 0))
        if token_ids is not None:
            self.token_ids = self.token_ids or []
            self.token_ids += token_ids

    @property
    def is_empty(self) -> bool:
        """Whether there is no token, echoed or new."""
        return not self.tokens and not self.before

    def append(self, other: "LogprobLists") -> None:
        """Append the lists of `other`."""
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset
        if other.token_ids is not None:
            self.token_ids = self.token_ids or []
            self.token_ids += other.token_ids
        self.before = self.before or other.before

    def body(self) -> dict[str, Any]:
        """Return the lists in the API's format."""
        lists = self._lists()
        if not self.before:
            return lists
        return {name: _joined(self.before[name], items) for name, items in lists.items()}

    def encoded(self) -> dict[str, bytes]:
        """Return the JSON of each list without its brackets, to be placed before other items."""
        return {name: _json(items)[1:-1] for name, items in self._lists().items()}

    def _lists(self) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        if self.token_ids is not None:
            lists["token_ids"] = self.token_ids
        return lists


def named_by_id(logprobs: Sequence[TokenLogprob], token_ids: Sequence[int]) -> list[TokenLogprob]:
    """Return tokens with vLLM's names `token_id:N` instead of their texts."""
    return [
        TokenLogprob(
            token_name(token_id),
            entry.logprob,
            entry.offset,
            entry.top
            and [
                (token_name(other), logprob)
                for other, (_, logprob) in zip(entry.top_ids, entry.top, strict=False)
            ],
        )
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def token_name(token_id: int) -> str:
    """Return vLLM's name of a token."""
    return f"token_id:{token_id}"


def echo_base(scored: Sequence[TokenLogprob], echo: str, *, start: int) -> int:
    """Return where the text of a whole scored prompt starts, relative to its echo.

    Negative if the echo omits the prompt's beginning: all tokens before `start`, or a begin-of-text
    token that the tokenizer put before the client's text.
    """
    if start == len(scored):
        return 0
    if start:
        return -scored[start].offset
    # An incomplete character at the prompt's end has tokens without text, but it is echoed.
    silent = sum(1 for _ in takewhile(lambda entry: not entry.token, reversed(scored)))
    unfinished = min(len(echo) - len(echo.rstrip(REPLACEMENT)), silent)
    end = scored[-1].offset + len(scored[-1].token)
    return min(len(echo) - unfinished - end, 0)


def _joined(before: bytes, items: list[Any]) -> msgspec.Raw:
    separator = b"," if items else b""
    return msgspec.Raw(b"[" + before + separator + _json(items)[1:])


def _by_token(top: list[tuple[str, float]]) -> dict[str, float]:
    # Different tokens may have the same text; the likeliest comes first and is kept.
    by_token: dict[str, float] = {}
    for token, logprob in top:
        by_token.setdefault(token, max(logprob, LOGPROB_FLOOR))
    return by_token
