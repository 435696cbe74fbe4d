"""Performance goals of the project, and whether a run met them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench import telemetry
from bench.measure import Measurement
from bench.sluice import Sluice
from bench.vllm_server import VllmServer

Pair = tuple[Measurement, Measurement]
"""Two systems in one round; the same one twice for a goal without a comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A limit on a figure, for each variant of a scenario."""

    scenario: str
    text: str
    figure: Callable[[Pair], float]
    system: str = Sluice.name
    beside: str | None = VllmServer.name
    """The system to compare with; None for a figure without a comparison."""
    least: float = float("-inf")
    most: float = float("inf")

    def judge(self, measurements: Sequence[Measurement]) -> Iterator[list[str]]:
        """Yield a row for each measured variant: goal, median over the rounds, whether met."""
        own = [each for each in measurements if each.scenario.startswith(f"{self.scenario}:")]
        for title in dict.fromkeys(each.scenario for each in own):
            rounds = [each for each in own if each.scenario == title]
            pairs = self._pairs(rounds)
            if not pairs:
                continue
            middle = median(map(self.figure, pairs))
            met = "yes" if self.least <= middle <= self.most else "**no**"
            yield [f"{self.text} ({title})", f"{middle:.2f}", met]

    def _pairs(self, rounds: Iterable[Measurement]) -> list[Pair]:
        """Return the rounds in which both compared systems were measured."""
        by_turn = {(each.round, each.system): each for each in rounds}
        beside = self.beside or self.system
        return [
            (ours, by_turn[number, beside])
            for (number, system), ours in by_turn.items()
            if system == self.system and (number, beside) in by_turn
        ]


def _throughput_ratio(pair: Pair) -> float:
    ours, theirs = pair
    return ours.tokens_per_second / theirs.tokens_per_second


def _front_ratio(pair: Pair) -> float:
    ours, theirs = pair
    return ours.front_us_per_token / theirs.front_us_per_token


def _ttft_difference(pair: Pair) -> float:
    ours, theirs = pair
    return ours.ttft.p50 - theirs.ttft.p50


GOALS = (
    Goal(
        scenario="throughput",
        text="tokens/s of Sluice over those of vLLM's server, at least 1",
        figure=_throughput_ratio,
        least=1.0,
    ),
    Goal(
        scenario="throughput",
        text="CPU per token of gateway, worker front and Redis over that of vLLM's API server, "
        "at most 0.5",
        figure=_front_ratio,
        most=0.5,
    ),
    Goal(
        scenario="latency",
        text="first token later than with vLLM's server, at most 5 ms",
        figure=_ttft_difference,
        most=5.0,
    ),
    Goal(
        scenario="tokens",
        text="gateway CPU per token, at most 30 us",
        figure=lambda pair: pair[0].cpu_us_per_token("gateway"),
        beside=None,
        most=30.0,
    ),
    Goal(
        scenario=telemetry.NAME,
        text="tokens/s with all telemetry over those with none, at least 0.95",
        figure=_throughput_ratio,
        system=telemetry.ALL,
        beside=telemetry.NONE,
        least=0.95,
    ),
)
