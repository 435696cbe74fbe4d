"""OpenAI's client for Node, called through tests/clients/chat.mjs."""

import json
import shutil
import subprocess
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.e2e.chat.asking import (
    THINKING,
    Message,
    as_told,
    chat,
    finish_reasons,
    joined,
    message_of,
    user,
)
from tests.e2e.chat.tools import ADD, PARIS, WEATHER, WEATHER_OF_CITIES, calls_of, check_fits, named
from tests.support.stack import MODEL, REPOSITORY

FOLDER = REPOSITORY / "tests" / "clients"
CLIENT_SECONDS = 60

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (shutil.which("node") and (FOLDER / "node_modules" / "openai").is_dir()),
        reason="OpenAI's client for Node is not installed (scripts/setup.sh clients)",
    ),
]

ITALY = "What is the capital of Italy?"
SCHEMA: Message = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


def call(client: OpenAI, method: str, messages: Any, **options: Any) -> Any:
    """Return what a method of tests/clients/chat.mjs gives: `value` or `error`."""
    messages = [user(messages)] if isinstance(messages, str) else messages
    parameters = {"model": MODEL, "messages": messages, "temperature": 0, **options}
    command = ["node", "chat.mjs", method, str(client.base_url), client.api_key]
    process = subprocess.run(
        command,
        input=json.dumps(parameters),
        capture_output=True,
        text=True,
        cwd=FOLDER,
        timeout=CLIENT_SECONDS,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def value_of(client: OpenAI, method: str, messages: Any, **options: Any) -> Any:
    """Return what a method gives, which must be no error."""
    told = call(client, method, messages, **options)
    assert "error" not in told, told
    return told["value"]


def answer_of(client: OpenAI, messages: Any, **options: Any) -> ChatCompletion:
    """Return the whole answer that the client for Node gets; the stream must tell the same."""
    answer = ChatCompletion.model_validate(value_of(client, "create", messages, **options))
    chunks = [
        ChatCompletionChunk.model_validate(chunk)
        for chunk in value_of(client, "chunks", messages, **options)
    ]
    for choice in answer.choices:
        assert joined(chunks, choice.index) == as_told(choice.message)
        assert finish_reasons(chunks, choice.index) == [choice.finish_reason]
    return answer


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
def test_both_clients_get_the_same_answer(client: OpenAI, options: dict[str, Any]) -> None:
    told = answer_of(client, PARIS, **options)
    expected = chat(client, PARIS, **options)

    assert [as_told(choice.message) for choice in told.choices] == [
        as_told(choice.message) for choice in expected.choices
    ]
    assert [choice.finish_reason for choice in told.choices] == [
        choice.finish_reason for choice in expected.choices
    ]


def test_streams_are_put_together(client: OpenAI) -> None:
    told = value_of(client, "stream", ITALY)
    [choice] = told["completion"]["choices"]

    assert "".join(told["content"]) == choice["message"]["content"]
    assert choice["message"]["content"] == "The capital of Italy is Rome."
    assert len(told["content"]) > 1


def test_streamed_calls_are_put_together(client: OpenAI) -> None:
    options = {"tools": [ADD], "tool_choice": named(ADD)}
    told = value_of(client, "stream", "Add 12 and 30.", **options)

    completion = ChatCompletion.model_validate(told["completion"])
    check_fits(calls_of(completion), ADD)
    [made] = message_of(completion).tool_calls or []
    assert made.id.startswith("call_")


def test_tools_are_run(client: OpenAI) -> None:
    told = value_of(client, "runTools", PARIS, tools=[WEATHER], result='{"degrees": 21}')

    assert told == {"content": "It is 21 degrees in Paris.", "given": [{"city": "Paris"}]}


def test_strict_schema_is_parsed(client: OpenAI) -> None:
    form = {"name": "answer", "strict": True, "schema": SCHEMA}
    response_format = {"type": "json_schema", "json_schema": form}
    told = value_of(client, "parse", ITALY, response_format=response_format)

    jsonschema.validate(json.loads(told["choices"][0]["message"]["content"]), SCHEMA)


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
    client: OpenAI, method: str, options: dict[str, Any], error: tuple[str, int, str]
) -> None:
    messages = options.get("messages", ITALY)
    others = {name: value for name, value in options.items() if name != "messages"}
    told = call(client, method, messages, **others)["error"]

    assert (told["class"], told["status"], told["param"]) == error


def test_wrong_key_has_its_class(client: OpenAI) -> None:
    told = call(client.with_options(api_key="sk-nonsense"), "create", ITALY)["error"]

    assert (told["class"], told["code"]) == ("AuthenticationError", "invalid_api_key")
