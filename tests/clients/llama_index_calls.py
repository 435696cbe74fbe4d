"""Calls a chat endpoint with LlamaIndex's client, and prints the results as JSON.

Run by the Python of the clients' environment: llama_index_calls.py BASE_URL KEY MODEL
"""

import asyncio
import json
import sys
from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import BadRequestError
from pydantic import BaseModel

ITALY = "What is the capital of Italy?"
PARIS = "What is the weather in Paris?"


class Place(BaseModel):
    """Where it is."""

    city: Literal["Oslo", "Rome"]


def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """Return the result for the model."""
    return f"21 degrees in {city}"


def main(base_url: str, key: str, model: str) -> None:
    """Make all calls, one after the other."""

    def client(**options: Any) -> OpenAILike:
        return OpenAILike(
            model=model,
            api_base=base_url,
            api_key=key,
            is_chat_model=True,
            is_function_calling_model=True,
            context_window=2048,
            max_retries=0,
            **{"temperature": 0.0, "max_tokens": 100} | options,
        )

    llm = client()
    tool = FunctionTool.from_defaults(get_weather, description="Get the weather in a city")
    messages = [
        ChatMessage(role="system", content="You are a helpful assistant."),
        ChatMessage(role="user", content=ITALY),
    ]
    called = llm.chat_with_tools([tool], user_msg=PARIS, tool_required=True)
    *_, streamed_call = llm.stream_chat_with_tools([tool], user_msg=PARIS, tool_required=True)
    reported = {
        "chat": llm.chat(messages).message.content,
        "complete": llm.complete(ITALY).text,
        "achat": asyncio.run(llm.achat(messages)).message.content,
        "stream": [piece.delta for piece in llm.stream_chat(messages)],
        "call": _calls(llm, called),
        "streamed_call": _calls(llm, streamed_call),
        "result": llm.predict_and_call([tool], user_msg=PARIS, tool_required=True).response,
        "structured": llm.structured_predict(Place, PromptTemplate("Where is it?")).model_dump(),
        "error": _error(client(additional_kwargs={"top_p": 3.0})),
    }
    print(json.dumps(reported))  # noqa: T201 - what it is called for


def _calls(llm: OpenAILike, response: Any) -> list[tuple[str, Any]]:
    calls = llm.get_tool_calls_from_response(response)
    return [(call.tool_name, call.tool_kwargs) for call in calls]


def _error(llm: OpenAILike) -> str | None:
    try:
        llm.complete(ITALY)
    except BadRequestError as error:
        return error.param
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
