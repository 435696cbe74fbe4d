"""Processes that die or are stopped, and what clients see of it."""

import asyncio
import functools
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from tests.gateway.conftest import (
    GATEWAY_SETTINGS,
    asking,
    complete,
    eventually,
    gateway_client,
    nothing_left,
)
from tests.gateway.http import message_of
from tests.support.events import parse_chunks, texts_by_choice
from tests.support.patience import crowded
from tests.support.stack import MODEL, Stack, metric, running_stack

SHORT_LEASE = {"SLUICE_ENGINE": "scripted", "SLUICE_LEASE_SECONDS": "0.5"}


async def start_worker(stack: Stack, name: str, **environment: str) -> None:
    """Start another worker with a short lease."""
    start = functools.partial(stack.start_worker, name)
    await asyncio.to_thread(start, **(SHORT_LEASE | environment))


async def running(stack: Stack, *, jobs: int) -> None:
    """Wait until a deployment's worker runs so many jobs."""

    async def are_running() -> bool:
        count = await asyncio.to_thread(metric, stack.worker_url(), "sluice_worker_jobs_running")
        return count == jobs

    await eventually(are_running, seconds=2, what="the jobs running")


async def streamed_while(
    client: httpx.AsyncClient, happens: Callable[[], Awaitable[None]], **parameters: Any
) -> list[dict[str, Any]]:
    """Return the chunks of a stream after whose third event something happens."""
    body = b""
    happening: asyncio.Task[None] | None = None
    body_of = asking(max_tokens=120, stream=True, include_usage=True) | parameters
    async with client.stream("POST", "/v1/completions", json=body_of) as response:
        assert response.status_code == 200
        async for part in response.aiter_raw():
            body += part
            if happening is None and body.count(b"data: ") >= 3:
                happening = asyncio.ensure_future(happens())
    assert happening is not None
    await happening
    return parse_chunks(body)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0, "n": 2},
        {"n": 3, "logprobs": 2},
        {"echo": True, "logprobs": 0},
    ],
    ids=["sampled", "greedy", "several", "echo"],
)
async def test_stream_of_a_killed_worker_goes_on_as_if_nothing_had_happened(
    stack: Stack, client: httpx.AsyncClient, store: "Redis", parameters: dict[str, Any]
) -> None:
    model = f"doomed-{'-'.join(parameters)}"
    served = {"SLUICE_MODEL_NAME": model, "SLUICE_SCRIPTED_STEP_SECONDS": "0.02"}
    await start_worker(stack, "doomed", **served)
    undisturbed = (await complete(client, model=model, max_tokens=120, **parameters)).json()

    async def kill() -> None:
        stack.kill("doomed")
        await start_worker(stack, "other", **served)

    try:
        chunks = await streamed_while(client, kill, model=model, **parameters)
    finally:
        stack.stop("other")
    assert len({chunk["id"] for chunk in chunks}) == 1
    whole = {choice["index"]: choice for choice in undisturbed["choices"]}
    assert texts_by_choice(chunks) == {index: each["text"] for index, each in whole.items()}
    if "logprobs" in parameters:
        for index, each in whole.items():
            parts = [
                choice["logprobs"]
                for chunk in chunks
                for choice in chunk["choices"]
                if choice["index"] == index and choice["logprobs"]
            ]
            assert [token for part in parts for token in part["tokens"]] == each["logprobs"][
                "tokens"
            ]
            assert [offset for part in parts for offset in part["text_offset"]] == each["logprobs"][
                "text_offset"
            ]
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    assert usage["completion_tokens"] == undisturbed["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == undisturbed["usage"]["prompt_tokens"]
    await eventually(lambda: nothing_left(store, model), seconds=2, what="the end of the job")


@pytest.mark.parametrize(
    "parameters", [{}, {"n": 2, "best_of": 4, "logprobs": 1}], ids=["plain", "ranked"]
)
async def test_whole_answer_of_a_killed_worker_is_the_one_that_it_would_have_given(
    stack: Stack, client: httpx.AsyncClient, parameters: dict[str, Any]
) -> None:
    model = f"mortal-{len(parameters)}"
    served = {"SLUICE_MODEL_NAME": model, "SLUICE_SCRIPTED_STEP_SECONDS": "0.01"}
    await start_worker(stack, "mortal", **served)
    asked = {"model": model, "max_tokens": 300, **parameters}
    undisturbed = (await complete(client, **asked)).json()
    sampled = "sluice_worker_completion_tokens_total"
    before = await asyncio.to_thread(metric, stack.worker_url("mortal"), sampled)
    request = asyncio.create_task(complete(client, **asked))

    async def is_half_done() -> bool:
        return await asyncio.to_thread(metric, stack.worker_url("mortal"), sampled) > 1.5 * before

    await eventually(is_half_done, seconds=20, what="the answer being half done")
    stack.kill("mortal")
    await start_worker(stack, "heir", **served)
    answer = (await request).json()
    stack.stop("heir")
    assert answer["choices"] == undisturbed["choices"]
    assert answer["usage"] == undisturbed["usage"]


async def test_worker_killed_before_the_first_token_is_not_noticed(
    stack: Stack, client: httpx.AsyncClient, store: "Redis"
) -> None:
    fragile = {"SLUICE_MODEL_NAME": "fragile"}
    await start_worker(stack, "fragile-1", **fragile, SLUICE_SCRIPTED_PREFILL_SECONDS_PER_TOKEN="1")
    request = asyncio.create_task(complete(client, model="fragile", prompt=[5] * 100, max_tokens=5))
    url = stack.worker_url("fragile-1")
    await eventually(
        lambda: asyncio.to_thread(metric, url, "sluice_worker_jobs_running"),
        seconds=2,
        what="the job being claimed",
    )
    stack.kill("fragile-1")
    await start_worker(stack, "fragile-2", **fragile)
    response = await request
    stack.stop("fragile-2")
    assert response.status_code == 200
    assert response.json()["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 5,
        "total_tokens": 105,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    await eventually(lambda: nothing_left(store, "fragile"), seconds=1, what="the end of the job")


async def test_gateway_that_is_stopped_finishes_its_streams(stack: Stack, key: str) -> None:
    url = await asyncio.to_thread(lambda: stack.start_gateway("stopping", **GATEWAY_SETTINGS))
    stack.gateways.remove(url)
    process = stack.processes.pop("stopping")
    async with gateway_client(url, key) as client:
        stream = asyncio.create_task(complete(client, max_tokens=150, stream=True))
        whole = asyncio.create_task(complete(client, max_tokens=150))
        await running(stack, jobs=2)
        process.send_signal(signal.SIGTERM)
        chunks = parse_chunks((await stream).content)
        answer = (await whole).json()
    assert texts_by_choice(chunks) == {0: answer["choices"][0]["text"]}
    assert chunks[-1]["usage"]["completion_tokens"] == 150
    # uvicorn raises the signal again once it is done.
    assert await asyncio.to_thread(process.wait, 10) in (0, -signal.SIGTERM)
    log = stack.log("stopping")
    assert "Traceback" not in log
    assert "Task was destroyed" not in log


async def test_jobs_of_a_killed_gateway_are_stopped(stack: Stack, key: str, store: "Redis") -> None:
    url = await asyncio.to_thread(lambda: stack.start_gateway("killed", **GATEWAY_SETTINGS))
    stack.gateways.remove(url)
    async with gateway_client(url, key) as client:
        request = asyncio.create_task(complete(client, n=2, max_tokens=2000, stream=True))
        await running(stack, jobs=1)
        stack.kill("killed")
        with pytest.raises(httpx.RemoteProtocolError):
            await request
    # Its sign of life expires after 6 s, and workers wait for 5 s more.
    await eventually(lambda: nothing_left(store, MODEL), seconds=14, what="the end of its jobs")
    assert await asyncio.to_thread(metric, stack.worker_url(), "sluice_worker_jobs_running") == 0


@pytest.fixture
def own_stack() -> Iterator[Stack]:
    """A deployment whose Redis may be stopped."""
    with running_stack() as stack:
        stack.start_gateway(**GATEWAY_SETTINGS)
        stack.start_worker(SLUICE_ENGINE="scripted")
        yield stack


async def test_without_redis_requests_get_503_and_with_it_they_are_served_again(
    own_stack: Stack,
) -> None:
    key = await asyncio.to_thread(own_stack.key)
    async with gateway_client(own_stack.url, key) as client:
        assert (await complete(client)).status_code == 200
        stream = asyncio.create_task(complete(client, max_tokens=400, stream=True))
        await running(own_stack, jobs=1)
        own_stack.redis.stop()

        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/healthz")).status_code == 200
        for streamed in (False, True):
            began = time.monotonic()
            response = await complete(client, stream=streamed)
            assert time.monotonic() - began < crowded(3)
            message_of(response, status=503, kind="service_unavailable", code="store_unavailable")
            assert response.headers["retry-after"] == "1"

        own_stack.redis.start()
        statuses = []

        async def is_served() -> bool:
            statuses.append((await complete(client, max_tokens=2)).status_code)
            return statuses[-1] == 200

        await eventually(is_served, seconds=10, what="a request being served again")
        assert set(statuses) <= {200, 503}
        assert (await client.get("/readyz")).status_code == 200
        # Redis has forgotten the job, and its gateway has not.
        chunks = parse_chunks((await asyncio.wait_for(stream, 30)).content)
        assert chunks[-1]["usage"]["completion_tokens"] == 400
        whole = (await complete(client, max_tokens=400)).json()
        assert texts_by_choice(chunks) == {0: whole["choices"][0]["text"]}
