"""Hostile grammars beside healthy streams, on the real engine."""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from tests.structure.test_checker import BOUNDED, HOSTILE
from tests.support.stack import MODEL, Stack

HEALTHY_STREAMS = 16
LONGEST_GAP_SECONDS = 0.5
"""Between two chunks of a healthy stream. It was 0.08 s beside six times as much work as processors."""
LONGEST_ANSWER_SECONDS = 2.0
"""For a hostile request: a second for the grammar, and as much for a machine with two processors."""


def parameter(kind: str, source: Any) -> dict[str, Any]:
    """Return a structure as a request has it."""
    match kind:
        case "json_schema":
            return {"json_schema": source}
        case "regex" | "choice":
            return {"structured_outputs": {kind: source}}
        case "gbnf":
            return {"grammar": source}
        case _:
            return {"grammar": {"type": kind, "value": source}}


async def healthy_gap(http: httpx.AsyncClient, over: asyncio.Event) -> float:
    """Stream until it is over; return the longest time between two events, the first one's left out."""
    longest = 0.0
    while not over.is_set():
        body = {"model": MODEL, "prompt": "The harbour", "max_tokens": 400, "ignore_eos": True}
        last = None
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                assert '"error"' not in line
                if line.startswith("data: "):
                    now = time.perf_counter()
                    longest = max(longest, now - (last or now))
                    last = now
    return longest


async def ask(http: httpx.AsyncClient, name: str) -> tuple[int, float, str]:
    """Send one structure; return status, seconds and the error's code."""
    kind, source = (HOSTILE | BOUNDED)[name]
    body = {"model": MODEL, "prompt": "x", "max_tokens": 8, **parameter(kind, source)}
    start = time.perf_counter()
    answer = await http.post(
        "/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    seconds = time.perf_counter() - start
    return answer.status_code, seconds, (answer.json().get("error") or {}).get("code", "")


@pytest.fixture
def keys(stack: Stack) -> tuple[str, str]:
    """Keys of a healthy and of a hostile tenant."""
    return stack.key("healthy"), stack.key("hostile")


@pytest.mark.e2e
@pytest.mark.load
@pytest.mark.timeout(300)
async def test_hostile_structures_do_not_disturb_healthy_streams(
    stack: Stack, keys: tuple[str, str]
) -> None:
    headers, hostile_headers = ({"authorization": f"Bearer {key}"} for key in keys)
    over = asyncio.Event()
    async with (
        httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=60) as healthy,
        httpx.AsyncClient(base_url=stack.url, headers=hostile_headers, timeout=60) as hostile,
    ):
        # The first one starts the sandboxes.
        await ask(hostile, "regex of stars")
        streams = [asyncio.create_task(healthy_gap(healthy, over)) for _ in range(HEALTHY_STREAMS)]
        await asyncio.sleep(2)
        answers = {name: await ask(hostile, name) for name in HOSTILE | BOUNDED}
        over.set()
        gaps = await asyncio.gather(*streams)
    assert {code for status, _, code in answers.values() if status >= 500} <= {"overloaded"}
    accepted = {name for name, (status, _, _) in answers.items() if status == 200}
    assert accepted <= set(BOUNDED)
    slow = {name: answer for name, answer in answers.items() if answer[1] > LONGEST_ANSWER_SECONDS}
    assert slow == {}
    assert max(gaps) < LONGEST_GAP_SECONDS, sorted(gaps)
