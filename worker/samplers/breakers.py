"""Resolution of DRY's breaker texts to token ids.

As in llama.cpp, a breaker is found for every way to split it into tokens. It begins in a token that
contains the whole text, or in one whose end begins the text, followed by the tokens of the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from contract.pieces import PieceReader
from contract.sampling import MAX_DRY_BREAKER_CHARACTERS
from worker.samplers.parameters import LONGEST_TAIL

Indices = npt.NDArray[np.int64]

_BETWEEN = b"\xff"
"""Separates tokens; never a byte of UTF-8, so that no match spans two tokens."""

_REMEMBERED_TEXTS = 64
_ANCHOR = "\n"
"""Text before which a tokenizer inserts the blank that some insert before every text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """All tokens with at least one byte, indexed in the order of token ids."""

    token_ids: Indices
    _joined: npt.NDArray[np.uint8]
    _ends: Indices
    """Where each token ends in the joined bytes."""
    _owners: npt.NDArray[np.int32]
    """Index of the token to which each of the joined bytes belongs."""
    _by_last_byte: Sequence[Indices]
    """The indices of the tokens that end with each byte."""

    @classmethod
    def read(cls, tokenizer: Tokenizer) -> Self:
        """Read a tokenizer's vocabulary."""
        pieces = PieceReader(tokenizer)
        ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
        tokens = [(i, token) for i in ids if (token := pieces.bytes_of(i))]
        lengths = np.array([len(token) for _, token in tokens], dtype=np.int64) + 1
        ends = lengths.cumsum() - 1
        joined = np.frombuffer(_BETWEEN.join([*(token for _, token in tokens), b""]), np.uint8)
        last = joined[ends - 1]
        return cls(
            token_ids=np.array([i for i, _ in tokens], dtype=np.int64),
            _joined=joined,
            _ends=ends,
            _owners=np.repeat(np.arange(len(tokens), dtype=np.int32), lengths),
            _by_last_byte=[np.flatnonzero(last == byte) for byte in range(256)],
        )

    def containing(self, text: bytes) -> Indices:
        """Indices of the tokens that contain the text, which is at least one byte of UTF-8."""
        places = np.flatnonzero(self._joined == text[0])
        places = places[places <= len(self._joined) - len(text)]
        for offset in range(1, len(text)):
            places = places[self._joined[places + offset] == text[offset]]
        return np.unique(self._owners[places]).astype(np.int64)

    def ending_with(self, text: bytes) -> Indices:
        """Indices of the tokens that end with the text, which is UTF-8 or the beginning of it."""
        found = self._by_last_byte[text[-1]]
        for offset in range(2, len(text) + 1):
            # Each token is preceded by the separator; the first one by place -1, also a separator.
            found = found[self._joined[self._ends[found] - offset] == text[-offset]]
        return found

    def tokens_of_end(self, token_ids: Sequence[int], end: bytes) -> tuple[int, ...]:
        """Return the trailing tokens whose joined bytes equal `end`; none if no split fits."""
        covered = b""
        for count, token_id in enumerate(reversed(token_ids), start=1):
            covered = self._bytes_of(token_id) + covered
            if covered == end:
                return tuple(token_ids[-count:])
        return ()

    def _bytes_of(self, token_id: int) -> bytes:
        index = int(np.searchsorted(self.token_ids, token_id))
        if index == len(self.token_ids) or self.token_ids[index] != token_id:
            return b""
        start = self._ends[index - 1] + 1 if index else 0
        return self._joined[start : self._ends[index]].tobytes()


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
