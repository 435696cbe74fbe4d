"""Cost of the sampler chain in an engine's step, in a full batch of 64.

One process holds two engines, one with the chain's processor loaded and one without. They take
turns.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.measure import Progress
from bench.sampler_steps import SEQUENCES
from bench.starting import REPOSITORY, StartError

_LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerScenario:
    """How long to measure, and with how large a vocabulary."""

    rounds: int
    tokens: int
    """Steps of each measurement."""
    vocabulary: int = 0
    """Entries of a vocabulary with random weights; 0 uses the demo model as it is."""

    @property
    def title(self) -> str:
        """Title in reports."""
        size = f"{self.vocabulary:,} tokens" if self.vocabulary else "the demo model's 2,048 tokens"
        return f"samplers: {SEQUENCES} sequences, vocabulary of {size}"


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
    numbers = [scenario.rounds, scenario.tokens, scenario.vocabulary]
    done = subprocess.run(
        [sys.executable, "-m", "bench.sampler_steps", *map(str, numbers)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-_LOG_TAIL_LINES:])
        raise StartError(f"The engines for the samplers ended:\n{tail}")
    times: dict[tuple[str, int], list[float]] = {}
    for line in filter(lambda line: line.startswith("{"), done.stdout.splitlines()):
        found = json.loads(line)
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
