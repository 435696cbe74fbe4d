"""What a governed chat costs: Sluice with limits, ledger and metrics, beside other gateways.

nginx, vllm-router, smg, TensorZero and LiteLLM's proxy forward to one simulated upstream. Sluice
has a worker with the scripted engine, which keeps the same pace. All of them run at the same time,
but only one receives load; they take turns. Every phase starts them anew, with another pace of the
upstream. TensorZero and LiteLLM's proxy apply limits too; smg accepts some, but applies none.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Final

import uvloop

from bench import client
from bench.client import Lane, Load, Pace
from bench.measure import MeasureError, Measurement, Progress, drive, measure_in_turns
from bench.peer_systems import (
    PEERS,
    REQUESTS_PER_MINUTE,
    Backend,
    foreign,
    governed_sluice,
    running_backend,
    versions,
)
from bench.postgres import Postgres, running_postgres
from bench.processes import Meter, resident_mib
from bench.scenarios import Scenario, make_request
from bench.starting import MODEL, StartError
from bench.systems import ENGINE_GROUP, Caller, Deployment, Engine, Route

NAME: Final = "peers"
PARTS: Final = ("requests", "speed", "half", "quotas", "tokens", "memory")

REQUESTS: Final = Scenario(
    name=NAME,
    variant="32 connections, 16 tokens, not streamed",
    streams=32,
    requests=8,
    seconds=6.0,
    completion_tokens=16,
    streamed=False,
    chat=True,
    engine=Engine.SCRIPTED,
    against_vllm=False,
)
FULL_SPEED: Final = replace(
    REQUESTS,
    variant="32 streams of 128 tokens, as fast as the upstream steps",
    streamed=True,
    completion_tokens=128,
)
SHORT: Final = replace(
    REQUESTS,
    variant="256 streams of 64 tokens, one every 20 ms",
    streams=256,
    streamed=True,
    completion_tokens=64,
)
LONG: Final = replace(
    SHORT, variant="256 streams of 250 tokens, one every 20 ms", completion_tokens=250
)
_STEP_SECONDS: Final = 0.02
_IDLE_STEP_SECONDS: Final = 1.0
_IDLE_TOKENS: Final = 600
"""Tokens of a stream whose memory is measured: more than are sent until then."""
_IDLE_STREAMS: Final = 3_000
_IDLE_STREAMS_PER_SECOND: Final = 400.0
"""Every connection must send its request within ten seconds, or Sluice closes it."""
_IDLE_SECONDS: Final = 60.0
"""Time in which the idle streams must begin; those that do not are not counted."""
_LOOK_SECONDS: Final = 0.1
_SETTLE_SECONDS: Final = 3.0
_MOST_PER_SECOND: Final = 1_000.0
"""The load client is late if it sends more requests at fixed times."""
_QUOTA_REQUESTS: Final = 4 * REQUESTS_PER_MINUTE
_QUOTA_SECONDS: Final = 60.0
_LAST_SECOND: Final = 35
"""The quota is not measured after this second of a minute, when a fixed window may end."""
_CONTEXT_WINDOW: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A gateway that the caller has started in front of the simulated upstream."""

    url: str
    key: str
    limited_key: str
    """A key with a limit of 60 requests a minute; empty for none."""
    pids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run."""

    rounds: int
    quick: bool
    seed: str
    parts: Sequence[str]
    """Of PARTS."""
    peers: Sequence[str] = ()
    """Of PEERS; empty for all."""
    upstream_port: int | None = None
    """None uses a free port."""
    foreign: Foreign | None = None

    def wants(self, *parts: str) -> bool:
        """Return whether one of these parts is measured."""
        return any(each in self.parts for each in parts)

    @property
    def idle_streams(self) -> int:
        """Number of streams whose memory is measured."""
        return 200 if self.quick else _IDLE_STREAMS


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMemory:
    """Growth of resident memory with many streams of one token a second."""

    system: str
    streams: int
    """Streams that had begun."""
    failures: list[str]
    """Of the other streams."""
    grown_mib: dict[str, float]
    """For each part of the system."""

    def kib_per_stream(self, part: str) -> float:
        """Growth of a part for each stream, in KiB."""
        return 1024 * self.grown_mib[part] / self.streams


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaCheck:
    """Requests of one caller with a limit per minute, sent at the same time."""

    system: str
    limit: int
    sent: int
    admitted: int
    refused: int
    """Responses with 429; the rest failed otherwise."""
    seconds: float
    """Time until the last response."""


@dataclass(slots=True)
class PeersMeasurement:
    """All measurements of a run."""

    quick: bool
    versions: list[str] = field(default_factory=versions)
    loads: list[Measurement] = field(default_factory=list)
    half_loads: dict[str, str] = field(default_factory=dict)
    """Title of the load at half of its saturation, for each system."""
    memory: list[StreamMemory] = field(default_factory=list)
    quotas: list[QuotaCheck] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Sentences about what was left out."""

    def sized(self, load: Scenario) -> Scenario:
        """Return a load of this module, smaller for a quick run."""
        if not self.quick:
            return load
        variant = load.variant.replace("256 streams", "64 streams")
        return replace(load, variant=variant, seconds=2.0, streams=min(load.streams, 64))

    def rounds(self, system: str, title: str) -> dict[int, Measurement]:
        """Return the measurements of a load on a system by round."""
        own = [each for each in self.loads if each.scenario == title]
        return {each.round: each for each in own if each.system == system}


def measure(options: Options, folder: Path, *, found: PeersMeasurement, progress: Progress) -> None:
    """Measure everything and add the results to `found`. Raises StartError or MeasureError."""
    with running_postgres() as postgres, running_backend(folder, options.upstream_port) as backend:
        progress(f"The simulated upstream is {backend.url}, its model {MODEL}")
        run = _Run(options, folder, backend, postgres, found, progress)
        if options.wants("requests", "speed", "half", "quotas"):
            with run.phase("full_speed", 0.0, REQUESTS.streams * 8) as systems:
                if options.wants("requests", "half"):
                    run.loads([REQUESTS], systems)
                if options.wants("speed"):
                    run.loads([FULL_SPEED], systems)
                if options.wants("half"):
                    run.half_loads(systems)
                if options.wants("quotas"):
                    run.quotas(systems)
        if options.wants("tokens"):
            with run.phase("steady", _STEP_SECONDS, SHORT.streams, gathers=(False, True)) as steady:
                run.loads([SHORT, LONG], steady)
        if options.wants("memory"):
            with run.phase("idle", _IDLE_STEP_SECONDS, options.idle_streams) as idle:
                run.memory(idle)


class _Run:
    """One run of everything."""

    def __init__(
        self,
        options: Options,
        folder: Path,
        backend: Backend,
        postgres: Postgres,
        found: PeersMeasurement,
        progress: Progress,
    ) -> None:
        self._options = options
        self._folder = folder
        self._backend = backend
        self._postgres = postgres
        self._found = found
        self._progress = progress

    @contextmanager
    def phase(
        self,
        name: str,
        step_seconds: float,
        sequences: int,
        *,
        gathers: Sequence[bool] = (False,),
    ) -> Iterator[list[Route]]:
        """Run all systems at a pace within a block: the backend itself, peers, Sluice, foreign.

        There is one Sluice for each value of `gathers`, which is that of its deployment.
        """
        self._progress(f"Starting all gateways, one step of the upstream in {step_seconds} s ...")
        self._backend.set_pace(step_seconds)
        deployment = Deployment(
            engine=Engine.SCRIPTED,
            max_sequences=sequences,
            context_window=_CONTEXT_WINDOW,
            step_seconds=step_seconds,
        )
        with ExitStack() as stack:
            systems = [self._backend.direct]
            for peer in self._options.peers or PEERS:
                folder = self._folder / name / peer
                folder.mkdir(parents=True)
                try:
                    systems.append(stack.enter_context(PEERS[peer](folder, self._backend)))
                except StartError as error:
                    self._skip(f"{peer} is left out: {error}")
            for each in gathers:
                folder = self._folder / name / f"sluice_{name}{'_gathers' if each else ''}"
                folder.mkdir(parents=True)
                variant = replace(deployment, gathers=each)
                sluice = governed_sluice(variant, folder, self._postgres)
                systems.append(stack.enter_context(sluice))
            if (own := self._options.foreign) is not None:
                systems.append(foreign(own.url, own.key, own.limited_key, own.pids, self._backend))
            yield systems

    def loads(self, loads: Sequence[Scenario], systems: Sequence[Route]) -> None:
        """Measure loads on all systems in turns."""
        for load in loads:
            self._take_turns(self._found.sized(load), systems)

    def half_loads(self, systems: Sequence[Route]) -> None:
        """Measure each gateway, in turns with the backend, at half of its highest rate."""
        direct, *gateways = systems
        for system in gateways:
            rounds = self._found.rounds(system.name, REQUESTS.title).values()
            if not rounds:
                continue
            rate = median(each.requests_per_second for each in rounds) / 2
            rate = min(rate, _MOST_PER_SECOND)
            load = self._found.sized(REQUESTS)
            load = replace(
                load,
                variant=f"{system.name}, {rate:.0f} requests a second",
                requests=max(2, round(rate * (load.seconds or 0.0) / load.streams)),
                seconds=None,
                per_second=rate,
            )
            self._found.half_loads[system.name] = load.title
            self._take_turns(load, [direct, system])

    def quotas(self, systems: Sequence[Route]) -> None:
        """Send more requests at once than each system's limited caller may send in a minute."""
        for system in systems:
            if system.limited is None:
                continue
            self._progress(f"{NAME}: quota of {system.name}")
            while datetime.now(UTC).second > _LAST_SECOND:
                time.sleep(1.0)
            try:
                self._found.quotas.append(_check_quota(system, system.limited))
            except (OSError, TimeoutError) as error:
                self._skip(f"The quota of {system.name} could not be measured: {error!r}")

    def memory(self, systems: Sequence[Route]) -> None:
        """Measure the memory of many streams, once for each gateway, right after its start."""
        for system in systems[1:]:
            self._progress(f"{NAME}: memory of {system.name}")
            try:
                grown = _measure_memory(system, self._options)
            except (OSError, MeasureError) as error:
                self._skip(f"The memory of {system.name} could not be measured: {error}")
                continue
            self._found.memory.append(grown)
            self._progress(f"  {grown.streams} streams, {len(grown.failures)} failures")
            if grown.failures:
                self._skip(f"Streams of {system.name} failed, such as: {grown.failures[0]}")

    def _take_turns(self, load: Scenario, systems: Sequence[Route]) -> None:
        self._progress(load.title)
        failed: dict[str, str] = {}
        self._found.loads += measure_in_turns(
            load,
            systems,
            rounds=self._options.rounds,
            seed=self._options.seed,
            progress=self._progress,
            failed=failed,
        )
        for name, error in failed.items():
            self._skip(f"{name} is left out of {load.variant}: {error}")

    def _skip(self, sentence: str) -> None:
        if sentence not in self._found.skipped:
            self._found.skipped.append(sentence)
            self._progress(f"  {sentence}")


def _check_quota(system: Route, caller: Caller) -> QuotaCheck:
    request = make_request("quota", 1, streamed=False)
    lane = Lane(system.url, caller.api_key, [request], fields=caller.fields)
    lanes = [lane] * _QUOTA_REQUESTS
    meter = Meter(system.groups(1))
    answers, used = uvloop.run(client.run(lanes, meter=meter, timeout_seconds=_QUOTA_SECONDS))
    return QuotaCheck(
        system=system.name,
        limit=REQUESTS_PER_MINUTE,
        sent=len(answers),
        admitted=sum(not each.error for each in answers),
        refused=sum(each.error.startswith("status 429") for each in answers),
        seconds=used.wall_seconds,
    )


def _measure_memory(system: Route, options: Options) -> StreamMemory:
    first = replace(REQUESTS, requests=1, seconds=None, completion_tokens=1, streamed=True)
    drive(first, system, seed=f"{options.seed} memory")
    before = _resident(system)
    streams = uvloop.run(_with_idle_streams(system, options.idle_streams))
    if not streams.begun:
        raise MeasureError(f"no stream began within {_IDLE_SECONDS:.0f} s")
    return StreamMemory(
        system=system.name,
        streams=streams.begun,
        failures=streams.failures,
        grown_mib={part: size - before[part] for part, size in streams.resident.items()},
    )


@dataclass(frozen=True, slots=True)
class _IdleStreams:
    begun: int
    failures: list[str]
    resident: dict[str, float]
    """Memory of each part with these streams, in MiB."""


async def _with_idle_streams(system: Route, number: int) -> _IdleStreams:
    request = make_request("memory", _IDLE_TOKENS, streamed=True)
    every = 1 / _IDLE_STREAMS_PER_SECOND
    load = Load(
        [
            Lane(
                system.url,
                system.api_key,
                [request],
                pace=Pace(each * every, _IDLE_SECONDS),
                fields=system.fields,
            )
            for each in range(number)
        ]
    )
    try:
        await load.open()
        load.start()
        for _ in range(int(_IDLE_SECONDS / _LOOK_SECONDS)):
            if load.begun == number:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        await asyncio.sleep(_SETTLE_SECONDS)
        failures = [each.error for each in load.answers if each.error]
        return _IdleStreams(load.begun, failures, _resident(system))
    finally:
        load.close()


def _resident(system: Route) -> dict[str, float]:
    """Return the memory of each part but the backend, in MiB."""
    groups = system.groups(1).items()
    return {part: sum(map(resident_mib, pids)) for part, pids in groups if part != ENGINE_GROUP}
