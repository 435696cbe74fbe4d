"""Load scenarios, defined as data."""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice, takewhile
from random import Random

from bench.client import Lane, Pace, Request
from bench.starting import MODEL
from bench.systems import Engine, System

_WORDS = (
    "river",
    "stone",
    "light",
    "garden",
    "morning",
    "window",
    "letter",
    "bridge",
    "winter",
    "summer",
    "market",
    "engine",
    "paper",
    "road",
    "silver",
    "forest",
    "captain",
    "music",
    "island",
    "table",
    "number",
    "answer",
    "yellow",
    "circle",
    "harbour",
    "kitchen",
    "little",
    "open",
    "quiet",
    "seven",
    "under",
    "village",
    "water",
    "young",
    "mountain",
    "between",
    "north",
    "story",
    "animal",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A load: every connection sends requests, one after the other."""

    name: str
    """Name on the command line."""
    variant: str
    """Distinguishes scenarios with the same name."""
    streams: int
    """Connections."""
    requests: int
    """Requests of each connection, in each round."""
    seconds: float | None = None
    """Each connection repeats its requests until this time has passed; None sends them once."""
    completion_tokens: int
    streamed: bool = True
    chat: bool = False
    """Whether a prompt is the message of a chat."""
    temperature: float | None = 0.0
    """None leaves it to the server, whose default is 1."""
    prompt_words: int = 24
    engine: Engine = Engine.VLLM
    step_seconds: float = 0.0
    """Scripted engine: time between two steps."""
    against_vllm: bool = True
    """Whether vLLM's own server gets the same load, in turns with Sluice."""
    gateways: int = 1
    tenants: int = 1
    per_second: float | None = None
    """Requests of all connections per second; None sends each as soon as the previous one has
    ended."""

    @property
    def title(self) -> str:
        """Name and variant."""
        return f"{self.name}: {self.variant}"

    @property
    def tokens(self) -> int:
        """Completion tokens of one round."""
        return self.number_of_requests * self.completion_tokens

    @property
    def number_of_requests(self) -> int:
        """Requests of one round."""
        return self.streams * self.requests


SCENARIOS = (
    Scenario(
        name="throughput",
        variant="64 streams of 128 tokens, greedy",
        streams=64,
        requests=4,
        completion_tokens=128,
    ),
    Scenario(
        name="throughput",
        variant="64 streams of 128 tokens, default sampling",
        streams=64,
        requests=4,
        completion_tokens=128,
        temperature=None,
    ),
    Scenario(
        name="latency",
        variant="1 stream of 64 tokens",
        streams=1,
        requests=20,
        completion_tokens=64,
    ),
    Scenario(
        name="requests",
        variant="64 connections, 16 tokens, not streamed",
        streams=64,
        requests=16,
        completion_tokens=16,
        streamed=False,
    ),
    Scenario(
        name="requests",
        variant="64 streams of 1 token",
        streams=64,
        requests=16,
        completion_tokens=1,
    ),
    Scenario(
        name="tokens",
        variant="256 streams of 250 tokens, one every 20 ms each",
        streams=256,
        requests=1,
        completion_tokens=250,
        engine=Engine.SCRIPTED,
        step_seconds=0.02,
        against_vllm=False,
    ),
    Scenario(
        name="tenants",
        variant="64 streams of 128 tokens, 16 tenants, 2 gateways",
        streams=64,
        requests=4,
        completion_tokens=128,
        against_vllm=False,
        gateways=2,
        tenants=16,
    ),
)

QUICK = (
    Scenario(
        name="throughput",
        variant="64 streams of 32 tokens, as fast as the scripted engine steps",
        streams=64,
        requests=16,
        completion_tokens=32,
        engine=Engine.SCRIPTED,
        against_vllm=False,
    ),
    Scenario(
        name="tokens",
        variant="256 streams of 100 tokens, one every 20 ms each",
        streams=256,
        requests=1,
        completion_tokens=100,
        engine=Engine.SCRIPTED,
        step_seconds=0.02,
        against_vllm=False,
    ),
)
"""A quick check that everything works, without the real engine."""


def prompts(seed: str, words: int) -> Iterator[str]:
    """Yield an endless series of prompts, repeatable for a seed, and no two alike."""
    rng = Random(seed)
    while True:
        yield " ".join(rng.choices(_WORDS, k=words))


def make_request(
    text: str, tokens: int, *, streamed: bool, chat: bool = True, temperature: float | None = None
) -> Request:
    """Return a chat of one message of a user, or a completion."""
    message = json.dumps({"role": "user", "content": text}).encode()
    return Request(
        model=MODEL,
        prompt="" if chat else text,
        completion_tokens=tokens,
        streamed=streamed,
        temperature=temperature,
        messages=[message] if chat else (),
    )


def lanes(scenario: Scenario, system: System, *, seed: str) -> list[Lane]:
    """Return what each connection sends, distributed over gateways and tenants in turn."""
    urls = system.urls(scenario.gateways)
    texts = prompts(seed, scenario.prompt_words)
    fields = getattr(system, "fields", {})
    result = []
    for number in range(scenario.streams):
        tenant = f"tenant-{number % scenario.tenants + 1}"
        requests: Iterable[Request] = [
            make_request(
                text,
                scenario.completion_tokens,
                streamed=scenario.streamed,
                chat=scenario.chat,
                temperature=scenario.temperature,
            )
            for text in islice(texts, scenario.requests)
        ]
        if scenario.seconds is not None:
            requests = _until(scenario.seconds, requests)
        # Every second connection of a tenant goes through the other gateway.
        url = urls[number // scenario.tenants % len(urls)]
        pace = _pace(scenario, number)
        result.append(Lane(url, system.key(tenant), requests, tenant, pace, fields=fields))
    return result


def _until(seconds: float, requests: Iterable[Request]) -> Iterator[Request]:
    """Repeat requests until a time has passed since the first one."""
    deadline = time.perf_counter() + seconds  # A generator runs this on its first request.
    yield from takewhile(lambda _: time.perf_counter() < deadline, cycle(requests))


def _pace(scenario: Scenario, number: int) -> Pace | None:
    """Distribute the requests of all connections evenly over the time."""
    if scenario.per_second is None:
        return None
    return Pace(number / scenario.per_second, scenario.streams / scenario.per_second)
