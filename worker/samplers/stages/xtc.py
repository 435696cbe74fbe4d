"""XTC, "exclude top choices": occasionally removes all likely tokens except the least likely."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from contract.sampling import Sampler
from worker.samplers.candidates import Candidates, Context, Placement
from worker.samplers.parameters import SequenceChain

_MASK = 2**64 - 1
_SIGN = 2**63


@dataclass(frozen=True, slots=True)
class XtcStage:
    """llama.cpp's XTC, but draws depend only on seed and position, and tokens can be spared."""

    probability: Tensor
    threshold: Tensor
    kept: Tensor
    seed: Tensor
    spared: Tensor | None
    """[rows, vocabulary]: tokens that are never removed; None if there are none."""

    @classmethod
    def build(cls, parameters: Sequence[SequenceChain], placement: Placement) -> Self:
        """Copy the parameters to the device."""
        used = [row.uses(Sampler.XTC) for row in parameters]
        pairs = list(zip(parameters, used, strict=True))
        return cls(
            # No draw is as small as -1.
            placement.floats([row.xtc_probability if on else -1.0 for row, on in pairs]),
            placement.floats([row.xtc_threshold for row in parameters]),
            placement.integers([row.min_keep for row in parameters]),
            placement.integers([signed(row.seed) for row in parameters]),
            _spared([row.xtc_spared if on else () for row, on in pairs], placement),
        )

    def apply(self, candidates: Candidates, context: Context) -> None:
        """Remove the likely candidates of the rows whose draw selects it."""
        draw = uniform(self.seed, context.total_tokens.unsqueeze(1))
        live = candidates.is_live
        probabilities = candidates.logits.softmax(-1)
        likely = (probabilities >= self.threshold) & live
        removed = likely.sum(-1, keepdim=True) - 1
        stays = live.sum(-1, keepdim=True) - removed >= self.kept
        # Of equally likely candidates only the last one is kept, so that exactly one remains.
        least = probabilities.where(likely, 2.0).amin(-1, keepdim=True)
        positions = torch.arange(likely.shape[1], device=likely.device)
        survivor = positions.where(likely & (probabilities == least), -1).amax(-1, keepdim=True)
        which = likely & (positions != survivor) & (draw <= self.probability) & stays
        if self.spared is not None:
            which &= ~candidates.lookup(self.spared)
        candidates.mask(which)


def _spared(lists: Sequence[Sequence[int]], placement: Placement) -> Tensor | None:
    cells = [
        row * placement.vocab_size + token
        for row, tokens in enumerate(lists)
        for token in tokens
        if 0 <= token < placement.vocab_size
    ]
    if not cells:
        return None
    flat = torch.zeros(len(lists) * placement.vocab_size, dtype=torch.bool, device=placement.device)
    flat[placement.move(torch.tensor(cells))] = True
    return flat.view(len(lists), placement.vocab_size)


def signed(value: int) -> int:
    """Return the integer that has the same low 64 bits and fits into an int64 tensor."""
    return ((value + _SIGN) & _MASK) - _SIGN


_STEP = signed(0x9E3779B97F4A7C15)
_FIRST = signed(0xBF58476D1CE4E5B9)
_SECOND = signed(0x94D049BB133111EB)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Return numbers in [0, 1), float64, drawn by splitmix64 from int64 tensors of one shape.

    The draws of a sequence are independent of the other sequences in the batch, equal on CPUs and
    GPUs, and unchanged after a move to another worker.
    """
    mixed = seed * _STEP + (position + 1) * _FIRST
    mixed = (mixed ^ _shift(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shift(mixed, 27)) * _SECOND
    mixed = mixed ^ _shift(mixed, 31)
    return _shift(mixed, 11).to(torch.float64) / 2.0**53


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift of int64 copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
