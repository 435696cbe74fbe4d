"""Clients that do not read: the gateway cuts them off, and other clients are not affected."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from redis.asyncio import Redis

from contract import keys
from contract.messages import JobFinished
from contract.outcomes import FinishReason
from contract.queue import JobClaim
from gateway.records.usage_record import Outcome, UsageRecord, decode_usage
from tests.failures.overload.conftest import MAX_UNREAD_BYTES, SEND_SECONDS
from tests.gateway.http_calls import post
from tests.support.fake_worker import FakeWorker, delta
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import Stack, metric, wait_for_metric

STREAMS, SLOW = 24, 6
PIECE = "x" * 100_000
IN_PROGRESS = "sluice_gateway_requests_in_progress"

ESTABLISHED = "01"
"""In the kernel's table."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def narrow_connection(url: str) -> AsyncIterator[Connection]:
    """Open a connection with small buffers."""
    host, port = url.removeprefix("http://").split(":")
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=plain)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Read to the end of a stream, or of the connection."""
    data = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not data.endswith(b"\r\n0\r\n\r\n"):
                part = await reader.read(1 << 20)
                if not part:
                    break
                data += part
    return data


def words(stream: bytes) -> str:
    """Return the text of a stream."""
    lines = [line for line in stream.splitlines() if line.startswith(b"data: {")]
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)


async def records(redis: "Redis", tenant: str) -> list[UsageRecord]:
    """Return what was settled for a tenant."""
    entries: Any = await redis.xrange(keys.usage(keys.bucket_of(tenant)))
    return [decode_usage(fields[b"u"]) for _, fields in entries]


async def serve(redis: "Redis", model: str) -> FakeWorker:
    """Register a worker; a gateway looks up an unknown model at once."""
    worker = FakeWorker(redis, model)
    await worker.announce()
    return worker


async def push(worker: FakeWorker, claims: list[JobClaim], texts: int = 0) -> None:
    """Send long texts to streams, then end them."""
    for _ in range(texts):
        deltas = [delta(claim, PIECE) for claim in claims]
        await worker.send(claims[0].job.gateway, deltas=deltas)
        await asyncio.sleep(0.01)
    for claim in claims:
        end = JobFinished(claim.job.handle, 1, 3, 0, 0)
        last = delta(claim, "end", finish_reason=FinishReason.STOP)
        await worker.send(claim.job.gateway, deltas=[last], finished=[end])


async def overflow(
    redis: "Redis",
    worker: FakeWorker,
    slow: list[JobClaim],
    quick: list[JobClaim],
    readers: list[asyncio.StreamReader],
) -> list[bytes]:
    """Send text until the gateway has cancelled each slow one; return what the others have read.

    Each frame waits until they have all of the last one. If frames came faster than the gateway
    writes, it would drop text before a connection is full, and the error would fit.
    """
    streams, gateway = [b""] * len(quick), slow[0].job.gateway
    cancelled = keys.control(worker.queue.model, worker.name)
    async with asyncio.timeout(2 * PATIENCE_SECONDS):
        while await redis.llen(cancelled) < len(slow):
            deltas = [delta(claim, PIECE[: MAX_UNREAD_BYTES // 4]) for claim in slow]
            deltas += [delta(claim, "word ") for claim in quick]
            await worker.send(gateway, deltas=deltas)
            for index, reader in enumerate(readers):
                streams[index] += await reader.readuntil(b"word ")
    return streams


@pytest.mark.slow
async def test_clients_that_never_read_are_cut_off_and_delay_no_others(
    bounded: Stack, store: "Redis"
) -> None:
    key = await asyncio.to_thread(bounded.key, "readers")
    worker = await serve(store, "wordy")
    body = {"model": "wordy", "prompt": "x", "max_tokens": 1000, "stream": True}
    async with AsyncExitStack() as stack:
        connections: list[Connection] = []
        for index in range(STREAMS):
            reader, writer = await stack.enter_async_context(narrow_connection(bounded.url))
            if index < SLOW:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
            connections.append((reader, writer))
            writer.write(post(key, body | {"user": str(index)}))
            if index == SLOW - 1:
                slow = await worker.claim(SLOW)
        quick = await worker.claim(STREAMS - SLOW)
        readers = [reader for reader, _ in connections[SLOW:]]
        streams = await overflow(store, worker, slow, quick, readers)
        reported: Any = await store.lrange(keys.control("wordy", worker.name), 0, -1)
        assert {job_id.decode() for job_id in reported} == {claim.job.id for claim in slow}
        await push(worker, quick)
        expected = "word " * streams[0].count(b"word ") + "end"
        for stream, (reader, _) in zip(streams, connections[SLOW:], strict=True):
            assert words(stream + await read_all(reader)) == expected
        # The error is not read either: the connections are cut, and the requests end.
        await asyncio.to_thread(wait_for_metric, bounded.operators, IN_PROGRESS, 0)
        for claim in slow:
            await worker.drop(claim, tokens=5)
        for reader, writer in connections[:SLOW]:
            while _is_open(bounded, writer):
                await asyncio.sleep(0.1)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            unread = await read_all(reader)
            assert b"[DONE]" not in unread
            assert b"slow_reader" not in unread
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(settled := await records(store, "readers")) < STREAMS:
            await asyncio.sleep(0.1)
    cut = [record for record in settled if record.outcome is Outcome.CANCELLED]
    assert len(cut) == SLOW
    assert {record.code for record in cut} == {"slow_reader"}


async def test_unread_whole_response_is_dropped(bounded: Stack, store: "Redis") -> None:
    key = await asyncio.to_thread(bounded.key, "readers")
    worker = await serve(store, "whole")
    async with AsyncExitStack() as stack, asyncio.timeout(2 * PATIENCE_SECONDS):
        # On a busy machine Redis may reply too late: a refused request is sent again.
        status = b"503"
        while status == b"503":
            reader, writer = await stack.enter_async_context(narrow_connection(bounded.url))
            writer.write(post(key, {"model": "whole", "prompt": "x", "max_tokens": 9}))
            assert _is_open(bounded, writer)
            claiming = asyncio.create_task(worker.claim_one())
            answering = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
            await asyncio.wait((claiming, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                await push(worker, [await claiming], 80)
            claiming.cancel()
            _, status, *_ = (await answering).split()
        # The connection of an error would stay, for the next request.
        assert status == b"200"
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        while _is_open(bounded, writer):
            await asyncio.sleep(0.1)
        while metric(bounded.operators, IN_PROGRESS):
            await asyncio.sleep(0.05)


async def test_slow_reader_gets_the_whole_response(bounded: Stack, store: "Redis") -> None:
    key = await asyncio.to_thread(bounded.key, "readers")
    worker = await serve(store, "whole")
    async with narrow_connection(bounded.url) as (reader, writer):
        writer.write(post(key, {"model": "whole", "prompt": "x", "max_tokens": 9}))
        claim = await worker.claim_one()
        text = PIECE * 40
        await push(worker, [claim], 40)
        content = b""
        pause = 1.4 * SEND_SECONDS / 20
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not content.endswith(b"}}"):
                part = await reader.read(len(text) // 20)
                assert part, "the connection was cut"
                content += part
                await asyncio.sleep(pause * len(part) * 20 / len(text))
    assert text.encode() in content


def _is_open(stack: Stack, writer: asyncio.StreamWriter) -> bool:
    """Look up in the kernel's table whether the gateway has its end of a connection open."""
    ports = (
        f":{int(stack.url.rpartition(':')[2]):04X}",
        f":{writer.get_extra_info('sockname')[1]:04X}",
    )
    with open("/proc/net/tcp") as table:  # noqa: PTH123
        lines = [line.split() for line in table]
    return any(
        (own[-5:], other[-5:], state) == (*ports, ESTABLISHED)
        for _, own, other, state, *_ in lines[1:]
    )
