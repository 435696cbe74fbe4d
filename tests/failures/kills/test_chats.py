"""Engines and workers are killed under chats, which equal undisturbed ones."""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import uvloop

from tests.failures.chaos.run import RESUMED
from tests.failures.chaos.transcript import Transcript
from tests.failures.kills.killing import (
    LONG_KILLS,
    STREAMS,
    TOKENS_BEFORE_A_KILL,
    WORKERS,
    StreamRequest,
    assert_kills_change_nothing,
    engine_core,
    kill_worker,
    read,
    start_workers,
    undisturbed,
)
from tests.failures.kills.test_completions import stream_request as asked_completion
from tests.failures.proofs.until import engine_tokens, generating
from tests.support.processes import is_alive
from tests.support.stack import ENGINE_START_SECONDS, Stack, metric, wait_for_metric

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3_600)]

MOST_KILLS = 5
ENGINES_DIED = f'{RESUMED}{{reason="engine_died"}}'
RESTARTS = "sluice_worker_engine_restarts_total"

SCHEMAS: dict[str, dict[str, Any]] = {
    "take_note": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "minLength": 30, "maxLength": 60},
            "text": {"type": "string", "minLength": 300, "maxLength": 400},
        },
        "required": ["title", "text"],
        "additionalProperties": False,
    },
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
DESCRIPTIONS = {"take_note": "Keep a text", "get_weather": "Get the weather in a city"}
NOTE, WEATHER = (
    {
        "type": "function",
        "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
)
NAMED = {"type": "function", "function": {"name": "take_note"}}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Write a short story.", {"max_tokens": 200, "ignore_eos": True}),
    "reasoning": (
        "What is 27 + {}?",
        {"max_tokens": 200, "ignore_eos": True, "thinking_budget": 120, **THINKS},
    ),
    "hidden reasoning": (
        "What is 35 + {}?",
        {
            "max_tokens": 150,
            "ignore_eos": True,
            "thinking_budget": 60,
            "include_reasoning": False,
            **THINKS,
        },
    ),
    "named": ("Note {}.", {"max_tokens": 600, "tools": [WEATHER, NOTE], "tool_choice": NAMED}),
    "required": (
        "Note {}.",
        {
            "max_tokens": 600,
            "tools": [NOTE],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "thinking_budget": 40,
            **THINKS,
        },
    ),
    "auto": (
        "What is the weather in Paris?",
        {"max_tokens": 150, "tools": [WEATHER], "temperature": 0, "ignore_eos": True},
    ),
    "n": ("Hello {}", {"max_tokens": 120, "n": 2, "ignore_eos": True}),
    "stop": (
        "Count from {} to 1000.",
        {"max_tokens": 200, "ignore_eos": True, "stop": [", never", " and never"]},
    ),
}


def stream_request(number: int) -> StreamRequest:
    """Return the request of one stream; the streams differ in kind, prompt and seed."""
    text, body = list(KINDS.values())[number % len(KINDS)]
    messages = [{"role": "user", "content": text.format(10 + number)}]
    temperature = (0, 1.0, 0.8, 1.2)[number // len(KINDS) % 4]
    body = {"messages": messages, "seed": 2_000 + number, "temperature": temperature, **body}
    return StreamRequest("/v1/chat/completions", body)


def check_kinds(reported: Sequence[Transcript]) -> None:
    """Assert that the responses have what their kinds are for."""
    by_kind = {
        kind: [each.choices[0] for each in reported[place :: len(KINDS)]]
        for place, kind in enumerate(KINDS)
    }
    for kind in ("reasoning", "required"):
        assert all(choice.reasoning for choice in by_kind[kind]), kind
    assert not any(choice.reasoning for choice in by_kind["hidden reasoning"])
    for kind in ("named", "required"):
        for choice in by_kind[kind]:
            (call,) = choice.calls
            jsonschema.validate(json.loads(call.arguments), SCHEMAS["take_note"])
    assert {choice.calls[0].arguments for choice in by_kind["auto"]} == {'{"city": "Paris"}'}


def test_streams_resume_in_the_engine_that_replaces_a_killed_one(stack: Stack) -> None:
    """Chats and completions share the streams. The worker is killed last, and leaves no process."""
    (worker, other) = WORKERS
    start_workers(stack, [worker])
    if other in stack.processes:
        stack.stop(other)
    key = stack.key()
    # Each kind once.
    chats = [stream_request(number) for number in range(len(KINDS))]
    streams = [*chats, *(asked_completion(number) for number in range(len(KINDS)))]

    async def prove() -> None:
        expected = await undisturbed(stack, key, streams)
        check_kinds(expected[: len(chats)])
        # On a busy machine a kill may come after the end of all streams; then it proves nothing.
        for kills in range(1, MOST_KILLS + 1):
            tokens = engine_tokens(stack, worker)
            async with asyncio.TaskGroup() as tasks:
                reading = [tasks.create_task(read(stack, key, each)) for each in streams]
                await generating(stack, worker=worker, after=tokens, tokens=TOKENS_BEFORE_A_KILL)
                core = engine_core(stack, worker)
                os.kill(core, signal.SIGKILL)
            differences = [
                each.result().difference(other)
                for each, other in zip(reading, expected, strict=True)
            ]
            assert not any(differences), differences
            # Without a waiting stream, the next engine may still be starting.
            wait_for_metric(stack.worker_url(worker), RESTARTS, kills, seconds=ENGINE_START_SECONDS)
            assert not is_alive(core)
            if metric(stack.operators, ENGINES_DIED):
                break
        else:
            pytest.fail(f"none of {MOST_KILLS} kills interrupted a stream")
        await kill_worker(stack, worker)

    uvloop.run(prove())


@pytest.mark.long
def test_chats_of_killed_workers_equal_undisturbed_ones(stack: Stack) -> None:
    streams = [stream_request(number) for number in range(STREAMS)]
    assert_kills_change_nothing(stack, streams, kills=LONG_KILLS, check=check_kinds)
