"""One deployment for the whole folder: two gateways and a worker with the real engine, on loopback."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAI
from redis import Redis

from tests.e2e.asking import wait_until_listed
from tests.e2e.seeds.calling import Caller
from tests.e2e.seeing import make_seeing_model
from tests.support.stack import ENGINE_START_SECONDS, MODEL, Stack, running_stack
from tests.telemetry.traces.collector import Collector, running_collector

ALIASES = ("mistral", "your-model")
"""Names under which the documents of other APIs ask for their model."""

MAX_SEQUENCES = 96
MAX_WAITING_JOBS_OF_TENANT = 100


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where the deployment exports the traces of clients that ask for it."""
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="session")
def stack(collector: Collector) -> Iterator[Stack]:
    traced = {**collector.environment, "OTEL_TRACES_SAMPLER": "parentbased_always_off"}
    with running_stack() as stack:
        for name in ("gateway-1", "gateway-2"):
            stack.start_gateway(
                name,
                SLUICE_MAX_WAITING_JOBS_OF_TENANT=str(MAX_WAITING_JOBS_OF_TENANT),
                **traced,
            )
        stack.start_worker(
            ready_seconds=ENGINE_START_SECONDS,
            SLUICE_MAX_SEQUENCES=str(MAX_SEQUENCES),
            SLUICE_MODEL_ALIASES=",".join(ALIASES),
            VLLM_CPU_OMP_THREADS_BIND="auto",  # As where nothing is set: one engine has its cores.
            **traced,
        )
        for url in stack.gateways:
            with OpenAI(base_url=f"{url}/v1", api_key=stack.key(), max_retries=0) as client:
                wait_until_listed(client, MODEL)
        yield stack


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[OpenAI]:
    """The official client at the first gateway; it tries everything once."""
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


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that sees."""
    folder = tmp_path_factory.mktemp("seeing")
    make_seeing_model(folder)
    return folder


@pytest.fixture
def store(stack: Stack) -> Iterator["Redis"]:
    """A client of the deployment's Redis."""
    with Redis.from_url(stack.redis.url) as store:
        yield store
