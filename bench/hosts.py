"""Three models on two hosts: bursts for one model after the other, which hosts swap for.

A host serves one model at a time, so a burst for a model without a worker waits for a swap. The
scenario measures that wait, and that no request is lost.
"""

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import uvloop
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from bench.client import Answer, Lane, Request, complete
from bench.measure import MeasureError, Progress, Quantiles, quantiles
from bench.scenarios import prompts
from bench.sluice import Sluice
from bench.starting import CHECKPOINT, Server, free_port
from bench.systems import Engine
from contract import keys
from contract.queue import COMPLETION_COST, PROMPT_COST

NAME: Final = "hosts"

_MODELS: Final = ("model-1", "model-2", "model-3")
_HOSTS: Final = 2
_TENANT: Final = "tenant"
_REQUESTS: Final = 16
_TOKENS: Final = 32
_PROMPT_WORDS: Final = 24
_KNOWN_SECONDS: Final = 240.0
_LONGEST_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Size of the measurement."""

    engine: Engine
    bursts: int
    seconds: float
    """Time between two bursts."""
    seed: str


@dataclass(slots=True)
class HostsMeasurement:
    """All bursts."""

    engine: str = ""
    requests: int = 0
    lost: int = 0
    swaps: int = 0
    start_seconds: float = 0.0
    """Mean time of a swap, from the decision until the worker claims jobs."""
    charged_units: float = 0.0
    """What the tenant's counters grew by besides its tokens."""
    waits: dict[str, Quantiles] = field(default_factory=dict)
    """Times to the first token, by model."""

    def rows(self) -> list[list[str]]:
        """Return a row for each model."""
        return [
            [name, f"{each.p50 / 1e3:.1f}", f"{each.p99 / 1e3:.1f}"]
            for name, each in self.waits.items()
        ]


def measure(options: Options, folder: Path, *, found: HostsMeasurement, progress: Progress) -> None:
    """Run the bursts; the results are written to `found`. Raises MeasureError or StartError."""
    models = folder / "models.json"
    models.write_text(json.dumps(list(_settings(options.engine))))
    sluice = Sluice(folder, settings={"SLUICE_QUEUE_TIMEOUT": "PT5M"})
    with ExitStack() as stack:
        stack.callback(sluice.close)
        sluice.command("db", "upgrade")
        [url], [_, metrics] = sluice.urls(1), sluice.metrics_urls()
        hosts = []
        for _ in range(_HOSTS):
            server, address = _host(sluice, models)
            stack.callback(server.stop)
            hosts.append(address)
        key = sluice.key(_TENANT)
        progress("  starting each model once ...")
        _await_models(url, key)
        before = _read(hosts, metrics, sluice.redis_port)
        answers = uvloop.run(_bursts(url, key, options))
        after = _read(hosts, metrics, sluice.redis_port)
    grown = {name: after[name] - before[name] for name in after}
    found.engine, found.requests = options.engine.value, len(answers)
    found.lost = sum(bool(each.error) for each in answers)
    found.swaps = round(grown["swaps"])
    found.start_seconds = grown["seconds"] / max(grown["starts"], 1)
    found.charged_units = grown["units"] - grown["tokens"]
    for name in _MODELS:
        found.waits[name] = _waits(name, answers)
    progress(f"  {found.requests} requests, {found.lost} lost, {found.swaps} swaps")


def _settings(engine: Engine) -> Iterator[dict[str, Any]]:
    for name in _MODELS:
        yield {
            "engine": engine.value,
            "model_path": str(CHECKPOINT),
            "model_name": name,
            "max_sequences": _REQUESTS,
            "context_window": 1024,
            "drain_seconds": 5,
        }


def _host(sluice: Sluice, models: Path) -> tuple[Server, str]:
    port = free_port()
    server = sluice.start_command(
        "host",
        f"--models={models}",
        f"--redis-url=redis://127.0.0.1:{sluice.redis_port}/0",
        f"--health-port={port}",
        "--least-seconds=5",
        "--longest-wait-seconds=10",
    )
    return server, f"http://127.0.0.1:{port}"


def _await_models(url: str, key: str) -> None:
    request = urllib.request.Request(  # noqa: S310 - ours
        f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}
    )
    deadline = time.monotonic() + _KNOWN_SECONDS
    while True:
        with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310 - ours
            listed = {each["id"] for each in json.load(response)["data"]}
        if listed >= {*_MODELS}:
            return
        if time.monotonic() > deadline:
            raise MeasureError(f"only {sorted(listed)} are known after {_KNOWN_SECONDS:.0f} s")
        time.sleep(0.5)


async def _bursts(url: str, key: str, options: Options) -> list[Answer]:
    """Send the bursts. Each has connections of its own: gateways close those that are idle."""
    texts = prompts(f"{options.seed} {NAME}", _PROMPT_WORDS)
    async with asyncio.TaskGroup() as group:
        tasks = []
        for burst in range(options.bursts):
            requests = [
                Request(
                    model=_MODELS[burst % len(_MODELS)],
                    prompt=text,
                    completion_tokens=_TOKENS,
                    streamed=True,
                    temperature=0.0,
                )
                for text in islice(texts, _REQUESTS)
            ]
            lanes = [Lane(url, key, [each], _TENANT) for each in requests]
            tasks.append(group.create_task(complete(lanes, timeout_seconds=_LONGEST_SECONDS)))
            await asyncio.sleep(options.seconds)
    return [answer for task in tasks for answer in task.result()]


def _waits(model: str, answers: Sequence[Answer]) -> Quantiles:
    own = [each for each in answers if each.request.model == model and not each.error]
    return quantiles(each.ttft_seconds for each in own)


def _read(hosts: Sequence[str], gateway: str, redis_port: int) -> dict[str, float]:
    """Return counters of the hosts, and the units and tokens of the tenant's service."""
    from_hosts = [
        sum(_counter(each, f"sluice_host_{name}") for each in hosts)
        for name in ("swaps_total", "start_seconds_sum", "start_seconds_count")
    ]
    prompt, cached, completion = (
        _counter(gateway, f"sluice_gateway_{kind}_tokens_total")
        for kind in ("prompt", "cached", "completion")
    )
    redis = Redis(port=redis_port)
    units = sum(float(redis.hget(keys.service_counters(model), _TENANT) or 0) for model in _MODELS)
    swaps, seconds, starts = from_hosts
    tokens = PROMPT_COST * (prompt - cached) + COMPLETION_COST * completion
    return {
        "swaps": swaps,
        "seconds": seconds,
        "starts": starts,
        "units": units,
        "tokens": tokens,
    }


def _counter(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:  # noqa: S310 - ours
        families = text_string_to_metric_families(response.read().decode())
    samples = [each for family in families for each in family.samples if each.name == name]
    return sum(each.value for each in samples)
