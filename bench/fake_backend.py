"""Fake OpenAI-compatible backend that responds at once and with almost no CPU.

It is the backend when proxies are measured: `python -m bench.fake_backend PORT`.
"""

import asyncio
import json
import sys
from itertools import count
from typing import Any, cast

import httptools
import uvloop
from typing_extensions import override

_PROMPT_TOKENS = 24
_NUMBERS = count()
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class _Connection(asyncio.Protocol):
    """One keep-alive connection."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    @override
    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    # Called by the parser.
    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        request: dict[str, Any] = json.loads(body) if body else {}
        if request.get("stream"):
            events = b"".join(map(_chunk, _events(request)))
            self._transport.write(_STREAM_HEAD + events + b"0\r\n\r\n")
        else:
            self._transport.write(_whole(request))


def _events(request: dict[str, Any]) -> list[bytes]:
    """Return the chunks of a stream: one token each, the end, and usage if requested."""
    tokens: int = request.get("max_tokens", 16)
    completion = _completion(request)
    objects = [completion | {"choices": [_choice(" token", None)]} for _ in range(tokens)]
    objects.append(completion | {"choices": [_choice("", "length")]})
    if (request.get("stream_options") or {}).get("include_usage"):
        objects.append(completion | {"choices": [], "usage": _usage(tokens)})
    return [b"data: %b\n\n" % json.dumps(each).encode() for each in objects] + [b"data: [DONE]\n\n"]


def _whole(request: dict[str, Any]) -> bytes:
    tokens: int = request.get("max_tokens", 16)
    ending = {"choices": [_choice(" token" * tokens, "length")], "usage": _usage(tokens)}
    answer = json.dumps(_completion(request) | ending).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(answer) + answer


def _completion(request: dict[str, Any]) -> dict[str, Any]:
    """Return the common fields of all chunks; the id is new, as proxies use it for accounting."""
    return {
        "id": f"cmpl-{next(_NUMBERS)}",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": request.get("model", ""),
    }


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _usage(tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": _PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": _PROMPT_TOKENS + tokens,
    }


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
