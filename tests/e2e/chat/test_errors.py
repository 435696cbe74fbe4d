"""Rejected chats raise the official client's exceptions, which name the place."""

from typing import Any

import pytest
from openai import (
    AuthenticationError,
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    OpenAI,
    PermissionDeniedError,
    RateLimitError,
    UnprocessableEntityError,
)

from gateway.records.limits import LimitName
from gateway.records.scopes import Scope
from tests.e2e.at_once import each_at_once
from tests.e2e.chat.chats import assistant, chat, streamed, user
from tests.e2e.chat.tools import WEATHER
from tests.e2e.completions import wait_until_served
from tests.support.stack import Stack

pytestmark = pytest.mark.e2e

BOTH = each_at_once("ask", [chat, streamed])


@BOTH
def test_wrong_key_is_an_authentication_error(client: OpenAI, ask: Any) -> None:
    with pytest.raises(AuthenticationError) as caught:
        ask(client.with_options(api_key="sk-nonsense"), "Hello")

    assert caught.value.code == "invalid_api_key"


@BOTH
def test_key_without_the_scope_is_denied(stack: Stack, client: OpenAI, ask: Any) -> None:
    admin = client.with_options(api_key=stack.key("acme", scopes=(Scope.ADMIN,)))
    with pytest.raises(PermissionDeniedError) as caught:
        ask(admin, "Hello")

    assert caught.value.code == "insufficient_scope"


@BOTH
def test_unknown_model_is_not_found(client: OpenAI, ask: Any) -> None:
    with pytest.raises(NotFoundError) as caught:
        ask(client, "Hello", model="another")

    assert caught.value.code == "model_not_found"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@BOTH
@each_at_once(
    "messages, options, param, words",
    [
        ([], {}, "messages", "at least one"),
        ([{"content": "a"}], {}, "messages[0].role", "required"),
        ([{"role": "robot", "content": "a"}], {}, "messages[0].role", "robot"),
        ([user("a"), user(None)], {}, "messages[1].content", "required"),
        ([user([{"type": "text"}])], {}, "messages[0].content[0].text", "required"),
        ([user([{"type": "video_url"}])], {}, "messages[0].content[0].type", "video_url"),
        ([user([IMAGE])], {}, "messages[0].content[0].image_url.url", "image/png"),
        (
            [assistant(None, tool_calls=[{"id": "c", "function": {"name": "f", "arguments": []}}])],
            {},
            "messages[0].tool_calls[0].function.arguments",
            "string",
        ),
        (
            [user("a"), {"role": "tool", "content": "1"}],
            {},
            "messages[1].tool_call_id",
            "required",
        ),
        (["a"], {}, "messages[0]", "object"),
        ([user("a")], {"temperature": 2.5}, "temperature", "2.5"),
        ([user("a")], {"n": 0}, "n", "0"),
        ([user("a")], {"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ([user("a")], {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ([user("a")], {"max_tokens": 0}, "max_tokens", "0"),
        ([user("a")], {"stop": ["a"] * 5}, "stop", "4"),
        ([user("a")], {"tool_choice": "required"}, "tool_choice", "tools"),
        ([user("a")], {"tools": [{"type": "function"}]}, "tools", "function"),
        (
            [user("a")],
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "fly"}},
            },
            "tool_choice",
            "fly",
        ),
        ([user("a")], {"thinking_budget": -2}, "thinking_budget", "-2"),
        ([user("a")], {"reasoning_effort": "huge"}, "reasoning_effort", "huge"),
        (
            [user("a")],
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
            "cannot be set",
        ),
        ([user("a")], {"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
        ([user("a")], {"modalities": ["audio"]}, "modalities", "not supported"),
        ([user("a")], {"continue_final_message": True}, "messages[0].role", "assistant"),
        ([user("a")], {"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ([user("a")], {"prompt": "a"}, "prompt", "prompt"),
        ([user("a")], {"stream_options": 1}, "stream_options", "object"),
    ],
)
def test_bad_request_names_the_place(
    client: OpenAI, ask: Any, messages: Any, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(client, messages, **options)

    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"


@BOTH
@each_at_once("words", [3_000, 300_000])
def test_overlong_chat_is_a_bad_request(client: OpenAI, ask: Any, words: int) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(client, "word " * words)

    assert caught.value.code == "context_length_exceeded"
    assert "2048" in caught.value.message


@BOTH
def test_image_is_rejected_by_a_text_model(client: OpenAI, ask: Any) -> None:
    pixel = (
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJ"
        "RU5ErkJggg=="
    )
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixel}"}}
    with pytest.raises(BadRequestError) as caught:
        ask(client, [user([image])])

    assert caught.value.code == "unsupported_parameter"
    assert "image input" in caught.value.message


@BOTH
def test_limit_is_a_rate_limit_error(stack: Stack, client: OpenAI, ask: Any) -> None:
    limits = {LimitName.REQUESTS_PER_MINUTE: 1}
    key = stack.key(f"chat-limited-{ask.__name__}", limits=limits)
    limited = client.with_options(api_key=key)
    ask(limited, "Hello", max_tokens=1)
    with pytest.raises(RateLimitError) as caught:
        ask(limited, "Hello", max_tokens=1)

    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_key_of_another_request_is_a_conflict(client: OpenAI) -> None:
    headers = {"extra_headers": {"idempotency-key": "a-chat"}}
    first = chat(client, "Hello", max_tokens=2, **headers)
    again = chat(client, "Hello", max_tokens=2, **headers)
    with pytest.raises((ConflictError, UnprocessableEntityError)) as caught:
        chat(client, "Goodbye", max_tokens=2, **headers)

    assert again.id == first.id
    assert "dempotency" in caught.value.message


def test_dialect_of_mistralrs_has_its_own_status(client: OpenAI) -> None:
    with pytest.raises(UnprocessableEntityError):
        chat(client, [], extra_headers={"x-api-dialect": "mistralrs"})


@BOTH
def test_model_without_a_worker_is_an_internal_server_error(
    client: OpenAI, model_that_left: str, ask: Any
) -> None:
    with pytest.raises(InternalServerError) as caught:
        ask(client, "Hello", model=model_that_left)

    assert (caught.value.status_code, caught.value.code) == (503, "no_worker")
    assert int(caught.value.response.headers["retry-after"]) >= 1


@pytest.fixture(scope="module")
def model_that_left(stack: Stack, client: OpenAI) -> str:
    """A model that a worker served for a moment."""
    name = "sluice-talker"
    stack.start_worker("talker", SLUICE_ENGINE="scripted", SLUICE_MODEL_NAME=name)
    wait_until_served(client, name)
    assert stack.stop("talker") == 0
    wait_until_served(client, name, is_served=False)
    return name
