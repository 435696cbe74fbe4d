"""Redis unavailable in every way: nothing hangs, is lost, repeated or left over."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

import pytest

from tests.failures.outages.deployment import FAST_MODEL, Deployment, deployed, long_wishes
from tests.failures.proofs.accounts import Credential
from tests.failures.proofs.client import Answer, ask
from tests.failures.proofs.ledger import open_books
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import BUNDLED, RedisServer
from tests.support.sentinels import WatchedRedis

LONG_SECONDS: Final = 30.0
SHORT_SECONDS: Final = 4.0
"""Longer than a worker's lease, and than a gateway's heartbeat."""
REFUSALS: Final = 3
"""Refusals of each gateway before Redis comes back: none waits for that."""
TRY_SECONDS: Final = 0.5

Outage = AbstractAsyncContextManager[None]


@asynccontextmanager
async def _killed(redis: RedisServer, *, is_emptied: bool = False) -> AsyncIterator[None]:
    await asyncio.to_thread(redis.kill)
    if is_emptied:
        redis.empty()
    yield
    await asyncio.to_thread(redis.start)


@asynccontextmanager
async def _frozen(redis: RedisServer) -> AsyncIterator[None]:
    redis.freeze()
    yield
    redis.thaw()


@asynccontextmanager
async def _failed_over(redis: WatchedRedis, *, is_frozen: bool) -> AsyncIterator[None]:
    await asyncio.to_thread(redis.await_replica)
    old = redis.master
    if is_frozen:
        old.freeze()
    else:
        await asyncio.to_thread(old.kill)
    await asyncio.to_thread(redis.await_failover, old)
    yield
    if is_frozen:
        old.thaw()
    else:
        await asyncio.to_thread(old.start)


def _outage(redis: RedisServer | WatchedRedis, name: str) -> Outage:
    """Return what makes Redis unavailable and restores it."""
    if isinstance(redis, WatchedRedis):
        return _failed_over(redis, is_frozen=name == "frozen-failover")
    if name == "frozen":
        return _frozen(redis)
    if name == "killed-always":
        redis.command("CONFIG SET appendfsync always")
    return _killed(redis, is_emptied=name == "killed-empty")


@pytest.fixture(scope="module")
def watched_deployment() -> Iterator[Deployment]:
    """A deployment on a Redis with Sentinel."""
    with deployed(WatchedRedis(BUNDLED, password="secret")) as deployment:
        yield deployment


@pytest.fixture
def deployment(request: pytest.FixtureRequest) -> Deployment:
    """One of the deployments."""
    deployment: Deployment = request.getfixturevalue(request.param)
    return deployment


@pytest.mark.parametrize(
    ("deployment", "name"),
    [
        pytest.param("plain_deployment", "killed-everysec", marks=pytest.mark.long),
        pytest.param("plain_deployment", "frozen", marks=pytest.mark.long),
        ("plain_deployment", "killed-empty"),
        pytest.param("plain_deployment", "killed-always", marks=pytest.mark.long),
        pytest.param("watched_deployment", "failover", marks=pytest.mark.slow),
        pytest.param("watched_deployment", "frozen-failover", marks=pytest.mark.long),
    ],
    indirect=["deployment"],
)
async def test_running_requests_finish_exactly_and_new_ones_are_refused_meanwhile(
    deployment: Deployment, name: str, request: pytest.FixtureRequest
) -> None:
    seconds = LONG_SECONDS if request.config.getoption("--long") else SHORT_SECONDS
    stack = deployment.stack
    key = await deployment.customer(name)
    wishes = long_wishes(seconds + 2)
    await deployment.serves(key)
    await deployment.learn(wishes, key)
    async with open_books(stack) as books:
        await books.settled()
        running = deployment.begin(wishes, key)
        await deployment.running(sum(wish.sequences for wish in wishes))
        assert isinstance(stack.redis, RedisServer | WatchedRedis)
        async with _outage(stack.redis, name):
            is_served = isinstance(stack.redis, WatchedRedis)
            trying = await _try(deployment, key, seconds, refusals=0 if is_served else REFUSALS)
        for url in stack.gateways:
            await _served_again(url, key)
        answers = await asyncio.wait_for(asyncio.gather(*running), 2 * PATIENCE_SECONDS)
        for wish, answer in zip(wishes, answers, strict=True):
            wish.check(answer)
        await deployment.quiet(books)
        rows = await books.rows()

    # What was admitted at the last moment waits like all running requests.
    tried = await asyncio.gather(*trying)
    for answer in tried:
        if answer.status != 200:
            _check_refusal(answer)
    assert set(Counter(row["request_id"] for row in rows).values()) == {1}
    by_id = {row["request_id"]: row for row in rows}
    for wish, answer in zip(wishes, answers, strict=True):
        row = by_id[str(answer.request_id)]
        assert row["outcome"] == "finished"
        assert row["completion_tokens"] == wish.usage["completion_tokens"]
    served = [answer for answer in tried if answer.status == 200]
    assert {answer.request_id for answer in served} <= by_id.keys()


async def _try(
    deployment: Deployment, key: Credential, seconds: float, *, refusals: int
) -> list["asyncio.Task[Answer]"]:
    """Send requests to both gateways for at least `seconds`, until each has refused so many."""
    tried: dict[str, list[asyncio.Task[Answer]]] = {url: [] for url in deployment.stack.gateways}
    began = time.monotonic()
    async with asyncio.timeout(seconds + PATIENCE_SECONDS):
        while time.monotonic() < began + seconds or any(
            sum(each.done() and each.result().status == 503 for each in asked) < refusals
            for asked in tried.values()
        ):
            for url, asked in tried.items():
                trying = ask(url, key.text, model=FAST_MODEL, prompt="x", max_tokens=1)
                asked.append(asyncio.create_task(trying))
            await asyncio.sleep(TRY_SECONDS)
    return [each for asked in tried.values() for each in asked]


def _check_refusal(answer: Answer) -> None:
    assert answer.status == 503, answer.body
    assert answer.error["type"] == "service_unavailable"
    assert int(answer.headers["retry-after"]) >= 1


async def _served_again(url: str, key: Credential) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await ask(url, key.text, model=FAST_MODEL, prompt="x", max_tokens=1)).status != 200:
            await asyncio.sleep(0.05)
