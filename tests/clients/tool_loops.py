"""A loop of two steps with a tool by each client, at its defaults; prints the results as JSON.

Run by the Python of the clients' environment, with OPENAI_BASE_URL, OPENAI_API_KEY,
ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY: tool_loops.py MODEL
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import agents
import anthropic
import pydantic_ai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI

QUESTION = "What is the weather in Paris?"
ASKED = {"role": "user", "content": QUESTION}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
Loop = Callable[[str], Any]
"""Takes the model, and returns the last text."""
given: list[str] = []
event_loop = asyncio.Runner()


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The city.
    """
    given.append(city)
    return f"21 degrees in {city}"


def openai_chat(model: str) -> str | None:
    """Make chats by the stream helper."""
    client, messages = OpenAI(), list[Any]([ASKED])
    tool: Any = {"name": get_weather.__name__, "parameters": SCHEMA}
    while True:
        with client.chat.completions.stream(
            model=model, messages=messages, tools=[{"type": "function", "function": tool}]
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            output = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})


def openai_responses(model: str) -> str:
    """Make responses by the stream helper."""
    client, items = OpenAI(), list[Any]([ASKED])
    tool: Any = {"type": "function", "name": get_weather.__name__, "parameters": SCHEMA}
    while True:
        with client.responses.stream(model=model, input=items, tools=[tool]) as stream:
            response = stream.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += response.output
        for call in calls:
            output = get_weather(**json.loads(call.arguments))
            made = {"type": "function_call_output", "call_id": call.call_id, "output": output}
            items.append(made)


def anthropic_runner(model: str) -> str:
    """Make messages by the tool runner, as streams."""
    asked: Any = {"model": model, "max_tokens": 100, "messages": [ASKED], "stream": True}
    tool = anthropic.beta_tool(get_weather)
    *_, last = anthropic.Anthropic().beta.messages.tool_runner(tools=[tool], **asked)
    return str(last.get_final_text())


def openai_agents(*, streams: bool) -> Loop:
    """Make responses by an agent."""

    async def run(model: str) -> Any:
        agent = agents.Agent(name="agent", model=model, tools=[agents.function_tool(get_weather)])
        if not streams:
            return (await agents.Runner.run(agent, QUESTION)).final_output
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    # The client belongs to the first event loop that uses it.
    return lambda model: event_loop.run(run(model))


def pydantic_agent(provider: str) -> Loop:
    """Make responses or chats by an agent."""

    def run(model: str) -> Any:
        agent = pydantic_ai.Agent(f"{provider}:{model}", tools=[get_weather])
        return agent.run_sync(QUESTION).output

    return run


def langchain(*, streams: bool) -> Loop:
    """Make responses by a chat model."""

    def run(model: str) -> Any:
        bound = ChatOpenAI(model=model, use_responses_api=True).bind_tools([get_weather])
        messages = list[Any]([HumanMessage(QUESTION)])
        while True:
            if streams:
                message, *others = bound.stream(messages)
                for each in others:
                    message += each
            else:
                message = bound.invoke(messages)
            if not message.tool_calls:
                return message.text
            messages.append(message)
            for call in message.tool_calls:
                messages.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))

    return run


LOOPS: dict[str, Loop] = {
    "openai chat": openai_chat,
    "openai responses": openai_responses,
    "anthropic tool_runner": anthropic_runner,
    "openai-agents": openai_agents(streams=False),
    "openai-agents streamed": openai_agents(streams=True),
    "pydantic-ai openai": pydantic_agent("openai"),
    "pydantic-ai openai-chat": pydantic_agent("openai-chat"),
    "langchain": langchain(streams=False),
    "langchain streamed": langchain(streams=True),
}


def main(model: str) -> None:
    """Run all loops, one after the other."""
    reported = {}
    for name, loop in LOOPS.items():
        given.clear()
        try:
            answer = loop(model)
        except Exception as error:
            answer = repr(error)  # Other clients still have results.
        reported[name] = {"given": list(given), "answer": answer}
    print(json.dumps(reported))  # noqa: T201 - what it is called for


if __name__ == "__main__":
    main(*sys.argv[1:])
