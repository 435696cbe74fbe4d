"""Candidates: the tokens that may come next, which the steps of a chain reduce one by one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.samplers.parameters import ALL_TOKENS

MASKED = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Device, shape and dtype of the tensors of a batch."""

    device: torch.device
    vocab_size: int
    """Columns of the logits."""
    dtype: torch.dtype = torch.float32
    """The dtype of the logits."""

    def floats(self, values: Sequence[float]) -> Tensor:
        """Return a column with one number per row, without waiting for the device."""
        return self.move(torch.tensor(values, dtype=self.dtype).unsqueeze(1))

    def integers(self, values: Sequence[int]) -> Tensor:
        """Return a column with one integer per row, without waiting for the device."""
        return self.move(torch.tensor(values, dtype=torch.int64).unsqueeze(1))

    def move(self, values: Tensor) -> Tensor:
        """Copy a tensor to the device without waiting for it."""
        if self.device.type != "cuda":
            return values.to(self.device)
        return values.pin_memory().to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Inputs of the steps besides the logits."""

    history: Tensor
    """[rows, window]: token ids, the newest in the last column; -1 in empty places."""
    total_tokens: Tensor
    """[rows]: tokens of prompt and completion so far."""


class Candidates:
    """Logits of a group's rows: in the order of token ids, or ranked with the largest first.

    A masked token (minus infinity) is not a candidate: it is not counted and never restored.
    """

    def __init__(self, logits: Tensor, *, ranked_tokens: int) -> None:
        self.logits = logits
        """[rows, candidates]; changed in place."""
        self._full = logits
        self._ids: Tensor | None = None
        self._ranked_tokens = ranked_tokens

    @property
    def is_live(self) -> Tensor:
        """Which candidates are not masked."""
        return self.logits > MASKED

    def mask(self, which: Tensor) -> None:
        """Remove candidates."""
        self.logits.masked_fill_(which, MASKED)

    def ranks(self) -> Tensor:
        """Rank of each live candidate, 0 for the most probable; of equal ones, lower ids first."""
        if self._ids is None:
            self.logits, self._ids = self._ranked()
        return self.is_live.cumsum(-1) - 1

    def by_token(self) -> Tensor:
        """The logits with a column for every token of the vocabulary, for changes in place."""
        if self._ids is not None:
            self._full.fill_(MASKED).scatter_(1, self._ids, self.logits)
            self.logits, self._ids = self._full, None
        return self.logits

    def lookup(self, table: Tensor) -> Tensor:
        """The entries of a [rows, vocabulary] table that belong to the candidates."""
        return table if self._ids is None else table.gather(1, self._ids)

    def _ranked(self) -> tuple[Tensor, Tensor]:
        width = self._ranked_tokens
        if width == ALL_TOKENS or width >= self.logits.shape[1]:
            logits, ids = torch.sort(self.logits, dim=-1, descending=True, stable=True)
            return logits, ids
        # topk returns equal logits in any order: sort by ids first, then by logits.
        ids = self.logits.topk(width, sorted=False).indices.sort(dim=-1).values
        logits, positions = self.logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
        return logits, ids.gather(1, positions)


class Step(Protocol):
    """One sampler of a chain, with the parameters of every row."""

    def apply(self, candidates: Candidates, context: Context, /) -> None:
        """Change logits or mask candidates, but never all of the remaining ones of a row."""
