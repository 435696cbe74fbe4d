"""Clients of the deployment with the real engine: two gateways and a worker, on loopback."""

from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI, OpenAI
from redis import Redis

from tests.e2e.seeds.calling import Caller
from tests.support.deployment import SEEING, attach
from tests.support.stack import MODEL, Stack


@pytest.fixture(scope="session")
def stack(deployment: Stack) -> Stack:
    """The deployment with the real engine that all processes of this run share."""
    return deployment


@pytest.fixture(scope="session")
def seeing_stack(request: pytest.FixtureRequest, stack: Stack) -> Stack:
    """The same deployment, once it also serves a vision model."""
    return attach(request.config, SEEING)


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[OpenAI]:
    """The official client at the first gateway, without retries."""
    with OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key(), max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(stack: Stack, client: OpenAI) -> AsyncIterator[AsyncOpenAI]:
    """The asynchronous client with the same key, at the second gateway."""
    async with AsyncOpenAI(
        base_url=f"{stack.gateways[1]}/v1", api_key=client.api_key, max_retries=0
    ) as async_client:
        yield async_client


@pytest.fixture(scope="session")
def caller(stack: Stack, client: OpenAI) -> Iterator[Caller]:
    """HTTP without a client library. The key may use one model only, as if there were no other."""
    caller = Caller(stack.url, stack.key("documents", allowed_models=(MODEL,)))
    yield caller
    caller.close()


@pytest.fixture
def store(stack: Stack) -> Iterator["Redis"]:
    """A client of the deployment's Redis."""
    with Redis.from_url(stack.redis.url) as store:
        yield store
