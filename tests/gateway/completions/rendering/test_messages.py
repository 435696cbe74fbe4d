"""Responses in Anthropic's form: streams as its SDK reads them, and whole messages."""

import asyncio
import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anthropic
import httpx2
import msgspec
import pytest
from typing_extensions import override

from contract.messages import CallPiece
from contract.outcomes import FailureCode
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.form_registry import collect, event_renderer
from gateway.completions.rendering.messages import PING
from gateway.completions.sealing import Sealer
from gateway.dialects.request import (
    ChatRequest,
    MessagesOptions,
    ResponseForm,
    Tool,
    ToolMode,
    ToolUse,
)
from tests.e2e.clients.environments import NODE, PROGRAMS
from tests.gateway.replies import LENGTH, STOP, completion, ended, failed, inbox, said
from tests.support.cases import all_cases, case

USE = ToolUse([Tool(name, {}, is_strict=False) for name in "ab"], ToolMode.AUTO)
SEALER = Sealer(["a secret"])

Kind = tuple[list[Reply], list[dict[str, Any]], str]
"""Replies, the content blocks that they make, and why the message ends."""


def called(index: int, *pieces: str, name: str = "a", **more: Any) -> list[Reply]:
    """Return the deltas of a call."""
    first, *others = (CallPiece(index, "", piece) for piece in ("", *pieces))
    first = CallPiece(index, name, "")
    return [said("", calls=[piece], **more) for piece in (first, *others)]


def thought(*texts: str) -> list[Reply]:
    return [said("", reasoning=text, reasoning_tokens=1) for text in texts]


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def thinking(content: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": content}


def use(name: str, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "name": name, "input": given}


END = said("", finish=STOP)
CUT = said("", finish=LENGTH)
KINDS: dict[str, Kind] = {
    "text": ([said("Hel"), said("lo"), END], [text("Hello")], "end_turn"),
    "nothing": ([END], [text("")], "end_turn"),
    "blank": ([said(" "), said("\n"), END], [text("")], "end_turn"),
    "one delta": ([said("Hello", finish=STOP)], [text("Hello")], "end_turn"),
    "characters": (
        [said('"\\\n\u2028é'), said("😀"), END],
        [text('"\\\n\u2028é😀')],
        "end_turn",
    ),
    "cut text": ([said("Hel"), CUT], [text("Hel")], "max_tokens"),
    "thinking": ([*thought("a", "b"), said("c"), END], [thinking("ab"), text("c")], "end_turn"),
    "thinking only": ([*thought("a"), END], [thinking("a")], "end_turn"),
    "cut thinking": ([*thought("a"), CUT], [thinking("a")], "max_tokens"),
    "thinking again": (
        [*thought("a"), said("b"), *thought("c"), said("d"), END],
        [thinking("a"), text("b"), thinking("c"), text("d")],
        "end_turn",
    ),
    "call": ([*called(0, '{"x"', ":1}"), END], [use("a", {"x": 1})], "tool_use"),
    "call without arguments": ([*called(0), END], [use("a", {})], "tool_use"),
    "call with empty arguments": ([*called(0, "{}"), END], [use("a", {})], "tool_use"),
    "text and a call": (
        [said("Reading."), said("\n"), *called(0, "{}"), END],
        [text("Reading.\n"), use("a", {})],
        "tool_use",
    ),
    "blank and a call": ([said("\n\n"), *called(0, "{}"), END], [use("a", {})], "tool_use"),
    "parallel calls": (
        [*called(0, '{"x":1}'), *called(1, '{"y":2}', name="b"), END],
        [use("a", {"x": 1}), use("b", {"y": 2})],
        "tool_use",
    ),
    "calls in one delta": (
        [said("", calls=[CallPiece(0, "a", '{"x":1}'), CallPiece(1, "b", "{}")]), END],
        [use("a", {"x": 1}), use("b", {})],
        "tool_use",
    ),
    "text between calls": (
        [*called(0, "{}"), said("And"), *called(1, "{}"), END],
        [use("a", {}), text("And"), use("a", {})],
        "tool_use",
    ),
    "text after a call": (
        [*called(0, "{}"), said("Done."), END],
        [use("a", {}), text("Done.")],
        "tool_use",
    ),
    "everything": (
        [
            *thought("a"),
            said("b"),
            *called(0, '{"x":[1,', '{"y":"é"}]}'),
            *thought("c"),
            *called(1, "{}", name="b"),
            said("d"),
            END,
        ],
        [
            thinking("a"),
            text("b"),
            use("a", {"x": [1, {"y": "é"}]}),
            thinking("c"),
            use("b", {}),
            text("d"),
        ],
        "tool_use",
    ),
    "cut call": ([*called(0, '{"x":1,"y":"ab'), CUT], [use("a", {"x": 1})], "max_tokens"),
    "cut second call": (
        [*called(0, "{}"), *called(1, '{"y":'), CUT],
        [use("a", {}), use("a", {})],
        "max_tokens",
    ),
    "broken call": ([*called(0, '{"x":1'), END], [use("a", {"x": 1})], "end_turn"),
    "stop sequence": (
        [said("ab"), said("", finish=STOP, stop_reason="###")],
        [text("ab")],
        "stop_sequence",
    ),
    "stop sequence in a call": (
        [*called(0, '{"x":1'), said("", finish=STOP, stop_reason="###")],
        [use("a", {"x": 1})],
        "stop_sequence",
    ),
    "stop sequence after a call": (
        [*called(0, "{}"), said("", finish=STOP, stop_reason="###")],
        [use("a", {})],
        "tool_use",
    ),
    "stop token": ([said("ab"), said("", finish=STOP, stop_reason=7)], [text("ab")], "end_turn"),
}


def message(*, max_tokens: int = 2, **fields: Any) -> Completion:
    """Return what a message has before its replies."""
    known: dict[str, Any] = {
        "chat": ChatRequest(messages=[]),
        "form": ResponseForm.MESSAGES,
        "tool_use": USE,
        "stop": ["###"],
        "sealed_for": "model",
        "max_tokens": max_tokens,
        "service_tier": "default",
        "prompt_token_ids": [[5] * 10],
    }
    made = completion(**known | fields)
    seal = SEALER.seal_of("msg_1", made.request, tenant_id="acme")
    return msgspec.structs.replace(made, id="msg_1", seal=seal)


LAST = ended(prompt_tokens=10, tokens=2, cached=8)


async def whole_of(replies: Sequence[Reply], made: Completion) -> dict[str, Any]:
    """Return the whole message that replies make."""
    body: dict[str, Any] = json.loads((await collect(made, inbox(*replies, LAST))).content)
    return body


def stream_of(replies: Sequence[Reply], made: Completion, **options: Any) -> bytes:
    """Return the stream that replies make, which arrive one at a time."""
    renderer = event_renderer(made, **options)
    parts = [renderer.opening(), *(renderer.render([reply]) for reply in [*replies, LAST])]
    assert renderer.finished
    return b"".join(parts)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Return the data of events, each of which names its type."""
    events = []
    for event in stream.removesuffix(b"\n\n").split(b"\n\n"):
        kind, data = event.split(b"\n")[:2]
        read: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
        assert kind == b"event: " + read["type"].encode()
        events.append(read)
    return events


def read_with_sdk(stream: bytes) -> dict[str, Any]:
    """Return the message that Anthropic's SDK reads from a stream."""
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    transport = httpx2.MockTransport(
        lambda _: httpx2.Response(200, headers=headers, content=stream)
    )
    with (
        httpx2.Client(transport=transport) as http,
        anthropic.Anthropic(api_key="k", base_url="http://localhost", http_client=http) as client,
        client.messages.stream(model="m", max_tokens=9, messages=[]) as reading,
    ):
        read = reading.get_final_message().to_dict()
    # The SDK adds this member.
    assert read.pop("stop_details") is None
    return read


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in each.items() if k not in ("id", "signature")} for each in content]


@all_cases("name", KINDS)
async def test_sdk_reads_the_whole_message_from_the_stream(name: str) -> None:
    replies, content, reason = KINDS[name]
    made = message()
    whole = await whole_of(replies, made)
    assert without_ids(whole["content"]) == content
    assert (whole["stop_reason"], whole["type"], whole["role"]) == (reason, "message", "assistant")
    assert whole["stop_sequence"] == ("###" if reason == "stop_sequence" else None)
    read = read_with_sdk(PING.join([stream_of(replies, made), b""]))
    assert read == whole
    assert whole["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 8,
        "output_tokens": 2,
        "output_tokens_details": {
            "thinking_tokens": sum(getattr(each.message, "reasoning_tokens", 0) for each in replies)
        },
        "service_tier": "standard",
    }


@all_cases("name", KINDS)
def test_events_follow_the_order_of_the_api(name: str) -> None:
    events = events_of(stream_of(KINDS[name][0], message()))
    kinds = [each["type"] for each in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert start["usage"]["input_tokens"] == 10
    count = -1
    is_open = False
    for each in events[1:-2]:
        if each["type"] == "content_block_start":
            count += 1
            assert not is_open
            is_open = True
        assert is_open
        assert each["index"] == count
        is_open = each["type"] != "content_block_stop"
    assert not is_open


@all_cases("name", KINDS)
def test_stream_resumes_after_any_event(name: str) -> None:
    replies = KINDS[name][0]
    everything = stream_of(replies, message(), has_ids=True)
    events = everything.split(b"\n\n")[:-1]
    assert [event.split(b"\nid: ")[1] for event in events] == [
        b"msg_1:%d" % number for number in range(1, len(events) + 1)
    ]
    for skip in range(len(events)):
        rest = stream_of(replies, message(), has_ids=True, skip=skip)
        assert rest.split(b"\n\n")[:-1] == events[skip:]
    # However many replies arrive at a time.
    renderer = event_renderer(message(), has_ids=True)
    assert renderer.render([*replies, LAST]) == everything


async def test_signature_contains_the_reasoning_for_the_next_turn() -> None:
    whole = await whole_of(KINDS["thinking again"][0], message())
    options = MessagesOptions(omits_thinking=True)
    omitted = await whole_of(KINDS["thinking again"][0], message(form_options=options))
    for shown, hidden, expected in zip(whole["content"], omitted["content"], "abcd", strict=True):
        if shown["type"] == "text":
            assert shown == hidden
            continue
        assert shown == hidden | {"thinking": expected}
        assert hidden["thinking"] == ""
        opened = SEALER.open(hidden["signature"], tenant_id="acme", model="model")
        assert opened == expected
    stream = stream_of(KINDS["thinking again"][0], message(form_options=options))
    assert b"thinking_delta" not in stream
    assert read_with_sdk(stream) == omitted


def test_hidden_reasoning_makes_no_blocks() -> None:
    made = message(chat=ChatRequest(messages=[], shows_reasoning=False))
    assert without_ids(read_with_sdk(stream_of(KINDS["thinking"][0], made))["content"]) == [
        text("c")
    ]


async def test_window_may_end_before_max_tokens() -> None:
    replies = KINDS["cut text"][0]
    for most, reason in ((2, "max_tokens"), (3, "model_context_window_exceeded")):
        with case(most):
            whole = await whole_of(replies, message(max_tokens=most))
            assert whole["stop_reason"] == reason


def test_cost_is_beside_the_tokens() -> None:
    made = msgspec.structs.replace(message(), cost_of=lambda usage: usage.completion_tokens)
    assert events_of(stream_of([END], made))[-2]["usage"]["cost"] == 2e-06


@all_cases("begun", [[], [said("a")], called(0, '{"x"'), thought("a")])
def test_error_after_the_head_is_an_event(begun: list[Reply]) -> None:
    renderer = event_renderer(message())
    stream = renderer.opening() + renderer.render([*begun, failed(FailureCode.WORKER_LOST)])
    assert renderer.failure is not None
    stream += renderer.render_failure(renderer.failure)
    last = events_of(stream)[-1]
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"
    with pytest.raises(anthropic.APIStatusError) as caught:
        read_with_sdk(stream)
    assert caught.value.body == last


class _Streams(BaseHTTPRequestHandler):
    """Answers each request with the stream of the kind that it names as its model."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(PING + stream_of(KINDS[body["model"]][0], message()))

    @override
    def log_message(self, *args: Any) -> None:
        """Write no log."""


@NODE.skip
async def test_sdk_for_node_reads_the_same_messages(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Streams)
    Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "kinds").write_text("\n".join(KINDS))
    command = f"node {PROGRAMS}/messages.mjs http://127.0.0.1:{server.server_port} < kinds"
    printed = await asyncio.to_thread(NODE.run, ("bash", "-c", command), tmp_path)
    server.shutdown()
    server.server_close()
    for name, line in zip(KINDS, printed.strip().split("\n"), strict=True):
        with case(name):
            read = json.loads(line)["message"]
            # The SDK adds this member.
            assert read.pop("parsed_output") is None
            whole = await whole_of(KINDS[name][0], message())
            if whole["stop_reason"] != "tool_use":
                # Each SDK keeps another part of input that was cut off.
                for block in (*read["content"], *whole["content"]):
                    block.pop("input", None)
            assert read == whole
