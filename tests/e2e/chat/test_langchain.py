"""LangChain's ChatOpenAI, without any code for Sluice."""

from collections.abc import Callable
from typing import Any, Literal

import httpx
import pytest
from openai import AuthenticationError, BadRequestError, OpenAI
from pydantic import BaseModel, Field

from tests.e2e.at_once import each_at_once
from tests.e2e.chat.chats import assistant, user
from tests.e2e.chat.tools import ADD, PARIS, TIME, WEATHER, check_fits, result
from tests.e2e.completions import in_pieces
from tests.support.stack import MODEL

pytestmark = pytest.mark.e2e

ITALY = "What is the capital of Italy?"
ROME = "The capital of Italy is Rome."

Make = Callable[..., Any]


class Place(BaseModel):
    """Where it is."""

    city: Literal["Oslo", "Rome"]
    age: int = Field(ge=0, le=99)


@pytest.fixture
def make(client: OpenAI) -> Make:
    """Return a model of LangChain."""
    # It takes a second to import, which only these tests should wait for.
    from langchain_openai import ChatOpenAI

    def make(**options: Any) -> Any:
        options = {"api_key": client.api_key, "temperature": 0, "max_retries": 0} | options
        return ChatOpenAI(base_url=str(client.base_url), model=MODEL, **options)

    return make


def test_invoke(make: Make) -> None:
    answer = make().invoke(ITALY)

    assert answer.content == ROME
    assert answer.usage_metadata["input_tokens"] == 12
    assert answer.usage_metadata["output_tokens"] == 9
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.id.startswith(("lc_run-", "run-", "chatcmpl-"))


async def test_conversation_and_batch(make: Make) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        user("Hello"),
        assistant("Hello! How can I help you?"),
        user(ITALY),
    ]
    # LangChain never closes the client that it makes.
    async with httpx.AsyncClient() as http:
        assert (await make(http_async_client=http).ainvoke(messages)).content == ROME
    answers = make().batch([ITALY, "What is 7 + 8?"])
    assert [answer.content for answer in answers] == [ROME, "7 + 8 = 15"]


def test_stream(make: Make) -> None:
    pieces = in_pieces(
        lambda: list(make(stream_usage=True).stream(ITALY)),
        pieces=lambda pieces: sum(bool(piece.content) for piece in pieces),
    )

    assert "".join(piece.content for piece in pieces) == ROME
    [usage] = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert (usage["input_tokens"], usage["output_tokens"]) == (12, 9)


def test_bound_tools(make: Make) -> None:
    bound = make().bind_tools([WEATHER])
    asked: list[Any] = [user(PARIS)]
    answer = bound.invoke(asked)

    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    assert answer.invalid_tool_calls == []
    asked += [answer, result(call["id"], '{"degrees": 21}')]
    assert bound.invoke(asked).content == "It is 21 degrees in Paris."


def test_streamed_call(make: Make) -> None:
    first, *others = make().bind_tools([WEATHER]).stream(PARIS)
    for piece in others:
        first += piece

    [call] = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})


@each_at_once("choice", ["any", "add"])
def test_forced_call(make: Make, choice: str) -> None:
    bound = make().bind_tools([ADD, TIME], tool_choice=choice)
    answer = bound.invoke("Add 12 and 30.")

    check_fits([(call["name"], call["args"]) for call in answer.tool_calls], ADD, TIME)
    assert choice == "any" or answer.tool_calls[0]["name"] == "add"


@each_at_once("method", ["json_schema", "function_calling"])
@each_at_once("strict", [True, None])
def test_structured_output(make: Make, method: str, strict: bool | None) -> None:
    structured = make().with_structured_output(Place, method=method, strict=strict)

    assert isinstance(structured.invoke("Where is it?"), Place)


# LangChain dumps the objects that OpenAI's client has parsed.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_streamed_structured_output(make: Make) -> None:
    *_, last = make().with_structured_output(Place).stream("Where is it?")

    assert isinstance(last, Place)


def test_json_mode(make: Make) -> None:
    structured = make(max_tokens=500).with_structured_output(method="json_mode")

    assert isinstance(structured.invoke("Describe a person as JSON."), dict)


def test_reasoning_is_no_content(make: Make) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = make(extra_body=extra).invoke("What is 27 + 35?")

    assert answer.content == "\n\n27 + 35 = 62"
    assert answer.usage_metadata["output_token_details"]["reasoning"] > 0


def test_logprobs(make: Make) -> None:
    answer = make(logprobs=True, top_logprobs=2).invoke(ITALY)

    tokens = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == ROME


def test_errors(make: Make) -> None:
    with pytest.raises(BadRequestError):
        make(temperature=3).invoke(ITALY)
    with pytest.raises(AuthenticationError):
        make(api_key="sk-nonsense").invoke(ITALY)
