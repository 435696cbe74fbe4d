"""Every class of error raises the official client's exception of that name."""

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
from tests.e2e.chat.chats import chat, user
from tests.e2e.chat.chats import streamed as streamed_chat
from tests.e2e.completions import complete, streamed, wait_until_served
from tests.e2e.examples import COUNTING, TOKENIZER
from tests.support.deployment import MAX_WAITING_JOBS_OF_TENANT
from tests.support.stack import MODEL, Stack, wait_for_metric

pytestmark = pytest.mark.e2e

VOCABULARY = TOKENIZER.get_vocab_size()
COMPLETIONS, CHATS = (complete, streamed), (chat, streamed_chat)
STREAM_OPTIONS = {"stream_options": {"include_usage": True}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

each_way = each_at_once("ask", [*COMPLETIONS, *CHATS])


@each_way
@each_at_once("key", ["sk-nonsense", "a.b.c", "sk-" + "x" * 52])
def test_wrong_key_is_an_authentication_error(client: OpenAI, ask: Any, key: str) -> None:
    with pytest.raises(AuthenticationError) as caught:
        ask(client.with_options(api_key=key), COUNTING)

    assert caught.value.status_code == 401
    assert caught.value.code == "invalid_api_key"
    assert caught.value.type == "authentication_error"
    assert key not in str(caught.value)


@each_way
def test_key_without_the_scope_is_denied(stack: Stack, client: OpenAI, ask: Any) -> None:
    admin = client.with_options(api_key=stack.key("acme", scopes=(Scope.ADMIN,)))
    with pytest.raises(PermissionDeniedError) as caught:
        ask(admin, COUNTING)

    assert caught.value.code == "insufficient_scope"


@each_way
def test_unknown_and_forbidden_models_are_not_found_alike(
    stack: Stack, client: OpenAI, ask: Any
) -> None:
    narrow = client.with_options(api_key=stack.key("narrow", allowed_models=("another",)))
    messages = []
    for asking, model in ((client, "another"), (narrow, MODEL)):
        with pytest.raises(NotFoundError) as caught:
            ask(asking, COUNTING, model=model)
        assert caught.value.code == "model_not_found"
        messages.append(caught.value.message.replace(model, "MODEL"))

    assert messages[0] == messages[1]


@each_at_once(
    "ways, given, options, param, words",
    [
        ((*COMPLETIONS, *CHATS), COUNTING, {"temperature": 2.5}, "temperature", "2.5"),
        ((*COMPLETIONS, *CHATS), COUNTING, {"stop": ["a"] * 5}, "stop", "4"),
        (
            COMPLETIONS,
            COUNTING,
            {"logit_bias": {str(VOCABULARY): 1}},
            "logit_bias",
            str(VOCABULARY - 1),
        ),
        (COMPLETIONS, [], {}, "prompt", "empty"),
        (COMPLETIONS, [1, VOCABULARY], {}, "prompt", str(VOCABULARY)),
        ((complete,), COUNTING, STREAM_OPTIONS, "stream_options", "stream"),
        ((streamed,), COUNTING, {"best_of": 2}, "best_of", "'stream'"),
        (CHATS, [], {}, "messages", "at least one"),
        (CHATS, [user("a"), user(None)], {}, "messages[1].content", "required"),
        (CHATS, [user([IMAGE])], {}, "messages[0].content[0].image_url.url", "image/png"),
        (CHATS, "a", {"tool_choice": "required"}, "tool_choice", "tools"),
        (CHATS, "a", {"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ],
)
def test_wrong_value_is_a_bad_request_that_names_it(
    client: OpenAI, ways: Any, given: Any, options: dict[str, Any], param: str, words: str
) -> None:
    for ask in ways:
        with pytest.raises(BadRequestError) as caught:
            ask(client, given, **options)

        assert caught.value.status_code == 400
        assert caught.value.type == "invalid_request_error"
        assert caught.value.param == param
        assert words in caught.value.message
        assert caught.value.response.headers["x-should-retry"] == "false"


@each_at_once("words", [3_000, 300_000])
@each_at_once("ask", CHATS)
def test_overlong_chat_is_a_bad_request(client: OpenAI, ask: Any, words: int) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(client, "word " * words)

    assert caught.value.code == "context_length_exceeded"
    assert "2048" in caught.value.message


@each_at_once("ask", CHATS)
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


@each_way
def test_limit_is_a_rate_limit_error(stack: Stack, client: OpenAI, ask: Any) -> None:
    limits = {LimitName.REQUESTS_PER_MINUTE: 1}
    number = (*COMPLETIONS, *CHATS).index(ask)
    key = stack.key(f"limited-{number}", limits=limits)
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


@each_at_once("ask", COMPLETIONS)
def test_more_prompts_than_may_wait_is_a_rate_limit_error(client: OpenAI, ask: Any) -> None:
    with pytest.raises(RateLimitError) as caught:
        ask(client, [COUNTING] * (MAX_WAITING_JOBS_OF_TENANT + 1), max_tokens=1)

    assert caught.value.code == "concurrency"
    assert str(MAX_WAITING_JOBS_OF_TENANT) in caught.value.message
    assert int(caught.value.response.headers["retry-after"]) >= 1


@each_way
def test_model_without_a_worker_is_an_internal_server_error(
    client: OpenAI, model_that_left: str, ask: Any
) -> None:
    with pytest.raises(InternalServerError) as caught:
        ask(client, COUNTING, model=model_that_left)

    assert caught.value.status_code == 503
    assert caught.value.code == "no_worker"
    assert int(caught.value.response.headers["retry-after"]) >= 1


@pytest.fixture(scope="module")
def model_that_left(stack: Stack, client: OpenAI) -> str:
    """A model that a worker served for a moment."""
    name = "sluice-visitor"
    stack.start_worker("visitor", SLUICE_ENGINE="scripted", SLUICE_MODEL_NAME=name)
    wait_until_served(client, name)
    assert stack.stop("visitor") == 0
    wait_until_served(client, name, is_served=False)
    return name


def test_lost_worker_of_a_stream_raises_no_error(stack: Stack, client: OpenAI) -> None:
    environment: dict[str, Any] = {
        "SLUICE_ENGINE": "scripted",
        "SLUICE_MODEL_NAME": "sluice-mortal",
        # A busy machine would also make it lose jobs.
        "SLUICE_LEASE_SECONDS": "60",
        "SLUICE_SCRIPTED_STEP_SECONDS": "0.01",
    }
    asked: dict[str, Any] = {"prompt": COUNTING, "temperature": 0, "max_tokens": 150}
    stack.start_worker("mortal", **environment)
    wait_until_served(client, "sluice-mortal")
    undisturbed = client.completions.create(model="sluice-mortal", **asked)
    with client.completions.create(model="sluice-mortal", **asked, stream=True) as stream:
        # A gateway that waited for CPU time sends all of its text at once.
        pieces = [next(stream)]
        stack.kill("mortal")
        stack.start_worker("heir", **environment)
        pieces += stream
    stack.stop("heir")

    assert "".join(piece.choices[0].text for piece in pieces) == undisturbed.choices[0].text
    assert pieces[-1].usage == undisturbed.usage


def test_request_that_kills_engines_is_an_internal_server_error(
    stack: Stack, client: OpenAI
) -> None:
    name = "sluice-poisonable"
    stack.start_worker(
        "poisonable",
        SLUICE_ENGINE="scripted",
        SLUICE_MODEL_NAME=name,
        SLUICE_SCRIPTED_DEADLY_TOKEN_ID="7",
        SLUICE_RESTART_PAUSE_SECONDS="0",
    )
    wait_until_served(client, name)
    with pytest.raises(InternalServerError) as caught:
        client.completions.create(model=name, prompt=[7, 8], max_tokens=5)

    assert caught.value.status_code == 500
    assert caught.value.code == "poisonous_request"
    assert caught.value.response.headers["x-should-retry"] == "false"
    # Another engine eventually replaces each of the two that died.
    restarts = "sluice_worker_engine_restarts_total"
    wait_for_metric(stack.worker_url("poisonable"), restarts, 2)
    stack.stop("poisonable")
