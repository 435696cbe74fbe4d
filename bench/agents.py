"""What a turn of a coding agent costs: a session sends its whole history again with each turn.

Sessions have the published shape (Codex on SWE-bench Pro, and production sessions of Claude Code):
33 turns, from 12,000 to 80,000 tokens for a sub-agent and from 60,000 to 200,000 for its parent,
131 tokens in for each one out, and pauses of 5.2 s (median) and 81 s (p99). Texts are source code.

Parts, each in rounds in which systems take turns:

- `turns`: the CPU of one turn and its first token, with the scripted engine; then of a short
  request. Sluice, also with fast tokenizers, an earlier checkout of it, smg and LiteLLM's proxy;
  the latter two forward to a simulated engine.
- `vllm`: the same with a real engine, a tiny model with a long window: Sluice, vLLM's server.
- `beside`: short requests of another tenant, alone and beside 16 sessions.
- `flood`: turns of a session before and after another tenant filled the caches with its prompts,
  and the memory of the caches.
- `workers`: sessions at a twentieth of their length, with a fifth of the pauses, on two real
  engines with small caches, as in the scenario `affinity`.
"""

import json
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, islice, product
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final

import uvloop
from tokenizers import Tokenizer

from bench import affinity, client
from bench.client import Answer, Lane, Load, Pace, Request
from bench.measure import TIMEOUT_SECONDS, MeasureError, Progress, quantiles
from bench.peer_systems import litellm, running_backend, smg
from bench.processes import CLIENT, Consumption, Meter
from bench.sluice import Sluice, running_sluice
from bench.starting import CHECKPOINT, MODEL, REPOSITORY, StartError
from bench.systems import Deployment, Engine, System
from bench.vllm_server import running_vllm_server

NAME: Final = "agents"
PARTS: Final = ("turns", "vllm", "beside", "flood", "workers")
BEFORE: Final = "Sluice, earlier checkout"
FAST: Final = "Sluice, SLUICE_FAST_TOKENIZERS"
ON_VLLM: Final = "Sluice on vLLM"
SIZES: Final = (5_830, 40_643, 116_428, 232_163)
LONG: Final = SIZES[2]
NEW_TOKENS: Final = 2_242
"""Of a turn: the model's response and what the tools return."""

_TURNS: Final = 33
_SUB_AGENT: Final = (12_000, 80_000)
_PARENT: Final = (60_000, 200_000)
_SESSIONS: Final = 16
"""Half of them are sub-agents."""
_SHARED_TOKENS: Final = 8_600
"""Instructions and tools at the start, the same in all sessions of a tenant."""
_TOKENS_IN_FOR_ONE_OUT: Final = 131
_PAUSE_SECONDS: Final = 5.2
_PAUSE_SIGMA: Final = math.log(81 / 5.2) / 2.326
"""Of a log-normal distribution with this median and p99."""
_COMPLETION_TOKENS: Final = 16
"""Few, where the turn's cost is measured and not that of its tokens."""
SHORT: Final = "short request"
_SHORTS: Final = 1_000
_SHORT_EVERY_SECONDS: Final = 0.05
_STEP_SECONDS: Final = 0.005
"""Time between two steps of the engine beside sessions: without it, a response of a thousand tokens
would take all of a processor."""
_WINDOW: Final = 262_144
_KV_TOKENS: Final = 100_000_000
_SETTLE_SECONDS: Final = 0.3
"""Time in which the records of the last turn are written."""
_IDLE_SECONDS: Final = 3.0
_SPECIAL: Final = re.compile(r"</?[a-z|]")
_MARKED: Final = b'{"role": "system", "content": "Mind </s> and <|user|>."}'
_FLOOD_PROMPTS: Final = 12
CACHE_MIB: Final = 8
_SMALL_CACHES: Final = {
    "SLUICE_PROMPT_CACHE_BYTES": str(CACHE_MIB * 2**20),
    "SLUICE_PROMPT_CACHE_BYTES_OF_TENANT": str(CACHE_MIB * 2**19),
    "SLUICE_CHUNK_CACHE_BYTES": str(CACHE_MIB * 2**20),
}
_CACHE_METRIC: Final = "sluice_gateway_prompt_cache_bytes"
_SCALE: Final = 20
_QUICK_SECONDS: Final = 240.0
_MOST_SECONDS: Final = 3_600.0
"""Time after which no other part starts."""
_LONG_MODEL: Final = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": _WINDOW,
}
"""Its attention is cheap: the front is measured, not the engine."""
_SMALL_MODEL: Final = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
"""Its longest prompts cost seconds without a cache, and two engines on two cores are not always
busy."""
_ENGINE: Final = """
import asyncio, json, sys, time
from array import array
from pathlib import Path
from tokenizers import Tokenizer
from contract.sampling import SamplingSpec
from worker.engine.base import EngineRequest
from worker.engine.scripted import Script, ScriptedEngine

async def main(folder, sizes):
    engine = ScriptedEngine(Path(folder), Script(context_window=2**20))
    await engine.start()
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tail = tokenizer.encode("</think><|assistant|>", add_special_tokens=False).ids
    text = tokenizer.encode(sys.stdin.read(), add_special_tokens=False).ids
    found = {}
    for size in sizes:
        ids = array("I", text[:size] + tail)
        spent = []
        for number in range(5):
            request = EngineRequest(
                id=f"{size} {number}",
                prompt_token_ids=ids.tolist(),  # An integer for each token, as in a worker.
                max_tokens=1,
                sampling=SamplingSpec(seed=1),
                seed=0,
                cache_salt="",
            )
            began = time.process_time()
            await engine.submit([request])
            await engine.step()
            spent.append(1e3 * (time.process_time() - began))
        found[size] = sorted(spent)[2]
    print(json.dumps(found))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""
"""Measures the scripted engine's own part of a turn, in a checkout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Size of the measurement."""

    quick: bool
    rounds: int
    seed: str
    before: Path | None = None
    pause_factor: float = 1.0
    """What the published pauses between turns are multiplied by."""
    parts: Sequence[str]
    """Of PARTS."""

    @property
    def sizes(self) -> Sequence[int]:
        """Prompt tokens of the measured turns."""
        return SIZES[1:3] if self.quick else SIZES


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One value of one round."""

    part: str
    row: tuple[str, ...]
    column: str
    round: int
    value: float


@dataclass(slots=True)
class AgentsMeasurement:
    """All figures."""

    figures: list[Figure] = field(default_factory=list)
    workers: affinity.AffinityMeasurement = field(default_factory=affinity.AffinityMeasurement)
    skipped: list[str] = field(default_factory=list)

    def values(self, part: str, *row_and_column: str) -> list[float]:
        """Return a figure round by round; empty if it was not measured."""
        *row, column = row_and_column
        return [
            each.value
            for each in self.figures
            if (each.part, each.row, each.column) == (part, tuple(row), column)
        ]

    def tables(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """Yield the name, the head and the rows of each part: medians and ranges of the rounds."""
        for part in dict.fromkeys(each.part for each in self.figures):
            own = [each for each in self.figures if each.part == part]
            columns = list(dict.fromkeys(each.column for each in own))
            rows = list(dict.fromkeys(each.row for each in own))
            cells = [
                [*row, *(spread(self.values(part, *row, column)) for column in columns)]
                for row in rows
            ]
            yield part, ["system", *[""] * (len(rows[0]) - 1), *columns], cells


def spread(values: Sequence[float]) -> str:
    """Return a median with its range."""
    if not values:
        return "-"
    low, middle, high = min(values), median(values), max(values)
    if low == high:
        return f"{middle:,.1f}"
    return f"{middle:,.1f} ({low:,.1f} to {high:,.1f})"


@cache
def _lines() -> tuple[Sequence[str], float]:
    """Return lines of source code, and the mean number of tokens of one."""
    files = sorted((REPOSITORY / "gateway").rglob("*.py"))
    texts = [line for each in files for line in each.read_text().splitlines()]
    # Special tokens in texts have a measurement of their own.
    lines = [line for line in texts if line and not _SPECIAL.search(line)]
    sample = "\n".join(random.Random(0).sample(lines, 4_000))
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return lines, len(tokenizer.encode(sample).ids) / 4_000


def _message(role: str, tokens: int, rng: random.Random) -> bytes:
    """Return a message of about so many tokens."""
    lines, tokens_a_line = _lines()
    text = "\n".join(rng.choices(lines, k=max(1, round(tokens / tokens_a_line))))
    return json.dumps({"role": role, "content": text}).encode()


def session(
    seed: str,
    shared: str,
    first: int,
    *,
    new: int = NEW_TOKENS,
    completion_tokens: int | None = _COMPLETION_TOKENS,
    shared_tokens: int = _SHARED_TOKENS,
    pause_factor: float = 0.0,
) -> Iterator[Request]:
    """Yield the turns of an endless session, each with the messages of the turns before it.

    Args:
        seed: Draws its texts and pauses.
        shared: Draws the start that it shares with others.
        first: Tokens of its first prompt.
        new: Tokens that each turn adds.
        completion_tokens: Of each response; None for the published share of the prompt.
        shared_tokens: Of the shared start, at most half of the first prompt.
        pause_factor: What the published pauses are multiplied by.
    """
    rng, size = random.Random(seed), first
    start = min(shared_tokens, first // 2)
    messages = [_message("system", start, random.Random(shared))]
    messages.append(_message("user", first - start, rng))
    while True:
        written = completion_tokens or max(1, size // _TOKENS_IN_FOR_ONE_OUT)
        yield Request(
            model=MODEL,
            prompt="",
            messages=tuple(messages),
            completion_tokens=written,
            streamed=True,
            temperature=0.0,
            pause_seconds=pause_factor * rng.lognormvariate(math.log(_PAUSE_SECONDS), _PAUSE_SIGMA),
        )
        messages.append(_message("assistant", written, rng))
        messages.append(_message("user", max(1, new - written), rng))
        size += new


def _sessions(
    seed: str, factor: float, *, scale: int = 1, number: int = _SESSIONS
) -> Iterator[Iterator[Request]]:
    """Yield sessions whose ages are spread evenly, from their current turn on."""
    for each in range(number):
        first, last = (size // scale for size in (_PARENT, _SUB_AGENT)[each % 2])
        new = (last - first) // (_TURNS - 1)
        age = each * (_TURNS - 1) // number
        yield session(
            f"{seed} {each}",
            seed,
            first + age * new,
            new=new,
            completion_tokens=None if scale == 1 else _COMPLETION_TOKENS,
            shared_tokens=_SHARED_TOKENS // scale,
            pause_factor=factor,
        )


def measure(
    options: Options, folder: Path, *, found: AgentsMeasurement, progress: Progress
) -> None:
    """Measure the parts; the results are added to `found`, also of a part that fails."""
    run = _Run(options, folder, found, progress)
    end = time.monotonic() + (_QUICK_SECONDS if options.quick else _MOST_SECONDS)
    for name in options.parts:
        if time.monotonic() > end:
            found.skipped.append(f"`{name}` is left out: the parts before it took too long.")
            continue
        progress(f"agents: {name}")
        try:
            getattr(run, name)()
        except (StartError, MeasureError, TimeoutError) as error:
            found.skipped.append(f"`{name}` was not finished: {error}")
            progress(f"  {found.skipped[-1]}")


class _Run:
    """One run of all parts."""

    def __init__(
        self, options: Options, folder: Path, found: AgentsMeasurement, progress: Progress
    ) -> None:
        self._options = options
        self._folder = folder
        self._found = found
        self._progress = progress
        self._later_turns = 3 if options.quick else 5

    def turns(self) -> None:
        """Measure the CPU of turns with the scripted engine."""
        with ExitStack() as stack:
            now = stack.enter_context(self._sluice("now"))
            systems: list[System] = [now]
            engines = dict.fromkeys((now.name, FAST), self._engine_ms(REPOSITORY))
            fast = self._sluice("fast", name=FAST, settings={"SLUICE_FAST_TOKENIZERS": "true"})
            systems.append(stack.enter_context(fast))
            if self._options.before is not None:
                before = self._options.before
                systems.append(stack.enter_context(self._sluice("before", before, name=BEFORE)))
                engines[BEFORE] = self._engine_ms(before)
            own = self._own("backend")
            backend = stack.enter_context(running_backend(own, None))
            for name, peer in (("smg", smg), ("LiteLLM", litellm)):
                try:
                    systems.append(stack.enter_context(peer(self._own(name), backend)))
                except StartError as error:
                    self._skip(f"{name} is left out: {error}")
            self._take_turns("turns", systems, self._options.sizes, engines)
            marked = [each for each in systems if each.name in engines]
            self._take_turns("turns", marked, [LONG], engines, is_marked=True)
            self._take_short(marked)

    def vllm(self) -> None:
        """Measure the CPU of turns on a real engine with a long window."""
        checkpoint = self._folder / "long-model"
        affinity.write_model(checkpoint, _LONG_MODEL)
        deployment = Deployment(
            engine=Engine.VLLM, max_sequences=16, context_window=_WINDOW, checkpoint=checkpoint
        )
        # The engine of a first turn needs seconds.
        sizes = self._options.sizes[:-1] if self._options.quick else self._options.sizes[:3]
        with ExitStack() as stack:
            sluice = running_sluice(deployment, self._own("vllm"), name=ON_VLLM)
            server = running_vllm_server(
                deployment, self._own("server"), flags=["--enable-prompt-tokens-details"]
            )
            systems: list[System] = [stack.enter_context(sluice), stack.enter_context(server)]
            self._take_turns("vllm", systems, sizes, {})

    def beside(self) -> None:
        """Measure short requests of another tenant."""
        with self._sluice("beside", step_seconds=_STEP_SECONDS, gathers=True) as sluice:
            [url], agent, other = sluice.urls(1), sluice.key("agent"), sluice.key("other")
            short = Request(model=MODEL, prompt="a b", completion_tokens=1, streamed=True)
            seconds = 12.0 if self._options.quick else 30.0
            number = round(seconds / _SHORT_EVERY_SECONDS)
            lane = Lane(url, other, [short] * number, "other", Pace(0.0, _SHORT_EVERY_SECONDS))
            self._complete([replace(lane, requests=[short] * 3)])
            for turn in range(1, self._options.rounds + 1):
                texts = [*_sessions(f"{self._options.seed} {turn}", self._options.pause_factor)]
                # Long before the measured time, each session had its current turn.
                firsts = [
                    replace(next(each), pause_seconds=0.0, completion_tokens=1) for each in texts
                ]
                self._complete([Lane(url, agent, firsts, "agent")])
                lanes = [Lane(url, agent, each, "agent") for each in texts]
                works: list[tuple[str, list[Lane]]] = [("alone", []), ("beside", lanes)]
                for row, others in works if turn % 2 else reversed(works):
                    answers, used = uvloop.run(_for_seconds([lane, *others], sluice, seconds))
                    self._note_short(row, turn, answers, used)

    def _note_short(
        self, row: str, turn: int, answers: Sequence[Answer], used: Consumption
    ) -> None:
        times = quantiles(each.ttft_seconds for each in answers if each.tenant == "other")
        self._note("beside", (row,), "first token p50 ms", turn, times.p50)
        self._note("beside", (row,), "p99 ms", turn, times.p99)
        sent = [each for each in answers if each.tenant == "agent"]
        self._note("beside", (row,), "turns", turn, len(sent))
        if sent:
            first = quantiles(each.ttft_seconds for each in sent)
            self._note("beside", (row,), "first token of turns p50 ms", turn, first.p50)
        for part, size in used.resident_mib.items():
            if part != CLIENT:
                self._note("beside", (row,), f"{part} MiB", turn, size)

    def flood(self) -> None:
        """Measure turns before and after another tenant filled the caches."""
        with self._sluice("flood", settings=_SMALL_CACHES) as sluice:
            [url] = sluice.urls(1)
            idle = self._idle(sluice)
            for turn in range(1, self._options.rounds + 1):
                seed = f"{self._options.seed} flood {turn}"
                turns = session(seed, seed, LONG)
                costs: dict[str, list[float]] = {"first": [], "alone": [], "flooded": []}
                costs["first"].append(self._gateway_ms(sluice, next(turns), idle))
                for number in range(2 * self._later_turns):
                    kind = "flooded" if number % 2 else "alone"
                    if kind == "flooded":
                        prompts = [
                            next(session(f"{seed} {number} {each}", f"{each}", LONG))
                            for each in range(_FLOOD_PROMPTS)
                        ]
                        self._complete([Lane(url, sluice.key("flooding"), prompts)])
                    costs[kind].append(self._gateway_ms(sluice, next(turns), idle))
                kept = affinity.counter(sluice.metrics_urls()[-1], _CACHE_METRIC) / 2**20
                self._note("flood", ("flooded",), "cache MiB", turn, kept)
                first, alone, flooded = (median(each) for each in costs.values())
                for name, value in (("first", first), ("alone", alone), ("flooded", flooded)):
                    self._note("flood", (name,), "gateway ms", turn, value)
                if alone < first / 2:
                    lost = 100 * (flooded - alone) / (first - alone)
                    self._note("flood", ("flooded",), "% of the saved CPU lost", turn, lost)

    def _gateway_ms(self, sluice: Sluice, request: Request, idle: Mapping[str, float]) -> float:
        _, spent = self._drive(sluice, [request], idle)
        return spent["gateway"]

    def workers(self) -> None:
        """Measure what two workers find in their caches."""
        quick, factor = self._options.quick, self._options.pause_factor
        turns, number, scale = (4, 8, 2 * _SCALE) if quick else (12, _SESSIONS, _SCALE)

        def begin(seed: str) -> Iterator[tuple[str, Iterable[Request]]]:
            for each, requests in enumerate(
                _sessions(seed, factor / 5, scale=scale, number=number)
            ):
                # A gateway closes a connection on which nothing arrives for ten seconds.
                first = (
                    replace(one, pause_seconds=min(one.pause_seconds, 8.0))
                    for one in islice(requests, 1)
                )
                rest = islice(requests, turns - 1)
                yield affinity.TENANTS[each % len(affinity.TENANTS)], chain(first, rest)

        chats = affinity.Chats(
            begin=begin,
            window=_PARENT[1] // scale + 4_096,
            blocks=350 if quick else 1_500,
            model=_SMALL_MODEL,
        )
        options = affinity.Options(
            quick=quick, rounds=self._options.rounds, seed=self._options.seed
        )
        affinity.measure(
            options, self._folder, found=self._found.workers, progress=self._progress, chats=chats
        )

    def _take_turns(
        self,
        part: str,
        systems: Sequence[System],
        sizes: Sequence[int],
        engines: Mapping[str, Mapping[int, float]],
        *,
        is_marked: bool = False,
    ) -> None:
        """Measure first and later turns of a session at each size, on one system after another."""
        for system in systems:
            self._drive(system, [*islice(session("warm-up", "warm-up", 1_000), 3)])
        idle_of = {system.name: self._idle(system) for system in systems}
        for number, size in product(range(1, self._options.rounds + 1), sizes):
            for system in systems if number % 2 else reversed(systems):
                idle = idle_of[system.name]
                seed = f"{self._options.seed} {number} {size}"
                first = max(400, size - NEW_TOKENS * (self._later_turns + 1) // 2)
                turns = [*islice(session(seed, seed, first), self._later_turns + 1)]
                if is_marked:
                    turns = [replace(e, messages=(_MARKED, *e.messages)) for e in turns]
                own = engines.get(system.name, {}).get(size, 0.0)
                title = f"{size:,}, special tokens in a text" if is_marked else f"{size:,}"
                row = (system.name, title)
                first_answers, first_spent = self._drive(system, turns[:1], idle)
                answers, spent = self._drive(system, turns[1:], idle)
                for name, value in spent.items():
                    self._note(part, row, f"{name} ms", number, value)
                if own:
                    self._note(part, row, "scripted engine ms", number, own)
                    apart = spent["worker front"] - own
                    self._note(part, row, "worker without it ms", number, apart)
                first_token = 1e3 * median(each.ttft_seconds for each in answers)
                self._note(part, row, "first token ms", number, first_token)
                if part == "turns":
                    self._note(part, row, "added first token ms", number, first_token - own)
                else:
                    share = median(e.cached_tokens / e.prompt_tokens for e in answers)
                    self._note(part, row, "cached %", number, 100 * share)
                for name, value in first_spent.items():
                    self._note(part, row, f"first turn, {name} ms", number, value)
                later = 1e3 * first_answers[0].ttft_seconds
                self._note(part, row, "first turn, first token ms", number, later)
                shown = ", ".join(f"{name} {value:.1f} ms" for name, value in spent.items())
                self._progress(f"  round {number}, {', '.join(row)}: {shown}")

    def _take_short(self, systems: Sequence[System]) -> None:
        """Measure short requests, one at a time, on one system after another."""
        short = Request(model=MODEL, prompt="a b", completion_tokens=1, streamed=True)
        idle_of = {system.name: self._idle(system) for system in systems}
        for number in range(1, self._options.rounds + 1):
            for system in systems if number % 2 else reversed(systems):
                answers, spent = self._drive(system, [short] * _SHORTS, idle_of[system.name])
                times = {"first token": 1e3 * median(each.ttft_seconds for each in answers)}
                for name, value in (times | spent).items():
                    self._note("turns", (system.name, SHORT), f"{name} ms", number, value)

    def _idle(self, system: System) -> dict[str, float]:
        """Return the CPU seconds that each part uses a second without any load."""
        meter = Meter(system.groups(1))
        meter.start()
        time.sleep(_IDLE_SECONDS)
        used = meter.stop()
        return {name: spent / used.wall_seconds for name, spent in used.cpu_seconds.items()}

    def _drive(
        self,
        system: System,
        requests: Sequence[Request],
        idle: Mapping[str, float] = MappingProxyType({}),
    ) -> tuple[list[Answer], dict[str, float]]:
        """Return the answers of some turns, and the CPU of each part, in ms a turn."""
        [url] = system.urls(1)
        meter = Meter(system.groups(1))
        turns = [replace(each, pause_seconds=0.0) for each in requests]
        answers, used = uvloop.run(
            client.run(
                [Lane(url, system.key("agent"), turns)],
                meter=meter,
                timeout_seconds=TIMEOUT_SECONDS,
                settle_seconds=_SETTLE_SECONDS,
            )
        )
        _refuse_failures(answers, system.name)
        spent = {
            name: 1e3 * max(0.0, seconds - idle.get(name, 0.0) * used.wall_seconds) / len(answers)
            for name, seconds in used.cpu_seconds.items()
            if name not in (CLIENT, "engine")
        }
        return answers, spent

    def _complete(self, lanes: Sequence[Lane]) -> None:
        answers = uvloop.run(client.complete(lanes, timeout_seconds=TIMEOUT_SECONDS))
        _refuse_failures(answers, lanes[0].tenant)

    def _sluice(
        self,
        own: str,
        repository: Path = REPOSITORY,
        *,
        settings: Mapping[str, str] | None = None,
        step_seconds: float = 0.0,
        gathers: bool = False,
        **options: Any,
    ) -> Any:
        deployment = Deployment(
            engine=Engine.SCRIPTED,
            max_sequences=256,
            context_window=_WINDOW,
            step_seconds=step_seconds,
            gathers=gathers,
        )
        fixed = {"SLUICE_SCRIPTED_KV_CACHE_TOKENS": str(_KV_TOKENS), **(settings or {})}
        return running_sluice(
            deployment, self._own(own), repository=repository, settings=fixed, **options
        )

    def _own(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        return folder

    def _engine_ms(self, repository: Path) -> dict[int, float]:
        """Return what the scripted engine of a checkout itself needs for a turn, in ms of CPU."""
        arguments = [str(CHECKPOINT), json.dumps(self._options.sizes)]
        lines, tokens_a_line = _lines()
        number = round(1.1 * self._options.sizes[-1] / tokens_a_line)
        done = subprocess.run(
            [sys.executable, "-c", _ENGINE, *arguments],
            input="\n".join(random.Random(0).choices(lines, k=number)),
            cwd=repository,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise StartError(f"the scripted engine cannot be measured: {done.stderr.strip()}")
        return {int(size): spent for size, spent in json.loads(done.stdout).items()}

    def _note(self, part: str, row: tuple[str, ...], column: str, turn: int, value: float) -> None:
        self._found.figures.append(
            Figure(part=part, row=row, column=column, round=turn, value=value)
        )

    def _skip(self, sentence: str) -> None:
        self._found.skipped.append(sentence)
        self._progress(f"  {sentence}")


async def _for_seconds(
    lanes: Sequence[Lane], sluice: Sluice, seconds: float
) -> tuple[list[Answer], Consumption]:
    """Run lanes until the first one has ended; the others' last responses are not received."""
    load, meter = Load(lanes), Meter(sluice.groups(1))
    try:
        await load.open()
        meter.start()
        load.start()
        await load.wait(4 * seconds + TIMEOUT_SECONDS, first=1)
        answers, used = load.answers, meter.stop()
    finally:
        load.close()
    _refuse_failures(answers, sluice.name)
    return answers, used


def _refuse_failures(answers: Iterable[Answer], name: str) -> None:
    if failures := [each.error for each in answers if each.error]:
        raise MeasureError(f"{name} failed {len(failures)} requests: {failures[0]}")
