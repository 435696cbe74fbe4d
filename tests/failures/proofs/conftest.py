"""A deployment of real processes on either database, with two gateways and background jobs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import jwt
import pytest

from tests.failures.proofs.accounts import Accounts, open_accounts
from tests.failures.proofs.ledger import Books, open_books
from tests.support.postgres_server import PostgresServer, running_postgres
from tests.support.processes import free_port
from tests.support.redis_cluster import RedisClusterServers
from tests.support.redis_server import BUNDLED, SYSTEM
from tests.support.stack import Stack, running_stack

STEP_SECONDS = 0.005
COMPLETION_TOKENS = 12
"""The scripted engine ends a text here, unless the request ignores it."""

WORKER: dict[str, Any] = {
    "SLUICE_ENGINE": "scripted",
    "SLUICE_SCRIPTED_STEP_SECONDS": str(STEP_SECONDS),
    "SLUICE_SCRIPTED_COMPLETION_TOKENS": str(COMPLETION_TOKENS),
    # With the default of 4 s a busy machine would lose jobs. Tests that kill it expire its leases.
    "SLUICE_LEASE_SECONDS": "60",
}
JWT_SECRET = "forty-eight characters that nobody else may see!"
ENVIRONMENT = {
    "SLUICE_WEBHOOK_ALLOW_PRIVATE": "true",
    "SLUICE_JWT_ALGORITHMS": "HS256",
    "SLUICE_JWT_SECRET": JWT_SECRET,
    "SLUICE_JWT_ISSUER": "https://login.example",
    "SLUICE_JWT_AUDIENCE": "sluice",
}
BUSY_WORKER: dict[str, Any] = {
    "SLUICE_MAX_SEQUENCES": "64",
    "SLUICE_SCRIPTED_PREFILL_SECONDS_PER_TOKEN": "0.0005",
}
"""So slow that requests wait in the queue and during prefill."""

PROMPT_PRICE, CACHED_PRICE, COMPLETION_PRICE = 3_333_333, 1_111_111, 7_777_777
"""Micro-dollars per million tokens, such that every cost is rounded."""

GATEWAYS = ("gateway-1", "gateway-2")

_numbers = count(1)


def token_of(tenant: str, subject: str) -> str:
    """Return a JWT of a person."""
    claims = {
        "iss": ENVIRONMENT["SLUICE_JWT_ISSUER"],
        "aud": ENVIRONMENT["SLUICE_JWT_AUDIENCE"],
        "exp": int(time.time()) + 7_200,
        "sub": subject,
        "tenant": tenant,
    }
    return jwt.encode(claims, JWT_SECRET, algorithm="HS256")


def cost_of(prompt_tokens: int, completion_tokens: int) -> int:
    """Return the cost of a request without cached prompt tokens, in micro-dollars."""
    cost = prompt_tokens * PROMPT_PRICE + completion_tokens * COMPLETION_PRICE
    return -(-cost // 1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of each proof."""

    requests: int
    """In the run that kills all processes."""
    clients: int
    """Of that run, each with one request at a time."""
    kills: int
    """Of each kind of process in that run."""
    pause_seconds: float
    """The longest time between two kills in that run."""
    outage_seconds: float
    races: int
    """Of each kind, each on a fresh key."""
    waits_for_retry_after: bool
    """Whether the run lasts for the minute that a `Retry-After` names."""


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> Scale:
    """The size of the proofs: minutes by default, hours with `--long`."""
    if request.config.getoption("--long"):
        return Scale(
            requests=20_000,
            clients=24,
            kills=5,
            pause_seconds=40,
            outage_seconds=60,
            races=3,
            waits_for_retry_after=True,
        )
    return Scale(
        requests=150,
        clients=10,
        kills=2,
        pause_seconds=0.5,
        outage_seconds=2,
        races=1,
        waits_for_retry_after=False,
    )


@pytest.fixture(scope="package")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server that only this folder's tests use, so they may stop it."""
    with running_postgres() as server:
        yield server


def database_url(kind: str, request: pytest.FixtureRequest) -> str | None:
    """Return the URL of a new PostgreSQL database, or None for SQLite."""
    if kind == "sqlite":
        return None
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create_database()


@contextmanager
def deployed(
    url: str | None,
    *,
    redis: RedisClusterServers | None = None,
    environment: Mapping[str, str] | None = None,
    **worker: Any,
) -> Iterator[Stack]:
    """Run a whole deployment for the length of a block, with variables for all or the worker."""
    # Each database is tested with a different Redis, if two are installed.
    executable = BUNDLED if url is None else SYSTEM or BUNDLED
    with running_stack(executable=executable, redis=redis, database_url=url) as stack:
        stack.program = "tests.failures.proofs.program"
        stack.worker_program = (stack.program, "worker")
        stack.environment |= environment or {}
        asyncio.run(_set_price(stack))
        # They start side by side.
        gateways = {name: stack.launch_gateway(name, port=free_port()) for name in GATEWAYS}
        stack.start_jobs()
        stack.start_beat()
        stack.start_worker(**{**WORKER, **worker})
        for name, address in gateways.items():
            stack.await_gateway(name, address)
        yield stack


async def _set_price(stack: Stack) -> None:
    async with open_accounts(stack) as accounts:
        await accounts.price(prompt=PROMPT_PRICE, cached=CACHED_PRICE, completion=COMPLETION_PRICE)


@pytest.fixture(
    scope="package", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)]
)
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A deployment that every test shares; each makes its own tenants."""
    with deployed(database_url(request.param, request), environment=ENVIRONMENT) as stack:
        yield stack


@pytest.fixture(scope="package")
def mortal_stack(postgres: PostgresServer) -> Iterator[Stack]:
    """A deployment on PostgreSQL whose processes are killed, and its servers stopped later."""
    url = postgres.create_database()
    with deployed(url, environment=ENVIRONMENT, **BUSY_WORKER) as stack:
        yield stack


@pytest.fixture
async def accounts(stack: Stack) -> AsyncIterator[Accounts]:
    """The shared deployment's accounts."""
    async with open_accounts(stack) as accounts:
        yield accounts


@pytest.fixture
async def books(stack: Stack) -> AsyncIterator[Books]:
    """The shared deployment's ledger and Redis."""
    async with open_books(stack) as books:
        yield books


@pytest.fixture
def name() -> Callable[[], str]:
    """Returns a function that makes a new tenant name."""
    return lambda: f"tenant-{next(_numbers)}"
