"""Whole responses to chats."""

import json
from typing import Any

from contract.dialect import Dialect
from contract.messages import CallPiece
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.form_registry import collect
from gateway.completions.rendering.tool_calls import call_id
from gateway.dialects.request import ChatRequest, Tool, ToolMode, ToolUse
from tests.gateway.replies import LENGTH, STOP, completion, ended, inbox, said
from tests.support.cases import all_cases

CHAT = ChatRequest(messages=[])
TOOLS = [Tool("f", {}, is_strict=False), Tool("g", {}, is_strict=False)]
AUTO = ToolUse(TOOLS, ToolMode.AUTO)
CALLING = [
    said("", calls=[CallPiece(0, "f", '{"x"')]),
    said("", calls=[CallPiece(0, "", ":1}"), CallPiece(1, "g", "{}")]),
    said("", finish=STOP),
    ended(),
]


async def whole(*replies: Reply, **fields: Any) -> dict[str, Any]:
    """Return the body for some replies to a chat."""
    answer: Completion = completion(**({"chat": CHAT} | fields))
    body: dict[str, Any] = json.loads((await collect(answer, inbox(*replies))).content)
    return body


async def test_response_has_all_fields_of_openai() -> None:
    assert await whole(said("a"), said("b", finish=STOP), ended(cached=1)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "system_fingerprint": "fp_1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


@all_cases("dialect", Dialect)
async def test_message_of_omlx_always_has_reasoning_and_calls(dialect: Dialect) -> None:
    body = await whole(said("Paris.", finish=STOP), ended(), dialect=dialect)
    message = body["choices"][0]["message"]
    nulls = {"reasoning_content": None, "tool_calls": None} if dialect is Dialect.OMLX else {}
    assert message == {"role": "assistant", "content": "Paris.", "refusal": None} | nulls


@all_cases("dialect", Dialect)
async def test_conflict_19_reasoning_has_the_name_of_its_dialect(
    dialect: Dialect,
) -> None:
    body = await whole(
        said("", reasoning="Hm", reasoning_tokens=2, token_ids=[1, 2]),
        said("", reasoning=".", reasoning_tokens=1),
        said("Yes", finish=STOP),
        ended(tokens=4),
        dialect=dialect,
    )
    message = body["choices"][0]["message"]
    names = ["reasoning_content", *["reasoning"] * (dialect is Dialect.VLLM)]
    assert [message[name] for name in (*names, "content")] == ["Hm."] * len(names) + ["Yes"]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_calls_are_whole_and_content_is_null_where_there_is_none() -> None:
    (choice,) = (await whole(*CALLING, tool_use=AUTO))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {
                "id": call_id("chatcmpl-1", 0, index),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate([("f", '{"x":1}'), ("g", "{}")])
        ],
    }


async def test_content_next_to_calls_is_returned() -> None:
    (choice,) = (await whole(said("Let me see."), *CALLING, tool_use=AUTO))["choices"]
    assert choice["message"]["content"] == "Let me see."
    assert len(choice["message"]["tool_calls"]) == 2


async def test_message_without_anything_has_empty_content() -> None:
    (choice,) = (await whole(said("", finish=LENGTH), ended(tokens=0)))["choices"]
    assert choice["message"]["content"] == ""
    thinking = said("", reasoning="Hm", reasoning_tokens=1, finish=LENGTH)
    (choice,) = (await whole(thinking, ended()))["choices"]
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "length"


async def test_truncated_call_is_returned_as_it_is() -> None:
    replies = [said("", calls=[CallPiece(0, "f", '{"x"')]), said("", finish=LENGTH), ended()]
    (choice,) = (await whole(*replies, tool_use=AUTO))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x"'


async def test_named_function_does_not_change_the_finish_reason() -> None:
    use = ToolUse(TOOLS, ToolMode.NAMED, "f")
    (choice,) = (await whole(*CALLING, tool_use=use))["choices"]
    assert choice["finish_reason"] == "stop"


async def test_only_the_first_call_is_returned_without_parallel_calls() -> None:
    use = ToolUse(TOOLS, ToolMode.AUTO, is_parallel=False)
    (choice,) = (await whole(*CALLING, tool_use=use))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]


@all_cases(("is_parallel", "returned"), [(True, ["g", "g"]), (False, ["g"])])
async def test_call_that_is_not_allowed_is_not_returned(
    returned: list[str], *, is_parallel: bool
) -> None:
    use = ToolUse(TOOLS[1:], ToolMode.AUTO, is_parallel=is_parallel, allowed=("g",))
    calls = [*CALLING[:2], said("", calls=[CallPiece(2, "f", "{}"), CallPiece(3, "g", "{}")])]
    (choice,) = (await whole(*calls, *CALLING[2:], tool_use=use))["choices"]
    found = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in found] == returned
    assert [call["id"] for call in found] == [
        call_id("chatcmpl-1", 0, index) for index in range(len(returned))
    ]
    assert choice["finish_reason"] == "tool_calls"
    (choice,) = (await whole(CALLING[0], *CALLING[2:], tool_use=use))["choices"]
    assert "tool_calls" not in choice["message"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


@all_cases("dialect", [Dialect.OPENAI, Dialect.OMLX])
async def test_client_that_sends_functions_gets_one_function_call(
    dialect: Dialect,
) -> None:
    legacy = ChatRequest(messages=[], uses_legacy_functions=True)
    (choice,) = (await whole(*CALLING, chat=legacy, tool_use=AUTO, dialect=dialect))["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"x":1}'}
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] is None


async def test_choices_are_in_order_whatever_order_they_finish_in() -> None:
    body = await whole(
        said("1", choice=1, reasoning="r1", reasoning_tokens=1, finish=LENGTH),
        said("0", reasoning="r0", reasoning_tokens=1, finish=STOP, stop_reason="."),
        ended(),
        n=2,
    )
    assert [
        (each["index"], each["message"]["content"], each["message"]["reasoning_content"])
        for each in body["choices"]
    ] == [(0, "0", "r0"), (1, "1", "r1")]
    assert [each["stop_reason"] for each in body["choices"]] == [".", None]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_ids_of_calls_depend_on_request_choice_and_place() -> None:
    places = [(r, c, i) for r in ("chatcmpl-1", "chatcmpl-11") for c in (0, 1, 11) for i in (0, 1)]
    ids = [call_id(*place) for place in places]
    assert len({*ids}) == len(places)
    assert ids == [call_id(*place) for place in places]
