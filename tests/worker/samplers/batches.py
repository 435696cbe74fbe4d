"""Applies the chain to sequences with any parameters, like a model runner."""

from collections.abc import Sequence
from random import Random

import numpy as np
import torch

from contract.sampling import DEFAULT_SAMPLERS, Sampler
from tests.worker.samplers.reference import Logits
from worker.samplers.batch import Rows, apply_chain
from worker.samplers.candidates import Placement
from worker.samplers.parameters import Breaker, SequenceChain

Tokens = Sequence[int]


def history_of(sequences: Sequence[Tokens], width: int | None = None) -> torch.Tensor:
    """The newest tokens of each sequence, in the last columns."""
    width = max(map(len, sequences)) if width is None else width
    padded = [[-1] * (width - len(tokens)) + list(tokens)[-width:] for tokens in sequences]
    return torch.tensor([row[-width:] if width else [] for row in padded], dtype=torch.int64)


def chain_batch(
    logits: Logits,
    parameters: Sequence[SequenceChain],
    sequences: Sequence[Tokens],
    *,
    dtype: torch.dtype = torch.float64,
) -> Logits:
    """Apply the chain to a batch whose rows are of any groups."""
    result = np.empty_like(logits)
    placement = Placement(device=torch.device("cpu"), vocab_size=logits.shape[1], dtype=dtype)
    for group in {row.group for row in parameters}:
        numbers = [i for i, row in enumerate(parameters) if row.group == group]
        members = [sequences[i] for i in numbers]
        result[numbers] = apply_chain(
            torch.tensor(logits[numbers], dtype=dtype),
            Rows.build([parameters[i] for i in numbers], placement),
            history=history_of(members),
            total_tokens=torch.tensor([len(tokens) for tokens in members]),
        ).numpy()
    return result


def random_parameters(random: Random, vocab_size: int) -> SequenceChain:
    """Parameters of which about half are neutral, often in the default order."""

    def maybe(neutral: float, low: float, high: float) -> float:
        return neutral if random.random() < 0.5 else random.uniform(low, high)

    order = random.sample(list(Sampler), random.randint(0, len(Sampler)))
    return SequenceChain(
        order=DEFAULT_SAMPLERS if random.random() < 0.3 else tuple(order),
        temperature=random.choice([0.0, 0.5, 1.0, 1.7]),
        top_p=maybe(1.0, 0.0, 1.0),
        top_k=random.choice([0, random.randint(1, 2 * vocab_size)]),
        min_p=maybe(0.0, 0.0, 1.0),
        presence_penalty=maybe(0.0, -2.0, 2.0),
        frequency_penalty=maybe(0.0, -2.0, 2.0),
        repetition_penalty=maybe(1.0, 0.1, 2.0),
        penalty_last_n=random.choice([-1, 0, 1, 5, 20]),
        penalizes_prompt=random.random() < 0.5,
        typical_p=maybe(1.0, 0.0, 1.0),
        top_n_sigma=maybe(-1.0, 0.0, 3.0),
        min_keep=random.choice([0, 0, 1, 2, 5]),
        dynatemp_range=maybe(0.0, 0.0, 1.0),
        dynatemp_exponent=random.uniform(0.1, 3.0),
        xtc_probability=maybe(0.0, 0.0, 1.0),
        xtc_threshold=random.uniform(0.0, 0.6),
        xtc_spared=tuple(random.sample(range(vocab_size), random.choice([0, 2]))),
        dry_multiplier=maybe(0.0, 0.0, 2.0),
        dry_base=random.uniform(0.9, 2.0),
        dry_allowed_length=random.randint(0, 3),
        dry_last_n=random.choice([-1, 0, 4, 12]),
        dry_breakers=random_breakers(random, vocab_size),
        seed=random.randrange(-(2**63), 2**63),
        prompt_tokens=random.randint(0, 12),
    )


def random_breakers(random: Random, vocab_size: int) -> tuple[Breaker, ...]:
    """A few breakers, half of them of one token."""
    tokens = range(vocab_size)
    return tuple(
        (
            tuple(random.sample(tokens, random.randint(1, 2))),
            tuple(random.choices(tokens, k=random.choice([0, 0, 1, 2]))),
        )
        for _ in range(random.randint(0, 3))
    )


def random_tokens(random: Random, parameters: SequenceChain, vocab_size: int) -> list[int]:
    """A prompt and its completion; a few tokens repeat often."""
    length = random.randint(parameters.prompt_tokens, 40)
    few = min(vocab_size, 4)
    return [random.randrange(few if random.random() < 0.8 else vocab_size) for _ in range(length)]


def random_logits(random: Random, rows: int, vocab_size: int) -> Logits:
    """Logits of which some are minus infinity, in some batches with many equal ones."""
    normal = np.random.default_rng(random.getrandbits(64))
    logits: Logits = normal.normal(0.0, 3.0, (rows, vocab_size))
    if random.random() < 0.3:
        logits = np.round(logits)
    logits[normal.random(logits.shape) < 0.1] = -np.inf
    logits[:, random.randrange(vocab_size)] = 1.5
    return logits
