"""A client that disconnects in any phase stops its work at once and leaves no keys."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from redis.asyncio import Redis

from tests.gateway.conftest import asking, eventually, jobs_in_redis, nothing_left, serve
from tests.gateway.http_calls import connection, head, post
from tests.support.events import DONE, split_events
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import wait_until
from tests.support.stack import MODEL, Stack, metric

JOBS = "sluice_worker_jobs_running"
STEPS = "sluice_worker_engine_steps_total"


@pytest.fixture(scope="module")
def slow_reading(stack: Stack, impatient: str) -> Iterator[str]:
    """A model that takes a second for each token of the prompt. Yields its worker's URL."""
    stack.start_worker(
        "slow-reading",
        SLUICE_MODEL_NAME="slow-reading",
        SLUICE_ENGINE="scripted",
        SLUICE_SCRIPTED_PREFILL_SECONDS_PER_TOKEN="1",
    )
    headers = {"authorization": f"Bearer {stack.key()}"}
    for url in (stack.gateways[1], impatient):
        page = f"{url}/v1/models/slow-reading"
        wait_until(
            lambda page=page: (  # type: ignore[misc]
                httpx.get(page, headers=headers, timeout=None).json().get("ready")
            ),
            what="slow-reading being known as ready",
        )
    yield stack.worker_url("slow-reading")
    stack.stop("slow-reading")


async def stopped(url: str, store: "Redis", model: str) -> None:
    """Wait until a worker runs nothing and Redis holds nothing."""

    async def is_idle() -> bool:
        jobs = await asyncio.to_thread(metric, url, JOBS)
        return not jobs and await nothing_left(store, model)

    await eventually(is_idle, what="the worker's end")
    steps = await asyncio.to_thread(metric, url, STEPS)
    await asyncio.sleep(0.1)
    assert await asyncio.to_thread(metric, url, STEPS) == steps, "the engine still steps"


async def running(url: str) -> None:
    """Wait until a worker runs a job."""
    await eventually(lambda: asyncio.to_thread(metric, url, JOBS), what="the job being claimed")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_client_that_disconnects_in_the_queue_cancels_its_jobs(
    stack: Stack, key: str, store: "Redis", stream: bool
) -> None:
    await serve(store, "nobody-claims")
    async with connection(stack.gateways[1]) as (_, writer):
        writer.write(post(key, asking(model="nobody-claims", prompt=["a", "b"], stream=stream)))

        async def waits() -> bool:
            return (await jobs_in_redis(store, "nobody-claims"))["waiting"] == 2

        await eventually(waits, what="the jobs being queued")
    await eventually(lambda: nothing_left(store, "nobody-claims"), what="the end")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_client_that_disconnects_during_prefill_stops_the_worker(
    stack: Stack, key: str, store: "Redis", slow_reading: str, stream: bool
) -> None:
    async with connection(stack.gateways[1]) as (_, writer):
        body = asking(model="slow-reading", prompt=[5] * 60, stream=stream)
        writer.write(post(key, body))
        await running(slow_reading)
    await stopped(slow_reading, store, "slow-reading")


async def test_client_that_disconnects_after_the_commit_stops_the_worker(
    impatient: str, key: str, store: "Redis", slow_reading: str
) -> None:
    async with connection(impatient) as (reader, writer):
        body = asking(model="slow-reading", prompt=[5] * 60, stream=True)
        writer.write(post(key, body))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    await stopped(slow_reading, store, "slow-reading")


async def test_client_that_disconnects_between_tokens_stops_the_worker(
    stack: Stack, key: str, store: "Redis"
) -> None:
    async with connection(stack.url) as (reader, writer):
        body = asking(prompt=["a", "b"], n=4, max_tokens=2000, stream=True)
        writer.write(post(key, body))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reader.readuntil(b"data: ")
    await stopped(stack.worker_url(), store, MODEL)


async def test_client_that_disconnects_without_streaming_stops_the_worker(
    stack: Stack, key: str, store: "Redis"
) -> None:
    async with connection(stack.url) as (_, writer):
        writer.write(post(key, asking(max_tokens=2000)))
        await running(stack.worker_url())
    await stopped(stack.worker_url(), store, MODEL)


async def test_client_that_resets_the_connection_stops_the_worker(
    stack: Stack, key: str, store: "Redis"
) -> None:
    async with connection(stack.url) as (reader, writer):
        writer.write(post(key, asking(max_tokens=2000, stream=True)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reader.readuntil(b"data: ")
        writer.transport.abort()
    await stopped(stack.worker_url(), store, MODEL)


async def test_client_that_disconnects_while_sending_is_no_server_error(
    stack: Stack, key: str, client: httpx.AsyncClient
) -> None:
    sample = 'sluice_gateway_requests_total{code="client_closed_request"'

    async def count() -> float:
        lines = (await client.get(f"{stack.operators}/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(sample))

    before, log = await count(), stack.log("gateway-1")
    async with connection(stack.url) as (reader, writer):
        writer.write(head(key, "content-length: 100", "expect: 100-continue"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reader.readuntil(b" 100 Continue\r\n\r\n")
        writer.write(b"{")

    async def is_counted() -> bool:
        return await count() > before

    await eventually(is_counted, what="the request being counted")
    assert "Traceback" not in stack.log("gateway-1").removeprefix(log)


async def test_other_streams_continue_when_a_client_disconnects(
    stack: Stack, key: str, client: httpx.AsyncClient
) -> None:
    async with connection(stack.url) as (reader, writer):
        writer.write(post(key, asking(max_tokens=2000, stream=True)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reader.readuntil(b"data: ")
        beside = client.stream("POST", "/v1/completions", json=asking(max_tokens=30, stream=True))
        async with beside as response:
            parts = response.aiter_bytes()
            content = await anext(parts)
            writer.transport.abort()
            content += b"".join([part async for part in parts])
    assert split_events(content)[-1] == DONE
    assert b'"completion_tokens":30' in content
