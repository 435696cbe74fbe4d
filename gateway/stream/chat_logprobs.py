"""Log-probabilities of chat tokens: one object for each token, as in OpenAI's API."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from contract.messages import TokenLogprob
from contract.pieces import REPLACEMENT
from gateway.stream.logprobs import LOGPROB_FLOOR, named_by_id


class Alternative(msgspec.Struct, frozen=True):
    """A candidate token at a position."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Of a part of a character its own bytes; None if an older worker does not report them."""


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
            _bytes(original.token, original.parts.get(token_id)),
            [
                Alternative(token, max(logprob, LOGPROB_FLOOR), _bytes(token, entry.parts.get(id_)))
                for (token, logprob), id_ in zip_longest(
                    (entry.top or ())[:alternatives], entry.top_ids[:alternatives]
                )
            ],
        )
        for entry, original, token_id in zip(named, logprobs, token_ids, strict=False)
    ]


def logprobs_body(tokens: list[ScoredToken]) -> dict[str, Any]:
    """Return the `logprobs` object of a choice or chunk."""
    return {"content": tokens, "refusal": None}


def _bytes(text: str, part: bytes | None) -> list[int] | None:
    return None if part is None and REPLACEMENT in text else list(part or text.encode())
