"""CORS: the second gateway allows two origins; tenants allow further ones."""

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from gateway.platform.settings import Settings
from gateway.process.openapi.schemas import RESPONSE_HEADERS
from tests.gateway.conftest import MAX_BODY_BYTES, ORIGIN, asking, eventually, gateway_client
from tests.gateway.tenants import change_tenant
from tests.support.stack import Stack

PAGE = "https://page.example"
"""Origin that only a tenant allows."""
OF_BROWSERS = "authorization,content-type,x-api-dialect,x-stainless-lang,x-stainless-retry-count"


async def preflight(
    client: httpx.AsyncClient, origin: str, path: str = "/v1/completions"
) -> httpx.Response:
    """Ask, as a browser does, whether a page may send a POST with headers of OpenAI's client."""
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": OF_BROWSERS,
    }
    return await client.request("OPTIONS", path, headers=headers)


def cors_headers(response: httpx.Response) -> dict[str, str]:
    """Return the headers of a response that CORS adds."""
    return {
        name: value
        for name, value in response.headers.items()
        if name == "vary" or name.startswith("access-control-")
    }


async def exchanges(client: httpx.AsyncClient, origin: str) -> dict[int | str, httpx.Response]:
    """Return responses of all kinds, by status."""
    headers = {"origin": origin}
    post = client.post
    return {
        200: await post("/v1/completions", json=asking(), headers=headers),
        "stream": await post("/v1/completions", json=asking(stream=True), headers=headers),
        400: await post("/v1/completions", json=asking(n=0), headers=headers),
        401: await client.get("/v1/models", headers=headers | {"authorization": "Bearer x"}),
        404: await client.get("/nothing", headers=headers),
        413: await post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1), headers=headers),
    }


async def test_origin_of_the_deployment_gets_headers_on_every_response(
    other_client: httpx.AsyncClient,
) -> None:
    asked = await preflight(other_client, ORIGIN)
    assert asked.status_code == 200
    allowed = cors_headers(asked)
    assert allowed["access-control-allow-origin"] == ORIGIN
    assert allowed["access-control-allow-headers"] == OF_BROWSERS
    assert {"GET", "POST", "PATCH", "DELETE"} <= set(
        allowed["access-control-allow-methods"].split(", ")
    )
    assert "access-control-allow-credentials" not in allowed
    for status, response in (await exchanges(other_client, ORIGIN)).items():
        assert response.status_code == (200 if status == "stream" else status)
        found = cors_headers(response)
        assert (found["access-control-allow-origin"], found["vary"]) == (ORIGIN, "Origin"), status
        exposed = found["access-control-expose-headers"].split(", ")
        assert set(response.headers) & set(RESPONSE_HEADERS) <= set(exposed)
        assert {"x-request-id", "retry-after", "x-max-tokens-applied"} <= set(exposed)


async def test_other_origins_and_the_default_change_nothing(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient
) -> None:
    for each, origin in ((client, ORIGIN), (other_client, "https://evil.example")):
        refused = await preflight(each, origin)
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        for response in (refused, *(await exchanges(each, origin)).values()):
            assert cors_headers(response) == {}
    assert cors_headers(await other_client.get("/v1/models")) == {}


async def test_operators_never_allow_an_origin(stack: Stack) -> None:
    async with gateway_client(stack.operators_of(stack.gateways[1]), None) as operators:
        assert (await preflight(operators, ORIGIN, "/admin/tenants")).status_code == 405
        response = await operators.get("/healthz", headers={"origin": ORIGIN})
        assert cors_headers(response) == {}


async def test_origin_of_a_tenant_is_allowed_for_its_keys_only(stack: Stack, key: str) -> None:
    own = await asyncio.to_thread(stack.key, "with-pages")
    async with gateway_client(stack.url, own) as client:

        async def answers(status: int) -> bool:
            return (await preflight(client, PAGE)).status_code == status

        assert await answers(405)
        await change_tenant(stack, "with-pages", cors_origins=(PAGE,))
        await eventually(lambda: answers(200), what="the preflight being allowed")
        assert cors_headers(await preflight(client, PAGE))["access-control-allow-origin"] == PAGE
        for status, response in (await exchanges(client, PAGE)).items():
            # Only a valid key identifies the tenant.
            is_known = status not in (401, 404)
            assert cors_headers(response).get("access-control-allow-origin") == (
                PAGE if is_known else None
            ), status
        others = {"origin": PAGE, "authorization": f"Bearer {key}"}
        assert cors_headers(await client.get("/v1/models", headers=others)) == {}
        await change_tenant(stack, "with-pages", cors_origins=())
        await eventually(lambda: answers(405), what="the preflight being rejected again")


def test_origins_of_the_deployment_are_checked_and_normalized() -> None:
    def read(text: str) -> Any:
        return Settings(cors_origins=text).cors_origins  # type: ignore[arg-type]

    assert read("HTTPS://App.example:443, *,http://[::1]:80,app://x:7") == (
        *("https://app.example", "*"),
        *("http://[::1]", "app://x:7"),
    )
    assert read("") == ()
    with pytest.raises(ValidationError, match=r"(?s)cors_origins.*Given: 'https://a\.example/'"):
        read("https://a.example/")
