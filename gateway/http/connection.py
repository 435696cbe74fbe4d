"""ASGI extension to use the client's connection without ASGI messages.

Each ASGI message costs several calls and sometimes a task. A server with this extension lets the
application take a complete body, write parts of a response and whole responses, and learn that the
client has disconnected, with one call each.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse  # noqa: TID251 - its base class
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import override

CONNECTION: Final = "sluice.connection"
"""Name of the extension. Its member `connection` is the `DirectConnection` of a request."""

_LINE_END: Final = b"\r\n"
_SIZES: Final = tuple(b"%x\r\n" % size for size in range(1024))
"""First lines of short chunks. Formatting one takes longer than copying the chunk."""


class Outbox:
    """Writes the parts of many responses together, after the callback that rendered them.

    Rendering a frame and then writing takes a sixth less CPU than alternating, because each system
    call evicts code and data from the processor's caches.
    """

    def __init__(self) -> None:
        self._due: list[DirectConnection] = []

    def add(self, connection: "DirectConnection") -> None:
        """Flush a connection in the next turn of the event loop, before tasks that wake later."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.append(connection)

    def _flush(self) -> None:
        due, self._due = self._due, []
        for connection in due:
            connection.flush()


@dataclass(eq=False, slots=True)
class DirectConnection(ABC):
    """The connection of a client, for the one request that it serves at a time."""

    _outbox: Outbox
    _transport: asyncio.Transport
    is_paused: bool = False
    """Whether the client's send buffer is full: use `send`, which waits."""
    is_chunked: bool = True
    """Whether parts are sent as chunks; HTTP/1.0 has none."""
    _part: bytes = b""
    _on_lost: Callable[[], None] | None = None

    # -- the request -----------------------------------------------------------------------------

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """Whether the client of the request has disconnected."""

    @abstractmethod
    def take_body(self, *, most_bytes: int) -> bytes | None:
        """Return the body if it has arrived wholly and is not larger; else use ASGI's `receive`."""

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Call a function when the client disconnects, or now if it has; None stops this."""
        self._on_lost = on_lost
        if on_lost is not None and self.is_lost:
            on_lost()

    # -- a response as a whole -------------------------------------------------------------------

    @abstractmethod
    def respond(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send a whole response in one write; `headers` include its `content-length`.

        Returns False, changing nothing, if only ASGI's `send` can send it.
        """

    # -- parts of a response ---------------------------------------------------------------------

    # The response has started and has no `content-length`. ASGI's `send` sends the last part. Call
    # it only in a later turn of the event loop than `write`.

    def write(self, part: bytes) -> None:
        """Write a part, which must not be empty, in the next turn of the event loop."""
        if not self._part:
            self._outbox.add(self)
        self._part += part

    def flush(self) -> None:
        """Write everything as one chunk, or drop it if the connection has closed."""
        part, self._part = self._part, b""
        if not self._transport.is_closing():
            if not self.is_chunked:
                self._transport.write(part)
                return
            size = len(part)
            head = _SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size
            self._transport.write(b"".join((head, part, _LINE_END)))


def connection_of(scope: Mapping[str, Any]) -> DirectConnection | None:
    """Return the connection of a request; None if its server does not have the extension."""
    extensions = scope.get("extensions")
    if extensions is None or CONNECTION not in extensions:
        return None
    connection: DirectConnection = extensions[CONNECTION]["connection"]
    return connection


class Stream(StreamingResponse):
    """A body that is made part by part in the request's own task, until its client leaves.

    Starlette uses another task, whose steps would take no turns of the event loop.
    """

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        connection = connection_of(scope)

        async def send_or_stop(message: Message) -> None:
            if connection is not None and connection.is_lost:
                raise ClientDisconnect
            await send(message)

        with suppress(ClientDisconnect):
            await self.stream_response(send_or_stop)
