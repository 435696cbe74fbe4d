"""Resolution of DRY's breaker texts to token ids.

As in llama.cpp, a breaker is found for every way to split it into tokens. It begins in a token that
contains the whole text, or in one whose end begins the text, followed by the tokens of the rest.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from tokenizers import Tokenizer

from contract.sampling import MAX_DRY_BREAKER_CHARACTERS
from worker.samplers.parameters import LONGEST_TAIL
from worker.samplers.vocabulary import Indices, Vocabulary

_REMEMBERED_TEXTS = 64
_ANCHOR = "\n"
"""Text before which a tokenizer inserts the blank that some insert before every text."""


class DryBreakers:
    """Finds breakers in the vocabulary of a tokenizer, which it reads on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._remembered = lru_cache(maxsize=_REMEMBERED_TEXTS)(self._find)

    def prepare(self) -> None:
        """Read the vocabulary unless already done; this can take some tenths of a second."""
        _ = self._vocabulary

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.read(self._tokenizer)

    def resolve(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Return head tokens and the tail tokens that must follow one of them, each tail once."""
        heads_of: dict[tuple[int, ...], list[Indices]] = {}
        for text in texts:
            for heads, tail in self._remembered(text[:MAX_DRY_BREAKER_CHARACTERS]) if text else ():
                heads_of.setdefault(tail, []).append(heads)
        return [
            (np.unique(np.concatenate(heads)).tolist(), list(tail))
            for tail, heads in heads_of.items()
        ]

    def _find(self, text: str) -> list[tuple[Indices, tuple[int, ...]]]:
        """Return the entries of one text."""
        vocabulary, wanted = self._vocabulary, text.encode()
        whole = vocabulary.containing(wanted)
        found: list[tuple[Indices, tuple[int, ...]]] = []
        if whole.size:
            found.append((vocabulary.token_ids[whole], ()))
        for length in range(1, len(wanted)):
            heads = np.setdiff1d(vocabulary.ending_with(wanted[:length]), whole)
            if heads.size and (tail := self._tail(text, wanted[length:])):
                found.append((vocabulary.token_ids[heads], tail))
        return found

    def _tail(self, text: str, rest: bytes) -> tuple[int, ...]:
        """Return the tokens of the rest of a text, or none if no token starts where it begins.

        This can happen if the rest begins inside a character. A tokenizer that inserts a blank
        before
        every text tokenizes the rest as in the middle of a text only if other text precedes it.
        """
        is_whole = (rest[0] & 0xC0) != 0x80
        own = [rest.decode(), _ANCHOR + rest.decode()] if is_whole else []
        for source in [*own, text]:
            token_ids = self._tokenizer.encode(source, add_special_tokens=False).ids
            if tail := self._vocabulary.tokens_of_end(token_ids, rest):
                return tail[:LONGEST_TAIL]
        return ()
