"""An HTTP client that reads a completion event by event and says how its connection ended."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    id: str
    """Empty if it has none."""
    data: bytes
    at: float
    """Time of its arrival, of the monotonic clock."""


@dataclass(slots=True)
class Reply:
    """What came back for one request."""

    status: int = 0
    """0 if nothing came."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    """Of an answer that is no stream."""
    is_complete: bool = False
    """Whether the whole answer has come."""
    was_reached: bool = False
    """Whether somebody took the connection."""
    has_left: bool = False
    """Whether this client closed the connection before the end."""
    is_late: bool = False
    """Whether the client lost its patience."""

    @property
    def is_stream(self) -> bool:
        """Whether the answer is made of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def json(self) -> dict[str, Any]:
        """The body of a complete answer that is no stream."""
        body: dict[str, Any] = json.loads(self.body)
        return body

    @property
    def retry_after(self) -> float | None:
        """Seconds after which the client was told to come again."""
        value = self.headers.get("retry-after")
        return None if value is None else float(value)


class _Reading:
    """What a parser of an answer calls."""

    def __init__(self, reply: Reply, on_event: Callable[[Event], bool] | None) -> None:
        self._reply = reply
        self._on_event = on_event
        self._unread = b""
        self.leaves = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        if not self._reply.is_stream:
            self._reply.body += body
            return
        now = time.monotonic()
        *blocks, self._unread = (self._unread + body).split(b"\n\n")
        for block in blocks:
            event = _event(block, now)
            if event is not None and self._on_event is not None and not self.leaves:
                self.leaves = self._on_event(event)

    def on_message_complete(self) -> None:
        self._reply.is_complete = True


def _event(block: bytes, now: float) -> Event | None:
    """Return an event; None for a comment."""
    event_id, data = "", b""
    for line in block.split(b"\n"):
        name, _, value = line.partition(b": ")
        if name == b"id":
            event_id = value.decode()
        elif name == b"data":
            data = value
    return Event(event_id, data, now) if data else None


async def talk(
    url: str,
    key: str,
    path: str,
    *,
    patience: float,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    on_event: Callable[[Event], bool] | None = None,
) -> Reply:
    """Send a POST, or a GET if there is no body, on a connection of its own.

    `on_event` is called with each event of a stream, and says whether the client leaves now.
    """
    reply = Reply()
    reading = _Reading(reply, on_event)
    try:
        async with asyncio.timeout(patience):
            await _exchange(url, _request(url, key, path, body, headers or {}), reply, reading)
    except TimeoutError:
        reply.is_late = True
    except (OSError, httptools.HttpParserError):
        reply.is_complete = False
    return reply


def _request(
    url: str, key: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
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


async def _exchange(url: str, content: bytes, reply: Reply, reading: _Reading) -> None:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    reply.was_reached = True
    parser = httptools.HttpResponseParser(reading)
    try:
        writer.write(content)
        while not reply.is_complete:
            data = await reader.read(65536)
            if not data:
                return
            parser.feed_data(data)
            reply.status = parser.get_status_code()
            if reading.leaves:
                reply.has_left = True
                return
    finally:
        with suppress(OSError):
            writer.transport.abort()
