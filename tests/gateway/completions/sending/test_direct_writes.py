"""Events that the reply reader writes to the connection itself, and those that the task sends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace
from typing_extensions import override
from uvicorn.protocols.http.flow_control import FlowControl

from contract.messages import Delta, Frame, GenerationJob, JobFinished
from contract.prompts import packed
from contract.sampling import SamplingSpec
from gateway.completions.queue.generation import Generation, Reply
from gateway.completions.queue.jobs import JobsInFlight
from gateway.completions.queue.replies import Replies
from gateway.completions.queue.ticket import Ticket
from gateway.completions.rendering.sse import BEGINNING, KEEP_ALIVE, ChunkRenderer
from gateway.completions.sending.measuring import RequestMeasure
from gateway.completions.sending.streaming import DisconnectWatch, StreamedCompletion
from gateway.completions.sending.subscription import Subscription
from gateway.http.connection import CONNECTION, DirectConnection, Outbox
from gateway.http.exchange import Exchange
from gateway.models.catalogue import Catalogue
from gateway.process.server.connection import UvicornConnection
from tests.gateway.http_calls import connection, post, serving
from tests.gateway.replies import STOP, completion, ended, said
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stream_decoders import DECODERS, READ_IDS

TEXTS = [said(text) for text in "abcdef"]
LAST, END = said("g", finish=STOP), ended(tokens=7)


class Client(asyncio.Transport):
    """The connection of a client: what was written to it directly, and what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = FlowControl(self)
        self.direct = UvicornConnection(Outbox(), self)
        self.parts: list[tuple[str, bytes]] = []
        self.has_left = asyncio.Event()
        self._is_closing = False

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        length, body = bytes(data).split(b"\r\n", 1)
        assert int(length, 16) == len(body.removesuffix(b"\r\n"))
        self.parts.append(("written", body.removesuffix(b"\r\n")))

    @override
    def is_closing(self) -> bool:
        return self._is_closing

    async def receives(self, part: bytes) -> None:
        """Wait until a part was sent last."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.parts[-1] != ("sent", part):
                await asyncio.sleep(0.001)

    async def send(self, message: Any) -> None:
        await self.flow.drain()
        if body := message.get("body"):
            self.parts.append(("sent", body))

    async def receive(self) -> Any:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    def pause(self) -> None:
        """Stop reading."""
        self.flow.pause_writing()
        self.direct.is_paused = True

    def resume(self) -> None:
        """Read again."""
        self.flow.resume_writing()
        self.direct.is_paused = False

    def leave(self) -> None:
        """Disconnect."""
        self._is_closing = True
        self.has_left.set()


class Job:
    """A job that generates, and whose messages arrive in frames."""

    def __init__(self, generation: Generation, *, n: int) -> None:
        job = GenerationJob(
            "j", 1, "g", "t", "", packed([1]), 100, SamplingSpec(seed=1), 0, n=n, best_of=n
        )
        self.generation = generation
        self.ticket = Ticket.of(job, "m", 0, generation, 1.0)
        jobs = JobsInFlight(cast("Catalogue", None))
        jobs.add([self.ticket])
        self._replies = Replies(jobs, cast("Catalogue", None))

    def push(self, reply: Reply) -> bool:
        """Apply a frame with one message. Return False if there was no room for it."""
        frame, message = Frame("w", 0), reply.message
        if isinstance(message, Delta):
            start = len(self.ticket.output.choices[message.choice].token_ids)
            frame.deltas.append(replace(message, start=start))
        elif isinstance(message, JobFinished):
            frame.finished.append(message)
        self._replies.apply(frame)
        return not self.generation.overflowed


@asynccontextmanager
async def streaming(
    client: Client, *, n: int = 1, keep_alive_seconds: float = 60.0, has_ids: bool = False
) -> AsyncIterator[Job]:
    """Stream a response whose first event was sent."""
    generation = Generation(max_unread_bytes=1000)
    job = Job(generation, n=n)
    measure = RequestMeasure("completions", Exchange())
    response = StreamedCompletion(
        Subscription(completion(n=n), generation),
        has_ids=has_ids,
        watch=DisconnectWatch(client.receive, generation),
        measure=measure,
        keep_alive_seconds=keep_alive_seconds,
        headers={},
    )
    measure.accepted("m")
    scope = {"type": "http", "extensions": {CONNECTION: {"connection": client.direct}}}
    job.push(TEXTS[0])
    await response.begin(timeout_seconds=PATIENCE_SECONDS)
    task = asyncio.create_task(response(scope, client.receive, client.send))
    await settled()
    yield job
    async with asyncio.timeout(PATIENCE_SECONDS):
        await task


async def settled() -> None:
    """Let all tasks process what they have."""
    for _ in range(10):
        await asyncio.sleep(0)


def kinds(client: Client) -> list[str]:
    """Return how each part reached the client."""
    return [kind for kind, _ in client.parts]


async def test_plain_deltas_are_written_in_order_between_the_first_event_and_the_end() -> None:
    client = Client()
    async with streaming(client) as job:
        for reply in TEXTS[1:3]:
            job.push(reply)
        await settled()
        job.push(TEXTS[3])
        client.pause()
        job.push(TEXTS[4])
        await settled()
        assert kinds(client) == ["sent", "written", "written"]
        client.resume()
        await settled()
        job.push(TEXTS[5])
        job.push(LAST)
        job.push(END)
    assert kinds(client) == ["sent", "written", "written", "sent", "written", "sent"]
    expected = ChunkRenderer(completion()).render([*TEXTS, LAST, END])
    assert b"".join(part for _, part in client.parts) == expected


async def test_client_that_does_not_read_is_not_written_to_beyond_the_bound() -> None:
    client = Client()
    async with streaming(client) as job:
        client.pause()
        while job.push(said("x" * 100)):
            await asyncio.sleep(0)
        assert kinds(client) == ["sent"]
        client.resume()
    assert b"too slowly" in client.parts[-1][1]


async def test_nothing_is_written_after_a_disconnect() -> None:
    client = Client()
    async with streaming(client) as job:
        job.push(TEXTS[1])
        client.leave()
        job.push(TEXTS[2])
    assert kinds(client) == ["sent"]


async def test_many_choices_are_rendered_in_turns() -> None:
    client = Client()
    async with streaming(client, n=8) as job:
        job.push(TEXTS[1])
        await settled()
        client.leave()
    assert kinds(client) == ["sent", "sent"]


async def test_keep_alives_are_for_silence_alone() -> None:
    client = Client()
    async with streaming(client, keep_alive_seconds=0.6) as job:
        for _ in range(26):
            job.push(TEXTS[1])
            await asyncio.sleep(0.05)
        assert ("sent", BEGINNING) not in client.parts
        for part in (BEGINNING, KEEP_ALIVE):
            await client.receives(part)
        # Deltas of hidden reasoning wake the task without events.
        for _ in range(20):
            job.generation.wake()
            await settled()
        assert client.parts.count(("sent", KEEP_ALIVE)) < 10
        job.push(TEXTS[2])
        await settled()
        # The task continues the event that it has begun.
        assert kinds(client)[-1] == "sent"
        job.push(TEXTS[3])
        await settled()
        assert kinds(client)[-1] == "written"
        client.leave()


@pytest.mark.parametrize("has_ids", [False, True])
async def test_no_client_takes_a_keep_alive_for_an_event(*, has_ids: bool) -> None:
    client = Client()
    async with streaming(client, keep_alive_seconds=0.02, has_ids=has_ids) as job:
        await client.receives(KEEP_ALIVE)
        job.push(TEXTS[1])
        await client.receives(BEGINNING)
        for reply in (*TEXTS[2:], LAST, END):
            job.push(reply)
    parts = [part for _, part in client.parts]
    rendered = ChunkRenderer(completion()).render([*TEXTS, LAST, END]).decode()
    *chunks, done = [event.removeprefix("data: ") for event in rendered.split("\n\n")[:-1]]
    assert done == "[DONE]"
    for name, decode in (READ_IDS if has_ids else DECODERS).items():
        *events, end = decode(parts)
        assert end == done, name
        assert [json.loads(each) for each in events] == [json.loads(each) for each in chunks], name


async def test_request_whose_end_is_cancelled_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subscription, "aclose", AsyncMock(side_effect=asyncio.CancelledError))
    client, before = Client(), RequestMeasure.in_progress

    async def respond() -> None:
        async with streaming(client):
            assert RequestMeasure.in_progress == before + 1
            client.leave()

    with pytest.raises(asyncio.CancelledError):
        await respond()
    assert RequestMeasure.in_progress == before


async def test_server_gives_every_request_a_writer_in_the_order_of_its_response() -> None:
    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"a", b"b"):
            await send({"type": "http.response.body", "body": part * 2, "more_body": True})
            scope["extensions"][CONNECTION]["connection"].write(part)
            await asyncio.sleep(0)
        await send({"type": "http.response.body"})

    async with serving(app) as url, connection(url) as (reader, writer):
        writer.write(post("key", {}) * 2)
        for _ in range(2):
            response = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert response.partition(b"\r\n\r\n")[2] == (
                b"2\r\naa\r\n1\r\na\r\n2\r\nbb\r\n1\r\nb\r\n0\r\n\r\n"
            )


async def test_whole_response_leaves_in_one_call_and_a_lost_client_is_reported() -> None:
    lost = asyncio.Event()

    async def app(scope: Any, receive: Any, _send: Any) -> None:
        direct: DirectConnection = scope["extensions"][CONNECTION]["connection"]
        body = direct.take_body(most_bytes=4)
        if body is None:
            assert len((await receive())["body"]) > 4
            direct.watch(lost.set)
            await lost.wait()
            assert not direct.respond(200, [], b"")
            return
        assert not direct.respond(200, [(b"x-split", b"a\r\nb: c")], b"")
        assert not direct.respond(200, [], b"x" * 100_000)
        assert direct.respond(200, [(b"content-length", b"%d" % len(body))], body)

    async with serving(app) as url:
        async with connection(url) as (reader, writer):
            writer.write(post("key", b"one") + post("key", b"two"))
            for expected in (b"one", b"two"):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 OK\r\n")
                assert await reader.readexactly(3) == expected
            writer.write(post("key", b"end", "connection: close"))
            assert b"\r\nconnection: close\r\n" in await reader.read()
        async with connection(url) as (_, writer):
            writer.write(post("key", b"large"))
            await writer.drain()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await lost.wait()
