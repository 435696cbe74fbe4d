"""HTTP client for customer-supplied URLs that cannot reach private networks.

The client resolves a name once, checks every resulting address, and connects to a checked address.
So the name cannot resolve to another address a moment later.
"""

import asyncio
import socket
import ssl
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpcore
import httpx
import pycares
from typing_extensions import override

from gateway.platform.outbound.addresses import DEFAULT_PORTS, is_public

MAX_OTHER_BYTES: Final = 16_384
"""Allowed response bytes that are not content, such as headers, plus a sixteenth of the content.

Parsing them is slow in comparison with content, and a hostile server could send nothing else.
"""
READ_BYTES: Final = 8_192
"""Maximum bytes per read: one read is parsed at once, which blocks the event loop."""

SocketOption = (
    tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]
)


class OutboundError(Exception):
    """A URL cannot be requested or is not allowed; the message gives the reason, not the URL."""


class ForbiddenHostError(OutboundError):
    """The host is unknown, or connecting to one of its addresses is not allowed."""


class ResponseTooLargeError(OutboundError):
    """The response contains too many bytes that are not content."""


class _Wire(httpcore.AsyncNetworkBackend):
    """Connects to given addresses instead of the host in the request, and counts non-content bytes.

    Args:
        addresses: Tried in this order until a connection succeeds.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._backend = httpcore.AnyIOBackend()
        self._stream: httpcore.AsyncNetworkStream | None = None
        self.other_bytes = 0

    @override
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[SocketOption] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        *earlier, last = self._addresses
        for address in earlier:
            try:
                return await self._connect(address, port, timeout)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._connect(last, port, timeout)

    async def content(self, response: httpcore.Response) -> AsyncIterator[bytes]:
        """Yield the pieces of a response's content as they arrive."""
        async for piece in response.aiter_stream():
            self.other_bytes -= len(piece) + len(piece) // 16
            yield piece

    async def aclose(self) -> None:
        """Close the connection in any state."""
        if self._stream is not None:
            await self._stream.aclose()

    async def _connect(
        self, address: str, port: int, timeout: float | None
    ) -> httpcore.AsyncNetworkStream:
        self._stream = await self._backend.connect_tcp(address, port, timeout=timeout)
        return _Stream(self._stream, self)


class _Stream(httpcore.AsyncNetworkStream):
    """Reads in small pieces, and counts the bytes."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, wire: _Wire) -> None:
        self._stream = stream
        self._wire = wire

    @override
    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        # All earlier bytes have been parsed by now.
        if self._wire.other_bytes > MAX_OTHER_BYTES:
            raise ResponseTooLargeError(
                f"returned more than {MAX_OTHER_BYTES} bytes besides the content"
            )
        data = await self._stream.read(min(max_bytes, READ_BYTES), timeout)
        self._wire.other_bytes += len(data)
        return data

    @override
    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    @override
    async def aclose(self) -> None:
        await self._stream.aclose()

    @override
    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        secured = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _Stream(secured, self._wire)

    @override
    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host; raises OSError or UnicodeError."""


@dataclass(frozen=True, slots=True)
class Response:
    """A server's response."""

    status: int
    headers: httpx.Headers
    pieces: AsyncIterator[bytes]
    """The content as sent, in its encoding, as it arrives."""


async def resolve(host: str, _port: int) -> list[str]:
    """Return the addresses of a host name; none if it has none. Callers limit the time.

    It needs no thread, and ends when it is cancelled: a silent name server delays no other look-up.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[str]] = loop.create_future()

    def watch(number: int, reads: int, writes: int) -> None:
        if reads:
            loop.add_reader(number, channel.process_read_fd, number)
        else:
            loop.remove_reader(number)
        if writes:
            loop.add_writer(number, channel.process_write_fd, number)
        else:
            loop.remove_writer(number)

    def finish(result: pycares.AddrInfoResult | None, _error: int | None) -> None:
        nodes = [] if result is None else result.nodes
        found.set_result(list(dict.fromkeys(each.addr[0].decode() for each in nodes)))

    # It reads /etc/resolv.conf and /etc/hosts, as they are now.
    channel = pycares.Channel(sock_state_cb=watch)
    try:
        channel.getaddrinfo(host, None, type=socket.SOCK_STREAM, callback=finish)
        while not found.done():
            seconds = channel.timeout(1.0)  # type: ignore[no-untyped-call]
            await asyncio.wait([found], timeout=seconds)
            channel.process_fd(pycares.ARES_SOCKET_BAD, pycares.ARES_SOCKET_BAD)  # Its timeouts.
        return found.result()
    finally:
        channel.cancel()  # This closes its sockets; `close` does so later, in another thread.
        channel.close()


class OutboundClient:
    """Sends requests, each over its own connection.

    It uses no proxies, cookies or redirects, and no headers except those given, `host` and
    `content-length`.

    Args:
        timeout_seconds: Timeout of each step, such as connecting or the next read. The caller
            limits the total time.
        is_allowed: Whether connecting to an address is allowed.
        ports: Ports to which connecting is allowed; any by default.
        resolve: Resolves a host to its addresses.
        trust: Trusted certificates; httpx's default certificates if not given.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        is_allowed: Callable[[str], bool] = is_public,
        ports: Collection[int] | None = None,
        resolve: Resolve = resolve,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._timeout = httpx.Timeout(timeout_seconds).as_dict()
        self._is_allowed = is_allowed
        self._ports = ports
        self._resolve = resolve
        self._trust = trust or httpx.create_ssl_context(trust_env=False)

    @asynccontextmanager
    async def stream(
        self, method: str, url: httpx.URL, *, headers: Mapping[str, str], content: bytes = b""
    ) -> AsyncIterator[Response]:
        """Send a request to an http(s) URL, and close the connection at the end of the block.

        Raises OutboundError and the errors of httpcore.
        """
        wire = _Wire(await self._addresses(url))
        request = self._request(method, url, headers, content)
        connection = httpcore.AsyncHTTPConnection(
            request.url.origin, ssl_context=self._trust, network_backend=wire
        )
        try:
            response = await connection.handle_async_request(request)
            yield Response(response.status, httpx.Headers(response.headers), wire.content(response))
        finally:
            await wire.aclose()

    async def _addresses(self, url: httpx.URL) -> list[str]:
        # Use the raw host: `url.host` may re-encode a punycode name as another one.
        host = url.raw_host.decode("ascii")
        port = url.port or DEFAULT_PORTS[url.scheme]
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = []
        if not addresses:
            raise ForbiddenHostError("has a host name that cannot be resolved")
        if not all(map(self._is_allowed, addresses)):
            raise ForbiddenHostError("names a host that is not on the public internet")
        if self._ports is not None and port not in self._ports:
            raise OutboundError("names a port that is not allowed")
        return addresses

    def _request(
        self, method: str, url: httpx.URL, headers: Mapping[str, str], content: bytes
    ) -> httpcore.Request:
        length = [("content-length", str(len(content)))] if content else []
        return httpcore.Request(
            method,
            httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            ),
            headers=[("host", url.netloc.decode("ascii")), *headers.items(), *length],
            content=content,
            extensions={"timeout": self._timeout},
        )
