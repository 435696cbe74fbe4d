"""What a client does when its connection ends, and which errors it finds."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.failures.chaos.history import Behaviour, Ending, History
from tests.failures.chaos.load import ClientRequest
from tests.failures.chaos.proxy import LOOPBACK
from tests.failures.chaos.recipes import Recipe
from tests.failures.chaos.transcript import Transcript
from tests.support.patience import PATIENCE_SECONDS

WORDS = ["one", " two", " three"]
USAGE = {"prompt_tokens": 1, "completion_tokens": 3}
ID = "cmpl-1"


def chunk(number: int) -> bytes:
    """The event of one word; the last one ends the choice."""
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
    """A response of these events, which breaks off unless it is whole."""
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


async def send(behaviour: Behaviour, answers: Sequence[bytes]) -> tuple[History, list[bytes]]:
    """Give a client these responses, one a connection; return its history and its requests."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answers[len(requests) - 1])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    url = f"http://{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
    history = History(1, "words", behaviour, "free")
    async with asyncio.timeout(PATIENCE_SECONDS):
        await ClientRequest(history, recipe(), {"gateway-1": url}, "key", start=0, draw=0.9).run()
    server.close()
    await server.wait_closed()
    return history, requests


WHOLE_STREAM = stream(*map(chunk, (1, 2, 3)), DONE)
IN_PROGRESS = answer(409, b'{"type": "error", "error": {"type": "x"}}', "retry-after: 0")
OVERLOADED = answer(529, b'{"type": "error", "error": {"type": "x"}}', "retry-after: 0")
REFUSAL = answer(503, b'{"error": {"code": "overloaded"}}', "retry-after: 0")


@pytest.mark.parametrize(
    ("behaviour", "answers"),
    [
        (Behaviour.STREAM, [WHOLE_STREAM]),
        (
            Behaviour.RETURNING,
            [stream(chunk(1), is_whole=False), stream(chunk(2), chunk(3), DONE)],
        ),
        (Behaviour.RETURNING, [stream(chunk(1), FAREWELL), stream(chunk(2), chunk(3), DONE)]),
        (Behaviour.REPEATING_STREAM, [stream(chunk(1), chunk(2), is_whole=False), WHOLE_STREAM]),
        (Behaviour.REPEATING_STREAM, [REFUSAL, WHOLE_STREAM]),
        (Behaviour.WHOLE, [answer(200, WHOLE)]),
        (Behaviour.REPEATING, [b"", REFUSAL, IN_PROGRESS, OVERLOADED, answer(200, WHOLE)]),
        (
            Behaviour.BACKGROUND,
            [
                answer(200, b'{"id": "cmpl-1", "status": "queued"}'),
                answer(200, b'{"id": "cmpl-1", "status": "in_progress"}'),
                answer(200, WHOLE),
            ],
        ),
    ],
)
async def test_client_receives_the_whole_response(
    behaviour: Behaviour, answers: list[bytes]
) -> None:
    history, requests = await send(behaviour, answers)
    assert (history.ending, history.errors) == (Ending.COMPLETE, []), history.reported(
        history.began
    )
    assert len(requests) == len(answers)


@pytest.mark.parametrize(
    ("behaviour", "answers", "ending"),
    [
        (Behaviour.STREAM, [stream(chunk(1), is_whole=False)], Ending.CUT),
        (Behaviour.STREAM, [stream(chunk(1), FAREWELL)], Ending.CUT),
        (Behaviour.STREAM, [stream(chunk(1), FAILURE)], Ending.FAILED),
        (Behaviour.RETURNING, [stream(chunk(1), FAILURE)], Ending.FAILED),
        (Behaviour.WHOLE, [REFUSAL], Ending.REFUSED),
        (Behaviour.LEAVING, [stream(chunk(1), chunk(2), is_whole=False)], Ending.CUT),
    ],
)
async def test_client_records_how_its_request_ended(
    behaviour: Behaviour, answers: list[bytes], ending: Ending
) -> None:
    history, _ = await send(behaviour, answers)
    assert (history.ending, history.errors) == (ending, []), history.reported(history.began)


@pytest.mark.parametrize(
    ("behaviour", "answers", "complaint"),
    [
        (
            Behaviour.RETURNING,
            [stream(chunk(1), is_whole=False), stream(chunk(1), chunk(2), chunk(3), DONE)],
            "event 1 came twice",
        ),
        (Behaviour.RETURNING, [stream(chunk(1), chunk(3), DONE)], "event 3 came after 1"),
        (Behaviour.STREAM, [stream(chunk(1), chunk(2), DONE)], "text has 7 instead of 13"),
        (Behaviour.STREAM, [stream(chunk(1))], "a stream ended without [DONE]"),
        (Behaviour.WHOLE, [answer(503, b"{}")], "status 503 without Retry-After"),
        (Behaviour.WHOLE, [answer(500, b"{}")], "status 500"),
        (
            Behaviour.REPEATING,
            [answer(409, b'{"error": {"code": "idempotency_conflict"}}')],
            "status 409",
        ),
        (
            Behaviour.BACKGROUND,
            [
                answer(200, b'{"id": "cmpl-1", "status": "queued"}'),
                answer(200, b'{"id": "cmpl-1", "status": "cancelled"}'),
            ],
            "its state is",
        ),
    ],
)
async def test_client_records_errors_of_the_response(
    behaviour: Behaviour, answers: list[bytes], complaint: str
) -> None:
    history, _ = await send(behaviour, answers)
    assert any(complaint in each for each in history.errors), history.reported(history.began)


async def test_client_resumes_after_its_last_event() -> None:
    answers: list[Any] = [
        stream(chunk(1), chunk(2), is_whole=False),
        stream(chunk(3), DONE),
    ]
    _, requests = await send(Behaviour.RETURNING, answers)
    assert b"last-event-id" not in requests[0]
    assert b"last-event-id: cmpl-1:2\r\n" in requests[1]


async def test_client_retries_with_the_same_key() -> None:
    _, requests = await send(Behaviour.REPEATING, [b"", answer(200, WHOLE)])
    keys = [
        line
        for each in requests
        for line in each.split(b"\r\n")
        if line.startswith(b"idempotency-key")
    ]
    assert len(keys) == 2
    assert keys[0] == keys[1]
