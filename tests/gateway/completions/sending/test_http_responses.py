"""OpenAI's Responses over HTTP: with OpenAI's library, resumed, in the background, refused."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from redis.asyncio import Redis

from contract import keys
from contract.messages import CallPiece, Feature, WorkerState
from contract.outcomes import FailureCode, FinishReason
from tests.gateway.chats import FEATURES, PARSERS, prompt_of, serve_chats
from tests.gateway.limits.building import counted_bytes
from tests.support.cases import all_cases
from tests.support.fake_worker import FakeWorker, chat_format
from tests.support.patience import OPENING_PATIENCE_SECONDS, PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack

RESPONSES = "/v1/responses"
PATCH = '*** Begin Patch\n*** Add File: a "b".txt\n+é\n*** End Patch\n'
WHOLE: dict[str, Any] = {"description": None, "parameters": {"type": "object"}, "strict": False}
TOOLS: list[Any] = [
    {"type": "function", "name": "exec_command", **WHOLE},
    {"type": "custom", "name": "apply_patch", "description": "Edits files."},
    {
        "type": "namespace",
        "name": "mcp",
        "description": "A server.",
        "tools": [{"type": "function", "name": "look", **WHOLE}],
    },
]
ASKED: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 8}
STOP = FinishReason.STOP
TEMPLATE = (
    "{% for each in messages %}{{ each.role }}:{{ each.reasoning }}:{{ each.content | trim }}:"
    "{% for call in each.tool_calls %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }};{% endfor %}{{ '\\n' }}{% endfor %}"
)


@pytest.fixture
async def openai(stack: Stack, key: str) -> AsyncIterator[AsyncOpenAI]:
    """A client of the first gateway that does not retry requests."""
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as client:
        yield client


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, whose numbers have no gaps."""
    events = []
    for each in body.decode().split("\n\n")[:-1]:
        name, data = (line.split(": ", 1)[1] for line in each.splitlines()[:2])
        events.append(json.loads(data))
        assert events[-1]["type"] == name
    return events


def outline(events: list[dict[str, Any]]) -> list[str]:
    return [each["type"].removeprefix("response.") for each in events]


async def say_all(worker: FakeWorker, *, dies: bool = False) -> None:
    """Answer a request with reasoning, text, and a call of each tool.

    If the worker `dies`, it is replaced within each of them.
    """
    claim = await worker.claim_one()
    said: list[dict[str, Any]] = [
        {"text": "", "reasoning": "Lo", "reasoning_tokens": 1},
        {"text": "", "reasoning": "ok.", "reasoning_tokens": 1},
        {"text": "\n\n"},
        {"text": "Reading"},
        {"text": " it."},
    ]
    arguments = ('{"cmd":"ls"}', json.dumps({"input": PATCH}), '{"at":1}')
    for index, name in enumerate(("exec_command", "apply_patch", "mcp__look")):
        text = arguments[index]
        pieces = [text[at : at + 5] for at in range(0, len(text), 5)]
        said.append({"text": "", "calls": [CallPiece(index, name, pieces[0])]})
        said += ({"text": "", "calls": [CallPiece(index, "", piece)]} for piece in pieces[1:])
    kind = None
    for each in said:
        last = each.get("calls", [None])[0]
        now = last.index if last else "reasoning" in each
        if dies and now == kind:
            await worker.lose(claim)
            claim = await worker.claim_one()
            assert claim.job.resumption is not None
            kind = None
        else:
            kind = now
        await worker.send(claim.job.gateway, deltas=[worker.next_delta(claim, **each)])
    end = worker.next_delta(claim, "", finish_reason=STOP)
    await worker.send(claim.job.gateway, deltas=[end])
    await worker.finish(claim, tokens=len(said) + 1)


async def test_stream_of_every_kind_of_item_is_read_by_the_library(
    openai: AsyncOpenAI, store: "Redis"
) -> None:
    form = chat_format(TEMPLATE, **PARSERS)
    worker, name = await serve_chats(store, form=form, template=TEMPLATE)
    asked: dict[str, Any] = {**ASKED, "model": name, "tools": TOOLS}
    include: list[Any] = ["reasoning.encrypted_content"]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(say_all(worker))
        async with openai.responses.stream(**asked, include=include) as stream:
            events = [each async for each in stream]
            response = await stream.get_final_response()
    assert [each.sequence_number for each in events] == [*range(len(events))]
    assert [each.type for each in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "custom_tool_call",
        "function_call",
    ]
    reasoning, _, function, custom, look = (dict(each.to_dict()) for each in response.output)
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Look."}]
    assert len(str(reasoning["encrypted_content"])) > 40
    assert response.output_text.strip() == "Reading it."
    assert (function["name"], function["arguments"]) == ("exec_command", '{"cmd":"ls"}')
    assert (custom["name"], custom["input"]) == ("apply_patch", PATCH)
    assert (look["name"], look["namespace"]) == ("look", "mcp")
    assert len({each["call_id"] for each in (function, custom, look)}) == 3
    assert response.status == "completed"
    # A whole response has the same items.
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(say_all(worker))
        whole = await openai.responses.create(**asked, include=include)
    assert [each.type for each in whole.output] == [each.type for each in response.output]
    assert whole.usage == response.usage
    items = [each.to_dict() for each in whole.output]
    # The next turn has the reasoning, and the calls as the model wrote them.
    items += [
        {"type": f"{each['type']}_output", "call_id": each["call_id"], "output": "ok"}
        for each in items
        if "call_id" in each
    ]
    asked["input"] = [{"role": "user", "content": "Hello"}, *items]
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(openai.responses.create(**asked))
        claim = await worker.claim_one()
        await worker.conclude(claim, "Done.")
    patch = json.dumps({"input": PATCH})
    assert prompt_of(claim).splitlines() == [
        "user::Hello:",
        "assistant:Look.:Reading it.:"
        + ";".join(('exec_command{"cmd":"ls"}', f"apply_patch{patch}", 'mcp__look{"at":1}', "")),
        *["tool::ok:"] * 3,
    ]
    assert asking.result().output_text == "Done."


async def test_prompt_of_the_next_turn_begins_with_this_turn(
    openai: AsyncOpenAI, store: "Redis"
) -> None:
    template = (
        "{% for each in messages %}<{{ each.role }}>{% if each.reasoning %}{{ each.reasoning }}"
        "</think>{% endif %}{{ each.content }}{% for call in each.tool_calls %}<tool_call>\\n"
        "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\\n"
        "</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ).replace("\\n", "{{ '\\n' }}")
    worker, name = await serve_chats(
        store,
        form=chat_format(template, **PARSERS),
        template=template,
        features=[*FEATURES, Feature.STRICT_TOOLS, Feature.STRUCTURE],
    )
    grammar = {"type": "grammar", "syntax": "regex", "definition": "(?s).*"}
    asked: dict[str, Any] = {
        **ASKED,
        "model": name,
        "tools": [TOOLS[0], TOOLS[1] | {"format": grammar}],
        "include": ["reasoning.encrypted_content"],
        "extra_headers": {"originator": "codex_exec", "session-id": "s", "x-codex-window-id": "w"},
    }
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(openai.responses.create(**asked))
        claim = await worker.claim_one()
        before = prompt_of(claim)
        calls = [
            CallPiece(0, "apply_patch", json.dumps({"input": PATCH})),
            CallPiece(1, "exec_command", '{"cmd": "ls"}'),
        ]
        said = worker.next_delta(claim, "Reading.", reasoning="Look.", reasoning_tokens=1)
        last = worker.next_delta(claim, "", calls=calls, finish_reason=STOP)
        await worker.send(claim.job.gateway, deltas=[said, last])
        await worker.finish(claim)
    written = (
        f'Look.</think>Reading.<tool_call>\n{{"name": "apply_patch", "arguments": {PATCH}'
        '</tool_call><tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n'
        "</tool_call>"
    )
    # Codex returns the reasoning sealed only.
    items = [dict(each.to_dict()) | {"content": None} for each in asking.result().output[:1]]
    items += [dict(each.to_dict()) for each in asking.result().output[1:]]
    items += [
        {"type": f"{each['type']}_output", "call_id": each["call_id"], "output": "ok"}
        for each in items[2:]
    ]
    asked["input"] = [{"role": "user", "content": ASKED["input"]}, *items]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(openai.responses.create(**asked))
        claim = await worker.claim_one()
        assert prompt_of(claim).startswith(before + written + "<tool>ok<tool>ok")
        await worker.conclude(claim, "Done.")


async def test_stream_continues_inside_each_kind_of_item(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    body = ASKED | {"model": name, "tools": TOOLS, "stream": True}
    streams = []
    for dies in (False, True):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(say_all(worker, dies=dies))
            answer = await client.post(RESPONSES, json=body)
        streams.append(events_of(answer.content))
    undisturbed, disturbed = (
        [(each["type"], each["sequence_number"], each.get("delta")) for each in events]
        for events in streams
    )
    assert disturbed == undisturbed
    assert streams[0][-1]["response"]["usage"] == streams[1][-1]["response"]["usage"]


async def start(client: httpx.AsyncClient, **parameters: Any) -> dict[str, Any]:
    answer = await client.post(RESPONSES, json=ASKED | parameters)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def await_end(client: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            body: dict[str, Any] = (await client.get(f"{RESPONSES}/{response_id}")).json()
            if body["status"] not in ("queued", "in_progress"):
                return body
            await asyncio.sleep(0.02)


async def read(client: httpx.AsyncClient, response_id: str, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get(f"{RESPONSES}/{response_id}", params={"stream": "true"} | query)
    return events_of(answer.content)


async def test_background_response_is_read_from_any_event_on_any_gateway(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    include = ["reasoning.encrypted_content"]
    begun = await start(client, model=name, tools=TOOLS, background=True, include=include)
    assert (begun["object"], begun["status"]) == ("response", "queued")
    assert begun["tools"] == TOOLS
    await say_all(worker)
    whole = await await_end(client, begun["id"])
    events = await read(client, begun["id"])
    assert events[-1]["response"] == whole
    assert [each["item"] for each in events if each["type"].endswith("item.done")] == (
        whole["output"]
    )
    for after in range(len(events)):
        rest = await read(other_client, begun["id"], starting_after=after)
        assert rest == events[after + 1 :]
    # A response that has ended is not cancelled.
    path = f"{RESPONSES}/{begun['id']}"
    assert (await client.post(f"{path}/cancel")).json()["status"] == "completed"
    deleted = {"id": begun["id"], "object": "response", "deleted": True}
    assert (await client.delete(path)).json() == deleted
    for answer in (await client.get(path), await other_client.delete(path)):
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith('The response "resp_')


async def test_deleted_response_frees_its_bytes_and_its_key_does_not_run_again(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, store: "Redis"
) -> None:
    for headers in ({}, {"idempotency-key": secrets.token_hex(8)}):
        body = ASKED | {"background": True, "instructions": "x"}
        begun = (await client.post(RESPONSES, json=body, headers=headers)).json()
        await await_end(client, begun["id"])
        assert await counted_bytes(store, "acme", begun["id"]) > 0
        assert (await other_client.delete(f"{RESPONSES}/{begun['id']}")).status_code == 200
        left = await counted_bytes(store, "acme", begun["id"])
        # What remains is the mark of the key.
        assert (left > 0) is bool(headers)
        assert left <= 2_048
        stored = await store.memory_usage(keys.content(begun["id"]))
        assert (stored or 0) <= left
    for each in (client, other_client):
        again = await each.post(RESPONSES, json=body, headers=headers)
        assert again.status_code == 409
        assert again.headers["x-should-retry"] == "false"
        error = again.json()["error"]
        assert (error["code"], error["param"]) == ("response_deleted", "Idempotency-Key")
        assert begun["id"] in error["message"]


async def test_running_response_is_cancelled_and_deleted(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    path = f"{RESPONSES}/{(await start(client, model=name, background=True))['id']}"
    await worker.claim_one()
    assert (await client.get(path)).json()["status"] == "queued"
    await client.post(f"{path}/cancel")
    assert (await await_end(client, path.rpartition("/")[2]))["status"] == "cancelled"
    path = f"{RESPONSES}/{(await start(client, model=name, background=True))['id']}"
    assert (await client.delete(path)).json()["deleted"] is True
    assert (await client.get(path)).status_code == 404


async def test_stream_is_resumed_by_event_ids_and_replayed(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient
) -> None:
    headers = {"idempotency-key": secrets.token_hex(8)}
    body = ASKED | {"stream": True, "seed": 7}
    first = await client.post(RESPONSES, json=body, headers=headers)
    again = await other_client.post(RESPONSES, json=body, headers=headers)
    assert again.content == first.content
    events = first.content.split(b"\n\n")[:-1]
    last = events[4].split(b"\nid: ")[1].decode()
    rest = await other_client.post(RESPONSES, json={}, headers={"last-event-id": last})
    assert rest.content == b"".join(each + b"\n\n" for each in events[5:])


async def test_response_of_the_maximum_length_is_incomplete(client: httpx.AsyncClient) -> None:
    body = await start(client, metadata={"a": "b"}, instructions="Be brief.", store=True)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][-1]["status"] == "incomplete"
    assert body["usage"]["output_tokens"] == 8
    assert (body["metadata"], body["instructions"]) == ({"a": "b"}, "Be brief.")
    assert (body["store"], body["error"]) == (True, None)
    stream = await client.post(RESPONSES, json=ASKED | {"stream": True})
    last = events_of(stream.content)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["usage"] == body["usage"] | last["response"]["usage"]


async def test_what_cannot_be_enforced_is_named(client: httpx.AsyncClient) -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tools = [{"type": "custom", "name": "patch", "format": lark}, {"type": "web_search"}]
    answer = await client.post(RESPONSES, json=ASKED | {"tools": tools})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-params"] == "tools.format,tools.web_search"
    strict = {"name": "f", "strict": True}
    tools = [{"type": "function", "parameters": {"type": "object"}, **strict}]
    answer = await client.post(RESPONSES, json=ASKED | {"tools": tools})
    message = {"max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
    tools = [{"input_schema": {"type": "object"}, **strict}]
    answers = [
        answer,
        await client.post("/v1/messages", json={"model": MODEL, **message, "tools": tools}),
    ]
    for answer in answers:
        assert (answer.status_code, answer.headers["x-ignored-params"]) == (200, "tools.strict")


async def test_input_tokens_are_those_that_are_billed(client: httpx.AsyncClient) -> None:
    asked = ASKED | {"tools": TOOLS, "instructions": "Be brief."}
    counted = (await client.post(f"{RESPONSES}/input_tokens", json=asked)).json()
    billed = await start(client, **asked)
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": billed["usage"]["input_tokens"],
    }


@all_cases(
    ("parameter", "value", "code"),
    [
        ("previous_response_id", "resp_1", "previous_response_not_found"),
        ("previous_response_id", 1, "invalid_value"),
        ("conversation", "conv_1", "unsupported_parameter"),
        ("input", [{"type": "item_reference", "id": 1}], "invalid_value"),
        ("input", None, "missing_required_parameter"),
        ("temperature", 9, "invalid_value"),
    ],
)
async def test_bad_request_keeps_its_status_in_a_stream(
    client: httpx.AsyncClient, parameter: str, value: Any, code: str
) -> None:
    body = ASKED | {"stream": True, parameter: value}
    for dialect in ("openai", "llamacpp", "vllm"):
        answer = await client.post(RESPONSES, json=body, headers={"x-api-dialect": dialect})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (code, "invalid_request_error")
        assert error["param"].startswith(parameter)


async def test_too_long_prompt_is_a_failed_response_in_a_stream(client: httpx.AsyncClient) -> None:
    asked = ASKED | {"input": "word " * 3_000}
    answer = await client.post(RESPONSES, json=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = await client.post(RESPONSES, json=asked | {"stream": True})
    assert (answer.status_code, answer.headers["content-type"]) == (
        200,
        "text/event-stream; charset=utf-8",
    )
    events = events_of(answer.content)
    assert outline(events) == ["created", "failed"]
    assert [each["sequence_number"] for each in events] == [0, 1]
    assert events[1]["response"]["error"]["code"] == "context_length_exceeded"


async def test_silence_is_filled_with_events_that_have_numbers(
    client: httpx.AsyncClient, impatient_client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    asked = ASKED | {"model": name, "stream": True}
    async with client.stream("POST", RESPONSES, json=asked) as answer:
        lines = answer.aiter_lines()
        # Before a worker claims the job, and long before a stream of chats begins in silence.
        async with asyncio.timeout(OPENING_PATIENCE_SECONDS):
            assert await anext(lines) == "event: response.created"
        await worker.conclude(await worker.claim_one(), "a")
        assert [each async for each in lines][-3] == "event: response.completed"
    async with impatient_client.stream("POST", RESPONSES, json=asked) as answer:
        parts, body = answer.aiter_raw(), b""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while body.count(b"event: response.in_progress") < 3:
                body += await anext(parts)
        claim = await worker.claim_one()
        await worker.say(claim, "a")
        await worker.fail(claim, FailureCode.WORKER_LOST)
        body += b"".join([part async for part in parts])
    events = events_of(body)
    assert [each["sequence_number"] for each in events] == [*range(len(events))]
    assert outline(events)[:4] == ["created", *["in_progress"] * 3]
    assert outline(events)[-1] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"


async def test_codex_gets_a_catalogue_of_models(client: httpx.AsyncClient, store: "Redis") -> None:
    features = [*FEATURES, Feature.STRICT_TOOLS, Feature.STRUCTURE]
    worker = FakeWorker(store, "loading")
    await worker.announce(WorkerState.LOADING, features=[])
    _, strict = await serve_chats(store, features=features)
    listed: dict[str, Any] = {"data": []}
    async with asyncio.timeout(PATIENCE_SECONDS):
        while strict not in {each["id"] for each in listed["data"]}:
            answer = await client.get("/v1/models", params={"client_version": "0.160.0"})
            listed = answer.json()
            await asyncio.sleep(0.05)
    models = {each["slug"]: each for each in listed["models"]}
    # What a model can do is unknown while it is loaded.
    assert list(models) == [each["id"] for each in listed["data"] if each["features"]]
    assert "loading" not in models
    assert models[strict]["apply_patch_tool_type"] == "freeform"
    assert models[MODEL]["apply_patch_tool_type"] is None
    windows = {
        each["id"]: each["context_window"] for each in listed["data"] if each["id"] in models
    }
    assert {name: each["context_window"] for name, each in models.items()} == windows
    assert "models" not in (await client.get("/v1/models")).json()
