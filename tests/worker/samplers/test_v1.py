"""The processor of the older runner: rows that enter, leave, move and are swapped."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.worker.samplers.sequences import VOCABULARY, SteppedSequence

CAPACITY = 8

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, on its first import.


class Batch:
    """vLLM's persistent batch, with its own record of changes."""

    def __init__(self, processor: Any) -> None:
        from vllm.v1.sample.logits_processor import BatchUpdateBuilder, MoveDirectionality

        self._changes = BatchUpdateBuilder()
        self._directions = MoveDirectionality
        self._processor = processor
        self.rows: list[SteppedSequence | None] = []

    def leave(self, index: int) -> None:
        self.rows[index] = None
        self._changes.removed_append(index)

    def enter(self, sequence: SteppedSequence) -> None:
        index = self._changes.pop_removed()
        if index is None:
            index = len(self.rows)
            self.rows.append(None)
        self.rows[index] = sequence
        self._changes.added.append((index, sequence.params, sequence.prompt, sequence.output))

    def condense(self) -> None:
        while None in self.rows:
            last = self.rows.pop()
            if last is not None:
                empty = self._changes.pop_removed()
                self.rows[empty] = last
                self._changes.moved.append((len(self.rows), empty, self._directions.UNIDIRECTIONAL))

    def swap(self, one: int, other: int) -> None:
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]
        self._changes.moved.append((one, other, self._directions.SWAP))

    def step(self) -> None:
        """Compare the processor's result of a step with every sequence processed alone."""
        self._processor.update_state(self._changes.get_and_reset(len(self.rows)))
        sequences = [sequence for sequence in self.rows if sequence is not None]
        logits = torch.stack([sequence.logits() for sequence in sequences])
        for sequence, result in zip(sequences, self._processor.apply(logits), strict=True):
            torch.testing.assert_close(
                result, sequence.expected(), msg=f"sequence {sequence.number}"
            )
            sequence.sample(result)


@pytest.fixture
def processor() -> Any:
    from worker.engine.vllm.chain_processor import ChainProcessor

    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=64), speculative_config=None
    )
    return ChainProcessor(config, torch.device("cpu"), False)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))]
)
def test_rows_do_not_depend_on_their_batch(processor: Any, seed: int) -> None:
    random, batch, preempted, number = Random(seed), Batch(processor), list[SteppedSequence](), 0
    for _ in range(120):
        for index, sequence in enumerate(batch.rows):
            if sequence is not None and (sequence.has_ended or random.random() < 0.03):
                batch.leave(index)
                if not sequence.has_ended:
                    preempted.append(sequence)
        while (
            sum(sequence is not None for sequence in batch.rows) < CAPACITY
            and random.random() < 0.7
        ):
            if preempted:
                batch.enter(preempted.pop(0))
            else:
                batch.enter(SteppedSequence(number, random))
                number += 1
        batch.condense()
        if len(batch.rows) > 1 and random.random() < 0.3:
            batch.swap(*random.sample(range(len(batch.rows)), 2))
        if batch.rows:
            batch.step()
    assert number > 2 * CAPACITY


def test_pending_token_is_not_part_of_the_history(processor: Any) -> None:
    batch, sequence = Batch(processor), SteppedSequence(2, Random(0))
    batch.enter(sequence)
    batch.step()
    came, sequence.output[-1] = sequence.output[-1], -1
    processor.apply(sequence.logits().unsqueeze(0))
    sequence.output[-1] = came
    batch.step()
    assert len(sequence.output) == 2


def test_batch_without_chains_is_left_alone(processor: Any) -> None:
    batch = Batch(processor)
    batch.enter(SteppedSequence(6, Random(0)))
    batch.step()
    logits = torch.randn(1, VOCABULARY)
    assert processor.apply(logits) is logits
    assert not processor.is_argmax_invariant()


def test_speculative_decoding_is_refused() -> None:
    from worker.engine.vllm.chain_processor import ChainProcessor

    config = SimpleNamespace(speculative_config=object())
    with pytest.raises(ValueError, match="speculative"):
        ChainProcessor(config, SimpleNamespace())
