"""A deployment that serves /metrics everywhere: a gateway, a scripted worker, jobs and beat."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from tests.support.stack import Stack, running_stack
from tests.telemetry.background import start_background

LABELLED_TENANT = "acme"
TENANTS = (LABELLED_TENANT, "other")
STEP_SECONDS = 0.01
MOST_WAITING = 4


@dataclass(frozen=True)
class Observed:
    """The deployment, and the base URLs of its processes."""

    stack: Stack
    customers: str
    """The gateway's URL for customers."""
    gateway: str
    """The gateway's URL for operators."""
    worker: str
    jobs: str
    beat: str


@pytest.fixture(scope="package")
def observed() -> Iterator[Observed]:
    """One process of each kind; the tenant `acme` has its own label."""
    with running_stack() as stack:
        customers = stack.start_gateway(
            SLUICE_METRICS_TENANTS=f"{LABELLED_TENANT},unknown",
            SLUICE_MAX_WAITING_JOBS=str(MOST_WAITING),
        )
        stack.start_worker(
            SLUICE_ENGINE="scripted",
            SLUICE_SCRIPTED_STEP_SECONDS=str(STEP_SECONDS),
            SLUICE_MAX_SEQUENCES="2",
        )
        urls = start_background(stack)
        yield Observed(
            stack, customers, stack.operators, stack.worker_url(), urls["jobs"], urls["beat"]
        )


@pytest.fixture
async def client(observed: Observed) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the tenant that has its own label."""
    async with client_of(observed, LABELLED_TENANT) as client:
        yield client


@asynccontextmanager
async def client_of(observed: Observed, tenant: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client with a key of a tenant."""
    key = await asyncio.to_thread(observed.stack.key, tenant)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=observed.customers, headers=headers, timeout=30
    ) as client:
        yield client
