"""XTC, "exclude top choices": occasionally removes all likely tokens except the least likely."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from contract.sampling import Sampler
from worker.samplers.candidates import Candidates, Context, Placement
from worker.samplers.parameters import ChainParameters
from worker.samplers.stages.noise import signed, uniform


@dataclass(frozen=True, slots=True)
class Xtc:
    """llama.cpp's XTC, but draws depend only on seed and position, and tokens can be spared."""

    probability: Tensor
    threshold: Tensor
    kept: Tensor
    seed: Tensor
    spared: Tensor | None
    """[rows, vocabulary]: tokens that are never removed; None if there are none."""

    @classmethod
    def build(cls, parameters: Sequence[ChainParameters], placement: Placement) -> Self:
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
