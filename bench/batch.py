"""Interactive latency beside a batch: first tokens of a Poisson load, alone and beside batch jobs.

The load takes half of the capacity, the rate at which a full engine generates the tokens of such
requests. Beside it, `bench.batch_feeder` keeps batch jobs waiting. The two alternate in short
turns, so that a change in the machine's speed affects both, and quantiles are those of all turns
together. The capacity is measured before each turn of both. Once in a round, a worker that
preempts no batch job gets the same load.

The completions of the requests that measure the capacity, and of batch jobs, have different
lengths. With equal ones, those that begin together would end together, and the next ones would
share the steps of their prompts, which the arrivals of a Poisson load do not.

vLLM's processes have all cores but the last, on which everything else runs. So they do not take
turns on a core with the client, which would measure its own wait.

The idle capacity is the rest of the engine's time, at the rate at which batch jobs alone generate
tokens just before the load of each turn.
"""

import asyncio
import os
import re
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random
from statistics import fmean
from sys import executable
from typing import Final

import uvloop

from bench.client import Answer, Lane, Load, Pace, Request, complete
from bench.measure import TIMEOUT_SECONDS, MeasureError, Progress, Quantiles, quantiles
from bench.processes import pin
from bench.scenarios import prompts
from bench.sluice import Sluice, running_sluice
from bench.starting import MODEL, start
from bench.systems import ENGINE_GROUP, Deployment, Engine

NAME: Final = "batch"
ALONE: Final = "alone"
BESIDE: Final = "beside a batch"
UNPROTECTED: Final = "beside a batch, without preemption"
TURNS: Final = 5
"""Turns alone, and turns beside a batch, in a round."""
PATIENCE_SECONDS: Final = 60.0

_TENANT: Final = "interactive"
_PROMPT_WORDS: Final = 100
_TOKENS: Final = 64
_LINE_PROMPT_TOKENS: Final = 150
_LINE_TOKENS: Final = 128
_LINES: Final = 10_000
_LOAD: Final = 0.5
"""Share of the capacity that the interactive load takes."""
_FILL_SECONDS: Final = 2.0
"""Time after which the engine is full of jobs in all stages."""
_WARM_UP_SECONDS: Final = 1.0
"""Time at the start of a turn in which requests arrive that do not count."""
_SECONDS: Final = 5.0
"""Time after that in which they count."""
_CAPACITY_SECONDS: Final = 5.0
_BATCH_CAPACITY_SECONDS: Final = 2.0
_SAMPLES: Final = 1_000
"""Samples of the bootstrap, each of as many turns as there are."""
_OFF: Final = {"SLUICE_PREEMPTED_SHARE": "0"}


Arrival = tuple[float, Request]
"""A request, and the seconds after which it is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Size of the measurement."""

    engine: Engine
    max_sequences: int = 16
    context_window: int = 1024
    turns: int
    """Turns of each load in a round."""
    rounds: int
    seed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One load for some seconds."""

    kind: str
    number: int
    capacity: float
    """Tokens per second of an engine that is full of requests, just before."""
    ttft_seconds: list[float]
    tokens_per_second: float
    batch_capacity: float
    """Tokens per second of an engine that is full of batch jobs, just before; 0 without a batch."""
    batch_tokens_per_second: float
    preempted_sequences: int


@dataclass(slots=True)
class BatchMeasurement:
    """All turns."""

    max_sequences: int
    turns: list[Turn] = field(default_factory=list)

    def rows(self) -> list[list[str]]:
        """Return a row for each kind of turn, over all its turns."""
        rows = []
        alone = {each.number: each for each in self._of(ALONE)}
        for kind in (ALONE, BESIDE, UNPROTECTED):
            turns = self._of(kind)
            if not turns:
                continue
            latency = _pooled(turns)
            pairs = [(each, alone[each.number]) for each in turns]
            ranges = [""] * 2 if kind == ALONE else _ranges(pairs)
            batch = fmean(each.batch_tokens_per_second for each in turns)
            rows.append(
                [
                    kind,
                    f"{latency.p50:.1f}{ranges[0]}",
                    f"{latency.p99:.1f}{ranges[1]}",
                    str(latency.number),
                    f"{fmean(each.tokens_per_second for each in turns):.0f}",
                    f"{batch:.0f}",
                    "" if kind == ALONE else f"{100 * self._used(turns):.0f} %",
                    str(sum(each.preempted_sequences for each in turns)),
                ]
            )
        return rows

    @property
    def capacity(self) -> float:
        """Tokens per second of an engine that is full of requests."""
        return fmean(each.capacity for each in self.turns)

    @property
    def batch_capacity(self) -> float:
        """Tokens per second of an engine that is full of batch jobs."""
        return fmean(each.batch_capacity for each in self._of(BESIDE))

    def _used(self, turns: Sequence[Turn]) -> float:
        """Return the share of the idle capacity that the batch used."""
        idle = 1 - fmean(each.tokens_per_second / each.capacity for each in turns)
        batch = fmean(each.batch_tokens_per_second for each in turns)
        return batch / fmean(each.batch_capacity for each in turns) / idle

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
        if options.engine is Engine.VLLM:
            stack.enter_context(_own_cores([each.groups() for each in systems.values()]))
        systems[ALONE] = systems[BESIDE]
        # The first load of each kind is slower than all others.
        for each in (systems[BESIDE], systems[UNPROTECTED]):
            capacity = each.capacity(-1)
            each.turn(BESIDE, -1, capacity)
        for number in range(options.rounds * options.turns):
            kinds = [ALONE, BESIDE] if number % 2 else [BESIDE, ALONE]
            if number % options.turns == 0:
                kinds.append(UNPROTECTED)
            capacity = systems[BESIDE].capacity(number)
            progress(f"  capacity: {capacity:.0f} tokens/s of requests")
            for kind in kinds:
                turn = systems[kind].turn(kind, number, capacity)
                found.turns.append(turn)
                latency = _pooled([turn])
                progress(
                    f"  turn {number + 1}, {kind}: first token {latency.p50:.1f} / "
                    f"{latency.p99:.1f} ms, batch {turn.batch_tokens_per_second:.0f} of "
                    f"{turn.batch_capacity:.0f} tokens/s, {turn.preempted_sequences} preempted"
                )


@contextmanager
def _own_cores(systems: Sequence[dict[str, list[int]]]) -> Iterator[None]:
    """Give the engines all cores but the last within a block, and that one to everything else.

    vLLM reserves the last core for other processes, too.
    """
    cores = sorted(os.sched_getaffinity(0))
    for groups in systems:
        for name, pids in groups.items():
            for pid in pids:
                pin(pid, cores[:-1] if name == ENGINE_GROUP else cores[-1:])
    pin(os.getpid(), cores[-1:])
    try:
        yield
    finally:
        pin(os.getpid(), cores)


class _System:
    """One deployment, and the loads that it gets."""

    def __init__(self, sluice: Sluice, folder: Path, options: Options) -> None:
        self._sluice = sluice
        self._folder = folder
        self._options = options
        self._key = sluice.key(_TENANT)
        [self._url] = sluice.urls(1)
        self._metrics = f"{sluice.metrics_urls()[0]}/metrics"

    def groups(self) -> dict[str, list[int]]:
        """Return the process ids of each part."""
        return self._sluice.groups(1)

    def capacity(self, number: int) -> float:
        """Return the tokens per second of an engine that is full of requests."""
        return uvloop.run(self._capacity(number))

    async def _capacity(self, number: int) -> float:
        seed = f"{self._options.seed} {number} capacity"
        random, texts = Random(seed), prompts(seed, _PROMPT_WORDS)
        requests = (_request(text, random.randint(1, 2 * _TOKENS - 1)) for text in texts)
        load = Load([Lane(self._url, self._key, requests)] * (2 * self._options.max_sequences))
        try:
            await load.open()
            load.start()
            await asyncio.sleep(_FILL_SECONDS)
            capacity = await self._tokens_per_second(_CAPACITY_SECONDS)
        finally:
            load.close()
        _refuse_failures(load.answers)
        return capacity

    async def _tokens_per_second(self, seconds: float) -> float:
        before, began = self._counted("completion_tokens"), time.perf_counter()
        await asyncio.sleep(seconds)
        tokens = self._counted("completion_tokens") - before
        return tokens / (time.perf_counter() - began)

    def turn(self, kind: str, number: int, capacity: float) -> Turn:
        """Send the Poisson load of a turn, beside a batch unless `kind` is ALONE."""
        arrivals = self._poisson(kind, number, _LOAD * capacity / _TOKENS)
        if kind == ALONE:
            return uvloop.run(self._turn(kind, number, arrivals, capacity, 0.0))
        with self._batch():
            batch_capacity = uvloop.run(self._tokens_per_second(_BATCH_CAPACITY_SECONDS))
            return uvloop.run(self._turn(kind, number, arrivals, capacity, batch_capacity))

    async def _turn(
        self,
        kind: str,
        number: int,
        arrivals: Sequence[Arrival],
        capacity: float,
        batch_capacity: float,
    ) -> Turn:
        names = ("completion_tokens", "preempted_sequences")
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(self._send(started, each)) for each in arrivals]
            await asyncio.sleep(_WARM_UP_SECONDS)
            before, began = [self._counted(name) for name in names], time.perf_counter()
            await asyncio.sleep(_SECONDS)
            after, ended = [self._counted(name) for name in names], time.perf_counter()
        answers = [each.result() for each in sent]
        _refuse_failures(answers)
        tokens, preempted = (late - early for late, early in zip(after, before, strict=True))
        own = sum(_tokens_until(ended, each) - _tokens_until(began, each) for each in answers)
        return Turn(
            kind=kind,
            number=number,
            capacity=capacity,
            ttft_seconds=[
                answer.ttft_seconds
                for (seconds, _), answer in zip(arrivals, answers, strict=True)
                if seconds >= _WARM_UP_SECONDS
            ],
            tokens_per_second=own / (ended - began),
            batch_capacity=batch_capacity,
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

    def _poisson(self, kind: str, number: int, per_second: float) -> list[Arrival]:
        """Return arrivals at the same times for each kind, with prompts that no cache holds."""
        seed = f"{self._options.seed} {number}"
        random, texts, at = Random(seed), prompts(f"{seed} {kind}", _PROMPT_WORDS), 0.0
        arrivals = []
        while (at := at + random.expovariate(per_second)) < _WARM_UP_SECONDS + _SECONDS:
            arrivals.append((at, _request(next(texts))))
        return arrivals

    def _counted(self, name: str, *, suffix: str = "_total") -> float:
        with urllib.request.urlopen(self._metrics, timeout=10) as response:  # noqa: S310 - ours
            text = response.read().decode()
        if f"# TYPE sluice_worker_{name}{suffix} " not in text:
            raise MeasureError(f"the worker has no metric {name}")
        pattern = rf"^sluice_worker_{name}{suffix}(?:{{.*}})? (\S+)$"
        return sum(map(float, re.findall(pattern, text, re.MULTILINE)))


def _request(prompt: str, tokens: int = _TOKENS) -> Request:
    return Request(
        model=MODEL, prompt=prompt, completion_tokens=tokens, streamed=True, temperature=0.0
    )


def _refuse_failures(answers: Iterable[Answer]) -> None:
    if failures := [each.error for each in answers if each.error]:
        raise MeasureError(f"{len(failures)} requests failed: {failures[0]}")


def _tokens_until(at: float, answer: Answer) -> float:
    """Return how many tokens of a response had arrived at a time."""
    first = answer.sent + answer.ttft_seconds
    share = (at - first) / max(answer.ended - first, 1e-9)
    return answer.completion_tokens * min(max(share, 0.0), 1.0)


def _pooled(turns: Iterable[Turn]) -> Quantiles:
    return quantiles(chain.from_iterable(each.ttft_seconds for each in turns))


def _ranges(pairs: Sequence[tuple[Turn, Turn]]) -> list[str]:
    """Return the ratios of p50 and p99, each with the range of nine tenths of its bootstrap.

    Each pair is a turn and the one alone with the same arrivals. Whole pairs are drawn, because a
    burst of requests or a slow machine affects both.
    """
    random = Random(0)

    def ratios(some: Sequence[tuple[Turn, Turn]]) -> tuple[float, float]:
        ours, theirs = (_pooled(turns) for turns in zip(*some, strict=True))
        return ours.p50 / theirs.p50, ours.p99 / theirs.p99

    drawn = [ratios(random.choices(pairs, k=len(pairs))) for _ in range(_SAMPLES)]
    texts = []
    for ratio, values in zip(ratios(pairs), zip(*drawn, strict=True), strict=True):
        ordered = sorted(values)
        low, high = ordered[_SAMPLES // 20], ordered[-_SAMPLES // 20]
        texts.append(f" ({ratio:.2f}; {low:.2f} to {high:.2f})")
    return texts
