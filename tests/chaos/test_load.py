"""What a client does when its connection ends, and what it finds wrong, with a gateway that says what it is told to."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.chaos.load import Visit
from tests.chaos.proxy import LOOPBACK
from tests.chaos.recipes import Recipe
from tests.chaos.story import Ending, Manner, Story
from tests.chaos.transcript import Transcript
from tests.support.patience import PATIENCE_SECONDS

WORDS = ["one", " two", " three"]
USAGE = {"prompt_tokens": 1, "completion_tokens": 3}
ID = "cmpl-1"


def chunk(number: int) -> bytes:
    """The event that tells one word; the last one ends the choice."""
    is_last = number == len(WORDS)
    choice = {
        "index": 0,
        "text": WORDS[number - 1],
        "token_ids": [number],
        "finish_reason": "length" if is_last else None,
    }
    body = {"id": ID, "choices": [choice], **({"usage": USAGE} if is_last else {})}
    return event(number, json.dumps(body).encode())


def event(number: int, data: bytes) -> bytes:
    return b"data: " + data + f"\nid: {ID}:{number}\n\n".encode()


DONE = event(4, b"[DONE]")
FAREWELL = event(1, b'{"error": {"code": "gateway_stopping"}}') + event(1, b"[DONE]")
FAILURE = event(2, b'{"error": {"code": "poisonous_request"}}') + event(3, b"[DONE]")
WHOLE = json.dumps(
    {
        "id": ID,
        "choices": [
            {"index": 0, "text": "".join(WORDS), "token_ids": [1, 2, 3], "finish_reason": "length"}
        ],
        "usage": USAGE,
    }
).encode()


def stream(*events: bytes, is_whole: bool = True) -> bytes:
    """An answer made of events, which breaks off if it is not whole."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    body = b"".join(events)
    return head + b"%x\r\n%s\r\n" % (len(body), body) + (b"0\r\n\r\n" if is_whole else b"")


def answer(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def recipe() -> Recipe:
    expected = Transcript()
    expected.add(json.loads(WHOLE))
    expected.is_done = True
    return Recipe("words", {}, expected={True: expected, False: expected})


async def visit(manner: Manner, answers: Sequence[bytes]) -> tuple[Story, list[bytes]]:
    """Let a client meet answers, each on a connection of its own; return its story and its requests."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answers[len(asked) - 1])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    url = f"http://{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
    story = Story(1, "words", manner, "free")
    async with asyncio.timeout(PATIENCE_SECONDS):
        await Visit(story, recipe(), {"gateway-1": url}, "key", start=0, draw=0.9).run()
    server.close()
    await server.wait_closed()
    return story, asked


WHOLE_STREAM = stream(*map(chunk, (1, 2, 3)), DONE)
REFUSAL = answer(503, b'{"error": {"code": "overloaded"}}', "retry-after: 0")


@pytest.mark.parametrize(
    ("manner", "answers"),
    [
        (Manner.STREAM, [WHOLE_STREAM]),
        (
            Manner.RETURNING,
            [stream(chunk(1), is_whole=False), stream(chunk(2), chunk(3), DONE)],
        ),
        (Manner.RETURNING, [stream(chunk(1), FAREWELL), stream(chunk(2), chunk(3), DONE)]),
        (Manner.REPEATING_STREAM, [stream(chunk(1), chunk(2), is_whole=False), WHOLE_STREAM]),
        (Manner.REPEATING_STREAM, [REFUSAL, WHOLE_STREAM]),
        (Manner.WHOLE, [answer(200, WHOLE)]),
        (Manner.REPEATING, [b"", REFUSAL, answer(200, WHOLE)]),
        (
            Manner.BACKGROUND,
            [
                answer(200, b'{"id": "cmpl-1", "status": "queued"}'),
                answer(200, b'{"id": "cmpl-1", "status": "in_progress"}'),
                answer(200, WHOLE),
            ],
        ),
    ],
)
async def test_client_has_everything_in_the_end(manner: Manner, answers: list[bytes]) -> None:
    story, asked = await visit(manner, answers)
    assert (story.ending, story.complaints) == (Ending.COMPLETE, []), story.reported(story.began)
    assert len(asked) == len(answers)


@pytest.mark.parametrize(
    ("manner", "answers", "ending"),
    [
        (Manner.STREAM, [stream(chunk(1), is_whole=False)], Ending.CUT),
        (Manner.STREAM, [stream(chunk(1), FAREWELL)], Ending.CUT),
        (Manner.STREAM, [stream(chunk(1), FAILURE)], Ending.FAILED),
        (Manner.RETURNING, [stream(chunk(1), FAILURE)], Ending.FAILED),
        (Manner.WHOLE, [REFUSAL], Ending.REFUSED),
        (Manner.LEAVING, [stream(chunk(1), chunk(2), is_whole=False)], Ending.CUT),
    ],
)
async def test_client_knows_how_it_ended(
    manner: Manner, answers: list[bytes], ending: Ending
) -> None:
    story, _ = await visit(manner, answers)
    assert (story.ending, story.complaints) == (ending, []), story.reported(story.began)


@pytest.mark.parametrize(
    ("manner", "answers", "complaint"),
    [
        (
            Manner.RETURNING,
            [stream(chunk(1), is_whole=False), stream(chunk(1), chunk(2), chunk(3), DONE)],
            "event 1 came twice",
        ),
        (Manner.RETURNING, [stream(chunk(1), chunk(3), DONE)], "event 3 came after 1"),
        (Manner.STREAM, [stream(chunk(1), chunk(2), DONE)], "text has 7 instead of 13"),
        (Manner.STREAM, [stream(chunk(1))], "a stream ended without [DONE]"),
        (Manner.WHOLE, [answer(503, b"{}")], "status 503 without Retry-After"),
        (Manner.WHOLE, [answer(500, b"{}")], "status 500"),
        (
            Manner.REPEATING,
            [answer(409, b'{"error": {"code": "idempotency_conflict"}}')],
            "status 409",
        ),
        (
            Manner.BACKGROUND,
            [
                answer(200, b'{"id": "cmpl-1", "status": "queued"}'),
                answer(200, b'{"id": "cmpl-1", "status": "cancelled"}'),
            ],
            "its state is",
        ),
    ],
)
async def test_client_finds_what_is_wrong(
    manner: Manner, answers: list[bytes], complaint: str
) -> None:
    story, _ = await visit(manner, answers)
    assert any(complaint in each for each in story.complaints), story.reported(story.began)


async def test_client_comes_back_with_what_it_got_last() -> None:
    answers: list[Any] = [
        stream(chunk(1), chunk(2), is_whole=False),
        stream(chunk(3), DONE),
    ]
    _, asked = await visit(Manner.RETURNING, answers)
    assert b"last-event-id" not in asked[0]
    assert b"last-event-id: cmpl-1:2\r\n" in asked[1]


async def test_client_repeats_with_the_same_key() -> None:
    _, asked = await visit(Manner.REPEATING, [b"", answer(200, WHOLE)])
    keys = [
        line
        for each in asked
        for line in each.split(b"\r\n")
        if line.startswith(b"idempotency-key")
    ]
    assert len(keys) == 2
    assert keys[0] == keys[1]
