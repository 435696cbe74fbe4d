"""XTC's draws, and what is sampled with them."""

import numpy as np
import torch

from contract.sampling import Sampler
from tests.worker.samplers import reference
from tests.worker.samplers.batches import chain_batch
from tests.worker.samplers.statistics import chi_square_is_likely
from worker.samplers.batch import Rows, apply_chain
from worker.samplers.candidates import Placement
from worker.samplers.parameters import SequenceChain
from worker.samplers.stages.xtc import signed, uniform

LOGITS = np.log(np.array([0.1, 0.15, 0.35, 0.4]))


def test_draws_are_splitmix64() -> None:
    # The first numbers of splitmix64, whose state of 0 advances by its constant each time.
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    drawn = [reference.draw(state, -1) for state in (1, 2, 3)]
    assert drawn == [(word >> 11) / 2**53 for word in words]


def test_draws_equal_those_of_plain_integers() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**63, 123456789]
    positions = [0, 1, 7, 100_000]
    pairs = [(seed, position) for seed in seeds for position in positions]
    drawn = uniform(
        torch.tensor([signed(seed) for seed, _ in pairs]),
        torch.tensor([position for _, position in pairs]),
    )
    assert drawn.tolist() == [reference.draw(seed, position) for seed, position in pairs]


def test_draws_are_uniform_over_seeds_and_positions() -> None:
    even = np.full(64, 1 / 64)
    numbers = torch.arange(100_000)
    for seed, position in ((numbers, torch.zeros_like(numbers)), (torch.tensor(7), numbers)):
        cells = (uniform(seed, position) * 64).long()
        assert chi_square_is_likely(cells.bincount(minlength=64).tolist(), even)
        pairs = cells[:-1] * 64 + cells[1:]
        assert chi_square_is_likely(pairs.bincount(minlength=4096).tolist(), np.full(4096, 2**-12))


def test_tokens_are_excluded_with_the_requested_probability() -> None:
    rows = 4000
    parameters = [
        SequenceChain(xtc_probability=0.3, xtc_threshold=0.2, seed=seed) for seed in range(rows)
    ]
    result = chain_batch(np.tile(LOGITS, (rows, 1)), parameters, [[0] * 9] * rows)
    excluded = int((result[:, 3] == -np.inf).sum())
    assert chi_square_is_likely([excluded, rows - excluded], np.array([0.3, 0.7]))


def test_sampled_tokens_follow_the_reference() -> None:
    length = 20_000
    parameters = SequenceChain(
        order=(Sampler.XTC, Sampler.TEMPERATURE),
        xtc_probability=0.5,
        xtc_threshold=0.2,
        temperature=0.7,
        seed=99,
    )
    placement = Placement(device=torch.device("cpu"), vocab_size=len(LOGITS))
    result = apply_chain(
        torch.tensor(LOGITS, dtype=torch.float32).repeat(length, 1),
        Rows.build([parameters] * length, placement),
        history=torch.empty(length, 0, dtype=torch.int64),
        total_tokens=torch.arange(length),
    )
    generator = torch.Generator().manual_seed(4)
    drawn = torch.multinomial(result.softmax(-1), 1, generator=generator).flatten()
    expected = np.mean(
        [
            reference.distribution(reference.chain_logits(LOGITS, parameters, range(position)))
            for position in range(length)
        ],
        axis=0,
    )
    assert chi_square_is_likely(drawn.bincount(minlength=4).tolist(), expected)
    assert expected[3] < 0.3 < reference.distribution(LOGITS / 0.7)[3]
