"""Access: allowed models, revocation, JWTs; and no key is ever logged."""

import asyncio
import functools
import time
from contextlib import AsyncExitStack
from typing import Any

import httpx
import jwt
import pytest
from pydantic import SecretStr
from redis.asyncio import Redis

from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.auth.authenticator import Authenticator
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.concurrency.fair_turns import MOST_ENTERING, LoopTurns
from gateway.platform.database.engine import Database
from gateway.platform.settings import Settings
from tests.gateway.conftest import (
    JWT_AUDIENCE,
    JWT_ISSUER,
    JWT_SECRET,
    asking,
    eventually,
    gateway_client,
)
from tests.gateway.http_calls import message_of
from tests.gateway.management_api import running_management
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack


async def status_of(client: httpx.AsyncClient, **parameters: Any) -> int:
    """Post a short completion and return the status."""
    response = await client.post("/v1/completions", json=asking(max_tokens=1, **parameters))
    return response.status_code


async def test_model_outside_of_the_keys_models_is_unknown(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    assert await status_of(client) == 200
    assert MODEL in (await client.get("/v1/models")).text
    limited = await asyncio.to_thread(stack.key, "acme", allowed_models=["another"])
    async with gateway_client(stack.url, limited) as limited_client:
        forbidden = await limited_client.post("/v1/completions", json=asking())
        unknown = await limited_client.post("/v1/completions", json=asking(model="gpt-9"))
        assert forbidden.json() == {
            "error": unknown.json()["error"]
            | {"message": unknown.json()["error"]["message"].replace("gpt-9", MODEL)}
        }
        assert (forbidden.status_code, unknown.status_code) == (404, 404)
        assert (await limited_client.get("/v1/models")).json()["data"] == []
        message_of(
            await limited_client.get(f"/v1/models/{MODEL}"),
            status=404,
            kind="invalid_request_error",
            code="model_not_found",
            param="model",
        )


async def test_key_for_this_model_may_use_it(stack: Stack) -> None:
    limited = await asyncio.to_thread(stack.key, "acme", allowed_models=[MODEL, "another"])
    async with gateway_client(stack.url, limited) as client:
        assert await status_of(client) == 200
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == [MODEL]


async def test_model_of_a_key_is_checked_before_its_parameters(stack: Stack) -> None:
    limited = await asyncio.to_thread(stack.key, "acme", allowed_models=["another"])
    async with gateway_client(stack.url, limited) as client:
        assert await status_of(client, n=0) == 404


async def test_revoked_key_is_refused_within_a_second_by_every_gateway(
    stack: Stack, store: "Redis"
) -> None:
    database = Database(stack.database_url)
    keys = KeyService(database, ChangeAnnouncer(store))
    created = await keys.create("acme", name="short-lived")
    clients = [gateway_client(url, created.key.reveal()) for url in stack.gateways[:2]]
    try:
        assert [await status_of(client) for client in clients] == [200, 200]
        await keys.revoke("acme", created.record.id)
        for client in clients:
            await eventually(functools.partial(_is_refused, client), what="the refusal")
        for client in clients:
            message = message_of(
                await client.get("/v1/models"),
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
            )
            assert "revoked" in message
    finally:
        await asyncio.gather(*(client.aclose() for client in clients))
        await database.aclose()


async def _is_refused(client: httpx.AsyncClient) -> bool:
    return (await client.get("/v1/models")).status_code == 401


async def test_suspended_tenant_gets_403(stack: Stack, store: "Redis") -> None:
    key = await asyncio.to_thread(stack.key, "late-payer")
    database = Database(stack.database_url)
    try:
        async with gateway_client(stack.url, key) as client:
            assert await status_of(client) == 200
            await TenantService(database, ChangeAnnouncer(store)).suspend("late-payer")
            await eventually(lambda: _is_suspended(client), what="the suspension taking effect")
            message_of(
                await client.post("/v1/completions", json=asking()),
                status=403,
                kind="permission_error",
                code="account_suspended",
            )
    finally:
        await database.aclose()


async def _is_suspended(client: httpx.AsyncClient) -> bool:
    return (await client.get("/v1/models")).status_code == 403


def token(**claims: Any) -> str:
    """Sign a JWT for `acme`; a claim of None is left out."""
    known = {
        "iss": JWT_ISSUER,
        "aud": JWT_AUDIENCE,
        "exp": int(time.time()) + 60,
        "tenant": "acme",
        "sub": "user-1",
    } | claims
    present = {name: value for name, value in known.items() if value is not None}
    return jwt.encode(present, JWT_SECRET, algorithm="HS256")


async def test_jwt_is_accepted(stack: Stack, key: str) -> None:
    async with gateway_client(stack.url, token()) as client:
        assert await status_of(client) == 200
    async with gateway_client(stack.url, token(models=["another"])) as client:
        assert await status_of(client) == 404


@pytest.mark.parametrize(
    ("claims", "status", "code"),
    [
        ({"exp": 1}, 401, "expired_token"),
        ({"exp": None}, 401, "invalid_api_key"),
        ({"iss": "https://elsewhere.example"}, 401, "invalid_api_key"),
        ({"aud": "elsewhere"}, 401, "invalid_api_key"),
        ({"tenant": "nobody"}, 401, "invalid_api_key"),
        ({"scope": "email profile"}, 403, "insufficient_scope"),
    ],
)
async def test_invalid_jwt_is_refused(
    stack: Stack, key: str, claims: dict[str, Any], status: int, code: str
) -> None:
    async with gateway_client(stack.url, token(**claims)) as client:
        response = await client.post("/v1/completions", json=asking())
    assert response.status_code == status
    assert response.json()["error"]["code"] == code


async def test_jwt_signed_with_another_secret_is_refused(stack: Stack, key: str) -> None:
    forged = jwt.encode(
        {"iss": JWT_ISSUER, "aud": JWT_AUDIENCE, "exp": int(time.time()) + 60, "tenant": "acme"},
        "another secret that is long enough, too",
        algorithm="HS256",
    )
    async with gateway_client(stack.url, forged) as client:
        assert await status_of(client) == 401


async def test_no_credential_is_ever_logged(stack: Stack, key: str) -> None:
    signed, wrong = token(), token(aud="elsewhere")
    for credential in (key, signed, wrong, key[:-1], f"{key}x"):
        async with gateway_client(stack.url, credential) as client:
            await client.post("/v1/completions", json=asking(max_tokens=1))
            await client.post(f"/{credential}", json={})
            await client.post("/v1/completions", content=credential.encode())
            await client.post("/v1/completions", json=asking(user=credential, model=credential))
            del client.headers["authorization"]
            for dialect in ("llamacpp", "openai"):
                for name in ("x-api-key", "api-key"):
                    headers = {name: credential, "x-api-dialect": dialect}
                    body = asking(max_tokens=1)
                    await client.post("/v1/completions", json=body, headers=headers)
    logs = "".join(file.read_text(errors="replace") for file in stack.directory.glob("*.log"))
    assert "gateway" in logs or "worker" in logs
    for secret in (key[16:], signed, wrong, signed.rpartition(".")[2]):
        assert secret not in logs


async def test_every_route_shares_the_event_loop(stack: Stack, key: str) -> None:
    """No route, page or error is served to a caller above its share before its turn."""
    settings = Settings(database_url=SecretStr(stack.database_url), redis_url=stack.redis.url)
    async with running_management(settings) as gateway, AsyncExitStack() as exits:
        turns = gateway.services[LoopTurns]
        tenant = (await gateway.services[Authenticator].authenticate(f"Bearer {key}")).tenant_id
        callers = ("127.0.0.1", tenant)  # Before and after authentication.
        turns._steps.set_places(0)
        for caller in callers:
            waiting = asyncio.create_task(turns._steps.take(caller, size=MOST_ENTERING))
            exits.callback(waiting.cancel)
        asked, served = 0, []
        for app in (gateway.app, gateway.operators):
            calls = [("GET", "/nope"), ("PATCH", "/healthz")]
            for route in app.routes:
                methods = getattr(route, "methods", None) or {"GET"}
                calls += [(method, getattr(route, "path", "")) for method in methods]
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            headers = {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://gateway", headers=headers
            ) as client:
                for method, path in calls:
                    now = time.perf_counter()
                    turns._used("other", now)
                    for caller in callers:
                        turns.charge(caller, 1.0, now)
                    async with asyncio.timeout(PATIENCE_SECONDS):  # A response may never end.
                        response = await client.request(method, path)
                    asked += 1
                    if response.status_code != 429 or int(response.headers["retry-after"]) < 1:
                        served.append(f"{method} {path}: {response.status_code}")
        assert asked > 200
        assert not served
