"""Anthropic's Messages through its client, with the real engine: turns of an agent."""

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.e2e.chat.tools import PARIS, WEATHER
from tests.e2e.test_usage import BLOCK_TOKENS
from tests.support.stack import MODEL

pytestmark = pytest.mark.e2e

TOOLS = [
    {
        "name": WEATHER["function"]["name"],
        "description": WEATHER["function"]["description"],
        "input_schema": WEATHER["function"]["parameters"],
    }
]
LONG = 440
"""Repetitions that make a prompt of many blocks of the cache."""


@pytest.fixture(scope="module")
def agent(client: OpenAI) -> Iterator[Anthropic]:
    """The client, with the address and the key of the other one."""
    url = str(client.base_url).removesuffix("/v1/")
    with Anthropic(base_url=url, api_key=client.api_key, max_retries=0) as anthropic:
        yield anthropic


def turn(agent: Anthropic, messages: list[Any], **parameters: Any) -> Any:
    """Return a message, read as a stream, which equals the whole one and what was counted."""
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, **parameters}
    counted = agent.messages.count_tokens(**asked).input_tokens
    asked |= {"max_tokens": 200, "extra_body": {"temperature": 0}}
    with agent.messages.stream(**asked) as stream:
        message = stream.get_final_message()
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    whole = agent.messages.create(**asked)
    shown = [block.to_dict() | {"id": None, "signature": None} for block in message.content]
    for each in shown:
        each.pop("parsed_output", None)
    assert shown == [block.to_dict() | {"id": None, "signature": None} for block in whole.content]
    assert whole.stop_reason == message.stop_reason
    return message


def test_agent_calls_a_tool_and_reads_its_result(agent: Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": PARIS}]
    call = turn(agent, messages, tools=TOOLS)
    [use] = [block for block in call.content if block.type == "tool_use"]
    assert (use.name, use.input, call.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"degrees": 21}'}
    messages += [
        {"role": "assistant", "content": call.content},
        {"role": "user", "content": [result]},
    ]
    answer = turn(agent, messages, tools=TOOLS)
    assert answer.content[-1].text.strip() == "It is 21 degrees in Paris."
    assert answer.stop_reason == "end_turn"


def test_turn_begins_with_the_prompt_of_the_turn_before(agent: Anthropic) -> None:
    # The attribution line of Claude Code differs in each request.
    system: list[dict[str, Any]] = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "Be brief. " * LONG, "cache_control": {"type": "ephemeral"}},
    ]
    messages: list[Any] = [{"role": "user", "content": PARIS}]
    forced = {"type": "tool", "name": "get_weather"}
    asked: dict[str, Any] = {"system": system, "tools": TOOLS, "tool_choice": forced}
    before = turn(agent, messages, **asked)
    [use] = before.content
    result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"degrees": 21}'}
    messages += [
        {"role": "assistant", "content": before.content},
        {"role": "user", "content": [result]},
        {"role": "system", "content": "<total_tokens>9</total_tokens>"},
    ]
    system[0]["text"] = "x-anthropic-billing-header: cch=2;"
    usage = turn(agent, messages, **asked).usage
    known = before.usage.input_tokens + before.usage.cache_read_input_tokens
    cached = usage.cache_read_input_tokens
    assert cached >= known // BLOCK_TOKENS * BLOCK_TOKENS
    assert cached > 0.9 * (usage.input_tokens + cached)


def test_tools_are_forced_and_their_input_is_enforced(agent: Anthropic) -> None:
    forced = {"type": "tool", "name": "get_weather"}
    message = turn(agent, [{"role": "user", "content": "Hello"}], tools=TOOLS, tool_choice=forced)
    assert message.stop_reason == "tool_use"
    assert [(block.type, list(block.input)) for block in message.content] == [
        ("tool_use", ["city"])
    ]


def test_thinking_is_a_block_that_returns(agent: Anthropic) -> None:
    asked = {"role": "user", "content": "What is 27 + 35?"}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 1500, "messages": [asked]}
    request |= {"thinking": thinking, "extra_body": {"temperature": 0}}
    message = agent.messages.create(**request)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].signature
    again = [asked, {"role": "assistant", "content": message.content}, asked]
    assert turn(agent, again, thinking={"type": "disabled"}).content[0].type == "text"
