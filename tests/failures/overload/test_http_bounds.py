"""Bounds of HTTP: slow, endless and oversized headers and bodies, and many connections."""

import asyncio
import json
import time
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx
import pytest

from gateway.process.server.protocol import (
    DROP_SECONDS,
    LINGER_SECONDS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MAX_TARGET_BYTES,
    READ_BYTES,
    SHARE_OF_NETWORK,
    BoundedHttpProtocol,
)
from tests.failures.overload.conftest import HEADER_SECONDS, MAX_BODY_BYTES, MOST_CONNECTIONS
from tests.gateway.http_calls import connection, head, message_of, post, read_response, serving
from tests.support.processes import free_port
from tests.support.stack import MODEL, Stack

GET = b"GET /healthz HTTP/1.1\r\nhost: gateway\r\n"
PATIENCE_SECONDS = 60.0
"""Only a failure takes that long."""
ENDLESS = 1 << 40
"""More bytes than a connection transfers within a test's timeout."""
SOON_BYTES = 100 * MAX_HEAD_BYTES
"""More than fits into the buffers of a connection, and far less than is sent within a timeout."""
INVALID = "invalid_request_error"
START_FAILED = 3
"""Exit status of uvicorn for a port that is taken."""
HURRIED = 2
"""The gateway with the short timeout for headers."""


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Read until the gateway closes, and return what it sent."""
    rest = b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        with suppress(ConnectionError):
            while part := await reader.read(1 << 20):
                rest += part
    return rest


async def trickle(writer: asyncio.StreamWriter, data: bytes, *, seconds: float = 0.05) -> None:
    """Send one byte at a time, for as long as the gateway accepts them."""
    with suppress(ConnectionError):
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(seconds)


async def flood(
    writer: asyncio.StreamWriter, part: bytes, *, most_bytes: int, pause: float = 0.0
) -> int:
    """Send the same data until the gateway stops reading; return the bytes that it accepted.

    If it reads for some seconds, a pause leaves CPU time for other work.
    """
    sent = 0
    with suppress(ConnectionError):
        while sent < most_bytes:
            writer.write(part)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await writer.drain()
            sent += len(part)
            if pause:
                await asyncio.sleep(pause)
    return sent


# -- slow headers --------------------------------------------------------------------------------


async def test_slow_headers_get_408_and_other_clients_are_served(bounded: Stack) -> None:
    async with AsyncExitStack() as stack:
        slow, drip = [], []
        for _ in range(20):
            reader, writer = await stack.enter_async_context(connection(bounded.gateways[HURRIED]))
            # A connection that sends nothing in time is closed without a response.
            drip.append(asyncio.create_task(trickle(writer, GET + b"x: " + b"a" * 9999)))
            slow.append(reader)
        async with httpx.AsyncClient() as client:
            for _ in range(5):
                assert (await client.get(f"{bounded.gateways[HURRIED]}/healthz")).status_code == 200
        for reader in slow:
            message = message_of(
                await read_response(reader),
                status=408,
                kind="timeout_error",
                code="request_timeout",
            )
            assert f"{HEADER_SECONDS:g} seconds" in message
        await asyncio.wait_for(asyncio.gather(*drip), PATIENCE_SECONDS)


async def test_silent_connection_is_closed(bounded: Stack) -> None:
    async with connection(bounded.gateways[HURRIED]) as (reader, _):
        assert await ended(reader) == b""


@pytest.mark.parametrize("noise", [b"\r\n", GET[:10]], ids=["empty-lines", "half-a-head"])
async def test_noise_does_not_keep_an_idle_connection_open(bounded: Stack, noise: bytes) -> None:
    async with connection(bounded.gateways[HURRIED]) as (reader, writer):
        writer.write(GET + b"\r\n")
        assert (await read_response(reader)).status_code == 200
        drip = asyncio.create_task(trickle(writer, noise * 200, seconds=0.2))
        await ended(reader)
        drip.cancel()


async def test_keep_alive_lasts_longer_than_the_timeout_of_headers(bounded: Stack) -> None:
    async with connection(bounded.gateways[HURRIED]) as (reader, writer):
        for _ in range(2):
            writer.write(GET + b"\r\n")
            assert (await read_response(reader)).status_code == 200
            await asyncio.sleep(HEADER_SECONDS * 1.5)


async def test_incomplete_pipelined_head_does_not_disturb_a_running_request(
    bounded: Stack, key: str
) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": int(HEADER_SECONDS * 200), "stream": True}
    async with connection(bounded.gateways[HURRIED]) as (reader, writer):
        writer.write(post(key, body) + GET[:10])
        async with asyncio.timeout(PATIENCE_SECONDS):
            stream = await reader.readuntil(b"\n\n\r\n0\r\n\r\n")
        assert b"[DONE]" in stream
        assert b"HTTP/1.1" not in stream[10:]
        assert (await read_response(reader)).status_code == 408


# -- too many or too large headers ---------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        b"".join(b"x-%d: y\r\n" % i for i in range(MAX_HEADERS)),
        b"x: " + b"a" * MAX_HEAD_BYTES + b"\r\n",
        b"a" * MAX_HEAD_BYTES + b": x\r\n",
        b"".join(b"x-%d: %s\r\n" % (i, b"a" * 2000) for i in range(40)),
    ],
    ids=["many", "long-value", "long-name", "long-together"],
)
@pytest.mark.parametrize("pieces", [1, 7])
async def test_too_many_or_too_large_headers_get_431(
    bounded: Stack, headers: bytes, pieces: int
) -> None:
    request = GET + headers + b"\r\n"
    size = len(request) // pieces + 1
    async with connection(bounded.url) as (reader, writer):
        for start in range(0, len(request), size):
            writer.write(request[start : start + size])
            with suppress(ConnectionError):
                await writer.drain()
            await asyncio.sleep(0.02)
        response = await read_response(reader)
        assert response.headers["connection"] == "close"
        message_of(response, status=431, kind=INVALID, code="headers_too_large")
        assert await ended(reader) == b""


async def test_a_hundred_headers_of_almost_the_largest_size_are_read(bounded: Stack) -> None:
    headers = b"".join(b"x-%d: %s\r\n" % (i, b"a" * 600) for i in range(MAX_HEADERS - 1))
    async with connection(bounded.url) as (reader, writer):
        writer.write(GET + headers + b"\r\n")
        assert (await read_response(reader)).status_code == 200


async def test_endless_header_is_not_buffered(bounded: Stack) -> None:
    async with connection(bounded.url) as (reader, writer):
        writer.write(GET + b"x: ")
        await flood(writer, b"a" * 8192, most_bytes=SOON_BYTES)
        assert (await read_response(reader)).status_code == 431


@pytest.mark.parametrize("path", [b"/", b"/healthz?"])
async def test_overlong_target_gets_414(bounded: Stack, path: bytes) -> None:
    async with connection(bounded.url) as (reader, writer):
        target = path + b"a" * MAX_TARGET_BYTES
        writer.write(b"GET " + target + b" HTTP/1.1\r\nhost: gateway\r\n\r\n")
        response = await read_response(reader)
    message = message_of(response, status=414, kind=INVALID, code="uri_too_long")
    assert str(MAX_TARGET_BYTES) in message


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /healthz\r\n\r\n",
        b"GET /healthz\r\n",
        b"GET /healthz HTTP/2.0\r\nhost: gateway\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        GET + b"Host: gateway\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a b\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a/b\r\n\r\n",
        b"GET http://gateway:port/healthz HTTP/1.1\r\nhost: gateway\r\n\r\n",
    ],
    ids=[
        *(
            "tls",
            "no-target",
            "http-0.9",
            "http-0.9-line",
            "http-2",
            "no-host",
            "two-hosts",
            "two-hosts-1.0",
        ),
        *("host-with-space", "host-with-path", "no-port"),
    ],
)
async def test_invalid_http_gets_400_in_the_error_envelope(bounded: Stack, request_: bytes) -> None:
    async with connection(bounded.url) as (reader, writer):
        writer.write(request_)
        response = await read_response(reader)
    assert message_of(response, status=400, kind=INVALID, code="invalid_value")


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /healthz HTTP/1.0\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost:\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: [::1]:8080\r\n\r\n",
        b"GET http://gateway/healthz HTTP/1.1\r\nhost: gateway\r\n\r\n",
        b"GET http://gateway HTTP/1.1\r\nhost: gateway\r\n\r\n",
        b"GET http://gateway?a=1 HTTP/1.1\r\nhost: gateway\r\n\r\n",
    ],
    ids=["1.0", "empty-host", "ipv6", "absolute", "no-path", "query-without-path"],
)
async def test_unusual_valid_head_is_served(bounded: Stack, request_: bytes) -> None:
    async with connection(bounded.url) as (reader, writer):
        writer.write(request_)
        assert (await read_response(reader)).status_code == 200


@pytest.mark.parametrize("target", [b"127.0.0.1:6379", b"/v1/models"])
async def test_connect_gets_405(bounded: Stack, target: bytes) -> None:
    async with connection(bounded.url) as (reader, writer):
        writer.write(b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\nPING\r\n" % target)
        response = await read_response(reader)
        message_of(response, status=405, kind=INVALID, code="method_not_allowed")
        assert await ended(reader) == b""


async def test_upgrade_that_nobody_offers_is_ignored(bounded: Stack, key: str) -> None:
    upgrade = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABk")
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}
    content = json.dumps(body).encode()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    parts = (
        post(key, body, *upgrade),
        head(key, "transfer-encoding: chunked", *upgrade) + chunks,
        GET + "\r\n".join([*upgrade, "", ""]).encode(),
        GET + b"\r\n",
    )
    requests = b"".join(parts)
    for size in (len(requests), 7):
        async with connection(bounded.url) as (reader, writer):
            for start in range(0, len(requests), size):
                writer.write(requests[start : start + size])
                await asyncio.sleep(0)
            for _ in parts:
                response = await read_response(reader)
                assert response.status_code == 200, response.text
    assert "Traceback" not in bounded.log("gateway")


async def test_stream_to_a_client_of_http_1_0_has_no_chunks(bounded: Stack, key: str) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 3, "stream": True}
    async with connection(bounded.url) as (reader, writer):
        writer.write(post(key, body, "connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0"))
        fields, _, content = (await ended(reader)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in fields
    assert b"connection: close" in fields
    lines = content.decode().strip().split("\n\n")
    assert all(line.startswith("data: {") for line in lines[:-1])
    assert lines[-1] == "data: [DONE]"


async def test_errors_never_repeat_the_host_header(bounded: Stack) -> None:
    async with connection(bounded.url) as (reader, writer):
        writer.write(b"GET /tokenize/ HTTP/1.1\r\nhost: attacker.example\r\n\r\n")
        response = await read_response(reader)
    assert response.status_code == 404
    assert "attacker" not in f"{response.headers}{response.text}"


@pytest.mark.parametrize("which", ["port", "operators"])
def test_gateway_does_not_start_on_a_taken_port(
    bounded: Stack, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "environment", dict(bounded.environment))
    ports = {"port": free_port(), "operators": free_port()}
    ports[which] = int(bounded.url.rpartition(":")[2])
    bounded.launch_gateway("late", port=ports["port"], operators=ports["operators"])
    assert bounded.processes.pop("late").wait(PATIENCE_SECONDS) == START_FAILED
    assert f"('127.0.0.1', {ports[which]}): address already in use" in bounded.log("late")


# -- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["transfer-encoding: chunked", "content-length: 100000000"])
async def test_giant_body_gets_its_refusal_before_its_end(
    bounded: Stack, key: str, framing: str
) -> None:
    part = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    async with connection(bounded.url) as (reader, writer):
        writer.write(head(key, framing))
        sending = asyncio.create_task(flood(writer, part, most_bytes=ENDLESS, pause=0.01))
        response = await read_response(reader)
        assert response.headers["connection"] == "close"
        message_of(response, status=413, kind=INVALID, code="payload_too_large")
        assert await sending < ENDLESS


async def test_client_that_reads_after_sending_everything_receives_the_refusal(
    bounded: Stack, key: str
) -> None:
    size = 10 * MAX_BODY_BYTES
    for headers in ((), ("connection: close",)):
        async with connection(bounded.url) as (reader, writer):
            writer.write(head(key, f"content-length: {size}", *headers))
            for _ in range(10):
                writer.write(b" " * (size // 10))
                await writer.drain()
                await asyncio.sleep(0.05)
            assert (await read_response(reader)).status_code == 413
            assert await ended(reader) == b""


async def test_slow_body_is_cut_off_after_its_response(bounded: Stack) -> None:
    async with connection(bounded.url) as (reader, writer):
        writer.write(head("sk-wrong", "content-length: 100000"))
        drip = asyncio.create_task(trickle(writer, b" " * 100_000))
        assert (await read_response(reader)).status_code == 401
        await ended(reader)
        await asyncio.wait_for(drip, PATIENCE_SECONDS)


async def test_connection_stays_open_if_the_body_ends_soon_after_its_response(
    bounded: Stack,
) -> None:
    async with connection(bounded.url) as (reader, writer):
        writer.write(head("sk-wrong", "content-length: 10"))
        assert (await read_response(reader)).status_code == 401
        writer.write(b" " * 10)
        await asyncio.sleep(LINGER_SECONDS + 0.5)
        writer.write(GET + b"\r\n")
        assert (await read_response(reader)).status_code == 200


@pytest.mark.parametrize(
    "endless", [b"a" * 8192, b"x: y\r\n" * 1000], ids=["one-trailer", "many-trailers"]
)
async def test_endless_trailers_are_not_buffered(bounded: Stack, key: str, endless: bytes) -> None:
    async with connection(bounded.url) as (reader, writer):
        writer.write(head(key, "transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\nx: ")
        assert await flood(writer, endless, most_bytes=ENDLESS) < SOON_BYTES
        await ended(reader)


@pytest.mark.parametrize(
    "chunks",
    [b"zz\r\n", b"2\r\n{}xx\r\n", b"-2\r\n{}\r\n", b"2\r\n{}\r\n0\r\nx\r\n\r\n"],
    ids=["size", "longer-than-its-size", "negative", "trailer"],
)
async def test_broken_chunks_get_400(bounded: Stack, key: str, chunks: bytes) -> None:
    async with connection(bounded.url) as (reader, writer):
        writer.write(head(key, "transfer-encoding: chunked", "expect: 100-continue"))
        # The application has the request before its body breaks.
        await reader.readuntil(b" 100 Continue\r\n\r\n")
        writer.write(chunks)
        response = await read_response(reader)
        assert response.headers["connection"] == "close"
        assert message_of(response, status=400, kind=INVALID, code="invalid_value")
        assert await ended(reader) == b""


async def test_endless_chunk_extension_is_not_read(bounded: Stack, key: str) -> None:
    async with connection(bounded.url) as (_, writer):
        writer.write(head(key, "transfer-encoding: chunked") + b"2;x=")
        assert await flood(writer, b"a" * 8192, most_bytes=ENDLESS) < SOON_BYTES


async def test_largest_body_in_small_chunks_is_read(bounded: Stack, key: str) -> None:
    content = b'{"model": "none", "prompt": "x"}'
    content += b" " * (MAX_BODY_BYTES - len(content))
    chunks = [content[i : i + 10] for i in range(0, len(content), 10)]
    async with connection(bounded.url) as (reader, writer):
        writer.write(head(key, "transfer-encoding: chunked"))
        writer.write(b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks))
        writer.write(b"0\r\n\r\n")
        assert (await read_response(reader)).status_code == 404


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each part that the connections of this process read."""
    sizes: list[int] = []
    receive = BoundedHttpProtocol.data_received

    def data_received(self: BoundedHttpProtocol, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(BoundedHttpProtocol, "data_received", data_received)
    return sizes


async def answer(_scope: Any, _receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body"})


async def test_unwanted_bodies_of_a_network_are_dropped_slowly(parts: list[int]) -> None:
    async with serving(answer, most_connections=3) as url, AsyncExitStack() as stack:
        floods = []
        for _ in range(3):
            _, writer = await stack.enter_async_context(connection(url))
            writer.write(head("key", f"content-length: {ENDLESS}"))
            floods.append(asyncio.create_task(flood(writer, b" " * 65536, most_bytes=ENDLESS)))
        await asyncio.sleep(0.2)
        parts.clear()
        began = time.monotonic()
        await asyncio.sleep(0.3)
        # Each connection may read a part for which it has waited before.
        most = (time.monotonic() - began) / DROP_SECONDS + 3 * READ_BYTES
        assert 0 < sum(parts) < most
        for each in floods:
            each.cancel()


@pytest.mark.parametrize("reads", [False, True], ids=["unread", "read"])
async def test_chunks_of_a_byte_never_hold_the_event_loop(reads: bool, parts: list[int]) -> None:
    size = 300_000

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        found, has_more = 0, reads
        while has_more:
            message = await receive()
            found, has_more = found + len(message["body"]), message["more_body"]
        body = str(found).encode()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    longest = 0.0
    body = b"1\r\nx\r\n" * size + b"0\r\n\r\n"

    async def watch() -> None:
        nonlocal longest
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)

    async with serving(app) as url, connection(url) as (reader, writer):
        watching = asyncio.create_task(watch())
        writer.write(head("key", "transfer-encoding: chunked") + body)
        response = await read_response(reader)
        watching.cancel()
    assert response.text == (str(size) if reads else "0")
    # A turn of the loop parses for half a millisecond; the test itself also needs time.
    assert longest < 0.005
    # The rest of what has arrived stays with the system, for each connection.
    assert max(parts) <= READ_BYTES


# -- many requests -------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order(bounded: Stack) -> None:
    async with connection(bounded.url) as (reader, writer):
        for i in range(MAX_PIPELINED // 2):
            writer.write(GET + b"x-request-id: %d\r\n\r\n" % i)
        for i in range(MAX_PIPELINED // 2):
            assert (await read_response(reader)).headers["x-request-id"] == str(i)


async def test_flood_of_pipelined_requests_is_cut_off(bounded: Stack) -> None:
    async with connection(bounded.url) as (reader, writer):
        writer.write((GET + b"\r\n") * 2000)
        assert (await ended(reader)).count(b"HTTP/1.1 200") <= MAX_PIPELINED + 1
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{bounded.url}/healthz")).status_code == 200


async def test_connections_beyond_the_bound_get_503_until_one_is_closed(bounded: Stack) -> None:
    url = bounded.gateways[1]
    async with AsyncExitStack() as stack:
        kept = [await stack.enter_async_context(connection(url)) for _ in range(MOST_CONNECTIONS)]
        for reader, writer in kept:
            writer.write(GET + b"\r\n")
            assert (await read_response(reader)).status_code == 200
        async with connection(url) as (reader, writer):
            writer.write(GET + b"\r\n")
            response = await read_response(reader)
            message_of(response, status=503, kind="service_unavailable", code="overloaded")
            assert int(response.headers["retry-after"]) >= 1
            assert await ended(reader) == b""
        # Those of operators are counted separately.
        async with httpx.AsyncClient(base_url=bounded.operators_of(url)) as prometheus:
            assert (await prometheus.get("/metrics")).status_code == 200
        kept[0][1].close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                async with connection(url) as (reader, writer):
                    writer.write(GET + b"\r\n")
                    if (await read_response(reader)).status_code == 200:
                        break
        kept[1][1].write(GET + b"\r\n")
        assert (await read_response(kept[1][0])).status_code == 200


async def test_one_network_leaves_connections_to_others() -> None:
    async def status(address: str) -> int:
        reader, writer = await stack.enter_async_context(connection(url, address=address))
        writer.write(GET + b"\r\n")
        return (await read_response(reader)).status_code

    most = 3 * SHARE_OF_NETWORK
    async with serving(answer, most_connections=most) as url, AsyncExitStack() as stack:
        for _ in range(most - 2):
            assert await status("127.0.0.1") == 200
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await status("127.0.0.1")
        assert await status("127.0.0.2") == 200
