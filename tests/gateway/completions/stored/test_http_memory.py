"""The memory of Redis over HTTP: stored bytes count, and no tenant fills it for the others."""

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from redis.asyncio import Redis

from common.tasks import end_task
from contract import keys
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.messages.request import MessageRequest
from gateway.dialects.parameters import Endpoints
from gateway.dialects.responses.request import ResponseRequest
from gateway.dialects.unknown_members import OBJECTS
from gateway.records.scopes import Scope
from tests.gateway.chats import FEATURES, PARSERS
from tests.gateway.conftest import eventually, gateway_client
from tests.gateway.limits.building import counted_bytes
from tests.support.cases import all_cases
from tests.support.fake_worker import FakeWorker, chat_format
from tests.support.redis_server import BUNDLED, SYSTEM
from tests.support.stack import MODEL, Stack, running_stack

MEBIBYTE = 1 << 20
TENANTS = ("acme", "other", "hog-1", "hog-2", "hog-3", "hog-4", "hog-5")
RESPONSE_BYTES = 2_500
"""The most that counts of a response beside what it stores."""
EXCESS = 1.1 if SYSTEM else 1.3
"""The allocator of the bundled Redis has no size classes."""
LARGE_BYTES = 100_000
HELLO = [{"role": "user", "content": "Hello"}]

BODIES: dict[str, tuple[type[BaseModel], Endpoints, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, Endpoints.COMPLETIONS, {"prompt": "x"}),
    "/v1/chat/completions": (ChatCompletionRequest, Endpoints.CHATS, {"messages": HELLO}),
    "/v1/messages": (MessageRequest, Endpoints.MESSAGES, {"messages": HELLO, "max_tokens": 4}),
    "/v1/responses": (ResponseRequest, Endpoints.RESPONSES, {"input": "Hello"}),
}
"""The body and the least parameters of each path."""

VALUES: dict[str, Any] = {
    "role": "user",
    "content": "x",
    "text": "x",
    "name": "f",
    "id": "i",
    "call_id": "c",
    "arguments": "{}",
    "input": {},
    "output": "x",
    "parameters": {"type": "object"},
    "input_schema": {"type": "object"},
    "summary": [],
}
"""Valid values of members, if an object has them."""


def large(size: int) -> str:
    """Return a text that compression makes a quarter smaller at most."""
    return base64.b64encode(secrets.token_bytes(size * 3 // 4)).decode()


def example(endpoints: Endpoints, place: str, member: str, size: int) -> dict[str, Any]:
    """Return parameters with an object at a place, whose member is a text of a size."""
    return _around(endpoints, place, _object(endpoints, place) | {member: large(size)})


def _object(endpoints: Endpoints, place: str) -> dict[str, Any]:
    members, kind = OBJECTS[endpoints][place], place.rpartition(".")[2].partition(":")[2]
    found = {name: VALUES[name] for name in members.read if name in VALUES}
    if kind:
        found["role" if place.startswith("messages") else "type"] = kind
    return found


def _around(endpoints: Endpoints, place: str, value: Any) -> dict[str, Any]:
    outer, _, name = place.rpartition(".")
    name, _, is_list = name.partition(":")[0].partition("[")
    value = [value] if is_list else value
    if outer:
        return _around(endpoints, outer, _object(endpoints, outer) | {name: value})
    if name != "content":
        return {name: value}
    message = {"role": "user", "content": value}
    return {"input" if endpoints is Endpoints.RESPONSES else "messages": [message]}


def key_of(stack: Stack, tenant: str) -> str:
    """Return a key that also shows the limits of its tenant."""
    return stack.key(tenant, scopes=frozenset({Scope.COMPLETIONS, Scope.USAGE}))


@pytest.fixture(scope="module")
def alone() -> Iterator[Stack]:
    """A gateway with a Redis of its own."""
    with running_stack(executable=SYSTEM or BUNDLED) as stack:
        stack.start_gateway()
        for tenant in TENANTS:
            key_of(stack, tenant)
        yield stack


@asynccontextmanager
async def serving(redis: "Redis") -> AsyncIterator[None]:
    """Serve all requests, with one token each."""
    worker = FakeWorker(redis, MODEL)
    await worker.announce(features=FEATURES, chat=chat_format(**PARSERS), context_window=1_000_000)

    async def serve() -> None:
        while True:
            for claim in await worker.claim():
                await worker.conclude(claim, "a")

    serving = asyncio.create_task(serve())
    try:
        yield
    finally:
        await end_task(serving)


async def sizes_of(redis: "Redis", tenant: str, request_id: str) -> tuple[int, int]:
    """Return the bytes that a response has in Redis, and those that count for its tenant."""
    names = (keys.content(request_id), keys.journal(request_id))
    stored = [await redis.memory_usage(name, samples=0) or 0 for name in names]
    return sum(stored), await counted_bytes(redis, tenant, request_id)


async def _is_counted(sizes: Callable[[], Awaitable[tuple[int, int]]]) -> bool:
    stored, counted = await sizes()
    return 0 < stored <= counted <= EXCESS * stored + RESPONSE_BYTES


def _parameter(name: str, size: int, *, is_list: bool = False) -> dict[str, Any]:
    return {name: [large(size)] if is_list else large(size)}


def _long_name(endpoints: Endpoints, place: str, size: int) -> dict[str, Any]:
    return example(endpoints, place, large(size), 4)


def bodies_of(path: str) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Yield for each parameter, and each member of an object, what sets it to a text of a size."""
    model, endpoints, _ = BODIES[path]
    for name in model.model_fields:
        if name != "model":
            yield partial(_parameter, name)
            yield partial(_parameter, name, is_list=True)
    yield lambda size: {f"unknown-{number}": large(size) for number in range(3)}
    yield lambda size: {large(size): 1}
    for place, members in OBJECTS[endpoints].items():
        for name in (*members.read, *members.without_effect, "unknown"):
            yield partial(example, endpoints, place, name)
        yield partial(_long_name, endpoints, place)


@all_cases("path", list(BODIES))
async def test_every_member_that_is_stored_counts(alone: Stack, path: str) -> None:
    sizes, accepted = (LARGE_BYTES, 1_000, 60), 0
    async with (
        Redis.from_url(alone.redis.url) as redis,
        gateway_client(alone.url, key_of(alone, "acme")) as client,
        serving(redis),
    ):
        for body_of in bodies_of(path):
            # The largest size that the parameter accepts.
            for size in sizes:
                body = {"model": MODEL, **BODIES[path][2], **body_of(size)}
                headers = {"idempotency-key": secrets.token_hex(8)}
                answer = await client.post(path, json=body, headers=headers)
                if answer.status_code == 200:
                    break
                assert answer.status_code in (400, 404), (answer.text, body.keys())
            else:
                continue
            accepted += 1
            count = partial(sizes_of, redis, "acme", answer.json()["id"])
            # A client receives its response before its end is stored.
            what = f"the count of a response with {str(body)[:200]}"
            await eventually(partial(_is_counted, count), what=what)
    assert accepted > 10


def filling(path: str) -> dict[str, Any]:
    """Return parameters that take much memory, most of which no engine reads."""
    if path == "/v1/responses":
        return {"tools": [{"type": "web_search", "x": large(2 * MEBIBYTE)}]}
    if path == "/v1/completions":
        return {"prompt": large(100_000)}
    return {"messages": [{"role": "user", "content": large(100_000)}]}


async def post(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], *, is_stored: bool = False
) -> httpx.Response:
    headers = {"idempotency-key": secrets.token_hex(8)} if is_stored else {}
    body = {"model": MODEL, **BODIES[path][2], **body}
    return await client.post(path, json=body, headers=headers)


async def fill(client: httpx.AsyncClient, *paths: str) -> list[str]:
    """Store responses of each of some APIs until the limit; return their ids."""
    ids = []
    for path in paths:
        while (answer := await post(client, path, filling(path), is_stored=True)).is_success:
            ids.append(answer.json()["id"])
        assert answer.status_code == 429, answer.text
        assert "stored bytes" in answer.json()["error"]["message"]
    return ids


async def used_of(client: httpx.AsyncClient) -> int:
    """Return the stored bytes of a client's tenant."""
    answer = await client.get("/v1/limits")
    assert answer.status_code == 200, answer.text
    (tenant,) = [each for each in answer.json()["scopes"] if each["scope"] == "tenant"]
    return int(tenant["limits"]["stored_bytes"]["used"])


@pytest.mark.slow
async def test_tenants_at_their_limits_leave_memory_for_others(alone: Stack) -> None:
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(Redis.from_url(alone.redis.url))
        hogs = [
            await stack.enter_async_context(gateway_client(alone.url, key_of(alone, name)))
            for name in TENANTS[2:]
        ]
        other = await stack.enter_async_context(gateway_client(alone.url, key_of(alone, "other")))
        await stack.enter_async_context(serving(redis))
        stack.push_async_callback(redis.config_set, "maxmemory", 0)
        memory = await redis.info("memory")
        most = memory["used_memory"] + 64 * MEBIBYTE
        await redis.config_set("maxmemory", most)
        # The gateway reads the memory once a second.
        await asyncio.sleep(1.1)
        ids = [await fill(hogs[0], *reversed(BODIES))]
        for hog in hogs[1:]:
            # Until then, what the last one has taken counts twice.
            await asyncio.sleep(2.2)
            ids.append(await fill(hog, "/v1/responses"))
        assert all(ids)
        assert most / 3 < (await redis.info("memory"))["used_memory"] < 0.8 * most
        for path in BODIES:
            for body in ({}, {"stream": True}, filling(path) | {"tools": None}):
                assert (await post(other, path, body)).status_code == 200, (path, body.keys())
            assert (await post(other, path, {}, is_stored=True)).status_code == 200, path

        # A stream at the limit runs, but is not stored.
        stream = await post(hogs[0], "/v1/completions", {"stream": True})
        assert stream.status_code == 200
        event = json.loads(stream.text.partition("\n")[0].removeprefix("data: "))
        assert not await redis.exists(keys.content(event["id"]))
        assert (await post(hogs[0], "/v1/completions", {}, is_stored=True)).status_code == 429

        # What ends or frees something works even if Redis is full.
        slow = FakeWorker(redis, "slow", name="slow-1")
        await slow.announce()
        started = {"model": "slow", "background": True}
        running = (await post(other, "/v1/completions", started)).json()
        slow_claim = await slow.claim_one()
        stored, counted = await sizes_of(redis, "other", running["id"])
        stored += await redis.memory_usage(keys.job("slow", f"{running['id']}-0")) or 0
        assert stored <= counted <= stored + RESPONSE_BYTES
        usage = keys.usage(keys.bucket_of("other"))
        records = await redis.xlen(usage)
        await redis.config_set("maxmemory", 1)
        before = await used_of(hogs[0])
        deleted = await hogs[0].delete(f"/v1/responses/{ids[0][0]}")
        assert deleted.status_code == 200, deleted.text
        assert await used_of(hogs[0]) < before - MEBIBYTE
        cancelled = await other.post(f"/v1/completions/{running['id']}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        await slow.drop(slow_claim, tokens=0)

        async def is_settled() -> bool:
            return bool(await redis.xlen(usage) > records)

        await eventually(is_settled, what="the settlement")
