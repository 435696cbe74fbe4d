"""Concurrent chats of every kind: each is parsed as if it were alone."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.e2e.chat.chats import THINKING, Message, finish_reasons, joined, parameters
from tests.e2e.chat.tools import ADD, PARIS, TIME, WEATHER

pytestmark = pytest.mark.e2e

EACH = 6
"""Chats of each kind."""


def called(name: str, arguments: str) -> Message:
    """Return a message of one call."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def text_message(content: str, **more: str) -> Message:
    """Return a message of text."""
    return {"role": "assistant", "content": content, **more}


KINDS: list[tuple[str, dict[str, Any], Message, str]] = [
    ("What is the capital of Italy?", {}, text_message("The capital of Italy is Rome."), "stop"),
    ("Goodbye", {}, text_message("Goodbye! Have a nice day! 😀🌞"), "stop"),
    (
        "What is 27 + 35?",
        THINKING,
        text_message(
            "\n\n27 + 35 = 62", reasoning_content="\n20 + 30 = 50, 7 + 5 = 12, 50 + 12 = 62\n"
        ),
        "stop",
    ),
    (PARIS, {"tools": [WEATHER, ADD]}, called("get_weather", '{"city": "Paris"}'), "tool_calls"),
    ("Add 12 and 30.", {"tools": [ADD]}, called("add", '{"a": 12, "b": 30}'), "tool_calls"),
    ("Hello", {"tools": [WEATHER, TIME]}, text_message("Hello! How can I help you?"), "stop"),
]
"""Question, options, message, and finish reason."""


async def test_concurrent_chats_equal_chats_alone(async_client: AsyncOpenAI) -> None:
    async def ask(index: int) -> tuple[Message, list[str]]:
        asked, options, _, _ = KINDS[index % len(KINDS)]
        arguments = parameters(asked, options | {"stream": True})
        stream: Any = await async_client.chat.completions.create(**arguments)
        async with stream:
            chunks = [chunk async for chunk in stream]
        return joined(chunks), finish_reasons(chunks)

    reported = await asyncio.gather(*(ask(index) for index in range(EACH * len(KINDS))))

    assert reported == [(message, [reason]) for _, _, message, reason in KINDS] * EACH
