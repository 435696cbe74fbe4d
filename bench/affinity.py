"""Prefix affinity: chats of several turns on two engines whose caches cannot each hold all of them.

Users of a tenant share the start of their prompts. Each turn repeats the turns before it. Sluice
with affinity and without it takes turns with vLLM's own server, twice, behind `vllm-router` with
two policies, and with one worker of Sluice that has twice the cache. All get the same requests at
the same times in a round.
"""

import re
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Final

import uvloop

from bench.client import Lane, Pace, Request, complete
from bench.measure import TIMEOUT_SECONDS, MeasureError, Progress, Quantiles, quantiles
from bench.peer_systems import running_router
from bench.scenarios import prompts
from bench.sluice import running_sluice
from bench.starting import MODEL
from bench.systems import Deployment, Engine
from bench.vllm_server import running_vllm_server

NAME: Final = "affinity"
WITH: Final = "Sluice"
WITHOUT: Final = "Sluice, `SLUICE_AFFINITY_SECONDS=0`"
DOUBLE: Final = "Sluice, one worker with twice the cache"
ROUND_ROBIN: Final = "vLLM's server, vllm-router, round robin"
PREFIX_AWARE: Final = "vLLM's server, vllm-router, prefix-aware"

_TENANTS: Final = 6
_USERS: Final = 30
_TURNS: Final = 6
_SHARED_WORDS: Final = 130
_TURN_WORDS: Final = 65
_TOKENS: Final = 32
_BLOCK_TOKENS: Final = 32
_BLOCKS: Final = 376
"""KV cache of each of the two engines: all prompts of a round take about 1.6 times as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Size of the measurement."""

    quick: bool
    rounds: int
    seed: str
    seconds: float = 2.5
    """Time between two turns of a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One round on one system."""

    system: str
    round: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    ttft: Quantiles
    """Of all turns of all users but their first ones."""


@dataclass(slots=True)
class AffinityMeasurement:
    """All rounds."""

    turns: list[Turn] = field(default_factory=list)

    def rows(self) -> list[list[str]]:
        """Return a row for each system: medians over the rounds."""
        rows = []
        for name in dict.fromkeys(each.system for each in self.turns):
            turns = [each for each in self.turns if each.system == name]
            shares = [each.cached_tokens / each.prompt_tokens for each in turns]
            rows.append(
                [
                    name,
                    f"{100 * median(shares):.1f} %",
                    f"{median(each.ttft.p50 for each in turns):.1f}",
                    f"{median(each.ttft.p99 for each in turns):.1f}",
                    str(sum(each.requests for each in turns)),
                ]
            )
        return rows


@dataclass(frozen=True, slots=True)
class _System:
    url: str
    keys: Mapping[str, str]
    metrics: Sequence[str]
    """Of the engines."""

    def counted(self, name: str) -> int:
        """Return a counter of vLLM, summed over the engines."""
        return round(
            sum(_counter(each, f"vllm:prefix_cache_{name}_total") for each in self.metrics)
        )


def measure(
    options: Options, folder: Path, *, found: AffinityMeasurement, progress: Progress
) -> None:
    """Run all rounds; the results are added to `found`. Raises MeasureError or StartError."""
    with ExitStack() as stack:
        systems: dict[str, _System] = {}
        for name, starting in _systems(options, folder):
            progress(f"  starting {name} ...")
            systems |= stack.enter_context(starting)
        for number in range(1, options.rounds + 1):
            order = list(systems.items())
            for name, system in order if number % 2 else reversed(order):
                turn = uvloop.run(_turn(name, system, number, options))
                found.turns.append(turn)
                share = turn.cached_tokens / turn.prompt_tokens
                progress(
                    f"  round {number}, {name}: {100 * share:.1f} % cached, "
                    f"first token {turn.ttft.p50:.1f} / {turn.ttft.p99:.1f} ms"
                )
                time.sleep(2)


def _systems(
    options: Options, folder: Path
) -> Iterator[tuple[str, AbstractContextManager[dict[str, _System]]]]:
    deployment = Deployment(engine=Engine.VLLM, max_sequences=32, context_window=1024)
    yield WITH, _sluice(WITH, deployment, folder, workers=2)
    yield WITHOUT, _sluice(WITHOUT, deployment, folder, workers=2, affinity="0")
    if not options.quick:
        yield DOUBLE, _sluice(DOUBLE, deployment, folder, workers=1, blocks=2 * _BLOCKS)
        yield "vLLM's server", _vllm(deployment, folder)


@contextmanager
def _sluice(
    name: str,
    deployment: Deployment,
    folder: Path,
    *,
    workers: int,
    blocks: int = _BLOCKS,
    affinity: str = "1",
) -> Iterator[dict[str, _System]]:
    own = folder / re.sub(r"\W+", "-", name)
    own.mkdir()
    settings = {
        "SLUICE_AFFINITY_SECONDS": affinity,
        "SLUICE_ENGINE_ARGUMENTS": f'{{"block_size": {_BLOCK_TOKENS}, '
        f'"num_gpu_blocks_override": {blocks}}}',
    }
    with running_sluice(deployment, own, settings=settings) as sluice:
        others = [sluice.start_worker(deployment) for _ in range(workers - 1)]
        try:
            [url] = sluice.urls(1)
            metrics = [sluice.metrics_urls()[0], *(url for _, url in others)]
            tenants = {name: sluice.key(name) for name in _tenants()}
            yield {name: _System(url, tenants, [f"{each}/metrics" for each in metrics])}
        finally:
            for server, _ in others:
                server.stop()


@contextmanager
def _vllm(deployment: Deployment, folder: Path) -> Iterator[dict[str, _System]]:
    flags = [f"--block-size={_BLOCK_TOKENS}", f"--num-gpu-blocks-override={_BLOCKS}"]
    with ExitStack() as stack:
        urls = []
        for number in ("1", "2"):
            own = folder / f"vllm-{number}"
            own.mkdir()
            server = stack.enter_context(running_vllm_server(deployment, own, flags=flags))
            urls += server.urls(1)
        systems = {}
        for name, policy in ((ROUND_ROBIN, "round_robin"), (PREFIX_AWARE, "cache_aware")):
            own = folder / policy
            own.mkdir()
            url = stack.enter_context(running_router(own, urls, policy=policy))
            keys = dict.fromkeys(_tenants(), "")
            systems[name] = _System(url, keys, [f"{each}/metrics" for each in urls])
        yield systems


async def _turn(name: str, system: _System, number: int, options: Options) -> Turn:
    before = system.counted("queries"), system.counted("hits")
    lanes = list(_lanes(system, f"{options.seed} {number}", options.seconds))
    answers = await complete(lanes, timeout_seconds=TIMEOUT_SECONDS)
    if failures := [each.error for each in answers if each.error]:
        raise MeasureError(f"{len(failures)} requests failed: {failures[0]}")
    later = [each for each in answers if each.request.prompt.count("\nuser") > 1]
    return Turn(
        system=name,
        round=number,
        requests=len(answers),
        prompt_tokens=system.counted("queries") - before[0],
        cached_tokens=system.counted("hits") - before[1],
        ttft=quantiles(each.ttft_seconds for each in later),
    )


def _lanes(system: _System, seed: str, seconds: float) -> Iterator[Lane]:
    for user in range(_USERS):
        tenant = _tenants()[user % _TENANTS]
        [shared] = islice(prompts(f"{seed} {tenant}", _SHARED_WORDS), 1)
        says, text, requests = prompts(f"{seed} {user}", _TURN_WORDS), shared, []
        for _ in range(_TURNS):
            text += f"\nuser {user}: {next(says)}"
            requests.append(
                Request(
                    model=MODEL,
                    prompt=text,
                    completion_tokens=_TOKENS,
                    streamed=True,
                    temperature=0.0,
                )
            )
        pace = Pace(seconds * user / _USERS, seconds)
        yield Lane(system.url, system.keys[tenant], requests, tenant, pace)


def _tenants() -> list[str]:
    return [f"tenant-{number}" for number in range(_TENANTS)]


def _counter(url: str, name: str) -> float:
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - ours
        text = response.read().decode()
    found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    if not found:
        raise MeasureError(f"the engine has no metric {name}")
    return sum(map(float, found))
