"""The sampler chains of many sequences as tensors, one row each, built when the batch changes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from contract.sampling import Sampler
from worker.samplers.candidates import Candidates, Context, Placement, Step
from worker.samplers.parameters import SequenceChain
from worker.samplers.stages.dry import DryStage
from worker.samplers.stages.penalties import Penalties
from worker.samplers.stages.temperature import Temperature
from worker.samplers.stages.truncation import MinP, TopK, TopNSigma, TopP, TypicalP
from worker.samplers.stages.xtc import XtcStage

_BUILDERS: Mapping[Sampler, Callable[[Sequence[SequenceChain], Placement], Step]] = {
    Sampler.PENALTIES: Penalties.build,
    Sampler.DRY: DryStage.build,
    Sampler.TOP_N_SIGMA: TopNSigma.build,
    Sampler.TOP_K: TopK.build,
    Sampler.TYPICAL_P: TypicalP.build,
    Sampler.TOP_P: TopP.build,
    Sampler.MIN_P: MinP.build,
    Sampler.XTC: XtcStage.build,
    Sampler.TEMPERATURE: Temperature.build,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """The steps of sequences with the same `ChainParameters.group`."""

    steps: Sequence[Step]
    """In the order of the group, each once; only those that change at least one row."""
    ranked_tokens: int

    @classmethod
    def build(cls, parameters: Sequence[SequenceChain], placement: Placement) -> Self:
        """Copy parameters to the device: at least one, all of one group, none with mirostat."""
        used = {step for step in Sampler if any(row.uses(step) for row in parameters)}
        built = {step: _BUILDERS[step](parameters, placement) for step in used}
        first = parameters[0]
        # Repeated, temperatures and penalties would exceed the range of float32.
        steps = [built[step] for step in dict.fromkeys(first.order) if step in used]
        return cls(steps, first.ranked_tokens)


def apply_chain(logits: Tensor, rows: Rows, *, history: Tensor, total_tokens: Tensor) -> Tensor:
    """Return logits to sample from at temperature 1 without truncation, or to take the maximum of.

    They are `logits`, changed in place. Logits of minus infinity stay so, and at least one other
    token remains. Nothing waits for the device.

    Args:
        logits: [rows, vocabulary], in the dtype of the rows' `Placement`.
        rows: Parameters of the rows.
        history: [rows, window], int64; the newest token in the last column, -1 in empty places.
            The window is as wide as the largest `history_needed`, or holds all existing tokens.
        total_tokens: [rows], int64; tokens of prompt and completion so far.
    """
    candidates = Candidates(logits, ranked_tokens=rows.ranked_tokens)
    context = Context(history=history, total_tokens=total_tokens)
    for step in rows.steps:
        step.apply(candidates, context)
    return candidates.by_token()
