"""An HTTP client that can go away at any moment, and says exactly what it was told until then."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from tests.support.events import DONE, KEEP_ALIVE, PREFIX
from tests.support.stack import MODEL

ANSWER_SECONDS = 60.0

_REQUEST_ID = re.compile(rb'"id": ?"(cmpl-[a-z2-7]{26})"')


@dataclass(slots=True)
class Answer:
    """What came back for one request."""

    status: int = 0
    """0 if nothing came."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False
    """Whether the whole answer has come; not if the client left, or the gateway died."""
    has_left: bool = False
    """Whether this client left before the whole answer had come."""
    was_sent: bool = False
    """Whether there was a gateway that took the connection."""
    sent_at: float = 0.0
    ended_at: float = 0.0

    @property
    def request_id(self) -> str | None:
        """Id of the completion, as soon as anything of it has come."""
        found = _REQUEST_ID.search(self.body)
        return found[1].decode() if found else None

    @property
    def is_finished(self) -> bool:
        """Whether this is a completion that came to its end."""
        return self.status == 200 and self.is_complete and self.usage is not None

    @property
    def json(self) -> Any:
        """The body of an answer that is no stream."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of a refusal."""
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[dict[str, Any]]:
        """The complete events of a stream, without `[DONE]`."""
        lines = [event.split(b"\n")[0] for event in self.body.split(b"\n\n")[:-1]]
        return [
            json.loads(line.removeprefix(PREFIX))
            for line in lines
            if line not in (DONE, KEEP_ALIVE)
        ]

    @property
    def is_stream(self) -> bool:
        """Whether the answer is made of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def usage(self) -> dict[str, Any] | None:
        """What the answer says was used, if it came so far."""
        if not self.is_stream:
            usage: dict[str, Any] | None = self.json.get("usage") if self.is_complete else None
            return usage
        told = [event["usage"] for event in self.events if event.get("usage")]
        return told[-1] if told else None


class _Reading:
    """What a parser of an answer calls."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.answer.body += body

    def on_message_complete(self) -> None:
        self.answer.is_complete = True


async def ask(
    url: str,
    key: str,
    *,
    leave_after: float | None = None,
    leave_at: int | None = None,
    **body: Any,
) -> Answer:
    """Ask for a completion on a connection of its own.

    The client leaves after so many seconds, or when so many bytes of the body have come. A gateway that
    cannot be reached or dies gives an answer that is not complete.
    """
    return await request(
        url, key, {"model": MODEL, **body}, leave_after=leave_after, leave_at=leave_at
    )


async def request(
    url: str,
    key: str,
    body: dict[str, Any] | None = None,
    *,
    path: str = "/v1/completions",
    leave_after: float | None = None,
    leave_at: int | None = None,
    stall_after: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a request, a GET if it has no body, and return its answer; see `ask`.

    With `stall_after` the client reads nothing for so many seconds, and leaves then.
    """
    answer = Answer(sent_at=time.monotonic())
    limit = ANSWER_SECONDS if leave_after is None else leave_after
    try:
        async with asyncio.timeout(limit):
            content = _bytes(url, key, body, path, headers or {})
            if stall_after is None:
                await _exchange(url, content, answer, leave_at)
            else:
                await _stall(url, content, answer, stall_after)
    except TimeoutError:
        if leave_after is None:
            raise
        answer.has_left = True
    except (OSError, httptools.HttpParserError):
        answer.is_complete = False
    answer.ended_at = time.monotonic()
    return answer


def _bytes(
    url: str, key: str, body: dict[str, Any] | None, path: str, headers: Mapping[str, str]
) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        f"host: {urlsplit(url).netloc}",
        f"authorization: Bearer {key}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _exchange(url: str, content: bytes, answer: Answer, leave_at: int | None) -> None:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    parser = httptools.HttpResponseParser(_Reading(answer))
    try:
        writer.write(content)
        answer.was_sent = True
        while not answer.is_complete:
            data = await reader.read(65536)
            if not data:
                return
            parser.feed_data(data)
            answer.status = parser.get_status_code()
            if leave_at is not None and len(answer.body) >= leave_at and not answer.is_complete:
                answer.has_left = True
                return
    finally:
        # Whatever has not come is not waited for.
        with suppress(OSError):
            writer.transport.abort()


async def _stall(url: str, content: bytes, answer: Answer, seconds: float) -> None:
    """Send a request and take nothing of its answer from the kernel."""
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        # The kernel would take in much of an answer that nobody reads.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(connection, (address.hostname, address.port))
        await loop.sock_sendall(connection, content)
        await asyncio.sleep(seconds)
    answer.has_left = True
