"""LlamaIndex's client, without any code for Sluice, through tests/clients/llama_index_calls.py."""

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.clients.environments import PROGRAMS, PYTHON
from tests.e2e.completions import in_pieces
from tests.support.stack import MODEL

pytestmark = [
    pytest.mark.e2e,
    # A default run has its snippet of docs/clients.md, and LangChain sends the same.
    pytest.mark.long,
    PYTHON.skip,
]

ROME = "The capital of Italy is Rome."


@pytest.fixture(scope="module")
def reported(client: OpenAI, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of the client's methods by name; a stream in several pieces."""
    folder = tmp_path_factory.mktemp("llama_index")

    def call() -> Any:
        arguments = (str(client.base_url), client.api_key, MODEL)
        program = str(PROGRAMS / "llama_index_calls.py")
        return json.loads(PYTHON.run(["python", "-I", program, *arguments], folder))

    return in_pieces(call, pieces=lambda reported: sum(map(bool, reported["stream"])))


@pytest.mark.parametrize("method", ["chat", "achat", "complete"])
def test_answers(reported: Any, method: str) -> None:
    assert reported[method] == ROME


def test_stream(reported: Any) -> None:
    assert "".join(reported["stream"]) == ROME


@pytest.mark.parametrize("method", ["call", "streamed_call"])
def test_calls(reported: Any, method: str) -> None:
    assert reported[method]
    for name, arguments in reported[method]:
        assert name == "get_weather"
        assert arguments["city"] in ("Oslo", "Rome")


def test_tool_is_called(reported: Any) -> None:
    assert reported["result"].startswith("21 degrees in ")


def test_structured_output(reported: Any) -> None:
    assert reported["structured"]["city"] in ("Oslo", "Rome")


def test_error(reported: Any) -> None:
    assert reported["error"] == "top_p"
