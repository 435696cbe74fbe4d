"""Fairness between tenants: how long a small tenant waits while another has many queued jobs.

The other tenant keeps the engine's batch full and further jobs waiting. The small tenant sends one
request at a time: first alone, then during that load. Then the same requests use a key of the
loaded tenant, whose queue is first in, first out. This shows the wait without fairness between
tenants.

`python -m bench.fairness` measures shares instead: the throughput of two tenants that each fill the
engine, beside that of one alone, with and without preemption between tenants in turns. Goals: 0.97
of one tenant alone, and in any ten seconds the share of each tenant within 5 % of its weight's.
"""

import asyncio
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

import click
import uvloop

from bench.client import Answer, Lane, Load, Request, complete
from bench.measure import TIMEOUT_SECONDS, Progress, Quantiles, quantiles
from bench.scenarios import prompts
from bench.sluice import Sluice, running_sluice
from bench.starting import MODEL
from bench.systems import Deployment, Engine, System
from bench.tables import table

_BIG, _SMALL = "big", "small"
_PROMPT_WORDS = 24
FEWEST_TOKENS: Final = 16
MOST_TOKENS: Final = 128
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessScenario:
    """A queue of one tenant, and another tenant with single requests."""

    engine: Engine
    step_seconds: float = 0.02
    """Scripted engine: time between two steps."""
    waiting_jobs: int = 200
    """Jobs that the big tenant always has in the queue, in addition to those in the batch."""
    fewest_tokens: int = FEWEST_TOKENS
    most_tokens: int = MOST_TOKENS
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


GOAL_THROUGHPUT: Final = 0.97
GOAL_SHARE: Final = 0.05
WINDOW_SECONDS: Final = 10
_WARM_UP_SECONDS: Final = 4.0
_PREEMPTED: Final = "sluice_worker_preempted_sequences_total"
LOADS: Final[Mapping[str, Mapping[str, float]]] = {
    "one tenant": {"one": 2.0},
    "two tenants": {"one": 1.5, "two": 1.5},
    "weights 1 and 3": {"one": 1.5, "three": 1.5},
    "one tenant, half": {"one": 0.5},
}
"""Connections of each tenant, as a share of the engine's sequences."""
WEIGHTS: Final = {"one": 1, "two": 1, "three": 3}


@dataclass(frozen=True, slots=True)
class Shares:
    """Tokens that tenants received in each second."""

    seconds: list[Counter[str]]
    preempted: float
    """Sequences in all of this time."""

    @property
    def tokens_per_second(self) -> float:
        """Of all tenants."""
        return sum(map(Counter.total, self.seconds)) / len(self.seconds)

    @property
    def worst_error(self) -> float:
        """Largest relative difference of a tenant's share in ten seconds from its weight's."""
        tenants = set[str]().union(*self.seconds)
        weights = sum(WEIGHTS[tenant] for tenant in tenants)
        errors = [0.0]
        for start in range(len(self.seconds) - WINDOW_SECONDS + 1):
            window = Counter[str]()
            for second in self.seconds[start : start + WINDOW_SECONDS]:
                window.update(second)
            errors += [
                abs(window[tenant] / window.total() * weights / WEIGHTS[tenant] - 1)
                for tenant in tenants
            ]
        return max(errors)


async def _shares(
    sluice: Sluice, connections: Mapping[str, int], *, seconds: int, seed: str
) -> Shares:
    """Return what tenants with so many connections receive."""
    [url], random, texts = sluice.urls(1), Random(seed), prompts(seed, _PROMPT_WORDS)

    def endless() -> Iterator[Request]:
        while True:
            tokens = random.randint(FEWEST_TOKENS, MOST_TOKENS)
            yield Request(
                model=MODEL,
                prompt=next(texts),
                completion_tokens=tokens,
                streamed=True,
                temperature=0.0,
            )

    lanes = [
        Lane(url, sluice.key(tenant), endless(), tenant)
        for tenant, number in connections.items()
        for _ in range(number)
    ]
    load = Load(lanes)
    try:
        await load.open()
        load.start()
        await asyncio.sleep(_WARM_UP_SECONDS)
        began, before = time.perf_counter(), await asyncio.to_thread(_preempted, sluice)
        await asyncio.sleep(seconds)
        preempted = await asyncio.to_thread(_preempted, sluice) - before
        if errors := [answer.error for answer in load.answers if answer.error]:
            raise click.ClickException(f"{len(errors)} requests failed: {errors[0]}")
        found = [Counter[str]() for _ in range(seconds)]
        for answer in (*load.answers, *load.open_answers):
            # A read has one token or several; those of an open response are not counted yet.
            tokens = answer.completion_tokens / len(answer.reads) if answer.ended else 1
            for read in answer.reads:
                if 0 <= (second := int(read - began)) < seconds and read >= began:
                    found[second][answer.tenant] += tokens  # type: ignore[assignment]
        return Shares(found, preempted)
    finally:
        load.close()


def _preempted(sluice: Sluice) -> float:
    with urllib.request.urlopen(f"{sluice.metrics_urls()[0]}/metrics", timeout=10) as page:  # noqa: S310 - ours
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_PREEMPTED))


@click.command("fairness")
@click.option("--engine", type=click.Choice([*Engine]), default=Engine.SCRIPTED, show_default=True)
@click.option("--seconds", type=click.IntRange(WINDOW_SECONDS), default=20, show_default=True)
@click.option("--rounds", type=click.IntRange(1, 20), default=3, show_default=True)
@click.option("--max-sequences", type=click.IntRange(2, 1024), default=64, show_default=True)
@click.option("--step-seconds", default=0.02, show_default=True, help="Of the scripted engine.")
@click.argument("names", nargs=-1, type=click.Choice([*LOADS]))
def main(
    *,
    engine: str,
    seconds: int,
    rounds: int,
    max_sequences: int,
    step_seconds: float,
    names: tuple[str, ...],
) -> None:
    """Measure the shares of tenants with and without preemption between them, in turns."""
    deployment = Deployment(
        engine=Engine(engine),
        max_sequences=max_sequences,
        context_window=1024,
        step_seconds=step_seconds,
    )
    found = defaultdict[tuple[str, str], list[Shares]](list)
    with ExitStack() as stack:
        systems = []
        for preempts, share in (("with", "1"), ("without", "0")):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-"))
            settings = {"SLUICE_PREEMPTED_SHARE": share}
            sluice = stack.enter_context(
                running_sluice(deployment, Path(folder), name=preempts, settings=settings)
            )
            for tenant, weight in WEIGHTS.items():
                sluice.key(tenant, weight=weight)
            systems.append(sluice)
        for number in range(rounds):
            for load in names or LOADS:
                connections = {
                    tenant: int(share * max_sequences) for tenant, share in LOADS[load].items()
                }
                for sluice in systems if number % 2 else systems[::-1]:
                    shares = uvloop.run(
                        _shares(sluice, connections, seconds=seconds, seed=f"{number} {load}")
                    )
                    found[load, sluice.name].append(shares)
                    click.echo(
                        f"{load}, {sluice.name}: {shares.tokens_per_second:.0f} tokens/s", err=True
                    )
    head = ("load", "preemption", "tokens/s", "of one tenant", "worst share", "preempted/s")
    rows, missed = [], []
    for (load, preempts), some in found.items():
        alone = found["one tenant", preempts]
        ratio = (
            median(
                each.tokens_per_second / one.tokens_per_second
                for each, one in zip(some, alone, strict=False)
            )
            if alone
            else 0.0
        )
        error = max(each.worst_error for each in some)
        cells = (
            f"{median(each.tokens_per_second for each in some):.0f}",
            f"{ratio:.3f}",
            f"{100 * error:.1f} %",
            f"{median(each.preempted for each in some) / seconds:.1f}",
        )
        rows.append([load, preempts, *cells])
        is_full = not load.endswith("half")
        if is_full and preempts == "with" and (ratio < GOAL_THROUGHPUT or error > GOAL_SHARE):
            missed.append(load)
    click.echo("\n".join(table(head, rows)))
    if missed:
        raise click.ClickException(f"goals missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
