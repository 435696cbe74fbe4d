"""An HTTP client that can disconnect at any moment, and records exactly what it received."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools


@dataclass(slots=True)
class Answer:
    """The response to one request."""

    status: int = 0
    """0 if nothing arrived."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False
    """Whether the whole response arrived; not if the client disconnected, or the gateway died."""
    was_reached: bool = False
    """Whether the connection was accepted."""
    has_left: bool = False
    """Whether this client disconnected before the whole response had arrived."""

    @property
    def is_stream(self) -> bool:
        """Whether the response is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def json(self) -> Any:
        """The body of a complete response that is no stream."""
        return json.loads(self.body)


class Reading:
    """Reads a response piece by piece, as callbacks of a parser."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    @property
    def leaves(self) -> bool:
        """Whether the client disconnects now."""
        return False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self.answer.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body."""
        self.answer.body += body

    def on_message_complete(self) -> None:
        """Record that the whole response has arrived."""
        self.answer.is_complete = True


def request_bytes(
    url: str, key: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
) -> bytes:
    """Return a POST, or a GET if there is no body, after which the server closes the connection."""
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


async def exchange(url: str, request: bytes, reading: Reading) -> None:
    """Send a request on a new connection, and read until the response ends or the client
    disconnects.

    Raises OSError or httptools.HttpParserError for a connection that breaks; one that is closed
    early only leaves the response incomplete.
    """
    answer, address = reading.answer, urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    answer.was_reached = True
    parser = httptools.HttpResponseParser(reading)
    try:
        writer.write(request)
        while not answer.is_complete:
            data = await reader.read(65536)
            if not data:
                return
            parser.feed_data(data)
            answer.status = parser.get_status_code()
            if reading.leaves:
                answer.has_left = True
                return
    finally:
        # The rest of the response is not waited for.
        with suppress(OSError):
            writer.transport.abort()
