"""A whole deployment on a Redis Cluster: slots that move, and a master that dies."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from redis.crc import key_slot

from contract import keys
from gateway.billing.ledger.reconcile import reconcile
from tests.failures.proofs.accounts import Credential, open_accounts
from tests.failures.proofs.clients import Clients, wishes
from tests.failures.proofs.conftest import deployed
from tests.failures.proofs.differences import difference
from tests.failures.proofs.ledger import LEASE_AND_SWEEP_SECONDS, Books, open_books
from tests.failures.proofs.test_outages import CLIENTS, LIMITS, served_again, serving
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_cluster import RedisClusterServers
from tests.support.redis_server import running_redis
from tests.support.stack import MODEL, Stack


@pytest.fixture(scope="module")
def cluster() -> RedisClusterServers:
    """Three masters, each with a replica; the deployment starts and stops them."""
    return RedisClusterServers()


@pytest.fixture(scope="module")
def stack(cluster: RedisClusterServers) -> Iterator[Stack]:
    """A deployment on the cluster; Celery has a Redis of its own."""
    with running_redis() as broker:
        environment = {"SLUICE_CELERY_BROKER_URL": broker.url}
        with deployed(None, redis=cluster, environment=environment) as stack:
            yield stack


@pytest.fixture
async def key(stack: Stack, name: Callable[[], str]) -> Credential:
    """A new tenant's key with limits that are never reached."""
    async with open_accounts(stack) as accounts:
        key = await accounts.key(await accounts.tenant(name(), limits=LIMITS), limits=LIMITS)
    for url in stack.gateways:
        await served_again(url, key)
    return key


@asynccontextmanager
async def loaded(stack: Stack, key: Credential) -> AsyncIterator[Clients]:
    """Send requests of all kinds during a block, and before and after it."""
    is_over, clients = False, Clients(stack.gateways)
    load = wishes(random.Random(1), [key.text], is_over=lambda: is_over)
    task = asyncio.create_task(clients.run(load, clients=CLIENTS))
    await serving(clients)
    yield clients
    await serving(clients)
    is_over = True
    await task


async def check_each_is_counted_once(clients: Clients, books: Books) -> None:
    """Every response that a client received whole is in the ledger, once and with its usage."""
    await books.settled(seconds=LEASE_AND_SWEEP_SECONDS)
    found = await books.rows()
    rows = {row["request_id"]: row for row in found}
    assert len(rows) == len(found)
    finished = [answer for _, answer in clients.answers if answer.is_finished]
    assert finished
    for answer in finished:
        assert answer.usage is not None
        row = rows[str(answer.request_id)]
        assert row["completion_tokens"] == answer.usage["completion_tokens"]


async def test_slots_move_to_a_new_server_under_load_and_no_request_fails(
    stack: Stack, cluster: RedisClusterServers, key: Credential, books: Books
) -> None:
    names = [keys.leases(MODEL), keys.MODELS, *map(keys.usage, range(keys.BUCKETS))]
    slots = dict.fromkeys(key_slot(name.encode()) for name in names)
    async with loaded(stack, key) as clients:
        added = await asyncio.to_thread(cluster.add)
        await asyncio.to_thread(cluster.move, [*slots], to=added)
    answers = [answer for _, answer in clients.answers if not answer.has_left]
    assert [answer.body for answer in answers if answer.status != 200] == []
    await check_each_is_counted_once(clients, books)
    await books.nothing_left()


async def test_requests_continue_on_the_replica_of_a_killed_master(
    stack: Stack, cluster: RedisClusterServers, key: Credential, books: Books
) -> None:
    async with loaded(stack, key) as clients:
        await asyncio.to_thread(cluster.fail_over, 1)
        for url in stack.gateways:
            await served_again(url, key)
    failed = [
        answer
        for _, answer in clients.answers
        if not answer.has_left and answer.status not in (0, 200)
    ]
    assert Counter((each.status, each.error["code"]) for each in failed).keys() <= {
        (503, "store_unavailable")
    }
    await check_each_is_counted_once(clients, books)


async def only_receipts_left(books: Books) -> None:
    """Wait until nothing is left but receipts, which expire."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while [each for each in await books.leftovers() if not each.startswith("receipt: ")]:
            await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_writes_that_a_failover_loses_are_repaired_from_gateways_and_receipts(
    stack: Stack, cluster: RedisClusterServers, key: Credential, books: Books
) -> None:
    gateways = await books.living_gateways()
    names = [
        keys.leases(MODEL),
        *map(keys.usage, range(keys.BUCKETS)),
        *map(keys.replies, gateways),
    ]
    slots = dict.fromkeys(key_slot(name.encode()) for name in names)
    await asyncio.to_thread(cluster.move, [*slots], to=cluster.masters[0])
    await asyncio.to_thread(cluster.replicate, 0)
    async with loaded(stack, key) as clients:
        await asyncio.to_thread(cluster.cut_replication, 0)
        began = len(clients.answers), time.monotonic()
        await serving(clients)
        found = await asyncio.to_thread(difference, cluster.masters[0], cluster.replicas[0])
        answers, seconds = len(clients.answers) - began[0], time.monotonic() - began[1]
        await asyncio.to_thread(cluster.fail_over, 0)
        for url in stack.gateways:
            await served_again(url, key)
    print(f"{answers} answers in {seconds:.1f} s without replication; {found}")  # noqa: T201
    assert found.revived["requests"] > 0
    assert found.lost["frames"] > 0
    # Gateways send the lost settlements again once they have noticed the new server.
    finished = {str(answer.request_id) for _, answer in clients.answers if answer.is_finished}
    async with asyncio.timeout(PATIENCE_SECONDS):
        while finished - {row["request_id"] for row in await books.rows()}:
            await asyncio.sleep(0.1)
    async with open_books(stack) as after:
        await check_each_is_counted_once(clients, after)
        if await after.redis.zcard(keys.leases(MODEL)):
            # The ends of these jobs are lost.
            await after.expire_leases()
        await only_receipts_left(after)
        report = await reconcile(after.redis, after.database)
        assert report.differences == []
        assert (report.corrected_reservations, report.forgotten_requests) == (0, 0)
