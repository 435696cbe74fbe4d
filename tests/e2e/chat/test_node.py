"""OpenAI's client for Node, through tests/clients/chat.mjs."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.e2e.at_once import at_once
from tests.e2e.chat.chats import (
    THINKING,
    Message,
    chat,
    comparable,
    finish_reasons,
    joined,
    message_of,
    user,
)
from tests.e2e.chat.tools import ADD, PARIS, WEATHER, WEATHER_OF_CITIES, calls_of, check_fits, named
from tests.e2e.completions import in_pieces
from tests.support.processes import spawn
from tests.support.stack import MODEL, REPOSITORY

FOLDER = REPOSITORY / "tests" / "clients"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not (shutil.which("node") and (FOLDER / "node_modules" / "openai").is_dir()),
        reason="OpenAI's client for Node is not installed (scripts/setup.sh npm)",
    ),
]

ITALY = "What is the capital of Italy?"
SCHEMA: Message = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


class NodeClient:
    """A process with the client for Node, which starts slowly."""

    def __init__(self, client: OpenAI) -> None:
        self._address = (str(client.base_url), client.api_key)
        self._process = spawn(
            "node", "chat.mjs", stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=FOLDER
        )

    def close(self) -> None:
        """End the process by closing its input."""
        with self._process:
            pass

    def call(self, method: str, messages: Any, *, key: str = "", **options: Any) -> Any:
        """Return the result of a method of tests/clients/chat.mjs: `value` or `error`."""
        messages = [user(messages)] if isinstance(messages, str) else messages
        parameters = {"model": MODEL, "messages": messages, "temperature": 0, **options}
        url, own_key = self._address
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            json.dumps([method, url, key or own_key, parameters]).encode() + b"\n"
        )
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def value_of(self, method: str, messages: Any, **options: Any) -> Any:
        """Return the value of a method, which must not fail."""
        reported = self.call(method, messages, **options)
        assert "error" not in reported, reported
        return reported["value"]

    def answer_of(self, messages: Any, **options: Any) -> ChatCompletion:
        """Return the whole response of the client; the stream must be equal."""
        answer = ChatCompletion.model_validate(self.value_of("create", messages, **options))
        chunks = [
            ChatCompletionChunk.model_validate(chunk)
            for chunk in self.value_of("chunks", messages, **options)
        ]
        for choice in answer.choices:
            assert joined(chunks, choice.index) == comparable(choice.message)
            assert finish_reasons(chunks, choice.index) == [choice.finish_reason]
        return answer


@pytest.fixture(scope="module")
def node(client: OpenAI) -> Iterator[NodeClient]:
    """The client for Node, with the key of the client for Python."""
    node = NodeClient(client)
    yield node
    node.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 2, "max_tokens": 5},
        {"tools": [WEATHER, ADD]},
        {"tools": [WEATHER_OF_CITIES], "tool_choice": "required"},
        THINKING | {"max_tokens": 100},
    ],
    ids=["plain", "choices", "tools", "required", "reasoning"],
)
def test_both_clients_get_the_same_answer(
    client: OpenAI, node: NodeClient, options: dict[str, Any]
) -> None:
    reported, expected = at_once(
        lambda: node.answer_of(PARIS, **options), lambda: chat(client, PARIS, **options)
    )

    assert [comparable(choice.message) for choice in reported.choices] == [
        comparable(choice.message) for choice in expected.choices
    ]
    assert [choice.finish_reason for choice in reported.choices] == [
        choice.finish_reason for choice in expected.choices
    ]


def test_streams_are_put_together(node: NodeClient) -> None:
    reported = in_pieces(
        lambda: node.value_of("stream", ITALY), pieces=lambda reported: len(reported["content"])
    )
    [choice] = reported["completion"]["choices"]

    assert "".join(reported["content"]) == choice["message"]["content"]
    assert choice["message"]["content"] == "The capital of Italy is Rome."


def test_streamed_calls_are_put_together(node: NodeClient) -> None:
    options = {"tools": [ADD], "tool_choice": named(ADD)}
    reported = node.value_of("stream", "Add 12 and 30.", **options)

    completion = ChatCompletion.model_validate(reported["completion"])
    check_fits(calls_of(completion), ADD)
    [made] = message_of(completion).tool_calls or []
    assert made.id.startswith("call_")


def test_tools_are_run(node: NodeClient) -> None:
    reported = node.value_of("runTools", PARIS, tools=[WEATHER], result='{"degrees": 21}')

    assert reported == {"content": "It is 21 degrees in Paris.", "given": [{"city": "Paris"}]}


def test_strict_schema_is_parsed(node: NodeClient) -> None:
    form = {"name": "answer", "strict": True, "schema": SCHEMA}
    response_format = {"type": "json_schema", "json_schema": form}
    reported = node.value_of("parse", ITALY, response_format=response_format)

    jsonschema.validate(json.loads(reported["choices"][0]["message"]["content"]), SCHEMA)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": 3}, ("BadRequestError", 400, "temperature")),
        ({"messages": [{"role": "robot"}]}, ("BadRequestError", 400, "messages[0].role")),
        ({"model": "another"}, ("NotFoundError", 404, "model")),
    ],
    ids=["value", "message", "model"],
)
@pytest.mark.parametrize("method", ["create", "chunks"])
def test_errors_have_their_class(
    node: NodeClient, method: str, options: dict[str, Any], error: tuple[str, int, str]
) -> None:
    messages = options.get("messages", ITALY)
    others = {name: value for name, value in options.items() if name != "messages"}
    reported = node.call(method, messages, **others)["error"]

    assert (reported["class"], reported["status"], reported["param"]) == error


def test_wrong_key_has_its_class(node: NodeClient) -> None:
    reported = node.call("create", ITALY, key="sk-nonsense")["error"]

    assert (reported["class"], reported["code"]) == ("AuthenticationError", "invalid_api_key")
