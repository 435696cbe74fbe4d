"""Cost of admitting a request: authentication, reservation, settlement.

A key with every available limit (on itself, its project and its tenant) takes turns with a key that
has none, with a key that has ten spend limits on four holders, and with the gateway of an earlier
checkout, if given. LiteLLM's proxy, if given a virtual environment with it, does the same work in
front of a backend that responds at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bench import authentication
from bench.background import BackgroundCost, measure_background
from bench.credentials import Credential, limited, spending, unlimited
from bench.litellm_proxy import running_litellm
from bench.measure import MeasureError, Measurement, Progress, measure_in_turns
from bench.postgres import Postgres, running_postgres
from bench.round_trips import RoundTrips, count
from bench.scenarios import Scenario
from bench.sluice import Sluice, running_sluice
from bench.starting import REPOSITORY, StartError
from bench.systems import Deployment, Engine, System

NAME: Final = "admission"

_DEPLOYMENT = Deployment(engine=Engine.SCRIPTED, max_sequences=256, context_window=1024)
_BUSY = Scenario(
    name=NAME,
    variant="16 connections, 1 token, not streamed",
    streams=16,
    requests=300,
    completion_tokens=1,
    streamed=False,
    engine=Engine.SCRIPTED,
    against_vllm=False,
)
_PACED = replace(
    _BUSY,
    variant="50 streams of 8 tokens a second",
    streams=25,
    requests=24,
    completion_tokens=8,
    streamed=True,
    per_second=50.0,
)
_PROXY_BUSY = replace(_BUSY, variant="LiteLLM's proxy, 16 connections, 1 token", requests=20)
_PROXY_PACED = replace(
    _PACED,
    variant="beside LiteLLM's proxy, 10 streams of 8 tokens a second",
    streams=10,
    requests=15,
    per_second=10.0,
)
_COUNTED = replace(
    _PACED,
    variant="one request at a time",
    requests=40,
    per_second=4.0,
)
_QUICK_REQUESTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run."""

    rounds: int
    quick: bool
    seed: str
    before: Path | None = None
    """An earlier checkout of this repository."""
    litellm: Path | None = None
    """A virtual environment with LiteLLM's proxy."""

    def sized(self, scenario: Scenario) -> Scenario:
        """Return the scenario, shortened for a quick run."""
        return replace(scenario, requests=_QUICK_REQUESTS) if self.quick else scenario

    @property
    def idle_seconds(self) -> float:
        """How long the background jobs are observed."""
        return 2.0 if self.quick else 60.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two systems with the same load, whose difference is reported."""

    scenario: str
    more: str
    less: str


@dataclass(slots=True)
class AdmissionMeasurement:
    """All measurements of a run."""

    loads: list[Measurement] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    round_trips: list[RoundTrips] = field(default_factory=list)
    authentication_us: list[float] = field(default_factory=list)
    """CPU of one authentication in microseconds, round by round."""
    background: BackgroundCost | None = None
    skipped: list[str] = field(default_factory=list)
    """Sentences about what was left out."""


def measure(
    options: Options, folder: Path, *, found: AdmissionMeasurement, progress: Progress
) -> None:
    """Measure everything and add the results to `found`. Raises StartError or MeasureError."""
    run = _Run(options, found, progress)
    with running_postgres() as postgres, ExitStack() as stack:
        now = stack.enter_context(_sluice(folder / "now", REPOSITORY, postgres))
        own = [limited(now, "all limits"), unlimited(now, "no limits")]
        if options.before is not None:
            earlier = stack.enter_context(_sluice(folder / "before", options.before, postgres))
            own.append(unlimited(earlier, "earlier checkout"))
        run.measure_own(own, spending(now, "ten spend limits"))
        run.measure_proxy(own[:2], folder / "litellm", postgres)
        run.measure_background(own[0])


class _Run:
    """One run of everything."""

    def __init__(self, options: Options, found: AdmissionMeasurement, progress: Progress) -> None:
        self._found = found
        self._options = options
        self._progress = progress

    def measure_own(self, own: Sequence[Credential], spender: Credential) -> None:
        """Measure keys of this checkout, one with spend limits, and a key of the earlier one."""
        if self._options.before is None:
            self._found.skipped.append("No earlier checkout was given (`--before PATH`).")
        for load in (_BUSY, _PACED):
            pairs = [(own[0].name, other.name) for other in own[1:]]
            pairs.append((spender.name, own[1].name))
            self._take_turns(load, [*own, spender], pairs)
        for each in (*own, spender):
            self._count(each, each.sluice.redis_port)
        url, key = own[0].sluice.database_url, own[0].api_key
        self._found.authentication_us = authentication.measure(url, key)

    def measure_proxy(self, own: Sequence[Credential], folder: Path, postgres: Postgres) -> None:
        """Measure LiteLLM's proxy, next to our own keys where the times are compared."""
        if self._options.litellm is None:
            self._found.skipped.append(
                "LiteLLM's proxy was left out: no virtual environment with it was given "
                "(`--litellm PATH`)."
            )
            return
        folder.mkdir()
        self._progress("Starting LiteLLM's proxy ...")
        try:
            self._measure_proxy(self._options.litellm, own, folder, postgres)
        except (StartError, MeasureError) as error:
            self._found.skipped.append(f"LiteLLM's proxy could not be measured: {error}")
            self._progress(self._found.skipped[-1])

    def _measure_proxy(
        self, venv: Path, own: Sequence[Credential], folder: Path, postgres: Postgres
    ) -> None:
        with running_litellm(venv, folder, postgres) as proxy:
            pairs = [(proxy.limited.name, proxy.direct.name)]
            pairs.append((proxy.limited.name, proxy.unlimited.name))
            self._take_turns(_PROXY_BUSY, proxy.all, pairs)
            pairs.append((own[0].name, own[1].name))
            self._take_turns(_PROXY_PACED, [*proxy.all, *own], pairs)
            self._count(proxy.limited, proxy.redis_port)

    def measure_background(self, credential: Credential) -> None:
        """Measure the cost of `sluice jobs` and `sluice beat`."""
        self._progress("admission: background jobs")
        self._found.background = measure_background(
            credential,
            self._options.sized(_BUSY),
            idle_seconds=self._options.idle_seconds,
            seed=self._options.seed,
        )

    def _take_turns(
        self, load: Scenario, systems: Sequence[System], pairs: Sequence[tuple[str, str]]
    ) -> None:
        self._progress(load.title)
        self._found.loads += measure_in_turns(
            self._options.sized(load),
            systems,
            rounds=self._options.rounds,
            seed=self._options.seed,
            progress=self._progress,
        )
        self._found.comparisons += [Comparison(load.title, *pair) for pair in pairs]

    def _count(self, system: System, redis_port: int) -> None:
        self._progress(f"admission: commands of {system.name}")
        self._found.round_trips += count(
            self._options.sized(_COUNTED), system, redis_port=redis_port, seed=self._options.seed
        )


@contextmanager
def _sluice(folder: Path, repository: Path, postgres: Postgres) -> Iterator[Sluice]:
    """Run a checkout with its own database."""
    folder.mkdir()
    url = f"postgresql+asyncpg://{postgres.create_database(folder.name)}"
    with running_sluice(_DEPLOYMENT, folder, repository=repository, database_url=url) as sluice:
        yield sluice
