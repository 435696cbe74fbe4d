"""A deployment that is asked for ten times what it can do: real gateways, a real worker, a scripted engine."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract import keys
from contract.queue import JobQueue
from tests.support.stack import Stack, running_stack

SEQUENCES, MOST_WAITING, MOST_OF_TENANT = 4, 16, 8
CAPACITY = SEQUENCES + MOST_OF_TENANT
TOKENS = 60
STEP_SECONDS = 0.01
PATIENCE_SECONDS = 3
PRESSING = 60
"""Clients that ask again a second after each refusal."""
COUNTED = 50
"""Refusals."""
FULL, LATE = "full", "late"


@pytest.fixture(scope="module")
def deployment() -> Iterator[Stack]:
    """Two gateways with short queues, one that promises a short wait, and a worker for each sort."""
    short = {
        "SLUICE_MAX_WAITING_JOBS": str(MOST_WAITING),
        "SLUICE_MAX_WAITING_JOBS_OF_TENANT": str(MOST_OF_TENANT),
    }
    with running_stack() as stack:
        stack.start_gateway("gateway-1", **short)
        stack.start_gateway("gateway-2", **short)
        stack.start_gateway("impatient", SLUICE_QUEUE_TIMEOUT=str(PATIENCE_SECONDS))
        for model in (FULL, LATE):
            stack.start_worker(
                f"worker-{model}",
                SLUICE_ENGINE="scripted",
                SLUICE_MODEL_NAME=model,
                SLUICE_MAX_SEQUENCES=str(SEQUENCES),
                SLUICE_SCRIPTED_STEP_SECONDS=str(STEP_SECONDS),
            )
        for tenant in ("acme", "other", "third"):
            stack.key(tenant)
        yield stack


@pytest.fixture
async def store(deployment: Stack) -> AsyncIterator["Redis"]:
    """A client of the deployment's Redis."""
    async with Redis.from_url(deployment.redis.url) as client:
        yield client


@asynccontextmanager
async def client_of(
    stack: Stack, tenant: str, gateway: int = 0
) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client that sends a tenant's key and waits for as long as it takes."""
    async with httpx.AsyncClient(
        base_url=stack.gateways[gateway],
        headers={"authorization": f"Bearer {stack.key(tenant)}"},
        timeout=120,
        limits=httpx.Limits(max_connections=None),
    ) as client:
        yield client


async def ask(client: httpx.AsyncClient, model: str = FULL, **fields: Any) -> httpx.Response:
    """Ask for one completion."""
    body = {"model": model, "prompt": "x", "max_tokens": TOKENS, "ignore_eos": True}
    return await client.post("/v1/completions", json=body | fields)


@dataclass
class Story:
    """What became of one client that comes back as it is told."""

    refusals: list[int] = field(default_factory=list)
    """Statuses of refusals."""
    told_seconds: list[float] = field(default_factory=list)
    status: int = 0


async def insist(client: httpx.AsyncClient, model: str = FULL) -> Story:
    """Ask until the answer is no refusal, waiting exactly as long as told."""
    story = Story()
    while True:
        response = await ask(client, model)
        if response.status_code not in (429, 503):
            story.status = response.status_code
            return story
        story.refusals.append(response.status_code)
        seconds = int(response.headers["retry-after-ms"]) / 1000
        assert 1 <= seconds <= 60
        assert int(response.headers["retry-after"]) >= seconds
        story.told_seconds.append(seconds)
        await asyncio.sleep(seconds)


@asynccontextmanager
async def watched_depth(store: "Redis", model: str = FULL) -> AsyncIterator[list[int]]:
    """Note how many jobs wait, again and again."""
    depths: list[int] = []
    is_over = asyncio.Event()

    async def watch() -> None:
        while not is_over.is_set():
            depths.append(int(await store.get(keys.waiting(model)) or 0))
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    try:
        yield depths
    finally:
        is_over.set()
        await watching


async def test_whoever_comes_back_as_told_is_admitted_at_many_times_the_capacity(
    deployment: Stack, store: "Redis", request: pytest.FixtureRequest
) -> None:
    times = 10 if request.config.getoption("--long") else 5
    async with (
        watched_depth(store) as depths,
        client_of(deployment, "acme", 0) as one,
        client_of(deployment, "acme", 1) as two,
    ):
        # A backlog that is long enough for the pace of the queue to be known.
        await asyncio.gather(*(insist(one) for _ in range(CAPACITY)))
        began = time.monotonic()
        stories = await asyncio.wait_for(
            asyncio.gather(*(insist((one, two)[i % 2]) for i in range(times * CAPACITY))), 180
        )
        took = time.monotonic() - began
    refused = [story for story in stories if story.refusals]
    assert {story.status for story in stories} == {200}
    assert {status for story in refused for status in story.refusals} == {429}
    assert len(refused) >= (times - 4) * CAPACITY
    assert max(depths) <= MOST_OF_TENANT
    # What they were told spreads them over the time that all of it takes.
    longest = max(story.told_seconds[0] for story in refused)
    assert longest > took / 4
    returns = Counter(len(story.refusals) for story in refused)
    assert returns[1] >= 0.7 * len(refused), returns
    assert max(returns) <= 4, returns


async def test_a_higher_tier_takes_places_and_who_loses_one_is_told_at_once(
    deployment: Stack, store: "Redis"
) -> None:
    async with (
        client_of(deployment, "acme", 0) as acme,
        client_of(deployment, "other", 0) as other,
        client_of(deployment, "third", 1) as third,
    ):
        running = [asyncio.create_task(ask(acme, max_tokens=1200)) for _ in range(SEQUENCES)]
        queue = JobQueue(store, FULL)
        await _until(queue, leased=SEQUENCES, waiting=0)
        streams = [
            asyncio.create_task(ask(client, service_tier="flex", stream=stream))
            for client in (acme, other)
            for stream in (True, False)
            for _ in range(MOST_OF_TENANT // 2)
        ]
        await _until(queue, leased=SEQUENCES, waiting=MOST_WAITING)
        urgent = [asyncio.create_task(ask(third, service_tier="priority")) for _ in range(6)]
        shed: list[httpx.Response] = []
        for done in asyncio.as_completed(streams):
            shed.append(await done)
            if len(shed) == 6:
                break
        # No job had to end before they were refused.
        assert not any(each.done() for each in running)
        for response in shed:
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "overloaded"
            assert "more urgent" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) >= 1
        assert (await queue.status()).waiting_jobs == MOST_WAITING
        assert {(await each).status_code for each in urgent} == {200}
        statuses = Counter([(await each).status_code for each in streams])
        assert statuses == {503: 6, 200: MOST_WAITING - 6}
        assert {(await each).status_code for each in running} == {200}


async def test_who_would_die_in_the_queue_is_not_let_in(deployment: Stack) -> None:
    """Nobody waits for the whole time that a request may wait, only to be refused then."""
    async with client_of(deployment, "acme", 2) as client:
        refusals: Counter[str] = Counter()
        early = 0

        async def press() -> None:
            nonlocal early
            while refusals.total() < COUNTED:
                response = await ask(client, LATE)
                if response.status_code == 503:
                    # At first nobody knows how fast the queue is.
                    is_early = early < PRESSING
                    early += is_early
                    told = response.json()["error"]["message"].partition(" in the ")[0]
                    refusals[told] += not is_early
                    await asyncio.sleep(1)

        await asyncio.gather(*(press() for _ in range(PRESSING)))
    assert refusals["The request waited too long"] <= 0.1 * refusals.total(), refusals
    assert refusals["The request would wait too long"] >= 0.9 * COUNTED, refusals


async def _until(queue: JobQueue, *, leased: int, waiting: int) -> None:
    async with asyncio.timeout(30):
        while True:
            status = await queue.status()
            if (status.leased_jobs, status.waiting_jobs) == (leased, waiting):
                return
            await asyncio.sleep(0.01)
