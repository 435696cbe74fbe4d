"""Engines and workers are killed under chats, which equal undisturbed ones."""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from functools import partial
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import uvloop

from gateway.billing.ledger.drain import Drain
from gateway.records.usage_record import Outcome
from tests.failures.chaos.run import PREEMPTED, RESUMED
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
from tests.failures.proofs.ledger import open_books
from tests.failures.proofs.until import engine_tokens, generating, until
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
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
]
NOTE, WEATHER = _TOOLS
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


COMPLETIONS, MESSAGES, RESPONSES = "/v1/completions", "/v1/messages", "/v1/responses"
_STORY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 150, "ignore_eos": True}
_RESPONSE: dict[str, Any] = {"max_output_tokens": 150, "ignore_eos": True}


def _message(text: str, **parameters: Any) -> StreamRequest:
    """Return a message, which has no seed."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 1_100}
    return StreamRequest(MESSAGES, body | parameters)


OTHERS: dict[str, StreamRequest] = {
    "samplers": StreamRequest(
        COMPLETIONS,
        {**_STORY, "seed": 1, "dry_multiplier": 2.0, "xtc_probability": 0.3, "top_k": 40},
    ),
    "mirostat": StreamRequest(COMPLETIONS, {**_STORY, "seed": 2, "mirostat": 2}),
    "grammar": StreamRequest(
        COMPLETIONS,
        {
            "prompt": "Note 4.",
            "seed": 3,
            "max_tokens": 600,
            "structured_outputs": {"json": SCHEMAS["take_note"]},
        },
    ),
    "best_of": StreamRequest(
        COMPLETIONS, {**_STORY, "seed": 4, "n": 2, "best_of": 4, "stream": False}
    ),
    "message": _message("Write a short story."),
    "thinking message": _message(
        "What is 27 + 35?", thinking={"type": "enabled", "budget_tokens": 1_024}
    ),
    "message with a call": _message(
        "Note 5.",
        tools=[{"name": "take_note", "input_schema": SCHEMAS["take_note"]}],
        tool_choice={"type": "tool", "name": "take_note"},
    ),
    "response": StreamRequest(RESPONSES, {"input": "Write a short story.", "seed": 5, **_RESPONSE}),
    "thinking response": StreamRequest(
        RESPONSES,
        {"input": "What is 27 + 31?", "seed": 6, **_RESPONSE, **THINKS},
    ),
    "response with a call": StreamRequest(
        RESPONSES,
        {
            "input": "Note 6.",
            "seed": 7,
            "tools": [{"type": "function", **NOTE["function"]}],
            "tool_choice": {"type": "function", "name": "take_note"},
        },
    ),
}
"""Streams of the other kinds and APIs."""
FILLERS = [
    StreamRequest(
        COMPLETIONS,
        {"prompt": f"First {n}", "n": 8, "max_tokens": 60, "ignore_eos": True, "seed": 8 * n},
    )
    for n in range(STREAMS // 8)
]
"""Requests that fill an engine."""


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


def check_others(reported: Sequence[Transcript]) -> None:
    """Assert that messages and responses have what their kinds are for, and were counted."""
    by_kind = dict(zip(OTHERS, reported, strict=True))
    for kind, transcript in by_kind.items():
        assert transcript.usage, kind
        choice = transcript.choices[0]
        if kind.endswith("call"):
            (call,) = choice.calls
            jsonschema.validate(json.loads(call.arguments), SCHEMAS["take_note"])
        else:
            assert choice.text or choice.reasoning, kind
        assert bool(choice.reasoning) == kind.startswith("thinking"), kind


@pytest.mark.slow
def test_streams_survive_preemption_and_the_death_of_their_engine(stack: Stack) -> None:
    """Streams of all APIs are preempted for another tenant, and then their engine is killed.

    The engine that replaces it continues them and those of the other tenant. The worker is killed
    last, and leaves no process.
    """
    (worker, other) = WORKERS
    start_workers(stack, [worker])
    if other in stack.processes:
        stack.stop(other)
    key, first = stack.key("many"), stack.key("first", weight=100.0)
    # Each kind once.
    chats = [stream_request(number) for number in range(len(KINDS))]
    completions = [asked_completion(number) for number in range(len(KINDS))]
    streams = [*chats, *completions, *OTHERS.values()]
    url = stack.worker_url(worker)

    async def prove() -> None:
        expected = await undisturbed(stack, key, streams)
        check_kinds(expected[: len(chats)])
        check_others(expected[-len(OTHERS) :])
        fillings = await undisturbed(stack, first, FILLERS)
        # On a busy machine a kill may come after the end of all streams; then it proves nothing.
        for kills in range(1, MOST_KILLS + 1):
            tokens, before = engine_tokens(stack, worker), metric(url, PREEMPTED)
            async with asyncio.TaskGroup() as tasks:
                reading = [tasks.create_task(read(stack, key, each)) for each in streams]
                await generating(stack, worker=worker, after=tokens, tokens=TOKENS_BEFORE_A_KILL)
                filling = [tasks.create_task(read(stack, first, each)) for each in FILLERS]
                await until(
                    partial(gave_way, url, before + len(streams), filling), what="preemption"
                )
                preempted = metric(url, PREEMPTED) - before
                core = engine_core(stack, worker)
                os.kill(core, signal.SIGKILL)
            differences = [
                each.result().difference(other)
                for each, other in zip([*reading, *filling], [*expected, *fillings], strict=True)
            ]
            assert not any(differences), differences
            # Without a waiting stream, the next engine may still be starting.
            wait_for_metric(url, RESTARTS, kills, seconds=ENGINE_START_SECONDS)
            assert not is_alive(core)
            if metric(stack.operators, ENGINES_DIED) and preempted >= len(streams):
                break
        else:
            pytest.fail(f"none of {MOST_KILLS} kills interrupted preempted streams")
        await kill_worker(stack, worker)
        for tenant, transcripts in (("many", expected), ("first", fillings)):
            await check_ledger(stack, tenant, [*transcripts] * (kills + 1))

    uvloop.run(prove())


def gave_way(url: str, preempted: float, filling: Sequence["asyncio.Task[Transcript]"]) -> bool:
    """Whether so many sequences were preempted, or none will be any more."""
    return metric(url, PREEMPTED) >= preempted or all(each.done() for each in filling)


async def check_ledger(stack: Stack, tenant: str, transcripts: Sequence[Transcript]) -> None:
    """Assert that a tenant has one row with the usage of each of these responses."""
    async with open_books(stack) as books:
        await books.open_at_most(0)
        await Drain(books.redis, books.database).run()
        # A request that was refused, and sent again, has another outcome.
        rows = [row for row in await books.rows(tenant) if row["outcome"] == Outcome.FINISHED]
    counts = [tuple((each.usage or {}).values()) for each in transcripts]
    billed = [(row["prompt_tokens"], row["completion_tokens"]) for row in rows]
    assert sorted(billed) == sorted(counts)


@pytest.mark.long
def test_chats_of_killed_workers_equal_undisturbed_ones(stack: Stack) -> None:
    """Two tenants ask for twice the sequences of a worker, and preempt each other."""
    chats = [stream_request(number) for number in range(STREAMS)]

    def check(reported: Sequence[Transcript]) -> None:
        check_kinds(reported[:STREAMS])
        check_others(reported[STREAMS:])

    streams = [*chats, *OTHERS.values()]
    assert_kills_change_nothing(stack, streams, kills=LONG_KILLS, check=check, others=FILLERS * 2)
