"""Streams resume after any event, at any gateway, while they run and for a while after."""

import asyncio
import secrets
from typing import Any

import httpx
from redis.asyncio import Redis

from contract.outcomes import FailureCode
from gateway.records.scopes import Scope
from tests.gateway.callers import caller
from tests.gateway.chats import CHATS, chatting
from tests.gateway.conftest import asking, complete, eventually, gateway_client, nothing_left, serve
from tests.gateway.http_calls import message_of
from tests.gateway.resuming import Reader, await_status, begin, begun, resume, status_of
from tests.support.cases import all_cases
from tests.support.events import DONE, numbered_events, parse_chunks, texts_by_choice
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack

UNKNOWN = "cmpl-" + "a" * 26
LONG = {"max_tokens": 60, "n": 2, "temperature": 1, "seed": 5}


_UNDISTURBED: dict[str, dict[int, str]] = {}


async def undisturbed(client: httpx.AsyncClient, **parameters: Any) -> dict[int, str]:
    """Return the texts of an undisturbed request. They are the same each time."""
    asked = repr(parameters)
    if asked not in _UNDISTURBED:
        body = (await complete(client, **parameters)).json()
        texts = {choice["index"]: choice["text"] for choice in body["choices"]}
        _UNDISTURBED[asked] = texts
    return _UNDISTURBED[asked]


def texts(*parts: list[tuple[bytes, str, int]]) -> dict[int, str]:
    """Join the texts of a stream that was read in parts without a gap."""
    events = [event for part in parts for event in part]
    assert [number for _, _, number in events] == list(range(1, len(events) + 1))
    assert len({request_id for _, request_id, _ in events}) == 1
    body = b"".join(b"%b\nid: %b:%d\n\n" % (d, r.encode(), n) for d, r, n in events)
    return texts_by_choice(parse_chunks(body))


@all_cases("elsewhere", [False, True], ids=["same-gateway", "other-gateway"])
@all_cases("number", [1, 7, 40])
async def test_stream_resumes_where_its_client_left(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, number: int, *, elsewhere: bool
) -> None:
    expected = await undisturbed(client, **LONG)
    first = await begin(client, number, **LONG)
    rest = await resume(other_client if elsewhere else client, first[0][1], number)
    assert rest.status_code == 200
    assert rest.headers["content-type"].startswith("text/event-stream")
    assert texts(first, numbered_events(rest.content)) == expected


async def test_stream_is_resumed_many_times(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient
) -> None:
    expected = await undisturbed(client, **LONG)
    parts = [await begin(client, 3, **LONG)]
    request_id = parts[0][0][1]
    while parts[-1][-1][0] != DONE:
        reader = (client, other_client)[len(parts) % 2]
        headers = {"last-event-id": f"{request_id}:{parts[-1][-1][2]}"}
        url = f"/v1/completions/{request_id}?stream=true"
        async with reader.stream("GET", url, headers=headers) as response:
            parts.append(await Reader(response).read(15))
    assert texts(*parts) == expected
    assert len(parts) > 4


async def test_concurrent_readers_read_the_same_events(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient
) -> None:
    async with client.stream(
        "POST", "/v1/completions", json=asking(stream=True, **LONG)
    ) as response:
        reader = Reader(response)
        ((_, request_id, _),) = await reader.read(1)
        others = [
            asyncio.create_task(resume(each, request_id, skip))
            for each in (client, other_client)
            for skip in (0, 5)
        ]
        whole = await reader.read_all()
    for skip, other in zip((0, 5, 0, 5), others, strict=True):
        assert numbered_events((await other).content) == whole[skip:]


async def test_post_with_the_header_resumes_and_runs_nothing(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient
) -> None:
    whole = numbered_events((await complete(client, stream=True, max_tokens=8)).content)
    headers = {"last-event-id": f"{whole[0][1]}:3"}
    for body in (asking(stream=True), {"nonsense": [1]}, {}):
        rest = await other_client.post("/v1/completions", json=body, headers=headers)
        assert rest.status_code == 200
        assert numbered_events(rest.content) == whole[3:]


@all_cases("path", ["/v1/completions", CHATS])
@all_cases(
    ("wish", "has_key", "is_background", "expected"),
    [
        ("", False, False, False),
        ("", True, False, True),
        ("", False, True, True),
        ("true", False, False, True),
        ("false", True, False, False),
        ("false", False, True, False),
    ],
)
async def test_events_have_ids_only_on_request(
    client: httpx.AsyncClient,
    path: str,
    *,
    wish: str,
    has_key: bool,
    is_background: bool,
    expected: bool,
) -> None:
    make = asking if path == "/v1/completions" else chatting
    body = make(stream=True, max_tokens=2, background=is_background)
    headers = {"x-event-ids": wish} if wish else {}
    if has_key:
        headers["idempotency-key"] = secrets.token_hex(8)
    new, retried = [await client.post(path, json=body, headers=headers) for _ in range(2)]
    assert ("idempotent-replayed" in retried.headers) is has_key
    request_id = numbered_events(new.content)[0][1]
    again = await client.get(f"{path}/{request_id}?stream=true", headers=headers)
    for response, has_ids in ((new, expected), (retried, expected), (again, True)):
        assert response.status_code == 200, response.text
        ids = response.content.count(b"\nid: ")
        assert ids == (len(numbered_events(response.content)) if has_ids else 0)
    assert numbered_events(again.content) == numbered_events(new.content)


async def test_other_value_of_the_header_for_ids_runs_nothing(client: httpx.AsyncClient) -> None:
    headers = {"x-event-ids": "yes", "x-api-dialect": "llamacpp"}
    response = await client.post("/v1/completions", json=asking(stream=True), headers=headers)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "code": 400,
        "message": "The header 'X-Event-Ids' must be true or false. Given: \"yes\".",
        "type": "invalid_request_error",
    }


async def test_starting_after_in_the_query_resumes(client: httpx.AsyncClient) -> None:
    whole = numbered_events((await complete(client, stream=True, max_tokens=8)).content)
    url = f"/v1/completions/{whole[0][1]}?stream=true"
    assert numbered_events((await client.get(f"{url}&starting_after=4")).content) == whole[4:]
    assert numbered_events((await client.get(url)).content) == whole


async def test_client_that_has_every_event_gets_an_empty_stream(client: httpx.AsyncClient) -> None:
    whole = numbered_events((await complete(client, stream=True, max_tokens=4)).content)
    for number in (len(whole), len(whole) + 9):
        response = await resume(client, whole[0][1], number)
        assert (response.status_code, response.content) == (204, b"")


async def test_client_ahead_of_the_stream_waits_for_new_events(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker = await serve(store, "steady")
    async with begun(client, worker, "steady", "a") as (response, claim):
        reader = Reader(response)
        ((_, request_id, _),) = await reader.read(1)
        rest = asyncio.create_task(resume(client, request_id, 1))
        await asyncio.sleep(0.1)
        assert not rest.done()
        await worker.conclude(claim, "b")
        events = numbered_events((await rest).content)
        assert await reader.read_all() == [*(await reader.read(1)), *events]
    assert [number for _, _, number in events] == [2, 3]


async def test_finished_stream_is_read_as_a_whole_response(client: httpx.AsyncClient) -> None:
    parameters = {"max_tokens": 8, "n": 2, "logprobs": 1}
    expected = (await complete(client, **parameters)).json()
    whole = numbered_events((await complete(client, stream=True, **parameters)).content)
    await await_status(client, whole[0][1], "completed")
    response = await client.get(f"/v1/completions/{whole[0][1]}")
    assert response.status_code == 200
    reported = response.json()
    assert reported["choices"] == expected["choices"]
    for body in (reported, expected):
        # The second request finds the prompt of the first one in the cache.
        del body["usage"]["prompt_tokens_details"]
    assert reported["usage"] == expected["usage"]
    assert response.headers["x-max-tokens-applied"] == "8"


async def test_stream_without_a_reader_stops(client: httpx.AsyncClient, store: "Redis") -> None:
    ((_, request_id, _),) = await begin(client, 1, max_tokens=1900)
    await await_status(client, request_id, "incomplete")
    await eventually(lambda: nothing_left(store, MODEL), what="the end of the work")
    assert await status_of(client, request_id) == "incomplete"


async def test_failure_is_returned_to_resuming_clients(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker = await serve(store, "failing-later")
    async with begun(client, worker, "failing-later", "a") as (response, claim):
        reader = Reader(response)
        await reader.read(1)
        await worker.fail(claim, FailureCode.ENGINE_ERROR)
        first = await reader.read_all()
    assert [number for _, _, number in first] == [1, 2, 3]
    request_id = first[0][1]
    for each in (client, other_client):
        assert numbered_events((await resume(each, request_id, 1)).content) == first[1:]
        assert numbered_events((await resume(each, request_id, 0)).content) == first
        assert (await resume(each, request_id, 3)).status_code == 204
        await await_status(each, request_id, "failed")
        status = (await each.get(f"/v1/completions/{request_id}")).json()
        assert status["error"]["code"] == "engine_dead"


async def test_cancelled_stream_ends_for_every_reader(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, store: "Redis"
) -> None:
    body = asking(stream=True, max_tokens=1900)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        reader = Reader(response)
        ((_, request_id, _),) = await reader.read(1)
        follower = asyncio.create_task(resume(other_client, request_id, 0))
        cancelled = await other_client.post(f"/v1/completions/{request_id}/cancel")
        assert cancelled.status_code == 200, cancelled.text
        assert cancelled.json()["status"] == "cancelled"
        events = await reader.read_all()
    assert b'"request_cancelled"' in events[-2][0]
    assert events[-1][0] == DONE
    followed = numbered_events((await asyncio.wait_for(follower, PATIENCE_SECONDS)).content)
    assert b'"request_cancelled"' in followed[-2][0]
    await eventually(lambda: nothing_left(store, MODEL), what="the end of the work")
    assert await status_of(client, request_id) == "cancelled"
    again = await client.post(f"/v1/completions/{request_id}/cancel", json={"what": "ever"})
    assert again.json()["status"] == "cancelled"


async def test_cancelling_a_finished_response_changes_nothing(client: httpx.AsyncClient) -> None:
    whole = numbered_events((await complete(client, stream=True, max_tokens=4)).content)
    request_id = whole[0][1]
    cancelled = await client.post(f"/v1/completions/{request_id}/cancel")
    assert cancelled.json()["status"] == "completed"
    assert numbered_events((await resume(client, request_id, 0)).content) == whole


async def test_left_stream_can_be_cancelled(client: httpx.AsyncClient) -> None:
    ((_, request_id, _),) = await begin(client, 1, max_tokens=1900)
    await await_status(client, request_id, "incomplete")
    assert (await client.post(f"/v1/completions/{request_id}/cancel")).json()[
        "status"
    ] == "cancelled"
    response = await resume(client, request_id, 1)
    assert b'"request_cancelled"' in response.content


@all_cases("path", ["", "?stream=true", "/cancel"])
@all_cases("request_id", [UNKNOWN, "x", "cmpl-1", "%00", "é", UNKNOWN * 50])
async def test_unknown_completion_is_not_found(
    client: httpx.AsyncClient, request_id: str, path: str
) -> None:
    method = "POST" if path == "/cancel" else "GET"
    response = await client.request(method, f"/v1/completions/{request_id}{path}")
    message_of(response, status=404, kind="invalid_request_error", code="not_found")


async def test_whole_responses_are_not_stored(client: httpx.AsyncClient) -> None:
    request_id = (await complete(client)).json()["id"]
    assert (await client.get(f"/v1/completions/{request_id}")).status_code == 404


async def test_completion_of_another_tenant_is_not_found(
    client: httpx.AsyncClient, stack: Stack
) -> None:
    whole = numbered_events((await complete(client, stream=True, max_tokens=4)).content)
    request_id = whole[0][1]
    async with caller(stack, "stranger", Scope.COMPLETIONS) as stranger:
        for path in ("", "?stream=true"):
            response = await stranger.get(f"/v1/completions/{request_id}{path}")
            message_of(response, status=404, kind="invalid_request_error", code="not_found")
        response = await stranger.post(f"/v1/completions/{request_id}/cancel")
        message_of(response, status=404, kind="invalid_request_error", code="not_found")
        response = await stranger.post(
            "/v1/completions", json=asking(), headers={"last-event-id": f"{request_id}:1"}
        )
        message_of(response, status=404, kind="invalid_request_error", code="not_found")


async def test_completion_of_a_forbidden_model_is_not_found(
    client: httpx.AsyncClient, stack: Stack
) -> None:
    whole = numbered_events((await complete(client, stream=True, max_tokens=4)).content)
    key = await asyncio.to_thread(stack.key, allowed_models=["another"])
    async with gateway_client(stack.url, key) as narrow:
        response = await resume(narrow, whole[0][1], 1)
    message_of(response, status=404, kind="invalid_request_error", code="not_found")


async def test_reading_requires_the_scope_of_completions(
    client: httpx.AsyncClient, stack: Stack
) -> None:
    async with caller(stack, "acme", Scope.USAGE) as reader:
        for response in (
            await reader.get(f"/v1/completions/{UNKNOWN}"),
            await reader.post(f"/v1/completions/{UNKNOWN}/cancel"),
        ):
            message_of(response, status=403, kind="permission_error", code="insufficient_scope")
    async with gateway_client(stack.url, None) as anonymous:
        assert (await anonymous.get(f"/v1/completions/{UNKNOWN}")).status_code == 401


async def test_malformed_event_id_is_named(client: httpx.AsyncClient) -> None:
    for method, url in (("POST", "/v1/completions"), ("GET", f"/v1/completions/{UNKNOWN}")):
        response = await client.request(method, url, json=asking(), headers={"last-event-id": "12"})
        expected = 400 if method == "POST" else 404
        assert response.status_code == expected, response.text
    whole = numbered_events((await complete(client, stream=True, max_tokens=2)).content)
    url = f"/v1/completions/{whole[0][1]}?stream=true"
    response = await client.get(url, headers={"last-event-id": "12"})
    message = message_of(
        response,
        status=400,
        kind="invalid_request_error",
        code="invalid_value",
        param="Last-Event-ID",
    )
    assert '"12"' in message


@all_cases("dialect", ["openai", "fireworks", "llamacpp", "mistralrs", "omlx", "vllm"])
async def test_stream_resumes_in_its_dialect(client: httpx.AsyncClient, dialect: str) -> None:
    response = await client.post(
        "/v1/completions",
        json=asking(stream=True, max_tokens=6),
        headers={"x-api-dialect": dialect},
    )
    whole = numbered_events(response.content)
    # A client that resumes need not name its dialect again.
    rest = numbered_events((await resume(client, whole[0][1], 2)).content)
    assert [number for _, _, number in rest] == [number for _, _, number in whole[2:]]
    assert rest[:-2] == whole[2:-2]
    for _, _, number in rest[-2:-1]:
        assert number == len(whole) - 1
    assert set(parse_keys(rest[-2][0])) == set(parse_keys(whole[-2][0]))


def parse_keys(event: bytes) -> list[str]:
    """Return the members of a chunk and of its usage."""
    body = httpx.Response(200, content=event.removeprefix(b"data: ")).json()
    return [*body, *(body.get("usage") or {})]
