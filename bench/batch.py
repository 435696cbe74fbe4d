"""Interactive latency beside a batch: first tokens of a Poisson load, alone and beside batch jobs.

The load takes half of the capacity, the rate at which a full engine generates the tokens of these
requests. Beside it, `bench.batch_feeder` keeps batch jobs waiting. The same is measured with a
worker that preempts no batch job. The three take turns, with the same requests in a round.

The idle capacity is the rest of the engine's time, at the rate at which batch jobs alone generate
tokens.
"""

import asyncio
import re
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from sys import executable
from typing import Final

import uvloop

from bench.client import Answer, Lane, Load, Pace, Request, complete
from bench.measure import TIMEOUT_SECONDS, MeasureError, Progress, Quantiles, quantiles
from bench.scenarios import prompts
from bench.sluice import Sluice, running_sluice
from bench.starting import MODEL, start
from bench.systems import Deployment, Engine

NAME: Final = "batch"
ALONE: Final = "alone"
BESIDE: Final = "beside a batch"
UNPROTECTED: Final = "beside a batch, without preemption"
SECONDS: Final = 15.0
"""Time in which requests arrive, in each turn."""
PATIENCE_SECONDS: Final = 60.0

_TENANT: Final = "interactive"
_PROMPT_WORDS: Final = 100
_TOKENS: Final = 64
_LINE_PROMPT_TOKENS: Final = 150
_LINE_TOKENS: Final = 128
_LINES: Final = 10_000
_LOAD: Final = 0.5
"""Share of the capacity that the interactive load takes."""
_FILL_SECONDS: Final = 3.0
"""Time after which the engine is full of jobs in all stages."""
_CAPACITY_SECONDS: Final = 5.0
_OFF: Final = {"SLUICE_PREEMPTED_SHARE": "0"}


Arrival = tuple[float, Request]
"""A request, and the seconds after which it is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Size of the measurement."""

    engine: Engine
    max_sequences: int = 16
    context_window: int = 1024
    seconds: float
    """Time in which requests arrive, in each turn."""
    rounds: int
    seed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One load in one round."""

    kind: str
    round: int
    requests: int
    ttft: Quantiles
    tokens_per_second: float
    batch_tokens_per_second: float
    preempted_sequences: int


@dataclass(slots=True)
class BatchMeasurement:
    """All turns, and the capacity that they share."""

    max_sequences: int
    capacity: float = 0.0
    """Tokens per second of an engine that is full of requests."""
    batch_capacity: float = 0.0
    """Tokens per second of an engine that is full of batch jobs."""
    turns: list[Turn] = field(default_factory=list)

    def rows(self) -> list[list[str]]:
        """Return a row for each kind of turn: medians over the rounds."""
        rows = []
        alone = self._of(ALONE)
        for kind in (ALONE, BESIDE, UNPROTECTED):
            turns = self._of(kind)
            if not turns:
                continue
            p50, p99 = (median(_times(turns, name)) for name in ("p50", "p99"))
            base50, base99 = (median(_times(alone, name)) for name in ("p50", "p99"))
            used = median(map(self._used, turns))
            rows.append(
                [
                    kind,
                    f"{p50:.1f} ({p50 / base50:.2f})",
                    f"{p99:.1f} ({p99 / base99:.2f})",
                    str(sum(each.requests for each in turns)),
                    f"{median(each.tokens_per_second for each in turns):.0f}",
                    f"{median(each.batch_tokens_per_second for each in turns):.0f}",
                    f"{100 * used:.0f} %",
                    str(sum(each.preempted_sequences for each in turns)),
                ]
            )
        return rows

    def _used(self, turn: Turn) -> float:
        """Return the share of the idle capacity that the batch used."""
        idle = 1 - turn.tokens_per_second / self.capacity
        return turn.batch_tokens_per_second / self.batch_capacity / idle

    def _of(self, kind: str) -> list[Turn]:
        return [each for each in self.turns if each.kind == kind]


def measure(options: Options, folder: Path, *, found: BatchMeasurement, progress: Progress) -> None:
    """Run all rounds; the results are added to `found`. Raises MeasureError or StartError."""
    deployment = Deployment(
        engine=options.engine,
        max_sequences=options.max_sequences,
        context_window=options.context_window,
        step_seconds=0.02 if options.engine is Engine.SCRIPTED else 0.0,
    )
    with ExitStack() as stack:
        systems = {}
        for name, settings in ((BESIDE, {}), (UNPROTECTED, _OFF)):
            own = folder / name.replace(" ", "-")
            own.mkdir()
            sluice = stack.enter_context(running_sluice(deployment, own, settings=settings))
            systems[name] = _System(sluice, own, options)
        systems[ALONE] = systems[BESIDE]
        for each in (systems[BESIDE], systems[UNPROTECTED]):
            found.capacity = max(found.capacity, each.capacity())
            found.batch_capacity = max(found.batch_capacity, each.batch_capacity())
        progress(
            f"  capacity: {found.capacity:.0f} tokens/s of requests, "
            f"{found.batch_capacity:.0f} tokens/s of batch jobs"
        )
        for number in range(1, options.rounds + 1):
            kinds = (ALONE, BESIDE, UNPROTECTED)
            for kind in kinds if number % 2 else reversed(kinds):
                turn = systems[kind].turn(kind, number, found.capacity)
                found.turns.append(turn)
                progress(
                    f"  round {number}, {kind}: first token {turn.ttft.p50:.1f} / "
                    f"{turn.ttft.p99:.1f} ms, batch {turn.batch_tokens_per_second:.0f} tokens/s, "
                    f"{turn.preempted_sequences} preempted"
                )


class _System:
    """One deployment, and the loads that it gets."""

    def __init__(self, sluice: Sluice, folder: Path, options: Options) -> None:
        self._sluice = sluice
        self._folder = folder
        self._options = options
        self._key = sluice.key(_TENANT)
        [self._url] = sluice.urls(1)
        self._metrics = f"{sluice.metrics_urls()[0]}/metrics"

    def capacity(self) -> float:
        """Return the tokens per second of an engine that is full of requests."""
        return uvloop.run(self._capacity())

    async def _capacity(self) -> float:
        texts = prompts(f"{self._options.seed} capacity", _PROMPT_WORDS)
        endless = [map(_request, texts) for _ in range(2 * self._options.max_sequences)]
        load = Load([Lane(self._url, self._key, requests) for requests in endless])
        try:
            await load.open()
            load.start()
            await asyncio.sleep(_FILL_SECONDS)
            before, began = self._counted("completion_tokens"), time.perf_counter()
            await asyncio.sleep(_CAPACITY_SECONDS)
            tokens = self._counted("completion_tokens") - before
            return tokens / (time.perf_counter() - began)
        finally:
            load.close()

    def batch_capacity(self) -> float:
        """Return the tokens per second of an engine that is full of batch jobs."""
        with self._batch():
            before, began = self._counted("completion_tokens"), time.perf_counter()
            time.sleep(_CAPACITY_SECONDS)
            tokens = self._counted("completion_tokens") - before
            return tokens / (time.perf_counter() - began)

    def turn(self, kind: str, number: int, capacity: float) -> Turn:
        """Send the Poisson load of a round, beside a batch unless `kind` is ALONE."""
        arrivals = self._poisson(number, _LOAD * capacity / _TOKENS)
        with ExitStack() as stack:
            if kind != ALONE:
                stack.enter_context(self._batch())
            return uvloop.run(self._turn(kind, number, arrivals))

    async def _turn(self, kind: str, number: int, arrivals: Sequence[Arrival]) -> Turn:
        names = ("completion_tokens", "batch_preempted_sequences")
        before, began = [self._counted(name) for name in names], time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(self._send(began, each)) for each in arrivals]
            await asyncio.sleep(self._options.seconds)
            after, ended = [self._counted(name) for name in names], time.perf_counter()
        answers = [each.result() for each in sent]
        if failures := [each.error for each in answers if each.error]:
            raise MeasureError(f"{len(failures)} requests failed: {failures[0]}")
        tokens, preempted = (late - early for late, early in zip(after, before, strict=True))
        own = sum(_tokens_until(ended, each) for each in answers)
        return Turn(
            kind=kind,
            round=number,
            requests=len(answers),
            ttft=quantiles(each.ttft_seconds for each in answers),
            tokens_per_second=own / (ended - began),
            batch_tokens_per_second=max(tokens - own, 0.0) / (ended - began),
            preempted_sequences=round(preempted),
        )

    @contextmanager
    def _batch(self) -> Iterator[None]:
        """Keep the engine full of batch jobs within a block."""
        numbers = (3 * self._options.max_sequences, _LINE_PROMPT_TOKENS, _LINE_TOKENS, _LINES)
        url = f"redis://127.0.0.1:{self._sluice.redis_port}/0"
        command = [executable, "-m", "bench.batch_feeder", url, *map(str, numbers)]
        feeder = start("batch feeder", command, folder=self._folder, environment={})
        try:
            self._wait(runs=True)
            time.sleep(_FILL_SECONDS)
            yield
            feeder.check()
        finally:
            feeder.stop()
            self._wait(runs=False)

    def _wait(self, *, runs: bool) -> None:
        """Wait until the worker runs batch jobs, or none."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (self._counted("batch_jobs_running", suffix="") > 0) is not runs:
            if time.monotonic() > deadline:
                raise MeasureError("the worker did not start, or end, batch jobs")
            time.sleep(0.1)

    async def _send(self, began: float, arrival: Arrival) -> Answer:
        """Send a request over its own connection, so that it waits for no other."""
        seconds, request = arrival
        await asyncio.sleep(began + seconds - time.perf_counter())
        # A late client delays no measured time: the first token counts from the scheduled time.
        late = Pace(began + seconds - time.perf_counter(), 0.0)
        lane = Lane(self._url, self._key, [request], _TENANT, late)
        (answer,) = await complete([lane], timeout_seconds=TIMEOUT_SECONDS)
        return answer

    def _poisson(self, number: int, per_second: float) -> list[Arrival]:
        seed = f"{self._options.seed} {number}"
        random, texts, at = Random(seed), prompts(seed, _PROMPT_WORDS), 0.0
        arrivals = []
        while (at := at + random.expovariate(per_second)) < self._options.seconds:
            arrivals.append((at, _request(next(texts))))
        return arrivals

    def _counted(self, name: str, *, suffix: str = "_total") -> float:
        with urllib.request.urlopen(self._metrics, timeout=10) as response:  # noqa: S310 - ours
            text = response.read().decode()
        found = re.search(rf"^sluice_worker_{name}{suffix} (\S+)$", text, re.MULTILINE)
        if found is None:
            raise MeasureError(f"the worker has no metric {name}")
        return float(found[1])


def _request(prompt: str) -> Request:
    return Request(
        model=MODEL, prompt=prompt, completion_tokens=_TOKENS, streamed=True, temperature=0.0
    )


def _tokens_until(at: float, answer: Answer) -> float:
    """Return how many tokens of a response had arrived at a time."""
    first = answer.sent + answer.ttft_seconds
    share = (at - first) / max(answer.ended - first, 1e-9)
    return answer.completion_tokens * min(max(share, 0.0), 1.0)


def _times(turns: Sequence[Turn], name: str) -> list[float]:
    return [getattr(each.ttft, name) for each in turns]
