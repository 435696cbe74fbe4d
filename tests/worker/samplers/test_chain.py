"""The whole chain against the reference: any samplers in any order, in any batch."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.sampling import DEFAULT_SAMPLERS, Sampler
from tests.worker.samplers import reference
from tests.worker.samplers.batches import (
    chain_batch,
    random_logits,
    random_parameters,
    random_tokens,
)
from worker.samplers.batch import Rows, apply_chain
from worker.samplers.candidates import Placement
from worker.samplers.parameters import ALL_TOKENS, SequenceChain
from worker.samplers.stages.mirostat import MirostatRows, apply_mirostat, next_mu

seeds = st.integers(0, 2**64 - 1)


def assert_equal(actual: reference.Logits, expected: reference.Logits) -> None:
    """One distribution and, where it counts for greedy sampling, one largest logit."""
    np.testing.assert_allclose(
        reference.distribution(actual), reference.distribution(expected), atol=1e-6
    )


@settings(max_examples=150)
@given(seed=seeds, vocab_size=st.sampled_from([2, 3, 5, 8, 300]), rows=st.integers(1, 6))
def test_any_chain_matches_the_reference(seed: int, vocab_size: int, rows: int) -> None:
    random = Random(seed)
    parameters = [random_parameters(random, vocab_size) for _ in range(rows)]
    sequences = [random_tokens(random, row, vocab_size) for row in parameters]
    logits = random_logits(random, rows, vocab_size)

    actual = chain_batch(logits, parameters, sequences)

    for row in range(rows):
        expected = reference.chain_logits(logits[row], parameters[row], sequences[row])
        assert_equal(actual[row], expected)
        if parameters[row].is_greedy:
            assert actual[row].argmax() == expected.argmax()


@settings(max_examples=10)
@given(seed=seeds)
def test_any_chain_matches_the_reference_with_a_real_vocabulary(seed: int) -> None:
    random = Random(seed)
    parameters = [random_parameters(random, 2048) for _ in range(4)]
    sequences = [random_tokens(random, row, 2048) for row in parameters]
    logits = random_logits(random, 4, 2048)

    actual = chain_batch(logits, parameters, sequences)

    for row in range(4):
        assert_equal(
            actual[row], reference.chain_logits(logits[row], parameters[row], sequences[row])
        )


@settings(max_examples=60)
@given(seed=seeds)
def test_row_does_not_depend_on_the_rest_of_its_batch(seed: int) -> None:
    random = Random(seed)
    # About every third has the default order, so that some share a group.
    parameters = [random_parameters(random, 300) for _ in range(9)]
    sequences = [random_tokens(random, row, 300) for row in parameters]
    logits = random_logits(random, len(parameters), 300).astype(np.float32).astype(np.float64)

    together = chain_batch(logits, parameters, sequences, dtype=torch.float32)

    for row, own in enumerate(parameters):
        alone = chain_batch(
            logits[row : row + 1], [own], sequences[row : row + 1], dtype=torch.float32
        )
        np.testing.assert_array_equal(together[row], alone[0])


@settings(max_examples=60)
@given(seed=seeds)
def test_masked_tokens_stay_masked_and_one_token_is_left(seed: int) -> None:
    random = Random(seed)
    parameters = [random_parameters(random, 50) for _ in range(4)]
    sequences = [random_tokens(random, row, 50) for row in parameters]
    logits = random_logits(random, 4, 50)

    actual = chain_batch(logits, parameters, sequences, dtype=torch.float32)

    assert not np.isnan(actual).any()
    assert not np.isposinf(actual).any()
    assert (actual[np.isneginf(logits)] == -np.inf).all()
    assert np.isfinite(actual).any(axis=1).all()


@settings(max_examples=30)
@given(seed=seeds)
def test_fully_masked_row_stays_masked(seed: int) -> None:
    random = Random(seed)
    parameters = [random_parameters(random, 20) for _ in range(3)]
    sequences = [random_tokens(random, row, 20) for row in parameters]

    actual = chain_batch(np.full((3, 20), -np.inf), parameters, sequences, dtype=torch.float32)

    assert (actual == -np.inf).all()


def test_float32_keeps_the_same_tokens_as_float64() -> None:
    random = Random(5)
    differing = kept = 0
    for _ in range(20):
        parameters = [random_parameters(random, 2048) for _ in range(8)]
        sequences = [random_tokens(random, row, 2048) for row in parameters]
        logits = random_logits(random, 8, 2048).astype(np.float32).astype(np.float64)
        single = chain_batch(logits, parameters, sequences, dtype=torch.float32)
        double = chain_batch(logits, parameters, sequences)
        # Tokens of negligible weight may fall on either side.
        matters = np.exp(double - double.max(axis=1, keepdims=True)) > 1e-9
        differing += int((np.isfinite(single) != np.isfinite(double))[matters].sum())
        kept += int(matters.sum())
    assert kept > 50_000
    assert differing <= kept * 2e-4


def test_greedy_rows_apply_only_penalties_and_dry() -> None:
    logits = np.array([[3.0, 2.9, 2.0, 1.0]])
    everything = SequenceChain(
        temperature=0.0,
        top_k=1,
        top_p=0.1,
        min_p=0.9,
        typical_p=0.1,
        top_n_sigma=0.1,
        xtc_probability=1.0,
        xtc_threshold=0.1,
        dynatemp_range=1.0,
        mirostat_version=2,
        presence_penalty=0.5,
        dry_multiplier=2.0,
        dry_allowed_length=1,
    )

    actual = chain_batch(logits, [everything], [[1, 2, 0, 1]])

    # Tokens 0, 1 and 2 are present; 2 would continue the repetition of 1.
    np.testing.assert_allclose(actual, [[2.5, 2.4, -0.5, 1.0]])


def test_unused_steps_are_skipped() -> None:
    placement = Placement(device=torch.device("cpu"), vocab_size=8)
    rows = Rows.build([SequenceChain(), SequenceChain(min_p=0.1)], placement)
    assert [type(step).__name__ for step in rows.steps] == ["MinP"]
    assert Rows.build([SequenceChain(temperature=0.0)], placement).steps == []


def test_step_runs_only_if_named_and_only_once() -> None:
    logits = np.array([[4.0, 3.0, 2.0, 1.0]])
    order = (Sampler.TEMPERATURE, *[Sampler.PENALTIES, Sampler.TEMPERATURE] * 20)
    parameters = SequenceChain(order=order, temperature=0.01, repetition_penalty=0.01, top_k=1)

    actual = chain_batch(logits, [parameters], [[1]], dtype=torch.float32)

    np.testing.assert_allclose(actual, [[400.0, 30000.0, 200.0, 100.0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "ranked_tokens"),
    [
        (SequenceChain(), 0),
        (SequenceChain(min_p=0.1, xtc_probability=1.0, typical_p=0.5, temperature=0.5), 0),
        (SequenceChain(top_k=40, top_p=0.9), 128),
        (SequenceChain(top_k=65), 512),
        (SequenceChain(top_k=5, min_keep=70), 512),
        (SequenceChain(top_k=1985), ALL_TOKENS),
        (SequenceChain(top_p=0.9), ALL_TOKENS),
        (SequenceChain(min_p=0.1, min_keep=2), ALL_TOKENS),
        (SequenceChain(order=(Sampler.TOP_P, Sampler.TOP_K), top_k=40, top_p=0.9), ALL_TOKENS),
        (SequenceChain(top_k=40, temperature=0.0), 0),
        (SequenceChain(top_k=40, mirostat_version=2), 0),
    ],
)
def test_only_as_many_tokens_are_ranked_as_needed(
    parameters: SequenceChain, ranked_tokens: int
) -> None:
    assert parameters.ranked_tokens == ranked_tokens


@pytest.mark.parametrize(
    ("parameters", "needed"),
    [
        (SequenceChain(), 0),
        (SequenceChain(penalty_last_n=64), 0),
        (SequenceChain(penalty_last_n=64, presence_penalty=1.0), 64),
        (SequenceChain(penalty_last_n=64, presence_penalty=1.0, dry_multiplier=1.0), -1),
        (SequenceChain(dry_multiplier=1.0, dry_last_n=100, dry_base=0.5), 0),
        (SequenceChain(dry_multiplier=1.0, dry_last_n=100), 100),
        (SequenceChain(order=(), dry_multiplier=1.0), 0),
        (SequenceChain(dry_multiplier=1.0, temperature=0.0), -1),
        (SequenceChain(dry_multiplier=1.0, mirostat_version=1), 0),
    ],
)
def test_history_is_needed_only_by_penalties_and_dry(
    parameters: SequenceChain, needed: int
) -> None:
    assert parameters.history_needed == needed


def test_of_equal_logits_at_the_edge_of_top_k_the_lower_ids_are_kept() -> None:
    logits = np.linspace(0.0, -5.0, 5000)[None]
    edge = np.array([4000, 17, 3000, 100, 4999])
    logits[0, edge] = 1.0

    actual = chain_batch(logits, [SequenceChain(top_k=3)], [[]], dtype=torch.float32)

    assert np.flatnonzero(np.isfinite(actual[0])).tolist() == [17, 100, 3000]


def test_top_k_keeps_k_of_more_equal_logits_than_a_partial_sort_holds() -> None:
    logits = np.zeros((2, 5000))
    logits[:, 4990:] = 1.0
    parameters = [SequenceChain(top_k=20), SequenceChain(top_k=64)]

    actual = chain_batch(logits, parameters, [[], []], dtype=torch.float32)

    assert np.isfinite(actual).sum(axis=1).tolist() == [20, 64]
    assert np.isfinite(actual[:, 4990:]).all()


@pytest.mark.slow
def test_chain_never_synchronises_with_the_device() -> None:
    # Tensors of the meta device have shapes but no values: reading one is an error.
    random = Random(11)
    meta = torch.device("meta")
    placement = Placement(device=meta, vocab_size=300)
    for _ in range(40):
        own = random_parameters(random, 300)
        logits = apply_chain(
            torch.empty(3, 300, device=meta),
            Rows.build([own] * 3, placement),
            history=torch.empty(3, 50, dtype=torch.int64, device=meta),
            total_tokens=torch.empty(3, dtype=torch.int64, device=meta),
        )
        assert logits.shape == (3, 300)

    rows = MirostatRows.build([SequenceChain(mirostat_version=v) for v in (1, 2)], placement)
    mu = torch.empty(2, device=meta)
    _, kept = apply_mirostat(torch.empty(2, 300, device=meta), rows, mu)
    sampled = torch.empty(2, dtype=torch.int64, device=meta)
    assert next_mu(mu, kept, sampled=sampled, rows=rows).shape == (2,)


def test_default_order_equals_the_contract() -> None:
    assert SequenceChain().order == DEFAULT_SAMPLERS
