"""A deployment with ten times its capacity in requests, and a scripted engine."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract import keys
from contract.queue import JobQueue
from tests.contract.test_shedding import set_pace
from tests.support.fake_worker import FakeWorker
from tests.support.ledger import rejected
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import Stack, running_stack

SEQUENCES, MOST_WAITING, MOST_OF_TENANT = 4, 16, 8
CAPACITY = SEQUENCES + MOST_OF_TENANT
TOKENS, MANY_TOKENS = 60, 1900
STEP_SECONDS = 0.01
LET_IN, REFUSED = 10, 6
FULL, LATE = "full", "late"


@pytest.fixture(scope="module")
def deployment() -> Iterator[Stack]:
    """Two gateways with short queues and a worker, and a gateway with a long queue timeout."""
    short = {
        "SLUICE_MAX_WAITING_JOBS": str(MOST_WAITING),
        "SLUICE_MAX_WAITING_JOBS_OF_TENANT": str(MOST_OF_TENANT),
    }
    with running_stack() as stack:
        stack.start_gateway("gateway-1", **short)
        stack.start_gateway("gateway-2", **short)
        stack.start_gateway("impatient", SLUICE_QUEUE_TIMEOUT=str(PATIENCE_SECONDS))
        stack.start_worker(
            SLUICE_ENGINE="scripted",
            SLUICE_MODEL_NAME=FULL,
            SLUICE_MAX_SEQUENCES=str(SEQUENCES),
            SLUICE_PREEMPTED_SHARE="0",  # The tests count the jobs that run and wait.
            # Otherwise a job that a busy machine's worker loses would wait again.
            SLUICE_LEASE_SECONDS="60",
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
    """Open a client with a tenant's key and no timeout."""
    async with httpx.AsyncClient(
        base_url=stack.gateways[gateway],
        headers={"authorization": f"Bearer {stack.key(tenant)}"},
        timeout=120,
        limits=httpx.Limits(max_connections=None),
    ) as client:
        yield client


async def ask(client: httpx.AsyncClient, model: str = FULL, **fields: Any) -> httpx.Response:
    """Send one completion request; retry if Redis does not reply in time, as on a busy machine."""
    body = {"model": model, "prompt": "x", "max_tokens": TOKENS, "ignore_eos": True}
    while True:
        response = await client.post("/v1/completions", json=body | fields)
        if response.status_code != 503 or _code(response) != "store_unavailable":
            return response
        await asyncio.sleep(_retry_after(response))


async def insist(client: httpx.AsyncClient, refusals: list[int]) -> int:
    """Retry after `Retry-After` until admitted. Return the status; record the refusals'."""
    while True:
        response = await ask(client)
        if response.status_code not in (429, 503):
            return response.status_code
        refusals.append(response.status_code)
        await asyncio.sleep(_retry_after(response))


@asynccontextmanager
async def watched_depth(store: "Redis", model: str = FULL) -> AsyncIterator[list[int]]:
    """Record the number of waiting jobs continuously."""
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


@pytest.mark.slow
async def test_retries_after_retry_after_are_admitted_at_many_times_the_capacity(
    deployment: Stack, store: "Redis", request: pytest.FixtureRequest
) -> None:
    """test_pressing.py measures how soon they are admitted, where the machine has no effect."""
    clients = (10 if request.config.getoption("--long") else 5) * CAPACITY
    async with (
        watched_depth(store) as depths,
        client_of(deployment, "acme", 0) as one,
        client_of(deployment, "acme", 1) as two,
    ):
        # A backlog, so that the pace of the queue is known.
        await asyncio.gather(*(insist(one, []) for _ in range(CAPACITY)))
        # While these run no other job begins, however long the gateways take to refuse the others.
        running = [asyncio.create_task(ask(one, max_tokens=MANY_TOKENS)) for _ in range(SEQUENCES)]
        await _until(JobQueue(store, FULL), leased=SEQUENCES, waiting=0)
        refusals: list[list[int]] = [[] for _ in range(clients)]
        asking = [
            asyncio.create_task(insist((one, two)[i % 2], refusals[i])) for i in range(clients)
        ]
        while sum(map(bool, refusals)) < clients - MOST_OF_TENANT:
            await asyncio.sleep(0.05)
            if any(each.done() for each in running):
                break
        for each in running:
            each.cancel()
        async with asyncio.timeout(2 * PATIENCE_SECONDS):
            statuses = await asyncio.gather(*asking)
    assert set(statuses) == {200}
    assert {status for each in refusals for status in each} == {429}
    assert sum(map(bool, refusals)) >= CAPACITY
    assert max(depths) <= MOST_OF_TENANT


@pytest.mark.slow
async def test_higher_tier_displaces_lower_ones_which_are_refused_at_once(
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
            assert "higher priority" in response.json()["error"]["message"]
            availability = response.json()["error"]["availability"]
            assert (availability["model"], availability["tier"]) == (FULL, "flex")
            assert int(response.headers["retry-after"]) >= 1
        assert (await queue.status()).waiting_jobs == MOST_WAITING
        assert {(await each).status_code for each in urgent} == {200}
        statuses = Counter([(await each).status_code for each in streams])
        assert statuses == {503: 6, 200: MOST_WAITING - 6}
        assert {(await each).status_code for each in running} == {200}


@pytest.mark.slow
async def test_request_that_would_time_out_in_the_queue_is_refused_at_once(
    deployment: Stack, store: "Redis"
) -> None:
    """A request that would time out in the queue is refused at once."""
    worker = FakeWorker(store, LATE)
    await worker.announce()
    # At this pace the last admitted request would begin just before its timeout.
    seconds = PATIENCE_SECONDS / (LET_IN - 0.5)
    await set_pace(store, keys.pace(LATE), claims=10, seconds=10 * seconds, calls=10)
    async with client_of(deployment, "acme", 2) as client:
        await _until_known(client, LATE)
        asking = {asyncio.create_task(ask(client, LATE)) for _ in range(LET_IN + REFUSED)}
        # No job begins before all requests have been admitted or refused.
        refused = set[asyncio.Task[httpx.Response]]()
        while len(refused) < REFUSED:
            done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            refused |= done
        await _until(worker.queue, leased=0, waiting=LET_IN)
        for each in refused:
            response = each.result()
            assert (response.status_code, _code(response)) == (503, "overloaded")
            assert "would wait too long" in response.json()["error"]["message"]
            assert _retry_after(response) >= seconds / 2
            availability = response.json()["error"]["availability"]
            assert (availability["reason"], availability["model"]) == ("wait_too_long", LATE)
            assert availability["position"] > LET_IN
            assert availability["estimated_wait_seconds"] >= seconds / 2
        for claim in await worker.claim(LET_IN):
            await worker.conclude(claim, "served")
        assert {(await each).status_code for each in asking} == {200}
    # They are failures of the service, which have no usage record.
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await rejected(deployment.database_url, LATE) < REFUSED:
            await asyncio.sleep(0.1)
    assert await rejected(deployment.database_url, LATE) == REFUSED


def _code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


def _retry_after(response: httpx.Response) -> float:
    seconds = int(response.headers["retry-after-ms"]) / 1000
    assert 1 <= seconds <= 60
    assert int(response.headers["retry-after"]) >= seconds
    return seconds


async def _until_known(client: httpx.AsyncClient, model: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await client.get(f"/v1/models/{model}")).status_code != 200:
            await asyncio.sleep(0.05)


async def _until(queue: JobQueue, *, leased: int, waiting: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            status = await queue.status()
            if (status.leased_jobs, status.waiting_jobs) == (leased, waiting):
                return
            await asyncio.sleep(0.01)
