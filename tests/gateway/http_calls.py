"""Raw HTTP, and the common form of errors."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import msgspec
import uvicorn

from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.settings import Settings
from gateway.process.server.protocol import http_protocol
from tests.support.patience import PATIENCE_SECONDS

_REQUEST_ID = re.compile(r"req_[0-9a-f]{24}")


def message_of(
    response: httpx.Response, *, status: int, kind: str, code: str, param: str | None = None
) -> str:
    """Check that a response is an error in OpenAI's envelope and return its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert _REQUEST_ID.fullmatch(response.headers["x-request-id"])
    retry = status in (408, 409, 429) or status >= 500
    assert response.headers["x-should-retry"] == ("true" if retry else "false")
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) - {"availability"} == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == (kind, code, param)
    assert error["message"].endswith(".")
    return str(error["message"])


def post(key: str, body: Any, *headers: str, path: str = "/v1/completions") -> bytes:
    """Return the bytes of a request whose body is sent with a length."""
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return head(key, f"content-length: {len(content)}", *headers, path=path) + content


def head(key: str, *headers: str, path: str = "/v1/completions") -> bytes:
    """Return the bytes of a request up to its body."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: gateway",
        f"authorization: Bearer {key}",
        "content-type: application/json",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


@asynccontextmanager
async def serving(app: Any, *, most_connections: int = 1) -> AsyncIterator[str]:
    """Serve an application with the gateway's protocol, and give its URL."""
    turns = LoopTurns()
    protocol = http_protocol(Settings(), turns=lambda: turns, most_connections=most_connections)
    config = uvicorn.Config(app, http=protocol, lifespan="off")
    config.load()
    state = uvicorn.server.ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config, state, {}), "127.0.0.1", 0
    )
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while state.connections:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def connection(
    url: str, *, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a plain connection to a gateway, from an address."""
    target = httpx.URL(url)
    reader, writer = await asyncio.open_connection(
        target.host, target.port, local_addr=(address, 0)
    )
    try:
        yield reader, writer
    finally:
        writer.close()
        # A transport that is collected before its end warns. It does not end if the gateway no
        # longer reads what the test has sent.
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(0.2):
                await writer.wait_closed()


async def read_response(reader: asyncio.StreamReader) -> httpx.Response:
    """Read one response that has a content-length."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        start = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = start.rstrip().split("\r\n")
        headers = [tuple(line.split(": ", 1)) for line in lines]
        response = httpx.Response(int(status.split()[1]), headers=[(n, v) for n, v in headers])
        content = await reader.readexactly(int(response.headers["content-length"]))
    return httpx.Response(response.status_code, headers=response.headers, content=content)
