"""Cost of telemetry: Sluice with all telemetry, with none, and an earlier checkout, in turns.

With all telemetry, requests are traced from end to end and their spans exported, logs are JSON, and
metrics are scraped every few seconds. One run traces as many requests as the chart configures,
another traces every request. Counting itself cannot be disabled; its cost shows in the comparison
with a checkout from before it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

from bench.measure import Measurement, Progress, measure_in_turns
from bench.scenarios import Scenario
from bench.sluice import Sluice, running_sluice
from bench.starting import REPOSITORY, free_port, start
from bench.systems import Deployment, Engine

NAME: Final = "telemetry"
ALL: Final = "all telemetry"
EVERY: Final = "every request traced"
NONE: Final = "no telemetry"
BEFORE: Final = "the earlier checkout"

_CHARTS_RATIO: Final = "0.01"
_READY_SECONDS: Final = 20.0
# Short rounds, but many: on a shared machine, the speed changes over time.
_SCENARIOS: Final = (
    Scenario(
        name=NAME,
        variant="64 streams of 128 tokens, greedy",
        streams=64,
        requests=2,
        completion_tokens=128,
    ),
    Scenario(
        name=f"{NAME} without an engine",
        variant="64 streams of 32 tokens, as fast as the scripted engine steps",
        streams=64,
        requests=16,
        completion_tokens=32,
        engine=Engine.SCRIPTED,
    ),
)


def scenarios(*, quick: bool) -> Sequence[Scenario]:
    """Return the loads; for a quick run only that of the scripted engine."""
    return [each for each in _SCENARIOS if not quick or each.engine is Engine.SCRIPTED]


def measure(
    scenario: Scenario,
    deployment: Deployment,
    folder: Path,
    *,
    before: Path | None,
    rounds: int,
    seed: str,
    progress: Progress,
) -> list[Measurement]:
    """Measure one load. Raises StartError and MeasureError."""
    with ExitStack() as stack:
        systems = [
            stack.enter_context(_observed(ALL, deployment, folder / "all", ratio=_CHARTS_RATIO)),
            stack.enter_context(_observed(EVERY, deployment, folder / "every", ratio="1")),
            stack.enter_context(_sluice(NONE, deployment, folder / "none")),
        ]
        if before is not None:
            earlier = _sluice(BEFORE, deployment, folder / "before", repository=before)
            systems.append(stack.enter_context(earlier))
        progress(scenario.title)
        return measure_in_turns(scenario, systems, rounds=rounds, seed=seed, progress=progress)


@contextmanager
def _observed(name: str, deployment: Deployment, folder: Path, *, ratio: str) -> Iterator[Sluice]:
    """Run Sluice with all telemetry and its consumer; `ratio` of the requests are traced."""
    port = free_port()
    settings = {
        "SLUICE_LOG_FORMAT": "json",
        "SLUICE_TRACES": "true",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": ratio,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
    }
    with _sluice(name, deployment, folder, settings=settings) as sluice:
        command = [sys.executable, "-m", "bench.observer", str(port), *sluice.metrics_urls()]
        observer = start("observer", command, folder=folder, environment={})
        try:
            observer.wait_until_ready(f"http://127.0.0.1:{port}/", seconds=_READY_SECONDS)
            yield sluice
            observer.check()
        finally:
            observer.stop()


@contextmanager
def _sluice(
    name: str,
    deployment: Deployment,
    folder: Path,
    *,
    repository: Path = REPOSITORY,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Sluice]:
    folder.mkdir()
    running = running_sluice(
        deployment, folder, name=name, repository=repository, settings=settings
    )
    with running as sluice:
        yield sluice
