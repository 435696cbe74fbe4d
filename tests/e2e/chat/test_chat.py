"""Chats through OpenAI's client, whole and streamed: text, finish reason and usage."""

from functools import partial
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.chat.chats import (
    assistant,
    chat,
    chat_both_ways,
    counts,
    deltas,
    finish_reasons,
    joined,
    parameters,
    streamed,
    text_of,
    user,
)
from tests.e2e.completions import complete, text
from tests.support.stack import MODEL, Stack

pytestmark = pytest.mark.e2e

BLOCK_TOKENS = 128
"""Block size of vLLM's prefix cache on a CPU."""

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
ITALY = "What is the capital of Italy?"
ROME = "The capital of Italy is Rome."
COUNT = "Count from 1 to 10."
ANSWERS = {
    ITALY: (ROME, 12, 9),
    "Hello": ("Hello! How can I help you?", 5, 9),
    COUNT: ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10", 13, 30),
    "What is 7 + 8?": ("7 + 8 = 15", 12, 9),
    "Goodbye": ("Goodbye! Have a nice day! 😀🌞", 8, 22),
    "How do you write Tokyo in its own language?": ("東京", 16, 7),
}
"""The model's answer to a user, and the tokens of prompt and answer."""

TURNS = [user(ITALY), assistant(ROME), user("What is the capital of Japan?")]


@each_at_once("asked", ANSWERS)
def test_question_is_answered(client: OpenAI, asked: str) -> None:
    answer = chat_both_ways(client, asked)

    expected, prompt_tokens, completion_tokens = ANSWERS[asked]
    assert text_of(answer) == expected
    assert counts(answer.usage) == (prompt_tokens, completion_tokens, 0)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)


@each_at_once(
    "messages, expected, prompt_tokens",
    [
        ([SYSTEM, user(ITALY)], ROME, None),
        ([{**SYSTEM, "role": "developer"}, user(ITALY)], ROME, None),
        (TURNS, "The capital of Japan is Tokyo.", 31),
        ([user([{"type": "text", "text": ITALY}])], ROME, 12),
    ],
)
def test_conversation_is_answered(
    client: OpenAI, messages: Any, expected: str, prompt_tokens: int | None
) -> None:
    answer = chat_both_ways(client, messages)

    assert text_of(answer) == expected
    assert prompt_tokens in (None, counts(answer.usage)[0])


@each_at_once(
    "messages, prompt",
    [
        ([user("Write a short story.")], "<|user|>Write a short story.\n</think><|assistant|>"),
        (
            [SYSTEM, *TURNS],
            (
                f"<|system|>You are a helpful assistant.\n<|user|>{ITALY}\n<|assistant|>{ROME}</s>"
                "<|user|>What is the capital of Japan?\n</think><|assistant|>"
            ),
        ),
    ],
)
def test_chat_equals_the_completion_of_its_rendered_prompt(
    client: OpenAI, messages: Any, prompt: str
) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 100}
    answer, completion = at_once(
        lambda: chat_both_ways(client, messages, **options),
        lambda: complete(client, prompt, **options),
    )

    assert text_of(answer) == text(completion)
    assert counts(answer.usage) == counts(completion.usage)


def test_stream_begins_with_the_role_and_ends_with_the_finish_reason(client: OpenAI) -> None:
    chunks = streamed(client, ITALY)

    first, *middle, last = deltas(chunks)
    assert first == {"role": "assistant", "content": ""}
    assert last == {}
    assert all(each.keys() == {"content"} and each["content"] for each in middle)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert counts(chunks[-1].usage) == (12, 9, 0)


def test_choices_have_their_own_index(client: OpenAI) -> None:
    answer = chat_both_ways(client, COUNT, n=3)

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {ANSWERS[COUNT][0]}
    assert counts(answer.usage) == (13, 3 * 30, 0)


def test_choices_are_sampled_independently(client: OpenAI) -> None:
    options: dict[str, Any] = {"n": 3, "temperature": 1.5, "seed": 4, "max_tokens": 30}
    answer, chunks = at_once(
        lambda: chat(client, "Tell me.", **options), lambda: streamed(client, "Tell me.", **options)
    )

    assert len({choice.message.content for choice in answer.choices}) == 3
    assert len({joined(chunks, index)["content"] for index in range(3)}) == 3


@each_at_once("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_bounds_the_length(client: OpenAI, name: str) -> None:
    answer = chat_both_ways(client, COUNT, **{name: 5})

    assert ANSWERS[COUNT][0].startswith(text_of(answer))
    assert answer.choices[0].finish_reason == "length"
    assert counts(answer.usage)[1] == 5


@each_at_once("stop", [" 6,", [" never", "6"]])
def test_stop_ends_the_answer(client: OpenAI, stop: Any) -> None:
    answer = chat_both_ways(client, COUNT, stop=stop)

    assert text_of(answer).rstrip() == "1, 2, 3, 4, 5,"
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_cover_the_tokens_of_the_content(client: OpenAI) -> None:
    answer, chunks = at_once(
        lambda: chat(client, "Goodbye", logprobs=True, top_logprobs=3),
        lambda: streamed(client, "Goodbye", logprobs=True, top_logprobs=3),
    )

    [choice] = answer.choices
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    # The end of the text has none.
    assert len(tokens) == counts(answer.usage)[1] - 1
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    assert "".join(token.token for token in tokens) == text_of(answer)
    written = b"".join(bytes(token.bytes or []) for token in tokens)
    assert written == "".join(token.token for token in tokens).encode()
    reported = [
        token.token
        for chunk in chunks
        for each in chunk.choices
        if each.logprobs is not None
        for token in each.logprobs.content or []
    ]
    assert reported == [token.token for token in tokens]


def test_logprobs_are_absent_unless_requested(client: OpenAI) -> None:
    answers = at_once(lambda: chat(client, ITALY), lambda: chat(client, ITALY, logprobs=False))
    assert [answer.choices[0].logprobs for answer in answers] == [None, None]


def test_cached_tokens_are_counted(stack: Stack, client: OpenAI) -> None:
    owner = client.with_options(api_key=stack.key("chat-cache-owner"))
    messages = [{**SYSTEM, "content": "You are a helpful assistant. " * 60}, user(ITALY)]

    def cached() -> int:
        usage = chat(owner, messages).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached() == 0
    assert cached() >= BLOCK_TOKENS


@each_at_once("how", ["partial", "continue_final_message"])
def test_last_message_is_continued(client: OpenAI, how: str) -> None:
    begun = "The capital of Italy"
    options: dict[str, Any] = {}
    if how == "continue_final_message":
        options = {how: True, "add_generation_prompt": False}
    last = assistant(begun, partial=True) if how == "partial" else assistant(begun)
    answer = chat_both_ways(client, [user(ITALY), last], **options)

    assert begun + text_of(answer) == ROME
    assert counts(answer.usage)[2] == 0


def test_seed_reproduces_a_response(client: OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "max_tokens": 20}
    answers = at_once(
        *(partial(chat, client, "Tell me.", seed=seed, **options) for seed in (1, 1, 2))
    )
    first, second, other = map(text_of, answers)

    assert first == second != other


async def test_asynchronous_client_is_served(async_client: AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.create(**parameters(ITALY, {}))
    stream: Any = await async_client.chat.completions.create(**parameters(ITALY, {"stream": True}))
    async with stream:
        chunks = [chunk async for chunk in stream]

    assert answer.choices[0].message.content == joined(chunks)["content"] == ROME
    assert finish_reasons(chunks) == ["stop"]
