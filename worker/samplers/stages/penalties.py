"""Repetition, presence and frequency penalties over a window of prompt and completion."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from contract.sampling import Sampler
from worker.samplers.candidates import Candidates, Context, Placement
from worker.samplers.parameters import SequenceChain

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """The three penalties; they change only tokens of the window."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    window: Window
    counted_from: Tensor | None
    """First position that presence and frequency count; None if every row counts all positions."""

    @classmethod
    def build(cls, parameters: Sequence[SequenceChain], placement: Placement) -> Self:
        """Copy the parameters to the device."""
        used = [row.uses(Sampler.PENALTIES) for row in parameters]
        starts = [0 if row.penalizes_prompt else row.prompt_tokens for row in parameters]
        lengths = [
            row.penalty_last_n if on else 0 for row, on in zip(parameters, used, strict=True)
        ]
        return cls(
            repetition=placement.floats([row.repetition_penalty for row in parameters]),
            presence=placement.floats([row.presence_penalty for row in parameters]),
            frequency=placement.floats([row.frequency_penalty for row in parameters]),
            window=Window.build(lengths, placement),
            counted_from=placement.integers(starts) if any(starts) else None,
        )

    def apply(self, candidates: Candidates, context: Context) -> None:
        """Penalize the tokens of the windows."""
        logits = candidates.by_token()
        tokens = self.window.newest(context.history)
        present = (tokens >= 0) & (tokens < logits.shape[1])
        # Columns without a token point at token 0 and compute its own penalty again.
        ids = tokens.where(present, 0)
        seen = _counts(logits, ids, present)
        counts = (
            seen
            if self.counted_from is None
            else _counts(logits, ids, present & self._counted(tokens, context.total_tokens))
        )
        old = logits.gather(1, ids)
        new = torch.where(old <= 0, old * self.repetition, old / self.repetition)
        new = torch.where(seen > 0, new, old) - counts * self.frequency
        logits.scatter_(1, ids, new - (counts > 0) * self.presence)

    def _counted(self, tokens: Tensor, total_tokens: Tensor) -> Tensor:
        """Return which columns presence and frequency count."""
        width = tokens.shape[1]
        first = total_tokens.unsqueeze(1) - width
        return first + torch.arange(width, device=tokens.device) >= self.counted_from


def _counts(logits: Tensor, ids: Tensor, counted: Tensor) -> Tensor:
    """How often the token of each column occurs in the counted columns of its row."""
    totals = torch.zeros_like(logits).scatter_add_(1, ids, counted.to(logits.dtype))
    return totals.gather(1, ids)
