"""HTTP protocol class with limits on headers, body time, send time and connections.

uvicorn's protocol waits without a time limit for headers, for the rest of an unwanted body, and for
a client that does not read. It also accepts any number and size of headers. This class limits all
of them. It rejects requests with the API's error format, before they reach the application.
"""

import asyncio
import http
import logging
import re
import resource
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Any, ClassVar, Final, NamedTuple, cast

import httptools
from typing_extensions import override
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.dialects.profile import PROFILES
from gateway.http.allowances import network_of
from gateway.http.connection import CONNECTION, Outbox
from gateway.platform import telemetry
from gateway.platform.concurrency.fair_turns import LoopAccount, LoopTurns
from gateway.platform.settings import KIBIBYTE, Settings
from gateway.process.server.connection import UvicornConnection
from gateway.records.errors import (
    ApiError,
    BadRequestError,
    ErrorStyle,
    HeadersTooLargeError,
    MethodNotAllowedError,
    OverloadedError,
    RequestTimeoutError,
    TargetTooLongError,
    shown,
)

MAX_HEAD_BYTES: Final = 64 * KIBIBYTE
"""Total names and values of all headers; also limits trailers and bytes between body chunks."""
MAX_HEADERS: Final = 100
MAX_TARGET_BYTES: Final = 8 * KIBIBYTE
MAX_PIPELINED: Final = 16
"""Requests that one connection may send before the response to the first is complete."""
LINGER_SECONDS: Final = 3.0
"""How long to drop the rest of an unwanted request, so that the client sees the response."""
MAX_LINGERING_BYTES: Final = 16 * KIBIBYTE
"""How much of it is parsed, so that the connection can serve another request after it."""
DROP_SECONDS: Final = 1.6e-8
"""Least time for each byte that the connections of one network drop: a millisecond for 64 KiB."""
LEAST_DROPPED_BYTES: Final = 8 * KIBIBYTE
"""What a smaller part counts, since reading one takes time, too."""
READ_BYTES: Final = 64 * KIBIBYTE
"""Most bytes of a connection that are read at once. Those of a connection that waits stay with it.

uvloop would read 256,000, so that many connections together take much time and memory.
"""
PARSE_BYTES: Final = 16 * KIBIBYTE
"""Received bytes that are parsed at a time; in chunks of one byte they take 0.2 ms."""
PARSE_SECONDS: Final = 0.0005
FREE_BYTES: Final = 2 * KIBIBYTE
"""Received bytes, a usual request, that are parsed at once although the network uses much time."""
FREE_SECONDS: Final = 0.0003
FREE_SHARE: Final = 0.02
"""Loop time that the parser of each connection may use without turns then, at once and in time."""
READ_SECONDS_OF_BYTE: Final = 2.5e-10
"""Loop time for the system to copy a received byte."""
LEAST_PROGRESS_BYTES: Final = 16 * KIBIBYTE
"""How much of a full send buffer a client must read within the send timeout."""
UNSENT_BYTES: Final = 64 * KIBIBYTE
"""Unsent response bytes the kernel buffers per connection; by default it buffers megabytes."""
SPARE_CONNECTIONS: Final = 100
"""Connections beyond the limit that still receive an error before they are closed."""
SHARE_OF_NETWORK: Final = 20
"""How many times the free connections one network may have, so that others find some."""
RETRY_AFTER_SECONDS: Final = 1.0
OTHER_DESCRIPTORS: Final = 1024
"""Maximum number of open files and connections other than client connections."""

SERVED_VERSIONS: Final = frozenset({"1.0", "1.1"})

_HOST: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[\w.~%!$&'()*+,;=-]*)(:\d*)?")
"""Host and port as defined by RFC 3986."""

logger = logging.getLogger(__name__)


class HttpBounds(NamedTuple):
    """Limits that a deployment or listener configures."""

    header_seconds: float
    send_seconds: float
    most_connections: int
    error_style: ErrorStyle


class BoundedHttpProtocol(HttpToolsProtocol):
    """One client connection."""

    bounds: ClassVar[HttpBounds]
    turns: ClassVar[Callable[[], LoopTurns]]
    outbox: ClassVar[Outbox]
    networks: ClassVar[Counter[str]]
    """Open connections of each network."""
    dropping: ClassVar[Counter[str]]
    """Those of them whose input is dropped."""
    received: ClassVar[memoryview]
    """Where the connections of the event loop receive, one at a time."""

    cycle: Any
    """The last request, a `RequestResponseCycle`; None before the first."""

    _refusal: ApiError | None = None
    _silent_bytes = 0
    """Bytes received since the request began, or since its last body part."""
    _is_in_head = False
    _is_in_body = False
    _drops_input = False
    """Whether all further input is dropped."""
    _head_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _drop_timer: asyncio.TimerHandle | None = None
    _unsent_bytes = 0
    _lingering_bytes = 0
    _waiting = b""
    """Received bytes; after `data_received`, those that wait for a turn to be parsed."""
    _parsed = 0
    """How many of them are parsed."""
    _parsing: asyncio.Task[None] | None = None

    @override
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._parts: list[bytes] = []
        # The parser finds it here. A body may come in chunks of one byte, for each of which a
        # method in Python takes ten times as long.
        vars(self)["on_body"] = self._parts.append
        super().__init__(*args, **kwargs)

    # -- the connection ----------------------------------------------------------------------------

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_protocol(_Receiver(self))
        connection: Any = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self.flow = self._flow = _HeldFlow(transport)
        self._account = LoopAccount("", burst_seconds=FREE_SECONDS, share=FREE_SHARE)
        self._turns = type(self).turns()
        self._network = network_of(self.client[0] if self.client else "")
        self._direct = UvicornConnection(self.outbox, transport)
        self.networks[self._network] += 1
        free = self.bounds.most_connections - len(self.connections)
        own = self.networks[self._network]
        if -free > SPARE_CONNECTIONS or own > SHARE_OF_NETWORK * max(free + 1, 1):
            transport.abort()
        elif free < 0:
            self._refuse(
                OverloadedError(
                    "Too many connections are open.", retry_after_seconds=RETRY_AFTER_SECONDS
                )
            )
        else:
            self._start_head_timer()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        if self._parsing is not None:
            self._parsing.cancel()
        super().connection_lost(exc)
        for counts in (self.networks, self.dropping) if self._drops_input else (self.networks,):
            counts[self._network] -= 1
            if not counts[self._network]:
                del counts[self._network]
        self._direct.lose()
        # Break the reference cycle, which would keep body data until the garbage collector runs.
        self.cycle = None

    @override
    def data_received(self, data: bytes) -> None:
        if self._waiting:
            self._waiting += data
            return
        if self._drops_input:
            # Nobody waits for it, and reading takes time too.
            self._flow.hold()
            size = max(len(data), LEAST_DROPPED_BYTES) * self.dropping[self._network]
            self._drop_timer = self.loop.call_later(size * DROP_SECONDS, self._flow.release)
            return
        self._waiting, self._parsed = data, 0
        if not self._turns.is_over(self._network):
            self._parse_some(len(data))
        elif not self._account.is_over(time.perf_counter()):
            # Only processor time: a process that takes the core for 4 ms would cost it 0.2 s.
            began = time.thread_time()
            self._parse_some(FREE_BYTES)
            self._account.charge(time.thread_time() - began, time.perf_counter())
        if self._waiting and self._parsing is None:
            self._flow.hold()
            self._parsing = self.loop.create_task(self._parse_in_turns())

    async def _parse_in_turns(self) -> None:
        """Parse what waits. Meanwhile the connection reads nothing."""
        while self._waiting and not self.transport.is_closing():
            async with self._turns.slice_of(self._network):
                self._parse_some(len(self._waiting))
        self._parsing = None
        self._flow.release()

    def _parse_some(self, most_bytes: int) -> None:
        """Parse what waits for about PARSE_SECONDS, but at most so many bytes."""
        began = now = time.perf_counter()
        size, start = len(self._waiting), self._parsed
        end = min(start + most_bytes, size)
        while (
            self._parsed < end and now - began < PARSE_SECONDS and not self.transport.is_closing()
        ):
            if self._drops_input:
                self._parsed = size
            else:
                part = self._waiting[self._parsed : min(self._parsed + PARSE_BYTES, end)]
                self._parsed += len(part)
                self._parse(part)
            now = time.perf_counter()
        seconds = now - began + (self._parsed - start) * READ_SECONDS_OF_BYTE
        self._turns.charge(self._network, seconds, now)
        if self._parsed == size:
            self._waiting = b""

    def _parse(self, data: bytes) -> None:
        self._silent_bytes += len(data)
        if self._linger_timer is not None:
            self._lingering_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._parts:
            self._take_parts()
        if self.transport.is_closing() or self._drops_input:
            return
        if self._silent_bytes > MAX_HEAD_BYTES:
            self._refuse(_headers_too_large())
        elif self._is_in_head and self._has_no_version(data):
            self._refuse(BadRequestError(_fault("0.9", [])))
        elif self._lingering_bytes > MAX_LINGERING_BYTES:
            self.close_after_response()
        elif self._is_in_head or (self._silent_bytes and self._is_idle()):
            # Empty lines between requests start no request and must not keep the connection open.
            self._start_head_timer()

    def _feed(self, data: bytes) -> None:
        """Parse requests. One that asks for an upgrade, which none offers, is parsed without it.

        Otherwise the parser would read no body. Raises HttpParserError.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                version = self.parser.get_http_version().encode()
                lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
                lines += [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
                data = b"\r\n".join((*lines, b"", data[upgrade.args[0] :]))
            else:
                return

    def _take_parts(self) -> None:
        """Hand the parts of the body that the parser found to the request."""
        body = b"".join(self._parts)
        self._parts.clear()
        self._silent_bytes = 0
        super().on_body(body)

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._direct.is_paused = True
        self._start_send_timer()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        self._direct.is_paused = False
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    @override
    def timeout_keep_alive_handler(self) -> None:
        self._close()

    # -- the parser --------------------------------------------------------------------------------

    @override
    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._silent_bytes = 0
        super().on_message_begin()

    @override
    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_TARGET_BYTES:
            raise self._refused(
                TargetTooLongError(
                    f"The request target must have at most {MAX_TARGET_BYTES} bytes."
                )
            )

    @override
    def on_headers_complete(self) -> None:
        size = sum(map(len, chain.from_iterable(self.headers)))
        if len(self.headers) > MAX_HEADERS or size > MAX_HEAD_BYTES:
            raise self._refused(_headers_too_large())
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._refused(
                BadRequestError(
                    f"A connection may have at most {MAX_PIPELINED} pipelined requests."
                )
            )
        if fault := _fault(self.parser.get_http_version(), self.headers):
            raise self._refused(BadRequestError(fault))
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise self._refused(
                    MethodNotAllowedError("CONNECT needs a proxy, which this is not.")
                )
            return  # `_feed` parses it again.
        if not self.url.startswith(b"/"):
            target = httptools.parse_url(self.url)
            if not target.path:
                self.url = b"/?" + (target.query or b"")
        self._is_in_head, self._is_in_body = False, True
        self._silent_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self.scope["extensions"] = {CONNECTION: {"connection": self._direct}}
        super().on_headers_complete()
        self.cycle.transport = cast("asyncio.Transport", _ResponseTransport(self))
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _unchunked(self.cycle)

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._direct.cycle = cycle
        self._direct.is_chunked = cycle.scope["http_version"] != "1.0"
        super()._start_asgi_task(cycle, app)

    @override
    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self._parts:
            self._take_parts()
        self._is_in_body = False
        self._silent_bytes = 0
        super().on_message_complete()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
            self._lingering_bytes = 0
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body and not self._is_responding() and not self.transport.is_closing():
            self._linger()

    @override
    def send_400_response(self, msg: str) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is None:
            refusal = BadRequestError("The request is not valid HTTP.")
            self._withdraw()
        self._refuse(refusal)

    # -- closing -----------------------------------------------------------------------------------

    def close_after_response(self) -> None:
        """Close the connection, but keep reading briefly if the client is still sending."""
        if not self._is_in_body or self.transport.is_closing():
            self._close()
            return
        # Closing with unread bytes resets the connection, and the client might not see the
        # response.
        if not self._drops_input:
            self._drops_input = True
            self.dropping[self._network] += 1
        self.transport.write_eof()
        self._linger()

    def _linger(self) -> None:
        """Read and drop the rest of the request, for at most LINGER_SECONDS."""
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self._linger_timer is None:
            self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _close(self) -> None:
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():
            self._start_send_timer()
        self.transport.close()

    def _refused(self, error: ApiError) -> ApiError:
        """Keep the error, since the parser reports only that some exception occurred."""
        self._refusal = error
        return error

    def _refuse(self, error: ApiError) -> None:
        """Respond without the application, and close the connection."""
        if self._drops_input:
            return
        if self._is_responding() or self.transport.is_closing():
            # A response is in progress, or the connection is closing: no second response can
            # follow.
            self.transport.abort()
            return
        content = error.content(self.bounds.error_style)
        headers = {
            **error.headers(),
            **error.link(),
            "content-type": "application/json",
            "content-length": str(len(content)),
            "x-request-id": f"req_{secrets.token_hex(12)}",
            "connection": "close",
        }
        lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}".encode()]
        lines += [name + b": " + value for name, value in self.server_state.default_headers]
        lines += [f"{name}: {value}".encode() for name, value in headers.items()]
        self.transport.write(b"\r\n".join([*lines, b"", content]))
        telemetry.http_responded(telemetry.OTHER, telemetry.OTHER, error.status)
        self._stop_timers()
        self._is_in_body = True
        self.close_after_response()

    def _withdraw(self) -> None:
        """Abort a request whose body is still being read, unless its response has started."""
        if self._is_in_body and not self.pipeline and not self.cycle.response_started:
            # To the application the client has disconnected; further input is dropped.
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    # -- time --------------------------------------------------------------------------------------

    def _start_head_timer(self) -> None:
        if self._head_timer is None and not self._drops_input:
            self._head_timer = self.loop.call_later(self.bounds.header_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_responding():
            # These bytes belong to the next pipelined request, whose timeout starts after this
            # response.
            self._start_head_timer()
        elif self._silent_bytes or self._is_in_head:
            seconds = self.bounds.header_seconds
            self._refuse(
                RequestTimeoutError(f"The headers did not arrive within {seconds:g} seconds.")
            )
        else:
            self.transport.abort()

    def _start_send_timer(self) -> None:
        if self._send_timer is None:
            self._unsent_bytes = self.transport.get_write_buffer_size()
            self._send_timer = self.loop.call_later(self.bounds.send_seconds, self._check_sending)

    def _check_sending(self) -> None:
        self._send_timer = None
        taken = self._unsent_bytes - self.transport.get_write_buffer_size()
        if taken < min(self._unsent_bytes, LEAST_PROGRESS_BYTES):
            self.transport.abort()
        else:
            self._start_send_timer()

    def _stop_timers(self) -> None:
        timers = (self._head_timer, self._linger_timer, self._send_timer, self._drop_timer)
        for timer in timers:
            if timer is not None:
                timer.cancel()
        self._head_timer = self._linger_timer = self._send_timer = self._drop_timer = None
        self._unset_keepalive_if_required()

    def _has_no_version(self, data: bytes) -> bool:
        """Whether a complete request line has no version: HTTP/0.9, which sends no headers."""
        return data.endswith(b"\n") and not self.headers and self.parser.get_http_version() == "0.0"

    def _is_idle(self) -> bool:
        return not self._is_in_body and not self._is_responding()

    def _is_responding(self) -> bool:
        last: RequestResponseCycle | None = self.cycle
        is_under_way = last is not None and not (last.response_complete or last.disconnected)
        return bool(self.pipeline) or is_under_way


class _Receiver(asyncio.BufferedProtocol):
    """Reads parts of a bounded size for a connection."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        self._buffer, self._receive = protocol.received, protocol.data_received
        # The loop finds these methods of the connection here.
        for name in ("eof_received", "connection_lost", "pause_writing", "resume_writing"):
            setattr(self, name, getattr(protocol, name))

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    @override
    def buffer_updated(self, nbytes: int) -> None:
        self._receive(bytes(self._buffer[:nbytes]))


class _HeldFlow(FlowControl):
    """Flow control that reads nothing while received bytes wait to be parsed."""

    _is_held = _is_paused = False

    def hold(self) -> None:
        """Read nothing until `release`."""
        self._is_held = True
        super().pause_reading()

    def release(self) -> None:
        """Read again, unless the request has paused it."""
        self._is_held = False
        if not self._is_paused:
            super().resume_reading()

    @override
    def pause_reading(self) -> None:
        self._is_paused = True
        super().pause_reading()

    @override
    def resume_reading(self) -> None:
        self._is_paused = False
        if not self._is_held:
            super().resume_reading()


class _ResponseTransport:
    """Transport for a response; closing it still lets the client read the response.

    The head leaves in one write with the start of the body, if both are sent in one turn of the
    event loop and copying that part is cheap.
    """

    __slots__ = ("_head", "_protocol", "_write", "is_closing")

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        self._protocol = protocol
        self._write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._head = data
            self._protocol.loop.call_soon(self._send_head)
        elif self._head and len(data) <= UNSENT_BYTES:
            head, self._head = self._head, b""
            self._write(head + data)
        else:
            self._send_head()
            self._write(data)

    def close(self) -> None:
        self._send_head()
        self._protocol.close_after_response()

    def _send_head(self) -> None:
        if self._head and not self.is_closing():
            head, self._head = self._head, b""
            self._write(head)


def _unchunked(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return ASGI's `send` for a client of HTTP/1.0, which reads no chunks.

    The end of the connection ends a body of unknown length.
    """
    is_sized = True

    async def send(message: Any) -> None:
        nonlocal is_sized
        if message["type"] == "http.response.start":
            is_sized = any(name == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if is_sized else False
        elif not is_sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await RequestResponseCycle.send(cycle, message)

    return send


def http_protocol(
    settings: Settings, *, turns: Callable[[], LoopTurns], most_connections: int
) -> type[BoundedHttpProtocol]:
    """Return the protocol class of a listener with at most this many connections.

    `turns` returns the turns of the event loop, once connections are made.
    """
    loop_turns = turns

    class Configured(BoundedHttpProtocol):
        bounds = HttpBounds(
            header_seconds=settings.header_timeout.total_seconds(),
            send_seconds=settings.send_timeout.total_seconds(),
            most_connections=most_connections,
            error_style=PROFILES[settings.default_dialect].error_style,
        )
        turns = staticmethod(loop_turns)
        outbox = Outbox()
        networks: ClassVar[Counter[str]] = Counter()
        dropping: ClassVar[Counter[str]] = Counter()
        received = memoryview(bytearray(READ_BYTES))

    return Configured


def allow_connections(number: int) -> None:
    """Raise the open-file limit for this many client connections, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "the limit of %d open files is too low for SLUICE_MAX_CONNECTIONS=%d",
            allowed,
            number,
        )


def _fault(version: str, headers: list[tuple[bytes, bytes]]) -> str:
    """Return the error message for an invalid request head; empty if it is valid."""
    if version not in SERVED_VERSIONS:
        return f"HTTP/{version} is not supported. Use HTTP/1.1 or HTTP/1.0."
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return f"The request must have exactly one 'Host' header. Given: {len(hosts)}."
    if hosts and not _HOST.fullmatch(hosts[0]):
        given = shown(hosts[0].decode("latin-1"))
        return f"'Host' must be a name or an address, optionally with a port. Given: {given}."
    return ""


def _headers_too_large() -> HeadersTooLargeError:
    return HeadersTooLargeError(
        f"The request must have at most {MAX_HEADERS} headers with {MAX_HEAD_BYTES} bytes in total."
    )
