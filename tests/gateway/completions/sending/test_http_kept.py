"""Kept responses over HTTP: continued, referred to, listed, deleted, and refused to others."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from redis.asyncio import Redis

from contract import keys
from contract.messages import CallPiece
from contract.outcomes import FinishReason
from contract.queue import JobClaim
from gateway.records.scopes import Scope
from tests.gateway.callers import caller
from tests.gateway.chats import PARSERS, prompt_of, serve_chats
from tests.gateway.completions.sending.test_http_responses import (
    ASKED,
    RESPONSES,
    TEMPLATE,
    TOOLS,
    await_end,
    events_of,
)
from tests.gateway.conftest import gateway_client
from tests.support.cases import all_cases
from tests.support.fake_worker import FakeWorker, chat_format
from tests.support.stack import Stack

Body = dict[str, Any]
MISSING = "resp_" + "a" * 26
QUESTION: Body = {"role": "user", "content": "What is here?"}


async def say(worker: FakeWorker, *, calls: bool = True) -> JobClaim:
    """Answer a request with reasoning, text and a call, or with text alone."""
    claim = await worker.claim_one()
    if not calls:
        await worker.conclude(claim, "Nothing.")
        return claim
    call = [CallPiece(0, "exec_command", '{"cmd": "ls"}')]
    said = worker.next_delta(claim, "Reading.", reasoning="Look.", reasoning_tokens=1)
    end = worker.next_delta(claim, "", calls=call, finish_reason=FinishReason.STOP)
    await worker.send(claim.job.gateway, deltas=[said, end])
    await worker.finish(claim)
    return claim


async def respond(
    client: httpx.AsyncClient, worker: FakeWorker, *, calls: bool = False, **body: Any
) -> tuple[Body, JobClaim]:
    """Create a response, and return it with the job of its worker."""
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(client.post(RESPONSES, json=ASKED | body))
        claim = await say(worker, calls=calls)
    answer = asking.result()
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        last: Body = events_of(answer.content)[-1]["response"]
        return last, claim
    response: Body = answer.json()
    if body.get("background"):
        response = await await_end(client, response["id"])
    return response, claim


def outputs(response: Body) -> list[Body]:
    """Return the outputs of all calls of a response."""
    return [
        {"type": "function_call_output", "call_id": each["call_id"], "output": "a.txt"}
        for each in response["output"]
        if "call_id" in each
    ]


async def served(store: "Redis") -> tuple[FakeWorker, str]:
    """Serve a model whose prompts show reasoning and calls."""
    return await serve_chats(store, form=chat_format(TEMPLATE, **PARSERS), template=TEMPLATE)


@all_cases(
    "how",
    [
        {},
        {"stream": True, "include": ["reasoning.encrypted_content"]},
        {"background": True, "reasoning": {"summary": "auto"}},
    ],
)
async def test_continued_prompt_has_the_tokens_of_the_whole_conversation(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, store: "Redis", how: Body
) -> None:
    worker, model = await served(store)
    known: Body = {"model": model, "tools": TOOLS} | how
    first, _ = await respond(
        client, worker, calls=True, input=[QUESTION], instructions="Be brief.", **known
    )
    assert first["store"] is True
    results = outputs(first)
    named = {"previous_response_id": first["id"]}
    second, _ = await respond(other_client, worker, calls=True, input=results, **named, **known)
    assert (second["previous_response_id"], second["instructions"]) == (first["id"], None)
    last = [*outputs(second), {"role": "user", "content": "And now?"}]
    named = {"previous_response_id": second["id"]}
    third, continued = await respond(client, worker, input=last, **named, **known)
    items = [QUESTION, *first["output"], *results, *second["output"], *last]
    sent, whole = await respond(client, worker, input=items, store=False, **known)
    assert [*continued.job.prompt_token_ids] == [*whole.job.prompt_token_ids]
    assert prompt_of(whole).count("Look.:Reading.:exec_command") == 2
    assert "Be brief." not in prompt_of(whole)
    assert third["usage"] == sent["usage"]
    asked = ASKED | known | named | {"input": last, "stream": False}
    counted = (await client.post(f"{RESPONSES}/input_tokens", json=asked)).json()
    estimated = (await client.post(f"{RESPONSES}:estimate", json=asked)).json()
    tokens = len(whole.job.prompt_token_ids)
    assert counted["input_tokens"] == estimated["prompt_tokens"] == tokens


async def test_references_stand_for_items_of_several_responses(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, model = await served(store)
    known: Body = {"model": model, "tools": TOOLS}
    first, _ = await respond(client, worker, calls=True, input=[QUESTION], **known)
    listed = (await client.get(f"{RESPONSES}/{first['id']}/input_items")).json()["data"]
    items = [QUESTION, *first["output"], *outputs(first)]
    second, _ = await respond(client, worker, calls=True, input=items, **known)
    items += [*second["output"], *outputs(second)]
    references = [
        {"type": "item_reference", "id": each["id"]} if "id" in each else each for each in items[1:]
    ]
    references.insert(0, {"type": "item_reference", "id": listed[0]["id"]})
    _, referring = await respond(other_client, worker, input=references, store=False, **known)
    _, whole = await respond(client, worker, input=items, store=False, **known)
    assert [*referring.job.prompt_token_ids] == [*whole.job.prompt_token_ids]


async def test_kept_response_is_read_listed_and_deleted(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, store: "Redis", stack: Stack
) -> None:
    worker, model = await served(store)
    first, _ = await respond(client, worker, model=model, input="Hello", metadata={"a": "b"})
    path = f"{RESPONSES}/{first['id']}"
    # A response that is neither streamed nor in the background is nowhere else.
    assert not await store.exists(keys.content(first["id"]))
    assert (await other_client.get(path)).json() == first
    assert (await other_client.post(f"{path}/cancel")).json() == first
    streamed = await client.get(path, params={"stream": "true"})
    assert (streamed.status_code, "without 'stream'" in streamed.text) == (404, True)
    named = {"previous_response_id": first["id"], "model": model}
    second, _ = await respond(
        client, worker, **named, input=[{"role": "assistant", "content": "Hm."}, QUESTION]
    )
    path = f"{RESPONSES}/{second['id']}"
    oldest = (await client.get(f"{path}/input_items", params={"order": "asc"})).json()
    shown = [
        (each["type"], each.get("role"), each["content"][0]["type"], each["content"][0]["text"])
        for each in oldest["data"]
    ]
    assert shown == [
        ("message", "user", "input_text", "Hello"),
        ("message", "assistant", "output_text", "Nothing."),
        ("message", "assistant", "output_text", "Hm."),
        ("message", "user", "input_text", "What is here?"),
    ]
    ids = [each["id"] for each in oldest["data"]]
    assert len({*ids}) == 4
    assert ids[1] == first["output"][0]["id"]
    pages, after = list[Body](), None
    while after is None or pages[-1]["has_more"]:
        query = {"limit": "3"} | ({} if after is None else {"after": after})
        pages.append((await other_client.get(f"{path}/input_items", params=query)).json())
        after = pages[-1]["last_id"]
    assert [[each["id"] for each in page["data"]] for page in pages] == [ids[:0:-1], ids[:1]]
    assert (pages[0]["object"], pages[0]["first_id"]) == ("list", ids[3])
    # The files of the account do not show it, although it counts as one of them.
    assert (await client.get(f"/v1/files/{second['id']}")).status_code == 404
    assert second["id"] not in (await client.get("/v1/files")).text
    folder = Path(stack.environment["SLUICE_FILE_STORE"]) / second["id"]
    assert len([*folder.iterdir()]) == 2
    deleted = {"id": second["id"], "object": "response", "deleted": True}
    assert (await other_client.delete(path)).json() == deleted
    assert not folder.exists()
    gone = [await client.get(path), await client.get(f"{path}/input_items")]
    assert [each.status_code for each in (*gone, await client.delete(path))] == [404] * 3
    # The one before it stays.
    assert (await client.get(f"{RESPONSES}/{first['id']}")).json() == first


@all_cases(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "a"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_1"}, "after"),
        ({"before": "msg_1"}, "before"),
    ],
)
async def test_bad_page_of_items_is_refused(
    client: httpx.AsyncClient, store: "Redis", query: dict[str, str], param: str
) -> None:
    worker, model = await served(store)
    first, _ = await respond(client, worker, model=model)
    answer = await client.get(f"{RESPONSES}/{first['id']}/input_items", params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_background_response_is_deleted_with_what_is_kept(
    client: httpx.AsyncClient, store: "Redis", stack: Stack
) -> None:
    worker, model = await served(store)
    first, _ = await respond(client, worker, model=model, background=True)
    folder = Path(stack.environment["SLUICE_FILE_STORE"]) / first["id"]
    assert folder.exists()
    await client.delete(f"{RESPONSES}/{first['id']}")
    assert not folder.exists()


async def unknown(client: httpx.AsyncClient, model: str, response: Body) -> None:
    """Check that a caller gets the same errors for a response as for one that never existed."""
    for response_id, item in (
        (response["id"], response["output"][0]["id"]),
        (MISSING, f"msg_{'a' * 26}_0"),
    ):
        asked = ASKED | {"model": model, "previous_response_id": response_id}
        answer = await client.post(RESPONSES, json=asked)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert (error["code"], error["param"], error["type"]) == (
            "previous_response_not_found",
            "previous_response_id",
            "invalid_request_error",
        )
        asked = ASKED | {"model": model, "input": [{"type": "item_reference", "id": item}]}
        answer = await client.post(RESPONSES, json=asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "input[0]")
        for path in (response_id, f"{response_id}/input_items"):
            answer = await client.get(f"{RESPONSES}/{path}")
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == (
                f'The response "{response_id}" does not exist or has expired.'
            )
        assert (await client.delete(f"{RESPONSES}/{response_id}")).status_code == 404


async def test_response_is_unknown_to_other_projects_tenants_and_models(
    stack: Stack, store: "Redis"
) -> None:
    worker, model = await served(store)
    async with caller(stack, "acme", Scope.ADMIN, Scope.KEYS) as manager:
        made = [await manager.post("/v1/projects", json={"name": name}) for name in ("k", "l")]
    mine, other = (each.json()["id"] for each in made)
    async with caller(stack, "acme", Scope.COMPLETIONS, project_id=mine) as client:
        first, _ = await respond(client, worker, model=model)
        for tenant, options in (
            ("acme", {"project_id": other}),
            ("globex", {}),
            ("acme", {"project_id": mine, "allowed_models": (f"{model}-2",)}),
        ):
            async with caller(stack, tenant, Scope.COMPLETIONS, **options) as stranger:
                if "allowed_models" in options:
                    assert (await stranger.get(f"{RESPONSES}/{first['id']}")).status_code == 404
                else:
                    await unknown(stranger, model, first)
        assert (await client.get(f"{RESPONSES}/{first['id']}")).json() == first


async def test_response_that_is_not_kept_or_runs_is_unknown(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, model = await served(store)
    first, _ = await respond(client, worker, model=model, store=False)
    assert first["store"] is False
    await unknown(client, model, first)
    begun = await client.post(RESPONSES, json=ASKED | {"model": model, "background": True})
    running = begun.json()
    claim = await worker.claim_one()
    asked = ASKED | {"model": model, "previous_response_id": running["id"]}
    answer = await client.post(RESPONSES, json=asked)
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    await client.delete(f"{RESPONSES}/{running['id']}")
    await worker.conclude(claim, "Late.")
    assert (await client.post(RESPONSES, json=asked)).status_code == 400


async def test_conversation_is_continued_up_to_the_size_of_a_body(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, model = await serve_chats(store, context_window=10_000_000)
    texts = [{"role": "user", "content": [{"type": "input_text", "text": "a" * 110_000}]}]
    first, _ = await respond(client, worker, model=model, input=texts, metadata={"a": "b"})
    named = {"model": model, "previous_response_id": first["id"]}
    second, _ = await respond(client, worker, **named, input=texts)
    named["previous_response_id"] = second["id"]
    third, _ = await respond(client, worker, **named, input=texts)
    named["previous_response_id"] = third["id"]
    answer = await client.post(RESPONSES, json=ASKED | named)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "previous_response_id")
    assert "at most 300000 bytes. Given: at least 33" in error["message"]


async def test_an_item_is_named_up_to_the_size_of_a_body(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, model = await serve_chats(store, context_window=10_000_000)
    first, _ = await respond(client, worker, model=model, input="a" * 100_000)
    listed = (await client.get(f"{RESPONSES}/{first['id']}/input_items")).json()["data"]
    reference = {"type": "item_reference", "id": listed[0]["id"]}
    answer = await client.post(RESPONSES, json=ASKED | {"model": model, "input": [reference] * 3})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input")
    assert "bytes, of at most 300000" in error["message"]


@pytest.fixture(scope="module")
def forgetful(stack: Stack) -> str:
    """URL of a gateway that keeps no responses."""
    url = stack.start_gateway("forgetful", SLUICE_RESPONSES_RETENTION="PT0S")
    stack.gateways.remove(url)
    return url


async def test_deployment_may_keep_nothing(
    forgetful: str, key: str, client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, model = await served(store)
    kept, _ = await respond(client, worker, model=model)
    async with gateway_client(forgetful, key) as other:
        first, _ = await respond(other, worker, model=model)
        assert first["store"] is False
        for asked, named in (
            ({}, None),
            ({"store": False}, None),
            ({"store": True}, "store"),
            ({"store": True, "background": True}, None),
        ):
            async with asyncio.TaskGroup() as tasks:
                body = ASKED | {"model": model} | asked
                asking = tasks.create_task(other.post(RESPONSES, json=body))
                await say(worker, calls=False)
            assert asking.result().headers.get("x-ignored-params") == named
        reference = {"type": "item_reference", "id": kept["output"][0]["id"]}
        for refused in ({"previous_response_id": kept["id"]}, {"input": [reference]}):
            answer = await other.post(RESPONSES, json=ASKED | {"model": model} | refused)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "unsupported_parameter"
        assert (await other.get(f"{RESPONSES}/{kept['id']}")).status_code == 404


async def test_response_of_a_killed_gateway_is_kept_by_the_next_one(
    stack: Stack, key: str, client: httpx.AsyncClient
) -> None:
    url = stack.start_gateway("dying")
    stack.gateways.remove(url)
    async with gateway_client(url, key) as first:
        asked = ASKED | {"background": True, "max_output_tokens": 300}
        begun = (await first.post(RESPONSES, json=asked)).json()
        while (await first.get(f"{RESPONSES}/{begun['id']}")).json()["status"] == "queued":
            await asyncio.sleep(0.02)
    stack.processes["dying"].kill()
    ended = await await_end(client, begun["id"])
    assert ended["usage"]["output_tokens"] == 300
    named = {"previous_response_id": begun["id"]}
    answer = await client.post(RESPONSES, json=ASKED | named)
    assert answer.status_code == 200, answer.text
    items = [{"role": "user", "content": ASKED["input"]}, *ended["output"]]
    items.append({"role": "user", "content": ASKED["input"]})
    whole = await client.post(RESPONSES, json=ASKED | {"input": items, "store": False})
    assert answer.json()["usage"]["input_tokens"] == whole.json()["usage"]["input_tokens"]


async def test_library_continues_a_response(stack: Stack, key: str, store: "Redis") -> None:
    worker, model = await served(store)
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as openai:
        create = openai.responses.create
        asked: Any = {"model": model, "tools": TOOLS}
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(create(**asked, input="Hello"))
            await say(worker)
        first = asking.result()
        results: Any = outputs(json.loads(first.to_json()))
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(
                create(**asked, previous_response_id=first.id, input=results)
            )
            claim = await say(worker, calls=False)
        assert asking.result().previous_response_id == first.id
        assert prompt_of(claim).splitlines() == [
            "user::Hello:",
            'assistant:Look.:Reading.:exec_command{"cmd": "ls"};',
            "tool::a.txt:",
        ]
        include: Any = ["reasoning.encrypted_content", "message.output_text.logprobs"]
        listing = openai.responses.input_items.list(asking.result().id, include=include)
        items = [each async for each in listing]
        assert [each.type for each in items] == [
            "function_call_output",
            "function_call",
            "message",
            "reasoning",
            "message",
        ]
        found = await openai.responses.retrieve(first.id, include=include)
        assert found.output == first.output
        await openai.responses.delete(first.id)
