"""The temperature, fixed or dependent on the distribution's entropy (llama.cpp's dynatemp)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from contract.sampling import Sampler
from worker.samplers.candidates import Candidates, Context, Placement
from worker.samplers.parameters import SequenceChain

LOWEST = 1e-6
"""Lower temperatures act as this one, which leaves only the largest logit."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divides the logits."""

    lowest: Tensor
    highest: Tensor
    exponent: Tensor | None
    """None if no row has a range, so that the entropy is not needed."""

    @classmethod
    def build(cls, parameters: Sequence[SequenceChain], placement: Placement) -> Self:
        """Copy the parameters to the device."""
        middle = [row.temperature if row.uses(Sampler.TEMPERATURE) else 1.0 for row in parameters]
        width = [row.dynatemp_range if row.uses(Sampler.TEMPERATURE) else 0.0 for row in parameters]
        pairs = list(zip(middle, width, strict=True))
        return cls(
            placement.floats([max(0.0, centre - reach) for centre, reach in pairs]),
            placement.floats([centre + reach for centre, reach in pairs]),
            placement.floats([row.dynatemp_exponent for row in parameters]) if any(width) else None,
        )

    def apply(self, candidates: Candidates, _: Context) -> None:
        """Scale the logits."""
        temperature = self.lowest if self.exponent is None else self._dynamic(candidates)
        candidates.logits.div_(temperature.clamp(min=LOWEST))

    def _dynamic(self, candidates: Candidates) -> Tensor:
        live = candidates.is_live
        logprobs = candidates.logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).where(live, 0.0).sum(-1, keepdim=True)
        most = live.sum(-1, keepdim=True).clamp_(min=2).to(entropy.dtype).log_()
        share = (entropy / most).clamp_(0.0, 1.0)
        return self.lowest + (self.highest - self.lowest) * share.pow_(self.exponent)
