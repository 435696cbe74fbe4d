"""LlamaIndex's client, which knows nothing of Sluice, called through tests/clients/llama_index_calls.py."""

import json
import subprocess
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.asking import in_pieces
from tests.support.stack import MODEL, REPOSITORY

PYTHON = REPOSITORY / ".venv" / "llama-index" / "bin" / "python"
PROGRAM = REPOSITORY / "tests" / "clients" / "llama_index_calls.py"
CLIENT_SECONDS = 120

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,  # Its process imports for seven seconds; LangChain and OpenAI's clients send the same.
    pytest.mark.skipif(
        not PYTHON.exists(), reason="LlamaIndex is not installed (scripts/setup.sh llama-index)"
    ),
]

ROME = "The capital of Italy is Rome."


@pytest.fixture(scope="module")
def told(client: OpenAI) -> Any:
    """What the client's methods gave, by their names; a stream in several pieces."""

    def call() -> Any:
        process = subprocess.run(
            [PYTHON, "-I", PROGRAM, str(client.base_url), client.api_key, MODEL],
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    return in_pieces(call, pieces=lambda told: sum(map(bool, told["stream"])))


@pytest.mark.parametrize("method", ["chat", "achat", "complete"])
def test_answers(told: Any, method: str) -> None:
    assert told[method] == ROME


def test_stream(told: Any) -> None:
    assert "".join(told["stream"]) == ROME


@pytest.mark.parametrize("method", ["call", "streamed_call"])
def test_calls(told: Any, method: str) -> None:
    assert told[method]
    for name, arguments in told[method]:
        assert name == "get_weather"
        assert arguments["city"] in ("Oslo", "Rome")


def test_tool_is_called(told: Any) -> None:
    assert told["result"].startswith("21 degrees in ")


def test_structured_output(told: Any) -> None:
    assert told["structured"]["city"] in ("Oslo", "Rome")


def test_error(told: Any) -> None:
    assert told["error"] == "top_p"
