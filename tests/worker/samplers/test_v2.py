"""The processor of the newer runner: reused slots, rows in any order, skipped steps."""

import math
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.samplers import reference
from tests.worker.samplers.sequences import VOCABULARY, SteppedSequence
from worker.engine.vllm.chain_v2 import ProcessorV2
from worker.samplers.arguments import chain_parameters

SLOTS = 8
LONGEST = 64


class Batch:
    """The runner's data of its requests, by slot."""

    def __init__(self) -> None:
        self._tokens = torch.full((SLOTS, LONGEST), 5, dtype=torch.int32)
        self._lengths = torch.zeros(SLOTS, dtype=torch.int32)
        states = SimpleNamespace(
            device=torch.device("cpu"),
            max_num_reqs=SLOTS,
            all_token_ids=SimpleNamespace(gpu=self._tokens),
            total_len=SimpleNamespace(gpu=self._lengths),
        )
        self.processor = ProcessorV2(None, states)
        self.sequences: dict[int, SteppedSequence] = {}

    def enter(self, sequence: SteppedSequence, slot: int) -> None:
        self.sequences[slot] = sequence
        has_chain = self.processor.add_request(slot, sequence.params)
        assert has_chain == (sequence.params.extra_args is not None)
        self._write(slot)

    def step(self, slots: list[int], *, unfinished: tuple[int, ...] = ()) -> torch.Tensor:
        """Compare a step of some slots with every sequence processed alone; return the logits.

        The prompts of `unfinished` slots continue in the next step, so this one samples no token of
        them.
        """
        self.processor.apply_staged_writes()
        sequences = [self.sequences[slot] for slot in slots]
        logits = torch.stack([sequence.logits() for sequence in sequences])
        results: torch.Tensor = self.processor.apply(logits, self._context(slots))
        for slot, sequence, result in zip(slots, sequences, results, strict=True):
            torch.testing.assert_close(
                result, sequence.expected(), msg=f"sequence {sequence.number}"
            )
            if slot not in unfinished:
                sequence.sample(result)
                self._write(slot)
        return results

    def _write(self, slot: int) -> None:
        tokens = self.sequences[slot].tokens
        self._tokens[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self._lengths[slot] = len(tokens)

    def _context(self, slots: list[int]) -> Any:
        return SimpleNamespace(
            idx_mapping_np=np.array(slots),
            expanded_idx_mapping=torch.tensor(slots),
            seq_lens_upper_bound_np=self._lengths.numpy()[slots],
        )


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))]
)
def test_slots_do_not_depend_on_their_batch(seed: int) -> None:
    random, batch, preempted, number = Random(seed), Batch(), list[SteppedSequence](), 0
    for _ in range(120):
        for slot, sequence in list(batch.sequences.items()):
            if sequence.has_ended or random.random() < 0.03:
                del batch.sequences[slot]
                if not sequence.has_ended:
                    preempted.append(sequence)
        for slot in (
            random.sample(sorted(set(range(SLOTS)) - set(batch.sequences)), k=1)
            if len(batch.sequences) < SLOTS
            else []
        ):
            if preempted:
                batch.enter(preempted.pop(0), slot)
            else:
                batch.enter(SteppedSequence(number, random), slot)
                number += 1
        # Some skip a step, as happens while two parts of a pipeline take turns.
        slots = [slot for slot in batch.sequences if random.random() < 0.8]
        random.shuffle(slots)
        if slots:
            batch.step(slots, unfinished=tuple(s for s in slots if random.random() < 0.1))
    assert number > 2 * SLOTS


def test_mirostat_updates_only_with_sampled_tokens() -> None:
    batch, sequence = Batch(), SteppedSequence(4, Random(0))
    parameters = chain_parameters(sequence.params.extra_args)
    assert parameters is not None
    batch.enter(sequence, 3)
    mu = parameters.initial_mu
    # The prompt takes three steps, and later other requests get one step.
    for unfinished in [(3,), (3,), (), (), (3,), (), ()]:
        kept = reference.mirostat_probabilities(sequence.logits().double().numpy(), parameters, mu)
        result = batch.step([3], unfinished=unfinished)
        np.testing.assert_allclose(result[0].softmax(0), kept, atol=1e-6)
        if not unfinished:
            mu -= parameters.mirostat_eta * (-math.log2(kept[sequence.output[-1]]) - 2.0)


def test_batch_without_chains_is_left_alone() -> None:
    batch = Batch()
    batch.enter(SteppedSequence(6, Random(0)), 0)
    batch.step([0])
    logits = torch.randn(1, VOCABULARY)
    assert batch.processor.apply(logits, batch._context([0])) is logits
