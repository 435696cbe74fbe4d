"""The bytes of every token of a vocabulary, arranged for searching."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from contract.pieces import PieceReader

Indices = npt.NDArray[np.int64]

_BETWEEN = b"\xff"
"""Separates tokens; never a byte of UTF-8, so that no match spans two tokens."""


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
