"""The sampler chains of a batch: groups of sequences, and mirostat's state between steps.

Both of vLLM's runners use this module; each has its own mapping from sequences to rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from contract.sampling import Sampler
from worker.samplers.arguments import chain_parameters
from worker.samplers.candidates import Candidates, Context, Placement, Step
from worker.samplers.parameters import SequenceChain
from worker.samplers.reported import REPORTED
from worker.samplers.stages.dry import DryStage
from worker.samplers.stages.mirostat import MirostatRows, apply_mirostat, next_mu, replay
from worker.samplers.stages.penalties import Penalties
from worker.samplers.stages.temperature import LOWEST, Temperature
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
_KEPT = "sluice_sequence"


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


@dataclass(eq=False, slots=True)
class ChainedSequence:
    """A sequence with a chain, from its first step to its last one.

    It may leave a batch and enter another one: the steps between leave it out, or vLLM preempts it.
    """

    parameters: SequenceChain
    memory: "MirostatMemory | None" = None
    """The memory that holds its state; None before its first step and without mirostat."""
    row: int = 0
    """Its row in the memory."""

    @classmethod
    def of(cls, params: Any) -> Self | None:
        """Return the sequence of a request, the same each time, or None if it has no chain.

        The sequence ends with `params`, vLLM's parameters of the request.
        """
        kept: dict[str, Any] = vars(params)
        if _KEPT not in kept:
            parameters = chain_parameters(params.extra_args)
            kept[_KEPT] = None if parameters is None else cls(parameters)
        sequence: Self | None = kept[_KEPT]
        return sequence

    def detach(self) -> None:
        """Copy its own state, so that the memory of its former group can be freed."""
        if self.memory is not None:
            own = slice(self.row, self.row + 1)
            self.memory = MirostatMemory(
                self.memory.mu[own].clone(),
                self.memory.kept_logprobs[own].clone(),
                self.memory.total_tokens[own].clone(),
            )
            self.row = 0


@dataclass(slots=True)
class MirostatMemory:
    """The state of a group after a step, one row for each sequence."""

    mu: Tensor
    kept_logprobs: Tensor
    """Log-probabilities of the candidates from which that step sampled."""
    total_tokens: Tensor
    """Number of tokens before that sample; -1 before the first step."""


class Group(ABC):
    """Sequences whose chains are applied together, under their runner's keys."""

    def __init__(self, sequences: Mapping[int, ChainedSequence], placement: Placement) -> None:
        self.keys = tuple(sequences)
        self.index = placement.integers(self.keys)[:, 0]
        """The keys on the device."""
        parameters = [each.parameters for each in sequences.values()]
        self._windows = [each.history_needed for each in parameters]
        reported = [row for row, each in enumerate(parameters) if each.reports_probabilities]
        self._reported = placement.integers(reported)[:, 0] if reported else None
        self._scale = placement.floats(
            [1.0 / LOWEST if parameters[row].is_greedy else 1.0 for row in reported]
        )

    @abstractmethod
    def apply(self, logits: Tensor, *, history: Tensor, total_tokens: Tensor) -> Tensor:
        """Return the final logits of the sequences, given their logits and earlier tokens."""

    def report(self, result: Tensor, rows: Tensor) -> None:
        """Report the sequences' final logits, which are those of `rows` of the batch."""
        if self._reported is not None:
            # The likeliest token of a greedy sequence has all of the probability.
            REPORTED.add(rows[self._reported], result[self._reported] * self._scale)

    def window(self, longest: int) -> int:
        """Return how many of the newest tokens are needed if the longest sequence has `longest`."""
        return longest if min(self._windows) < 0 else min(longest, max(self._windows))


class ChainGroup(Group):
    """Sequences with the same steps in the same order."""

    def __init__(self, sequences: Mapping[int, ChainedSequence], placement: Placement) -> None:
        super().__init__(sequences, placement)
        self._rows = Rows.build([each.parameters for each in sequences.values()], placement)

    @override
    def apply(self, logits: Tensor, *, history: Tensor, total_tokens: Tensor) -> Tensor:
        return apply_chain(logits, self._rows, history=history, total_tokens=total_tokens)


class MirostatGroup(Group):
    """Sequences with mirostat, whose state depends on the last token."""

    def __init__(self, sequences: Mapping[int, ChainedSequence], placement: Placement) -> None:
        super().__init__(sequences, placement)
        members = tuple(sequences.values())
        self._rows = MirostatRows.build([each.parameters for each in members], placement)
        self._memory = _remembered(members, placement)
        for row, each in enumerate(members):
            each.memory, each.row = self._memory, row

    @override
    def apply(self, logits: Tensor, *, history: Tensor, total_tokens: Tensor) -> Tensor:
        before = self._memory
        # A prompt that is split over steps receives logits, but samples no token.
        has_token = total_tokens == before.total_tokens + 1
        mu = next_mu(
            before.mu,
            before.kept_logprobs,
            sampled=torch.where(has_token, history[:, -1], -1),
            rows=self._rows,
        )
        result, kept_logprobs = apply_mirostat(logits, self._rows, mu)
        before.mu, before.kept_logprobs, before.total_tokens = mu, kept_logprobs, total_tokens
        return replay(result, self._rows, total_tokens)

    @override
    def window(self, longest: int) -> int:
        return 1


def grouped(sequences: Mapping[int, ChainedSequence], placement: Placement) -> list[Group]:
    """Divide sequences into groups that can be applied together, and copy them to the device."""
    divided: dict[object, dict[int, ChainedSequence]] = {}
    for key, each in sequences.items():
        divided.setdefault(each.parameters.group, {})[key] = each
    return [_group(members, placement) for members in divided.values()]


def _group(sequences: Mapping[int, ChainedSequence], placement: Placement) -> Group:
    first = next(iter(sequences.values()))
    kind = MirostatGroup if first.parameters.uses_mirostat else ChainGroup
    return kind(sequences, placement)


def _remembered(members: Sequence[ChainedSequence], placement: Placement) -> MirostatMemory:
    """Return the state of sequences that were in other groups before, or in none."""
    memory = MirostatMemory(
        mu=placement.floats([each.parameters.initial_mu for each in members])[:, 0],
        kept_logprobs=torch.zeros(
            len(members), placement.vocab_size, dtype=placement.dtype, device=placement.device
        ),
        total_tokens=placement.integers([-1] * len(members))[:, 0],
    )
    old = {id(each.memory): each.memory for each in members if each.memory is not None}
    for source in old.values():
        rows = [row for row, each in enumerate(members) if each.memory is source]
        into = placement.integers(rows)[:, 0]
        out_of = placement.integers([members[row].row for row in rows])[:, 0]
        memory.mu[into] = source.mu[out_of]
        memory.kept_logprobs[into] = source.kept_logprobs[out_of]
        memory.total_tokens[into] = source.total_tokens[out_of]
    return memory
