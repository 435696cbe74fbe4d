"""`POST /v1/chat/completions`: from messages to a job, and from replies to a message."""

import asyncio
import base64
import re
import secrets
from typing import Any

import httpx
from redis.asyncio import Redis

from contract.messages import CallPiece, ChatFormat, Feature, Parsing
from contract.outcomes import FinishReason
from gateway.billing.ledger.drain import Drain
from gateway.platform.database.engine import Database
from gateway.records.limits import LimitName
from gateway.records.scopes import Scope
from tests.gateway.callers import caller
from tests.gateway.chats import (
    CHATS,
    FEATURES,
    HELLO,
    PARSERS,
    TOKENIZER,
    chat,
    chatting,
    joined,
    prompt_of,
    serve_chats,
    tool,
)
from tests.gateway.conftest import complete, eventually, nothing_left, serve
from tests.gateway.http_calls import message_of
from tests.gateway.tenants import change_tenant
from tests.support.cases import all_cases
from tests.support.events import parse_chunks
from tests.support.fake_worker import chat_format
from tests.support.stack import MODEL, Stack

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 24


async def test_chat_returns_a_whole_response(client: httpx.AsyncClient) -> None:
    response = await chat(client)
    assert response.status_code == 200, response.text
    assert response.headers["x-max-tokens-applied"] == "8"
    body = response.json()
    assert re.fullmatch(r"chatcmpl-[a-z2-7]{26}", body["id"])
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 8


async def test_stream_equals_the_whole_response(client: httpx.AsyncClient) -> None:
    whole = (await chat(client, n=2, temperature=1)).json()["choices"]
    response = await chat(client, n=2, temperature=1, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = parse_chunks(response.content)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    reported = joined(chunks)
    for choice in whole:
        message = {name: value for name, value in choice["message"].items() if value is not None}
        assert reported[choice["index"]] == message


async def test_messages_become_the_prompt_of_a_job(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    body = {
        "chat_template_kwargs": {"thinks": True, "unread": 1},
        "nonsense": 1,
        "verbosity": "low",
    }
    messages = [{"role": "system", "content": "Be brief"}, *HELLO]
    request = asyncio.create_task(chat(client, name, messages=messages, **body))
    claim = await worker.claim_one()
    assert prompt_of(claim) == "system: Be brief\nuser: Hello\nassistant:<think>"
    opening = len(TOKENIZER.encode("assistant:<think>", add_special_tokens=False).ids)
    assert claim.job.parsing == Parsing(
        finds_reasoning=True,
        hides_special_tokens=True,
        opening_tokens=opening,
        template_arguments={"thinks": True},
    )
    assert not claim.job.shows_special_tokens
    await worker.conclude(claim, "Hi", ".")
    response = await request
    assert response.headers["x-ignored-params"] == (
        "chat_template_kwargs.unread,nonsense,verbosity"
    )
    assert response.json()["choices"][0]["message"]["content"] == "Hi."
    assert response.json()["usage"]["prompt_tokens"] == len(claim.job.prompt_token_ids)
    assert await nothing_left(store, name)


@all_cases(
    ("parameters", "tools"),
    [
        ({"tools": [tool(), tool("sub")]}, ["add", "sub"]),
        ({"tools": [tool()], "tool_choice": "none"}, []),
        ({}, []),
    ],
    ids=["auto", "none", "without"],
)
async def test_job_names_the_calls_to_parse(
    client: httpx.AsyncClient,
    store: "Redis",
    parameters: dict[str, Any],
    tools: list[str],
) -> None:
    worker, name = await serve_chats(store)
    request = asyncio.create_task(chat(client, name, **parameters))
    claim = await worker.claim_one()
    parsing = claim.job.parsing
    assert parsing is not None
    assert [each["function"]["name"] for each in parsing.tools] == tools
    assert not parsing.has_hermes_calls
    assert ("tools" in prompt_of(claim)) is ("tools" in parameters)
    await worker.conclude(claim, "Hi")
    assert (await request).status_code == 200


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    """Return the `tool_choice` that allows some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@all_cases(
    ("parser", "expected"),
    [
        ("deepseek_v31", "<\uff5ctool\u2581calls\u2581begin\uff5c>"),
        ("llama3_json", '"parameters": '),
        ("qwen3_coder", "function=add"),
    ],
)
async def test_forced_call_has_the_models_own_format(
    client: httpx.AsyncClient, store: "Redis", parser: str, expected: str
) -> None:
    worker, name = await serve_chats(
        store,
        form=chat_format(**PARSERS | {"tool_parser": parser}),
        features=[*FEATURES, Feature.STRUCTURE, Feature.STRICT_TOOLS],
    )
    request = asyncio.create_task(chat(client, name, tools=[tool()], tool_choice="required"))
    claim = await worker.claim_one()
    assert claim.job.parsing is not None
    assert not claim.job.parsing.has_hermes_calls
    assert expected.replace('"', '\\"') in (claim.job.grammar or "")
    await worker.conclude(claim, "Hi")
    assert (await request).status_code == 200


async def test_call_marks_are_banned_without_a_choice_of_tools(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    request = asyncio.create_task(
        chat(client, name, tools=[tool()], tool_choice="none", bad_words=["x"])
    )
    claim = await worker.claim_one()
    assert claim.job.sampling.bad_words == ["x", "<tool_call>"]
    await worker.conclude(claim, "Hi")
    assert (await request).status_code == 200


async def test_strict_tools_of_a_foreign_format_are_best_effort(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store, features=[*FEATURES, Feature.STRUCTURE])
    strict = {"type": "function", "function": {"name": "add", "strict": True}}
    request = asyncio.create_task(chat(client, name, tools=[strict]))
    claim = await worker.claim_one()
    assert not claim.job.grammar
    await worker.conclude(claim, "Hi")
    assert (await request).headers["x-ignored-params"] == "tools.strict"


@all_cases("known", [[], [Feature.STRICT_TOOLS]], ids=["foreign", "known"])
@all_cases(
    ("parameters", "is_forced"),
    [
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"parallel_tool_calls": False}, False),
        ({"tool_choice": allowed("add")}, False),
        ({"tool_choice": allowed("add", mode="required")}, True),
        ({}, False),
    ],
    ids=["required", "named", "structure", "single", "allowed", "one", "auto"],
)
async def test_job_names_the_call_format_of_its_grammar(
    client: httpx.AsyncClient,
    store: "Redis",
    parameters: dict[str, Any],
    known: list[Feature],
    *,
    is_forced: bool,
) -> None:
    features = [*FEATURES, Feature.STRUCTURE, *known]
    worker, name = await serve_chats(store, features=features)
    request = asyncio.create_task(chat(client, name, tools=[tool(), tool("sub")], **parameters))
    claim = await worker.claim_one()
    job, is_foreign = claim.job, is_forced and not known
    assert job.parsing is not None
    assert job.parsing.has_hermes_calls is job.shows_special_tokens is is_foreign
    is_own_enforced = bool(known) and bool(parameters)
    assert bool(job.grammar) is (is_forced or is_own_enforced)
    assert [each["function"]["name"] for each in job.parsing.tools] == ["add", "sub"]
    if parameters.get("tool_choice", {}) == allowed("add"):
        assert "sub" not in (job.grammar or "")
    assert job.sampling.bad_words == []
    await worker.conclude(claim, "Hi")
    assert (await request).status_code == 200


async def test_only_the_first_call_is_returned_if_one_is_allowed(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store, form=chat_format(**PARSERS))
    body = {"tools": [tool(), tool("sub")], "parallel_tool_calls": False}
    request = asyncio.create_task(chat(client, name, **body))
    claim = await worker.claim_one()
    calls = [CallPiece(0, "add", "{}"), CallPiece(1, "sub", "{}")]
    said = worker.next_delta(claim, "", calls=calls, finish_reason=FinishReason.STOP)
    await worker.send(claim.job.gateway, deltas=[said])
    await worker.finish(claim)
    (choice,) = (await request).json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]


async def test_prompt_may_be_cut_within_the_opening(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    for side, opening_tokens in (("left", 1), ("right", 0)):
        truncation = {"truncate_prompt_tokens": 1, "truncation_side": side}
        request = asyncio.create_task(chat(client, name, **truncation))
        claim = await worker.claim_one()
        assert len(claim.job.prompt_token_ids) == 1
        assert claim.job.parsing is not None
        assert claim.job.parsing.opening_tokens == opening_tokens
        await worker.conclude(claim, "Hi")
        response = await request
        assert int(response.headers["x-prompt-truncated"]) > 0


async def test_template_argument_without_effect_is_refused_for_strict_tenants(
    stack: Stack,
) -> None:
    body = chatting(chat_template_kwargs={"unread": 1})
    async with caller(stack, "strict-talkers", Scope.COMPLETIONS) as strict:
        assert (await strict.post(CHATS, json=body)).status_code == 200
        await change_tenant(stack, "strict-talkers", strict_parameters=True)

        async def is_refused() -> bool:
            return (await strict.post(f"{CHATS}:estimate", json=body)).status_code == 400

        await eventually(is_refused, what="the change of strictness")
        path = "chat_template_kwargs.unread"
        response = await strict.post(CHATS, json=body)
    message_of(
        response, status=400, kind="invalid_request_error", code="unknown_parameter", param=path
    )


@all_cases("shows", [False, True])
async def test_parsers_get_their_special_tokens(
    client: httpx.AsyncClient, store: "Redis", *, shows: bool
) -> None:
    form = chat_format(**PARSERS, shows_special_tokens=shows)
    worker, name = await serve_chats(store, form=form)
    request = asyncio.create_task(chat(client, name))
    claim = await worker.claim_one()
    assert claim.job.shows_special_tokens is shows
    await worker.conclude(claim, "Hi")
    assert (await request).status_code == 200


async def test_job_of_a_completion_has_no_parsers(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, name = await serve_chats(store)
    request = asyncio.create_task(complete(client, model=name))
    claim = await worker.claim_one()
    assert claim.job.parsing is None
    await worker.conclude(claim, "Hi")
    assert (await request).json()["object"] == "text_completion"


@all_cases("is_streamed", [False, True])
async def test_reasoning_and_calls_are_separated(
    client: httpx.AsyncClient, store: "Redis", *, is_streamed: bool
) -> None:
    worker, name = await serve_chats(store)
    options = {"stream_options": {"include_usage": True}} if is_streamed else {}
    request = asyncio.create_task(chat(client, name, tools=[tool()], stream=is_streamed, **options))
    claim = await worker.claim_one()
    deltas = [
        worker.next_delta(claim, "", reasoning="Hm.", reasoning_tokens=1),
        worker.next_delta(claim, "", calls=[CallPiece(0, "add", '{"a"')]),
        worker.next_delta(
            claim, "", calls=[CallPiece(0, "", ":1}")], finish_reason=FinishReason.STOP
        ),
    ]
    for delta in deltas:
        await worker.send(claim.job.gateway, deltas=[delta])
    await worker.finish(claim)
    response = await request
    if is_streamed:
        chunks = parse_chunks(response.content)
        deltas_told = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert [each.get("reasoning_content") for each in deltas_told[:2]] == [None, "Hm."]
        calls = [call for each in deltas_told for call in each.get("tool_calls", ())]
        assert "".join(call["function"]["arguments"] for call in calls) == '{"a":1}'
        finish, usage = chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
    else:
        body = response.json()
        (choice,) = body["choices"]
        message, calls = choice["message"], choice["message"]["tool_calls"]
        assert (message["content"], message["reasoning_content"]) == (None, "Hm.")
        assert calls[0]["function"] == {"name": "add", "arguments": '{"a":1}'}
        finish, usage = choice["finish_reason"], body["usage"]
    assert (finish, calls[0]["type"]) == ("tool_calls", "function")
    assert re.fullmatch(r"call_[0-9a-f]{24}", calls[0]["id"])
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 1}


async def test_estimate_reports_tokens_and_parameters(client: httpx.AsyncClient) -> None:
    body = chatting(messages=[*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO])
    reported = (await client.post(f"{CHATS}:estimate", json=body)).json()
    usage = (await client.post(CHATS, json=body)).json()["usage"]
    assert reported["prompt_tokens"] == usage["prompt_tokens"]
    assert (reported["max_tokens"], reported["completion_tokens_max"]) == (8, 8)


async def test_images_travel_with_their_job(client: httpx.AsyncClient, store: "Redis") -> None:
    template = (
        "{% for part in messages[0].content %}"
        "{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}"
    )
    worker, name = await serve_chats(
        store,
        form=chat_format(template, content_format="parts"),
        template=template,
        features=[Feature.CHAT, Feature.IMAGES],
        image_token="<image>",
        max_images=2,
    )
    uri = "data:image/png;base64," + base64.b64encode(PNG).decode()
    image = {"type": "image_url", "image_url": {"url": uri}}
    content = [{"type": "text", "text": "What is this?"}, image]
    request = asyncio.create_task(
        chat(client, name, messages=[{"role": "user", "content": content}])
    )
    claim = await worker.claim_one()
    assert claim.job.images == [PNG]
    assert prompt_of(claim) == "What is this?<image>"
    await worker.conclude(claim, "A cat")
    assert (await request).status_code == 200


LARGE_INTEGER = [
    {"type": "function", "function": {"name": "add", "parameters": {"maximum": 10**30}}}
]


@all_cases(
    ("parameters", "code", "param", "text"),
    [
        ({"messages": []}, "invalid_value", "messages", "at least"),
        ({"messages": None}, "missing_required_parameter", "messages", "required"),
        ({"tools": [{}]}, "invalid_value", "tools", "tools[0]"),
        ({"tools": LARGE_INTEGER}, "invalid_value", "tools", "2^64"),
        ({"temperature": 3}, "invalid_value", "temperature", "at most 2"),
        ({"max_tokens": 5000}, "context_length_exceeded", "max_tokens", "2048"),
        ({"prompt": "a"}, "unsupported_parameter", "prompt", "prompt"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_wrong_request_is_refused_by_name(
    client: httpx.AsyncClient, parameters: dict[str, Any], code: str, param: str, text: str
) -> None:
    response = await chat(client, **parameters)
    message = message_of(response, status=400, kind="invalid_request_error", code=code, param=param)
    assert text in message


async def test_prompt_that_is_too_long_is_refused(client: httpx.AsyncClient) -> None:
    for length in (20_000, 250_000):
        response = await chat(client, messages=[{"role": "user", "content": "a " * (length // 2)}])
        message = message_of(
            response,
            status=400,
            kind="invalid_request_error",
            code="context_length_exceeded",
            param="messages",
        )
        assert message.startswith(
            "This model's maximum context length is 2048 tokens. However, you requested "
        )
        assert "in the messages" in message


async def test_template_may_refuse_the_messages(client: httpx.AsyncClient, store: "Redis") -> None:
    _, name = await serve_chats(store)
    response = await chat(client, name, messages=[{"role": "user", "content": "refuse"}])
    message = message_of(
        response, status=400, kind="invalid_request_error", code="invalid_value", param="messages"
    )
    assert message.endswith("I do not like it.")


@all_cases(
    ("given", "param"),
    [
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning": {"enabled": False}}, "reasoning.enabled"),
        ({"reasoning_effort": "low"}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
    ],
)
async def test_reasoning_without_a_switch_cannot_be_turned_off(
    client: httpx.AsyncClient, store: "Redis", given: dict[str, Any], param: str | None
) -> None:
    _, name = await serve_chats(store)
    body = {"model": name, "messages": HELLO, **given}
    response = await client.post(f"{CHATS}:estimate", json=body)
    if param is None:
        assert response.json()["ignored_parameters"]
    else:
        code = "unsupported_parameter"
        assert response.json()["error"].items() >= {"param": param, "code": code}.items()


@all_cases(
    ("path", "given", "param"),
    [
        (CHATS, {"reasoning": {"max_tokens": 4}}, "reasoning.max_tokens"),
        (CHATS, {"reasoning_budget_tokens": 4}, "reasoning_budget_tokens"),
        (CHATS, {"reasoning_effort": 4}, "reasoning_effort"),
        ("/v1/responses", {"reasoning": {"effort": 4}}, "reasoning.effort"),
    ],
)
async def test_bound_of_reasoning_turns_it_on_or_is_named(
    client: httpx.AsyncClient, store: "Redis", path: str, given: dict[str, Any], param: str
) -> None:
    marks = {"reasoning_start": "<think>", "reasoning_end": "</think>"}
    switched = "{% if enable_thinking %}<think>{% else %}</think>{% endif %}"
    for opening, is_on in ((switched, True), ("</think>", False), ("", True)):
        template = (
            "{{ messages[0].content }}{% if add_generation_prompt %}" + opening + "{% endif %}"
        )
        worker, name = await serve_chats(
            store,
            form=chat_format(template, **PARSERS, **marks),
            template=template,
            features=[*FEATURES, Feature.THINKING_BUDGET],
        )
        body = {"model": name, "messages": HELLO, "max_tokens": 8}
        if path != CHATS:
            body = {"model": name, "input": "Hello"}
        request = asyncio.create_task(client.post(path, json=body | given))
        claim = await worker.claim_one()
        assert prompt_of(claim).endswith("<think>") is (opening == switched)
        assert claim.job.sampling.thinking_budget == (4 if is_on else None)
        await worker.conclude(claim, "Hi")
        ignored = (await request).headers.get("x-ignored-params")
        assert ignored == (None if is_on else param)


@all_cases(
    ("features", "parameters", "param", "need"),
    [
        ([], {}, "messages", "a chat template"),
        ([Feature.CHAT], {"tools": [tool()]}, "tools", "tool call parser"),
        (
            FEATURES,
            {"tools": [tool()], "tool_choice": "required"},
            "tool_choice",
            "an engine with structured output",
        ),
        (
            FEATURES,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}],
                    }
                ]
            },
            "messages",
            "image input",
        ),
    ],
    ids=["chat", "tools", "forced", "images"],
)
async def test_model_without_a_feature_refuses_it(
    client: httpx.AsyncClient,
    store: "Redis",
    features: list[Feature],
    parameters: dict[str, Any],
    param: str,
    need: str,
) -> None:
    form = chat_format(**PARSERS) if features else None
    name = f"cannot-{secrets.token_hex(4)}"
    await serve(store, name, features=features, chat=form)
    response = await chat(client, name, **parameters)
    message = message_of(
        response,
        status=400,
        kind="invalid_request_error",
        code="unsupported_parameter",
        param=param,
    )
    assert need in message


async def test_image_by_url_is_refused_where_no_host_is_allowed(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    _, name = await serve_chats(
        store, features=[*FEATURES, Feature.IMAGES], image_token="<image>", max_images=1
    )
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
    response = await chat(client, name, messages=[{"role": "user", "content": [image]}])
    path = "messages[0].content[0].image_url.url"
    message = message_of(
        response, status=400, kind="invalid_request_error", code="invalid_value", param=path
    )
    assert "fetches no images from URLs" in message


async def test_limits_are_checked_before_images_are_fetched(stack: Stack, store: "Redis") -> None:
    _, name = await serve_chats(
        store, features=[*FEATURES, Feature.IMAGES], image_token="<image>", max_images=1
    )
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
    with_image = chatting(name, messages=[{"role": "user", "content": [image]}])
    limits = {LimitName.REQUESTS_PER_MINUTE: 1}
    async with caller(stack, "limited-talkers", Scope.COMPLETIONS, limits=limits) as limited:
        # A refused request uses no limit.
        for _ in range(2):
            assert (await limited.post(CHATS, json=with_image)).status_code == 400
        assert (await chat(limited)).status_code == 200
        assert (await limited.post(CHATS, json=with_image)).status_code == 429


async def test_unusable_template_is_a_server_error(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    template = "{% for message in messages %}"
    _, name = await serve_chats(store, form=chat_format(template), template=template)
    response = await chat(client, name)
    assert response.status_code == 503
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "model_misconfigured"


async def test_unpublished_template_is_fetched_again(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    _, name = await serve_chats(store, form=ChatFormat(secrets.token_hex(32)), template=None)
    for _ in range(2):
        response = await chat(client, name)
        assert response.status_code == 503
        assert response.json()["error"]["code"] != "model_misconfigured"


async def test_models_report_whether_they_serve_chats(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    _, name = await serve_chats(store, features=[Feature.CHAT])
    mute = f"mute-{secrets.token_hex(4)}"
    await serve(store, mute)
    await asyncio.gather(chat(client, mute), chat(client, name, temperature=3))
    listed = (await client.get("/v1/models")).json()["data"]
    served = {each["id"]: set(each["supported_chat_parameters"]) for each in listed}
    assert served[mute] == set()
    assert {"messages", "temperature"} <= served[name]
    assert not {"tools", "thinking_budget"} & served[name]
    assert {"tools", "include_reasoning"} <= served[MODEL]


async def test_usage_names_the_chat_endpoint(
    stack: Stack, client: httpx.AsyncClient, store: "Redis"
) -> None:
    request_id = (await chat(client)).json()["id"]
    database = Database(stack.database_url)
    await Drain(store, database).run()
    await database.aclose()
    receipt = (await client.get(f"/v1/usage/requests/{request_id}")).json()
    assert (receipt["endpoint"], receipt["outcome"]) == ("chat.completions", "finished")
