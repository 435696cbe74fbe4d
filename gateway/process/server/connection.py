"""A client's connection to uvicorn, which responses can use without ASGI messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gateway.http.connection import DirectConnection

MOST_WHOLE_BYTES: Final = 65_536
"""Largest body that is copied to leave in one write with its head."""

_CLOSE: Final = (b"connection", b"close")
_CONTROL: Final = bytes({*range(32), 127} - {ord("\t")})
_LINE_END: Final = b"\r\n"


@dataclass(eq=False, slots=True)
class UvicornConnection(DirectConnection):
    """The extension `DirectConnection` of one connection."""

    cycle: RequestResponseCycle | None = None
    """The request that is being served."""

    @property
    @override
    def is_lost(self) -> bool:
        return self.cycle is None or self.cycle.disconnected

    @override
    def take_body(self, *, most_bytes: int) -> bytes | None:
        cycle = self.cycle
        if cycle is None or cycle.more_body or len(cycle.body) > most_bytes:
            return None
        body = bytes(cycle.body)
        cycle.body.clear()
        return body

    def lose(self) -> None:
        """Note that the client has disconnected."""
        self.cycle = None
        if self._on_lost is not None:
            self._on_lost()

    @override
    def respond(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        cycle = self.cycle
        if (
            cycle is None
            or cycle.disconnected
            or self.is_paused
            or len(body) > MOST_WHOLE_BYTES
            or _CLOSE in headers
        ):
            return False
        lines = [b"%b: %b" % header for header in (*cycle.default_headers, *headers)]
        if not cycle.keep_alive:
            lines.append(b"connection: close")
        head = _LINE_END.join(lines)
        if len(head) - len(head.translate(None, _CONTROL)) > len(_LINE_END) * (len(lines) - 1):
            return False
        self._transport.write(b"%b%b\r\n\r\n%b" % (STATUS_LINE[status], head, body))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True
