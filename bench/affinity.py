"""Prefix affinity: chats of several turns on two engines whose caches hold half of them each.

Users of a tenant share the start of their prompts. Each turn repeats the turns before it. Sluice
with affinity and without it takes turns with one worker of Sluice that has twice the cache, and
with two servers of vLLM: the client sends them requests in turn, or `vllm-router` sends each where
its text is cached. Each starts anew in each round, so that only two engines run at a time, and all
get the same requests at the same times.

The model has random weights: prompts of a few thousand tokens must cost much more than a step.
Engines use one thread each.

Then all tenants of Sluice have jobs waiting for some seconds, some with cached prompts and some
without. Their services in that time are compared with the bound of docs/queue.md, without its part
for what workers have not reported.
"""

import asyncio
import json
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import uvloop
from redis.asyncio import Redis
from tokenizers import Tokenizer

from bench.client import Lane, Load, Pace, Request, complete
from bench.measure import MeasureError, Progress, Quantiles, quantiles
from bench.peer_systems import require_router, running_router
from bench.scenarios import prompts
from bench.sluice import running_sluice
from bench.starting import CHECKPOINT, MODEL, StartError
from bench.systems import Deployment, Engine
from bench.vllm_server import running_vllm_server
from contract import keys
from contract.queue import AFFINITY_QUANTUM, COMPLETION_COST, PROMPT_COST

NAME: Final = "affinity"
WITH: Final = "Sluice"
WITHOUT: Final = "Sluice, `SLUICE_AFFINITY_SECONDS=0`"
DOUBLE: Final = "Sluice, one worker with twice the cache"
ROUND_ROBIN: Final = "vLLM's servers, round robin"
PREFIX_AWARE: Final = "vLLM's server, vllm-router, cache-aware"

TENANTS: Final = tuple(f"tenant-{number}" for number in range(6))
_USERS: Final = 30
_TURNS: Final = 6
_SECONDS: Final = 4.0
"""Mean time between two turns of a user."""
_SHARED_WORDS: Final = 700
_OWN_WORDS: Final = 700
"""Of the document with which each user starts."""
_TURN_WORDS: Final = 60
_TOKENS: Final = 16
_SEQUENCES: Final = 4
"""Of each engine, so that jobs wait."""
_BLOCK_TOKENS: Final = 32
_BLOCKS: Final = 1_000
"""KV cache of each of the two engines: half of what the last turns of all users have."""
_TIMEOUT_SECONDS: Final = 600.0
"""For all chats: those of agents have pauses, of which one session may have a minute and more."""
_CONNECTIONS: Final = 8
"""Of each tenant, so that it always has jobs waiting."""
_BACKLOG_SECONDS: Final = 8.0
_SAMPLE_SECONDS: Final = 0.02

_MODEL: Final = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
_DTYPE: Final = "float32"
"""Of all systems: their defaults differ on a CPU without AVX-512, where bfloat16 is slow."""
_ONE_THREAD: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""By default, vLLM binds the thread of both engines to the same core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Size of the measurement."""

    quick: bool
    rounds: int
    seed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Other chats than those of this scenario."""

    begin: Callable[[str], Iterator[tuple[str, Iterable[Request]]]]
    """Returns the tenant and the requests of each chat, which a seed draws."""
    window: int
    """Tokens."""
    blocks: int
    """KV cache of each of the two engines."""
    model: Mapping[str, int]
    """What the configuration of the model has in place of this scenario's."""


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
    preempted: int
    """Sequences that left Sluice's engines for other tenants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What tenants with waiting jobs were served in one round, in service units."""

    system: str
    round: int
    requests_per_second: float
    served: Mapping[str, float]
    worst_difference: float
    """Between two tenants, over any time in which both had jobs waiting."""
    bound: float
    """If workers have reported everything: `E` of docs/queue.md is 0."""


@dataclass(slots=True)
class AffinityMeasurement:
    """All rounds."""

    turns: list[Turn] = field(default_factory=list)
    backlogs: list[Backlog] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """What was not measured, and why."""

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
                    f"{median(each.ttft.p50 for each in turns):.0f}",
                    f"{median(each.ttft.p99 for each in turns):.0f}",
                    str(sum(each.requests for each in turns)),
                    str(sum(each.preempted for each in turns)),
                ]
            )
        return rows

    def backlog_rows(self) -> list[list[str]]:
        """Return a row for each backlog."""
        return [
            [
                each.system,
                str(each.round),
                f"{each.requests_per_second:.1f}",
                f"{min(each.served.values()):,.0f} to {max(each.served.values()):,.0f}",
                f"{each.worst_difference:,.0f}",
                f"{each.bound:,.0f}",
            ]
            for each in self.backlogs
        ]


@dataclass(frozen=True, slots=True)
class _System:
    name: str
    url: str
    keys: Mapping[str, str]
    metrics: Sequence[str]
    """Of the engines."""
    redis_port: int = 0
    """Of Sluice."""
    others: Sequence[str] = ()
    """More servers that get requests in turn."""

    def lane(self, tenant: str, requests: Iterable[Request], pace: Pace | None = None) -> Lane:
        """Return the requests of one connection of a tenant."""
        return Lane(self.url, self.keys[tenant], requests, tenant, pace, self.others)

    def preempted(self) -> int:
        """Return how many sequences made room for other tenants."""
        if not self.redis_port:
            return 0
        name = "sluice_worker_preempted_sequences_total"
        return round(sum(counter(each, name) for each in self.metrics))


def measure(
    options: Options,
    folder: Path,
    *,
    found: AffinityMeasurement,
    progress: Progress,
    chats: Chats | None = None,
) -> None:
    """Run all rounds; the results are added to `found`. Raises MeasureError or StartError.

    Other chats run on no workers without affinity, and no waiting jobs of all tenants follow them.
    """
    checkpoint = folder / "model"
    window = chats.window if chats else _MODEL["max_position_embeddings"]
    blocks = chats.blocks if chats else _BLOCKS
    config: dict[str, int] = {**_MODEL, **(chats.model if chats else {})}
    write_model(checkpoint, config | {"max_position_embeddings": window})
    deployment = Deployment(
        engine=Engine.VLLM,
        max_sequences=_SEQUENCES,
        context_window=window,
        checkpoint=checkpoint,
    )
    double = partial(_running_sluice, DOUBLE, deployment, workers=1, blocks=2 * blocks)
    running = [partial(_running_sluice, WITH, deployment, blocks=blocks)]
    if chats is None:
        running.append(partial(_running_sluice, WITHOUT, deployment, blocks=blocks, affinity="0"))
    if chats is not None or not options.quick:
        running.append(double)
    if not options.quick:
        has_router = _has_router(found, progress)
        running.append(partial(_running_vllm, deployment, blocks=blocks, has_router=has_router))
    for number in range(1, options.rounds + 1):
        for place, start in enumerate(running if number % 2 else reversed(running)):
            own = folder / f"{number}-{place}"
            own.mkdir()
            with start(own) as systems:
                for system in systems:
                    _measure(system, number, options, found, progress, chats)


def _measure(
    system: _System,
    number: int,
    options: Options,
    found: AffinityMeasurement,
    progress: Progress,
    chats: Chats | None,
) -> None:
    turn = uvloop.run(_turns(system, number, options, chats))
    found.turns.append(turn)
    share = turn.cached_tokens / turn.prompt_tokens
    progress(
        f"  round {number}, {system.name}: {100 * share:.1f} % cached, "
        f"first token {turn.ttft.p50:.0f} / {turn.ttft.p99:.0f} ms, {turn.preempted} preempted"
    )
    if chats is None and system.redis_port and len(system.metrics) > 1:
        backlog = uvloop.run(_backlog(system, number, options))
        found.backlogs.append(backlog)
        progress(
            f"  round {number}, {system.name}: services of tenants differed by "
            f"{backlog.worst_difference:,.0f}, the bound is {backlog.bound:,.0f}"
        )


def _has_router(found: AffinityMeasurement, progress: Progress) -> bool:
    """Return whether the router is installed; without it, one system is left out."""
    try:
        require_router()
    except StartError as error:
        found.skipped.append(f"{PREFIX_AWARE}, is left out: {error}")
        progress(f"  {found.skipped[-1]}")
        return False
    return True


def write_model(folder: Path, config: Mapping[str, int]) -> None:
    """Write a model with random weights and the tokenizer of the demo model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(CHECKPOINT, folder)
    torch.manual_seed(0)
    whole = LlamaConfig.from_pretrained(CHECKPOINT, **config)
    LlamaForCausalLM(whole).to(getattr(torch, _DTYPE)).save_pretrained(folder)


@contextmanager
def _running_sluice(
    name: str,
    deployment: Deployment,
    folder: Path,
    *,
    blocks: int,
    workers: int = 2,
    affinity: str = "15",
) -> Iterator[Iterable[_System]]:
    arguments = {
        "dtype": _DTYPE,
        "block_size": _BLOCK_TOKENS,
        "num_gpu_blocks_override": blocks,
    }
    settings = {
        "SLUICE_AFFINITY_SECONDS": affinity,
        "SLUICE_ENGINE_ARGUMENTS": json.dumps(arguments),
        **_ONE_THREAD,
    }
    with running_sluice(deployment, folder, settings=settings, workers=workers) as sluice:
        [url] = sluice.urls(1)
        *metrics, _ = sluice.metrics_urls()
        tenants = {name: sluice.key(name) for name in TENANTS}
        yield [_System(name, url, tenants, metrics, sluice.redis_port)]


@contextmanager
def _running_vllm(
    deployment: Deployment, folder: Path, *, blocks: int, has_router: bool
) -> Iterator[Iterable[_System]]:
    flags = [f"--dtype={_DTYPE}", f"--block-size={_BLOCK_TOKENS}"]
    flags += [f"--num-gpu-blocks-override={blocks}", "--enable-prompt-tokens-details"]
    # A connection is kept open while its user reads.
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300"}
    environment |= _ONE_THREAD
    folders = [folder / name for name in ("1", "2", "router")]
    for each in folders:
        each.mkdir()
    with ExitStack() as stack:
        # A server ends with the thread that started it.
        threads = stack.enter_context(ThreadPoolExecutor(2))

        def start(own: Path) -> str:
            running = running_vllm_server(deployment, own, flags=flags, environment=environment)
            [url] = stack.enter_context(running).urls(1)
            return url

        urls = list(threads.map(start, folders[:2]))
        yield _in_turn_and_routed(stack, urls, folders[2] if has_router else None)


def _in_turn_and_routed(
    stack: ExitStack, urls: Sequence[str], router: Path | None
) -> Iterator[_System]:
    """Yield the servers, then the same ones with empty caches behind a router with this folder."""
    first, *others = urls
    none = dict.fromkeys(TENANTS, "")
    yield _System(ROUND_ROBIN, first, none, urls, others=others)
    if router is None:
        return
    for url in urls:
        reset = urllib.request.Request(  # noqa: S310 - ours
            f"{url}/reset_prefix_cache", method="POST"
        )
        with urllib.request.urlopen(reset, timeout=10):  # noqa: S310
            pass
    url = stack.enter_context(running_router(router, urls, policy="cache_aware"))
    yield _System(PREFIX_AWARE, url, none, urls)


async def _turns(system: _System, number: int, options: Options, chats: Chats | None) -> Turn:
    seed = f"{options.seed} {number}"
    await _run(list(_warm_up(system, seed)))
    preempted = system.preempted()
    lanes = _chats(system, seed)
    if chats is not None:
        own = chats.begin(seed)
        lanes = (system.lane(tenant, each) for tenant, each in own)
    answers = await _run(list(lanes))
    later = [each for each in answers if _is_later(each.request)]
    return Turn(
        system=system.name,
        round=number,
        requests=len(answers),
        # From the usage of responses: an engine counts the prompt of a preempted sequence again.
        prompt_tokens=sum(each.prompt_tokens for each in answers),
        cached_tokens=sum(each.cached_tokens for each in answers),
        ttft=quantiles(each.ttft_seconds for each in later),
        preempted=system.preempted() - preempted,
    )


async def _run(lanes: Sequence[Lane]) -> list[Any]:
    answers = await complete(lanes, timeout_seconds=_TIMEOUT_SECONDS)
    if failures := [each.error for each in answers if each.error]:
        raise MeasureError(f"{len(failures)} requests failed: {failures[0]}")
    return answers


def _is_later(request: Request) -> bool:
    """Whether a request repeats another turn of its chat."""
    return request.prompt.count("\nuser") > 1 or len(request.messages) > 2


def _request(prompt: str) -> Request:
    return Request(
        model=MODEL, prompt=prompt, completion_tokens=_TOKENS, streamed=True, temperature=0.0
    )


def _warm_up(system: _System, seed: str) -> Iterator[Lane]:
    for tenant in TENANTS:
        texts = islice(prompts(f"{seed} {tenant} warm-up", 2 * _TURN_WORDS), 4)
        yield system.lane(tenant, map(_request, texts))


def _shared(seed: str, tenant: str) -> str:
    return next(prompts(f"{seed} {tenant}", _SHARED_WORDS))


def _chats(system: _System, seed: str) -> Iterator[Lane]:
    rng = Random(seed)
    for user in range(_USERS):
        tenant = TENANTS[user % len(TENANTS)]
        own = next(prompts(f"{seed} {user} own", _OWN_WORDS))
        text = f"{_shared(seed, tenant)}\n{own}"
        says, requests = prompts(f"{seed} {user}", _TURN_WORDS), list[Request]()
        for _ in range(_TURNS):
            text += f"\nuser {user}: {next(says)}"
            requests.append(_request(text))
        every = _SECONDS * rng.uniform(0.8, 1.2)
        pace = Pace(rng.uniform(0.0, 2 * every), every)
        yield system.lane(tenant, requests, pace)


async def _backlog(system: _System, number: int, options: Options) -> Backlog:
    """Let all tenants have jobs waiting, and sample what they were served."""
    seed = f"{options.seed} {number}"
    lanes = [
        system.lane(tenant, _endless(seed, place, connection))
        for place, tenant in enumerate(TENANTS)
        for connection in range(_CONNECTIONS)
    ]
    load = Load(lanes)
    services = _Services()
    redis = Redis(port=system.redis_port)
    try:
        await load.open()
        load.start()
        end = time.monotonic() + _BACKLOG_SECONDS
        while time.monotonic() < end:
            await services.sample(redis)
            await asyncio.sleep(_SAMPLE_SECONDS)
        if failures := [each.error for each in load.answers if each.error]:
            raise MeasureError(f"{len(failures)} requests failed: {failures[0]}")
        tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
        longest = max(len(tokenizer.encode(each.request.prompt).ids) for each in load.answers)
    finally:
        load.close()
        await redis.aclose()
    batch = len(system.metrics) * _SEQUENCES * _TOKENS
    prompt = PROMPT_COST * longest
    bound = 2 * (max(prompt, COMPLETION_COST * batch) + max(AFFINITY_QUANTUM, prompt))
    return Backlog(
        system=system.name,
        round=number,
        requests_per_second=len(load.answers) / _BACKLOG_SECONDS,
        served=services.served(),
        worst_difference=services.worst,
        bound=bound,
    )


def _endless(seed: str, place: int, connection: int) -> Iterator[Request]:
    """Yield requests: every other tenant repeats a long prefix, the others repeat nothing."""
    words = _OWN_WORDS // 2 if place % 2 else 2 * _TURN_WORDS
    says = prompts(f"{seed} {place} {connection} backlog", words)
    start = "" if place % 2 else _shared(seed, TENANTS[place])
    for text in says:
        yield _request(f"{start}\n{text}")


class _Services:
    """Services of tenants, from samples of their counters and waiting jobs.

    A tenant had jobs waiting between two samples if one job waited at both.
    """

    def __init__(self) -> None:
        self.worst = 0.0
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._waiting: dict[str, set[bytes]] = {}
        self._ranges: dict[tuple[str, str], tuple[float, float]] = {}
        """Lowest and highest difference of two counters while both tenants have jobs waiting."""

    async def sample(self, redis: "Redis") -> None:
        pipeline = redis.pipeline(transaction=True)
        pipeline.execute_command("HGETALL", keys.service_counters(MODEL))
        for tenant in TENANTS:
            pipeline.execute_command("ZRANGE", keys.queue(MODEL, tenant), 0, -1)
        found, *queues = await pipeline.execute()
        counters = {tenant: float(found.get(tenant.encode(), 0)) for tenant in TENANTS}
        waiting = {tenant: set(jobs) for tenant, jobs in zip(TENANTS, queues, strict=True)}
        stayed = {each for each in TENANTS if waiting[each] & self._waiting.get(each, set())}
        for pair in combinations(TENANTS, 2):
            difference = counters[pair[0]] - counters[pair[1]]
            low = high = difference
            if stayed.issuperset(pair):
                low, high = self._ranges[pair]
            self._ranges[pair] = low, high = min(low, difference), max(high, difference)
            self.worst = max(self.worst, high - low)
        self._waiting, self._last = waiting, counters
        self._first = self._first or counters

    def served(self) -> dict[str, float]:
        return {tenant: self._last[tenant] - self._first[tenant] for tenant in TENANTS}


def counter(url: str, name: str) -> float:
    """Return a metric of a server, summed over its labels. Raises MeasureError without it."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:  # noqa: S310 - ours
        text = response.read().decode()
    found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    if not found:
        raise MeasureError(f"{url} has no metric {name}")
    return sum(map(float, found))
