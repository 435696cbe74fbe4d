"""Clients of a running gateway's management API."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import httpx
from sqlalchemy import update

from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import ApiKeyRow
from gateway.platform.redis_client import connect
from gateway.records.scopes import Scope
from gateway.records.times import utc_now
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


@asynccontextmanager
async def operator_caller(
    stack: Stack, tenant: str, *scopes: Scope
) -> AsyncIterator[httpx.AsyncClient]:
    """Open such a client of the first gateway's listener for operators."""
    key = await asyncio.to_thread(stack.key, tenant, scopes=scopes)
    async with gateway_client(stack.operators, key) as client:
        yield client


async def let_expire(stack: Stack, key: str) -> None:
    """Let a key expire; gateways that cache it receive that a moment later."""
    database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
    try:
        async with database.writing() as transaction:
            past = utc_now() - timedelta(minutes=1)
            expire = update(ApiKeyRow).where(ApiKeyRow.prefix == key[3:15])
            expired = expire.values(expires_at=past).returning(ApiKeyRow.id)
            key_id = (await transaction.execute(expired)).scalar_one()
        await ChangeAnnouncer(redis).key_changed(key_id)
    finally:
        await redis.aclose()
        await database.aclose()


async def status_with(url: str, key: str, **headers: str) -> int:
    """Return the status of a request with a key."""
    async with gateway_client(url, key) as client:
        return (await client.get("/v1/models", headers=headers)).status_code


async def send(client: httpx.AsyncClient, method: str, path: str, body: Any) -> httpx.Response:
    """Send any JSON, that which httpx refuses to write included."""
    headers = {"content-type": "application/json"}
    return await client.request(method, path, content=json.dumps(body), headers=headers)
