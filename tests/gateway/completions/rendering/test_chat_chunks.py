"""The chunks of a chat, and which deltas make events."""

import json
from typing import Any

from contract.dialect import Dialect
from contract.messages import CallPiece
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.sse import BLOCK_BYTES, DONE, ChunkRenderer
from gateway.dialects.request import ChatRequest, Tool, ToolMode, ToolUse
from tests.gateway.replies import LENGTH, STOP, completion, ended, failed, said
from tests.support.cases import all_cases
from tests.support.events import parse_chunks, split_events

CHAT = ChatRequest(messages=[])
LEGACY = ChatRequest(messages=[], uses_legacy_functions=True)
TOOLS = [Tool("f", {}, is_strict=False), Tool("g", {}, is_strict=False)]
AUTO = ToolUse(TOOLS, ToolMode.AUTO)
HEAD = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"system_fingerprint":"fp_1","choices":'
)
USAGE = (
    b'"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,'
    b'"prompt_tokens_details":{"cached_tokens":0},'
    b'"completion_tokens_details":{"reasoning_tokens":0}}'
)
CALLING = [
    said("", calls=[CallPiece(0, "f")]),
    said("", calls=[CallPiece(0, "", '{"x"')]),
    said("", calls=[CallPiece(0, "", ":1}"), CallPiece(1, "g", "{")]),
    said("", calls=[CallPiece(1, "", "}")]),
    said("", finish=STOP),
    ended(),
]


def chat(**fields: Any) -> Completion:
    """Make the fixed part of a chat's response."""
    return completion(**({"chat": CHAT} | fields))


def stream(answer: Completion, *replies: Reply) -> bytes:
    """Render replies that arrive one by one."""
    renderer = ChunkRenderer(answer)
    return b"".join(renderer.render([reply]) for reply in replies)


def choices(answer: Completion, *replies: Reply) -> list[dict[str, Any]]:
    """Return the choice of each chunk that has one."""
    chunks = parse_chunks(stream(answer, *replies))
    return [choice for chunk in chunks for choice in chunk["choices"]]


def deltas(answer: Completion, *replies: Reply) -> list[dict[str, Any]]:
    """Return what each chunk adds to its message."""
    return [choice["delta"] for choice in choices(answer, *replies)]


def test_stream_is_byte_for_byte_as_documented() -> None:
    body = stream(chat(), said("Hel"), said("lo"), said("!", finish=STOP), ended())

    def event(data: bytes) -> bytes:
        return HEAD + data + b"}\n\n"

    nulls = b',"logprobs":null,"finish_reason":null}]'
    assert body == (
        event(b'[{"index":0,"delta":{"role":"assistant","content":""}' + nulls)
        + event(b'[{"index":0,"delta":{"content":"Hel"}' + nulls)
        + event(b'[{"index":0,"delta":{"content":"lo"}' + nulls)
        + event(b'[{"index":0,"delta":{"content":"!"}' + nulls)
        + event(b'[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],' + USAGE)
        + b"data: [DONE]\n\n"
    )


def test_role_comes_first_and_once_for_each_choice() -> None:
    reported = choices(
        chat(n=2),
        said(""),
        said("a", choice=1),
        said("b"),
        said("c", choice=1, finish=STOP),
        said("", finish=STOP),
        ended(),
    )
    by_choice = {
        index: [each["delta"] for each in reported if each["index"] == index] for index in (0, 1)
    }
    role = {"role": "assistant", "content": ""}
    assert by_choice == {
        0: [role, {"content": "b"}, {}],
        1: [role, {"content": "a"}, {"content": "c"}, {}],
    }


def test_empty_delta_makes_no_event() -> None:
    assert stream(chat(), said("")) == b""
    assert stream(chat(), said("", reasoning_tokens=1)) == b""


@all_cases("dialect", Dialect)
@all_cases("fields", [{}, {"include_usage": True}], ids=["plain", "usage"])
@all_cases("kind", ["text", "reasoning"])
def test_fast_and_slow_rendering_give_the_same_bytes(
    dialect: Dialect, fields: dict[str, Any], kind: str
) -> None:
    text = '"é\n'
    reported: dict[str, Any] = {"text": "", "reasoning": text, "reasoning_tokens": 1}
    if kind == "text":
        reported = {"text": text}
    replies = [said(**reported), said(**reported), said(**reported, finish=STOP), ended()]
    body = stream(chat(dialect=dialect, **fields), *replies)
    _, first, plain, third, *_ = split_events(body)
    assert first == plain == third


@all_cases("dialect", Dialect)
def test_conflict_19_reasoning_has_the_names_of_its_dialect(dialect: Dialect) -> None:
    reported = deltas(
        chat(dialect=dialect),
        said("", reasoning="Hm", reasoning_tokens=1),
        said("", reasoning=".", reasoning_tokens=1),
        said("Yes", finish=STOP),
        ended(),
    )
    names = ["reasoning_content", *["reasoning"] * (dialect is Dialect.VLLM)]
    assert reported[1:] == [
        dict.fromkeys(names, "Hm"),
        dict.fromkeys(names, "."),
        {"content": "Yes"},
        {},
    ]


def test_text_after_its_tokens_is_labelled_correctly() -> None:
    replies = [
        said("", reasoning="a", reasoning_tokens=2, token_ids=[1, 2]),
        said("", reasoning="b", token_ids=[3]),
        said("", reasoning="c", reasoning_tokens=1, token_ids=[]),
        said("d", reasoning="e", reasoning_tokens=1),
        said("", reasoning="f", finish=STOP),
        ended(),
    ]
    reported = deltas(chat(), *replies)[1:]
    assert "".join(each.get("reasoning_content", "") for each in reported) == "abcef"
    assert "".join(each.get("content", "") for each in reported) == "d"
    assert reported[-1] == {}


def test_each_chunk_of_a_delta_has_one_kind_of_content() -> None:
    calls = [CallPiece(0, "f"), CallPiece(1, "g"), CallPiece(0, "", "{}"), CallPiece(1, "", "[")]
    reported = choices(
        chat(tool_use=AUTO),
        said("So", reasoning="Hm", reasoning_tokens=1, calls=calls, token_ids=[1, 2, 3]),
        said("", finish=STOP),
        ended(),
    )
    assert [list(each["delta"]) for each in reported] == [
        ["role", "content"],
        ["reasoning_content"],
        ["content"],
        ["tool_calls"],
        ["tool_calls"],
        [],
    ]
    assert [each["delta"]["tool_calls"][0]["function"] for each in reported[3:5]] == [
        {"name": "f", "arguments": "{}"},
        {"name": "g", "arguments": "["},
    ]


def test_calls_have_id_type_and_name_in_their_first_piece_only() -> None:
    reported = choices(chat(tool_use=AUTO), *CALLING)
    pieces = [call for each in reported for call in each["delta"].get("tool_calls", [])]
    first, second = (piece.pop("id") for piece in pieces if "id" in piece)
    assert first != second
    assert all(id_.startswith("call_") and len(id_) == len("call_") + 24 for id_ in (first, second))
    assert pieces == [
        {"index": 0, "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"x"'}},
        {"index": 0, "function": {"arguments": ":1}"}},
        {"index": 1, "type": "function", "function": {"name": "g", "arguments": "{"}},
        {"index": 1, "function": {"arguments": "}"}},
    ]
    assert reported[-1]["finish_reason"] == "tool_calls"


def test_response_rendered_again_gives_calls_the_same_ids() -> None:
    answer = chat(tool_use=AUTO)
    assert stream(answer, *CALLING) == stream(answer, *CALLING)


@all_cases(
    ("mode", "finish", "expected"),
    [
        (ToolMode.AUTO, STOP, "tool_calls"),
        (ToolMode.REQUIRED, STOP, "tool_calls"),
        (ToolMode.NAMED, STOP, "stop"),
        (ToolMode.AUTO, LENGTH, "length"),
        (ToolMode.NAMED, LENGTH, "length"),
    ],
)
def test_finish_reason_is_tool_calls_if_the_model_ended_by_itself(
    mode: ToolMode, finish: Any, expected: str
) -> None:
    use = ToolUse(TOOLS, mode, "f" if mode is ToolMode.NAMED else None)
    replies = [*CALLING[:-2], said("", finish=finish), ended()]
    assert choices(chat(tool_use=use), *replies)[-1]["finish_reason"] == expected


def test_finish_reason_is_stop_if_no_tool_was_called() -> None:
    reported = choices(chat(tool_use=AUTO), said("No.", finish=STOP), ended())
    assert reported[-1]["finish_reason"] == "stop"


def test_call_in_the_last_delta_counts() -> None:
    reported = choices(
        chat(tool_use=AUTO), said("", calls=[CallPiece(0, "f", "{}")], finish=STOP), ended()
    )
    assert [each["finish_reason"] for each in reported] == [None, None, "tool_calls"]


def test_only_the_first_call_is_returned_without_parallel_calls() -> None:
    use = ToolUse(TOOLS, ToolMode.AUTO, is_parallel=False)
    reported = deltas(chat(tool_use=use), *CALLING)
    assert {call["index"] for each in reported for call in each.get("tool_calls", [])} == {0}


def test_client_that_sends_functions_gets_one_function_call() -> None:
    reported = choices(chat(chat=LEGACY, tool_use=AUTO), *CALLING)
    assert [each["delta"] for each in reported] == [
        {"role": "assistant", "content": ""},
        {"function_call": {"name": "f", "arguments": ""}},
        {"function_call": {"arguments": '{"x"'}},
        {"function_call": {"arguments": ":1}"}},
        {},
    ]
    assert reported[-1]["finish_reason"] == "function_call"


def test_stop_reason_is_included_if_there_is_one() -> None:
    reported = choices(chat(), said("a", finish=STOP, stop_reason="\n"), ended())
    assert [each.get("stop_reason") for each in reported] == [None, None, "\n"]
    assert "stop_reason" not in reported[0]


def test_text_with_tools_is_streamed_and_not_searched() -> None:
    reported = deltas(chat(tool_use=AUTO), said("<tool_call>"), said("{}", finish=STOP), ended())
    assert reported[1:] == [{"content": "<tool_call>"}, {"content": "{}"}, {}]


def test_include_usage_gives_openais_extra_chunk_and_nulls_elsewhere() -> None:
    replies = [
        said("", reasoning="Hm", reasoning_tokens=3, token_ids=[1, 2, 3]),
        said("So", reasoning_tokens=1, token_ids=[4, 5]),
        said("!", finish=STOP),
        ended(tokens=6),
    ]
    *others, extra = parse_chunks(stream(chat(include_usage=True), *replies))
    assert [chunk["usage"] for chunk in others] == [None] * 5
    assert extra["choices"] == []
    assert extra["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_continuous_usage_of_the_role_counts_no_token() -> None:
    replies = [said("a", token_ids=[1, 2]), said("b", finish=STOP), ended(tokens=3)]
    chunks = parse_chunks(stream(chat(include_usage=True, continuous_usage=True), *replies))
    counts = [
        (chunk["choices"][0]["delta"], chunk["usage"]["completion_tokens"]) for chunk in chunks[:-1]
    ]
    assert counts == [
        ({"role": "assistant", "content": ""}, 0),
        ({"content": "a"}, 2),
        ({"content": "b"}, 3),
        ({}, 3),
    ]


@all_cases("dialect", Dialect)
def test_usage_is_in_the_last_chunk_of_the_choice_that_finishes_last(dialect: Dialect) -> None:
    replies = [said("a"), said("b", choice=1, finish=STOP), said("c", finish=STOP), ended()]
    *others, final = parse_chunks(stream(chat(dialect=dialect, n=2), *replies))
    assert all("usage" not in chunk for chunk in others)
    assert final["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert final["usage"]["total_tokens"] == 5


@all_cases("dialect", Dialect)
def test_failure_finishes_open_choices_for_fireworks_only(dialect: Dialect) -> None:
    renderer = ChunkRenderer(chat(dialect=dialect, n=3))
    renderer.render(
        [
            said("a", reasoning_tokens=1, token_ids=[1, 2]),
            said("b", choice=1, finish=STOP),
            failed(),
        ]
    )
    assert renderer.failure is not None
    (event,) = parse_chunks(renderer.render_failure(renderer.failure))
    expected: list[dict[str, Any]] = [
        {"index": index, "delta": {}, "logprobs": None, "finish_reason": "error"}
        for index in (0, 2)
    ]
    is_fireworks = dialect in (Dialect.FIREWORKS, Dialect.FIREWORKS_2026)
    assert event.get("choices") == (expected if is_fireworks else None)
    assert event["usage"]["completion_tokens"] == 3
    assert event["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


@all_cases("text", ["", "a", '"\n\x00', "😀" * 5, "x" * 100])
def test_chunks_are_padded_to_the_same_length(text: str) -> None:
    renderer = ChunkRenderer(chat(include_obfuscation=True, tool_use=AUTO))
    replies = [
        said("", reasoning=text + ".", reasoning_tokens=1),
        said(text + "."),
        said("", calls=[CallPiece(0, "f", text)]),
        said(text, finish=STOP),
        ended(),
    ]
    *events, done = split_events(renderer.render(replies))
    assert done == DONE
    for event in events:
        assert (len(event) + len("\n\n")) % BLOCK_BYTES == 0
        assert json.loads(event.removeprefix(b"data: "))["obfuscation"] is not None


def test_timings_of_a_running_stream_are_in_every_chunk_but_that_of_the_role() -> None:
    chunks = parse_chunks(
        stream(chat(timings_per_token=True), said("a"), said("b", finish=STOP), ended())
    )
    assert [chunk.get("timings", {}).get("predicted_n") for chunk in chunks] == [None, 1, 2, 2]
