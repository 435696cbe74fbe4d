"""Clients of a running gateway's management API."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from gateway.accounts.scopes import Scope
from tests.gateway.conftest import gateway_client
from tests.support.stack import Stack


@asynccontextmanager
async def caller(
    stack: Stack, tenant: str, *scopes: Scope, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of the first gateway with a key of the tenant that carries the scopes."""
    key = await asyncio.to_thread(stack.key, tenant, scopes=scopes, **options)
    async with gateway_client(stack.url, key) as client:
        yield client


async def status_with(url: str, key: str, **headers: str) -> int:
    """Return the status that a gateway answers a key with."""
    async with gateway_client(url, key) as client:
        return (await client.get("/v1/models", headers=headers)).status_code


async def send(client: httpx.AsyncClient, method: str, path: str, body: Any) -> httpx.Response:
    """Send any JSON, that which httpx refuses to write included."""
    headers = {"content-type": "application/json"}
    return await client.request(method, path, content=json.dumps(body), headers=headers)
