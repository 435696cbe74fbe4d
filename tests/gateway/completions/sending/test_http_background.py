"""Background completions: they run without a client and are read later."""

import asyncio
import json
from typing import Any

import httpx
from redis.asyncio import Redis

from contract.outcomes import FailureCode
from tests.gateway.conftest import asking, complete, eventually, nothing_left, serve
from tests.gateway.http_calls import message_of
from tests.gateway.resuming import Events, Reader, await_status, resume, status_of
from tests.support.cases import all_cases
from tests.support.events import DONE, numbered_events
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import MODEL


async def started(client: httpx.AsyncClient, **parameters: Any) -> str:
    """Start a completion in the background and return its id."""
    response = await complete(client, background=True, **parameters)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "text_completion"
    assert body["background"] is True
    assert body["status"] in ("queued", "in_progress")
    return str(body["id"])


async def test_background_completion_is_read_later(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient
) -> None:
    expected = (await complete(client, n=2, max_tokens=20)).json()
    request_id = await started(client, n=2, max_tokens=20)
    await await_status(other_client, request_id, "completed")
    for reader in (client, other_client):
        reported = (await reader.get(f"/v1/completions/{request_id}")).json()
        assert reported["id"] == request_id
        assert reported["choices"] == expected["choices"]
        assert reported["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


async def test_background_response_equals_a_foreground_response(client: httpx.AsyncClient) -> None:
    response = await complete(client, background=True, max_tokens=4, nonsense=1)
    assert response.headers["x-max-tokens-applied"] == "4"
    assert response.headers["x-ignored-params"] == "nonsense"
    assert set(response.json()) == {"id", "object", "created", "model", "background", "status"}
    assert response.json()["model"] == MODEL


async def test_background_completion_reports_its_status(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker = await serve(store, "slow-background")
    request_id = await started(client, model="slow-background")
    claim = await worker.claim_one()
    assert claim.job.is_background
    assert await status_of(client, request_id) == "queued"
    await worker.say(claim, "a")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await status_of(client, request_id) != "in_progress":
            await asyncio.sleep(0.05)
    await worker.conclude(claim, "b")
    await await_status(client, request_id, "completed")
    reported = (await client.get(f"/v1/completions/{request_id}")).json()
    assert reported["choices"][0]["text"] == "ab"


async def test_background_stream_continues_without_its_client(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient
) -> None:
    expected = (await complete(client, max_tokens=40)).json()
    body = asking(stream=True, background=True, max_tokens=40)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        first = await Reader(response).read(3)
    request_id = first[0][1]
    await await_status(other_client, request_id, "completed")
    rest = numbered_events((await resume(other_client, request_id, 3)).content)
    assert text_of(first + rest) == expected["choices"][0]["text"]


async def test_background_stream_can_be_read_to_its_end(client: httpx.AsyncClient) -> None:
    response = await complete(client, stream=True, background=True, max_tokens=10)
    events = numbered_events(response.content)
    assert events[-1][0] == DONE
    await await_status(client, events[0][1], "completed")
    whole = (await client.get(f"/v1/completions/{events[0][1]}")).json()
    assert whole["usage"]["completion_tokens"] == 10


async def test_background_completion_can_be_read_as_a_stream(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient
) -> None:
    whole = (await complete(client, max_tokens=100)).json()
    request_id = await started(client, max_tokens=100)
    response = await resume(other_client, request_id, 0)
    events = numbered_events(response.content)
    assert text_of(events) == whole["choices"][0]["text"]


def text_of(events: Events) -> str:
    """Return the text of a stream with one choice."""
    assert [number for _, _, number in events] == list(range(1, len(events) + 1))
    assert events[-1][0] == DONE
    chunks = [json.loads(data.removeprefix(b"data: ")) for data, _, _ in events[:-1]]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def test_background_completion_is_cancelled_at_any_gateway(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, store: "Redis"
) -> None:
    request_id = await started(client, max_tokens=1900)
    cancelled = await other_client.post(f"/v1/completions/{request_id}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    await eventually(lambda: nothing_left(store, MODEL), what="the end of the work")
    assert await status_of(client, request_id) == "cancelled"


async def test_background_failure_is_stored(client: httpx.AsyncClient, store: "Redis") -> None:
    worker = await serve(store, "failing-background")
    request_id = await started(client, model="failing-background")
    await worker.fail(await worker.claim_one(), FailureCode.ENGINE_ERROR)
    await await_status(client, request_id, "failed")
    reported = (await client.get(f"/v1/completions/{request_id}")).json()
    assert reported["error"]["code"] == "engine_dead"


async def test_refused_background_request_has_its_error_status(
    client: httpx.AsyncClient,
) -> None:
    response = await complete(client, background=True, temperature=3)
    assert response.status_code == 400


@all_cases("value", [1, "true", []])
async def test_background_is_a_boolean(client: httpx.AsyncClient, value: Any) -> None:
    message_of(
        await complete(client, background=value),
        status=400,
        kind="invalid_request_error",
        code="invalid_value",
        param="background",
    )


@all_cases("value", [False, None])
async def test_background_false_is_a_foreground_request(
    client: httpx.AsyncClient, value: Any
) -> None:
    assert (await complete(client, background=value)).json()["choices"]
