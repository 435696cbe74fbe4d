"""Streams of the Vercel AI SDK, through tests/clients/vercel_calls.mjs."""

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.clients.environments import NODE, PROGRAMS
from tests.support.stack import MODEL

pytestmark = [pytest.mark.e2e, NODE.skip]


@pytest.fixture(scope="module")
def reported(client: OpenAI, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results by feature."""
    printed = NODE.run(
        ["node", str(PROGRAMS / "vercel_calls.mjs"), MODEL],
        tmp_path_factory.mktemp("vercel"),
        OPENAI_BASE_URL=str(client.base_url),
        OPENAI_API_KEY=client.api_key,
    )
    return json.loads(printed)


def test_tools_are_run(reported: Any) -> None:
    call, answer = reported["steps"]

    assert (call["finishReason"], call["inputs"]) == ("tool-calls", [{"city": "Paris"}])
    assert (answer["finishReason"], answer["text"]) == ("stop", "It is 21 degrees in Paris.")
    assert call["tokens"] > 0 < answer["tokens"]


def test_provider_of_responses_refers_to_kept_items_at_its_defaults(reported: Any) -> None:
    call, answer = reported["kept"]

    assert call["finishReason"] == "tool-calls"
    assert (answer["finishReason"], answer["text"]) == ("stop", "It is 21 degrees in Paris.")
    loop = ["user", "function_call", "function_call_output"]
    assert reported["sent"] == [["user"], loop, [*loop, "item_reference", "user"]]
    assert reported["next"]


def test_objects_are_streamed(reported: Any) -> None:
    *partial, whole = reported["partial"]

    assert whole["city"] in ("Oslo", "Rome")
    assert isinstance(whole["warm"], bool)
    assert {} in partial


def test_reasoning_is_separate(reported: Any) -> None:
    assert reported["reasoning"].strip()
    assert reported["answer"].strip()
    assert "think>" not in reported["reasoning"] + reported["answer"]
    assert reported["reasoningTokens"] > 0


def test_errors_have_their_status(reported: Any) -> None:
    value, model = reported["errors"]

    assert (value["isCallError"], value["statusCode"], value["isRetryable"]) == (True, 400, False)
    assert "'temperature' must be at most 2" in value["message"]
    assert (model["isCallError"], model["statusCode"]) == (True, 404)
