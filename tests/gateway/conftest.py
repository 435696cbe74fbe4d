"""A deployment that most tests of HTTP share: two gateways and a scripted worker, on one Redis.

The services of accounts, for tests without a gateway.
"""

import asyncio
import json
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract import keys
from contract.messages import WorkerState
from gateway.accounts.keys.service import KeyService
from gateway.accounts.members import MemberService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.tenants.service import TenantService
from gateway.limits import store as store_module
from gateway.limits import stored_bytes as storage_module
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from tests.gateway.desk import GATEWAY, Desk, hurry
from tests.gateway.desk import MODEL as DESK_MODEL
from tests.gateway.limits.building import SCRIPTS, TestClock, with_test_clock
from tests.support.fake_worker import FakeWorker
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import free_port
from tests.support.stack import MODEL, Stack, running_stack

MAX_BODY_BYTES, MAX_BODY_ITEMS = 300_000, 262_144
MOST_WAITING_OF_TENANT = 6
JWT_SECRET = "a secret of thirty-two bytes or more"
JWT_ISSUER, JWT_AUDIENCE = "https://issuer.example", "sluice"

GATEWAY_SETTINGS = {
    # Only announcements between gateways end keys in time.
    "SLUICE_KEY_CACHE_TTL": "PT1H",
    # These only end hanging calls, however slow the machine is.
    "SLUICE_BODY_TIMEOUT": "PT5M",
    "SLUICE_SEND_TIMEOUT": "PT5M",
    # A stream begins with its first token, and has no keep-alives.
    "SLUICE_COMMIT_AFTER": "PT5M",
    "SLUICE_KEEP_ALIVE_INTERVAL": "PT5M",
    # Neither limit grows with the window of a model that a test announces.
    "SLUICE_MAX_BODY_BYTES": str(MAX_BODY_BYTES),
    "SLUICE_MAX_BODY_ITEMS": str(MAX_BODY_ITEMS),
    "SLUICE_MAX_AUDIO_SECONDS": "90",
    "SLUICE_MAX_WAITING_JOBS_OF_TENANT": str(MOST_WAITING_OF_TENANT),
    "SLUICE_OPENROUTER_MODELS": json.dumps(
        {MODEL: {"name": "Tiny", "max_output_length": 512, "quantization": "bf16"}}
    ),
    "SLUICE_JWT_ALGORITHMS": "HS256",
    "SLUICE_JWT_SECRET": JWT_SECRET,
    "SLUICE_JWT_ISSUER": JWT_ISSUER,
    "SLUICE_JWT_AUDIENCE": JWT_AUDIENCE,
}
ORIGIN = "https://app.example.com:8443"
"""Origin of web pages that may call the second gateway."""
KEEP_ALIVE_SECONDS = 0.1
IMPATIENT = GATEWAY_SETTINGS | {
    "SLUICE_COMMIT_AFTER": "PT0.6S",
    "SLUICE_KEEP_ALIVE_INTERVAL": f"PT{KEEP_ALIVE_SECONDS}S",
    "SLUICE_MAX_UNREAD_BYTES": "20000",
}
STEP_SECONDS = 0.01
LEASE_SECONDS = 60


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """Two gateways, and a worker whose engine steps a hundred times a second."""
    with running_stack() as stack:
        urls = {
            name: stack.launch_gateway(name, GATEWAY_SETTINGS | settings, port=free_port())
            for name, settings in (
                ("gateway-1", {}),
                ("gateway-2", {"SLUICE_CORS_ORIGINS": f"{ORIGIN}, https://other.example"}),
            )
        }
        stack.start_worker(
            SLUICE_ENGINE="scripted",
            SLUICE_SCRIPTED_STEP_SECONDS=str(STEP_SECONDS),
            SLUICE_LEASE_SECONDS=str(LEASE_SECONDS),
        )
        for name, url in urls.items():
            stack.await_gateway(name, url)
        yield stack
        assert_no_key_in_logs(stack)


@pytest.fixture(scope="package")
def impatient(stack: Stack) -> str:
    """URL of a gateway that commits streams and sends keep-alives early, and buffers little."""
    url = stack.start_gateway("impatient", **IMPATIENT)
    stack.gateways.remove(url)
    return url


@pytest.fixture(scope="package")
def key(stack: Stack) -> str:
    """A key of the tenant `acme` that may do everything a customer may."""
    return stack.key()


@pytest.fixture
async def store(stack: Stack) -> AsyncIterator["Redis"]:
    """A client of the deployment's Redis."""
    async with Redis.from_url(stack.redis.url) as client:
        yield client


@pytest.fixture
async def client(stack: Stack, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the first gateway that sends the key."""
    async with gateway_client(stack.gateways[0], key) as client:
        yield client


@pytest.fixture
async def other_client(stack: Stack, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the second gateway."""
    async with gateway_client(stack.gateways[1], key) as client:
        yield client


@pytest.fixture
async def impatient_client(impatient: str, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the impatient gateway."""
    async with gateway_client(impatient, key) as client:
        yield client


@pytest.fixture
async def worker(redis: "Redis") -> FakeWorker:
    """A worker of the desk's model that sends what a test gives it."""
    worker = FakeWorker(redis, DESK_MODEL)
    await worker.announce()
    return worker


@pytest.fixture
async def open_desk(
    redis: "Redis", worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Any]]:
    """Makes dispatchers that check their jobs often, and ends their loops with the test."""
    hurry(monkeypatch)
    desks: list[Desk] = []

    async def open_one(gateway: str = GATEWAY, **settings: Any) -> Desk:
        desk = Desk(redis, gateway, **settings)
        desks.append(desk)
        await desk.open()
        return desk

    yield open_one
    for desk in desks:
        await desk.close()


@pytest.fixture
async def desk(open_desk: Callable[..., Any]) -> Desk:
    """One dispatcher."""
    desk: Desk = await open_desk()
    return desk


@pytest.fixture
def tenants(database: Database, redis: Redis) -> TenantService:
    """The rules of tenants, on the database."""
    return TenantService(database, ChangeAnnouncer(redis))


@pytest.fixture
async def clock(any_redis: "Redis", monkeypatch: pytest.MonkeyPatch) -> TestClock:
    """The scripts' time, which stands at noon."""
    for name in SCRIPTS:
        monkeypatch.setattr(store_module, name, with_test_clock(getattr(store_module, name)))
    monkeypatch.setattr(storage_module, "_KEEP", with_test_clock(storage_module._KEEP))
    clock = TestClock(any_redis)
    await clock.set(clock.now_ms)
    return clock


@pytest.fixture
def projects(database: Database, redis: Redis) -> ProjectService:
    """The rules of projects, on the database."""
    return ProjectService(database, ChangeAnnouncer(redis))


@pytest.fixture
def members(database: Database, redis: Redis) -> MemberService:
    """The rules of members, on the database."""
    return MemberService(database, ChangeAnnouncer(redis))


@pytest.fixture(name="keys")
def key_service(database: Database, redis: Redis) -> KeyService:
    """The rules of keys, on the database."""
    return KeyService(database, ChangeAnnouncer(redis))


_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients without TLS: httpx would read all authorities of the system for each client."""


def gateway_client(url: str, key: str | None) -> httpx.AsyncClient:
    """Return a client that sends `key`, if there is one."""
    return httpx.AsyncClient(
        verify=_TLS,
        base_url=url,
        headers={} if key is None else {"authorization": f"Bearer {key}"},
        timeout=PATIENCE_SECONDS,
        limits=httpx.Limits(max_connections=None),
    )


def asking(**parameters: Any) -> dict[str, Any]:
    """Return a body with the required parameters and a fixed seed."""
    return {"model": MODEL, "prompt": "Once upon a time", "seed": 7, "max_tokens": 8} | parameters


def assert_no_key_in_logs(stack: Stack) -> None:
    """Check that no log contains a key of the deployment."""
    logs = "".join(file.read_text(errors="replace") for file in stack.directory.glob("*.log"))
    assert logs
    assert stack.keys
    for key in stack.keys:
        assert key[16:] not in logs


async def complete(client: httpx.AsyncClient, **parameters: Any) -> httpx.Response:
    """Post a body with the required parameters filled in."""
    return await client.post("/v1/completions", json=asking(**parameters))


async def serve(
    redis: "Redis", model: str, state: WorkerState = WorkerState.READY, **card: Any
) -> FakeWorker:
    """Announce a model whose worker sends what a test gives it."""
    worker = FakeWorker(redis, model, name=f"fake-{secrets.token_hex(4)}")
    await worker.announce(state, **card)
    return worker


async def eventually(condition: Callable[[], Any], *, what: str) -> None:
    """Wait until `condition` (which may be a coroutine function) holds.

    Fails, reporting that `what` did not happen, after PATIENCE_SECONDS.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_SECONDS
    pause = 0.005
    while True:
        held = condition()
        if asyncio.iscoroutine(held):
            held = await held
        if held:
            return
        assert loop.time() < deadline, f"{what} did not happen within {PATIENCE_SECONDS} s"
        await asyncio.sleep(pause)
        # Poll less often after a while: each poll takes processor time of four processes.
        pause = min(pause * 1.2, 0.1)


async def jobs_in_redis(redis: "Redis", model: str) -> dict[str, int]:
    """Count what the queue of a model holds; all zero when the model is idle.

    Receipts are not counted: they stay until their requests are settled.
    """
    hashes = [key async for key in redis.scan_iter(match=keys.job.prefix(model) + "*")]
    jobs = [key for key in hashes if await redis.hexists(key, "worker")]
    queues = [key async for key in redis.scan_iter(match=keys.queue.prefix(model) + "*")]
    return {
        "jobs": len(jobs),
        "queues": len(queues),
        "leases": await redis.zcard(keys.leases(model)),
        "active": await redis.zcard(keys.active_tenants(model)),
        "waiting": int(await redis.get(keys.waiting(model)) or 0),
    }


async def nothing_left(redis: "Redis", model: str) -> bool:
    """Whether Redis holds no job of a model, waiting or leased."""
    return not any((await jobs_in_redis(redis, model)).values())
