"""Cache diagnostics: which part of a prompt differs from that of the message that it names."""

import asyncio
import json
from typing import Any, Final

import anthropic
import httpx
import openai
import pytest
from redis.asyncio import Redis

from contract.affinity import prefixes_of
from contract.outcomes import FinishReason
from gateway.completions.admission.diagnostics import KEPT_MS
from gateway.records.limits import LimitName
from gateway.records.scopes import Scope
from tests.gateway.callers import caller
from tests.gateway.chats import serve_chats
from tests.support.fake_worker import FakeWorker, chat_format
from tests.support.stack import Stack

TEMPLATE: Final = (
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{{ tools | length if tools }}"
    "{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO: Final = {"role": "user", "content": "Hello"}
TURNS: Final = [HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Go on"}]
TOOL: Final = {"name": "read", "input_schema": {"type": "object", "properties": {}}}
WORK: Final = [
    HELLO,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Read it.", "signature": ""},
            {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"é": [1]}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "text"}],
    },
]
"""Another turn of an agent."""
PLAIN: Final[dict[str, Any]] = {"max_tokens": 8, "system": "Be brief.", "messages": [HELLO]}


async def ask(
    worker: FakeWorker, client: httpx.AsyncClient, path: str = "/v1/messages", **body: Any
) -> dict[str, Any]:
    """Return the response to a body for the worker's model."""
    request = asyncio.create_task(client.post(path, json={"model": worker.queue.model, **body}))
    await worker.conclude(await worker.claim_one(), "Hi")
    response = await request
    assert "x-ignored-params" not in response.headers
    found: dict[str, Any] = response.json()
    return found


async def compare(
    worker: FakeWorker, client: httpx.AsyncClient, message_id: str | None, **body: Any
) -> Any:
    """Return the diagnostics of a message that names an earlier one."""
    asked = PLAIN | body | {"diagnostics": {"previous_message_id": message_id}}
    return (await ask(worker, client, **asked))["diagnostics"]


@pytest.fixture
async def talker(store: "Redis") -> FakeWorker:
    """A worker of a model whose template shows the effort."""
    return (await serve_chats(store, form=chat_format(TEMPLATE), template=TEMPLATE))[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"messages": TURNS}, None),
        ({"messages": WORK}, None),
        ({"messages": TURNS, "temperature": 0.5, "tool_choice": {"type": "none"}}, None),
        ({"system": "Be brief"}, "system_changed"),
        ({"system": [], "tools": [TOOL]}, "system_changed"),
        ({"tools": [TOOL]}, "tools_changed"),
        ({"tools": [TOOL], "messages": TURNS[:1]}, "tools_changed"),
        ({"messages": [{"role": "user", "content": "Hell"}, *TURNS[1:]]}, "messages_changed"),
        ({"output_config": {"effort": "low"}}, "unavailable"),
    ],
)
async def test_first_part_that_differs_is_named(
    client: httpx.AsyncClient, talker: FakeWorker, changes: dict[str, Any], reason: str | None
) -> None:
    body = {**PLAIN, "diagnostics": {"previous_message_id": None}}
    first = await ask(talker, client, **body)
    assert first["diagnostics"] is None
    found = await compare(talker, client, first["id"], **changes)
    if reason is None:
        assert found is None
        return
    expected: dict[str, Any] = {"type": reason}
    if reason != "unavailable":
        # At most the whole of the earlier prompt, or of this one if it is shorter.
        prompts = [first["usage"]["input_tokens"]]
        counted = await client.post(
            "/v1/messages/count_tokens", json={"model": talker.queue.model, **PLAIN, **changes}
        )
        prompts.append(counted.json()["input_tokens"])
        expected["cache_missed_input_tokens"] = min(prompts)
    assert found == {"cache_miss_reason": expected}


async def test_shorter_conversation_and_another_model_are_named(
    client: httpx.AsyncClient, store: "Redis", talker: FakeWorker
) -> None:
    long = await ask(
        talker, client, **{**PLAIN, "messages": TURNS, "diagnostics": {"previous_message_id": None}}
    )
    found = await compare(talker, client, long["id"])
    assert found["cache_miss_reason"]["type"] == "messages_changed"
    other, _ = await serve_chats(store, form=chat_format(TEMPLATE), template=TEMPLATE)
    found = await compare(other, client, long["id"], messages=TURNS)
    assert found["cache_miss_reason"]["type"] == "model_changed"


async def test_only_messages_of_the_project_with_diagnostics_are_found(
    stack: Stack, client: httpx.AsyncClient, store: "Redis", talker: FakeWorker
) -> None:
    unknown = {"cache_miss_reason": {"type": "previous_message_not_found"}}
    plain = await ask(talker, client, **PLAIN)
    assert "diagnostics" not in plain
    assert await compare(talker, client, plain["id"]) == unknown
    assert await compare(talker, client, "\x00" * 9_999) == unknown
    own = await ask(talker, client, **PLAIN, diagnostics={"previous_message_id": None})
    async with caller(stack, "another", Scope.COMPLETIONS) as stranger:
        assert await compare(talker, stranger, own["id"]) == unknown
    async with caller(stack, "acme", Scope.KEYS) as manager:
        project = await manager.post("/v1/projects", json={"name": "diagnosed"})
    options = {"project_id": project.json()["id"]}
    async with caller(stack, "acme", Scope.COMPLETIONS, **options) as colleague:
        assert await compare(talker, colleague, own["id"]) == unknown
    assert await compare(talker, client, own["id"]) is None
    names = [each async for each in store.scan_iter("{b:*}:prompt:acme:*")]
    assert names
    assert all([0 < await store.pttl(each) <= KEPT_MS for each in names])
    # As another release may write them.
    await asyncio.gather(*(store.set(each, b"\x90", keepttl=True) for each in names))
    unavailable = {"cache_miss_reason": {"type": "unavailable"}}
    assert await compare(talker, client, own["id"]) == unavailable


async def test_digests_count_as_stored_bytes(
    stack: Stack, store: "Redis", talker: FakeWorker
) -> None:
    limits = {LimitName.STORED_BYTES: 100}
    async with caller(stack, "cramped", Scope.COMPLETIONS, limits=limits) as client:
        full = await ask(talker, client, **PLAIN, diagnostics={"previous_message_id": None})
        found = await compare(talker, client, full["id"])
    assert found == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    assert not [each async for each in store.scan_iter("{b:*}:prompt:cramped:*")]


async def test_clients_read_the_diagnostics(
    stack: Stack, key: str, client: httpx.AsyncClient, talker: FakeWorker
) -> None:
    asked: Any = PLAIN | {"model": talker.queue.model}
    first = await ask(talker, client, **PLAIN, diagnostics={"previous_message_id": None})
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key=key) as sdk:
        changed = asked | {"diagnostics": {"previous_message_id": first["id"]}, "system": "No."}
        async with sdk.messages.stream(**changed) as stream:
            await talker.conclude(await talker.claim_one(), "Hi")
            message = await stream.get_final_message()
    assert message.diagnostics is not None
    assert message.diagnostics.cache_miss_reason is not None
    assert message.diagnostics.cache_miss_reason.type == "system_changed"


@pytest.mark.parametrize(
    ("changes", "cached", "expected"),
    [
        ({}, 3, {"type": "cache_hit"}),
        # It would be in the cache, and is not: the worker has evicted it, or another one has it.
        ({}, 0, {"type": "unavailable"}),
        ({"instructions": "No."}, 0, {"type": "cache_miss", "reason": "input_changed"}),
        (
            {"tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}]},
            0,
            {"type": "cache_miss", "reason": "tools_changed"},
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_responses_have_openais_form(
    stack: Stack,
    key: str,
    talker: FakeWorker,
    changes: dict[str, Any],
    cached: int,
    expected: dict[str, Any],
    stream: bool,
) -> None:
    asked: dict[str, Any] = {
        "model": talker.queue.model,
        "input": "Hello",
        "instructions": "Be brief.",
    }

    async def respond(sdk: openai.AsyncOpenAI, compared: str | None, **more: Any) -> Any:
        options = {"comparison_response_id": compared}
        body: Any = asked | more | {"prompt_cache_options": options}

        async def read() -> Any:
            if not more.get("stream"):
                return await sdk.responses.create(**body)
            events = [event async for event in await sdk.responses.create(**body)]
            assert events[0].response.prompt_cache_diagnostics is None
            return events[-1].response

        reading = asyncio.create_task(read())
        claim = await talker.claim_one()
        await talker.say(claim, "Hi", finish=FinishReason.STOP)
        await talker.finish(claim, cached=cached)
        return await reading

    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key) as sdk:
        first = await respond(sdk, None)
        assert first.prompt_cache_diagnostics is None
        second = await respond(sdk, first.id, stream=stream, **changes)
    found = second.prompt_cache_diagnostics.to_dict()
    if expected["type"] == "cache_miss":
        assert 0 < found.pop("cache_missed_tokens") <= first.usage.input_tokens
    assert found == expected


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("messages", {"diagnostics": 1}, "'diagnostics' must be an object"),
        (
            "messages",
            {"diagnostics": {"previous_message_id": 5}},
            "'diagnostics.previous_message_id' must be a string. Given: 5.",
        ),
        (
            "responses",
            {"prompt_cache_options": {"comparison_response_id": []}},
            "'prompt_cache_options.comparison_response_id' must be a string. Given: [].",
        ),
    ],
)
async def test_bad_options_are_refused_by_name(
    client: httpx.AsyncClient, talker: FakeWorker, path: str, body: dict[str, Any], param: str
) -> None:
    asked = {"model": talker.queue.model, "max_tokens": 8, "messages": [HELLO], "input": "Hello"}
    left_out = "input" if path == "messages" else "messages"
    asked.pop(left_out)
    response = await client.post(f"/v1/{path}", json=asked | body)
    assert response.status_code == 400
    assert param in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_that_no_cache_had_says_why(
    stack: Stack, key: str, client: httpx.AsyncClient, store: "Redis", stream: bool
) -> None:
    """The prompt begins with the earlier one, and the engine found too little of it."""
    worker, name = await serve_chats(
        store, form=chat_format(TEMPLATE), template=TEMPLATE, cache_block_tokens=16
    )
    long = {"system": "Be brief. " * 40}

    async def repeat(message_id: str, cached: int, **changes: Any) -> Any:
        asked: Any = PLAIN | changes | {"diagnostics": {"previous_message_id": message_id}}
        reading = asyncio.create_task(
            client.post("/v1/messages", json=asked | {"model": name, "stream": stream})
        )
        claim = await worker.claim_one()
        await worker.say(claim, "Hi", finish=FinishReason.STOP)
        await worker.finish(claim, cached=cached)
        response = await reading
        if not stream:
            return response.json()["diagnostics"]
        [ending] = [line for line in response.text.splitlines() if '"message_delta"' in line]
        return json.loads(ending.removeprefix("data: ")).get("diagnostics")

    def missed(detail: str, tokens: int) -> Any:
        reason = {"type": "unavailable", "detail": detail, "cache_missed_input_tokens": tokens}
        return {"cache_miss_reason": reason}

    task = asyncio.create_task(
        client.post(
            "/v1/messages",
            json=PLAIN | long | {"model": name, "diagnostics": {"previous_message_id": None}},
        )
    )
    claim = await worker.claim_one()
    prefixes = prefixes_of(claim.job.affinity)
    await worker.conclude(claim, "Hi")
    own = (await task).json()["id"]
    longest, digest = prefixes[0]
    assert await repeat(own, 0, **long) == missed("evicted", longest)
    await worker.queue.hold("another", added=[digest], ttl_ms=60_000)
    assert await repeat(own, 16, **long) == missed("other_worker", longest - 16)
    assert await repeat(own, longest, **long) is None
    short = await ask(worker, client, **PLAIN, diagnostics={"previous_message_id": None})
    assert await repeat(short["id"], 0) == missed("not_cached", short["usage"]["input_tokens"])
