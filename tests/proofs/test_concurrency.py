"""Places for concurrent requests: free as soon as a request has ended, however it did."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import pytest

from gateway.accounts.limits import LimitScope
from tests.proofs.client import Answer, ask
from tests.proofs.ledger import Books
from tests.proofs.office import Credential, Office
from tests.support.patience import crowded
from tests.support.stack import Stack, metric

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize("stack", ["sqlite"], indirect=True),
]

ONE_AFTER_THE_OTHER = 200
PLACES = 8
CLIENTS = 200


async def one_place(office: Office, tenant: str, scope: LimitScope = LimitScope.KEY) -> Credential:
    """Make a key that may have one request at a time."""
    return await office.holder(scope, tenant, {"concurrent_requests": 1})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_sends_one_request_after_the_other_is_never_refused(
    stack: Stack, office: Office, name: Callable[[], str], stream: bool
) -> None:
    key = await one_place(office, name())
    answers = [
        await ask(
            stack.gateways[number % 2],
            key.text,
            prompt="x",
            max_tokens=1 + number % 3,
            stream=stream,
        )
        for number in range(ONE_AFTER_THE_OTHER)
    ]
    assert Counter(answer.status for answer in answers) == {200: ONE_AFTER_THE_OTHER}
    assert all(answer.is_finished for answer in answers)


async def test_two_at_once_on_two_gateways_are_one_too_many(
    stack: Stack, office: Office, books: Books, name: Callable[[], str]
) -> None:
    key = await one_place(office, name(), LimitScope.TENANT)
    holding = asyncio.create_task(
        ask(stack.gateways[0], key.text, prompt="x", max_tokens=1_000, ignore_eos=True, stream=True)
    )
    await books.opened()
    refused = await ask(stack.gateways[1], key.text, prompt="x", max_tokens=1)
    held = await holding

    assert (held.status, held.is_finished) == (200, True)
    assert refused.status == 429
    assert refused.error["code"] == "concurrency"
    assert (refused.error["limit"], refused.error["scope"]) == ("concurrent_requests", "tenant")
    assert refused.error["used"] == refused.error["limit_value"] == 1
    assert refused.headers["x-should-retry"] == "true"


async def test_no_more_run_than_there_are_places_on_both_gateways_together(
    stack: Stack, office: Office, name: Callable[[], str]
) -> None:
    key = await office.holder(LimitScope.KEY, name(), {"concurrent_requests": PLACES})
    running: list[float] = []
    crowd = asyncio.gather(*(insist(stack.gateways[i % 2], key) for i in range(CLIENTS)))
    while not crowd.done():
        running.append(
            await asyncio.to_thread(metric, stack.worker_url(), "sluice_worker_jobs_running")
        )
        await asyncio.sleep(0.02)
    answers = await crowd
    assert {answer.status for answer in answers} == {200}
    assert 1 < max(running) <= PLACES


async def insist(url: str, key: Credential) -> Answer:
    """Ask until there is a place."""
    while True:
        answer = await ask(url, key.text, prompt="x", max_tokens=10, ignore_eos=True)
        if answer.status != 429:
            return answer
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_gives_its_place_back_at_once(
    stack: Stack, office: Office, books: Books, name: Callable[[], str], stream: bool
) -> None:
    key = await one_place(office, name())
    for number in range(5):
        left = await ask(
            stack.gateways[number % 2],
            key.text,
            prompt="x",
            max_tokens=1_500,
            ignore_eos=True,
            stream=stream,
            leave_after=0.2,
        )
        assert left.has_left
        seconds = await seconds_until_served(stack.gateways[1 - number % 2], key)
        assert seconds < crowded(0.5)
    await books.settled()
    outcomes = Counter(row["outcome"] for row in await books.rows(key.tenant))
    assert outcomes == {"cancelled": 5, "finished": 5}


async def seconds_until_served(url: str, key: Credential) -> float:
    """Ask until there is a place and return how long that took."""
    began = time.monotonic()
    while (answer := await ask(url, key.text, prompt="x", max_tokens=1)).status == 429:
        assert time.monotonic() - began < 60, answer.body
        await asyncio.sleep(0.02)
    assert answer.status == 200, answer.body
    return time.monotonic() - began
