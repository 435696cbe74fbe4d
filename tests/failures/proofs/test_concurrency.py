"""Places for concurrent requests: free as soon as a request has ended, in every way of ending."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from gateway.records.limits import LimitScope
from tests.failures.proofs.accounts import Accounts, Credential
from tests.failures.proofs.client import Answer, ask
from tests.failures.proofs.ledger import Books
from tests.failures.proofs.until import leave, until
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import Stack, metric

pytestmark = pytest.mark.parametrize("stack", ["sqlite"], indirect=True)

ONE_AFTER_THE_OTHER = 60
PLACES = 8
CLIENTS = 30
TIMES = 2
WINDOW_FULL = 1_900
"""More tokens than are generated before the client disconnects."""


async def one_place(
    accounts: Accounts, tenant: str, scope: LimitScope = LimitScope.KEY
) -> Credential:
    """Make a key that may have one request at a time."""
    return await accounts.holder(scope, tenant, {"concurrent_requests": 1})


async def test_sequential_requests_never_exceed_a_concurrency_of_one(
    stack: Stack, accounts: Accounts, name: Callable[[], str]
) -> None:
    key = await one_place(accounts, name())
    answers = [
        await ask(
            stack.gateways[number % 2],
            key.text,
            prompt="x",
            max_tokens=1 + number % 3,
            # A stream and a whole response each follow each of the two.
            stream=number // 2 % 2 == 0,
        )
        for number in range(ONE_AFTER_THE_OTHER)
    ]
    assert Counter(answer.status for answer in answers) == {200: ONE_AFTER_THE_OTHER}
    assert all(answer.is_finished for answer in answers)


async def test_concurrency_limit_counts_requests_of_both_gateways(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str]
) -> None:
    key = await one_place(accounts, name(), LimitScope.TENANT)
    held = Answer()
    asked: dict[str, Any] = {"max_tokens": WINDOW_FULL, "ignore_eos": True, "stream": True}
    holding = asyncio.create_task(
        ask(stack.gateways[0], key.text, prompt="x", answer=held, **asked)
    )
    await books.opened()
    refused = await ask(stack.gateways[1], key.text, prompt="x", max_tokens=1)
    await until(lambda: held.status > 0, what="the answer's beginning")
    await leave(holding)

    assert held.status == 200
    assert refused.status == 429
    assert refused.error["code"] == "concurrency"
    assert (refused.error["limit"], refused.error["scope"]) == ("concurrent_requests", "tenant")
    assert refused.error["used"] == refused.error["limit_value"] == 1
    assert refused.headers["x-should-retry"] == "true"


async def test_running_requests_of_both_gateways_never_exceed_the_limit(
    stack: Stack, accounts: Accounts, name: Callable[[], str]
) -> None:
    key = await accounts.holder(LimitScope.KEY, name(), {"concurrent_requests": PLACES})
    running = [0.0]
    # On a busy machine one attempt may have too little overlap.
    while max(running) <= 1:
        clients = asyncio.gather(*(insist(stack.gateways[i % 2], key) for i in range(CLIENTS)))
        while not clients.done():
            running.append(
                await asyncio.to_thread(metric, stack.worker_url(), "sluice_worker_jobs_running")
            )
            await asyncio.sleep(0.05)
        answers = await clients
        assert {answer.status for answer in answers} == {200}
    assert max(running) <= PLACES


async def insist(url: str, key: Credential) -> Answer:
    """Retry until there is a place."""
    while True:
        answer = await ask(url, key.text, prompt="x", max_tokens=10, ignore_eos=True)
        if answer.status != 429:
            return answer
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_disconnect_frees_its_place_before_the_response_would_have_ended(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str], stream: bool
) -> None:
    key = await one_place(accounts, name())
    asked: dict[str, Any] = {
        "prompt": "x",
        "max_tokens": WINDOW_FULL,
        "ignore_eos": True,
        "stream": stream,
    }
    for number in range(TIMES):
        leaving = asyncio.create_task(ask(stack.gateways[number % 2], key.text, **asked))
        await books.opened()
        await leave(leaving)
        await served(stack.gateways[1 - number % 2], key)
    await books.settled()
    rows = await books.rows(key.tenant)
    assert Counter(row["outcome"] for row in rows) == {"cancelled": TIMES, "finished": TIMES}
    assert max(row["completion_tokens"] for row in rows) < WINDOW_FULL


async def served(url: str, key: Credential) -> None:
    """Retry until there is a place. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (answer := await ask(url, key.text, prompt="x", max_tokens=1)).status == 429:
            await asyncio.sleep(0.02)
    assert answer.status == 200, answer.body
