"""The network connection of one outbound request, to an address that was already checked."""

import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final

import httpcore
from typing_extensions import override

MAX_OTHER_BYTES: Final = 16_384
"""Allowed response bytes that are not content, such as headers, plus a sixteenth of the content.

Parsing them is slow in comparison with content, and a hostile server could send nothing else.
"""
READ_BYTES: Final = 8_192
"""Maximum bytes per read: one read is parsed at once, which blocks the event loop."""

SocketOption = (
    tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]
)


class TooMuchBesideContentError(Exception):
    """The server sends too many headers, interim responses or chunk framing bytes."""


class Wire(httpcore.AsyncNetworkBackend):
    """Connects to given addresses instead of the host in the request, and counts non-content bytes.

    Args:
        addresses: Tried in this order until a connection succeeds.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._backend = httpcore.AnyIOBackend()
        self._stream: httpcore.AsyncNetworkStream | None = None
        self._other_bytes = 0

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
            self._other_bytes -= len(piece) + len(piece) // 16
            yield piece

    def check(self) -> None:
        """Raise TooMuchBesideContentError if the limit is exceeded."""
        if self._other_bytes > MAX_OTHER_BYTES:
            raise TooMuchBesideContentError

    def count(self, read_bytes: int) -> None:
        """Count bytes that were read, initially as non-content."""
        self._other_bytes += read_bytes

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

    def __init__(self, stream: httpcore.AsyncNetworkStream, wire: Wire) -> None:
        self._stream = stream
        self._wire = wire

    @override
    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        # All earlier bytes have been parsed by now.
        self._wire.check()
        data = await self._stream.read(min(max_bytes, READ_BYTES), timeout)
        self._wire.count(len(data))
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
