"""Killed and stopped processes, and what clients receive."""

import asyncio
import functools
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract import keys
from gateway.completions.queue.presence import ALIVE_SECONDS
from tests.gateway.conftest import (
    GATEWAY_SETTINGS,
    LEASE_SECONDS,
    asking,
    complete,
    eventually,
    gateway_client,
    nothing_left,
    serve,
)
from tests.gateway.http_calls import message_of
from tests.gateway.resuming import Reader
from tests.support.events import parse_chunks, texts_by_choice
from tests.support.stack import MODEL, Stack, http_status, metric, running_stack

GONE = -2
"""What Redis reports as the remaining time of a key that does not exist."""

SCRIPTED = {"SLUICE_ENGINE": "scripted", "SLUICE_LEASE_SECONDS": str(LEASE_SECONDS)}


async def start_worker(stack: Stack, name: str, **environment: str) -> None:
    """Start another worker."""
    start = functools.partial(stack.start_worker, name)
    await asyncio.to_thread(start, **(SCRIPTED | environment))


async def kill_worker(stack: Stack, name: str) -> None:
    """Kill a worker. Its leases are so long that only its closed connection ends them."""
    await asyncio.to_thread(stack.kill, name)


async def running(stack: Stack, worker: str = "worker", *, jobs: int) -> None:
    """Wait until a worker runs a number of jobs."""

    async def are_running() -> bool:
        url = stack.worker_url(worker)
        return await asyncio.to_thread(metric, url, "sluice_worker_jobs_running") == jobs

    await eventually(are_running, what="the jobs running")


STREAMED: dict[str, dict[str, Any]] = {
    "sampled": {},
    "greedy": {"temperature": 0, "n": 2},
    "several": {"n": 3, "logprobs": 2},
    "echo": {"echo": True, "logprobs": 0},
}
WHOLE: dict[str, dict[str, Any]] = {"plain": {}, "ranked": {"n": 2, "best_of": 4, "logprobs": 1}}


async def streamed(
    client: httpx.AsyncClient, has_begun: asyncio.Event, **parameters: Any
) -> list[dict[str, Any]]:
    """Return the chunks of a stream; set an event when three have arrived."""
    body = b""
    body_of = asking(stream=True, include_usage=True, **parameters)
    async with client.stream("POST", "/v1/completions", json=body_of) as response:
        assert response.status_code == 200
        async for part in response.aiter_raw():
            body += part
            if body.count(b"data: ") >= 3:
                has_begun.set()
    return parse_chunks(body)


async def test_responses_of_a_killed_worker_continue_unchanged(
    stack: Stack, client: httpx.AsyncClient, store: "Redis"
) -> None:
    served = {"SLUICE_MODEL_NAME": "doomed"}
    asked = {"model": "doomed", "max_tokens": 200}
    # So slow that nothing ends before the worker is killed.
    await start_worker(stack, "doomed", **served, SLUICE_SCRIPTED_STEP_SECONDS="0.1")
    cases = STREAMED | WHOLE
    have_begun = {name: asyncio.Event() for name in STREAMED}
    wholes = {name: asyncio.create_task(complete(client, **asked, **WHOLE[name])) for name in WHOLE}
    streams = {
        name: asyncio.create_task(streamed(client, has_begun, **asked, **STREAMED[name]))
        for name, has_begun in have_begun.items()
    }
    await running(stack, "doomed", jobs=len(cases))
    for has_begun in have_begun.values():
        await has_begun.wait()
    await kill_worker(stack, "doomed")
    await start_worker(stack, "other", **served)
    try:
        # The queue has no room for the resumed jobs and as many others.
        await asyncio.gather(*wholes.values(), *streams.values())
        answers = await asyncio.gather(
            *(complete(client, **asked, **case) for case in cases.values())
        )
        undisturbed = {name: response.json() for name, response in zip(cases, answers, strict=True)}
        for name, whole in wholes.items():
            answer = whole.result().json()
            assert answer["choices"] == undisturbed[name]["choices"], name
            assert answer["usage"] == undisturbed[name]["usage"], name
        for name, stream in streams.items():
            check_stream(stream.result(), undisturbed[name])
        await eventually(lambda: nothing_left(store, "doomed"), what="the jobs' end")
    finally:
        stack.stop("other")


def check_stream(chunks: list[dict[str, Any]], undisturbed: dict[str, Any]) -> None:
    """Check that a stream equals the whole response."""
    assert len({chunk["id"] for chunk in chunks}) == 1
    whole = {choice["index"]: choice for choice in undisturbed["choices"]}
    assert texts_by_choice(chunks) == {index: each["text"] for index, each in whole.items()}
    for index, each in whole.items():
        parts = [
            choice["logprobs"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == index and choice["logprobs"]
        ]
        for member in ("tokens", "text_offset"):
            expected = each["logprobs"][member] if each["logprobs"] else []
            assert [value for part in parts for value in part[member]] == expected
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    for name in ("completion_tokens", "prompt_tokens"):
        assert usage[name] == undisturbed["usage"][name]


async def test_worker_killed_before_the_first_token_is_invisible_to_clients(
    stack: Stack, client: httpx.AsyncClient, store: "Redis"
) -> None:
    fragile = {"SLUICE_MODEL_NAME": "fragile"}
    await start_worker(stack, "fragile-1", **fragile, SLUICE_SCRIPTED_PREFILL_SECONDS_PER_TOKEN="1")
    request = asyncio.create_task(complete(client, model="fragile", prompt=[5] * 100, max_tokens=5))
    await running(stack, "fragile-1", jobs=1)
    await kill_worker(stack, "fragile-1")
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
    await eventually(lambda: nothing_left(store, "fragile"), what="the end of the job")


async def test_stopped_gateway_finishes_its_streams(stack: Stack, key: str, store: "Redis") -> None:
    settings = GATEWAY_SETTINGS | {"SLUICE_DRAIN_TIMEOUT": "PT5M"}
    url = await asyncio.to_thread(lambda: stack.start_gateway("stopping", **settings))
    stack.gateways.remove(url)
    process = stack.processes.pop("stopping")
    worker = await serve(store, "outliving")
    async with gateway_client(url, key) as client:
        stream = asyncio.create_task(complete(client, model="outliving", stream=True))
        whole = asyncio.create_task(complete(client, model="outliving"))
        claims = await worker.claim(2)
        process.send_signal(signal.SIGTERM)

        async def is_stopping() -> bool:
            return await asyncio.to_thread(http_status, f"{url}/readyz") != 200

        await eventually(is_stopping, what="the gateway's stopping")
        for claim in claims:
            await worker.conclude(claim, "a", "b")
        chunks = parse_chunks((await stream).content)
        answer = (await whole).json()
    assert texts_by_choice(chunks) == {0: "ab"} == {0: answer["choices"][0]["text"]}
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    # uvicorn raises the signal again once it is done.
    assert await asyncio.to_thread(process.wait, 60) in (0, -signal.SIGTERM)
    log = stack.log("stopping")
    assert "Traceback" not in log
    assert "Task was destroyed" not in log


async def test_jobs_of_a_killed_gateway_stop(stack: Stack, key: str, store: "Redis") -> None:
    url = await asyncio.to_thread(lambda: stack.start_gateway("killed", **GATEWAY_SETTINGS))
    stack.gateways.remove(url)
    body = asking(n=2, max_tokens=2000, stream=True)
    async with (
        gateway_client(url, key) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        reader = Reader(response)
        await reader.read(1)
        stack.kill("killed")
        with pytest.raises(httpx.TransportError):
            await reader.read_all()
    # Redis would drop the heartbeat some seconds later. Other gateways renew theirs in time.
    signs = [sign async for sign in store.scan_iter(match=keys.gateway_alive("*"))]
    left_ms = [await store.pttl(sign) for sign in signs]
    assert all(0 < left <= ALIVE_SECONDS * 1000 for left in left_ms if left != GONE)
    await store.delete(*signs)
    # Workers wait for 5 s more.
    await eventually(lambda: nothing_left(store, MODEL), what="the end of its jobs")
    await running(stack, jobs=0)


@pytest.fixture
def own_stack() -> Iterator[Stack]:
    """A deployment whose Redis may be stopped."""
    with running_stack() as stack:
        stack.start_gateway(**GATEWAY_SETTINGS)
        stack.start_worker(SLUICE_ENGINE="scripted", SLUICE_SCRIPTED_STEP_SECONDS="0.01")
        yield stack


@pytest.mark.long
async def test_requests_get_503_during_a_redis_outage_and_are_served_after_it(
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
        for is_streamed in (False, True):
            response = await complete(client, stream=is_streamed)
            message_of(response, status=503, kind="service_unavailable", code="store_unavailable")
            assert response.headers["retry-after"] == "1"

        own_stack.redis.start()
        statuses = []

        async def is_served() -> bool:
            statuses.append((await complete(client, max_tokens=2)).status_code)
            return statuses[-1] == 200

        await eventually(is_served, what="a request being served again")
        assert set(statuses) <= {200, 503}
        assert (await client.get("/readyz")).status_code == 200
        # Redis has lost the job, and its gateway still has it.
        chunks = parse_chunks((await asyncio.wait_for(stream, 30)).content)
        assert chunks[-1]["usage"]["completion_tokens"] == 400
        whole = (await complete(client, max_tokens=400)).json()
        assert texts_by_choice(chunks) == {0: whole["choices"][0]["text"]}
