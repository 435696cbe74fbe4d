"""Chats as OpenAI's own client reads and joins them."""

import json
from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from contract.dialect import Dialect
from contract.messages import CallPiece, TokenLogprob
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.form_registry import collect
from gateway.completions.rendering.sse import ChunkRenderer
from gateway.dialects.request import ChatRequest, Tool, ToolMode, ToolUse
from tests.gateway.replies import STOP, completion, ended, inbox, said
from tests.support.cases import all_cases
from tests.support.events import parse_chunks

USE = ToolUse([Tool("f", {}, is_strict=False)], ToolMode.AUTO)
SCORED = [TokenLogprob("é", -0.5, 0, [("é", -0.5)], [9])]
THINKING = [
    said("", reasoning="H", reasoning_tokens=1),
    said("", reasoning="m", reasoning_tokens=1),
]
TALKING = [said("Oh"), said(" no"), said(".", finish=STOP), ended()]
CALLING = [
    said("", calls=[CallPiece(0, "f", "{")]),
    said("", calls=[CallPiece(0, "", '"x":1}'), CallPiece(1, "f", "{}")]),
    said("", calls=[CallPiece(2, "f")]),
    said("", calls=[CallPiece(2, "", "{}")], finish=STOP),
    ended(),
]


@all_cases("dialect", Dialect)
@all_cases("legacy", [False, True], ids=["tools", "functions"])
@all_cases(
    ("replies", "fields"),
    [
        (TALKING, {}),
        ([*THINKING, *TALKING], {"include_usage": True}),
        ([*THINKING, *CALLING], {"include_obfuscation": True, "timings_per_token": True}),
        ([said("Well."), *CALLING], {}),
        ([said("é", logprobs=SCORED), said("é", logprobs=SCORED, finish=STOP), ended()], {}),
    ],
    ids=["text", "reasoning", "calls", "text and calls", "logprobs"],
)
async def test_stream_joined_by_openais_client_is_the_whole_response(
    dialect: Dialect, *, legacy: bool, replies: list[Reply], fields: dict[str, Any]
) -> None:
    has_logprobs = bool(replies[0].message.logprobs)  # type: ignore[union-attr]  # a delta
    answer = completion(
        dialect=dialect,
        chat=ChatRequest(messages=[], uses_legacy_functions=legacy),
        tool_use=USE,
        logprobs=1 if has_logprobs else None,
        **fields,
    )
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in parse_chunks(ChunkRenderer(answer).render(replies)):
        list(state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True)))
    body = json.loads((await collect(answer, inbox(*replies))).content)
    whole = ChatCompletion.model_validate(body, strict=True)

    joined = state.current_completion_snapshot
    assert joined.usage is not None
    assert joined.usage.total_tokens == body["usage"]["total_tokens"]
    (choice,), (expected,) = joined.choices, whole.choices
    assert choice.finish_reason == expected.finish_reason
    assert as_told(choice.message) == as_told(expected.message)
    if has_logprobs:
        assert choice.logprobs is not None
        assert choice.logprobs.to_dict() == expected.to_dict()["logprobs"]


def as_told(message: Any) -> dict[str, Any]:
    """Return what a message has, without the client's own additions."""
    reported = {name: value for name, value in message.to_dict().items() if value}
    for call in reported.get("tool_calls", []):
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    return reported
