"""`POST /v1/messages` over HTTP: requests as Anthropic's clients send them, and their errors."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from redis.asyncio import Redis

from contract.messages import CallPiece
from contract.outcomes import FailureCode, FinishReason
from gateway.records.limits import LimitName
from gateway.records.scopes import Scope
from tests.e2e.clients.environments import PROGRAMS, PYTHON
from tests.gateway.callers import caller
from tests.gateway.chats import CHATS, PARSERS, TOKENIZER, prompt_of, serve_chats, tool
from tests.gateway.conftest import MAX_BODY_BYTES, gateway_client
from tests.gateway.resuming import resume
from tests.support.cases import all_cases
from tests.support.events import numbered_events
from tests.support.fake_worker import FakeWorker, chat_format
from tests.support.patience import OPENING_PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack

MESSAGES = "/v1/messages"
HELLO = {"role": "user", "content": "Hello"}
CALLING = (
    "{% for each in messages %}<{{ each.role }}>{{ each.content or '' }}"
    "{% for call in each.tool_calls %}<tool_call>{{ '\\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\\n' }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
READ = {"name": "Read", "input_schema": {"type": "object", "properties": {}}}


def asking(model: str = MODEL, **parameters: Any) -> dict[str, Any]:
    return {"model": model, "max_tokens": 8, "messages": [HELLO]} | parameters


async def ask(client: httpx.AsyncClient, model: str = MODEL, **parameters: Any) -> httpx.Response:
    return await client.post(MESSAGES, json=asking(model, **parameters))


@pytest.fixture
async def sdk(stack: Stack, key: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client, as an agent configures it."""
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key=key, max_retries=0) as client:
        yield client


async def test_sdk_gets_a_message_whole_and_as_a_stream(sdk: anthropic.AsyncAnthropic) -> None:
    body: Any = asking(system="Be brief.", extra_body={"temperature": 0})
    whole = await sdk.messages.create(**body)
    assert re.fullmatch(r"msg_[a-z2-7]{26}", whole.id)
    assert (whole.model, whole.stop_reason, whole.usage.output_tokens) == (MODEL, "max_tokens", 8)
    assert whole._request_id is not None
    assert whole._request_id.startswith("req_")
    async with sdk.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
        assert stream.response.headers["request-id"].startswith("req_")
    assert streamed.content[0].to_dict() == whole.content[0].to_dict()
    counted = await sdk.messages.count_tokens(
        model=MODEL, messages=body["messages"], system=body["system"]
    )
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@all_cases("path", [MESSAGES, f"{MESSAGES}?beta=true", f"/anthropic{MESSAGES}"])
async def test_every_header_and_path_of_the_api_is_accepted(
    stack: Stack, key: str, path: str
) -> None:
    for credentials in (
        {"x-api-key": key},
        {"authorization": f"Bearer {key}"},
        {"x-api-key": key, "authorization": f"Bearer {key}"},
    ):
        headers = {
            **credentials,
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "context-management-2025-06-27,unknown-2030-01-01",
            "x-claude-code-session-id": "s",
        }
        async with gateway_client(stack.url, None) as client:
            response = await client.post(path, json=asking(), headers=headers)
            assert response.status_code == 200, response.text
            counted = path.replace(MESSAGES, f"{MESSAGES}/count_tokens")
            response = await client.post(counted, json=asking(), headers=headers)
            assert response.status_code == 200, response.text
            refused = await client.post("/v1/completions", json=asking(), headers=headers)
            assert refused.status_code == (400 if "authorization" in credentials else 401)


async def claimed(
    worker: FakeWorker, client: httpx.AsyncClient, name: str, **parameters: Any
) -> tuple[asyncio.Task[httpx.Response], Any]:
    """Begin a request, and return it with the job that the worker has claimed."""
    request = asyncio.create_task(ask(client, name, **parameters))
    return request, await worker.claim_one()


async def test_conversation_becomes_the_prompt_of_a_job(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    use = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "text"}
    request, claim = await claimed(
        worker,
        client,
        name,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            HELLO,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
            {"role": "system", "content": "<total_tokens>9</total_tokens>"},
        ],
        tools=[READ],
        tool_choice={"type": "none"},
        thinking={"type": "adaptive"},
        context_management={"edits": [{}]},
        stop_sequences=["###"],
    )
    assert prompt_of(claim) == (
        "system: Be brief\nuser: Hello\nassistant: \ntool: text\n"
        "system: <total_tokens>9</total_tokens>\n1 tools\nassistant:"
    )
    assert (claim.job.stop, claim.job.max_tokens) == (["###"], 8)
    await worker.conclude(claim, "Hi")
    response = await request
    assert response.json()["content"] == [{"type": "text", "text": "Hi"}]
    assert response.headers["x-ignored-params"] == "context_management"


async def test_long_conversation_loses_the_results_of_older_calls(
    client: httpx.AsyncClient, sdk: anthropic.AsyncAnthropic, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    edit: dict[str, Any] = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 50},
        "keep": {"type": "tool_uses", "value": 1},
    }
    messages: list[Any] = [HELLO]
    for number in range(3):
        use = {"type": "tool_use", "id": f"toolu_{number}", "name": "Read", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "long " * 40}
        messages += [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
    given: dict[str, Any] = {"messages": messages, "tools": [READ]}

    async def counted(**parameters: Any) -> int:
        body = asking(name, **given | parameters)
        response = await client.post(f"{MESSAGES}/count_tokens", json=body)
        return int(response.json()["input_tokens"])

    edited = {"context_management": {"edits": [edit]}}
    saved = await counted() - await counted(**edited)
    applied = {"type": edit["type"], "cleared_tool_uses": 2, "cleared_input_tokens": saved}
    for stream in (False, True):
        request, claim = await claimed(worker, client, name, **given | edited, stream=stream)
        assert prompt_of(claim).count("long long") == 20
        assert prompt_of(claim).count("[Old tool result content cleared]") == 2
        assert len(claim.job.prompt_token_ids) == await counted(**edited)
        await worker.conclude(claim, "Hi")
        body = (await request).text
        if stream:
            body = next(line for line in body.split("\n") if '"message_delta"' in line)[6:]
        assert json.loads(body)["context_management"] == {"applied_edits": [applied]}
    # It would save too little.
    edit["clear_at_least"] = {"type": "input_tokens", "value": saved + 1}
    request, claim = await claimed(worker, client, name, **given | edited)
    assert prompt_of(claim).count("long long") == 60
    await worker.conclude(claim, "Hi")
    assert (await request).json()["context_management"] == {"applied_edits": []}


@PYTHON.skip
async def test_tool_runner_goes_on_without_a_thread(
    stack: Stack, key: str, store: "Redis", tmp_path: Path
) -> None:
    """By default, the newest SDK asks the server to keep the conversation."""
    worker, name = await serve_chats(store)
    command = ["python", str(PROGRAMS / "tool_runner.py")]
    variables = {"ANTHROPIC_BASE_URL": stack.url, "ANTHROPIC_API_KEY": key, "MODEL": name}
    run = asyncio.create_task(asyncio.to_thread(PYTHON.run, command, tmp_path, **variables))
    claim: Any = None
    while claim is None:  # The import of the SDK takes some time.
        assert not run.done(), run.result()
        with contextlib.suppress(TimeoutError):
            claim = await worker.claim_one()
    assert "How is the garden?" in prompt_of(claim)
    pieces = [CallPiece(0, "look", ""), CallPiece(0, "", '{"place": "The garden"}')]
    deltas = [worker.next_delta(claim, "", calls=[each]) for each in pieces]
    last = worker.next_delta(claim, "", finish_reason=FinishReason.STOP)
    await worker.send(claim.job.gateway, deltas=[*deltas, last])
    await worker.finish(claim)
    claim = await worker.claim_one()
    assert "How is the garden?" in prompt_of(claim)
    assert "The garden is green." in prompt_of(claim)
    await worker.conclude(claim, "Green.")
    assert json.loads(await run) == [{"type": "text", "text": "Green."}]


async def test_reasoning_returns_to_the_prompt_of_the_next_turn(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
    )

    form = chat_format(template, **PARSERS)
    worker, name = await serve_chats(store, form=form, template=template)
    omitted = {"type": "adaptive", "display": "omitted"}
    request, claim = await claimed(worker, client, name, thinking=omitted)
    said = worker.next_delta(claim, "", reasoning="Hm.", reasoning_tokens=1)
    await worker.send(claim.job.gateway, deltas=[said])
    await worker.conclude(claim, "Hi")
    content = (await request).json()["content"]
    assert content[0]["thinking"] == ""
    broken = [content[0] | {"signature": content[0]["signature"][::-1]}, content[1]]
    for returned, expected in ((content, "<think>Hm.</think>Hi"), (broken, "Hi")):
        messages = [HELLO, {"role": "assistant", "content": returned}, HELLO]
        request, claim = await claimed(worker, client, name, messages=messages)
        assert f"assistant:{expected}\n" in prompt_of(claim)
        await worker.conclude(claim, "Hi")
        assert (await request).status_code == 200


async def test_stream_begins_before_the_first_token(
    client: httpx.AsyncClient, impatient_client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    for each, has_ping in ((client, False), (impatient_client, True)):
        body = asking(name, stream=True)
        async with each.stream("POST", MESSAGES, json=body) as response:
            events = response.aiter_lines()
            async with asyncio.timeout(OPENING_PATIENCE_SECONDS):
                assert await anext(events) == "event: message_start"
            claim = await worker.claim_one()
            if has_ping:
                lines = [await anext(events) for _ in range(4)]
                assert lines[-2:] == ["event: ping", 'data: {"type":"ping"}']
            await worker.conclude(claim, "Hi")
            rest = [line async for line in events]
            assert rest[-3:-1] == ["event: message_stop", 'data: {"type":"message_stop"}']


PARTS: dict[str, dict[str, Any]] = {
    "thinking": {"reasoning": "a", "reasoning_tokens": 1},
    "text": {"text": "b"},
    "tool_use": {"calls": [CallPiece(0, "Read", '{"a"')]},
    "more tool_use": {"calls": [CallPiece(0, "", ":1}")]},
    "more text": {"text": "c"},
}


async def test_stream_continues_inside_any_block_after_a_worker_has_died(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    parts = [*PARTS.values()]
    expected: list[bytes] = []
    for died in (None, *range(1, len(parts))):
        body = asking(name, stream=True, tools=[READ])
        begun = asyncio.create_task(
            client.post(MESSAGES, json=body, headers={"x-event-ids": "true"})
        )
        claim = await worker.claim_one()
        for number, fields in enumerate(parts):
            if number == died:
                await worker.lose(claim, tokens=worker.sent_tokens(claim))
                claim = await worker.claim_one()
                assert claim.job.resumption is not None
            said = worker.next_delta(
                claim,
                fields.get("text", ""),
                **{key: value for key, value in fields.items() if key != "text"},
            )
            await worker.send(claim.job.gateway, deltas=[said])
        last = worker.next_delta(claim, "", finish_reason=FinishReason.STOP)
        await worker.send(claim.job.gateway, deltas=[last])
        await worker.finish(claim)
        events = numbered_events((await begun).content)
        request_id = events[0][1]
        seen = [data.replace(request_id.encode(), b"msg") for data, _, _ in events]
        seen = [re.sub(rb"toolu_[0-9a-f]+|\"signature\":\"[^\"]*\"", b"", data) for data in seen]
        expected = expected or seen
        assert seen == expected
        for skip in (0, 3, len(events) - 1):
            rest = await resume(other_client, request_id, skip)
            assert numbered_events(rest.content) == events[skip:]


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    """Return status, type and message of an error in Anthropic's envelope."""
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    assert body["request_id"].startswith("req_")
    return response.status_code, body["error"]["type"], body["error"]["message"]


@all_cases(
    ("method", "path", "body", "expected"),
    [
        ("POST", MESSAGES, asking(max_tokens=0), (400, "invalid_request_error")),
        ("POST", MESSAGES, asking("unknown"), (404, "not_found_error")),
        ("POST", f"{MESSAGES}/count_tokens", {}, (400, "invalid_request_error")),
        ("POST", f"{MESSAGES}/a/b", {}, (404, "not_found_error")),
        ("GET", MESSAGES, None, (405, "invalid_request_error")),
        ("GET", f"{MESSAGES}/msg_{'a' * 26}", None, (404, "not_found_error")),
        ("GET", "/anthropic/api/hello", None, (404, "not_found_error")),
        (
            "POST",
            MESSAGES,
            asking(system="a" * MAX_BODY_BYTES),
            (413, "request_too_large"),
        ),
    ],
)
async def test_errors_have_the_envelope_of_the_api(
    client: httpx.AsyncClient, method: str, path: str, body: Any, expected: tuple[int, str]
) -> None:
    response = await client.request(method, path, json=body)
    assert error_of(response)[:2] == expected


async def test_credentials_are_refused_in_the_envelope_of_the_api(stack: Stack) -> None:
    async with gateway_client(stack.url, None) as nobody:
        for headers in ({}, {"x-api-key": "wrong"}):
            response = await nobody.post(MESSAGES, json=asking(), headers=headers)
            assert error_of(response)[:2] == (401, "authentication_error")
        headers = {"anthropic-version": "2023-06-01", "x-request-id": "mine"}
        response = await nobody.get("/v1/models", headers=headers)
        assert error_of(response)[:2] == (401, "authentication_error")
        assert response.headers["request-id"] == "req_mine"


async def test_prompt_that_is_too_long_is_named_for_compaction(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    _, name = await serve_chats(store, context_window=20)
    messages = [{"role": "user", "content": "word " * 40}]
    response = await ask(client, name, messages=messages)
    status, kind, message = error_of(response)
    assert (status, kind) == (400, "invalid_request_error")
    assert (match := re.search(r"prompt is too long: (\d+) tokens > 19 maximum", message))
    assert response.headers["x-should-retry"] == "false"
    counted = await client.post(f"{MESSAGES}/count_tokens", json=asking(name, messages=messages))
    assert counted.json() == {"input_tokens": int(match[1])}


async def test_window_ends_a_message_whose_max_tokens_exceed_it(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store, context_window=30)
    request, claim = await claimed(worker, client, name, max_tokens=32_000)
    assert claim.job.max_tokens == 30 - len(claim.job.prompt_token_ids)
    await worker.say(claim, "Hi", finish=FinishReason.LENGTH)
    await worker.finish(claim, cached=3)
    body = (await request).json()
    assert body["stop_reason"] == "model_context_window_exceeded"
    assert body["usage"]["cache_read_input_tokens"] == 3
    assert body["usage"]["input_tokens"] == len(claim.job.prompt_token_ids) - 3


@all_cases("streams", [False, True])
async def test_failure_before_the_head_has_a_status_and_after_it_an_event(
    client: httpx.AsyncClient, store: "Redis", *, streams: bool
) -> None:
    worker, name = await serve_chats(store)
    has_begun = asyncio.Event()

    async def fail() -> None:
        claim = await worker.claim_one()
        if streams:
            await worker.say(claim, "Hi")
            await has_begun.wait()
        await worker.fail(claim, FailureCode.ENGINE_ERROR)

    failing = asyncio.create_task(fail())
    async with client.stream("POST", MESSAGES, json=asking(name, stream=streams)) as response:
        has_begun.set()
        await response.aread()
    await failing
    if not streams:
        assert error_of(response)[:2] == (529, "overloaded_error")
        return
    assert response.status_code == 200
    last = json.loads(numbered_events(response.content)[-1][0].removeprefix(b"data: "))
    assert last["error"]["type"] == "overloaded_error"


GIVEN = {"path": "é.txt", "edits": [{"line": 1, "text": 'ü\n"\\u00e9" '}], "all": True}
STYLES: dict[str, dict[str, Any]] = {
    "compact": {"separators": (",", ":"), "ensure_ascii": False},
    "compact and escaped": {"separators": (",", ":")},
    "spaced": {"ensure_ascii": False},
    "spaced and escaped": {},
    "indented": {"indent": 2, "ensure_ascii": False},
    "indented with tabs and escaped": {"indent": "\t"},
}


async def test_turn_repeats_the_input_of_a_call_as_the_model_wrote_it(
    sdk: anthropic.AsyncAnthropic, client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store, form=chat_format(CALLING, **PARSERS), template=CALLING)

    async def answered(asking: Awaitable[Any], text: str) -> tuple[Any, list[int]]:
        """Let the model write a call with this text; return the answer and the turn's tokens."""
        task = asyncio.ensure_future(asking)
        claim = await worker.claim_one()
        pieces = [CallPiece(0, "Read", ""), *(CallPiece(0, "", each) for each in text)]
        deltas = [worker.next_delta(claim, "", calls=[each]) for each in pieces]
        last = worker.next_delta(claim, "", finish_reason=FinishReason.STOP)
        await worker.send(claim.job.gateway, deltas=[*deltas, last])
        await worker.finish(claim)
        written = f'<tool_call>\n{{"name": "Read", "arguments": {text}}}\n</tool_call>'
        output = TOKENIZER.encode(written, add_special_tokens=False).ids
        return await task, [*claim.job.prompt_token_ids, *output]

    async def streamed(messages: list[Any]) -> Any:
        async with sdk.messages.stream(**asking(name, messages=messages, tools=[READ])) as stream:
            return await stream.get_final_message()

    async def chatted(messages: list[Any]) -> Any:
        body = {"model": name, "messages": messages, "tools": [tool("Read")]}
        return (await client.post(CHATS, json=body)).json()["choices"][0]["message"]

    for style in STYLES.values():
        text = json.dumps(GIVEN, **style)
        message, before = await answered(streamed([HELLO]), text)
        [use] = message.content
        assert use.input == GIVEN
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "a"}
        turns = [HELLO, {"role": "assistant", "content": message.content}]
        _, after = await answered(streamed([*turns, {"role": "user", "content": [result]}]), "{}")
        assert after[: len(before)] == before, style
        # Clients of chats return the text itself.
        message, before = await answered(chatted([HELLO]), text)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a"}
        _, after = await answered(chatted([HELLO, message, result]), "{}")
        assert after[: len(before)] == before, style


async def test_limits_have_anthropics_headers(stack: Stack) -> None:
    limits = {LimitName.REQUESTS_PER_MINUTE: 2, LimitName.PROMPT_TOKENS_PER_MINUTE: 1000}
    async with caller(stack, "limited-messages", Scope.COMPLETIONS, limits=limits) as client:
        response = await ask(client)
        assert response.status_code == 200, response.text
        headers = response.headers
        assert headers["anthropic-ratelimit-requests-limit"] == "2"
        assert headers["anthropic-ratelimit-requests-remaining"] == "1"
        assert headers["anthropic-ratelimit-input-tokens-limit"] == "1000"
        reset = datetime.fromisoformat(headers["anthropic-ratelimit-requests-reset"])
        assert timedelta(0) < reset - datetime.now(UTC) < timedelta(seconds=62)
        assert not [name for name in headers if name.startswith("x-ratelimit")]
        assert (await ask(client)).status_code == 200
        refused = await ask(client)
        assert error_of(refused)[:2] == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-should-retry"] == "true"
        assert "anthropic-ratelimit-requests-reset" in refused.headers


async def test_models_have_the_form_of_the_api(
    client: httpx.AsyncClient, sdk: anthropic.AsyncAnthropic
) -> None:
    everything = [model async for model in sdk.models.list(limit=1000)]
    assert MODEL in [model.id for model in everything]
    paged = [model async for model in sdk.models.list(limit=1)]
    assert paged == everything
    model = await sdk.models.retrieve(MODEL)
    assert (model.type, model.id, model.display_name) == ("model", MODEL, MODEL)
    assert model.created_at.tzinfo is not None
    assert (model.lifecycle, model.retires_at) == ("active", None)
    assert [each.id async for each in sdk.models.list(lifecycle=["retired"])] == []
    active = [each async for each in sdk.models.list(lifecycle=["active", "retired"])]
    assert active == everything
    headers = {"anthropic-version": "2023-06-01"}
    for query in ("limit=0", "limit=1001", "limit=a", "after_id=unknown"):
        response = await client.get(f"/v1/models?{query}", headers=headers)
        assert error_of(response)[:2] == (400, "invalid_request_error")
        response = await client.get(f"/v1/models?{query}")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")
    models = (await client.get("/v1/models")).json()
    assert [*models] == ["object", "data"]
    ids = [model["id"] for model in models["data"]]
    page = (await client.get("/v1/models?limit=1")).json()
    first = {"first_id": ids[0], "last_id": ids[0], "has_more": len(ids) > 1}
    assert page == models | {"data": models["data"][:1]} | first
    assert (await client.get("/anthropic/v1/models?limit=1")).json()["has_more"] is True
