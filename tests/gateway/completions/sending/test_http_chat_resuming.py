"""Resumed, background and retried chats."""

import secrets
from typing import Any

import httpx
from redis.asyncio import Redis

from contract.messages import CallPiece
from contract.outcomes import FinishReason
from tests.gateway.chats import CHATS, chat, chatting, joined, serve_chats, tool
from tests.gateway.http_calls import message_of
from tests.gateway.resuming import Events, await_status, begin, begin_at, resume, status_of
from tests.support.cases import all_cases
from tests.support.events import numbered_events, parse_chunks

LONG: dict[str, Any] = {"max_tokens": 60, "n": 2, "temperature": 1}


def messages(*parts: Events) -> dict[int, dict[str, Any]]:
    """Join the messages of a stream that was read in parts without a gap."""
    events = [event for part in parts for event in part]
    assert [number for _, _, number in events] == list(range(1, len(events) + 1))
    body = b"".join(b"%b\nid: %b:%d\n\n" % (d, r.encode(), n) for d, r, n in events)
    return joined(parse_chunks(body))


_UNDISTURBED: dict[str, dict[int, dict[str, Any]]] = {}


async def undisturbed(client: httpx.AsyncClient, **parameters: Any) -> dict[int, dict[str, Any]]:
    """Return the messages of an undisturbed request, without members that are null.

    They are the same each time.
    """
    asked = repr(parameters)
    if asked not in _UNDISTURBED:
        choices = (await chat(client, **parameters)).json()["choices"]
        _UNDISTURBED[asked] = {
            choice["index"]: {k: v for k, v in choice["message"].items() if v is not None}
            for choice in choices
        }
    return _UNDISTURBED[asked]


@all_cases("elsewhere", [False, True], ids=["same-gateway", "other-gateway"])
@all_cases("number", [1, 7, 40])
async def test_stream_resumes_where_its_client_left(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, number: int, *, elsewhere: bool
) -> None:
    expected = await undisturbed(client, **LONG)
    first = await begin_at(CHATS, client, number, chatting(**LONG))
    rest = await resume(other_client if elsewhere else client, first[0][1], number)
    assert rest.status_code == 200
    assert messages(first, numbered_events(rest.content)) == expected


async def test_resumed_stream_of_calls_has_the_same_ids(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    response = await chat(client, name, tools=[tool()], background=True)
    request_id = response.json()["id"]
    claim = await worker.claim_one()
    for index in range(2):
        pieces = [CallPiece(index, "add", '{"a"'), CallPiece(index, "", ":1}")]
        for piece in pieces:
            said = worker.next_delta(claim, "", calls=[piece])
            await worker.send(claim.job.gateway, deltas=[said])
    last = worker.next_delta(claim, "", finish_reason=FinishReason.STOP)
    await worker.send(claim.job.gateway, deltas=[last])
    await worker.finish(claim)
    await await_status(client, request_id, "completed")
    whole = (await client.get(f"{CHATS}/{request_id}")).json()["choices"][0]
    everything = numbered_events((await resume(client, request_id, 0)).content)
    for skip in range(len(everything)):
        rest = numbered_events((await resume(other_client, request_id, skip)).content)
        assert rest == everything[skip:]
    calls = whole["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"a":1}'] * 2
    assert messages(everything)[0]["tool_calls"] == calls
    assert whole["finish_reason"] == "tool_calls"


async def test_post_with_the_last_event_id_resumes(client: httpx.AsyncClient) -> None:
    expected = await undisturbed(client, **LONG)
    first = await begin_at(CHATS, client, 5, chatting(**LONG))
    headers = {"last-event-id": f"{first[0][1]}:5"}
    rest = await client.post(CHATS, json={}, headers=headers)
    assert messages(first, numbered_events(rest.content)) == expected


async def test_response_is_found_under_the_path_of_its_kind_only(client: httpx.AsyncClient) -> None:
    ((_, chat_id, _),) = await begin_at(CHATS, client, 1, chatting())
    ((_, completion_id, _),) = await begin(client, 1)
    for path, foreign in (("/v1/completions", chat_id), (CHATS, completion_id)):
        last = {"last-event-id": f"{foreign}:1"}
        for response in (
            await client.get(f"{path}/{foreign}"),
            await client.get(f"{path}/{foreign}?stream=true"),
            await client.post(f"{path}/{foreign}/cancel"),
            await client.post(path, json={}, headers=last),
        ):
            message = message_of(
                response, status=404, kind="invalid_request_error", code="not_found"
            )
            assert foreign in message
    assert await status_of(client, chat_id) in ("in_progress", "completed", "incomplete")


async def test_background_chat_can_be_read_later_or_cancelled(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, store: "Redis"
) -> None:
    started = (await chat(client, background=True, max_tokens=4)).json()
    assert started["object"] == "chat.completion"
    assert started["status"] in ("queued", "in_progress")
    await await_status(other_client, started["id"], "completed")
    worker, name = await serve_chats(store)
    waiting = (await chat(client, name, background=True)).json()
    await worker.claim_one()
    cancelled = (await other_client.post(f"{CHATS}/{waiting['id']}/cancel")).json()
    assert cancelled["object"] == "chat.completion"
    assert cancelled["status"] in ("cancelled", "in_progress", "queued")
    await await_status(client, waiting["id"], "cancelled")


async def test_retried_request_gets_the_same_response(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient
) -> None:
    headers = {"idempotency-key": secrets.token_hex(8)}
    first = await client.post(CHATS, json=chatting(), headers=headers)
    again = await other_client.post(CHATS, json=chatting(), headers=headers)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json() == first.json()
    elsewhere = await client.post("/v1/completions", json=chatting(prompt="a"), headers=headers)
    assert elsewhere.status_code == 409
    assert elsewhere.json()["error"]["code"] == "idempotency_conflict"


async def test_retried_stream_is_replayed(client: httpx.AsyncClient) -> None:
    headers = {"idempotency-key": secrets.token_hex(8)}
    body = chatting(stream=True, n=2)
    first = await client.post(CHATS, json=body, headers=headers)
    again = await client.post(CHATS, json=body, headers=headers)
    assert numbered_events(again.content) == numbered_events(first.content)
