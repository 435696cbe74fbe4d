"""Reasoning through OpenAI's client: separate from the content, bounded, hidden, and counted."""

from functools import partial
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.chat.chats import (
    THINKING,
    assistant,
    chat,
    chat_both_ways,
    counts,
    deltas,
    joined,
    message_of,
    reasoning_of,
    streamed,
    text_of,
    user,
)

pytestmark = pytest.mark.e2e

SUM = "What is 27 + 35?"
THOUGHT = "\n20 + 30 = 50, 7 + 5 = 12, 50 + 12 = 62\n"
SAID = "\n\n27 + 35 = 62"
BUDGETS: dict[str, dict[str, Any]] = {
    "thinking_budget": {"thinking_budget": 10},
    "thinking_token_budget": {"thinking_token_budget": 10},
    "reasoning_budget_tokens": {"reasoning_budget_tokens": 10},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 10}},
    "reasoning_effort": {"reasoning_effort": 10},
    "reasoning": {"reasoning": {"max_tokens": 10}},
}


@each_at_once(
    "how",
    [
        THINKING,
        {"reasoning_effort": "high"},
        {"reasoning_effort": True},
        {"thinking": {"type": "enabled"}},
        {"enable_thinking": True},
        {"reasoning": {"effort": "high"}},
        {"reasoning": {"enabled": True}},
    ],
)
def test_reasoning_is_separate_from_the_content(client: OpenAI, how: dict[str, Any]) -> None:
    answer = chat_both_ways(client, SUM, **how)

    assert reasoning_of(answer) == THOUGHT
    assert text_of(answer) == SAID
    assert answer.choices[0].finish_reason == "stop"
    _, completion_tokens, reasoning_tokens = counts(answer.usage)
    assert completion_tokens == 47
    assert 0 < reasoning_tokens < completion_tokens


def test_stream_sends_reasoning_first(client: OpenAI) -> None:
    first, *middle, last = deltas(streamed(client, SUM, **THINKING))

    names = [name for delta in middle for name in delta]
    assert first == {"role": "assistant", "content": ""}
    assert names == sorted(names, reverse=True)
    assert {*names} == {"reasoning_content", "content"}
    assert last == {}


@each_at_once(
    "how",
    [
        {},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "default"},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
    ],
)
def test_model_reasons_only_on_request(client: OpenAI, how: dict[str, Any]) -> None:
    answer = chat_both_ways(client, SUM, max_tokens=60, **how)

    assert reasoning_of(answer) is None
    assert "reasoning_content" not in message_of(answer).to_dict()
    assert counts(answer.usage)[2] == 0


@each_at_once("name", BUDGETS)
def test_budget_ends_the_reasoning(client: OpenAI, name: str) -> None:
    answer = chat_both_ways(client, SUM, max_tokens=60, **THINKING, **BUDGETS[name])

    reasoning = reasoning_of(answer)
    assert reasoning is not None
    assert THOUGHT.startswith(reasoning)
    assert len(reasoning) < len(THOUGHT)
    assert text_of(answer)
    # The marker at the end of the reasoning may count as a part of it.
    assert 10 <= counts(answer.usage)[2] <= 11


def test_budget_of_zero_ends_the_reasoning_at_once(client: OpenAI) -> None:
    answer = chat_both_ways(client, SUM, max_tokens=60, thinking_budget=0, **THINKING)

    assert reasoning_of(answer) is None
    assert text_of(answer)
    assert counts(answer.usage)[2] <= 1


def test_budget_that_is_not_reached_has_no_effect(client: OpenAI) -> None:
    answers = at_once(
        *(partial(chat, client, SUM, thinking_budget=budget, **THINKING) for budget in (200, -1))
    )
    for answer in answers:
        assert (reasoning_of(answer), text_of(answer)) == (THOUGHT, SAID)


def test_hidden_reasoning_is_counted_and_never_returned(client: OpenAI) -> None:
    options: dict[str, Any] = {
        "include_reasoning": False,
        "return_token_ids": True,
        "logprobs": True,
        **THINKING,
    }
    answer, shown = at_once(
        lambda: chat_both_ways(client, SUM, **options), lambda: chat(client, SUM, **THINKING)
    )

    [choice] = answer.choices
    assert reasoning_of(answer) is None
    assert text_of(answer) == SAID
    assert counts(answer.usage) == counts(shown.usage)
    _, completion_tokens, reasoning_tokens = counts(answer.usage)
    assert choice.logprobs is not None
    reported = choice.logprobs.content or []
    assert "".join(token.token for token in reported) == SAID
    token_ids: list[Any] = choice.to_dict()["token_ids"]  # type: ignore[assignment]
    assert len(token_ids) <= completion_tokens - reasoning_tokens


def test_reasoning_may_be_cut_off(client: OpenAI) -> None:
    answer = chat_both_ways(client, SUM, max_tokens=6, **THINKING)

    assert THOUGHT.startswith(reasoning_of(answer) or "-")
    assert not message_of(answer).content
    assert answer.choices[0].finish_reason == "length"
    assert counts(answer.usage)[1:] == (6, 6)


def test_dialect_vllm_has_the_reasoning_under_both_names(client: OpenAI) -> None:
    vllm: dict[str, Any] = {"extra_headers": {"x-api-dialect": "vllm"}, **THINKING}
    answer, chunks = at_once(
        lambda: chat(client, SUM, **vllm), lambda: streamed(client, SUM, **vllm)
    )
    message = message_of(answer).to_dict()

    for whole in (message, joined(chunks)):
        assert whole["reasoning"] == whole["reasoning_content"] == THOUGHT


@each_at_once("name", ["reasoning_content", "reasoning"])
def test_reasoning_in_earlier_messages_is_accepted(client: OpenAI, name: str) -> None:
    messages = [
        user("Hello"),
        assistant("Hello! How can I help you?", **{name: THOUGHT}),
        user("What is 7 + 8?"),
    ]

    answer = chat_both_ways(client, messages)

    assert text_of(answer) == "7 + 8 = 15"
    # The model's template omits the reasoning of earlier answers.
    assert counts(answer.usage)[0] == 25
