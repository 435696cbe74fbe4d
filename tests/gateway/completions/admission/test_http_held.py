"""Requests for a model whose workers are started by waiting jobs, while no worker runs."""

import asyncio
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract import keys
from gateway.records.usage_record import Outcome, UsageRecord, decode_usage
from tests.gateway.chats import CHATS, chatting
from tests.gateway.conftest import GATEWAY_SETTINGS, asking, eventually, gateway_client, serve
from tests.gateway.http_calls import message_of
from tests.support.events import DONE, KEEP_ALIVES, split_events
from tests.support.stack import Stack

SLEEPER = "sleeper"
COMPLETIONS = "/v1/completions"
WORKER = {
    "SLUICE_ENGINE": "scripted",
    "SLUICE_MODEL_NAME": SLEEPER,
    "SLUICE_SCALES_TO_ZERO": "true",
}


@pytest.fixture
async def asleep(stack: Stack, impatient_client: httpx.AsyncClient) -> None:
    """A model whose only worker has stopped."""
    await asyncio.to_thread(stack.start_worker, SLEEPER, **WORKER)
    assert await asyncio.to_thread(stack.stop, SLEEPER) == 0

    async def sleeps() -> bool:
        page = (await impatient_client.get(f"/v1/models/{SLEEPER}")).json()
        return bool(page.get("state") == "sleeping")

    await eventually(sleeps, what="the model being asleep")


async def _read(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], begun: asyncio.Event
) -> bytes:
    """Return the body of a response; `begun` is set when its first bytes have arrived."""
    content = b""
    async with client.stream("POST", path, json=body) as response:
        async for part in response.aiter_raw():
            begun.set()
            content += part
    assert response.status_code == 200, content
    return content


@pytest.mark.usefixtures("asleep")
async def test_requests_wait_until_the_model_is_loaded(
    stack: Stack, impatient_client: httpx.AsyncClient
) -> None:
    bodies = [
        (path, make(model=SLEEPER, stream=stream))
        for path, make in ((COMPLETIONS, asking), (CHATS, chatting))
        for stream in (False, True)
    ]
    begun = [asyncio.Event() for _ in bodies]
    requests = [
        asyncio.create_task(_read(impatient_client, *each, first))
        for each, first in zip(bodies, begun, strict=True)
    ]

    async def waits() -> bool:
        page = (await impatient_client.get(f"/v1/models/{SLEEPER}")).json()
        assert page["loading_seconds"] >= 1
        return bool(page["state"] == "model_loading" and not page["ready"])

    await eventually(waits, what="the jobs being in the queue")
    for (_, body), first in zip(bodies, begun, strict=True):
        if body["stream"]:
            await first.wait()  # For its first keep-alive.
    await asyncio.to_thread(stack.start_worker, SLEEPER, **WORKER)
    answers = await asyncio.gather(*requests)
    await asyncio.to_thread(stack.stop, SLEEPER)
    for (_, body), content in zip(bodies, answers, strict=True):
        if body["stream"]:
            assert KEEP_ALIVES.match(content, len(b"data: {"))
            assert split_events(content)[-1] == DONE
        else:
            assert b'"finish_reason"' in content


async def test_request_whose_model_never_wakes_fails_and_costs_nothing(
    stack: Stack, store: Redis
) -> None:
    await serve(store, "never", scales_to_zero=True, ttl_ms=1)
    url = await asyncio.to_thread(
        stack.start_gateway, "hasty", **GATEWAY_SETTINGS, SLUICE_QUEUE_TIMEOUT="PT1S"
    )
    stack.gateways.remove(url)
    tenant = "held"
    key = await asyncio.to_thread(stack.key, tenant)
    async with gateway_client(url, key) as client:
        response = await client.post(COMPLETIONS, json=asking(model="never"))
    message_of(response, status=503, kind="service_unavailable", code="no_worker")
    assert int(response.headers["retry-after"]) > 0
    bucket = keys.bucket_of(tenant)

    async def records() -> list[UsageRecord]:
        entries: Any = await store.xrange(keys.usage(bucket))
        found = [decode_usage(fields[b"u"]) for _, fields in entries]
        return [each for each in found if each.tenant_id == tenant]

    await eventually(records, what="the settlement")
    (record,) = await records()
    assert (record.outcome, record.prompt_tokens, record.cost_micros) == (Outcome.FAILED, 0, 0)
    await asyncio.to_thread(stack.stop, "hasty")
