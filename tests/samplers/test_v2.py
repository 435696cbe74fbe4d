"""The processor of the newer runner: slots that are used again, rows in any order, steps left out."""

import math
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.samplers import reference
from tests.samplers.stories import VOCABULARY, Story
from worker.samplers.arguments import chain_parameters
from worker.samplers.v2 import ProcessorV2

SLOTS = 8
LONGEST = 64


class Batch:
    """What the runner keeps of its requests, by slot."""

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
        self.stories: dict[int, Story] = {}

    def enter(self, story: Story, slot: int) -> None:
        self.stories[slot] = story
        has_chain = self.processor.add_request(slot, story.params)
        assert has_chain == (story.params.extra_args is not None)
        self._write(slot)

    def step(self, slots: list[int], *, unfinished: tuple[int, ...] = ()) -> torch.Tensor:
        """Check a step of some slots against every story by itself; return the logits.

        The prompts of `unfinished` slots go on in the next step, so that no token comes of this one.
        """
        self.processor.apply_staged_writes()
        stories = [self.stories[slot] for slot in slots]
        logits = torch.stack([story.logits() for story in stories])
        results: torch.Tensor = self.processor.apply(logits, self._context(slots))
        for slot, story, result in zip(slots, stories, results, strict=True):
            torch.testing.assert_close(result, story.expected(), msg=f"story {story.number}")
            if slot not in unfinished:
                story.sample(result)
                self._write(slot)
        return results

    def _write(self, slot: int) -> None:
        tokens = self.stories[slot].tokens
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
def test_slots_get_what_they_get_alone(seed: int) -> None:
    random, batch, preempted, number = Random(seed), Batch(), list[Story](), 0
    for _ in range(120):
        for slot, story in list(batch.stories.items()):
            if story.has_ended or random.random() < 0.03:
                del batch.stories[slot]
                if not story.has_ended:
                    preempted.append(story)
        for slot in (
            random.sample(sorted(set(range(SLOTS)) - set(batch.stories)), k=1)
            if len(batch.stories) < SLOTS
            else []
        ):
            if preempted:
                preempted[0].enter_anew()
                batch.enter(preempted.pop(0), slot)
            else:
                batch.enter(Story(number, random), slot)
                number += 1
        # Some wait for a step, as the others do while two parts of a pipeline take turns.
        slots = [slot for slot in batch.stories if random.random() < 0.8]
        random.shuffle(slots)
        if slots:
            batch.step(slots, unfinished=tuple(s for s in slots if random.random() < 0.1))
    assert number > 2 * SLOTS


def test_mirostat_learns_only_from_tokens_that_came() -> None:
    batch, story = Batch(), Story(4, Random(0))
    parameters = chain_parameters(story.params.extra_args)
    assert parameters is not None
    batch.enter(story, 3)
    mu = parameters.initial_mu
    # The prompt takes three steps, and later one step is given to others.
    for unfinished in [(3,), (3,), (), (), (3,), (), ()]:
        kept = reference.mirostat_probabilities(story.logits().double().numpy(), parameters, mu)
        result = batch.step([3], unfinished=unfinished)
        np.testing.assert_allclose(result[0].softmax(0), kept, atol=1e-6)
        if not unfinished:
            mu -= parameters.mirostat_eta * (-math.log2(kept[story.output[-1]]) - 2.0)


def test_batch_without_chains_is_left_alone() -> None:
    batch = Batch()
    batch.enter(Story(6, Random(0)), 0)
    batch.step([0])
    logits = torch.randn(1, VOCABULARY)
    assert batch.processor.apply(logits, batch._context([0])) is logits
