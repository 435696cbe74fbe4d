"""Dialect, strictness and default model: by header, key, tenant and model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract.dialect import Dialect
from tests.gateway.conftest import eventually, gateway_client, serve
from tests.gateway.tenants import change_tenant
from tests.support.stack import MODEL, Stack

ESTIMATE = "/v1/completions:estimate"
SPOKEN = "dialects-spoken"


@asynccontextmanager
async def acting_as(stack: Stack, tenant: str, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client with a key of a tenant, which is created if necessary."""
    key = await asyncio.to_thread(stack.key, tenant, **options)
    async with gateway_client(stack.url, key) as client:
        yield client


async def dialect_of(client: httpx.AsyncClient, model: str, header: str | None = None) -> str:
    """Return the dialect in which a request is read."""
    headers = {} if header is None else {"x-api-dialect": header}
    response = await client.post(ESTIMATE, json={"model": model, "prompt": "a"}, headers=headers)
    assert response.status_code == 200, response.text
    return str(response.json()["dialect"])


async def test_dialect_comes_from_header_key_tenant_model_or_server(
    stack: Stack, store: "Redis"
) -> None:
    await serve(store, SPOKEN, dialect="llamacpp")
    async with acting_as(stack, "speakers") as client:
        assert await dialect_of(client, MODEL) == "openai"
        assert await dialect_of(client, SPOKEN) == "llamacpp"
        await change_tenant(stack, "speakers", dialect=Dialect.OMLX)

        async def is_applied() -> bool:
            return await dialect_of(client, SPOKEN) == "omlx"

        await eventually(is_applied, what="the change of the tenant's dialect")
        async with acting_as(stack, "speakers", dialect=Dialect.FIREWORKS) as own:
            assert await dialect_of(own, SPOKEN) == "fireworks"
            assert await dialect_of(own, SPOKEN, "vllm") == "vllm"


async def test_key_in_llamacpps_header_is_accepted_in_its_dialects_only(
    stack: Stack, store: "Redis"
) -> None:
    await serve(store, SPOKEN, dialect="llamacpp")
    plain = await asyncio.to_thread(stack.key, "api-keys")
    own = await asyncio.to_thread(stack.key, "api-keys", dialect=Dialect.LLAMACPP)

    async def send(key: str, model: str = "", **headers: str) -> httpx.Response:
        async with gateway_client(stack.url, None) as client:
            client.headers.update({"x-api-key": key, **headers})
            if not model:
                return await client.get("/v1/models")
            return await client.post(ESTIMATE, json={"model": model, "prompt": "a"})

    for model in ("", MODEL, SPOKEN):
        assert (await send(own, model)).status_code == 200
        assert (await send(plain, model, **{"x-api-dialect": "llamacpp-2026"})).status_code == 200
        refused = await send(own, model, **{"x-api-dialect": "vllm"})
        assert refused.status_code == 401
        assert "Given: dialect vllm. Send 'Authorization: Bearer" in refused.text
        assert refused.headers["www-authenticate"] == "Bearer"
    assert (await send(plain, SPOKEN)).status_code == 200
    assert (await send(plain, MODEL)).status_code == 401
    assert (await send(plain)).status_code == 401
    invalid = await send(f"{own[:-1]}-", MODEL)
    assert (invalid.status_code, "malformed" in invalid.text) == (401, True)
    # Authorization takes precedence, valid or not.
    assert (await send("x", MODEL, authorization=f"Bearer {plain}")).status_code == 200
    assert (await send(own, MODEL, authorization="Bearer x")).status_code == 401
    assert "No API key was given" in (await send("", MODEL)).text


async def test_key_in_azures_header_is_accepted_in_every_dialect(stack: Stack, key: str) -> None:
    for dialect in Dialect:
        headers = {"api-key": key, "x-api-dialect": dialect}
        async with gateway_client(stack.url, None) as client:
            listed = await client.get("/v1/models", headers=headers)
            body = {"model": MODEL, "prompt": "a"}
            estimate = await client.post(ESTIMATE, json=body, headers=headers)
            refused = await client.post(ESTIMATE, json=body, headers=headers | {"api-key": "x"})
        assert (listed.status_code, estimate.status_code) == (200, 200), dialect
        assert refused.status_code == 401


async def test_unknown_dialect_of_the_header_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/v1/completions", json={"prompt": "a"}, headers={"x-api-dialect": "klingon"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Api-Dialect"


async def test_conflict_23_unknown_parameter_is_refused_for_strict_tenants(
    stack: Stack,
) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "zeta": 1}
    async with acting_as(stack, "exact") as client:
        lenient = await client.post("/v1/completions", json=body)
        assert (lenient.status_code, lenient.headers["x-ignored-params"]) == (200, "zeta")
        await change_tenant(stack, "exact", strict_parameters=True)

        async def is_refused() -> bool:
            strict = await client.post(ESTIMATE, json=body)
            return strict.status_code == 400

        await eventually(is_refused, what="the change of strictness")
        refused = await client.post("/v1/completions", json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (
            *(400, "unknown_parameter", "zeta"),
        )
        del body["zeta"]
        assert (await client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize("dialect", ["llamacpp", "mistralrs", "vllm"])
async def test_conflict_24_request_without_a_model_gets_the_tenants(
    stack: Stack, store: "Redis", dialect: str
) -> None:
    await serve(store, SPOKEN)
    headers = {"x-api-dialect": dialect}
    body = {"prompt": "a", "max_tokens": 1}
    async with acting_as(stack, f"owner-{dialect}") as client:
        unclear = await client.post("/v1/completions", json=body, headers=headers)
        assert unclear.status_code == (422 if dialect == "mistralrs" else 400)
        assert "'model'" in unclear.text
        await change_tenant(stack, f"owner-{dialect}", default_model=MODEL)

        async def is_served() -> bool:
            answer = await client.post("/v1/completions", json=body, headers=headers)
            return answer.status_code == 200 and answer.json()["model"] == MODEL

        await eventually(is_served, what="the change of the default model")
        required = await client.post("/v1/completions", json=body)
        assert required.status_code == 400
        assert required.json()["error"]["code"] == "missing_required_parameter"
    async with acting_as(stack, "narrow", allowed_models=[MODEL]) as client:
        assert (await client.post("/v1/completions", json=body, headers=headers)).json()[
            "model"
        ] == MODEL


async def test_conflict_25_user_is_never_an_identity(stack: Stack) -> None:
    async with acting_as(stack, "modest", allowed_models=["another"]) as client:
        for headers in ({"user": "acme"}, {"x-user": "acme"}):
            response = await client.post(
                "/v1/completions",
                json={"model": MODEL, "prompt": "a", "user": "acme"},
                headers=headers,
            )
            assert response.status_code == 404
