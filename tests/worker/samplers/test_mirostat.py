"""Mirostat: which tokens are kept, how the state moves, and that the surprise meets the target."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.worker.samplers import reference
from worker.samplers.batch import ChainedSequence, Group, grouped
from worker.samplers.candidates import Placement
from worker.samplers.parameters import SequenceChain
from worker.samplers.stages.mirostat import MirostatRows, apply_mirostat, next_mu

CPU = torch.device("cpu")


def chain(
    version: int,
    *,
    tau: float = 5.0,
    eta: float = 0.1,
    temperature: float = 1.0,
    prompt_tokens: int = 0,
) -> SequenceChain:
    """Parameters of mirostat alone."""
    return SequenceChain(
        mirostat_version=version,
        mirostat_tau=tau,
        mirostat_eta=eta,
        temperature=temperature,
        prompt_tokens=prompt_tokens,
    )


def rows_of(parameters: list[SequenceChain], vocab_size: int, dtype: torch.dtype) -> MirostatRows:
    """The rows of a batch."""
    return MirostatRows.build(parameters, Placement(device=CPU, vocab_size=vocab_size, dtype=dtype))


@pytest.mark.parametrize("vocab_size", [2, 3, 50, 2048])
@pytest.mark.parametrize("kind", ["normal", "rounded", "masked", "steep", "equal"])
def test_kept_tokens_are_those_of_the_reference(vocab_size: int, kind: str) -> None:
    random = np.random.default_rng(5)
    parameters = [
        chain(version, temperature=temperature)
        for version in (1, 2)
        for temperature in (0.6, 1.0, 1.5)
        for _ in range(5)
    ]
    logits = random.normal(0.0, 3.0, (len(parameters), vocab_size))
    if kind == "rounded":
        logits = np.round(logits)
    elif kind == "masked":
        logits[:, 1:][random.random(logits[:, 1:].shape) < 0.4] = -np.inf
    elif kind == "steep":
        logits *= 10
    elif kind == "equal":
        logits[:] = 0.5
    mu = random.uniform(-1.0, 14.0, len(parameters))

    result, kept = apply_mirostat(
        torch.tensor(logits),
        rows_of(parameters, vocab_size, torch.float64),
        torch.tensor(mu),
    )

    for row, own in enumerate(parameters):
        expected = reference.mirostat_probabilities(logits[row], own, mu[row])
        np.testing.assert_allclose(result[row].softmax(-1), expected, atol=1e-9)
        np.testing.assert_allclose(kept[row].exp(), expected, atol=1e-9)


def test_state_moves_towards_the_target() -> None:
    parameters = [chain(2, tau=3.0, eta=0.5), chain(1, tau=1.0, eta=0.1), chain(2)]
    rows = rows_of(parameters, 4, torch.float64)
    kept = torch.tensor([[0.5, 0.25, 0.25, 0.0]] * 3, dtype=torch.float64).log()
    mu = torch.tensor([4.0, 2.0, 9.0], dtype=torch.float64)

    moved = next_mu(mu, kept, sampled=torch.tensor([1, 0, 2]), rows=rows)
    assert moved.tolist() == pytest.approx([4.0 - 0.5 * (2 - 3), 2.0, 9.0 - 0.1 * (2 - 5)])
    same = next_mu(mu, kept, sampled=torch.tensor([-1, 3, 4]), rows=rows)
    assert same.tolist() == mu.tolist()


def test_state_begins_at_twice_the_target() -> None:
    assert chain(2, tau=3.5).initial_mu == 7.0


@pytest.mark.parametrize(("tau", "largest"), [(100.0, 200.0), (3.0, 22.0), (0.0, 0.0)])
def test_state_stays_bounded_where_the_target_is_out_of_reach(tau: float, largest: float) -> None:
    rows = rows_of([chain(2, tau=tau, eta=10.0)], 2048, torch.float32)
    mu = torch.tensor([2 * tau])
    for _ in range(200):
        logits = torch.zeros(1, 2048)
        logits[0, 5] = 50.0
        _, kept = apply_mirostat(logits, rows, mu)
        mu = next_mu(mu, kept, sampled=torch.tensor([5]), rows=rows)
    assert mu.item() == pytest.approx(largest)


def test_fully_masked_row_stays_masked() -> None:
    rows = rows_of([chain(1), chain(2)], 5, torch.float32)
    mu = torch.tensor([10.0, 10.0])
    logits, kept = apply_mirostat(torch.full((2, 5), -math.inf), rows, mu)
    assert (logits == -math.inf).all()
    assert next_mu(mu, kept, sampled=torch.tensor([0, 0]), rows=rows).tolist() == [10.0, 10.0]


def test_the_most_probable_token_is_always_left() -> None:
    rows = rows_of([chain(1), chain(2)] * 2, 3, torch.float32)
    mu = torch.tensor([-50.0, -50.0, 0.0, 0.0])
    logits, _ = apply_mirostat(torch.tensor([[1.0, 1.0, 0.0]]).repeat(4, 1), rows, mu)
    assert logits.isfinite().tolist() == [[True, False, False]] * 4


@pytest.mark.parametrize("version", [1, 2])
def test_replayed_sequence_reaches_the_same_state(version: int) -> None:
    def logits(step: int) -> torch.Tensor:
        return 3 * torch.randn(1, 64, generator=torch.Generator().manual_seed(step))

    def step(group: Group, rows: list[tuple[torch.Tensor, int, int]]) -> torch.Tensor:
        return group.apply(
            torch.cat([logits for logits, _, _ in rows]),
            history=torch.tensor([[newest] for _, newest, _ in rows]),
            total_tokens=torch.tensor([total for _, _, total in rows]),
        )

    parameters = chain(version, tau=3.0, eta=0.3, prompt_tokens=5)
    placement = Placement(device=CPU, vocab_size=64)
    (alone,) = grouped({0: ChainedSequence(parameters)}, placement)
    tokens, results = [9], []
    for at in range(12):
        results.append(step(alone, [(logits(at), tokens[-1], 5 + at)]))
        noise = torch.Generator().manual_seed(at)
        tokens.append(int(torch.multinomial(results[-1].softmax(-1), 1, generator=noise)))

    # Another sequence in the batch replays less, and after a while a third joins.
    replayed = ChainedSequence(replace(parameters, replayed=tuple(tokens[1:8])))
    other = ChainedSequence(replace(parameters, replayed=(63,), prompt_tokens=50))
    members = {2: replayed, 7: other}
    (group,) = grouped(members, placement)
    for at in range(12):
        if at == 4:
            (group,) = grouped({1: ChainedSequence(parameters), **members}, placement)
        beside = [(logits(99), 4, 5)] if at >= 4 else []
        rows = [*beside, (logits(at), tokens[at], 5 + at), (logits(50 + at), 63, 50 + at)]
        *_, ours, theirs = step(group, rows)
        if at < 7:
            assert ours.isfinite().nonzero().flatten().tolist() == [tokens[at + 1]]
        else:
            assert ours.tolist() == results[at][0].tolist()
        assert (theirs.isfinite().sum() == 1) == (at == 0)


@pytest.mark.parametrize("tokens", [500, pytest.param(2000, marks=pytest.mark.long)])
def test_mean_surprise_is_the_target(tokens: int) -> None:
    targets = [2.0, 4.0, 5.5]
    parameters = [
        chain(version, tau=tau, temperature=temperature)
        for version in (1, 2)
        for temperature in (0.9, 1.4)
        for tau in targets
    ]
    surprises, largest_difference = closed_loop(parameters, tokens)
    assert surprises == pytest.approx(targets * 4, rel=0.05)
    assert largest_difference < 1e-3


def closed_loop(parameters: list[SequenceChain], tokens: int) -> tuple[list[float], float]:
    """Sample; return mean surprises, and the distance of mu from the reference."""
    vocab_size = 2048
    random = np.random.default_rng(8)
    generator = torch.Generator().manual_seed(8)
    rows = rows_of(parameters, vocab_size, torch.float32)
    # Like a language model's: steep at some places, flat at others.
    zipf = np.tile(-1.1 * np.log(np.arange(1, vocab_size + 1)), (len(parameters), 1))
    tau = np.array([each.mirostat_tau for each in parameters])
    eta = np.array([each.mirostat_eta for each in parameters])
    exact = np.array([each.initial_mu for each in parameters])
    mu = torch.tensor(exact, dtype=torch.float32)
    difference, total = 0.0, np.zeros(len(parameters))
    for _ in range(tokens):
        steepness = random.uniform(0.7, 1.3, (len(parameters), 1))
        logits = random.permuted(zipf, axis=1) * steepness
        result, kept = apply_mirostat(torch.tensor(logits, dtype=torch.float32), rows, mu)
        sampled = torch.multinomial(result.softmax(-1), 1, generator=generator)
        mu = next_mu(mu, kept, sampled=sampled.flatten(), rows=rows)
        surprises = -kept.gather(1, sampled).flatten().double().numpy() / math.log(2)
        total += surprises
        exact -= eta * (surprises - tau)
        difference = max(difference, float(np.abs(exact - mu.numpy()).max()))
    return (total / tokens).tolist(), difference
