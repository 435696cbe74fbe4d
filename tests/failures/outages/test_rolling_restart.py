"""Every process restarted, one after the other, under steady load: clients notice nothing."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
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
    insist,
    slow_worker,
)
from tests.failures.proofs.client import Answer
from tests.failures.proofs.ledger import open_books
from tests.failures.proofs.until import until
from tests.support.stack import metric

CLIENTS: Final = 6


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
    deployment, stack = plain_deployment, plain_deployment.stack
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
