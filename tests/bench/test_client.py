"""The load client spreads requests over servers, and says what it waited for in vain."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace

import pytest

from bench.client import Lane, Request, complete

BODY = b'{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
REQUEST = Request(model="any", prompt="", completion_tokens=1, streamed=False)


@asynccontextmanager
async def _serving(name: str, seen: list[str], *, replies: bool = True) -> AsyncIterator[str]:
    """Serve completions of one token, and note the server's name for each. Yield the URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"content-length: (\d+)", head)
                assert length is not None
                await reader.readexactly(int(length[1]))
                seen.append(name)
                if replies:
                    writer.write(REPLY)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())


async def test_requests_of_all_connections_go_to_the_servers_in_turn() -> None:
    seen: list[str] = []
    async with AsyncExitStack() as stack:
        first, *others = [
            await stack.enter_async_context(_serving(name, seen)) for name in ("a", "b", "c")
        ]
        lanes = [Lane(first, "", [REQUEST] * number, others=others) for number in (7, 1, 4)]
        answers = await complete(lanes, timeout_seconds=10)
    assert [each.error for each in answers] == [""] * 12
    assert {name: seen.count(name) for name in "abc"} == dict.fromkeys("abc", 4)


async def test_a_request_has_the_path_and_the_fields_of_its_server() -> None:
    seen: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append(head.decode().partition("\r\n")[0])
            seen.append((await reader.readuntil(b"}")).decode())
            writer.write(REPLY)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = "http://{}:{}/openai".format(*server.sockets[0].getsockname())
        answers = await complete(
            [Lane(url, "", [REQUEST], fields={"model": "other", "own": 1})], timeout_seconds=10
        )
    assert [each.error for each in answers] == [""]
    line, body = seen
    assert line == "POST /openai/v1/completions HTTP/1.1"
    sent = json.loads(body)
    assert (sent["model"], sent["own"], sent["max_tokens"]) == ("other", 1, 1)


async def test_a_load_that_does_not_end_says_how_much_of_it_is_left() -> None:
    seen: list[str] = []
    async with _serving("a", seen) as url, _serving("silent", seen, replies=False) as silent:
        lanes = [Lane(url, "", []), Lane(silent, "", [REQUEST])]
        with pytest.raises(TimeoutError, match=r"^1 of 2 connections .* within 0\.05 s$"):
            await complete(lanes, timeout_seconds=0.05)


async def test_a_connection_that_is_closed_before_a_request_is_reported() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        answers = await complete(
            [Lane(url, "", [replace(REQUEST, pause_seconds=60)])], timeout_seconds=10
        )
    assert [each.error for each in answers] == ["connection lost: None"]
