"""The OpenAPI page describes what is answered, in every dialect."""

from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.e2e.chat.asking import THINKING, user
from tests.e2e.chat.tools import PARIS, WEATHER
from tests.e2e.examples import OPEN
from tests.e2e.seeds.calling import CHATS, Body, Caller
from tests.e2e.test_conflicts_lengths import DIALECTS
from tests.support.stack import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

EVERYTHING: Body = {
    "prompt": [OPEN, "a"],
    "max_tokens": 3,
    "n": 2,
    "echo": True,
    "logprobs": 2,
    "return_token_ids": True,
    "timings_per_token": True,
    "perf_metrics_in_response": True,
}

EVERYTHING_OF_CHATS: Body = {
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
    "timings_per_token": True,
    "perf_metrics_in_response": True,
}
TOOLS: Body = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}


@pytest.fixture(scope="module")
def page(caller: Caller) -> dict[str, Any]:
    document: dict[str, Any] = caller.get("/openapi.json").json()
    return document


def check(page: dict[str, Any], name: str, value: Any) -> None:
    """Check a value against a schema of the page, which must name all of its keys."""
    schema = page["components"]["schemas"][name]
    jsonschema.validate(value, schema | {"components": page["components"]})
    assert set(value) <= set(schema["properties"])


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("body", [{"prompt": OPEN, "max_tokens": 3}, EVERYTHING])
def test_answers_are_described(
    caller: Caller, page: dict[str, Any], dialect: str, body: Body
) -> None:
    check(page, "Completion", caller.complete(dialect, body))
    for chunk in caller.stream(dialect, body | {"stream_options": {"include_usage": True}}):
        check(page, "CompletionChunk", chunk)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 3},
        EVERYTHING_OF_CHATS | {"max_tokens": 3},
        EVERYTHING_OF_CHATS | TOOLS,
        {"functions": [WEATHER["function"]], "max_tokens": 60},
        THINKING | {"thinking_budget": 5, "max_tokens": 20},
    ],
    ids=["plain", "everything", "calls", "function", "reasoning"],
)
def test_chats_are_described(
    caller: Caller, page: dict[str, Any], dialect: str, body: Body
) -> None:
    body = body | {"messages": [user(PARIS)], "temperature": 0}
    check(page, "ChatCompletion", caller.complete(dialect, body, CHATS))
    options = {"stream_options": {"include_usage": True}}
    for chunk in caller.stream(dialect, body | options, CHATS):
        check(page, "ChatCompletionChunk", chunk)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_refusals_are_described(caller: Caller, page: dict[str, Any], dialect: str) -> None:
    for body in ({"prompt": OPEN, "n": 0}, {"prompt": [5] * 3000}, {"prompt": 5}):
        check(page, "Error", caller.post(dialect, body).json())


def test_models_are_described(caller: Caller, page: dict[str, Any]) -> None:
    check(page, "ModelList", caller.get("/v1/models").json())
    check(page, "Model", caller.get(f"/v1/models/{MODEL}").json())


@pytest.mark.parametrize(
    "dialect", ["openai", "fireworks", "llamacpp", "mistralrs", "omlx", "vllm"]
)
@pytest.mark.parametrize("path", ["/v1/completions", CHATS])
def test_examples_of_the_page_are_served(
    caller: Caller, page: dict[str, Any], dialect: str, path: str
) -> None:
    content = page["paths"][path]["post"]["requestBody"]["content"]
    body = content["application/json"]["examples"][dialect]["value"]

    assert caller.complete(dialect, body, path)["choices"]
    assert "x-ignored-params" not in caller.post(dialect, body, path).headers
