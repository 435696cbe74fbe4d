"""Allowed images are fetched in order, over http and https, and connections are closed."""

import asyncio
import ssl
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.completions.prompt.images import fetcher as fetcher_module
from gateway.completions.prompt.images.fetcher import IMAGES_AT_ONCE, ImageFetcher, fetch_images
from gateway.dialects.request import ImageSource
from gateway.platform.settings import Settings
from gateway.records.errors import InvalidParameterError, OverloadedError
from tests.gateway.completions.prompt.images.serving import (
    PNG,
    SERVED,
    Names,
    Server,
    fetch,
    fetching,
    image,
    is_served,
    redirect,
    serving,
)
from tests.support.patience import PATIENCE_SECONDS

FILES = {
    "image/png": PNG,
    "image/jpeg": b"\xff\xd8\xff and so on",
    "image/webp": b"RIFF\x00\x00\x00\x00WEBP and so on",
    "image/gif": b"GIF89a and so on",
}


@pytest.mark.parametrize("media_type", FILES)
@pytest.mark.parametrize("reported", ["{}", "{}; charset=binary", " {} "])
async def test_image_of_every_type_is_fetched(
    fetcher: ImageFetcher, server: Server, media_type: str, reported: str
) -> None:
    server.responses["/a?x=1&y=%20"] = image(FILES[media_type], reported.format(media_type.upper()))
    [content] = await fetch(fetcher, f"http://images.example:{server.port}/a?x=1&y=%20#z")
    assert content == FILES[media_type]
    [head] = server.requests
    assert head.split("\r\n") == [
        "GET /a?x=1&y=%20 HTTP/1.1",
        f"host: images.example:{server.port}",
        "accept: image/jpeg, image/png, image/webp, image/gif",
        "accept-encoding: identity",
        "user-agent: sluice-images",
        "",
        "",
    ]


async def test_files_and_urls_keep_their_order(fetcher: ImageFetcher, server: Server) -> None:
    contents = [PNG + bytes([number]) for number in range(8)]
    for number, content in enumerate(contents):
        server.responses[f"/{number}"] = image(content)
    sources: list[ImageSource] = [
        ImageSource(file=contents[number], param="x")
        if number % 3 == 0
        else ImageSource(url=f"http://images.example:{server.port}/{number}", param="x")
        for number in range(8)
    ]
    assert await fetch_images(sources, fetcher=fetcher, tenant_id="tenant") == contents
    assert server.connections == 5


async def test_request_without_urls_opens_no_connection(connected: list[Any]) -> None:
    fetcher = fetching(names=Names())
    assert await fetch_images([], fetcher=fetcher, tenant_id="tenant") == []
    files = [ImageSource(file=content, param="x") for content in (b"a", b"b")]
    assert await fetch_images(files, fetcher=fetcher, tenant_id="tenant") == [b"a", b"b"]
    assert connected == []


async def test_concurrent_fetches_are_bounded(fetcher: ImageFetcher, server: Server) -> None:
    running = most = 0
    is_full = asyncio.Event()

    async def respond(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == IMAGES_AT_ONCE:
            is_full.set()
        await is_full.wait()
        await asyncio.sleep(0.02)
        running -= 1
        writer.write(image())

    server.responses["/a.png"] = respond
    url = f"http://images.example:{server.port}/a.png"
    assert await fetch(fetcher, *[url] * 16) == [PNG] * 16
    assert most == IMAGES_AT_ONCE


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(fetcher: ImageFetcher, server: Server, status: int) -> None:
    server.responses = {
        "/a": redirect("b", status),
        "/b": redirect("/c/d#e", status),
        "/c/d": redirect(f"http://IMAGES.example:{server.port}/f%20g", status),
        "/f%20g": image(),
    }
    assert await fetch(fetcher, f"http://images.example:{server.port}/a") == [PNG]


async def test_image_over_https_needs_a_certificate_of_the_name(
    names: Names, tls: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    secure, trust = tls
    sni: list[str | None] = []
    secure.sni_callback = lambda _socket, name, _context: sni.append(name)
    names.addresses["other.example"] = [[SERVED]]
    async with serving(tls=secure) as server:
        server.responses["/a.png"] = image()
        fetcher = fetching(f"*:{server.port}", names=names, is_allowed=is_served, trust=trust)
        assert await fetch(fetcher, f"https://images.example:{server.port}/a.png") == [PNG]
        assert sni == ["images.example"]
        with pytest.raises(InvalidParameterError, match="cannot be fetched: ConnectError"):
            await fetch(fetcher, f"https://other.example:{server.port}/a.png")
        fetcher = fetching(f"*:{server.port}", names=names, is_allowed=is_served)
        with pytest.raises(InvalidParameterError, match="cannot be fetched: ConnectError"):
            await fetch(fetcher, f"https://images.example:{server.port}/a.png")
    assert len(server.requests) == 1


async def test_next_address_of_a_name_is_tried(
    server: Server, names: Names, connected: list[Any]
) -> None:
    server.responses["/a.png"] = image()
    names.addresses["images.example"] = [["127.0.0.3", SERVED]]
    fetcher = fetching(
        f"*:{server.port}", names=names, is_allowed=lambda address: address.startswith("127.")
    )
    assert await fetch(fetcher, f"http://images.example:{server.port}/a.png") == [PNG]
    assert connected == [("127.0.0.3", server.port), (SERVED, server.port)]


async def test_bounds_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_IMAGE_URL_TIMEOUT", "0.5")
    monkeypatch.setenv("SLUICE_IMAGE_URL_MAX_BYTES", "1000")
    fetcher = ImageFetcher.from_settings(Settings())
    assert (fetcher.timeout_seconds, fetcher.max_bytes) == (0.5, 1000)


async def test_cancelled_request_frees_its_connection_and_slot(
    server: Server, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "MAX_REQUESTS", 1)
    begun = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        begun.set()
        assert await reader.read() == b""
        server.left.set()

    server.responses = {"/hang": hang, "/a.png": image()}
    base = f"http://images.example:{server.port}"
    fetcher = fetching(f"*:{server.port}", names=names, is_allowed=is_served)
    task = asyncio.create_task(fetch(fetcher, f"{base}/hang"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(server.left.wait(), timeout=PATIENCE_SECONDS)
    assert await fetch(fetcher, f"{base}/a.png") == [PNG]


async def test_request_without_a_free_slot_gets_a_retry_time(
    server: Server, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "MAX_REQUESTS", 1)
    url = f"http://images.example:{server.port}/a.png"
    server.responses["/a.png"] = image()
    fetcher = fetching(f"*:{server.port}", names=names, is_allowed=is_served)
    async with fetcher.place("other"):
        fetcher.timeout_seconds = 0.2
        with pytest.raises(OverloadedError) as caught:
            await fetch(fetcher, url)
        assert caught.value.retry_after_seconds == 1
    assert server.connections == 0
    fetcher.timeout_seconds = PATIENCE_SECONDS
    assert await fetch(fetcher, url) == [PNG]


async def test_tenant_with_slow_hosts_leaves_slots_to_others(server: Server, names: Names) -> None:
    url = f"http://images.example:{server.port}/a.png"
    server.responses["/a.png"] = image()
    fetcher = fetching(f"*:{server.port}", names=names, is_allowed=is_served)
    async with AsyncExitStack() as places:
        for _ in range(fetcher_module.MAX_REQUESTS_OF_TENANT):
            await places.enter_async_context(fetcher.place("slow"))
        fetcher.timeout_seconds = 0.2
        with pytest.raises(OverloadedError):
            await fetch(fetcher, url, tenant_id="slow")
        fetcher.timeout_seconds = PATIENCE_SECONDS
        assert await fetch(fetcher, url, tenant_id="other") == [PNG]
    assert await fetch(fetcher, url, tenant_id="slow") == [PNG]
