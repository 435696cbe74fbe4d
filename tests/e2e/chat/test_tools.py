"""Tool calls through OpenAI's client: by the model's own choice, and forced."""

import re
from itertools import product
from typing import Any, Literal

import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel

from tests.e2e.at_once import each_at_once
from tests.e2e.chat.chats import (
    THINKING,
    assistant,
    chat,
    chat_both_ways,
    counts,
    deltas,
    message_of,
    parameters,
    reasoning_of,
    streamed,
    text_of,
    user,
)
from tests.e2e.chat.tools import (
    ADD,
    CITIES,
    PARIS,
    TIME,
    WEATHER,
    WEATHER_OF_CITIES,
    Tool,
    calls_in,
    calls_of,
    check_fits,
    named,
    result,
    tool,
)
from tests.e2e.completions import in_pieces

pytestmark = pytest.mark.e2e

SUM = "Add 12 and 30."
WITHOUT_END: dict[str, Any] = {"logit_bias": {"1": -100}}
"""Makes the end of the text, token 1, very unlikely."""


@each_at_once(
    "tools, asked, call, tokens",
    [
        ([WEATHER], PARIS, ("get_weather", {"city": "Paris"}), (73, 22, 0)),
        ([WEATHER, ADD], PARIS, ("get_weather", {"city": "Paris"}), (136, 22, 0)),
        ([ADD], SUM, ("add", {"a": 12, "b": 30}), (80, 26, 0)),
        (
            [WEATHER, TIME],
            "What time is it in Tokyo?",
            ("get_time", {"city": "Tokyo"}),
            (128, 21, 0),
        ),
    ],
)
def test_model_calls_a_tool(
    client: OpenAI,
    tools: list[Tool],
    asked: str,
    call: tuple[str, Any],
    tokens: tuple[int, int, int],
) -> None:
    answer = chat_both_ways(client, asked, tools=tools)

    assert calls_of(answer) == [call]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message_of(answer).content is None
    assert counts(answer.usage) == tokens


@each_at_once(
    "asked, expected",
    [
        ("Hello", "Hello! How can I help you?"),
        ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ],
)
def test_model_need_not_call(client: OpenAI, asked: str, expected: str) -> None:
    answer = chat_both_ways(client, asked, tools=[WEATHER])

    assert text_of(answer) == expected
    assert message_of(answer).tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_call_is_streamed_in_pieces(client: OpenAI) -> None:
    def pieces_of_call() -> list[Any]:
        chunks = streamed(client, SUM, tools=[ADD])
        return [piece for delta in deltas(chunks) for piece in delta.get("tool_calls") or []]

    pieces = in_pieces(pieces_of_call, pieces=len, least=3)
    first, *others = pieces
    assert first["type"] == "function"
    assert first["function"]["name"] == "add"
    assert all(piece.keys() == {"index", "function"} for piece in others)
    assert {piece["index"] for piece in pieces} == {0}


@each_at_once(
    "tools, asked, content, expected",
    [
        ([WEATHER], PARIS, '{"degrees": 21}', "It is 21 degrees in Paris."),
        ([ADD], SUM, "42", "12 + 30 = 42"),
        ([WEATHER, TIME], "What time is it in Tokyo?", '{"hour": 9}', "It is 9 o'clock in Tokyo."),
    ],
)
def test_model_answers_the_result_of_a_call(
    client: OpenAI, tools: list[Tool], asked: str, content: str, expected: str
) -> None:
    message = message_of(chat(client, asked, tools=tools))
    [call] = message.tool_calls or []
    messages = [user(asked), message.to_dict(), result(call.id, content)]

    assert text_of(chat_both_ways(client, messages, tools=tools)) == expected


def test_tools_may_be_described_and_not_called(client: OpenAI) -> None:
    answer = chat_both_ways(client, PARIS, tools=[WEATHER], tool_choice="none", max_tokens=40)

    assert message_of(answer).tool_calls is None
    assert answer.choices[0].finish_reason != "tool_calls"


@each_at_once("asked", ["Hello", PARIS])
def test_required_call_is_made(client: OpenAI, asked: str) -> None:
    tools = [WEATHER_OF_CITIES, ADD]
    answer = chat_both_ways(client, asked, tools=tools, tool_choice="required")

    assert calls_of(answer)
    check_fits(calls_of(answer), *tools)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_named_function_is_called(client: OpenAI) -> None:
    answer = chat_both_ways(client, "Hello", tools=[ADD, TIME, WEATHER], tool_choice=named(TIME))

    [(name, arguments)] = calls_of(answer)
    assert name == "get_time"
    check_fits([(name, arguments)], TIME)
    # OpenAI sets it when the client names the function.
    assert answer.choices[0].finish_reason == "stop"


@each_at_once("function", [{}, {"parameters": {"type": "object"}}])
def test_forced_call_of_a_tool_without_parameters_is_empty(
    client: OpenAI, function: dict[str, Any]
) -> None:
    reset = {"type": "function", "function": {"name": "reset", **function}}
    answer = chat_both_ways(client, PARIS, tools=[reset], tool_choice=named(reset), seed=1)

    assert calls_of(answer) == [("reset", {})]


def allowing(tool: Tool, mode: str) -> dict[str, Any]:
    """Return the `tool_choice` that allows one tool."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(tool)]}}


def test_only_allowed_tools_are_called(client: OpenAI) -> None:
    options: dict[str, Any] = {"tools": [WEATHER, ADD], "max_tokens": 60}
    free = chat_both_ways(client, PARIS, **options)
    assert calls_of(free) == [("get_weather", {"city": "Paris"})]

    auto = chat_both_ways(client, PARIS, tool_choice=allowing(ADD, "auto"), **options)
    assert {name for name, _ in calls_of(auto)} <= {"add"}
    forced = chat_both_ways(client, PARIS, tool_choice=allowing(ADD, "required"), **options)
    assert calls_of(forced)
    check_fits(calls_of(forced), ADD)
    # The prompt describes all tools, so that its beginning stays in the prefix cache.
    assert counts(auto.usage)[0] == counts(forced.usage)[0] == counts(free.usage)[0]


def test_several_calls_have_their_own_ids(client: OpenAI) -> None:
    options: dict[str, Any] = {"tools": [WEATHER_OF_CITIES], "tool_choice": "required"}
    answer = chat_both_ways(client, PARIS, max_tokens=60, **options, **WITHOUT_END)

    # The last one is cut off by max_tokens.
    *calls, _ = message_of(answer).tool_calls or []
    assert len(calls) >= 2
    assert len({call.id for call in calls}) == len(calls)
    cut = message_of(answer).model_copy(update={"tool_calls": calls})
    check_fits(calls_in(cut), WEATHER_OF_CITIES)
    assert answer.choices[0].finish_reason == "length"


@each_at_once("choice", ["required", "auto"])
def test_parallel_calls_can_be_refused(client: OpenAI, choice: str) -> None:
    options: dict[str, Any] = {"tools": [WEATHER_OF_CITIES], "tool_choice": choice}
    answer = chat_both_ways(
        client, "What is the weather in Oslo?", parallel_tool_calls=False, max_tokens=60, **options
    )

    [(name, arguments)] = calls_of(answer)
    assert (name, arguments["city"] in CITIES) == ("get_weather", True)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_without_parallel_calls_the_first_call_ends_the_response(client: OpenAI) -> None:
    options: dict[str, Any] = {"tools": [WEATHER_OF_CITIES], "tool_choice": "required"}
    answer = chat_both_ways(
        client, PARIS, parallel_tool_calls=False, max_tokens=60, **options, **WITHOUT_END
    )

    assert len(calls_of(answer)) == 1
    assert answer.choices[0].finish_reason == "tool_calls"


def test_strict_tool_gets_arguments_of_its_schema(client: OpenAI) -> None:
    strict = {**WEATHER_OF_CITIES["function"], "strict": True}
    tools = [{"type": "function", "function": strict}]
    # The model would write Paris, which is none of the cities.
    answer = chat_both_ways(client, PARIS, tools=tools)

    assert calls_of(answer)
    check_fits(calls_of(answer), *tools)


MARKS = ("a </tool_call> b", "<tool_call>", "x</think><|im_end|></s>y", '\\"</tool_call>')


@each_at_once("text, choice", [*product(MARKS, ["required", "named", "strict"])])
def test_marks_in_arguments_are_text(client: OpenAI, text: str, choice: str) -> None:
    save = tool("save", "Save a text", c={"const": text})
    save["function"]["strict"] = True
    choices = {"required": "required", "named": named(save), "strict": "auto"}
    # The token that begins a call is 11.
    bias: dict[str, Any] = {"logit_bias": {"11": 100}} if choice == "strict" else {}
    answer = chat_both_ways(
        client,
        "Save it.",
        tools=[save],
        tool_choice=choices[choice],
        parallel_tool_calls=False,
        max_tokens=90,
        **bias,
    )

    assert calls_of(answer) == [("save", {"c": text})]
    assert message_of(answer).content is None


@each_at_once(
    "options",
    [
        {"extra_body": {"ignore_eos": True}},
        {"tool_choice": "none", "logit_bias": {"11": 100}},
        *({"logit_bias": {str(special): 100}} for special in (1, 2, 11, 12)),
    ],
)
def test_special_tokens_and_marks_are_no_content(client: OpenAI, options: dict[str, Any]) -> None:
    for tools in ({}, {"tools": [WEATHER]}):
        if not tools and "tool_choice" in options:
            continue
        answer = chat_both_ways(client, "Hello", max_tokens=40, **tools, **options)
        content = message_of(answer).content or ""
        assert not re.search(r"</?s>|<\|\w+\|>|</?tool_call>", content)


def test_forced_call_follows_the_reasoning(client: OpenAI) -> None:
    options: dict[str, Any] = {"tools": [ADD], "tool_choice": "required", "thinking_budget": 60}
    answer = chat_both_ways(client, SUM, max_tokens=200, **options, **THINKING)

    check_fits(calls_of(answer), ADD)
    assert reasoning_of(answer)
    assert answer.choices[0].finish_reason == "tool_calls"


class GetWeather(BaseModel):
    """Get the weather in a city."""

    city: Literal[CITIES]  # type: ignore[valid-type]  # its values


def test_client_parses_arguments(client: OpenAI) -> None:
    arguments = parameters(PARIS, {"tools": [pydantic_function_tool(GetWeather)]})
    arguments["tool_choice"] = {"type": "function", "function": {"name": "GetWeather"}}
    answer = client.chat.completions.parse(**arguments, max_tokens=100)

    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_older_form_of_tools_is_served(client: OpenAI) -> None:
    answer = chat_both_ways(client, PARIS, functions=[WEATHER["function"]])

    call = message_of(answer).function_call
    assert call is not None
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris"}')
    assert answer.choices[0].finish_reason == "function_call"
    messages = [
        user(PARIS),
        assistant(None, function_call=call.to_dict()),
        {"role": "function", "name": "get_weather", "content": '{"degrees": 21}'},
    ]
    after = chat(client, messages, functions=[WEATHER["function"]])
    assert text_of(after) == "It is 21 degrees in Paris."


def test_truncated_call_has_finish_reason_length(client: OpenAI) -> None:
    answer = chat_both_ways(client, PARIS, tools=[WEATHER], max_tokens=18)

    assert answer.choices[0].finish_reason == "length"
    [call] = message_of(answer).tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert not call.function.arguments.endswith("}")
    # The client sends it back, with the error that it got.
    messages = [
        user(PARIS),
        assistant(None, tool_calls=[call.to_dict()]),
        {"role": "tool", "tool_call_id": call.id, "content": "error: no JSON"},
    ]
    after = chat(client, messages, tools=[WEATHER], max_tokens=4)
    assert counts(after.usage)[0] > counts(answer.usage)[0] + counts(answer.usage)[1]


def test_many_tools_are_accepted(client: OpenAI) -> None:
    few = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(128)]
    chunks = chat(client, "Hello", tools=few[:20], max_tokens=4)
    assert chunks.choices[0].finish_reason in ("length", "stop", "tool_calls")
    # More than fit into a window of 2048 tokens, but as many as a request may have.
    with pytest.raises(BadRequestError) as caught:
        chat(client, "Hello", tools=few, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError) as caught:
        chat(client, "Hello", tools=[*few, WEATHER])
    assert (caught.value.param, "128" in caught.value.message) == ("tools", True)
