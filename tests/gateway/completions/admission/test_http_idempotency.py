"""Requests that are retried with the same Idempotency-Key run once."""

import asyncio
import secrets
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from common import clock
from contract import keys
from contract.outcomes import FailureCode
from gateway.records.scopes import Scope
from tests.gateway.callers import caller
from tests.gateway.conftest import MOST_WAITING_OF_TENANT, asking, complete, eventually, serve
from tests.gateway.http_calls import message_of
from tests.gateway.resuming import await_status, resume
from tests.support.cases import all_cases
from tests.support.events import KEEP_ALIVES, numbered_events
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack


@pytest.fixture
def idempotency_key() -> str:
    """A key that was never used."""
    return f"order-{secrets.token_hex(8)}"


async def ask(client: httpx.AsyncClient, key: str | bytes, **parameters: Any) -> httpx.Response:
    """Ask for a completion with an Idempotency-Key."""
    value = key if isinstance(key, bytes) else key.encode()
    return await client.post(
        "/v1/completions", json=asking(**parameters), headers={b"idempotency-key": value}
    )


def is_replayed(response: httpx.Response) -> bool:
    """Whether a response is that of an earlier request."""
    return "idempotent-replayed" in response.headers


async def test_whole_response_is_replayed(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, idempotency_key: str
) -> None:
    # Without a seed, another run would give another text.
    parameters = {"seed": None, "temperature": 1, "n": 2, "logprobs": 1, "max_tokens": 12}
    first = await ask(client, idempotency_key, **parameters)
    assert first.status_code == 200, first.text
    assert not is_replayed(first)
    for each in (client, other_client, client):
        again = await ask(each, idempotency_key, **parameters)
        assert again.status_code == 200
        assert is_replayed(again)
        assert again.content == first.content


async def test_stream_is_replayed(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, idempotency_key: str
) -> None:
    parameters = {"stream": True, "seed": None, "temperature": 1, "max_tokens": 12}
    first = await ask(client, idempotency_key, **parameters)
    again = await ask(other_client, idempotency_key, **parameters)
    assert is_replayed(again)
    assert numbered_events(again.content) == numbered_events(first.content)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_concurrent_duplicates_run_once_and_get_one_response(
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    idempotency_key: str,
    *,
    stream: bool,
) -> None:
    parameters = {"stream": stream, "seed": None, "temperature": 1, "max_tokens": 30}

    async def insist(each: httpx.AsyncClient) -> httpx.Response:
        """Retry until the first request is admitted; others wait at most two seconds for it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (answer := await ask(each, idempotency_key, **parameters)).status_code == 409:
                assert answer.json()["error"]["code"] == "idempotency_in_progress"
        return answer

    answers = await asyncio.gather(*(insist(each) for each in (client, other_client) * 3))
    assert [answer.status_code for answer in answers] == [200] * 6
    assert len({answer.content for answer in map(without_keep_alives, answers)}) == 1
    assert sorted(map(is_replayed, answers)) == [False] + [True] * 5


def without_keep_alives(response: httpx.Response) -> httpx.Response:
    """Return a stream without its keep-alives."""
    content = KEEP_ALIVES.sub(b"", response.content)
    return httpx.Response(response.status_code, headers=response.headers, content=content)


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 9},
        {"stream": True},
        {"background": True},
        {"user": "somebody"},
        {"headers": {"x-api-dialect": "llamacpp"}},
    ],
    ids=["parameter", "stream", "background", "unimportant", "dialect"],
)
async def test_another_request_with_the_same_key_is_refused(
    client: httpx.AsyncClient, idempotency_key: str, change: dict[str, Any]
) -> None:
    assert (await ask(client, idempotency_key)).status_code == 200
    headers = {"idempotency-key": idempotency_key, **change.pop("headers", {})}
    refused = await client.post("/v1/completions", json=asking(**change), headers=headers)
    assert refused.status_code == 409, refused.text
    assert refused.headers["x-should-retry"] == "false"
    error = refused.json()["error"]
    assert "Idempotency-Key" in error["message"]
    if not headers.get("x-api-dialect"):
        assert (error["type"], error["code"]) == ("conflict", "idempotency_conflict")


async def test_same_request_may_be_formatted_differently(
    client: httpx.AsyncClient, idempotency_key: str
) -> None:
    first = await ask(client, idempotency_key, n=1, logprobs=0)
    body = dict(reversed(asking(n=1, logprobs=0, user=None).items()))
    again = await client.post(
        "/v1/completions", json=body, headers={"idempotency-key": idempotency_key}
    )
    assert is_replayed(again)
    assert again.json() == first.json()


async def test_idempotency_keys_are_separate_by_tenant(
    client: httpx.AsyncClient, stack: Stack, idempotency_key: str
) -> None:
    first = await ask(client, idempotency_key)
    async with caller(stack, "stranger", Scope.COMPLETIONS) as stranger:
        other = await ask(stranger, idempotency_key, max_tokens=3)
    assert other.status_code == 200
    assert not is_replayed(other)
    assert other.json()["id"] != first.json()["id"]


async def test_idempotency_keys_and_responses_are_separate_by_project(
    client: httpx.AsyncClient, stack: Stack, idempotency_key: str
) -> None:
    async with caller(stack, "acme", Scope.KEYS) as manager:
        made = [await manager.post("/v1/projects", json={"name": name}) for name in ("a", "b")]
    seen = [(await ask(client, idempotency_key)).json()["id"]]
    for project in made:
        project_id = project.json()["id"]
        async with caller(stack, "acme", Scope.COMPLETIONS, project_id=project_id) as inside:
            # Another body: with a shared key this would be a conflict.
            own = await ask(inside, idempotency_key, max_tokens=3)
            assert (own.status_code, is_replayed(own)) == (200, False)
            assert is_replayed(await ask(inside, idempotency_key, max_tokens=3))
            for other in seen:
                path = f"/v1/completions/{other}"
                assert (await inside.get(path)).status_code == 404
                assert (await inside.post(f"{path}/cancel")).status_code == 404
                assert (await resume(inside, other, 1)).status_code == 404
        seen.append(own.json()["id"])
        assert (await client.get(f"/v1/completions/{seen[-1]}")).json() == own.json()


async def test_key_without_the_model_is_refused_despite_a_stored_response(
    client: httpx.AsyncClient, stack: Stack, idempotency_key: str
) -> None:
    assert (await ask(client, idempotency_key)).status_code == 200
    async with caller(stack, "acme", Scope.COMPLETIONS, allowed_models=["another"]) as limited:
        expected = (await complete(limited)).json()
        for parameters in ({}, {"max_tokens": 9}, {"stream": True}):
            refused = await ask(limited, idempotency_key, **parameters)
            assert (refused.status_code, refused.json()) == (404, expected)


async def test_same_body_for_another_model_is_another_request(
    stack: Stack, store: "Redis", idempotency_key: str
) -> None:
    await serve(store, "its-only-model")
    headers = {"x-api-dialect": "llamacpp", "idempotency-key": idempotency_key}
    for model, status in ((MODEL, 200), ("its-only-model", 409)):
        async with caller(stack, "acme", Scope.COMPLETIONS, allowed_models=[model]) as limited:
            # The gateway looks for a model that is named, but not for one that it is to choose.
            named = await limited.post("/v1/completions:estimate", json=asking(model=model))
            assert named.status_code == 200
            # In this dialect any name stands for the only model that a key may use.
            body = asking(model="whatever")
            answer = await limited.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status, answer.text


async def test_refused_request_releases_its_key(
    client: httpx.AsyncClient, idempotency_key: str
) -> None:
    assert (await ask(client, idempotency_key, temperature=3)).status_code == 400
    assert (await ask(client, idempotency_key, model="none")).status_code == 404
    served = await ask(client, idempotency_key)
    assert served.status_code == 200
    assert not is_replayed(served)


async def test_request_refused_by_a_full_queue_releases_its_key(
    client: httpx.AsyncClient, store: "Redis", idempotency_key: str
) -> None:
    worker = await serve(store, "full")
    waiting = [
        asyncio.create_task(complete(client, model="full")) for _ in range(MOST_WAITING_OF_TENANT)
    ]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while int(await store.get(keys.waiting("full")) or 0) < MOST_WAITING_OF_TENANT:
            await asyncio.sleep(0.02)
    for stream in (False, True):
        refused = await ask(client, idempotency_key, model="full", stream=stream)
        assert refused.status_code == 429, refused.text
    for _ in waiting:
        claim = await worker.claim_one()
        await worker.conclude(claim, "a")
    assert {each.status_code for each in await asyncio.gather(*waiting)} == {200}
    request = asyncio.create_task(ask(client, idempotency_key, model="full"))
    claim = await worker.claim_one()
    await worker.conclude(claim, "a")
    assert (await request).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_failed_request_runs_anew(
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    store: "Redis",
    idempotency_key: str,
    *,
    stream: bool,
) -> None:
    model = f"failing-once-{stream}".lower()
    worker = await serve(store, model)
    request = asyncio.create_task(ask(client, idempotency_key, model=model, stream=stream))
    await worker.fail(await worker.claim_one(), FailureCode.ENGINE_ERROR)
    assert (await request).status_code == 503
    again = asyncio.create_task(ask(other_client, idempotency_key, model=model, stream=stream))
    claim = await worker.claim_one()
    await worker.conclude(claim, "a")
    answer = await again
    assert answer.status_code == 200
    assert not is_replayed(answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_abandoned_request_resumes_when_it_is_retried(
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    store: "Redis",
    idempotency_key: str,
    *,
    stream: bool,
) -> None:
    model = f"left-{stream}".lower()
    worker = await serve(store, model)
    parameters = {"model": model, "stream": stream}
    leaving = asyncio.create_task(ask(client, idempotency_key, **parameters))
    claim = await worker.claim_one()
    await worker.say(claim, "a")
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await eventually(lambda: store.llen(keys.control(model, worker.name)), what="the worker's end")
    await worker.drop(claim, tokens=1)
    returning = asyncio.create_task(ask(other_client, idempotency_key, **parameters))
    claim = await worker.claim_one()
    assert claim.attempt > 1
    await worker.conclude(claim, "b")
    again = await returning
    assert again.status_code == 200, again.text
    assert is_replayed(again)
    if stream:
        events = numbered_events(again.content)
        assert [number for _, _, number in events] == list(range(1, len(events) + 1))
        request_id = events[0][1]
        await await_status(client, request_id, "completed")
        reported = (await client.get(f"/v1/completions/{request_id}")).json()
    else:
        reported = again.json()
    assert [choice["text"] for choice in reported["choices"]] == ["ab"]
    assert reported["usage"]["completion_tokens"] == 2


async def test_replayed_stream_can_be_resumed(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, idempotency_key: str
) -> None:
    first = numbered_events((await ask(client, idempotency_key, stream=True)).content)
    again = numbered_events((await ask(other_client, idempotency_key, stream=True)).content)
    assert again == first
    assert numbered_events((await resume(client, first[0][1], 2)).content) == first[2:]


async def test_background_request_with_a_key_is_started_once(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, idempotency_key: str
) -> None:
    first = await ask(client, idempotency_key, background=True, max_tokens=20)
    again = await ask(other_client, idempotency_key, background=True, max_tokens=20)
    assert is_replayed(again)
    assert again.json()["id"] == first.json()["id"]
    assert again.json()["status"] in ("queued", "in_progress", "completed")


async def test_cancelled_request_stays_cancelled(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, idempotency_key: str
) -> None:
    first = await ask(client, idempotency_key, background=True, max_tokens=1900)
    await client.post(f"/v1/completions/{first.json()['id']}/cancel")
    again = await ask(other_client, idempotency_key, background=True, max_tokens=1900)
    assert again.json()["status"] == "cancelled"


@all_cases(
    "value",
    [b"", b"a b", b"x" * 256, b"tab\tinside", "é".encode()],
    ids=["empty", "space", "long", "tab", "beyond-ascii"],
)
async def test_wrong_key_is_named(client: httpx.AsyncClient, value: bytes) -> None:
    message = message_of(
        await ask(client, value),
        status=400,
        kind="invalid_request_error",
        code="invalid_value",
        param="Idempotency-Key",
    )
    assert "1 to 255 visible ASCII characters" in message


@all_cases("value", ["!", "x" * 255, "~`{}[]\"'\\"])
async def test_any_visible_key_is_accepted(client: httpx.AsyncClient, value: str) -> None:
    assert (await ask(client, value, prompt=secrets.token_hex(4))).status_code in (200, 409)


async def _claimed(client: httpx.AsyncClient, store: "Redis", key: str, *, age_ms: int = 0) -> str:
    """Let a key stand for a request that a living gateway admits; return its record."""
    first = await ask(client, key)
    entry = await _entry_of(store, first.json()["id"])
    await store.hset(entry, "request", "cmpl-being-admitted")
    record = keys.request(int(entry.partition(b":")[2].partition(b"}")[0]), "cmpl-being-admitted")
    fields: dict[Any, Any] = {
        "created_ms": clock.now_ms() - age_ms,
        "state": "claimed",
        "owner": "slow",
    }
    await store.hset(record, mapping={**fields, "term": 1, "key": entry})
    await store.set(keys.gateway_alive("slow"), 1, ex=600)
    return record


async def test_key_of_a_request_during_admission_is_taken(
    client: httpx.AsyncClient, store: "Redis", idempotency_key: str
) -> None:
    record = await _claimed(client, store, idempotency_key)
    refused = await ask(client, idempotency_key)
    assert refused.status_code == 409, refused.text
    assert refused.json()["error"]["code"] == "idempotency_in_progress"
    assert refused.headers["retry-after"] == "1"
    await store.delete(keys.gateway_alive("slow"))
    await store.hdel(record, "state")
    assert (await ask(client, idempotency_key)).status_code == 409, "the request is admitted"
    await store.hset(record, "state", "claimed")
    assert not is_replayed(served := await ask(client, idempotency_key))
    assert served.status_code == 200
    # If the gateway was only slow, it does not admit its request any more.
    assert await store.hget(record, "state") == b"released"


async def test_key_of_a_request_that_is_never_admitted_is_free_after_a_minute(
    client: httpx.AsyncClient, store: "Redis", idempotency_key: str
) -> None:
    await _claimed(client, store, idempotency_key, age_ms=61_000)
    assert not is_replayed(served := await ask(client, idempotency_key))
    await store.delete(keys.gateway_alive("slow"))
    assert served.status_code == 200


async def _entry_of(store: "Redis", request_id: str) -> bytes:
    async for entry in store.scan_iter(match="{b:*}:idempotency:*"):
        if await store.hget(entry, "request") == request_id.encode():
            found: bytes = entry
            return found
    raise AssertionError("no entry")


async def test_key_is_not_stored_in_plain_text(
    client: httpx.AsyncClient, store: "Redis", idempotency_key: str
) -> None:
    await ask(client, idempotency_key)
    async for key in store.scan_iter(match="*"):
        assert idempotency_key.encode() not in key
