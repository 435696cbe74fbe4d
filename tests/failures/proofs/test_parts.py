"""A whole deployment with four Redis: one each for queues, replies, responses and limits."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from redis.asyncio import Redis

from contract.keys import Part, part_of
from tests.failures.proofs.accounts import Credential
from tests.failures.proofs.conftest import deployed
from tests.failures.proofs.ledger import Books
from tests.failures.proofs.test_cluster import check_each_is_counted_once, key, loaded
from tests.failures.proofs.test_outages import served_again
from tests.support.redis_server import RedisServer, running_redis
from tests.support.stack import Stack, http_status

__all__ = ["key"]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[Part, RedisServer]]:
    """The Redis of each part other than the queues."""
    with ExitStack() as stack:
        parts = (Part.REPLIES, Part.RESPONSES, Part.LIMITS)
        yield {part: stack.enter_context(running_redis()) for part in parts}


@pytest.fixture(scope="module")
def stack(servers: dict[Part, RedisServer]) -> Iterator[Stack]:
    """A deployment with a Redis for each part."""
    urls = {f"SLUICE_REDIS_{part.upper()}_URL": server.url for part, server in servers.items()}
    with deployed(None, environment=urls) as stack:
        yield stack


async def test_each_redis_has_the_keys_of_its_part(
    stack: Stack, key: Credential, books: Books
) -> None:
    found: dict[Part, set[Part]] = {}
    async with loaded(stack, key) as clients:
        for part in Part:
            async with Redis.from_url(stack.redis_url(part)) as redis:
                found[part] = {part_of(name) for name in await redis.keys()}
    assert found == {part: {part} for part in Part}
    answers = [answer for _, answer in clients.answers if not answer.has_left]
    assert [answer.body for answer in answers if answer.status != 200] == []
    await check_each_is_counted_once(clients, books)
    await books.nothing_left()


@pytest.mark.slow
async def test_no_gateway_is_ready_without_the_redis_of_limits(
    stack: Stack, servers: dict[Part, RedisServer], key: Credential
) -> None:
    await asyncio.to_thread(servers[Part.LIMITS].stop)
    statuses = [await asyncio.to_thread(http_status, f"{url}/readyz") for url in stack.gateways]
    assert statuses == [503, 503]
    servers[Part.LIMITS].start()
    for url in stack.gateways:
        await served_again(url, key)
