"""An HTTP client that reads a completion event by event and reports how its connection ended."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httptools
from typing_extensions import override

from tests.support.http_client import Answer, Reading, exchange, request_bytes

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    id: str
    """Empty if it has none."""
    data: bytes
    at: float
    """Arrival on the monotonic clock."""


@dataclass(slots=True)
class Reply(Answer):
    """The response to one request. The body of a stream is not kept."""

    is_late: bool = False
    """Whether the client's timeout expired."""

    @property
    def retry_after(self) -> float | None:
        """Seconds of the `Retry-After` header."""
        value = self.headers.get("retry-after")
        return None if value is None else float(value)


class _EventReading(Reading):
    """Passes the events of a stream to a callback as they arrive."""

    def __init__(self, reply: Reply, on_event: Callable[[Event], bool] | None) -> None:
        super().__init__(reply)
        self._on_event = on_event
        self._unread = b""
        self._leaves = False

    @property
    @override
    def leaves(self) -> bool:
        return self._leaves

    @override
    def on_body(self, body: bytes) -> None:
        if not self.answer.is_stream:
            super().on_body(body)
            return
        now = time.monotonic()
        *blocks, self._unread = (self._unread + body).split(b"\n\n")
        for block in blocks:
            event = _event(block, now)
            if event is not None and self._on_event is not None and not self._leaves:
                self._leaves = self._on_event(event)


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
    """Send a POST, or a GET without a body, on a new connection.

    `on_event` is called with each event of a stream, and returns whether the client disconnects
    now.
    """
    reply = Reply()
    request = request_bytes(url, key, path, body, headers or {})
    try:
        async with asyncio.timeout(patience):
            await exchange(url, request, _EventReading(reply, on_event))
    except TimeoutError:
        reply.is_late = True
    except (OSError, httptools.HttpParserError):
        reply.is_complete = False
    return reply
