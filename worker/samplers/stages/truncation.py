"""Truncation steps that depend on logits only: top-n-sigma, top-k, typical, top-p, min-p.

As in llama.cpp. Rows that do not use a step have parameters with which it keeps everything.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from contract.sampling import Sampler
from worker.samplers.candidates import MASKED, Candidates, Context, Placement
from worker.samplers.parameters import SequenceChain


@dataclass(frozen=True, slots=True)
class TopNSigma:
    """Keeps logits at most `n` standard deviations below the largest."""

    deviations: Tensor
    """Infinity keeps all."""

    @classmethod
    def build(cls, parameters: Sequence[SequenceChain], placement: Placement) -> Self:
        """Copy the parameters to the device."""
        used = [row.uses(Sampler.TOP_N_SIGMA) for row in parameters]
        wide = [row.top_n_sigma if on else 1e30 for row, on in zip(parameters, used, strict=True)]
        return cls(placement.floats(wide))

    def apply(self, candidates: Candidates, _: Context) -> None:
        """Mask the other candidates."""
        logits, live = candidates.logits, candidates.is_live
        count = live.sum(-1, keepdim=True).clamp_(min=1)
        mean = logits.where(live, 0.0).sum(-1, keepdim=True) / count
        variance = (logits - mean).where(live, 0.0).square().sum(-1, keepdim=True) / count
        lowest = logits.amax(-1, keepdim=True) - self.deviations * variance.sqrt()
        candidates.mask(logits < lowest)


@dataclass(frozen=True, slots=True)
class TopK:
    """Keeps the k most probable candidates."""

    kept: Tensor

    @classmethod
    def build(cls, parameters: Sequence[SequenceChain], placement: Placement) -> Self:
        """Copy the parameters to the device."""
        kept = [
            max(row.top_k, row.min_keep) if row.uses(Sampler.TOP_K) else placement.vocab_size
            for row in parameters
        ]
        return cls(placement.integers(kept))

    def apply(self, candidates: Candidates, _: Context) -> None:
        """Mask the other candidates."""
        candidates.mask(candidates.ranks() >= self.kept)


@dataclass(frozen=True, slots=True)
class TypicalP:
    """Keeps the candidates whose surprise is nearest to the expected one, up to a probability."""

    probability: Tensor
    """Above 1 keeps all, independent of rounding."""
    kept: Tensor

    @classmethod
    def build(cls, parameters: Sequence[SequenceChain], placement: Placement) -> Self:
        """Copy the parameters to the device."""
        probability = [row.typical_p if row.uses(Sampler.TYPICAL_P) else 2.0 for row in parameters]
        return cls(placement.floats(probability), _kept(parameters, placement))

    def apply(self, candidates: Candidates, _: Context) -> None:
        """Mask the other candidates."""
        live = candidates.is_live
        logprobs = candidates.logits.log_softmax(-1)
        probabilities = logprobs.exp()
        entropy = -(probabilities * logprobs).where(live, 0.0).sum(-1, keepdim=True)
        distance = (-logprobs - entropy).abs().where(live, -MASKED)
        order = distance.sort(dim=-1, stable=True).indices
        # Keep candidates until the mass exceeds the
        # probability, i.e. while the mass before does not.
        is_early = _mass_before(probabilities.gather(1, order)) <= self.probability
        is_early |= torch.arange(order.shape[1], device=order.device) < self.kept
        candidates.mask(~torch.zeros_like(live).scatter_(1, order, is_early))


@dataclass(frozen=True, slots=True)
class TopP:
    """Keeps the most probable candidates until their mass reaches a probability."""

    probability: Tensor
    """Above 1 keeps all, independent of rounding."""
    kept: Tensor

    @classmethod
    def build(cls, parameters: Sequence[SequenceChain], placement: Placement) -> Self:
        """Copy the parameters to the device."""
        probability = [row.top_p if row.uses(Sampler.TOP_P) else 2.0 for row in parameters]
        return cls(placement.floats(probability), _kept(parameters, placement))

    def apply(self, candidates: Candidates, _: Context) -> None:
        """Mask the other candidates."""
        ranks = candidates.ranks()
        mass = _mass_before(candidates.logits.softmax(-1))
        candidates.mask((mass >= self.probability) & (ranks >= self.kept))


@dataclass(frozen=True, slots=True)
class MinP:
    """Keeps candidates whose probability is high enough relative to the most probable one."""

    log_probability: Tensor
    kept: Tensor | None
    """None if no row keeps more than one candidate."""

    @classmethod
    def build(cls, parameters: Sequence[SequenceChain], placement: Placement) -> Self:
        """Copy the parameters to the device."""
        used = [row for row in parameters if row.uses(Sampler.MIN_P)]
        log_probability = [
            math.log(row.min_p) if row.uses(Sampler.MIN_P) else MASKED for row in parameters
        ]
        keeps_more = any(row.min_keep > 1 for row in used)
        kept = _kept(parameters, placement) if keeps_more else None
        return cls(placement.floats(log_probability), kept)

    def apply(self, candidates: Candidates, _: Context) -> None:
        """Mask the other candidates."""
        # Ranking replaces the logits, so it must come first.
        ranks = None if self.kept is None else candidates.ranks()
        logits = candidates.logits
        is_unlikely = logits < logits.amax(-1, keepdim=True) + self.log_probability
        if ranks is not None and self.kept is not None:
            is_unlikely &= ranks >= self.kept
        candidates.mask(is_unlikely)


def _kept(parameters: Sequence[SequenceChain], placement: Placement) -> Tensor:
    """Return the minimum number of candidates that each row keeps."""
    return placement.integers([max(row.min_keep, 1) for row in parameters])


def _mass_before(probabilities: Tensor) -> Tensor:
    """Sum of all probabilities to the left of each."""
    return functional.pad(probabilities.cumsum(-1)[:, :-1], (1, 0))
