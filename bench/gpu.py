"""One model on one GPU: offline vLLM, vLLM's server and Sluice in turns, and what only Sluice does.

The three run at the same time and share the GPU's memory, but only one receives load. Then each of
the other parts starts engines of its own. Without an NVIDIA GPU everything runs on the CPU, to see
that it works.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench import samplers
from bench.client import Answer
from bench.gpu_usage import NONE, GpuUsage, gpu_name
from bench.measure import MeasureError, Measurement, Progress, drive, measure_in_turns
from bench.offline import OfflineVllm, running_offline_vllm
from bench.processes import Consumption
from bench.random_model import SHAPES, write_model
from bench.samplers import SamplerMeasurement, SamplerScenario
from bench.scenarios import Scenario
from bench.sluice import running_sluice
from bench.starting import CHECKPOINT, StartError, run_program
from bench.systems import Deployment, Engine, System
from bench.vllm_server import running_vllm_server
from worker.settings import WorkerSettings

NAME: Final = "gpu"
PARTS: Final = ("load", "samplers", "sleep", "canary", "resumption")
DEMO: Final = "demo"
THROUGHPUT: Final = f"{NAME} throughput"
LATENCY: Final = f"{NAME} latency"

_LARGE_VOCABULARY: Final = 128_000
_WINDOW: Final = 1024
_MEMORY_SHARE: Final = 0.31
"""Of the GPU's memory, for each of three engines."""
_STEP_TOKENS: Final = 8192
"""Their defaults differ."""
_CANARY_WAIT_SECONDS: Final = 300.0
_CANARY_INTERVAL: Final[float] = WorkerSettings.model_fields["canary_seconds"].default

Table = tuple[str, list[str], list[list[str]]]
"""Title, head and rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure."""

    quick: bool
    rounds: int
    seed: str
    model: str
    """A folder, one of the SHAPES, or DEMO; empty for the 8B shape on a GPU and DEMO on a CPU."""
    engine_arguments: Mapping[str, Any]
    """vLLM's arguments for all engines, in addition to those of the measurement."""
    parts: Sequence[str]
    """Of PARTS."""


@dataclass(slots=True)
class GpuMeasurement:
    """The parts other than loads and samplers."""

    device: str = NONE
    model: str = ""
    sleeps: list[dict[str, Any]] = field(default_factory=list)
    canary: dict[str, float] = field(default_factory=dict)
    resumptions: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """The parts that failed, and why."""

    def tables(self) -> Iterator[Table]:
        """Yield the table of each part."""
        if self.sleeps:
            yield "sleep and wake", _SLEEP_HEAD, [_sleep_row(self.sleeps)]
        if self.canary:
            yield "canary", _CANARY_HEAD, [_canary_row(self.canary)]
        if self.resumptions:
            yield "resumption", _RESUMPTION_HEAD, list(map(_resumption_row, self.resumptions))


_SLEEP_HEAD: Final = ["rounds", "sleep s", "wake s", "awake MiB", "asleep MiB", "same text"]
_CANARY_HEAD: Final = ["checks", "found differences", "ms a check", "% of an engine's time"]
_RESUMPTION_HEAD: Final = ["arithmetic", "sampling", "run", "equal sequences", "equal tokens %"]


def measure(
    options: Options,
    folder: Path,
    *,
    found: GpuMeasurement,
    loads: list[Measurement],
    chains: list[SamplerMeasurement],
    progress: Progress,
) -> None:
    """Measure part by part. What fails is noted, and the next part is measured."""
    deployment = _deployment(options, folder)
    found.device = gpu_name()
    found.model = options.model or deployment.checkpoint.name
    work: Mapping[str, Callable[[], None]] = {
        "load": lambda: _measure_load(options, deployment, folder, loads, progress),
        "samplers": lambda: chains.append(_measure_samplers(options, deployment, progress)),
        "sleep": lambda: found.sleeps.extend(_measure_sleep(options, deployment)),
        "canary": lambda: found.canary.update(_measure_canary(options, deployment, folder)),
        "resumption": lambda: found.resumptions.extend(_measure_resumption(options, deployment)),
    }
    for part in options.parts:
        progress(f"{NAME}: {part}, {found.model} on {found.device}")
        try:
            work[part]()
        except (StartError, MeasureError) as error:
            progress(f"  failed: {error}")
            found.failures.append(f"{part}: {str(error).partition(chr(10))[0]}")


def has_gpu_build() -> bool:
    """Whether vLLM's build for GPUs is installed."""
    try:
        return "cpu" not in version("vllm")
    except PackageNotFoundError:
        return False


def scenarios(*, quick: bool) -> list[Scenario]:
    """Return the loads: a full batch, and one stream alone."""
    streams, tokens, requests = (16, 16, 1) if quick else (256, 128, 4)
    alone, times = (16, 2) if quick else (64, 20)
    return [
        Scenario(
            name=THROUGHPUT,
            variant=f"{streams} streams of {tokens} tokens, greedy",
            streams=streams,
            requests=requests,
            completion_tokens=tokens,
        ),
        Scenario(
            name=LATENCY,
            variant=f"1 stream of {alone} tokens",
            streams=1,
            requests=times,
            completion_tokens=alone,
        ),
    ]


def _deployment(options: Options, folder: Path) -> Deployment:
    is_cpu = not has_gpu_build()
    model = options.model or (DEMO if is_cpu else "8b")
    arguments: dict[str, Any] = {"dtype": "float32"}
    if not is_cpu:
        arguments = {
            "dtype": "bfloat16",
            "gpu_memory_utilization": _MEMORY_SHARE,
            "max_num_batched_tokens": _STEP_TOKENS,
        }
    checkpoint = CHECKPOINT
    if model in SHAPES:
        checkpoint = write_model(model, folder / f"random-{model}")
        arguments["load_format"] = "dummy"
    elif model != DEMO:
        checkpoint = Path(model).resolve()
    return Deployment(
        engine=Engine.VLLM,
        max_sequences=16 if options.quick else 256,
        context_window=_WINDOW,
        checkpoint=checkpoint,
        engine_arguments=json.dumps({**arguments, **options.engine_arguments}),
        is_cpu=is_cpu,
    )


# --- the parts ---------------------------------------------------------------------------------


def _measure_load(
    options: Options,
    deployment: Deployment,
    folder: Path,
    loads: list[Measurement],
    progress: Progress,
) -> None:
    with ExitStack() as stack:
        offline = stack.enter_context(running_offline_vllm(deployment, folder))
        server = stack.enter_context(running_vllm_server(deployment, folder))
        sluice = stack.enter_context(running_sluice(deployment, folder))
        for scenario in scenarios(quick=options.quick):
            progress(scenario.title)
            # Offline, the requests of one stream would not wait for each other.
            systems: list[System] = [sluice, server]
            if scenario.name == THROUGHPUT:
                systems.append(offline)
            loads += measure_in_turns(
                scenario,
                systems,
                rounds=options.rounds,
                seed=options.seed,
                progress=progress,
                driver=_drive,
            )


def _drive(scenario: Scenario, system: System, *, seed: str) -> tuple[list[Answer], Consumption]:
    """Send a scenario's requests to a server, or its prompts to `LLM`; watch the GPU meanwhile."""
    with GpuUsage() as usage:
        if isinstance(system, OfflineVllm):
            answers, used = system.drive(scenario, seed=seed)
        else:
            answers, used = drive(scenario, system, seed=seed)
    return answers, replace(used, gpu_busy_percent=usage.busy_percent)


def _measure_samplers(
    options: Options, deployment: Deployment, progress: Progress
) -> SamplerMeasurement:
    size = json.loads((deployment.checkpoint / "config.json").read_text()).get("vocab_size", 0)
    scenario = SamplerScenario(
        rounds=options.rounds,
        tokens=4 if options.quick else 32,
        sequences=deployment.max_sequences,
        vocabulary=0 if size >= _LARGE_VOCABULARY else _LARGE_VOCABULARY,
        arguments=deployment.vllm_arguments(),
        model=f"{size:,} tokens",
    )
    return samplers.measure(scenario, progress=progress)


def _measure_sleep(options: Options, deployment: Deployment) -> list[dict[str, Any]]:
    settings = _settings(deployment, may_sleep=True)
    results = _check_engine(settings, rounds=options.rounds, sequences=1, tokens=16, after=[])
    return [each for each in results if each.pop("check") == "sleep"]


def _measure_canary(options: Options, deployment: Deployment, folder: Path) -> dict[str, float]:
    """Return the number of checks after the first one, those with differences, and their time."""
    number, interval = (3, 0.1) if options.quick else (20, 1.0)
    with running_sluice(
        deployment, folder, settings={"SLUICE_CANARY_SECONDS": str(interval)}
    ) as sluice:
        url, _ = sluice.metrics_urls()
        # The first one may compile kernels.
        first = _canaries(url, at_least=1)
        last = _canaries(url, at_least=round(first["checks"]) + number)
    return {name: value - first[name] for name, value in last.items()}


def _canaries(url: str, *, at_least: int) -> dict[str, float]:
    """Wait for a number of checks since the worker's start, and return what it counts."""
    deadline = time.monotonic() + _CANARY_WAIT_SECONDS
    while True:
        counts: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
            for sample in family.samples:
                counts[" ".join((sample.name, sample.labels.get("outcome", ""))).strip()] += (
                    sample.value
                )
        mismatches = counts["sluice_worker_canaries_total mismatch"]
        checks = counts["sluice_worker_canaries_total exact"] + mismatches
        if checks >= at_least:
            seconds = counts["sluice_worker_canary_seconds_total"]
            return {"checks": checks, "mismatches": mismatches, "seconds": seconds}
        if time.monotonic() > deadline:
            raise MeasureError(f"{checks:.0f} checks in {_CANARY_WAIT_SECONDS:.0f} s: {counts}")
        time.sleep(0.2)


def _measure_resumption(options: Options, deployment: Deployment) -> list[dict[str, Any]]:
    found = []
    for arithmetic in ("bfloat16", "reproducible"):
        settings = _settings(deployment, reproducible=arithmetic == "reproducible")
        arguments = settings["engine_arguments"]
        arguments["dtype"] = "bfloat16"
        if settings["reproducible"] and deployment.is_cpu:
            del arguments["dtype"]
        results = _check_engine(
            settings,
            rounds=0,
            sequences=min(64, deployment.max_sequences),
            tokens=16 if options.quick else 128,
            after=[7] if options.quick else [1, 31, 100],
        )
        found += [
            {"arithmetic": arithmetic, **each}
            for each in results
            if each.pop("check") == "resumption"
        ]
    return found


def _settings(deployment: Deployment, **settings: Any) -> dict[str, Any]:
    """Return the settings of a worker."""
    return {
        "model_path": str(deployment.checkpoint),
        "max_sequences": deployment.max_sequences,
        "context_window": deployment.context_window,
        "engine_arguments": deployment.given_arguments(),
        **settings,
    }


def _check_engine(settings: Mapping[str, Any], **checks: Any) -> list[dict[str, Any]]:
    return run_program("bench.engine_checks", json.dumps({"settings": settings, **checks}))


# --- their rows --------------------------------------------------------------------------------


def _sleep_row(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    def middle(name: str, decimals: int) -> str:
        values = [each[name] for each in rounds if each[name] is not None]
        return f"{median(values):,.{decimals}f}" if values else "-"

    return [
        str(len(rounds)),
        *(middle(name, 3) for name in ("sleep_seconds", "wake_seconds")),
        *(middle(name, 0) for name in ("awake_mib", "asleep_mib")),
        "yes" if all(each["is_equal"] for each in rounds) else "**no**",
    ]


def _canary_row(counts: Mapping[str, float]) -> list[str]:
    seconds = counts["seconds"] / counts["checks"]
    share = 100 * seconds / _CANARY_INTERVAL
    return [
        f"{counts['checks']:.0f}",
        f"{counts['mismatches']:.0f}",
        f"{1e3 * seconds:.0f}",
        f"{share:.4f}",
    ]


def _resumption_row(each: Mapping[str, Any]) -> list[str]:
    share = 100 * each["common_tokens"] / each["tokens"]
    equal = f"{each['equal']} of {each['of']}"
    return [each["arithmetic"], each["sampling"], each["what"], equal, f"{share:.2f}"]
