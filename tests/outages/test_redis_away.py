"""Redis away for a while, in every way in which it can be: nothing hangs, is lost, comes twice or is left behind."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from tests.outages.deployment import FAST_MODEL, Deployment, deployed, long_wishes
from tests.proofs.client import Answer, ask
from tests.proofs.ledger import open_books
from tests.proofs.office import Credential
from tests.support.redis_server import BUNDLED, SYSTEM, RedisServer
from tests.support.sentinels import WatchedRedis

pytestmark = pytest.mark.timeout(400)

AT_ONCE_SECONDS: Final = 4.5
"""In which a request is refused: two, and what a busy machine adds; less than a command waits for Redis."""
BACK_SECONDS: Final = 20.0
"""In which requests are served again."""
REFUSAL_PAUSE_SECONDS: Final = 0.5
LONG_SECONDS: Final = 30.0
SHORT_SECONDS: Final = 8.0
"""Longer than a worker's lease and a gateway's heartbeat."""

Outage = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """A Redis and what happens to it."""

    redis: RedisServer | WatchedRedis
    away: Outage
    """Takes Redis away, and brings it back after so many seconds."""


def _killed(redis: RedisServer) -> Outage:
    async def away(seconds: float) -> None:
        await asyncio.to_thread(redis.kill)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(redis.start)

    return away


def _frozen(redis: RedisServer) -> Outage:
    async def away(seconds: float) -> None:
        redis.freeze()
        await asyncio.sleep(seconds)
        redis.thaw()

    return away


def _failed_over(redis: WatchedRedis, *, is_frozen: bool) -> Outage:
    async def away(seconds: float) -> None:
        old = redis.master
        if is_frozen:
            old.freeze()
        else:
            await asyncio.to_thread(old.kill)
        await asyncio.to_thread(redis.await_failover, old)
        await asyncio.sleep(seconds)
        if is_frozen:
            old.thaw()
        else:
            await asyncio.to_thread(old.start)

    return away


def _case(name: str) -> Case:
    newest = SYSTEM or BUNDLED
    match name:
        case "killed-empty":
            redis = RedisServer(BUNDLED)
            return Case(redis, _killed(redis))
        case "killed-everysec":
            redis = RedisServer(newest, append="everysec")
            return Case(redis, _killed(redis))
        case "killed-always":
            redis = RedisServer(BUNDLED, append="always")
            return Case(redis, _killed(redis))
        case "frozen":
            redis = RedisServer(newest)
            return Case(redis, _frozen(redis))
        case "failover":
            watched = WatchedRedis(newest)
            return Case(watched, _failed_over(watched, is_frozen=False))
        case _:
            watched = WatchedRedis(BUNDLED, password="secret")
            return Case(watched, _failed_over(watched, is_frozen=True))


@pytest.fixture(
    params=[
        "killed-empty",
        "killed-everysec",
        "killed-always",
        "frozen",
        "failover",
        "frozen-failover",
    ]
)
def case(request: pytest.FixtureRequest) -> Case:
    """Each way in which Redis goes away."""
    return _case(request.param)


@pytest.fixture
def seconds(request: pytest.FixtureRequest) -> float:
    """How long it stays away."""
    return LONG_SECONDS if request.config.getoption("--long") else SHORT_SECONDS


@pytest.fixture
def deployment(case: Case) -> Iterator[Deployment]:
    """A deployment of its own for each case."""
    with deployed(case.redis) as deployment:
        yield deployment


async def test_what_runs_ends_right_and_what_comes_is_refused_at_once(
    deployment: Deployment, case: Case, seconds: float
) -> None:
    stack = deployment.stack
    key = await deployment.customer("acme")
    wishes = long_wishes(seconds + 4)
    await deployment.serves(key)
    await deployment.learn(wishes, key)
    async with open_books(stack) as books:
        await books.settled()
        running = deployment.begin(wishes, key)
        await deployment.running(sum(wish.sequences for wish in wishes))
        outage = asyncio.create_task(_outage(case, seconds))
        tried = await _try_until(outage, deployment, key)
        await outage
        for url in stack.gateways:
            await _served_again(url, key)
        answers = await asyncio.wait_for(asyncio.gather(*running), 90)
        for wish, answer in zip(wishes, answers, strict=True):
            wish.check(answer)
        await deployment.quiet(books)
        rows = await books.rows()

    # What was admitted at the last moment waits like everything that runs.
    refused = [answer for answer in tried if answer.status != 200]
    for answer in refused:
        assert answer.ended_at - answer.sent_at < AT_ONCE_SECONDS
        _check_refusal(answer)
    assert refused or isinstance(case.redis, WatchedRedis)
    assert set(Counter(row["request_id"] for row in rows).values()) == {1}
    by_id = {row["request_id"]: row for row in rows}
    for wish, answer in zip(wishes, answers, strict=True):
        row = by_id[str(answer.request_id)]
        assert row["outcome"] == "finished"
        assert row["completion_tokens"] == wish.usage["completion_tokens"]
    served = [answer for answer in tried if answer.status == 200]
    assert {answer.request_id for answer in served} <= by_id.keys()


async def _outage(case: Case, seconds: float) -> None:
    await case.away(seconds)


async def _try_until(
    outage: "asyncio.Task[None]", deployment: Deployment, key: Credential
) -> list[Answer]:
    """Ask both gateways again and again while Redis is away."""
    tried: list[Answer] = []
    while not outage.done():
        tried += await asyncio.gather(
            *(
                ask(url, key.text, model=FAST_MODEL, prompt="x", max_tokens=1)
                for url in deployment.stack.gateways
            )
        )
        await asyncio.sleep(REFUSAL_PAUSE_SECONDS)
    return tried


def _check_refusal(answer: Answer) -> None:
    assert answer.status == 503, answer.body
    assert answer.error["type"] == "service_unavailable"
    assert int(answer.headers["retry-after"]) >= 1


async def _served_again(url: str, key: Credential) -> None:
    deadline = time.monotonic() + BACK_SECONDS
    while (
        answer := await ask(url, key.text, model=FAST_MODEL, prompt="x", max_tokens=1)
    ).status != 200:
        assert time.monotonic() < deadline, answer.body
        await asyncio.sleep(0.1)
