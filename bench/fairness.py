"""Fairness between tenants: how long a small tenant waits while another has many queued jobs.

The other tenant keeps the engine's batch full and further jobs waiting. The small tenant sends one
request at a time: first alone, then during that load. Then the same requests use a key of the
loaded tenant, whose queue is first in, first out. This shows the wait without fairness between
tenants.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import uvloop

from bench.client import Answer, Lane, Load, Request, complete
from bench.measure import TIMEOUT_SECONDS, Progress, Quantiles, quantiles
from bench.scenarios import prompts
from bench.starting import MODEL
from bench.systems import Engine, System

_BIG, _SMALL = "big", "small"
_PROMPT_WORDS = 24
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessScenario:
    """A queue of one tenant, and another tenant with single requests."""

    engine: Engine
    step_seconds: float = 0.02
    """Scripted engine: time between two steps."""
    waiting_jobs: int = 200
    """Jobs that the big tenant always has in the queue, in addition to those in the batch."""
    fewest_tokens: int = 16
    most_tokens: int = 128
    """Completion tokens of the big tenant's jobs, spread evenly between these bounds, so that they
    do not all end in one step."""
    probes: int = 20
    """Requests of the small tenant, alone and during the load."""
    queue_probes: int = 5
    """Requests at the end of the big tenant's queue."""
    probe_tokens: int = 8

    @property
    def title(self) -> str:
        """Title in reports."""
        return f"fairness: {self.waiting_jobs} queued jobs of another tenant, {self.engine} engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessMeasurement:
    """Times to the first token."""

    scenario: str
    alone: Quantiles
    beside: Quantiles
    """Of the small tenant while the big tenant's jobs wait."""
    queued: Quantiles
    """At the end of the big tenant's own queue."""
    tokens_per_second: float
    """Of the big tenant, while the small tenant was measured."""
    expected_queue_milliseconds: float
    """Tokens of the waiting jobs divided by that rate: the wait in one shared queue."""
    failures: list[str]


def measure(
    scenario: FairnessScenario, system: System, *, max_sequences: int, seed: str, progress: Progress
) -> FairnessMeasurement:
    """Run the scenario once on a system whose batch has `max_sequences` places."""
    [url] = system.urls(1)
    run = _Run(
        scenario, url, keys={tenant: system.key(tenant) for tenant in (_BIG, _SMALL)}, seed=seed
    )
    return uvloop.run(
        run.measure(max_sequences + scenario.waiting_jobs, max_sequences, progress=progress)
    )


class _Run:
    """One run of the scenario."""

    def __init__(
        self, scenario: FairnessScenario, url: str, *, keys: dict[str, str], seed: str
    ) -> None:
        self._scenario = scenario
        self._url = url
        self._keys = keys
        self._prompts = prompts(f"{seed} {scenario.title}", _PROMPT_WORDS)
        self._random = Random(f"{seed} lengths")

    async def measure(
        self, connections: int, max_sequences: int, *, progress: Progress
    ) -> FairnessMeasurement:
        scenario = self._scenario
        await self._probe(_SMALL, 3)  # Warms both up; not counted.
        alone = await self._probe(_SMALL, scenario.probes)
        load = Load(
            [Lane(self._url, self._keys[_BIG], self._endless()) for _ in range(connections)]
        )
        try:
            await load.open()
            load.start()
            # After the first wave, the jobs in the batch end one by one.
            await _wait_until_begun(load, 3 * max_sequences)
            before, began = _tokens(load), time.perf_counter()
            beside = await self._probe(_SMALL, scenario.probes)
            rate = (_tokens(load) - before) / (time.perf_counter() - began)
            progress(f"  beside the load: {rate:.0f} tokens/s of the other tenant")
            queued = await self._probe(_BIG, scenario.queue_probes)
        finally:
            load.close()
        mean_tokens = (scenario.fewest_tokens + scenario.most_tokens) / 2
        everything = [*alone, *beside, *queued, *load.answers]
        return FairnessMeasurement(
            scenario=scenario.title,
            alone=_ttft(alone),
            beside=_ttft(beside),
            queued=_ttft(queued),
            tokens_per_second=rate,
            expected_queue_milliseconds=1e3 * scenario.waiting_jobs * mean_tokens / rate,
            failures=[answer.error for answer in everything if answer.error],
        )

    async def _probe(self, tenant: str, number: int) -> list[Answer]:
        """Send requests sequentially over one connection."""
        requests = [self._request(self._scenario.probe_tokens) for _ in range(number)]
        lane = Lane(self._url, self._keys[tenant], requests)
        return await complete([lane], timeout_seconds=TIMEOUT_SECONDS)

    def _endless(self) -> Iterator[Request]:
        scenario = self._scenario
        while True:
            yield self._request(self._random.randint(scenario.fewest_tokens, scenario.most_tokens))

    def _request(self, tokens: int) -> Request:
        return Request(
            model=MODEL,
            prompt=next(self._prompts),
            completion_tokens=tokens,
            streamed=True,
            temperature=0.0,
        )


async def _wait_until_begun(load: Load, requests: int) -> None:
    for _ in range(round(TIMEOUT_SECONDS / _POLL_SECONDS)):
        if load.begun >= requests:
            return
        await asyncio.sleep(_POLL_SECONDS)
    raise TimeoutError(f"{load.begun} of {requests} requests began within {TIMEOUT_SECONDS} s")


def _tokens(load: Load) -> int:
    return sum(answer.completion_tokens for answer in load.answers)


def _ttft(answers: list[Answer]) -> Quantiles:
    return quantiles(answer.ttft_seconds for answer in answers if not answer.error)
