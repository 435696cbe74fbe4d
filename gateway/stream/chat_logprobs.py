"""Log-probabilities of chat tokens: one object for each token, as in OpenAI's API."""

from collections.abc import Sequence
from typing import Any

import msgspec

from contract.messages import TokenLogprob
from gateway.stream.logprobs import LOGPROB_FLOOR, REPLACEMENT, named_by_id


class Alternative(msgspec.Struct, frozen=True):
    """A candidate token at a position."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Its text in UTF-8; None for a part of a character, as the text does not show its bytes."""


class ScoredToken(msgspec.Struct, frozen=True):
    """A token of the response."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Alternative]
    """The likeliest tokens at its position, at most as many as requested."""


def scored_tokens(
    logprobs: Sequence[TokenLogprob],
    token_ids: Sequence[int],
    *,
    alternatives: int,
    names_by_id: bool,
) -> list[ScoredToken]:
    """Return tokens in the API's format, with at most `alternatives` top tokens each.

    With `names_by_id`, `bytes` are those of the token's text and of the names of top tokens, as in
    vLLM.
    """
    named = named_by_id(logprobs, token_ids) if names_by_id else logprobs
    return [
        ScoredToken(
            entry.token,
            # Only the first token of a prompt has no log-probability.
            max(entry.logprob or 0.0, LOGPROB_FLOOR),
            _utf8(original.token),
            [
                Alternative(token, max(logprob, LOGPROB_FLOOR), _utf8(token))
                for token, logprob in (entry.top or [])[:alternatives]
            ],
        )
        for entry, original in zip(named, logprobs, strict=True)
    ]


def logprobs_body(tokens: list[ScoredToken]) -> dict[str, Any]:
    """Return the `logprobs` object of a choice or chunk."""
    return {"content": tokens, "refusal": None}


def _utf8(text: str) -> list[int] | None:
    return None if REPLACEMENT in text else list(text.encode())
