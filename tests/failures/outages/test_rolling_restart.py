"""Every process restarted, one after the other, under steady load: clients notice nothing.

The same for an upgrade from the release before: meanwhile, processes of both share a Redis.
"""

import asyncio
import itertools
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from tests.failures.outages.balancer import balancing
from tests.failures.outages.deployment import (
    GATEWAYS,
    HASTY_GATEWAY,
    SLOW_STEP_SECONDS,
    WORKERS,
    Deployment,
    Wish,
    deployed,
    insist,
    slow_worker,
)
from tests.failures.proofs.client import Answer
from tests.failures.proofs.ledger import open_books
from tests.failures.proofs.until import until
from tests.support.redis_server import BUNDLED, SYSTEM, RedisServer
from tests.support.stack import REPOSITORY, metric

CLIENTS: Final = 6
RELEASE_BEFORE: Final = "d392553b"
"""The commit of the release before, or the last one from which an upgrade needs a stop."""


def load() -> list[Wish]:
    """Return requests of 1.5 to 3.5 s: draining workers return some to the queue."""
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    return [
        Wish(
            {
                "prompt": f"number {number}",
                "seed": number,
                "ignore_eos": True,
                "max_tokens": int((1.5 + number % 3) / SLOW_STEP_SECONDS),
                "n": 1 + (number % 4 == 0),
                **(streamed if number % 5 else {}),
            }
        )
        for number in range(15)
    ]


@pytest.mark.slow
async def test_rolling_restart_of_every_process_fails_no_request(
    plain_deployment: Deployment,
) -> None:
    await restart_every_process(plain_deployment)


@pytest.mark.slow
async def test_rolling_upgrade_from_the_release_before_fails_no_request(
    earlier_deployment: Deployment,
) -> None:
    earlier_deployment.stack.code = REPOSITORY
    await restart_every_process(earlier_deployment)


@pytest.fixture
def earlier_deployment(tmp_path: Path) -> Iterator[Deployment]:
    """A deployment of the release before."""
    archive = subprocess.run(
        ["git", "archive", RELEASE_BEFORE], cwd=REPOSITORY, capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"this checkout does not have {RELEASE_BEFORE}: it has no history")
    subprocess.run(["tar", "--extract"], cwd=tmp_path, input=archive.stdout, check=True)
    redis = RedisServer(SYSTEM or BUNDLED, append="everysec")
    with deployed(redis, code=tmp_path) as deployment:
        yield deployment


async def restart_every_process(deployment: Deployment) -> None:
    """Restart every process under load, and compare each response and row of the ledger."""
    stack = deployment.stack
    key = await deployment.customer("restarts")
    await deployment.serves(key)
    wishes = load()
    await deployment.learn(wishes, key)
    answers: list[tuple[Wish, Answer]] = []
    numbers, is_over = itertools.count(), False

    async def client(url: str) -> None:
        while not is_over:
            wish = wishes[next(numbers) % len(wishes)]
            answers.append((wish, await insist(url, key, wish.body)))

    async with balancing(stack.gateways) as balancer, open_books(stack) as books:
        await books.settled()
        clients = [asyncio.create_task(client(balancer.url)) for _ in range(CLIENTS)]
        await deployment.running(CLIENTS)

        async def restart(name: str, start: Callable[[], Awaitable[None]]) -> None:
            before = len(answers)
            assert await asyncio.to_thread(stack.stop, name) == 0, stack.log(name)
            await start()
            await until(
                partial(_has_grown, answers, before), what=f"responses during the restart of {name}"
            )

        for name, start in restarts(deployment):
            await restart(name, start)
        again = dict(restarts(deployment))
        # By chance all of a worker's requests may end within its grace.
        resumed = "sluice_gateway_resumed_jobs_total"
        while not sum(metric(stack.operators_of(url), resumed) for url in stack.gateways):
            await restart(WORKERS[0], again[WORKERS[0]])
        is_over = True
        await asyncio.gather(*clients)
        for wish, answer in answers:
            wish.check(answer)
        await deployment.quiet(books)
        rows = {row["request_id"]: row for row in await books.rows()}
        assert len(rows) == len(await books.rows())
    assert {rows[str(answer.request_id)]["outcome"] for _, answer in answers} == {"finished"}
    print(Counter(wish.body["max_tokens"] for wish, _ in answers))  # noqa: T201 - for -rP


def _has_grown(answers: list[tuple[Wish, Answer]], before: int) -> bool:
    return len(answers) > before


def restarts(deployment: Deployment) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
    """Return each process's name and how to restart it."""
    stack = deployment.stack

    async def gateway(name: str, url: str) -> None:
        port = int(urlsplit(url).port or 0)
        await asyncio.to_thread(stack.launch_gateway, name, HASTY_GATEWAY, port=port)
        await asyncio.to_thread(stack.await_gateway, name, url)

    async def worker(name: str) -> None:
        await asyncio.to_thread(lambda: stack.start_worker(name, **slow_worker()))

    async def jobs() -> None:
        stack.start_jobs()

    async def beat() -> None:
        stack.start_beat()

    for name, url in zip(GATEWAYS, list(stack.gateways), strict=True):
        yield name, partial(gateway, name, url)
    for name in WORKERS:
        yield name, partial(worker, name)
    yield "jobs", jobs
    yield "beat", beat
