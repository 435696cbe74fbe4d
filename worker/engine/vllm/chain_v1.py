"""The sampler chain in vLLM's older model runner ("V1"), which CPUs use.

There, all earlier tokens are known on the host, and rows move when requests leave the batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from worker.samplers.batch import ChainedSequence, Group, grouped
from worker.samplers.candidates import Placement


@dataclass(eq=False, slots=True)
class _Row:
    """A row of the batch that has a chain."""

    sequence: ChainedSequence
    tokens: npt.NDArray[np.int64]
    """Prompt and completion; longer than the known tokens."""
    prompt_tokens: int
    output: list[int]
    """vLLM's own growing list of the completion; -1 is a placeholder for a pending token."""
    total_tokens: int

    def read_output(self) -> int:
        """Copy the tokens since the last step; return the current number of tokens."""
        for token in self.output[self.total_tokens - self.prompt_tokens :]:
            if token < 0:
                break
            self.tokens[self.total_tokens] = token
            self.total_tokens += 1
        return self.total_tokens

    def newest(self, count: int) -> npt.NDArray[np.int64]:
        """Return the last `count` tokens, or all if there are fewer."""
        return self.tokens[max(0, self.total_tokens - count) : self.total_tokens]


class ProcessorV1:
    """Implements `vllm.v1.sample.logits_processor.LogitsProcessor`."""

    # vLLM passes all arguments by position.
    def __init__(self, vllm_config: Any, device: torch.device, *_: Any) -> None:
        self._device = device
        self._capacity = vllm_config.model_config.max_model_len + 1
        self._rows: dict[int, _Row] = {}
        self._groups: list[Group] | None = []

    def is_argmax_invariant(self) -> bool:
        """Return False, so that the chain runs before greedy sampling takes the maximum."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow requests that enter, leave and move; None if the batch is unchanged."""
        former = {row.sequence for row in self._rows.values()}
        if process_dict_updates(self._rows, batch_update, self._row):
            self._groups = None
            for each in former - {row.sequence for row in self._rows.values()}:
                # The sequence has ended, or is omitted from this step while others continue.
                each.detach()

    def apply(self, logits: Tensor) -> Tensor:
        """Change the logits ([rows, vocabulary], float32) of the rows that have a chain."""
        if not self._rows:
            return logits
        if self._groups is None:
            sequences = {index: self._rows[index].sequence for index in sorted(self._rows)}
            self._groups = grouped(
                sequences, Placement(device=self._device, vocab_size=logits.shape[1])
            )
        for group in self._groups:
            self._apply(group, logits)
        return logits

    def _apply(self, group: Group, logits: Tensor) -> None:
        rows = [self._rows[index] for index in group.keys]
        totals = [row.read_output() for row in rows]
        window = group.window(max(totals))
        history = np.full((len(rows), window), -1, dtype=np.int64)
        for line, row in zip(history, rows, strict=True):
            newest = row.newest(window)
            line[window - len(newest) :] = newest
        # A group that is the whole batch needs no copy of its logits.
        is_whole = group.keys == tuple(range(logits.shape[0]))
        result = group.apply(
            logits if is_whole else logits[group.index],
            history=torch.from_numpy(history).to(self._device),
            total_tokens=torch.tensor(totals, device=self._device),
        )
        group.report(result, group.index)
        if result is not logits:
            logits[group.index] = result

    def _row(self, params: Any, prompt: list[int] | None, output: list[int]) -> _Row | None:
        sequence = ChainedSequence.of(params)
        if sequence is None:
            return None
        known = len(prompt or ())
        # The system allocates only the pages that are written.
        tokens = np.empty(self._capacity, dtype=np.int64)
        tokens[:known] = prompt or ()
        return _Row(sequence, tokens, known, output, known)
