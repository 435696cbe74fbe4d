"""The sampler chain in vLLM's newer model runner ("V2"), which GPUs use.

There, requests keep their slots while they run, but their rows change with every step. All earlier
tokens are on the device, where work is queued long before it runs, so nothing here waits for it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.samplers.batch import ChainedSequence, Group, grouped
from worker.samplers.candidates import Placement


class ProcessorV2:
    """Implements `vllm.v1.worker.gpu.sample.logits_processor.LogitsProcessor`."""

    def __init__(self, _vllm_config: Any, req_states: Any) -> None:
        self._states = req_states
        slots = req_states.max_num_reqs
        self._sequences: dict[int, ChainedSequence] = {}
        self._has_chain = np.zeros(slots, dtype=np.bool_)
        self._lengths = np.zeros(slots, dtype=np.int64)
        self._grouped: dict[int, ChainedSequence] = {}
        self._groups: list[Group] = []
        self._rows = torch.arange(slots, device=req_states.device)
        self._row_of_slot = torch.zeros(slots, dtype=torch.int64, device=req_states.device)

    def add_request(self, slot: int, params: Any) -> bool:
        """Put a request into a slot, replacing any other; return whether it has a chain."""
        sequence = ChainedSequence.of(params)
        self._sequences.pop(slot, None)
        if sequence is not None:
            self._sequences[slot] = sequence
        self._has_chain[slot] = sequence is not None
        return sequence is not None

    def apply_staged_writes(self) -> None:
        """Do nothing: groups are copied to the device when the step's requests are known."""

    def apply(self, logits: Tensor, step: Any) -> Tensor:
        """Change the logits ([rows, vocabulary], float32) of the rows that have a chain."""
        slots = step.idx_mapping_np[self._has_chain[step.idx_mapping_np]]
        if not slots.size:
            return logits
        self._regroup(sorted(slots.tolist()), logits.shape[1])
        self._lengths[step.idx_mapping_np] = step.seq_lens_upper_bound_np
        mapping = step.expanded_idx_mapping.long()
        self._row_of_slot[mapping] = self._rows[: mapping.shape[0]]
        for group in self._groups:
            self._apply(group, logits)
        return logits

    def _regroup(self, slots: list[int], vocab_size: int) -> None:
        present = {slot: self._sequences[slot] for slot in slots}
        if present == self._grouped:
            return
        for slot, each in self._grouped.items():
            if present.get(slot) is not each:
                # The sequence has ended, or is omitted from this step while others continue.
                each.detach()
        placement = Placement(device=self._states.device, vocab_size=vocab_size)
        self._groups = grouped(present, placement)
        self._grouped = present

    def _apply(self, group: Group, logits: Tensor) -> None:
        rows = self._row_of_slot[group.index]
        totals = self._states.total_len.gpu[group.index].long()
        window = group.window(int(self._lengths[list(group.keys)].max()))
        history = self._history(group.index, totals, window)
        result = group.apply(logits[rows], history=history, total_tokens=totals)
        group.report(result, rows)
        logits[rows] = result

    def _history(self, slots: Tensor, totals: Tensor, window: int) -> Tensor:
        """Return the newest tokens, the last of them on the right, with -1 in empty places."""
        columns = totals.unsqueeze(1) - window + torch.arange(window, device=totals.device)
        tokens = self._states.all_token_ids.gpu[slots.unsqueeze(1), columns.clamp(min=0)]
        return torch.where(columns >= 0, tokens.long(), -1)
