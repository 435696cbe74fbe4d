"""Command line of the benchmarks: `python -m bench`, or `make bench ARGS=...`."""

import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import click

from bench import (
    admission,
    affinity,
    agents,
    batch,
    fairness,
    gpu,
    hosts,
    peers,
    samplers,
    telemetry,
)
from bench.admission import AdmissionMeasurement
from bench.affinity import AffinityMeasurement
from bench.agents import AgentsMeasurement
from bench.batch import BatchMeasurement
from bench.fairness import FairnessMeasurement, FairnessScenario
from bench.gpu import GpuMeasurement
from bench.hosts import HostsMeasurement
from bench.measure import MeasureError, Measurement, measure_in_turns
from bench.peer_systems import PEERS, REQUESTS_PER_MINUTE
from bench.peers import PeersMeasurement
from bench.random_model import SHAPES
from bench.report import Report
from bench.samplers import SamplerMeasurement
from bench.scenarios import QUICK, SCENARIOS, Scenario
from bench.sluice import running_sluice
from bench.starting import MODEL, StartError
from bench.systems import Deployment, Engine, System
from bench.vllm_server import running_vllm_server

RESULTS = Path(__file__).parent / "results" / "raw"
SCRIPTED_SEQUENCES = 256
FAIRNESS = "fairness"
SAMPLERS = "samplers"
NAMES = tuple(
    dict.fromkeys(
        [
            *(each.name for each in SCENARIOS),
            FAIRNESS,
            SAMPLERS,
            admission.NAME,
            telemetry.NAME,
            batch.NAME,
            affinity.NAME,
            agents.NAME,
            hosts.NAME,
            gpu.NAME,
            peers.NAME,
        ]
    )
)

EPILOG = """\
\b
Scenarios:
  throughput  64 streams of 128 tokens, against vLLM's own API server
  latency     1 stream of 64 tokens, against vLLM's own API server
  requests    64 connections: 16 tokens not streamed, 1 token streamed; against vLLM's
  tokens      256 streams of the scripted engine, one token every 20 ms each: what a token costs
  tenants     64 streams of 16 tenants through 2 gateways
  fairness    one tenant has 200 queued jobs, another one sends one request at a time
  samplers    steps of the engine alone, 64 sequences, of which 0, 1 or 64 have a sampler chain
  admission   a key with all limits, and one without: CPU, latency, Redis; beside LiteLLM's proxy
  telemetry   traces of everything, JSON logs and scraped metrics, beside none of it
  batch       a Poisson load at half of the capacity, 16 sequences: alone, beside a batch,
              and beside a batch without preemption; on vLLM, or scripted with --quick
  affinity    chats of several turns on two workers with small caches, beside two servers of
              vLLM; only if named, because `make bench ARGS=affinity` installs vllm-router
  agents      turns of coding agents, of 6,000 to 232,000 tokens: CPU, first token, cached share,
              beside vLLM's server, smg and LiteLLM's proxy; only if named, as it installs these
  hosts       bursts for three models in turn on two hosts, which swap engines; only if named,
              because a swap on a CPU takes half a minute; scripted with --quick
  gpu         offline vLLM, vLLM's server and Sluice with one model: 256 streams, and 1 stream;
              samplers, sleep, canary and resumption on a GPU, or a trial of these on a CPU; only
              if named
  peers       chats with limits, ledger and metrics, beside nginx, vllm-router, smg, TensorZero
              and LiteLLM's proxy; only if named, because `make bench ARGS=peers` installs these

\b
Examples:
  make bench ARGS="--quick"
  make bench ARGS="throughput latency --rounds 5"
  make bench ARGS="fairness --fairness-engine scripted"
  make bench ARGS="admission --before ../sluice-1.0 --litellm ~/litellm-venv"
  make bench ARGS="telemetry --rounds 12 --before ../sluice-1.0"
  make bench ARGS="peers --upstream-port 19000 --url http://127.0.0.1:8080 --key sk-1 --pid 123"

Both systems run at the same time, but only one receives load; they take turns (A B, B A, ...). Both
receive the same prompts in a round. Run it on an idle machine: the report shows the CPU time of
other programs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Command-line options."""

    rounds: int
    seed: str
    max_sequences: int
    context_window: int


@dataclass(slots=True)
class Results:
    """Measurements so far."""

    measurements: list[Measurement] = field(default_factory=list)
    fairness: list[FairnessMeasurement] = field(default_factory=list)
    samplers: list[SamplerMeasurement] = field(default_factory=list)
    admission: list[AdmissionMeasurement] = field(default_factory=list)
    peers: list[PeersMeasurement] = field(default_factory=list)
    batch: list[BatchMeasurement] = field(default_factory=list)
    affinity: list[AffinityMeasurement] = field(default_factory=list)
    hosts: list[HostsMeasurement] = field(default_factory=list)
    agents: list[AgentsMeasurement] = field(default_factory=list)
    gpu: list[GpuMeasurement] = field(default_factory=list)


@click.command("bench", epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[SCENARIO]...")
@click.option(
    "--quick",
    is_flag=True,
    help="Only see that it works, with the scripted engine where it will do; about 2 minutes.",
)
@click.option(
    "--rounds", type=click.IntRange(1, 20), default=3, show_default=True, help="Times of each load."
)
@click.option(
    "--fairness-engine",
    type=click.Choice([engine.value for engine in Engine]),
    default=Engine.VLLM.value,
    show_default=True,
    help="Engine of the scenario `fairness`.",
)
@click.option(
    "--max-sequences",
    type=click.IntRange(1, 1024),
    default=64,
    show_default=True,
    help="Sequences in the real engine's batch, at most, in both systems.",
)
@click.option(
    "--context-window",
    type=click.IntRange(256, 2048),
    default=1024,
    show_default=True,
    help="Context window of both systems, in tokens.",
)
@click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, path_type=Path, resolve_path=True),
    help="An earlier checkout, that takes turns in the scenarios `admission`, `agents` and "
    "`telemetry`.",
)
@click.option(
    "--litellm",
    type=click.Path(exists=True, file_okay=False, path_type=Path, resolve_path=True),
    help="A virtual environment with LiteLLM's proxy (`litellm[proxy,extra_proxy]`), for the "
    "scenario `admission`.",
)
@click.option(
    "--url",
    help="Base URL of your own gateway, without /v1, for the scenario `peers`. It must forward the "
    f"model `{MODEL}` to http://127.0.0.1:UPSTREAM_PORT/v1.",
)
@click.option("--key", default="", help="API key of your own gateway.")
@click.option(
    "--limited-key",
    default="",
    help=f"API key of your own gateway with a limit of {REQUESTS_PER_MINUTE} requests a minute.",
)
@click.option(
    "--pid",
    "pids",
    type=click.IntRange(min=1),
    multiple=True,
    help="Process id of your own gateway, repeatable; its descendants are included.",
)
@click.option(
    "--upstream-port",
    type=click.IntRange(1, 65535),
    help="Port of the simulated upstream of `peers`.  [default: a free one]",
)
@click.option(
    "--pause-factor",
    type=click.FloatRange(0, 10),
    default=1.0,
    show_default=True,
    help="Scenario `agents`: what the published pauses between turns are multiplied by.",
)
@click.option(
    "--part",
    "parts",
    type=click.Choice(list(dict.fromkeys([*agents.PARTS, *gpu.PARTS, *peers.PARTS]))),
    multiple=True,
    help=f"Part of the scenario `agents` ({', '.join(agents.PARTS)}), `gpu` "
    f"({', '.join(gpu.PARTS)}) or `peers` ({', '.join(peers.PARTS)}), repeatable.  [default: all]",
)
@click.option(
    "--peer",
    "peer_names",
    type=click.Choice(list(PEERS)),
    multiple=True,
    help=f"Gateway of the scenario `peers` ({', '.join(PEERS)}), repeatable.  [default: all]",
)
@click.option(
    "--model",
    default="",
    callback=lambda _context, _option, value: _checked_model(value),
    help="Model of the scenario `gpu`: a folder, `demo`, or random weights in the shape of an 8B "
    "model (`8b`) or with its vocabulary only (`small`).  [default: 8b on a GPU, demo on a CPU]",
)
@click.option(
    "--engine-arguments",
    default="{}",
    callback=lambda _context, _option, value: _checked_arguments(value),
    help="vLLM's arguments for all engines of the scenario `gpu`, as JSON.",
)
@click.option("--seed", default="sluice", show_default=True, help="Draws the prompts.")
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    help="Folder for the report (.md) and the measurements (.jsonl).  [default: bench/results/raw]",
)
def main(
    names: tuple[str, ...],
    *,
    quick: bool,
    rounds: int,
    fairness_engine: str,
    max_sequences: int,
    context_window: int,
    before: Path | None,
    litellm: Path | None,
    url: str | None,
    key: str,
    limited_key: str,
    pids: tuple[int, ...],
    upstream_port: int | None,
    pause_factor: float,
    parts: tuple[str, ...],
    peer_names: tuple[str, ...],
    model: str,
    engine_arguments: dict[str, Any],
    seed: str,
    results: Path,
) -> None:
    """Measure Sluice, side by side with vLLM's own API server.

    Without a name: every scenario but `affinity`, `agents`, `gpu`, `hosts` and `peers`.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    began, found = datetime.now(UTC), Results()
    options = Options(
        rounds=1 if quick else rounds,
        seed=seed,
        max_sequences=max_sequences,
        context_window=context_window,
    )
    engine = Engine.SCRIPTED if quick else Engine(fairness_engine)
    loads = [each for each in (QUICK if quick else SCENARIOS) if not names or each.name in names]
    queue = FairnessScenario(engine=engine)
    wants_fairness = not names or FAIRNESS in names
    chains = samplers.scenarios(quick=quick, rounds=options.rounds)
    admissions = admission.Options(
        rounds=options.rounds, quick=quick, seed=seed, before=before, litellm=litellm
    )
    beside = peers.Options(
        rounds=options.rounds,
        quick=quick,
        seed=seed,
        parts=_chosen(peers.PARTS, parts),
        peers=peer_names,
        upstream_port=upstream_port,
        foreign=_foreign(url, key, limited_key, pids),
    )
    try:
        run(loads, queue if wants_fairness else None, options, found)
        for each in chains if not names or SAMPLERS in names else []:
            click.echo(each.title)
            found.samplers.append(samplers.measure(each, progress=click.echo))
        if not names or admission.NAME in names:
            with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
                found.admission.append(AdmissionMeasurement())
                admission.measure(
                    admissions, Path(folder), found=found.admission[-1], progress=click.echo
                )
        for load in (
            telemetry.scenarios(quick=quick) if not names or telemetry.NAME in names else []
        ):
            with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
                found.measurements += telemetry.measure(
                    load,
                    _deployment(load, options),
                    Path(folder),
                    before=before,
                    rounds=options.rounds,
                    seed=seed,
                    progress=click.echo,
                )
        if not names or batch.NAME in names:
            beside_batch = batch.Options(
                engine=Engine.SCRIPTED if quick else Engine.VLLM,
                turns=1 if quick else batch.TURNS,
                rounds=options.rounds,
                seed=seed,
            )
            click.echo("interactive latency beside a batch")
            with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
                found.batch.append(BatchMeasurement(beside_batch.max_sequences))
                batch.measure(
                    beside_batch, Path(folder), found=found.batch[-1], progress=click.echo
                )
        _measure_named(
            names,
            found,
            agents.Options(
                quick=quick,
                rounds=options.rounds,
                seed=seed,
                before=before,
                pause_factor=pause_factor,
                parts=_chosen(agents.PARTS, parts),
            ),
        )
        if gpu.NAME in names:
            measured = gpu.Options(
                quick=quick,
                rounds=options.rounds,
                seed=seed,
                model=model,
                engine_arguments=engine_arguments,
                parts=_chosen(gpu.PARTS, parts),
            )
            with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
                found.gpu.append(GpuMeasurement())
                gpu.measure(
                    measured,
                    Path(folder),
                    found=found.gpu[-1],
                    loads=found.measurements,
                    chains=found.samplers,
                    progress=click.echo,
                )
        if peers.NAME in names:
            with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
                found.peers.append(PeersMeasurement(quick))
                peers.measure(beside, Path(folder), found=found.peers[-1], progress=click.echo)
    except (StartError, MeasureError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo("Interrupted; the report has the scenarios that were finished.", err=True)
    _publish(
        Report(
            measurements=found.measurements,
            fairness=found.fairness,
            samplers=found.samplers,
            admission=found.admission,
            peers=found.peers,
            batch=found.batch,
            affinity=found.affinity,
            hosts=found.hosts,
            agents=found.agents,
            gpu=found.gpu,
            began=began,
            command=_command_line(),
        ),
        results,
    )


def _measure_named(names: Sequence[str], found: Results, options: agents.Options) -> None:
    """Measure the scenarios that run only if named, except `peers`."""
    if affinity.NAME in names:
        click.echo("chats of several turns")
        chats = affinity.Options(quick=options.quick, rounds=options.rounds, seed=options.seed)
        with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
            found.affinity.append(AffinityMeasurement())
            affinity.measure(chats, Path(folder), found=found.affinity[-1], progress=click.echo)
    if agents.NAME in names:
        with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
            found.agents.append(AgentsMeasurement())
            agents.measure(options, Path(folder), found=found.agents[-1], progress=click.echo)
    if hosts.NAME in names:
        click.echo("three models on two hosts")
        bursts = hosts.Options(
            engine=Engine.SCRIPTED if options.quick else Engine.VLLM,
            bursts=6 if options.quick else 4,
            seconds=4.0 if options.quick else 20.0,
            seed=options.seed,
        )
        with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
            found.hosts.append(HostsMeasurement())
            hosts.measure(bursts, Path(folder), found=found.hosts[-1], progress=click.echo)


def run(
    loads: Sequence[Scenario], queue: FairnessScenario | None, options: Options, found: Results
) -> None:
    """Measure everything, one deployment after the other; results are added to `found`."""
    deployments = dict.fromkeys(_deployment(each, options) for each in loads)
    if queue is not None:
        deployments |= {_deployment(queue, options): None}
    for deployment in deployments:
        own = [each for each in loads if _deployment(each, options) == deployment]
        with _systems(deployment, against_vllm=any(each.against_vllm for each in own)) as systems:
            for scenario in own:
                click.echo(scenario.title)
                found.measurements += measure_in_turns(
                    scenario,
                    systems if scenario.against_vllm else systems[:1],
                    rounds=options.rounds,
                    seed=options.seed,
                    progress=click.echo,
                )
            if queue is not None and _deployment(queue, options) == deployment:
                click.echo(queue.title)
                found.fairness.append(
                    fairness.measure(
                        queue,
                        systems[0],
                        max_sequences=deployment.max_sequences,
                        seed=options.seed,
                        progress=click.echo,
                    )
                )


def _foreign(
    url: str | None, key: str, limited_key: str, pids: Sequence[int]
) -> peers.Foreign | None:
    """Return the caller's own gateway, if any. Raises click.UsageError."""
    if url is None:
        if key or limited_key or pids:
            raise click.UsageError("--key, --limited-key and --pid need --url.")
        return None
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.port is None or parts.query or parts.fragment:
        raise click.UsageError(f"--url must be http://HOST:PORT or a path there. Given: {url}")
    if not pids:
        raise click.UsageError("--url needs the --pid of the gateway's processes.")
    return peers.Foreign(url=url.rstrip("/"), key=key, limited_key=limited_key, pids=pids)


def _chosen(parts: Sequence[str], named: Sequence[str]) -> list[str]:
    """Return the named parts of a scenario; all of its parts if none of them is named."""
    return [each for each in parts if each in named] or [*parts]


def _checked_model(model: str) -> str:
    """Check the option `--model`. Raises click.BadParameter."""
    named = (*SHAPES, gpu.DEMO)
    if model and model not in named and not (Path(model) / "config.json").is_file():
        raise click.BadParameter(f"must be {', '.join(named)} or a model's folder. Given: {model}")
    return model


def _checked_arguments(text: str) -> dict[str, Any]:
    """Check the option `--engine-arguments`. Raises click.BadParameter."""
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise click.BadParameter(f"must be a JSON object. Given: {text}")
    return arguments


def _deployment(scenario: Scenario | FairnessScenario, options: Options) -> Deployment:
    """Return the deployment that a scenario needs."""
    scripted = scenario.engine is Engine.SCRIPTED
    many = scripted and isinstance(scenario, Scenario)
    return Deployment(
        engine=scenario.engine,
        max_sequences=SCRIPTED_SEQUENCES if many else options.max_sequences,
        context_window=options.context_window,
        step_seconds=scenario.step_seconds if scripted else 0.0,
    )


@contextmanager
def _systems(deployment: Deployment, *, against_vllm: bool) -> Iterator[list[System]]:
    """Start Sluice and, if requested, vLLM's server; stop both at the end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))
        click.echo(f"Starting Sluice with the {deployment.engine} engine ...")
        systems: list[System] = [stack.enter_context(running_sluice(deployment, folder))]
        if against_vllm:
            click.echo("Starting vLLM's own API server ...")
            systems.append(stack.enter_context(running_vllm_server(deployment, folder)))
        yield systems


def _publish(report: Report, folder: Path) -> None:
    """Print and write the results; exit with a failure if a request failed."""
    found = (
        report.loads,
        report.fairness,
        report.samplers,
        report.batch,
        report.affinity,
        report.hosts,
        report.agents,
        report.gpu,
    )
    if not any(found):
        sys.exit(1)
    click.echo("\n" + report.markdown())
    click.echo(f"Written to {report.write(folder)}")
    if report.failures:
        sys.exit(1)


def _command_line() -> str:
    return " ".join(["python -m bench", *sys.argv[1:]])


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main(prog_name="python -m bench")
