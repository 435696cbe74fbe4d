"""Requests of which nothing is kept after their end, besides the usage record."""

import asyncio
import secrets
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gateway.records.scopes import Scope
from tests.gateway.callers import caller
from tests.gateway.conftest import complete, eventually, nothing_left, serve
from tests.gateway.tenants import all_have_received_changes, change_tenant
from tests.support.cases import all_cases
from tests.support.stack import MODEL, Stack

HEADER = {"x-zero-retention": "true"}
KEEPING: list[tuple[str, dict[str, Any], dict[str, str], str]] = [
    ("/v1/completions", {"prompt": "a", "background": True}, {}, "background"),
    ("/v1/completions", {"prompt": "a"}, {"idempotency-key": "k"}, "Idempotency-Key"),
    ("/v1/responses", {"input": "a", "store": True}, {}, "store"),
]


async def _found(store: Redis, secret: str) -> list[bytes]:
    """Return the keys whose values contain a text."""
    return [key async for key in store.scan_iter() if secret in str(await _value(store, key))]


async def _value(store: Redis, key: bytes) -> Any:
    """Return a value as its commands do; DUMP would compress it."""
    match await store.type(key):
        case b"stream":
            return await store.xrange(key)
        case b"hash":
            return await store.hgetall(key)
        case b"list":
            return await store.lrange(key, 0, -1)
        case b"string":
            return await store.get(key)
        case _:
            return None  # Names and numbers.


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_text_is_not_in_redis_after_the_end(
    client: httpx.AsyncClient, store: Redis, stream: bool
) -> None:
    worker = await serve(store, f"forgets-{secrets.token_hex(4)}")
    model, ids = worker.queue.model, list[str]()
    for headers in (HEADER, {}):
        secret = secrets.token_hex(12)
        body = {"model": model, "prompt": "a", "stream": stream}
        asking = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        claim = await worker.claim_one()
        await worker.say(claim, secret)
        assert await _found(store, secret)
        await worker.conclude(claim, " end")
        response = await asking
        assert secret in response.text
        ids.append(claim.job.id.rpartition("-")[0])

        async def is_gone(text: str = secret) -> bool:
            return not await _found(store, text)

        if headers:
            await eventually(is_gone, what="the text leaving Redis")
        elif stream:
            assert not await is_gone()
    assert await nothing_left(store, model)
    statuses = [(await client.get(f"/v1/completions/{each}")).status_code for each in ids]
    assert statuses == [404, 200 if stream else 404]


@all_cases(("path", "body", "headers", "param"), KEEPING)
async def test_request_that_keeps_something_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    refused = await client.post(path, json=body | {"model": MODEL}, headers=headers | HEADER)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_tenant_with_zero_retention_keeps_nothing(stack: Stack) -> None:
    tenant = f"forgetful-{secrets.token_hex(4)}"
    async with caller(stack, tenant, Scope.COMPLETIONS) as customer:
        await change_tenant(stack, tenant, zero_retention=True)
        await all_have_received_changes(stack)
        streamed = await complete(customer, stream=True)
        assert streamed.status_code == 200, streamed.text
        request_id = streamed.text.split('"id":"', 1)[1].split('"', 1)[0]
        assert (await customer.get(f"/v1/completions/{request_id}")).status_code == 404
        for path, body, headers, param in KEEPING:
            refused = await customer.post(path, json=body | {"model": MODEL}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        body = {"model": MODEL, "input": "a", "max_output_tokens": 2}
        assert (await customer.post("/v1/responses", json=body)).json()["store"] is False
        weaker = await customer.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "a"},
            headers={"x-zero-retention": "false"},
        )
        assert weaker.json()["error"]["param"] == "x-zero-retention"
        line = {"custom_id": "a", "params": {"model": MODEL, "max_tokens": 1, "messages": []}}
        batch = await customer.post("/v1/messages/batches", json={"requests": [line]})
        assert batch.status_code == 403, batch.text
