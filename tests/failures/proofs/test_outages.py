"""PostgreSQL or Redis away under load: what continues, is refused, and is left over."""

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass

import pytest

from tests.failures.proofs.accounts import Credential, open_accounts
from tests.failures.proofs.client import Answer, ask, request
from tests.failures.proofs.clients import Clients, wishes
from tests.failures.proofs.conftest import Scale
from tests.failures.proofs.ledger import LEASE_AND_SWEEP_SECONDS, Books, open_books
from tests.failures.proofs.observer import Observer, watching
from tests.failures.proofs.until import running, until
from tests.support.patience import PATIENCE_SECONDS
from tests.support.postgres_server import PostgresServer
from tests.support.stack import Stack, http_status

CLIENTS = 8
SERVED = 20
"""Requests that are served before a database goes away, while it is away, and after it is back."""
REFUSALS = 10
"""Concurrent requests on each gateway."""
LIMITS = {
    "requests_per_minute": 1_000_000,
    "tokens_per_day": 10**9,
    "concurrent_requests": 100,
    "budget_micros": 10**9,
}
MOST_CONNECTIONS = 40
"""Two gateways with at most ten each, and as many for the background jobs."""


@pytest.fixture
async def mortal_books(mortal_stack: Stack) -> AsyncIterator[Books]:
    """The ledger and Redis of the deployment whose servers are stopped."""
    async with open_books(mortal_stack) as books:
        yield books


async def customers(stack: Stack, name: str) -> list[Credential]:
    """Make a tenant without limits, and one with limits that are never reached; use each once."""
    async with open_accounts(stack) as accounts:
        await accounts.tenant(f"{name}-free")
        await accounts.tenant(f"{name}-limited", limits=LIMITS)
        found = [
            await accounts.key(f"{name}-free"),
            await accounts.key(f"{name}-limited", limits=LIMITS),
        ]
    for credential in found:
        for url in stack.gateways:
            await served_again(url, credential)
    return found


@dataclass(slots=True)
class Through:
    """What happened while a database was away and after it was back."""

    clients: Clients
    observer: Observer
    left_before: list[str]
    """Receipts of gateways that were killed earlier, which expire."""
    served_meanwhile: int = 0
    waiting_at_its_end: int = 0
    """Records that had not reached the ledger when the database came back."""


async def use_through(
    stack: Stack,
    books: Books,
    name: str,
    *,
    away: AbstractAsyncContextManager[None],
    seconds: float,
) -> Through:
    """Send requests before, during and after an outage; wait until everything is in the ledger."""
    texts = [credential.text for credential in await customers(stack, name)]
    await books.settled()
    is_over, clients = False, Clients(stack.gateways)
    async with watching(books.redis) as observer:
        through = Through(clients, observer, await books.leftovers())
        load = wishes(random.Random(1), texts, is_over=lambda: is_over)
        load_task = asyncio.create_task(clients.run(load, clients=CLIENTS))
        await serving(clients)
        async with away:
            begun = len(clients.answers)
            await asyncio.sleep(seconds)
            await serving(clients)
            through.served_meanwhile = len(clients.answers) - begun
            through.waiting_at_its_end = await books.undrained()
        await serving(clients)
        is_over = True
        await load_task
        await books.settled(seconds=LEASE_AND_SWEEP_SECONDS)
    print(  # noqa: T201  (figures for pytest -rP)
        f"{through.served_meanwhile} requests in {seconds:.0f} s without the database, "
        f"{through.waiting_at_its_end} records waiting when it came back"
    )
    return through


async def serving(clients: Clients) -> None:
    """Wait until so many more requests have been served."""
    begun = len(clients.answers)
    await until(lambda: len(clients.answers) >= begun + SERVED, what=f"{SERVED} answers")


async def check_nothing_failed_and_nothing_is_missing(through: Through, books: Books) -> None:
    """Every client that stayed was served, and the ledger has every request once."""
    answers = [answer for _, answer in through.clients.answers if not answer.has_left]
    assert [answer.body for answer in answers if answer.status != 200] == []
    assert through.waiting_at_its_end > 0
    ids = Counter(row["request_id"] for row in await books.rows())
    assert set(ids.values()) == {1}
    # A client that disconnected may not have been admitted: then it has no row and no job.
    released = through.observer.reserved - ids.keys()
    assert released <= through.observer.withdrawn
    assert released.isdisjoint(through.observer.requests_of_jobs)
    assert len(released) <= sum(a.status == 0 for _, a in through.clients.answers)
    rows = {row["request_id"]: row for row in await books.rows()}
    for _, answer in through.clients.answers:
        if answer.is_finished and answer.usage:
            row = rows[str(answer.request_id)]
            assert row["completion_tokens"] == answer.usage["completion_tokens"]
    await books.nothing_left(but=through.left_before)


async def test_completions_continue_without_postgresql_and_the_ledger_is_complete_afterwards(
    mortal_stack: Stack, mortal_books: Books, postgres: PostgresServer, scale: Scale
) -> None:
    stack, books = mortal_stack, mortal_books
    connections = []
    page: list[Answer] = []
    key = (await customers(stack, "reader"))[0]

    @asynccontextmanager
    async def stopped() -> AsyncIterator[None]:
        connections.append(await connections_of(books))
        await asyncio.to_thread(postgres.stop)
        page.append(await request(stack.url, key.text, path="/v1/usage"))
        yield
        await asyncio.to_thread(postgres.start)
        connections.append(await connections_of(books))

    through = await use_through(
        stack, books, "postgres", away=stopped(), seconds=scale.outage_seconds
    )
    await check_nothing_failed_and_nothing_is_missing(through, books)
    assert (page[0].status, page[0].error["type"]) == (503, "service_unavailable")
    assert 0 < max(connections) <= MOST_CONNECTIONS


async def connections_of(books: Books) -> int:
    """Return the number of connections that PostgreSQL has from gateways and background jobs."""
    statement = "SELECT count(*) AS n FROM pg_stat_activity WHERE application_name = 'sluice'"
    [row] = await books.select(statement)
    return int(row["n"])


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["sqlite"], indirect=True)
async def test_completions_continue_while_sqlite_is_locked_and_the_ledger_is_complete_afterwards(
    stack: Stack, books: Books, name: Callable[[], str], scale: Scale
) -> None:
    @asynccontextmanager
    async def locked() -> AsyncIterator[None]:
        with closing(
            sqlite3.connect(stack.directory / "sluice.db", isolation_level=None)
        ) as writer:
            writer.execute("BEGIN IMMEDIATE")
            yield
            writer.execute("ROLLBACK")

    seconds = scale.outage_seconds
    through = await use_through(stack, books, name(), away=locked(), seconds=seconds)
    await check_nothing_failed_and_nothing_is_missing(through, books)


@pytest.mark.slow
async def test_requests_are_refused_without_redis_and_nothing_leaks(
    mortal_stack: Stack, mortal_books: Books
) -> None:
    stack, books = mortal_stack, mortal_books
    [free, limited] = await customers(stack, "redis")
    # These run when Redis goes away; their records are written when it is back, empty.
    streams = [
        asyncio.create_task(
            ask(url, key.text, prompt="x", max_tokens=1_000, ignore_eos=True, stream=True)
        )
        for url in stack.gateways
        for key in (free, limited)
    ]
    await running(stack, len(streams))
    await asyncio.to_thread(stack.redis.stop)
    for url in stack.gateways:
        assert await asyncio.to_thread(http_status, f"{url}/readyz") == 503
    assert await asyncio.to_thread(http_status, f"{stack.url}/healthz") == 200
    refused = await asyncio.gather(
        *(
            refusal(url, free, is_streamed=number % 2 == 0)
            for url in stack.gateways
            for number in range(REFUSALS)
        )
    )
    refused += await asyncio.gather(
        *(
            refusal(url, limited, is_streamed=number % 2 == 0)
            for url in stack.gateways
            for number in range(REFUSALS)
        )
    )
    await asyncio.to_thread(stack.redis.start)
    answers = await asyncio.gather(*streams)
    for key in (free, limited):
        for url in stack.gateways:
            await served_again(url, key)
    assert await asyncio.to_thread(http_status, f"{stack.url}/readyz") == 200
    await books.settled(seconds=LEASE_AND_SWEEP_SECONDS)
    await books.nothing_left()

    assert len(refused) == 4 * REFUSALS
    rows = {row["request_id"]: row for row in await books.rows()}
    for answer in answers:
        assert answer.request_id in rows, answer.body
    assert len(rows) == len(await books.rows())


async def refusal(url: str, key: Credential, *, is_streamed: bool) -> Answer:
    """Send a request while Redis is away."""
    answer = await ask(url, key.text, prompt="x", max_tokens=1, stream=is_streamed)
    assert answer.status == 503, answer.body
    assert answer.error["type"] == "service_unavailable"
    assert answer.error["code"] == "store_unavailable"
    assert int(answer.headers["retry-after"]) >= 1
    assert int(answer.headers["retry-after-ms"]) > 0
    assert answer.headers["x-should-retry"] == "true"
    return answer


async def served_again(url: str, key: Credential) -> None:
    """Retry until the gateway and its worker are back."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await ask(url, key.text, prompt="x", max_tokens=1)).status != 200:
            await asyncio.sleep(0.05)
