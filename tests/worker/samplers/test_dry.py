"""DRY: lengths of matches, breakers, windows, bounds, and what is sampled."""

from random import Random

import numpy as np
import pytest
import torch

from tests.worker.samplers import reference
from tests.worker.samplers.batches import chain_batch, random_breakers
from tests.worker.samplers.statistics import chi_square_is_likely
from worker.samplers.parameters import Breaker, SequenceChain

A, B, C, D, X, Y = range(6)
VOCABULARY = 8


def penalties(tokens: list[int], parameters: SequenceChain) -> dict[int, float]:
    """The penalty of each token, which the reference confirms."""
    actual = -chain_batch(np.zeros((1, VOCABULARY)), [parameters], [tokens])[0]
    found = {token: round(float(lost), 6) for token, lost in enumerate(actual) if lost}
    expected = reference.dry_penalties(parameters, tokens)
    assert found == {token: round(lost, 6) for token, lost in expected.items() if lost}
    return found


def dry(allowed_length: int = 1, **arguments: object) -> SequenceChain:
    """DRY with a penalty of two to the power of a match's excess length."""
    return SequenceChain(
        dry_multiplier=1.0,
        dry_base=2.0,
        dry_allowed_length=allowed_length,
        **arguments,  # type: ignore[arg-type]  # The fields of a dataclass.
    )


def test_a_token_that_continues_the_longest_match_is_penalised() -> None:
    # llama.cpp's example: a b c was followed by c, c by b, b c by y.
    tokens = [A, B, C, C, B, C, Y, A, B, C]
    assert penalties(tokens, dry()) == {C: 4.0, B: 1.0, Y: 2.0}
    assert penalties(tokens, dry(2)) == {C: 2.0, Y: 1.0}
    assert penalties(tokens, dry(3)) == {C: 1.0}
    assert penalties(tokens, dry(4)) == {}


def test_the_longest_of_several_matches_counts() -> None:
    assert penalties([A, B, X, C, A, B, X, B, X, D, A, B], dry()) == {X: 2.0}


def test_allowed_length_of_zero_penalises_every_token_with_a_predecessor() -> None:
    assert penalties([A, B, C], dry(0)) == {B: 1.0, C: 1.0}


def test_first_token_has_no_predecessor_in_a_batch_with_longer_sequences() -> None:
    logits = chain_batch(np.zeros((2, VOCABULARY)), [dry(0)] * 2, [[A, B, C], [X] * 9])
    assert np.flatnonzero(logits[0]).tolist() == [B, C]


def test_a_loop_is_penalised_more_with_every_round() -> None:
    lost = [penalties([A, B] * rounds, dry())[A] for rounds in (2, 3, 4)]
    assert lost == [2.0, 8.0, 32.0]


@pytest.mark.parametrize("tokens", [[], [A], [B, A]])
def test_no_repetition_means_no_penalty(tokens: list[int]) -> None:
    assert penalties(tokens, dry()) == {}


@pytest.mark.parametrize(
    ("last_n", "expected"), [(0, {}), (3, {}), (6, {D: 1.0}), (7, {D: 2.0}), (-1, {D: 4.0})]
)
def test_matches_lie_in_the_window(last_n: int, expected: dict[int, float]) -> None:
    tokens = [A, B, C, D, X, A, B, C]
    assert penalties(tokens, dry(dry_last_n=last_n)) == expected


@pytest.mark.parametrize(
    ("breakers", "expected"),
    [
        ((), {D: 8.0}),
        ((((X,), ()),), {D: 4.0}),
        ((((B,), ()),), {D: 1.0}),
        ((((C,), ()),), {}),
        ((((D,), ()),), {}),  # A breaker itself is never penalised.
        ((((X,), (A,)),), {D: 2.0}),
        ((((X,), (A, B, C)),), {}),
        ((((X,), (B,)),), {D: 8.0}),
        ((((D,), (A,)),), {D: 8.0}),
        ((((Y, A), (B,)), ((X,), (A, C))), {D: 1.0}),
        ((((C,), (D,)),), {D: 8.0}),  # Its tail has not occurred yet.
    ],
)
def test_matches_stop_at_a_breaker(
    breakers: tuple[Breaker, ...], expected: dict[int, float]
) -> None:
    tokens = [X, A, B, C, D, Y, X, A, B, C]
    assert penalties(tokens, dry(dry_breakers=breakers)) == expected


def test_random_sequences_match_the_reference() -> None:
    random = Random(3)
    for _ in range(300):
        tokens = random.choices(range(random.choice([2, 3, 8])), k=random.randint(0, 60))
        parameters = dry(
            random.randint(0, 4),
            dry_breakers=random_breakers(random, VOCABULARY),
            dry_last_n=random.choice([-1, 5, 30]),
        )
        penalties(tokens, parameters)


@pytest.mark.parametrize(
    ("breaker", "lost"),
    [(((Y,), ()), 2.0**24), (((Y,), (A, B)), 2.0**24), (((C,), (A, B, C)), 0.0)],
)
def test_breakers_matter_only_near_the_end(breaker: Breaker, lost: float) -> None:
    phrase = [A, B, C] * 30
    tokens = [*phrase, D, Y, *phrase]
    parameters = dry(40, dry_breakers=(breaker,))
    assert -chain_batch(np.zeros((1, VOCABULARY)), [parameters], [tokens])[0, D] == lost


def test_long_matches_and_large_powers_are_bounded() -> None:
    loop = [A] * 500
    lost = -chain_batch(np.zeros((1, VOCABULARY)), [dry(1)], [loop], dtype=torch.float32)[0, A]
    assert lost == pytest.approx(1e12)
    mild = SequenceChain(dry_multiplier=1.0, dry_base=1.1, dry_allowed_length=2)
    lost = -chain_batch(np.zeros((1, VOCABULARY)), [mild], [loop])[0, A]
    assert lost == pytest.approx(1.1**62)
    steep = SequenceChain(dry_multiplier=1000.0, dry_base=1000.0, dry_allowed_length=0)
    result = chain_batch(np.zeros((1, VOCABULARY)), [steep], [loop], dtype=torch.float32)[0]
    assert result[A] == pytest.approx(-1e12)
    assert np.isfinite(result).all()


def test_base_of_one_and_below() -> None:
    tokens = [A, B, C, D, A, B, C]
    assert penalties(tokens, SequenceChain(dry_multiplier=3.0, dry_base=1.0)) == {D: 3.0}
    assert penalties(tokens, SequenceChain(dry_multiplier=3.0, dry_base=0.9)) == {}


def test_tokens_outside_the_vocabulary_take_part_in_matches() -> None:
    image = VOCABULARY + 5
    assert penalties([image, A, B, image, A], dry(2)) == {B: 1.0}
    logits = chain_batch(np.zeros((1, VOCABULARY)), [dry()], [[A, image, B, A]])
    assert (logits == 0).all()


def test_sampled_tokens_follow_the_reference() -> None:
    parameters = dry(dry_breakers=(((X,), ()),))
    tokens = [A, B, C, A, B, D, X, A, B]
    logits = np.linspace(1.0, 0.0, VOCABULARY)
    actual = torch.tensor(chain_batch(logits[None], [parameters], [tokens], dtype=torch.float32))
    generator = torch.Generator().manual_seed(4)
    drawn = torch.multinomial(actual[0].softmax(-1), 20_000, replacement=True, generator=generator)
    expected = reference.distribution(reference.chain_logits(logits, parameters, tokens))
    assert chi_square_is_likely(drawn.bincount(minlength=VOCABULARY).tolist(), expected)
