"""Cost of the sampler chain in an engine's step, in a full batch.

One process holds two engines, one with the chain's processor loaded and one without. They take
turns.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.measure import Progress
from bench.starting import CHECKPOINT, run_program

_DEMO: Mapping[str, Any] = {"model": str(CHECKPOINT), "enforce_eager": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerScenario:
    """How long to measure, and with how large a vocabulary."""

    rounds: int
    tokens: int
    """Steps of each measurement."""
    sequences: int = 64
    vocabulary: int = 0
    """Entries of a vocabulary with random weights; 0 uses the model as it is."""
    arguments: Mapping[str, Any] = field(default_factory=lambda: _DEMO)
    """vLLM's arguments."""
    model: str = "the demo model's 2,048 tokens"
    """The vocabulary of the model as it is."""

    @property
    def title(self) -> str:
        """Title in reports."""
        size = f"{self.vocabulary:,} tokens" if self.vocabulary else self.model
        return f"samplers: {self.sequences} sequences, vocabulary of {size}"

    def load(self) -> str:
        """Return the argument of `bench.sampler_steps`."""
        larger = {"load_format": "dummy", "hf_overrides": {"vocab_size": self.vocabulary}}
        arguments = {**self.arguments, **(larger if self.vocabulary else {})}
        numbers = {"rounds": self.rounds, "tokens": self.tokens, "sequences": self.sequences}
        return json.dumps({**numbers, "arguments": arguments})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Step durations while `users` sequences had a chain."""

    chain: str
    users: int
    milliseconds: list[float]
    """One figure for each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerMeasurement:
    """Steps with each chain; those without the processor come first."""

    scenario: str
    steps: list[StepTimes]

    def rows(self) -> list[list[str]]:
        """Return table cells: medians, and ratios for each round."""
        bare = self.steps[0].milliseconds
        return [
            [
                each.chain,
                str(each.users),
                f"{median(each.milliseconds):.2f}",
                *_ratio(each.milliseconds, bare),
            ]
            for each in self.steps
        ]


def scenarios(*, quick: bool, rounds: int) -> list[SamplerScenario]:
    """Return the scenarios to measure."""
    if quick:
        return [SamplerScenario(rounds=1, tokens=16)]
    return [
        SamplerScenario(rounds=rounds, tokens=128),
        SamplerScenario(rounds=rounds, tokens=32, vocabulary=131_072),
    ]


def measure(scenario: SamplerScenario, *, progress: Progress) -> SamplerMeasurement:
    """Run a scenario. Raises StartError with the end of its output if it fails."""
    times: dict[tuple[str, int], list[float]] = {}
    for found in run_program("bench.sampler_steps", scenario.load()):
        times.setdefault((found["chain"], found["users"]), []).append(found["milliseconds"])
    steps = [
        StepTimes(chain=chain, users=users, milliseconds=own)
        for (chain, users), own in times.items()
    ]
    measurement = SamplerMeasurement(scenario=scenario.title, steps=steps)
    for row in measurement.rows():
        progress("  " + ", ".join(row))
    return measurement


def _ratio(own: Sequence[float], bare: Sequence[float]) -> list[str]:
    ratios = [a / b for a, b in zip(own, bare, strict=True)]
    return [f"**{median(ratios):.2f}**", ", ".join(f"{ratio:.2f}" for ratio in ratios)]
