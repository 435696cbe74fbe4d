"""Log-probabilities in the gateways' format: by token text, with offsets into the text."""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from contract.messages import TokenLogprob
from contract.pieces import REPLACEMENT, PieceReader
from worker.engine.base import TokenScores

_CALL_MARK = re.compile(r"[<\[].*tool.*[>\]]", re.IGNORECASE)

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


class TokenTexts:
    """Caches the text of single tokens as they appear inside a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = PieceReader(tokenizer)
        self._texts: dict[int, str] = {}
        added = tokenizer.get_added_tokens_decoder()
        self.markup = {
            number: each.content
            for number, each in added.items()
            if each.special or _CALL_MARK.fullmatch(each.content)
        }
        """Special tokens and the marks of tool calls, by id."""
        # Some decoders drop the space before a text's first
        # token, so decode each token after another one.
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._skip = len(self._decode(self._anchor))

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._decode([*self._anchor, token_id])[self._skip :]
            self._texts[token_id] = text
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def part(self, token_id: int, text: str = "") -> bytes:
        """Return the bytes of a token that is not whole characters; empty for other tokens.

        `text` is what it adds to a text.
        """
        is_part = REPLACEMENT in self[token_id] or REPLACEMENT in text
        return self._pieces.bytes_of(token_id) if is_part else b""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is special, or the mark of a call, and may not appear in text."""
        return (
            token_id in self.markup
            or not self._tokenizer.decode([*self._anchor, token_id])[self._skip :]
        )


def token_logprob(
    texts: TokenTexts,
    scores: TokenScores,
    *,
    text: str,
    offset: int,
    alternatives: int,
    rank: int = 0,
) -> TokenLogprob:
    """Describe one scored token that appears as `text` at `offset`."""
    (token_id, logprob), *others = scores
    token = text or (texts[token_id] if texts.is_special(token_id) else "")
    logprob = max(logprob, LOWEST_LOGPROB)
    top = [(token, logprob, token_id)]
    for other_id, other_logprob in others[:alternatives]:
        if other_id != token_id:
            top.append((texts[other_id], max(other_logprob, LOWEST_LOGPROB), other_id))
    top.sort(key=lambda entry: -entry[1])
    return TokenLogprob(
        token,
        logprob,
        offset,
        [(text, score) for text, score, _ in top],
        [each for _, _, each in top],
        rank,
        {each: part for text, _, each in top if (part := texts.part(each, text))},
    )


def prompt_logprobs(
    tokenizer: Tokenizer,
    texts: TokenTexts,
    token_ids: Sequence[int],
    scores: Sequence[TokenScores],
    *,
    alternatives: int,
    ranks: Sequence[int] | None = None,
) -> list[TokenLogprob]:
    """Describe the tokens of a prompt; the first one has no log-probability.

    With `ranks`, one for each entry of `scores`, the tokens have them.
    Special tokens count towards the offsets, because an echoed prompt includes them.
    """
    stream = DecodeStream(skip_special_tokens=False)
    entries: list[TokenLogprob] = []
    offset = 0
    for position, token_id in enumerate(token_ids):
        text = stream.step(tokenizer, token_id) or ""
        if position == 0:
            part = texts.part(token_id)
            entries.append(TokenLogprob(text, None, 0, parts={token_id: part} if part else {}))
        else:
            entries.append(
                token_logprob(
                    texts,
                    scores[position - 1],
                    text=text,
                    offset=offset,
                    alternatives=alternatives,
                    rank=0 if ranks is None else ranks[position - 1],
                )
            )
        offset += len(text)
    return entries
