"""Performance goals of the project, and whether a run met them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from bench import affinity, gpu, peers, telemetry
from bench.agents import BEFORE, CACHE_MIB, LONG, ON_VLLM, SHORT, AgentsMeasurement, spread
from bench.measure import Measurement
from bench.offline import OfflineVllm
from bench.peer_systems import DIRECT, GATEWAY, SLUICE, SMG, TENSORZERO
from bench.sluice import Sluice
from bench.vllm_server import VllmServer

Pair = tuple[Measurement, Measurement]
"""Two systems in one round; the same one twice for a goal without a comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A limit on a figure, for each variant of a scenario."""

    scenario: str
    variant: str = ""
    """Part of the names of the variants that have the goal; all by default."""
    text: str
    figure: Callable[[Pair], float]
    system: str = Sluice.name
    beside: str | None = VllmServer.name
    """The system to compare with; None for a figure without a comparison."""
    least: float = float("-inf")
    most: float = float("inf")

    def judge(self, measurements: Sequence[Measurement]) -> Iterator[list[str]]:
        """Yield a row for each measured variant: goal, median over the rounds, whether met."""
        start = f"{self.scenario}:"
        own = [each for each in measurements if each.scenario.startswith(start)]
        own = [each for each in own if self.variant in each.scenario]
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


def _request_ratio(*groups: str) -> Callable[[Pair], float]:
    """Return the ratio of two systems' CPU for a request, in some parts."""

    def ratio(pair: Pair) -> float:
        ours, theirs = (sum(map(each.cpu_us_per_request, groups)) for each in pair)
        return ours / theirs

    return ratio


_CHATS: Final = "tokens, not streamed"

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
    Goal(
        scenario=gpu.THROUGHPUT,
        text="tokens/s of Sluice over those of offline vLLM, at least 0.99",
        figure=_throughput_ratio,
        beside=OfflineVllm.name,
        least=0.99,
    ),
    Goal(
        scenario=gpu.LATENCY,
        text="first token later than with vLLM's server, at most 5 ms",
        figure=_ttft_difference,
        most=5.0,
    ),
    Goal(
        scenario=peers.NAME,
        variant=_CHATS,
        text="gateway CPU of a request over that of smg, at most 2.5",
        figure=_request_ratio(GATEWAY),
        system=SLUICE,
        beside=SMG,
        most=2.5,
    ),
    Goal(
        scenario=peers.NAME,
        variant=_CHATS,
        text="CPU of gateway and Redis for a request over those of TensorZero, at most 1.2",
        figure=_request_ratio(GATEWAY, "redis"),
        system=SLUICE,
        beside=TENSORZERO,
        most=1.2,
    ),
    Goal(
        scenario=peers.NAME,
        variant=_CHATS,
        text="CPU of the background jobs for a request, at most 60 us",
        figure=lambda pair: pair[0].cpu_us_per_request("jobs"),
        system=SLUICE,
        beside=None,
        most=60.0,
    ),
    Goal(
        scenario=peers.NAME,
        variant=_CHATS,
        text="CPU of Redis for a request, at most 150 us",
        figure=lambda pair: pair[0].cpu_us_per_request("redis"),
        system=SLUICE,
        beside=None,
        most=150.0,
    ),
    Goal(
        scenario=peers.NAME,
        variant="streams of 64 tokens",
        text="gateway CPU of a token over that of smg, without gathering, at most 0.85",
        figure=lambda pair: pair[0].cpu_us_per_token(GATEWAY) / pair[1].cpu_us_per_token(GATEWAY),
        system=SLUICE,
        beside=SMG,
        most=0.85,
    ),
    Goal(
        scenario=peers.NAME,
        variant=f" {SLUICE}, ",
        text="p99 over that of the upstream at half load, at most 8 ms",
        figure=lambda pair: pair[0].ttft.p99 - pair[1].ttft.p99,
        system=SLUICE,
        beside=DIRECT,
        most=8.0,
    ),
)


Values = list[float]
"""A figure round by round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentGoal:
    """A limit on a figure of the scenario `agents`."""

    text: str
    figure: Callable[[AgentsMeasurement], Values]
    most: float

    def judge(self, found: AgentsMeasurement) -> list[str]:
        """Return the row of the goal: median and range of the rounds, and whether it was met."""
        values = self.figure(found)
        if not values:
            return [self.text, "-", "not measured"]
        return [self.text, spread(values), "yes" if median(values) <= self.most else "**no**"]


def _turn(column: str, system: str = Sluice.name, size: int = LONG) -> Callable[..., Values]:
    return lambda found: found.values("turns", system, f"{size:,}", column)


def _over_server(found: AgentsMeasurement) -> Values:
    """Return the gateway's CPU over that of vLLM's API server, at the longest size of both."""
    for size in (f"{LONG:,}", "40,643"):
        ours = found.values("vllm", ON_VLLM, size, "gateway ms")
        theirs = found.values("vllm", VllmServer.name, size, "API server ms")
        if ours and theirs:
            return _ratios(ours, theirs)
    return []


def _ratios(ours: Values, theirs: Values) -> Values:
    return [a / b for a, b in zip(ours, theirs, strict=False) if b]


def _over_earlier(kind: str = "", size: str = f"{LONG:,}") -> Callable[..., Values]:
    """Return the CPU of the gateway, a worker and Redis over that of the earlier checkout."""

    def total(found: AgentsMeasurement, name: str) -> Values:
        columns = [f"{kind}{part} ms" for part in ("gateway", "worker front", "redis")]
        parts = [found.values("turns", name, size, column) for column in columns]
        return [sum(values) for values in zip(*parts, strict=True)]

    return lambda found: _ratios(total(found, Sluice.name), total(found, BEFORE))


def _later_p99(found: AgentsMeasurement) -> Values:
    alone, beside = (found.values("beside", row, "p99 ms") for row in ("alone", "beside"))
    return [b - a for a, b in zip(alone, beside, strict=True)]


def _turns_of(found: AgentsMeasurement, system: str) -> list[Values]:
    """Return cached shares and first tokens of a system."""
    own = [each for each in found.workers.turns if each.system == system]
    shares = [100 * each.cached_tokens / each.prompt_tokens for each in own]
    return [shares, [each.ttft.p50 for each in own]]


def _lost_share(found: AgentsMeasurement) -> Values:
    ours, double = _turns_of(found, affinity.WITH)[0], _turns_of(found, affinity.DOUBLE)[0]
    return [100 * (1 - a / b) for a, b in zip(ours, double, strict=False)]


def _over_round_robin(found: AgentsMeasurement) -> Values:
    ours, theirs = _turns_of(found, affinity.WITH), _turns_of(found, affinity.ROUND_ROBIN)
    return _ratios(ours[1], theirs[1])


AGENT_GOALS = (
    AgentGoal(
        text=f"gateway CPU of a turn of {LONG:,} tokens, at most 15 ms",
        figure=_turn("gateway ms"),
        most=15.0,
    ),
    AgentGoal(
        text="worker process without the scripted engine, at most 10 ms",
        figure=_turn("worker without it ms"),
        most=10.0,
    ),
    AgentGoal(text="Redis, at most 2 ms", figure=_turn("redis ms"), most=2.0),
    AgentGoal(
        text="added time to first token, at most 15 ms",
        figure=_turn("added first token ms"),
        most=15.0,
    ),
    AgentGoal(
        text="gateway CPU over that of vLLM's API server, at most 0.2",
        figure=_over_server,
        most=0.2,
    ),
    AgentGoal(
        text="CPU of a first turn over that of the earlier checkout, at most 1.05",
        figure=_over_earlier("first turn, "),
        most=1.05,
    ),
    AgentGoal(
        text="CPU of a short request over that of the earlier checkout, at most 1.05",
        figure=_over_earlier(size=SHORT),
        most=1.05,
    ),
    AgentGoal(
        text="first token p99 of short requests beside 16 sessions, at most 20 ms more",
        figure=_later_p99,
        most=20.0,
    ),
    AgentGoal(
        text="saved CPU that another tenant's flood takes, at most 5 %",
        figure=lambda found: found.values("flood", "flooded", "% of the saved CPU lost"),
        most=5.0,
    ),
    AgentGoal(
        text=f"memory of the gateway's cache after the flood, at most {CACHE_MIB} MiB",
        figure=lambda found: found.values("flood", "flooded", "cache MiB"),
        most=CACHE_MIB,
    ),
    AgentGoal(
        text="cached share below that of one worker with all the cache, at most 3 %",
        figure=_lost_share,
        most=3.0,
    ),
    AgentGoal(
        text="first token p50 on two workers over that of round robin, at most 0.33",
        figure=_over_round_robin,
        most=1 / 3,
    ),
)
