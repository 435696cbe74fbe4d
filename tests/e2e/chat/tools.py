"""Tools that the tiny model can call, described as in its training text."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from tests.e2e.chat.chats import Message, message_of

Tool = dict[str, Any]


def tool(name: str, description: str, **properties: Any) -> Tool:
    """Return a tool whose parameters are all required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}

WEATHER = tool("get_weather", "Get the weather in a city", city=STRING)
TIME = tool("get_time", "Get the time in a city", city=STRING)
ADD = tool("add", "Add two numbers", a=INTEGER, b=INTEGER)

PARIS = "What is the weather in Paris?"
"""Makes the model call the weather tool."""

CITIES = ("Oslo", "Rome")
WEATHER_OF_CITIES = tool(
    "get_weather", "Get the weather in a city", city={"type": "string", "enum": list(CITIES)}
)
"""A call of it is short, whatever text the model prefers."""


def named(tool: Tool) -> Tool:
    """Return the `tool_choice` that forces a call."""
    return {"type": "function", "function": {"name": tool["function"]["name"]}}


def calls_of(answer: ChatCompletion) -> list[tuple[str, Any]]:
    """Return name and arguments of each call of a response with one choice."""
    return calls_in(message_of(answer))


def calls_in(message: ChatCompletionMessage) -> list[tuple[str, Any]]:
    """Return name and arguments of each call of a message."""
    calls = message.to_dict().get("tool_calls") or []
    assert isinstance(calls, list)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def check_fits(calls: list[tuple[str, Any]], *tools: Tool) -> None:
    """Check that calls name one of the tools, and that their arguments match its schema."""
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])


def result(call_id: str, content: str) -> Message:
    """Return the message with a tool's result."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}
