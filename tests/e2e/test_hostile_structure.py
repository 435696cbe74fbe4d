"""Hostile grammars next to healthy streams, on the real engine."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.gateway.completions.structure.test_checker import BOUNDED, HOSTILE
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack

HEALTHY_STREAMS = 4
HEALTHY = {
    "model": MODEL,
    "prompt": "The harbour",
    "max_tokens": 100,
    "ignore_eos": True,
    "temperature": 1,
    "seed": 6,
    "stream": True,
}
EVENTS_OF_STANDSTILL = 2
WORST = ("multipleOf", "gbnf chain", "regex of many states", "choices")
"""One that is aborted, and those that get furthest; test_checker.py has them all."""
OUT_OF_TIME = "takes too long or too much memory"
"""In the message of a structure that was aborted after its limit of CPU time."""


@dataclass
class Healthy:
    """A stream that is requested repeatedly."""

    events: int = 0
    texts: set[str] = field(default_factory=set)
    """Of all responses that ended."""

    async def read(self, http: httpx.AsyncClient) -> None:
        """Read one response."""
        events = []
        async with http.stream("POST", "/v1/completions", json=HEALTHY) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    self.events += 1
        *chunks, end = events
        assert end == "[DONE]"
        # An error has no choices.
        self.texts.add("".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks))

    async def read_until(self, http: httpx.AsyncClient, over: asyncio.Event) -> None:
        """Read responses until `is_over`."""
        while not over.is_set():
            await self.read(http)


def parameter(kind: str, source: Any) -> dict[str, Any]:
    """Return a structure as a parameter of a request."""
    match kind:
        case "json_schema":
            return {"json_schema": source}
        case "regex" | "choice":
            return {"structured_outputs": {kind: source}}
        case "gbnf":
            return {"grammar": source}
        case _:
            return {"grammar": {"type": kind, "value": source}}


async def ask(http: httpx.AsyncClient, name: str) -> tuple[int, dict[str, Any]]:
    """Send one structure; return the status and the error, empty if there is none.

    The deployment's sandboxes wait for CPU time, so that no structure gets a retryable error.
    """
    kind, source = (HOSTILE | BOUNDED)[name]
    body = {"model": MODEL, "prompt": "x", "max_tokens": 8, **parameter(kind, source)}
    answer = await http.post(
        "/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    return answer.status_code, answer.json().get("error") or {}


@pytest.fixture
def keys(stack: Stack) -> tuple[str, str]:
    """Keys of a healthy and of a hostile tenant."""
    return stack.key("healthy"), stack.key("hostile")


@pytest.mark.e2e
@pytest.mark.load
@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [WORST, pytest.param(tuple(HOSTILE | BOUNDED), marks=pytest.mark.long)],
    ids=["worst", "all"],
)
async def test_hostile_structures_do_not_disturb_healthy_streams(
    stack: Stack, keys: tuple[str, str], names: Sequence[str]
) -> None:
    headers, hostile_headers = ({"authorization": f"Bearer {key}"} for key in keys)
    over = asyncio.Event()
    # A structure may wait for a sandbox, for its start, and for its compilation.
    patience = 3 * PATIENCE_SECONDS
    async with (
        httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=patience) as healthy,
        httpx.AsyncClient(base_url=stack.url, headers=hostile_headers, timeout=patience) as hostile,
    ):
        undisturbed = Healthy()
        await undisturbed.read(healthy)
        streams = [Healthy() for _ in range(HEALTHY_STREAMS)]
        reading = [asyncio.create_task(each.read_until(healthy, over)) for each in streams]
        while not all(each.events for each in streams):
            await asyncio.sleep(0.02)
        statuses, meanwhile = {}, {}
        for name in names:
            before = [each.events for each in streams]
            statuses[name], error = await ask(hostile, name)
            assert statuses[name] < 500, error
            if OUT_OF_TIME in error.get("message", ""):
                after = [each.events for each in streams]
                meanwhile[name] = [b - a for a, b in zip(before, after, strict=True)]
        over.set()
        await asyncio.gather(*reading)
    # Each stream progressed while these kept a core busy. A stalled gateway would have had one
    # event to send after each of them.
    assert meanwhile
    moved = [sum(events) for events in zip(*meanwhile.values(), strict=True)]
    assert min(moved) > EVENTS_OF_STANDSTILL * len(meanwhile), meanwhile
    accepted = {name for name, status in statuses.items() if status == 200}
    assert accepted <= set(BOUNDED)
    assert {text for each in streams for text in each.texts} == undisturbed.texts
