"""A separate deployment for these tests, which fill queues, connections and send buffers."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import Stack, running_stack

HEADER_SECONDS = 1.0
SEND_SECONDS = 6.0
"""On a busy machine the gateway needs seconds to have more unread bytes than it keeps."""
MOST_CONNECTIONS = 12
MAX_BODY_BYTES = 300_000
MAX_UNREAD_BYTES = 200_000


@pytest.fixture(scope="package")
def bounded() -> Iterator[Stack]:
    """A gateway with a short timeout for slow readers, one with few connections, and a worker.

    The third gateway also has a short timeout for headers, which cuts off others too on a busy
    machine.
    """
    settings = {
        "SLUICE_HEADER_TIMEOUT": str(PATIENCE_SECONDS),
        "SLUICE_SEND_TIMEOUT": str(SEND_SECONDS),
        "SLUICE_MAX_BODY_BYTES": str(MAX_BODY_BYTES),
        "SLUICE_MAX_UNREAD_BYTES": str(MAX_UNREAD_BYTES),
    }
    hurried = settings | {"SLUICE_HEADER_TIMEOUT": str(HEADER_SECONDS)}
    with running_stack() as stack:
        stack.start_gateway("gateway", **settings)
        stack.start_gateway("narrow", SLUICE_MAX_CONNECTIONS=str(MOST_CONNECTIONS), **settings)
        stack.start_gateway("hurried", **hurried)
        stack.start_worker(SLUICE_ENGINE="scripted", SLUICE_SCRIPTED_STEP_SECONDS="0.01")
        yield stack


@pytest.fixture
async def store(bounded: Stack) -> AsyncIterator["Redis"]:
    """A client of the deployment's Redis."""
    async with Redis.from_url(bounded.redis.url) as client:
        yield client


@pytest.fixture(scope="package")
def key(bounded: Stack) -> str:
    """A key with the right to request completions."""
    return bounded.key()
