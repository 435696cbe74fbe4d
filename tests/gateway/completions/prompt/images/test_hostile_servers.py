"""Servers that send too much, too slowly, or no image are refused within the bounds."""

import asyncio
import gzip
from typing import Any

import pycares
import pytest
from typing_extensions import override

from gateway.completions.prompt.images.fetcher import (
    IMAGES_AT_ONCE,
    MAX_REQUESTS_OF_TENANT,
    ImageFetcher,
)
from gateway.dialects.images import MAX_IMAGE_BYTES
from gateway.platform.outbound.client import resolve
from gateway.records.errors import InvalidParameterError
from tests.gateway.completions.prompt.images.serving import (
    PARAM,
    PNG,
    SERVED,
    ClientResponse,
    Names,
    NameServer,
    Server,
    fetch,
    fetching,
    image,
    is_served,
)
from tests.gateway.conftest import eventually
from tests.support.patience import PATIENCE_SECONDS

OK = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def endless(head: bytes, piece: bytes, *, pause_seconds: float = 0.0) -> ClientResponse:
    """Return a response that lasts until the client disconnects."""

    async def respond(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_seconds)

    return respond


WORDY = "returned more than 16384 bytes besides the content"

BAD_RESPONSES: list[tuple[str, bytes | ClientResponse, str]] = [
    ("404", b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "returned status 404"),
    ("500", b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n", "returned status 500"),
    ("206", image().replace(b"200 OK", b"206 Partial"), "returned status 206"),
    ("304", b"HTTP/1.1 304 Not Modified\r\n\r\n", "returned status 304"),
    ("300", b"HTTP/1.1 300 X\r\nlocation: /a\r\n\r\n", "returned status 300"),
    ("text", image(media_type="text/html"), "returned none of these content types: image/jpeg,"),
    ("svg", image(b"<svg/>", "image/svg+xml"), "returned none of these content types"),
    ("no type", b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx", "returned none of these"),
    ("wrong magic", image(b"<html>"), "returned a file that is not image/png as declared"),
    ("other magic", image(b"\xff\xd8\xff"), "returned a file that is not image/png"),
    ("empty", image(b""), "returned a file that is not image/png"),
    (
        "gzip bomb",
        image(gzip.compress(bytes(2**20)), headers="content-encoding: gzip\r\n"),
        "returned a content encoding",
    ),
    ("brotli", image(headers="content-encoding: br\r\n"), "returned a content encoding"),
    (
        "two encodings",
        image(headers="content-encoding: identity\r\ncontent-encoding: gzip\r\n"),
        "returned a content encoding",
    ),
    (
        "gzip below HTTP",
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n",
        "cannot be fetched: RemoteProtocolError",
    ),
    (
        "too large by its own word",
        OK + b"content-length: %d\r\n\r\n" % (MAX_IMAGE_BYTES + 1),
        "must be an image of at most 4194304 bytes",
    ),
    ("cut short", OK + b"content-length: 100\r\n\r\n" + PNG, "cannot be fetched: RemoteProtocol"),
    ("negative length", OK + b"content-length: -1\r\n\r\n" + PNG, "cannot be fetched: Remote"),
    (
        "two lengths",
        OK + b"content-length: 5\r\ncontent-length: 50\r\n\r\n" + PNG,
        "cannot be fetched: RemoteProtocolError",
    ),
    ("wrong chunks", CHUNKED + b"zz\r\n", "cannot be fetched: RemoteProtocolError"),
    ("no HTTP", b"+PONG\r\n" * 100, "cannot be fetched: RemoteProtocolError"),
    ("nothing", b"", "cannot be fetched: RemoteProtocolError"),
    ("huge header", OK + b"x: " + b"y" * 2**20, WORDY),
    ("endless header", endless(OK + b"x: ", b"y" * 2**14), WORDY),
    ("endless headers", endless(OK, b"x: y\r\n" * 2**12), WORDY),
    ("endless interim responses", endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100), WORDY),
    ("endless chunk extension", endless(CHUNKED, b"1;" + b"x" * 1000 + b"\r\nx\r\n"), WORDY),
    ("endless trailers", endless(CHUNKED + b"0\r\n", b"x: y\r\n" * 100), WORDY),
    (
        "endless body",
        endless(OK + b"\r\n" + PNG, bytes(2**16)),
        "must be an image of at most 4194304 bytes",
    ),
    (
        "endless chunks",
        endless(CHUNKED, b"10000\r\n" + bytes(2**16) + b"\r\n"),
        "must be an image of at most 4194304 bytes",
    ),
    ("endless single bytes", endless(CHUNKED, b"1\r\nx\r\n" * 1000), WORDY),
]


@pytest.mark.parametrize(
    ("response", "why"),
    [case[1:] for case in BAD_RESPONSES],
    ids=[case[0] for case in BAD_RESPONSES],
)
async def test_bad_response_is_refused(
    server: Server, names: Names, response: bytes | ClientResponse, why: str
) -> None:
    server.responses["/a.png"] = response
    fetcher = fetching(f"*:{server.port}", names=names, is_allowed=is_served, max_bytes=2**30)
    with pytest.raises(InvalidParameterError) as caught:
        await fetch(fetcher, f"http://images.example:{server.port}/a.png")
    assert caught.value.message.startswith(f"'{PARAM}' {why}")
    assert caught.value.param == PARAM
    assert server.connections == 1
    if not isinstance(response, bytes):
        await asyncio.wait_for(server.left.wait(), timeout=PATIENCE_SECONDS)


async def silence(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Send nothing until the client disconnects."""
    await reader.read()
    raise ConnectionResetError


SLOW = {
    "silence": silence,
    "slow head": endless(b"HTTP/1.1 200 OK\r\nx: ", b"y", pause_seconds=0.02),
    "slow body": endless(CHUNKED, b"1\r\nx\r\n", pause_seconds=0.02),
    "slow interim responses": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", pause_seconds=0.02),
}


@pytest.mark.parametrize("response", SLOW.values(), ids=SLOW)
async def test_slow_response_times_out(
    server: Server, names: Names, response: ClientResponse
) -> None:
    server.responses["/a.png"] = response
    fetcher = fetching(f"*:{server.port}", names=names, is_allowed=is_served, timeout_seconds=0.3)
    with pytest.raises(InvalidParameterError) as caught:
        await fetch(fetcher, f"http://images.example:{server.port}/a.png")
    assert caught.value.message == f"'{PARAM}' did not arrive within 0.3 seconds."
    if server.requests:  # On a slow machine it may time out before it sends its request.
        await asyncio.wait_for(server.left.wait(), timeout=PATIENCE_SECONDS)


async def test_silent_name_server_times_out(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(_host: str, _port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(names, "resolve", wait)
    fetcher = fetching("*", names=names, timeout_seconds=0.1)
    with pytest.raises(InvalidParameterError, match=r"within 0\.1 seconds"):
        await fetch(fetcher, "http://images.example/")


async def test_silent_name_server_delays_only_its_tenant(
    server: Server, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.responses["/a.png"] = image()
    loop = asyncio.get_running_loop()
    transport, asked = await loop.create_datagram_endpoint(NameServer, (SERVED, 0))
    open_channels = set[pycares.Channel]()

    class Channel(pycares.Channel):
        def __init__(self, **options: Any) -> None:
            host, port = transport.get_extra_info("sockname")
            super().__init__(servers=[f"{host}:{port}"], **options)
            open_channels.add(self)

        @override
        def close(self) -> None:
            super().close()
            open_channels.discard(self)

    monkeypatch.setattr(pycares, "Channel", Channel)
    fetcher = fetching(f"*:{server.port}", names=names, is_allowed=lambda _: True)
    url = f"http://%s.net:{server.port}/a.png"
    waiting = [
        asyncio.create_task(
            fetch(fetcher, *(url % f"silent-{number}-{each}" for each in range(5)), tenant_id="bad")
        )
        for number in range(2 * MAX_REQUESTS_OF_TENANT)
    ]
    most = MAX_REQUESTS_OF_TENANT * IMAGES_AT_ONCE
    await eventually(lambda: len(asked.asked) == most, what="the look-ups of a tenant")
    assert await fetch(fetcher, url % "images", tenant_id="good") == [PNG]
    assert len(open_channels) == most
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not open_channels
    assert await fetch(fetcher, url % "pictures", tenant_id="bad") == [PNG]
    assert await resolve("images.net", 443) in ([SERVED, "::1"], ["::1", SERVED])
    assert await resolve("192.0.2.7", 443) == ["192.0.2.7"]
    assert await resolve("2001:db8::7", 443) == ["2001:db8::7"]
    assert SERVED in await resolve("localhost", 443)
    transport.close()


async def test_closed_port_is_reported(server: Server, names: Names) -> None:
    names.addresses["images.example"] = [["127.0.0.3"]]
    fetcher = fetching(f"*:{server.port}", names=names, is_allowed=lambda _: True)
    with pytest.raises(InvalidParameterError, match="cannot be fetched: ConnectError"):
        await fetch(fetcher, f"http://images.example:{server.port}/")


async def test_cookies_of_one_response_are_not_sent_with_the_next_request(
    fetcher: ImageFetcher, server: Server
) -> None:
    server.responses["/a.png"] = image(headers="set-cookie: id=1; path=/\r\n")
    for _ in range(2):
        await fetch(fetcher, f"http://images.example:{server.port}/a.png")
    assert len(server.requests) == 2
    assert not any("cookie" in head.lower() for head in server.requests)


async def test_images_of_a_request_share_one_size_limit(server: Server, names: Names) -> None:
    server.responses["/a.png"] = image(PNG + bytes(1000))
    url = f"http://images.example:{server.port}/a.png"
    fetcher = fetching(f"*:{server.port}", names=names, is_allowed=is_served, max_bytes=3500)
    assert len(await fetch(fetcher, url, url, url)) == 3
    with pytest.raises(InvalidParameterError) as caught:
        await fetch(fetcher, *[url] * 4)
    assert caught.value.message.endswith(
        "exceeds the limit of 3500 bytes for all images that a request names by URL."
    )


async def test_first_failure_cancels_the_others(server: Server, fetcher: ImageFetcher) -> None:
    server.responses["/slow.png"] = endless(CHUNKED, b"1\r\nx\r\n", pause_seconds=0.01)
    server.responses["/bad.png"] = image(b"no image")
    base = f"http://images.example:{server.port}"
    with pytest.raises(InvalidParameterError, match="is not image/png") as caught:
        await fetch(fetcher, f"{base}/slow.png", f"{base}/bad.png")
    assert caught.value.param == "messages[0].content[2].image_url.url"
    await asyncio.wait_for(server.left.wait(), timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("size", [128, 1000, 4096])
async def test_image_may_come_in_small_chunks(
    server: Server, fetcher: ImageFetcher, size: int
) -> None:
    content = PNG + bytes(2**19)
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    server.responses["/a.png"] = CHUNKED + chunks + b"0\r\n\r\n"
    assert await fetch(fetcher, f"http://images.example:{server.port}/a.png") == [content]


async def test_server_without_tls_handshake_times_out(names: Names) -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        await reader.read(-1)
        left.set()
        writer.close()

    listening = await asyncio.start_server(ignore, SERVED, 0)
    port = listening.sockets[0].getsockname()[1]
    fetcher = fetching(f"*:{port}", names=names, is_allowed=is_served, timeout_seconds=0.2)
    with pytest.raises(InvalidParameterError, match=r"within 0\.2 seconds"):
        await fetch(fetcher, f"https://images.example:{port}/")
    if came.is_set():
        await asyncio.wait_for(left.wait(), timeout=PATIENCE_SECONDS)
    listening.close()
    await listening.wait_closed()
