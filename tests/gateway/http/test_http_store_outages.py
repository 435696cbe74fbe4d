"""The management API while the database or Redis is away."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import jwt
import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from sqlalchemy import text

from gateway.auth.api_key import ApiKey
from gateway.auth.sessions import Audience, KeyLogin, Sessions, make_link
from gateway.platform.database import engine
from gateway.platform.settings import Settings
from gateway.records.errors import StoreUnavailableError
from gateway.records.scopes import Scope
from tests.gateway.callers import caller, status_with
from tests.gateway.conftest import (
    JWT_AUDIENCE,
    JWT_ISSUER,
    JWT_SECRET,
    assert_no_key_in_logs,
    eventually,
    gateway_client,
)
from tests.gateway.http_calls import message_of
from tests.gateway.management_api import running_management
from tests.support.postgres_server import PostgresServer, running_postgres
from tests.support.redis_server import RedisServer
from tests.support.stack import Stack, running_stack

JWT_SETTINGS = {
    "SLUICE_JWT_ALGORITHMS": "HS256",
    "SLUICE_JWT_SECRET": JWT_SECRET,
    "SLUICE_JWT_ISSUER": JWT_ISSUER,
    "SLUICE_JWT_AUDIENCE": JWT_AUDIENCE,
}


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A server that may be stopped."""
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def away(postgres: PostgresServer) -> Iterator[Stack]:
    """A gateway on that server."""
    with running_stack(database_url=postgres.create_database()) as stack:
        stack.start_gateway()
        yield stack
        assert_no_key_in_logs(stack)


@pytest.fixture
async def client(away: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client with every scope."""
    async with caller(away, "acme", *Scope) as client:
        yield client


async def _answers(client: httpx.AsyncClient, operators: str) -> list[httpx.Response]:
    key = {"name": "x", "scopes": ["completions"]}
    return [
        await client.get("/v1/keys"),
        await client.post("/v1/keys", json=key),
        await client.delete("/v1/keys/key_1"),
        await client.post("/v1/projects", json={"name": "x"}),
        await client.get("/v1/members"),
        await client.get(f"{operators}/admin/tenants"),
        await client.patch(f"{operators}/admin/tenants/acme", json={"name": "x"}),
    ]


@pytest.mark.parametrize("store", ["database", "redis"])
async def test_valid_credential_is_never_refused_as_invalid_while_a_store_is_away(
    away: Stack, postgres: PostgresServer, store: str
) -> None:
    """Each pair of store and credential, at a gateway that has cached nothing."""
    key = ApiKey.parse(await asyncio.to_thread(away.key, "acme", scopes=frozenset(Scope)))
    claims = {"iss": JWT_ISSUER, "aud": JWT_AUDIENCE, "tenant": "acme", "exp": 2**40}
    token = jwt.encode(claims, JWT_SECRET, "HS256")
    login, hour = KeyLogin(key.prefix, key.digest()), timedelta(hours=1)
    async with Redis.from_url(away.redis.url) as redis:
        sessions = Sessions(redis, idle=hour, longest=hour)
        session = await sessions.begin(Audience.CUSTOMERS, login, "key:k")
        link = await make_link(redis, login)
    url = await asyncio.to_thread(away.start_gateway, f"cold-{store}", **JWT_SETTINGS)
    server = postgres if store == "database" else away.redis
    await asyncio.to_thread(server.stop)
    try:
        for credential in (key.reveal(), token):
            async with gateway_client(url, credential) as client:
                responses = [
                    await client.post("/v1/completions", json={"model": "m", "prompt": "a"})
                ]
                # The models are known without Redis.
                responses += [await client.get("/v1/models")] if store == "database" else []
            for response in responses:
                kind, code = "service_unavailable", "store_unavailable"
                message_of(response, status=503, kind=kind, code=code)
                assert int(response.headers["retry-after"]) >= 1
        async with httpx.AsyncClient(base_url=url, timeout=None) as browser:
            page = await browser.get(link)
            assert (page.status_code, int(page.headers["retry-after"]) >= 1) == (503, True)
            await browser.get("/console/login")
            form = {"key": key.reveal(), "csrf": browser.cookies["sluice-login-customers"]}
            page = await browser.post("/console/login", data=form)
            assert (page.status_code, int(page.headers["retry-after"]) >= 1) == (503, True)
            browser.cookies.set("sluice", session)
            page = await browser.get("/console")
            assert (page.status_code, int(page.headers["retry-after"]) >= 1) == (503, True)
    finally:
        await asyncio.to_thread(server.start)
    if store == "database":
        async with httpx.AsyncClient(base_url=url, timeout=None) as browser:

            async def is_let_in() -> bool:
                # The outage has not used the link up.
                return (await browser.get(link)).status_code == 303

            await eventually(is_let_in, what="the login by the link")
    away.gateways.remove(url)
    await asyncio.to_thread(away.stop, f"cold-{store}")


@pytest.mark.slow
async def test_database_outage_is_reported_and_service_resumes(
    away: Stack, postgres: PostgresServer, client: httpx.AsyncClient
) -> None:
    statuses = [response.status_code for response in await _answers(client, away.operators)]
    assert statuses == [200, 200, 404, 200, 200, 200, 200]
    before = (await client.get("/v1/keys", params={"limit": 100})).json()
    await asyncio.to_thread(postgres.stop)
    try:
        page = {"origin": "https://page.example", "access-control-request-method": "GET"}
        # No earlier preflight has cached the origins of tenants.
        preflight = await client.request("OPTIONS", "/v1/keys", headers=page)
        for response in (preflight, *await _answers(client, away.operators)):
            message = message_of(
                response, status=503, kind="service_unavailable", code="store_unavailable"
            )
            assert message == "The database cannot be reached at the moment."
        status = await client.get("/status.json")
        assert (status.status_code, status.json()["is_history_known"]) == (200, False)
        shown = await client.get("/status")
        assert (shown.status_code, "The history cannot be read" in shown.text) == (200, True)
        # A cached key stays valid.
        assert (await client.get("/v1/models")).status_code == 200
    finally:
        await asyncio.to_thread(postgres.start)

    async def is_back() -> bool:
        return (await client.get("/v1/keys")).status_code == 200

    await eventually(is_back, what="the database being found again")
    assert (await client.get("/v1/keys", params={"limit": 100})).json() == before


async def test_all_waits_for_a_connection_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "TIMEOUT_SECONDS", 3.0)

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def refused(database: engine.Database) -> None:
        with pytest.raises(StoreUnavailableError):
            async with database.reading() as transaction:
                await transaction.execute(text("SELECT 1"))

    async with await asyncio.start_server(ignore, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        database = engine.Database(f"postgresql+asyncpg://postgres@127.0.0.1:{port}/x?ssl=disable")
        began = time.monotonic()
        # Twice as many as may connect at once: none waits for the place of another one, and then as
        # long again for its own connection.
        await asyncio.gather(*(refused(database) for _ in range(4 * engine.POOL_SIZE)))
        assert time.monotonic() - began < 5.5
        await database.aclose()


async def test_control_characters_do_not_reach_postgresql(
    away: Stack, client: httpx.AsyncClient
) -> None:
    walked = 0
    for listener in (away.url, away.operators):
        page = (await client.get(f"{listener}/openapi.json")).json()
        for path, operations in page["paths"].items():
            for method, operation in operations.items():
                given = {each["name"]: each["in"] for each in operation.get("parameters", ())}
                queries = [f"?{name}=%00" for name, place in given.items() if place == "query"]
                for odd, query in (("%00", ""), ("%ed%a0%80", ""), *(("x", q) for q in queries)):
                    if not query and "{" not in path:
                        continue
                    walked += 1
                    url = listener + re.sub("{[^}]*}", odd, path) + query
                    answer = await client.request(method, url, json={})
                    # There are no models, and no store of files.
                    assert answer.status_code in (*range(200, 500), 503), (method, url, answer.text)
    assert walked > 200
    for path in ("/v1/keys", "/v1/projects", "/v1/members", "/admin/tenants"):
        url = away.listener_of(path) + path
        assert (await client.get(f"{url}?after=%00")).status_code == 400, path
        assert (await client.get(f"{url}?after=%ed%a0%80")).status_code == 400, path
    for path, body in (
        ("/v1/keys", {"name": "x", "allowed_models": ["a\x00"]}),
        ("/v1/keys", {"name": "x\x00"}),
        ("/v1/projects", {"name": "\x00"}),
        ("/v1/members", {"subject": "\x00", "role": "viewer"}),
        ("/v1/members", {"subject": "x", "name": "\x00", "role": "viewer"}),
        ("/admin/tenants", {"name": "\x00"}),
        ("/admin/tenants", {"name": "x", "plan_id": "\x00"}),
    ):
        url = away.listener_of(path) + path
        assert (await client.post(url, json=body)).status_code == 400, body


async def test_unannounced_change_is_saved_and_reported(
    away: Stack, client: httpx.AsyncClient
) -> None:
    created = (await client.post("/v1/keys", json={"name": "x"})).json()
    away.note_key(created["key"])
    path = f"/v1/keys/{created['id']}"
    away.redis.stop()
    try:
        # A new secret would be lost with the error, so the key keeps the one it has.
        for response in (await client.post(f"{path}:rotate"), await client.delete(path)):
            message = message_of(
                response, status=503, kind="service_unavailable", code="store_unavailable"
            )
            assert "Redis is unavailable" in message
        saved = (await client.get(path)).json()
        assert saved["prefix"] == created["prefix"]
        assert saved["revoked_at"] is not None
    finally:
        away.redis.start()

    async def is_refused() -> bool:
        repeated = await client.delete(path)
        return repeated.status_code == 200 and await status_with(away.url, created["key"]) == 401

    await eventually(is_refused, what="the revocation taking effect")


async def test_gateway_is_not_ready_while_redis_is_full(
    copy_sqlite: Callable[[Path], str], redis: "Redis", redis_server: RedisServer, tmp_path: Path
) -> None:
    database_url = SecretStr(copy_sqlite(tmp_path / "full.db"))
    settings = Settings(database_url=database_url, redis_url=redis_server.url)
    async with running_management(settings) as gateway:
        await redis.config_set("maxmemory", 1)
        try:
            full = await gateway.call("", "GET", "/readyz")
        finally:
            await redis.config_set("maxmemory", 0)
        ready = await gateway.call("", "GET", "/readyz")
    assert (full.status_code, full.json()) == (503, {"status": "redis rejects writes"})
    assert ready.status_code == 200
