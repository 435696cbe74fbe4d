"""Chats with the official client, and joining of streams."""

import inspect
from collections.abc import Iterable
from typing import Any, cast

from openai import OpenAI, Stream
from openai.resources.chat import Completions
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage

from tests.e2e.at_once import at_once
from tests.support.stack import MODEL

Message = dict[str, Any]

_KNOWN = inspect.signature(Completions.create).parameters.keys()
"""Parameters of the official client; others go into `extra_body`."""

THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
"""Makes the model reason before its answer."""


def user(content: Any) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> Message:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": content, **more}


def parameters(messages: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the client's methods. A text becomes one user message."""
    if isinstance(messages, str):
        messages = [user(messages)]
    known = {name: value for name, value in options.items() if name in _KNOWN}
    extra = {name: value for name, value in options.items() if name not in _KNOWN}
    return {"model": MODEL, "messages": messages, "temperature": 0, "extra_body": extra, **known}


def chat(client: OpenAI, messages: Any, **options: Any) -> ChatCompletion:
    """Return a whole response."""
    return cast("ChatCompletion", client.chat.completions.create(**parameters(messages, options)))


def streamed(client: OpenAI, messages: Any, **options: Any) -> list[ChatCompletionChunk]:
    """Return the chunks of a streamed response, once all of them have arrived."""
    options |= {"stream": True}
    answer: Any = client.chat.completions.create(**parameters(messages, options))
    with cast("Stream[ChatCompletionChunk]", answer) as stream:
        return list(stream)


def chat_both_ways(client: OpenAI, messages: Any, **options: Any) -> ChatCompletion:
    """Return a whole response, after a check that the stream is equal."""
    usage = {"stream_options": {"include_usage": True}}
    answer, (*chunks, extra) = at_once(
        lambda: chat(client, messages, **options),
        lambda: streamed(client, messages, **usage, **options),
    )
    assert extra.choices == []
    assert counts(extra.usage) == counts(answer.usage)
    for choice in answer.choices:
        assert joined(chunks, choice.index) == comparable(choice.message)
        assert finish_reasons(chunks, choice.index) == [choice.finish_reason]
    return answer


def message_of(answer: ChatCompletion) -> ChatCompletionMessage:
    """Return the message of a response with one choice."""
    [choice] = answer.choices
    return choice.message


def text_of(answer: ChatCompletion) -> str:
    """Return the text of a response with one choice, which must have one."""
    content = message_of(answer).content
    assert content is not None
    return content


def reasoning_of(answer: ChatCompletion) -> str | None:
    """Return the reasoning, which the official client's types lack."""
    message: dict[str, Any] = message_of(answer).to_dict()
    reasoning: str | None = message.get("reasoning_content")
    return reasoning


def counts(usage: CompletionUsage | None) -> tuple[int, int, int]:
    """Return the tokens of prompt, response and reasoning, which do not depend on a cache."""
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    reasoning = (details and details.reasoning_tokens) or 0
    return usage.prompt_tokens, usage.completion_tokens, reasoning


def comparable(message: ChatCompletionMessage) -> Message:
    """Return a message without the ids of calls, which differ in each request."""
    reported = {name: value for name, value in message.to_dict().items() if value}
    for call in cast("list[Message]", reported.get("tool_calls", [])):
        assert call.pop("id").startswith("call_")
    return reported


def joined(chunks: Iterable[ChatCompletionChunk], index: int = 0) -> Message:
    """Return the message of one streamed choice, in the form of `comparable`."""
    message: Message = {}
    for delta in deltas(chunks, index):
        for name, value in delta.items():
            if name == "tool_calls":
                _add_calls(message.setdefault(name, []), value)
            elif name == "function_call":
                call = message.setdefault(name, {"arguments": "", "name": value.get("name")})
                call["arguments"] += value["arguments"]
            else:
                message[name] = message.get(name, "") + value
    return {name: value for name, value in message.items() if value}


def deltas(chunks: Iterable[ChatCompletionChunk], index: int = 0) -> list[Message]:
    """Return the deltas of one choice, in order."""
    return [
        cast("Message", choice.delta.to_dict())
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index
    ]


def finish_reasons(chunks: Iterable[ChatCompletionChunk], index: int = 0) -> list[str]:
    """Return every finish reason that was sent for one choice: there must be only one."""
    return [
        choice.finish_reason
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index and choice.finish_reason is not None
    ]


def _add_calls(calls: list[Message], pieces: list[Message]) -> None:
    for piece in pieces:
        index, function = piece["index"], piece["function"]
        if index == len(calls):
            assert piece["id"].startswith("call_")
            calls.append({"type": piece["type"], "function": {**function}})
        else:
            assert piece.keys() == {"index", "function"}
            assert function.keys() == {"arguments"}
            calls[index]["function"]["arguments"] += function["arguments"]
