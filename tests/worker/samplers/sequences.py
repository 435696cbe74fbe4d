"""Sequences with made-up logits, each of which computes its chain's result when processed alone."""

from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from contract.sampling import (
    DEFAULT_SAMPLERS,
    Dry,
    Mirostat,
    Sampler,
    SamplerChain,
    SamplingSpec,
    Xtc,
)
from worker.samplers.arguments import chain_arguments, chain_parameters
from worker.samplers.batch import ChainedSequence, Group, grouped
from worker.samplers.candidates import Placement

VOCABULARY = 64
PLACEMENT = Placement(device=torch.device("cpu"), vocab_size=VOCABULARY)
_CHAINS = (
    SamplingSpec(
        seed=0,
        temperature=0.7,
        top_k=20,
        min_p=0.02,
        chain=SamplerChain(order=list(DEFAULT_SAMPLERS)),
    ),
    SamplingSpec(
        seed=0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        chain=SamplerChain(order=list(DEFAULT_SAMPLERS), penalty_last_n=5, xtc=Xtc(0.5, 0.05)),
    ),
    SamplingSpec(
        seed=0,
        temperature=0.0,
        frequency_penalty=1.0,
        chain=SamplerChain(order=[Sampler.PENALTIES]),
    ),
    SamplingSpec(
        seed=0,
        chain=SamplerChain(
            order=[Sampler.DRY, Sampler.TEMPERATURE],
            dry=Dry(multiplier=2.0, base=1.5, allowed_length=1, last_n=-1, breakers=["x"]),
        ),
    ),
    SamplingSpec(
        seed=0, temperature=1.5, chain=SamplerChain(order=[], mirostat=Mirostat(2, 2.0, 0.3))
    ),
    SamplingSpec(
        seed=0, temperature=1.5, chain=SamplerChain(order=[], mirostat=Mirostat(1, 3.0, 0.2))
    ),
    SamplingSpec(seed=0),
)


class SteppedSequence:
    """A sequence of several steps. Every other one has a different kind of chain."""

    def __init__(self, number: int, random: Random) -> None:
        spec = _CHAINS[number % len(_CHAINS)]
        self.number = number
        self.prompt = [random.randrange(VOCABULARY) for _ in range(random.randint(1, 12))]
        self.output: list[int] = []
        self.length = random.randint(1, 20)
        extra_args = None
        if spec.chain is not None:
            extra_args = chain_arguments(
                spec,
                seed=number,
                prompt_tokens=len(self.prompt),
                breakers=[([1, 2], []), ([3], [4])],
                spared_token_ids=[],
            )
        self.params: Any = SimpleNamespace(extra_args=extra_args)
        parameters = chain_parameters(extra_args)
        self._alone: list[Group] = []
        if parameters is not None:
            self._alone = grouped({0: ChainedSequence(parameters)}, PLACEMENT)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]

    @property
    def has_ended(self) -> bool:
        return len(self.output) >= self.length

    def logits(self) -> Tensor:
        """The model's logits here; some tokens are masked."""
        noise = torch.Generator().manual_seed(1000 * self.number + len(self.output))
        logits = 3 * torch.randn(VOCABULARY, generator=noise)
        logits[(self.number + len(self.output)) % VOCABULARY] = -torch.inf
        return logits

    def expected(self) -> Tensor:
        """Compute the chain's result for this sequence alone. To be called once for each step."""
        logits, total = self.logits().unsqueeze(0), len(self.tokens)
        for group in self._alone:
            window = group.window(total)
            history = torch.full((1, window), -1)
            newest = self.tokens[max(0, total - window) :] if window else []
            history[0, window - len(newest) :] = torch.tensor(newest, dtype=torch.int64)
            total_tokens = torch.tensor([total])
            logits = group.apply(logits, history=history, total_tokens=total_tokens)
        return logits[0]

    def sample(self, logits: Tensor) -> None:
        """Add a token that the logits allow."""
        noise = torch.Generator().manual_seed(7 + 1000 * self.number + len(self.output))
        self.output.append(int(torch.multinomial(logits.softmax(0), 1, generator=noise)))
