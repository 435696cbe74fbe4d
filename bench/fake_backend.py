"""Simulated OpenAI-compatible backend of proxies: `python -m bench.fake_backend PORT [SECONDS]`.

Without SECONDS it responds at once. With SECONDS it keeps the pace of the scripted engine: in each
step all running completions receive one token, and steps are SECONDS apart. 0 steps as fast as
possible. `GET /step/SECONDS` changes the pace of all running and later completions.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from typing import Any, cast

import httptools
import uvloop
from typing_extensions import override

from bench.starting import MODEL

_PROMPT_TOKENS = 24
_WORDS = (" token", " word")
"""LiteLLM's proxy fails a stream whose text repeats itself a hundred times."""
_NUMBERS = count()
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]}
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


@dataclass(slots=True)
class _Running:
    """One completion, with the data to write in each of its next steps."""

    transport: asyncio.Transport
    left: int
    """Tokens that are not sent yet."""
    chunks: Sequence[bytes]
    """Of the tokens, in turns; empty ones for a response that is not streamed."""
    end: bytes


class _Pacer:
    """Steps of all running completions."""

    def __init__(self, step_seconds: float | None) -> None:
        self.step_seconds = step_seconds
        self._running: list[_Running] = []
        self._added = asyncio.Event()

    def add(self, running: _Running) -> None:
        """Send a token of a completion in each of the next steps."""
        self._running.append(running)
        self._added.set()

    async def run(self) -> None:
        """Step until cancelled."""
        loop = asyncio.get_running_loop()
        next_step_at = 0.0
        while True:
            if not self._running:
                self._added.clear()
                await self._added.wait()
            now = loop.time()
            next_step_at = max(next_step_at + (self.step_seconds or 0.0), now)
            await asyncio.sleep(next_step_at - now)
            self._running = [each for each in self._running if _has_more(each)]


def _has_more(running: _Running) -> bool:
    """Send the next token of a completion; return whether another one follows."""
    if running.transport.is_closing():
        return False
    running.left -= 1
    chunk = running.chunks[running.left % len(running.chunks)]
    if running.left > 0:
        if chunk:
            running.transport.write(chunk)
        return True
    running.transport.write(chunk + running.end)
    return False


@dataclass(slots=True)
class _Connection(asyncio.Protocol):
    """One keep-alive connection."""

    pacer: _Pacer
    _url: bytes = b""
    _body: bytes = b""
    _transport: asyncio.Transport = field(init=False)
    _parser: httptools.HttpRequestParser = field(init=False)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpRequestParser(self)

    @override
    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            # What a client sent before it vanished may be no request.
            self._transport.close()

    # Called by the parser.
    def on_message_begin(self) -> None:
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url in (b"/v1/completions", b"/v1/chat/completions"):
            self._complete(json.loads(self._body))
        elif self._url.startswith(b"/step/"):
            self.pacer.step_seconds = float(self._url.removeprefix(b"/step/"))
            self._transport.write(_json({}))
        else:
            # Routers request the models and the health of their backends.
            self._transport.write(_json(_MODELS))

    def _complete(self, request: dict[str, Any]) -> None:
        tokens: int = request.get("max_tokens", 16)
        if request.get("stream"):
            self._transport.write(_STREAM_HEAD)
            chunks, end = _stream(request, tokens)
        else:
            chunks, end = [b""], _whole(request, tokens)
        if self.pacer.step_seconds is None:
            self._transport.write(b"".join(islice(cycle(chunks), tokens)) + end)
        else:
            self.pacer.add(_Running(self._transport, tokens, chunks, end))


def _stream(request: dict[str, Any], tokens: int) -> tuple[list[bytes], bytes]:
    """Return the chunks of the tokens, and the rest: the end, usage if requested, and `[DONE]`."""
    completion = _completion(request)
    choice = _delta if "messages" in request else _choice
    last = [completion | {"choices": [choice("", "length")]}]
    if (request.get("stream_options") or {}).get("include_usage"):
        last.append(completion | {"choices": [], "usage": _usage(tokens)})
    events = [json.dumps(each).encode() for each in last] + [b"[DONE]"]
    words = [completion | {"choices": [choice(word, None)]} for word in _WORDS]
    chunks = [_event(json.dumps(each).encode()) for each in words]
    return chunks, b"".join(map(_event, events)) + b"0\r\n\r\n"


def _whole(request: dict[str, Any], tokens: int) -> bytes:
    whole, text = _completion(request), " token" * tokens
    if "messages" in request:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        whole["object"] = "chat.completion"
    else:
        choice = _choice(text, "length")
    return _json(whole | {"choices": [choice], "usage": _usage(tokens)})


def _json(content: dict[str, Any]) -> bytes:
    answer = json.dumps(content).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(answer) + answer


def _completion(request: dict[str, Any]) -> dict[str, Any]:
    """Return the common fields of all chunks; the id is new, as proxies use it for accounting."""
    return {
        "id": f"cmpl-{next(_NUMBERS)}",
        "object": "chat.completion.chunk" if "messages" in request else "text_completion",
        "created": 1_700_000_000,
        "model": request.get("model", ""),
    }


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _delta(text: str, finish_reason: str | None) -> dict[str, Any]:
    delta = {"role": "assistant", "content": text}
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def _usage(tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": _PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": _PROMPT_TOKENS + tokens,
    }


def _event(data: bytes) -> bytes:
    """Return a server-sent event as one HTTP chunk."""
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


async def serve(port: int, step_seconds: float | None) -> None:
    """Serve on a port of loopback until cancelled; None responds at once."""
    loop = asyncio.get_running_loop()
    pacer = _Pacer(step_seconds)
    async with await loop.create_server(
        lambda: _Connection(pacer), "127.0.0.1", port, backlog=4096
    ):
        await pacer.run()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) if sys.argv[2:] else None))
