"""Loops of two steps with a tool, by each client at its defaults, on the scripted engine."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.clients.environments import NODE, PROGRAMS, PYTHON
from tests.support.stack import CHECKPOINT, MODEL, Stack, running_stack

CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}
ANSWER = "It is warm there."
SESSIONS = [
    # The first turn would answer a prompt that has the result without the call.
    {"when": "21 degrees in Paris", "turns": [{"text": "What?"}, {"text": ANSWER}]},
    {
        "when": "What is the weather in Paris?",
        "turns": [{"reasoning": "I must look.", "text": "I look.", "calls": [CALL]}],
    },
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A gateway, and a worker whose model reasons by default, calls the tool and answers."""
    folder = tmp_path_factory.mktemp("model")
    sessions, template = folder / "sessions.json", folder / "chat_template.jinja"
    sessions.write_text(json.dumps(SESSIONS))
    own = (CHECKPOINT / "chat_template.jinja").read_text()
    template.write_text(own.replace("if enable_thinking", "if enable_thinking | default(true)"))
    with running_stack() as stack:
        stack.start_gateway()
        stack.start_worker(
            SLUICE_ENGINE="scripted",
            SLUICE_SCRIPTED_SESSIONS=str(sessions),
            SLUICE_CHAT_TEMPLATE=str(template),
            SLUICE_CONTEXT_WINDOW="200000",
        )
        yield stack


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((NODE, "node", "tool_loops.mjs"), marks=NODE.skip, id="Node"),
        # Its imports take five seconds.
        pytest.param(
            (PYTHON, "python", "tool_loops.py"), marks=[PYTHON.skip, pytest.mark.slow], id="Python"
        ),
    ],
)
def reported(
    request: pytest.FixtureRequest, stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """What each client gave to the tool, and its answer or its error."""
    environment, interpreter, program = request.param
    printed = environment.run(
        [interpreter, str(PROGRAMS / program), MODEL],
        tmp_path_factory.mktemp("loops"),
        OPENAI_BASE_URL=f"{stack.url}/v1",
        OPENAI_API_KEY=stack.key(),
        ANTHROPIC_BASE_URL=stack.url,
        ANTHROPIC_API_KEY=stack.key(),
    )
    return json.loads(printed)


def test_each_client_runs_the_tool_and_sends_its_result(reported: Any) -> None:
    assert reported == {client: {"given": ["Paris"], "answer": ANSWER} for client in reported}
