"""Background and resumed chats: the same message, calls and their ids included."""

import json
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.e2e.chat.chats import (
    Message,
    chat,
    comparable,
    counts,
    finish_reasons,
    joined,
    message_of,
    parameters,
    user,
)
from tests.e2e.chat.tools import ADD, PARIS, WEATHER
from tests.e2e.seeds.calling import CHATS, Caller, chunks_of
from tests.support.processes import wait_until
from tests.support.stack import MODEL, Stack

pytestmark = pytest.mark.e2e

ASKED: Message = {
    "model": MODEL,
    "messages": [user("Add 12 and 30.")],
    "tools": [ADD],
    "temperature": 0,
    "background": True,
    "stream": True,
}


def test_background_chat_is_retrieved(client: OpenAI) -> None:
    began: Any = client.chat.completions.create(
        **parameters(PARIS, {"tools": [WEATHER], "background": True})
    )

    def status() -> str | None:
        answer: Any = client.chat.completions.retrieve(began.id)
        return "finished" if answer.choices else answer.model_extra.get("status")

    wait_until(lambda: status() == "finished", what="the chat having been answered")
    kept, again = (client.chat.completions.retrieve(began.id) for _ in range(2))
    direct = chat(client, PARIS, tools=[WEATHER])
    assert began.model_extra["status"] in ("queued", "in_progress")
    assert comparable(message_of(kept)) == comparable(message_of(direct))
    assert counts(kept.usage) == counts(direct.usage)
    assert again.to_dict() == kept.to_dict()


def test_stream_resumes_after_any_event(stack: Stack, caller: Caller) -> None:
    response = caller.post(None, ASKED, CHATS)
    chunks = chunks_of(response.text)
    [request_id] = {chunk["id"] for chunk in chunks}
    elsewhere = Caller(stack.gateways[1], stack.key("documents", allowed_models=(MODEL,)))
    try:
        for position in range(len(chunks)):
            path = f"{CHATS}/{request_id}?stream=true&starting_after={position}"
            assert chunks_of(elsewhere.get(path).text) == chunks[position:]
    finally:
        elsewhere.close()

    reported = [ChatCompletionChunk.model_validate(chunk) for chunk in chunks]
    [call] = joined(reported)["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 12, "b": 30}
    assert finish_reasons(reported) == ["tool_calls"]


def test_chat_cannot_be_read_as_a_completion(client: OpenAI, caller: Caller) -> None:
    began: Any = client.chat.completions.create(**parameters("Hello", {"background": True}))

    assert caller.get(f"/v1/completions/{began.id}").status_code == 404
    with pytest.raises(NotFoundError):
        client.chat.completions.retrieve(began.id.replace("chatcmpl-", "cmpl-"))


def test_chat_is_cancelled(caller: Caller) -> None:
    endless = {"messages": [user("Count from 1 to 10.")], "ignore_eos": True, "background": True}
    began = caller.post(None, endless, CHATS).json()

    cancelled = caller.post(None, {}, f"{CHATS}/{began['id']}/cancel")
    assert cancelled.status_code == 200, cancelled.text
    assert cancelled.json()["status"] == "cancelled"
    assert caller.get(f"{CHATS}/{began['id']}").json()["status"] == "cancelled"


def test_estimate_counts_the_tokens_of_the_prompt(client: OpenAI, caller: Caller) -> None:
    body = {"messages": [user(PARIS)], "tools": [WEATHER], "max_tokens": 5}
    estimate = caller.post(None, body, f"{CHATS}:estimate").json()

    usage = chat(client, PARIS, tools=[WEATHER], max_tokens=5).usage
    assert (estimate["prompt_tokens"], estimate["completion_tokens_max"]) == (73, 5)
    assert counts(usage)[0] == 73
