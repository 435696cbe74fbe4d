"""Each step alone, with numbers calculated by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from contract.sampling import Sampler
from tests.worker.samplers import reference
from tests.worker.samplers.batches import chain_batch, history_of
from worker.samplers.batch import Rows, apply_chain
from worker.samplers.candidates import Placement
from worker.samplers.parameters import SequenceChain

NONE = -math.inf
PROBABILITIES = [0.1, 0.2, 0.3, 0.4]


def kept(parameters: SequenceChain, probabilities: list[float] = PROBABILITIES) -> list[int]:
    """The tokens that are left, which the reference confirms."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(probabilities))
    actual = np.flatnonzero(np.isfinite(chain_batch(logits[None], [parameters], [[]])[0]))
    expected = np.flatnonzero(np.isfinite(reference.chain_logits(logits, parameters, [])))
    assert actual.tolist() == expected.tolist()
    return [int(token) for token in actual]


def changed(logits: list[float], parameters: SequenceChain, tokens: list[int]) -> list[float]:
    """The resulting logits, which the reference confirms."""
    actual = chain_batch(np.array([logits]), [parameters], [tokens])[0]
    expected = reference.chain_logits(np.array(logits), parameters, tokens)
    np.testing.assert_allclose(actual, expected)
    return [round(float(logit), 6) for logit in actual]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"top_k": 1}, [3]),
        ({"top_k": 3}, [1, 2, 3]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 400}, [0, 1, 2, 3]),
        ({"top_k": 1, "min_keep": 2}, [2, 3]),
        ({"top_p": 0.0}, [3]),
        ({"top_p": 0.39}, [3]),
        ({"top_p": 0.69}, [2, 3]),
        ({"top_p": 0.71}, [1, 2, 3]),
        ({"top_p": 0.99}, [0, 1, 2, 3]),
        ({"top_p": 0.39, "min_keep": 3}, [1, 2, 3]),
        ({"min_p": 0.01}, [0, 1, 2, 3]),
        ({"min_p": 0.26}, [1, 2, 3]),
        ({"min_p": 0.74}, [2, 3]),
        ({"min_p": 1.0}, [3]),
        ({"min_p": 1.0, "min_keep": 2}, [2, 3]),
        ({"min_p": 1.0, "min_keep": 9}, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_truncation_keeps_the_most_probable(arguments: dict[str, Any], expected: list[int]) -> None:
    assert kept(SequenceChain(**arguments)) == expected


@pytest.mark.parametrize(
    ("probabilities", "arguments", "expected"),
    [
        # Surprises are 2.30, 1.61, 1.20, 0.92 nats; 1.28 is expected; nearest are tokens 2, 1, 3,
        # 0.
        (PROBABILITIES, {"typical_p": 0.2}, [2]),
        (PROBABILITIES, {"typical_p": 0.4}, [1, 2]),
        (PROBABILITIES, {"typical_p": 0.6}, [1, 2, 3]),
        (PROBABILITIES, {"typical_p": 0.95}, [0, 1, 2, 3]),
        (PROBABILITIES, {"typical_p": 0.0}, [2]),
        (PROBABILITIES, {"typical_p": 0.0, "min_keep": 3}, [1, 2, 3]),
        ([0.97, 0.01, 0.01, 0.01], {"typical_p": 0.5}, [0]),
        ([0.4, 0.2, 0.2, 0.2], {"typical_p": 0.5}, [1, 2, 3]),
    ],
)
def test_typical_keeps_tokens_of_expected_surprise(
    probabilities: list[float], arguments: dict[str, Any], expected: list[int]
) -> None:
    assert kept(SequenceChain(**arguments), probabilities) == expected


@pytest.mark.parametrize(
    ("n", "expected"), [(0.0, 5), (-1.0, 5), (0.1, 1), (1.5, 3), (2.2, 4), (9.0, 5)]
)
def test_top_n_sigma_measures_deviations_from_the_largest_logit(n: float, expected: int) -> None:
    # Mean 4, deviation 2.83; the masked token counts for neither.
    logits = [8.0, 6.0, 2.0, 0.0, NONE, 4.0]
    result = changed(logits, SequenceChain(top_n_sigma=n), [])
    assert sum(math.isfinite(logit) for logit in result) == expected


def test_truncation_counts_only_tokens_that_are_left() -> None:
    masked = [0.0, 0.2, 0.5, 0.3]
    assert kept(SequenceChain(top_k=3), masked) == [1, 2, 3]
    assert kept(SequenceChain(top_p=0.1, min_keep=4), masked) == [1, 2, 3]
    # Typical removes token 2, so that the two best that are left are 1 and 3.
    order = (Sampler.TYPICAL_P, Sampler.TOP_K)
    both = SequenceChain(order=order, typical_p=0.45, top_k=2)
    assert kept(both, [0.02, 0.28, 0.4, 0.3]) == [1, 3]


def test_xtc_removes_all_likely_tokens_but_the_least_likely() -> None:
    def removing(**arguments: Any) -> list[int]:
        return kept(SequenceChain(xtc_probability=1.0, **arguments))

    assert removing(xtc_threshold=0.15) == [0, 1]
    assert removing(xtc_threshold=0.25) == [0, 1, 2]
    assert removing(xtc_threshold=0.35) == [0, 1, 2, 3]
    assert removing(xtc_threshold=0.0) == [0]
    assert removing(xtc_threshold=0.51) == [0, 1, 2, 3]
    assert removing(xtc_threshold=0.15, min_keep=2) == [0, 1]
    assert removing(xtc_threshold=0.15, min_keep=3) == [0, 1, 2, 3]
    assert removing(xtc_threshold=0.15, xtc_spared=(3,)) == [0, 1, 3]
    assert removing(xtc_threshold=0.15, xtc_spared=(0, -5, 99)) == [0, 1]
    assert kept(SequenceChain(xtc_probability=0.0, xtc_threshold=0.15)) == [0, 1, 2, 3]


def test_xtc_leaves_exactly_one_of_equally_likely_tokens() -> None:
    parameters = SequenceChain(xtc_probability=1.0, xtc_threshold=0.1)
    assert kept(parameters, [0.3, 0.3, 0.3, 0.1]) == [3]
    assert kept(parameters, [0.31, 0.31, 0.31, 0.07]) == [2, 3]


def test_temperature_divides_logits() -> None:
    assert changed([1.0, -2.0, NONE], SequenceChain(temperature=0.5), []) == [2.0, -4.0, NONE]
    tiny = changed([1.0, 0.5], SequenceChain(temperature=1e-6), [])
    assert tiny[0] - tiny[1] > 1e5


@pytest.mark.parametrize(
    ("logits", "temperature"),
    [
        ([0.0, 0.0, 0.0, 0.0], 1.5),  # All tokens are equally likely: the largest temperature.
        ([60.0, 0.0, 0.0, 0.0], 0.5),  # One is certain: the smallest.
        ([0.0, 0.0, NONE, NONE], 1.5),  # Masked tokens are not counted.
        ([math.log(4), math.log(2), 0.0, 0.0], 0.5 + 0.875**2),  # 1.75 bits of 2.
    ],
)
def test_dynamic_temperature_follows_the_entropy(logits: list[float], temperature: float) -> None:
    parameters = SequenceChain(temperature=1.0, dynatemp_range=0.5, dynatemp_exponent=2.0)
    expected = [logit / temperature for logit in logits]
    np.testing.assert_allclose(changed(logits, parameters, []), expected, atol=1e-5)


def test_penalties_equal_those_of_llama_cpp() -> None:
    parameters = SequenceChain(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    logits = [4.0, -1.0, 0.0, 3.0, NONE]
    # Token 0 three times, 1 once, 2 once, 4 once; token 9 is not in the vocabulary.
    result = changed(logits, parameters, [0, 1, 9, 0, 2, 0, 4])
    assert result == [2.0 - 1.25, -2.0 - 0.75, -0.75, 3.0, NONE]


@pytest.mark.parametrize(
    ("last_n", "penalised"),
    [(-1, [0, 1, 2]), (0, []), (1, [2]), (2, [1, 2]), (3, [1, 2]), (4, [0, 1, 2]), (99, [0, 1, 2])],
)
def test_penalties_count_only_their_window(last_n: int, penalised: list[int]) -> None:
    parameters = SequenceChain(presence_penalty=1.0, penalty_last_n=last_n)
    result = changed([0.0] * 4, parameters, [0, 1, 1, 2])
    assert [token for token, logit in enumerate(result) if logit == -1.0] == penalised


def test_presence_and_frequency_can_exclude_the_prompt() -> None:
    parameters = SequenceChain(
        presence_penalty=1.0,
        frequency_penalty=0.5,
        repetition_penalty=2.0,
        penalizes_prompt=False,
        prompt_tokens=3,
    )
    # Tokens 0, 1, 0 are the prompt's; 1, 2 were generated.
    assert changed([8.0, 8.0, 8.0, 8.0], parameters, [0, 1, 0, 1, 2]) == [4.0, 2.5, 2.5, 8.0]


def test_truncated_history_keeps_its_positions() -> None:
    parameters = SequenceChain(
        frequency_penalty=1.0, penalizes_prompt=False, prompt_tokens=3, penalty_last_n=4
    )
    tokens = [0, 0, 0, 0, 1, 1]
    rows = Rows.build([parameters], Placement(device=torch.device("cpu"), vocab_size=3))
    for width in (4, 5, 6, 20):
        logits = apply_chain(
            torch.zeros(1, 3),
            rows,
            history=history_of([tokens], width),
            total_tokens=torch.tensor([len(tokens)]),
        )
        # The window has tokens 0 0 1 1, of which the first is the prompt's.
        assert logits.tolist() == [[-1.0, -2.0, 0.0]]
