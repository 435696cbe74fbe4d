"""The OpenAPI page describes the responses of every dialect."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.chat.chats import THINKING, user
from tests.e2e.chat.tools import PARIS, WEATHER
from tests.e2e.examples import OPEN
from tests.e2e.seeds.calling import CHATS, Body, Caller, each_dialect
from tests.support.stack import MODEL

pytestmark = pytest.mark.e2e

EVERYTHING: Body = {
    "prompt": [OPEN, "a"],
    "max_tokens": 3,
    "n": 2,
    "echo": True,
    "logprobs": 2,
    "return_token_ids": True,
    "timings_per_token": True,
    "perf_metrics_in_response": True,
    "service_tier": "auto",
}

EVERYTHING_OF_CHATS: Body = {
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
    "timings_per_token": True,
    "perf_metrics_in_response": True,
    "service_tier": "auto",
}
TOOLS: Body = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}


class Page:
    """The OpenAPI page, whose schemas are used to check values."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._validators: dict[str, Draft202012Validator] = {}

    def check(self, name: str, value: Any) -> None:
        """Check a value against a schema of the page, which must name all of its keys."""
        components = self.document["components"]
        schema = components["schemas"][name]
        if name not in self._validators:
            self._validators[name] = Draft202012Validator(schema | {"components": components})
        self._validators[name].validate(value)
        assert set(value) <= set(schema["properties"])


@pytest.fixture(scope="module")
def page(caller: Caller) -> Page:
    return Page(caller.get("/openapi.json").json())


@each_dialect("timing")
@each_at_once("body", [{"prompt": OPEN, "max_tokens": 3}, EVERYTHING])
def test_responses_match_their_schema(caller: Caller, page: Page, dialect: str, body: Body) -> None:
    options = {"stream_options": {"include_usage": True}}
    answer, chunks = at_once(
        lambda: caller.complete(dialect, body), lambda: caller.stream(dialect, body | options)
    )
    page.check("Completion", answer)
    for chunk in chunks:
        page.check("CompletionChunk", chunk)


@each_dialect("timing", "reasoning_members", "has_null_parts")
@each_at_once(
    "body",
    [
        {"max_tokens": 3},
        EVERYTHING_OF_CHATS | {"max_tokens": 3},
        EVERYTHING_OF_CHATS | TOOLS,
        {"functions": [WEATHER["function"]], "max_tokens": 60},
        THINKING | {"thinking_budget": 5, "max_tokens": 20},
    ],
)
def test_chats_match_their_schema(caller: Caller, page: Page, dialect: str, body: Body) -> None:
    body = body | {"messages": [user(PARIS)], "temperature": 0}
    options = {"stream_options": {"include_usage": True}}
    answer, chunks = at_once(
        lambda: caller.complete(dialect, body, CHATS),
        lambda: caller.stream(dialect, body | options, CHATS),
    )
    page.check("ChatCompletion", answer)
    for chunk in chunks:
        page.check("ChatCompletionChunk", chunk)


def test_llamacpps_own_responses_match_their_schema(caller: Caller, page: Page) -> None:
    body = {"prompt": OPEN, "n_predict": 3, "n_probs": 2, "timings_per_token": True}
    result = caller.post("llamacpp", body, "/completion").json()
    *partial, final = caller.native_stream(body)
    for value in (result, final):
        page.check("NativeResult", value)
    for value in partial:
        page.check("NativePartialResult", value)
    page.check("NativeProps", caller.get("/props", "llamacpp").json())


@each_dialect("error_style")
def test_errors_match_their_schema(caller: Caller, page: Page, dialect: str) -> None:
    for body in ({"prompt": OPEN, "n": 0}, {"prompt": [5] * 3000}, {"prompt": 5}):
        page.check("Error", caller.post(dialect, body).json())


def test_models_match_their_schema(caller: Caller, page: Page) -> None:
    page.check("ModelList", caller.get("/v1/models").json())
    page.check("Model", caller.get(f"/v1/models/{MODEL}").json())


@each_at_once("dialect", ["openai", "fireworks", "llamacpp", "mistralrs", "omlx", "vllm"])
@each_at_once("path", ["/v1/completions", CHATS])
def test_examples_of_the_page_are_served(
    caller: Caller, page: Page, dialect: str, path: str
) -> None:
    content = page.document["paths"][path]["post"]["requestBody"]["content"]
    body = content["application/json"]["examples"][dialect]["value"]

    response = caller.post(dialect, body, path)
    assert response.status_code == 200, response.text
    assert response.json()["choices"]
    assert "x-ignored-params" not in response.headers


@each_at_once(
    "path", ["/completion", "/completions", "/infill", "/chat/completions", "/apply-template"]
)
def test_examples_of_llamacpps_own_paths_are_served(caller: Caller, page: Page, path: str) -> None:
    content = page.document["paths"][path]["post"]["requestBody"]["content"]
    body = content["application/json"]["examples"]["llamacpp"]["value"]

    response = caller.post("llamacpp", body, path)
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers
