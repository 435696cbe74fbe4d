"""HTTP load client: keep-alive connections that send one request after the other.

It verifies what it measures: a stream must end with `[DONE]`, and the usage of every response must
count exactly the requested tokens.
"""

import asyncio
import gc
import itertools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
from typing_extensions import override

from bench.processes import Consumption, Meter

_EVENT = b"data: {"
_DONE = b"data: [DONE]\n"
_TAIL_BYTES = 2048
"""Enough for the last two chunks of a stream, which contain the usage."""
_USAGE = re.compile(rb'"(completion|prompt|cached)_tokens":\s*(\d+)')
_ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion request; exactly `completion_tokens` tokens are expected."""

    model: str
    prompt: str
    completion_tokens: int
    streamed: bool
    temperature: float | None = None
    """None omits it from the request, for the server's default of 1."""
    messages: Sequence[bytes] = ()
    """Encoded messages of a chat, in place of the prompt."""
    pause_seconds: float = 0.0
    """Time between the previous response and this request, unless the connection has a pace."""

    @property
    def path(self) -> str:
        """Path of the endpoint."""
        return "/v1/chat/completions" if self.messages else "/v1/completions"

    def body(self, own: Mapping[str, object]) -> bytes:
        """Return the request's JSON, with a server's own fields added or in place of others."""
        fields: dict[str, object] = {
            "model": self.model,
            "max_tokens": self.completion_tokens,
            "ignore_eos": True,
        }
        if not self.messages:
            fields["prompt"] = self.prompt
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.streamed:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        encoded = json.dumps({**fields, **own}).encode()
        if not self.messages:
            return encoded
        return b'%b, "messages": [%b]}' % (encoded[:-1], b", ".join(self.messages))


@dataclass(frozen=True, slots=True)
class Pace:
    """When a connection sends its requests, regardless of response times."""

    first_seconds: float
    """Time after the start of the load."""
    every_seconds: float


@dataclass(frozen=True, slots=True)
class Lane:
    """The requests of one connection, in order."""

    url: str
    """Base URL of the server, without `/v1`; it may have a path."""
    key: str
    """API key; empty for none."""
    requests: Iterable[Request]
    tenant: str = ""
    pace: Pace | None = None
    """None sends each request as soon as the previous one has ended."""
    others: Sequence[str] = ()
    """More servers. The requests of all lanes of a load go to these and the first one in turn."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of all requests, in addition to their own or in place of them."""


@dataclass(slots=True)
class Answer:
    """The response to one request; times are `time.perf_counter` seconds."""

    request: Request
    tenant: str
    sent: float
    """Send time. With a pace, the scheduled time, even if a late response delayed the request."""
    reads: list[float] = field(default_factory=list)
    """Arrival times of the stream's chunks; chunks that arrive together count once."""
    ended: float = 0.0
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    """Empty if the response is correct."""

    @property
    def ttft_seconds(self) -> float:
        """Time to the first chunk, or to the whole response if it was not streamed."""
        return (self.reads[0] if self.reads else self.ended) - self.sent


class Load:
    """A number of lanes, driven from one event loop."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._connections: list[_Connection] = []

    async def open(self) -> None:
        """Connect all lanes without sending anything."""
        turns = itertools.count()
        self._connections = await asyncio.gather(*(_connect(lane, turns) for lane in self._lanes))

    def start(self) -> None:
        """Send the first request of each lane."""
        now = time.perf_counter()
        for connection in self._connections:
            connection.start(now)

    async def wait(self, timeout_seconds: float, *, first: int | None = None) -> None:
        """Wait until every lane, or each of the first ones, has ended. Raises TimeoutError."""
        ended = [connection.ended for connection in self._connections[:first]]
        _, late = await asyncio.wait(ended, timeout=timeout_seconds)
        if late:
            raise TimeoutError(
                f"{len(late)} of {len(ended)} connections did not receive all their responses "
                f"within {timeout_seconds:g} s"
            )

    def close(self) -> None:
        """Close all connections; the server cancels requests in progress."""
        for connection in self._connections:
            connection.close()

    @property
    def answers(self) -> list[Answer]:
        """Completed responses, including failed ones."""
        return [answer for connection in self._connections for answer in connection.answers]

    @property
    def open_answers(self) -> list[Answer]:
        """Responses that are being received."""
        return [each.answer for each in self._connections if each.answer is not None]

    @property
    def begun(self) -> int:
        """Number of requests that have received their first chunk."""
        return sum(connection.begun for connection in self._connections)


async def run(
    lanes: Sequence[Lane], *, meter: Meter, timeout_seconds: float, settle_seconds: float = 0.0
) -> tuple[list[Answer], Consumption]:
    """Run lanes to their end while a meter measures, and for some time after it."""
    load = Load(lanes)
    gc.collect()
    gc.disable()
    try:
        await load.open()
        meter.start()
        load.start()
        await load.wait(timeout_seconds)
        await asyncio.sleep(settle_seconds)
        return load.answers, meter.stop()
    finally:
        load.close()
        gc.enable()


async def complete(lanes: Sequence[Lane], *, timeout_seconds: float) -> list[Answer]:
    """Run lanes to their end and return their responses. Raises TimeoutError."""
    load = Load(lanes)
    try:
        await load.open()
        load.start()
        await load.wait(timeout_seconds)
    finally:
        load.close()
    return load.answers


async def _connect(lane: Lane, turns: Iterator[int]) -> "_Connection":
    loop = asyncio.get_running_loop()
    connection = _Connection(lane, loop.create_future(), turns)
    for url in (lane.url, *lane.others):
        parts = urlsplit(url)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"url must name a host and a port. Given: {url}")
        await loop.create_connection(lambda: connection, parts.hostname, parts.port)
    return connection


class _Connection(asyncio.Protocol):
    """One keep-alive connection to each server, and the responses that they received."""

    def __init__(self, lane: Lane, ended: "asyncio.Future[None]", turns: Iterator[int]) -> None:
        self.ended = ended
        self.answers: list[Answer] = []
        self.begun = 0
        self._lane = lane
        self._turns = turns
        self._transports: list[asyncio.Transport] = []
        self._requests: Iterator[Request] = iter(lane.requests)
        self.answer: Answer | None = None
        self._next: Request | None = None
        """The request that is sent after a pause."""
        self._due = 0.0
        self._prefix = urlsplit(lane.url).path
        host = urlsplit(lane.url).netloc
        authorization = f"authorization: Bearer {lane.key}\r\n" if lane.key else ""
        self._head = (
            f"HTTP/1.1\r\nhost: {host}\r\n{authorization}"
            "content-type: application/json\r\ncontent-length: "
        ).encode()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transports.append(cast("asyncio.Transport", transport))

    def close(self) -> None:
        self.answer = self._next = None
        for transport in self._transports:
            transport.close()

    def start(self, now: float) -> None:
        if self._lane.pace is not None:
            self._due = now + self._lane.pace.first_seconds
        self.send_next()

    def send_next(self) -> None:
        self._next = request = next(self._requests, None)
        if request is None:
            self._end()
        elif self._lane.pace is None:
            if request.pause_seconds:
                asyncio.get_running_loop().call_later(request.pause_seconds, self._send, request)
            else:
                self._send(request)
        else:
            due, self._due = self._due, self._due + self._lane.pace.every_seconds
            wait = due - time.perf_counter()
            if wait > 0:
                asyncio.get_running_loop().call_later(wait, self._send, request)
            else:
                self._send(request, due)

    def _send(self, request: Request, due: float | None = None) -> None:
        transport = self._transports[next(self._turns) % len(self._transports)]
        if transport.is_closing():
            return
        body = request.body(self._lane.fields)
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._body = b""
        self._complete = False
        sent = time.perf_counter() if due is None else due
        self.answer, self._next = Answer(request, self._lane.tenant, sent), None
        line = f"POST {self._prefix}{request.path} ".encode()
        transport.write(b"%b%b%d\r\n\r\n%b" % (line, self._head, len(body), body))

    @override
    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        answer = self.answer
        if answer is None:
            return
        self._parser.feed_data(data)
        if self._parts:
            self._take_body(answer, b"".join(self._parts), now)
            self._parts.clear()
        if self._complete:
            answer.ended = now
            self._finish(answer)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        lost = self.answer
        if self._next is not None:
            lost = Answer(self._next, self._lane.tenant, time.perf_counter())
        if lost is not None:
            lost.error = f"connection lost: {exc!r}"
            self.answers.append(lost)
            self.answer = self._next = None
        self._end()

    # Called by the parser.
    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._complete = True
        self._is_kept_alive = self._parser.should_keep_alive()

    def _take_body(self, answer: Answer, part: bytes, now: float) -> None:
        if not answer.request.streamed:
            self._body += part
            return
        # The end of a read may split a marker, so include the end of the previous data.
        if (self._body[1 - len(_EVENT) :] + part).find(_EVENT) >= 0:
            if not answer.reads:
                self.begun += 1
            answer.reads.append(now)
        self._body = (self._body + part)[-_TAIL_BYTES:]

    def _finish(self, answer: Answer) -> None:
        status = self._parser.get_status_code()
        answer.error = self._check(answer, status)
        self.answers.append(answer)
        self.answer = None
        if status == 200 and self._is_kept_alive:
            self.send_next()
        else:
            self._end()

    def _check(self, answer: Answer, status: int) -> str:
        """Return the error of a response."""
        shown = self._body[-_ERROR_CHARACTERS:].decode(errors="replace")
        if status != 200:
            return f"status {status}: {shown}"
        if not self._is_kept_alive:
            return "the server does not keep the connection alive"
        if answer.request.streamed and _DONE not in self._body:
            return f"no [DONE] at the end: {shown}"
        counts = {name: int(count) for name, count in _USAGE.findall(self._body)}
        answer.completion_tokens = counts.get(b"completion", 0)
        answer.prompt_tokens = counts.get(b"prompt", 0)
        answer.cached_tokens = counts.get(b"cached", 0)
        expected = answer.request.completion_tokens
        if answer.completion_tokens != expected:
            return f"{answer.completion_tokens} completion tokens instead of {expected}: {shown}"
        return ""

    def _end(self) -> None:
        with suppress(asyncio.InvalidStateError):
            self.ended.set_result(None)
