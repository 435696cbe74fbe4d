"""`/tokenize` and `/detokenize`, as clients of vLLM and of llama.cpp use them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gateway.records.scopes import Scope
from tests.gateway.completions.prompt.building import tiny_tokenizer
from tests.gateway.conftest import MAX_BODY_BYTES, eventually, gateway_client, serve
from tests.gateway.http_calls import message_of
from tests.gateway.tenants import change_tenant
from tests.support.cases import all_cases
from tests.support.stack import MODEL, Stack

TEXT = "Once upon a time,\n Grüße 😀"
TOKENIZER = tiny_tokenizer()
IDS = TOKENIZER.encode(TEXT).ids
HELLO = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": "http://a/b"}]}
SERVED_MEANWHILE = 5
"""Requests that are served while a long text is tokenized, at least."""


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client that may use one model only, so that it need not be named."""
    key = await asyncio.to_thread(stack.key, "acme", allowed_models=[MODEL])
    async with gateway_client(stack.url, key) as client:
        yield client


async def ask(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    """Post a body that must be accepted."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    answer: dict[str, Any] = response.json()
    return answer


@all_cases("prefix", ["", "/v1"])
async def test_text_round_trips_as_in_vllm(client: httpx.AsyncClient, prefix: str) -> None:
    reported = await ask(client, f"{prefix}/tokenize", model=MODEL, prompt=TEXT)
    assert reported == {"count": len(IDS), "max_model_len": 2048, "tokens": IDS, "token_strs": None}
    back = await ask(client, f"{prefix}/detokenize", model=MODEL, tokens=reported["tokens"])
    assert back == {"prompt": TEXT}


@all_cases("prefix", ["", "/v1"])
async def test_text_round_trips_as_in_llamacpp(client: httpx.AsyncClient, prefix: str) -> None:
    reported = await ask(client, f"{prefix}/tokenize", content=TEXT)
    assert reported == {"tokens": IDS}
    assert await ask(client, f"{prefix}/detokenize", tokens=IDS) == {"content": TEXT}


async def test_vllm_shows_how_the_vocabulary_writes_tokens(client: httpx.AsyncClient) -> None:
    reported = await ask(client, "/tokenize", model=MODEL, prompt="a time", return_token_strs=True)
    assert reported["token_strs"] == TOKENIZER.encode("a time").tokens


async def test_llamacpp_shows_pieces_as_text_or_bytes(client: httpx.AsyncClient) -> None:
    reported = await ask(client, "/tokenize", content="é a 😀", with_pieces=True)
    assert [piece["id"] for piece in reported["tokens"]] == TOKENIZER.encode("é a 😀").ids
    pieces = [piece["piece"] for piece in reported["tokens"]]
    assert any(isinstance(piece, list) for piece in pieces)
    whole = b"".join(bytes(p) if isinstance(p, list) else p.encode() for p in pieces)
    assert whole.decode() == "é a 😀"


async def test_llamacpp_reads_special_tokens_as_text_if_asked(client: httpx.AsyncClient) -> None:
    text = "<|user|>hi</s>"
    parsed = (await ask(client, "/tokenize", content=text))["tokens"]
    assert parsed == (await ask(client, "/tokenize", content=text, parse_special=True))["tokens"]
    assert {TOKENIZER.token_to_id("<|user|>"), 1} <= set(parsed)
    plain = (await ask(client, "/tokenize", content=text, parse_special=False))["tokens"]
    assert {TOKENIZER.token_to_id("<|user|>"), 1}.isdisjoint(plain)
    assert await ask(client, "/detokenize", tokens=plain) == {"content": text}


async def test_empty_text_has_no_tokens(client: httpx.AsyncClient) -> None:
    assert await ask(client, "/tokenize", content="") == {"tokens": []}
    assert (await ask(client, "/tokenize", prompt=""))["count"] == 0
    assert await ask(client, "/detokenize", tokens=[]) == {"content": ""}


async def test_dialect_vllm_detokenizes_to_a_prompt_without_a_model(
    client: httpx.AsyncClient,
) -> None:
    response = await client.post(
        "/detokenize", json={"tokens": IDS}, headers={"x-api-dialect": "vllm"}
    )
    assert response.json() == {"prompt": TEXT}


@all_cases(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": None, "content": None}, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": 7}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "content", "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": [HELLO]}, "messages", "invalid_value"),
        ("/tokenize", {"messages": 7}, "messages", "invalid_value"),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"messages": [HELLO], "tools": 7}, "tools", "invalid_value"),
        (
            "/tokenize",
            {"messages": [HELLO], "add_generation_prompt": 1},
            "add_generation_prompt",
            "invalid_value",
        ),
        (
            "/tokenize",
            {"messages": [ANSWER], "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "invalid_value",
        ),
        (
            "/tokenize",
            {"messages": [HELLO], "chat_template": "{{ messages }}"},
            "chat_template",
            "unsupported_parameter",
        ),
        ("/tokenize", {"messages": [IMAGE]}, "messages", "unsupported_parameter"),
        ("/tokenize", {"prompt": "a", "model": 7}, "model", "invalid_value"),
        (
            "/tokenize",
            {"prompt": "a", "return_token_strs": 1},
            "return_token_strs",
            "invalid_value",
        ),
        ("/tokenize", {"content": "a", "parse_special": "no"}, "parse_special", "invalid_value"),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": "5"}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": {"a": 5}}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [5, True]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [5, 5.5]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [[5]]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [2048]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [10**400]}, "tokens", "invalid_value"),
    ],
)
async def test_wrong_parameter_is_named(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    response = await client.post(path, json=body)
    message = message_of(response, status=400, kind="invalid_request_error", code=code, param=param)
    assert f"'{param}" in message


@all_cases(
    ("content", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"content": "\xff"}', 400),
        (b'{"tokens": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", 400),
        (b'{"content": "' + b"a" * MAX_BODY_BYTES + b'"}', 413),
    ],
    ids=["nothing", "list", "no UTF-8", "deep", "large"],
)
@all_cases("path", ["/tokenize", "/detokenize"])
async def test_unreadable_body_is_refused(
    client: httpx.AsyncClient, path: str, content: bytes, status: int
) -> None:
    response = await client.post(path, content=content)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_longest_body_does_not_block_other_requests(client: httpx.AsyncClient) -> None:
    # A line break is two bytes of JSON.
    body = {"content": "a b c\n" * (MAX_BODY_BYTES // 7 - 20), "with_pieces": True}

    async def are_served() -> bool:
        served = 0
        asking = asyncio.create_task(ask(client, "/tokenize", **body))
        while not asking.done():
            assert (await client.get("/healthz")).status_code == 200
            served += 1
        assert len((await asking)["tokens"]) > 100_000
        return served >= SERVED_MEANWHILE

    # A blocked gateway would delay all of them until its end; one delay may be this process.
    await eventually(are_served, what="other requests being served meanwhile")


async def test_unknown_parameters_are_named_and_refused_for_strict_tenants(
    client: httpx.AsyncClient, stack: Stack
) -> None:
    body = {"content": "a", "zeta": 1, "alpha": None, "beta\r\n": 2}
    response = await client.post("/tokenize", json=body)
    assert response.headers["x-ignored-params"] == "zeta"
    plain = await client.post("/detokenize", json={"tokens": [5]})
    assert "x-ignored-params" not in plain.headers
    strict = await asyncio.to_thread(stack.key, "strict", allowed_models=[MODEL])
    await change_tenant(stack, "strict", strict_parameters=True)
    async with gateway_client(stack.url, strict) as strict_client:
        message_of(
            await strict_client.post("/tokenize", json={"content": "a", "zeta": 1}),
            status=400,
            kind="invalid_request_error",
            code="unknown_parameter",
            param="zeta",
        )
        assert (await strict_client.post("/tokenize", json={"content": "a"})).status_code == 200


async def test_tokenizing_requires_the_scope_of_completions(stack: Stack) -> None:
    async with gateway_client(stack.url, None) as anonymous:
        for path in ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"):
            response = await anonymous.post(path, json={"content": "a", "tokens": [5]})
            message_of(response, status=401, kind="authentication_error", code="invalid_api_key")
        for path in ("/tokenizer_info", "/v1/tokenizer_info"):
            response = await anonymous.get(path)
            message_of(response, status=401, kind="authentication_error", code="invalid_api_key")
    admin = await asyncio.to_thread(stack.key, "acme", scopes=[Scope.ADMIN])
    async with gateway_client(stack.url, admin) as client:
        for response in (
            await client.post("/tokenize", json={"content": "a"}),
            await client.get("/tokenizer_info"),
        ):
            message_of(response, status=403, kind="permission_error", code="insufficient_scope")


async def test_model_is_found_as_for_completions(
    client: httpx.AsyncClient, stack: Stack, store: "Redis"
) -> None:
    unknown = await client.post("/tokenize", json={"prompt": "a", "model": "gpt-9"})
    message_of(
        unknown, status=404, kind="invalid_request_error", code="model_not_found", param="model"
    )
    limited = await asyncio.to_thread(stack.key, "acme", allowed_models=["tokenize-other"])
    async with gateway_client(stack.url, limited) as limited_client:
        refused = await limited_client.post("/tokenize", json={"prompt": "a", "model": MODEL})
        assert refused.status_code == 404
        refused = await limited_client.get("/tokenizer_info", params={"model": MODEL})
        assert refused.status_code == 404
        await serve(store, "tokenize-other", context_window=77)
        reported = await ask(limited_client, "/tokenize", prompt="a")
        assert reported["max_model_len"] == 77
        config = (await limited_client.get("/tokenizer_info")).json()
        assert config["model_max_length"] == 77
        # This model has no chat template.
        assert config["bos_token"] == "<s>"
        assert "chat_template" not in config


async def test_errors_have_the_style_of_the_dialect(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/tokenize", json={"content": 7}, headers={"x-api-dialect": "llamacpp"}
    )
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, 400)
    assert "param" not in error
    unknown = await client.post(
        "/tokenize", json={"content": "a"}, headers={"x-api-dialect": "klingon"}
    )
    message_of(
        unknown,
        status=400,
        kind="invalid_request_error",
        code="invalid_value",
        param="X-Api-Dialect",
    )
