"""The window of newest tokens of each sequence, each with its own length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from worker.samplers.candidates import Placement

_ANY_LENGTH = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The newest tokens that each row uses."""

    length: Tensor
    longest: int

    @classmethod
    def build(cls, lengths: Sequence[int], placement: Placement) -> Self:
        """Copy the lengths to the device; -1 is all tokens."""
        whole = [length if length >= 0 else _ANY_LENGTH for length in lengths]
        return cls(length=placement.integers(whole), longest=max(whole))

    def newest(self, history: Tensor) -> Tensor:
        """Return the last columns of the history, with -1 outside of each row's own window."""
        tokens = history[:, -self.longest :] if self.longest < history.shape[1] else history
        age = torch.arange(tokens.shape[1] - 1, -1, -1, device=tokens.device)
        return tokens.where(age < self.length, -1)
