"""Errors have the dialect's envelope, and the right status, code and headers."""

import asyncio
import gc
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import brotli
import httpx
from backports import zstd
from pydantic import SecretStr
from redis.asyncio import Redis

from contract.dialect import Dialect
from contract.messages import WorkerState
from gateway.auth.api_key import ApiKey
from gateway.completions.endpoints.event_ids import EVENT_IDS_HEADER
from gateway.dialects.profile import PROFILES
from gateway.dialects.wire import MAX_MEMBERS
from gateway.http.body import BodyLimits
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.settings import Settings
from gateway.records.errors import (
    ApiError,
    AuthenticationError,
    ErrorStyle,
    InvalidJsonError,
    InvalidParameterError,
)
from tests.gateway.callers import let_expire
from tests.gateway.conftest import (
    MAX_BODY_BYTES,
    MOST_WAITING_OF_TENANT,
    asking,
    complete,
    eventually,
    gateway_client,
    jobs_in_redis,
    nothing_left,
    serve,
)
from tests.gateway.http_calls import connection, head, message_of, post, read_response
from tests.gateway.management_api import running_management
from tests.support.cases import all_cases
from tests.support.stack import MODEL, Stack

INVALID = "invalid_request_error"


@all_cases(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Basic dXNlcjpwYXNz",
        "Bearer sk-nonsense",
        "Bearer " + "x" * 10_000,
        "Bearer a.b.c",
        "Bearer \u00e9\u00ff",
    ],
    ids=["none", "empty", "bare", "basic", "malformed", "long", "no-jwt", "latin-1"],
)
@all_cases("path", ["/v1/completions", "/v1/models", f"/v1/models/{MODEL}"])
async def test_request_without_a_valid_credential_gets_401(
    stack: Stack, authorization: str | None, path: str
) -> None:
    headers = {} if authorization is None else {b"authorization": authorization.encode("latin-1")}
    async with gateway_client(stack.url, None) as anonymous:
        method = "POST" if path == "/v1/completions" else "GET"
        response = await anonymous.request(method, path, headers=headers)
    message_of(response, status=401, kind="authentication_error", code="invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


async def test_unknown_key_gets_401_and_is_not_repeated(
    client: httpx.AsyncClient,
) -> None:
    key = ApiKey.generate().reveal()
    response = await client.post(
        "/v1/completions", json=asking(), headers={"authorization": f"Bearer {key}"}
    )
    message = message_of(response, status=401, kind="authentication_error", code="invalid_api_key")
    assert key[3:15] not in message


async def test_expired_key_gets_401_with_its_own_code(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    expires_at = datetime.now(UTC) + timedelta(hours=1)
    key = await asyncio.to_thread(stack.key, "acme", expires_at=expires_at)
    await let_expire(stack, key)
    response = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    message_of(response, status=401, kind="authentication_error", code="expired_token")


async def test_key_without_the_scope_gets_403(stack: Stack, client: httpx.AsyncClient) -> None:
    key = await asyncio.to_thread(stack.key, "acme", scopes=["admin"])
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
        response = await client.request(method, path, headers={"authorization": f"Bearer {key}"})
        message = message_of(
            response, status=403, kind="permission_error", code="insufficient_scope"
        )
        assert "completions" in message


@all_cases("path", ["/v1", "/v2/completions", "/v1/completionsx", "/v1/%ff%00"])
async def test_unknown_route_gets_404(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={})
    message = message_of(response, status=404, kind=INVALID, code="not_found")
    assert message.startswith("The route POST /")


@all_cases(
    ("method", "path", "meant"),
    [
        ("GET", "/files", "/v1/files"),
        ("POST", "/batches", "/v1/batches"),
        ("POST", "/v1/v1/completions", "/v1/completions"),
        ("POST", "/api/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "/files/", "/v1/files"),
    ],
)
async def test_route_with_a_similar_path_is_named(
    client: httpx.AsyncClient, method: str, path: str, meant: str
) -> None:
    response = await client.request(method, path)
    message = message_of(response, status=404, kind=INVALID, code="not_found")
    assert message == f"Use {method} {meant}. The route {method} {path} does not exist."


async def test_path_with_a_slash_too_many_is_served(client: httpx.AsyncClient) -> None:
    models = (await client.get("/v1/models")).json()
    for path in ("/v1/models/", "/v1/models//", "//v1/models", "//v1/models/"):
        # As a whole URL: httpx would join another path.
        url = client.base_url.copy_with(raw_path=path.encode())
        assert (await client.get(url)).json() == models
    for path in ("/v1/completions/", "/v1/chat/completions/", "/v1/messages/"):
        assert (await client.post(path, json={})).status_code == 400


async def test_unknown_model_gets_404(client: httpx.AsyncClient) -> None:
    response = await complete(client, model="gpt-9")
    message = message_of(response, status=404, kind=INVALID, code="model_not_found", param="model")
    assert message == 'The model "gpt-9" does not exist or you do not have access to it.'


@all_cases(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("PUT", "/v1/models/x", "GET"),
        ("POST", "/healthz", "GET"),
    ],
)
async def test_wrong_method_gets_405_with_the_allowed_methods(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    response = await client.request(method, path)
    message_of(response, status=405, kind=INVALID, code="method_not_allowed")
    assert response.headers["allow"] == allowed


@all_cases(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model":NaN}', "invalid_json"),
        ('{"model":"x"}'.encode("utf-16"), "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "invalid_json"),
        (b'{"a":' * 9000 + b"1" + b"}" * 9000, "invalid_json"),
    ],
    ids=["empty", "truncated", "nan", "utf-16", "array", "deep", "very-deep"],
)
async def test_body_that_is_no_json_object_gets_400(
    client: httpx.AsyncClient, body: bytes, code: str
) -> None:
    for path in ("/v1/completions", "/v1/batches"):
        response = await client.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        message_of(response, status=400, kind=INVALID, code=code)


@all_cases(
    ("method", "path", "known"),
    [
        ("GET", "/v1/usage", "limit"),
        ("GET", "/v1/batches", "limit"),
        ("GET", "/v1/models", "format"),
        ("GET", "/v1/tokenizer_info", "model"),
        ("GET", "/v1/completions/cmpl-x", "starting_after"),
        ("POST", "/v1/responses/resp_x/cancel", "none"),
        ("POST", "/v1/tokenize", "none"),
    ],
)
async def test_unknown_or_repeated_parameter_of_a_query_gets_400_naming_it(
    client: httpx.AsyncClient, method: str, path: str, known: str
) -> None:
    query = {"api-version": "preview", "beta": "true"}
    response = await client.request(method, path, params={**query, "from": ""}, json={})
    code = "unknown_parameter"
    message = message_of(response, status=400, kind=INVALID, code=code, param="from")
    assert known in message
    response = await client.request(method, f"{path}?beta=1&beta=1", json={})
    message_of(response, status=400, kind=INVALID, code="invalid_value", param="beta")


async def test_unknown_parameter_of_a_generations_query_is_named(client: httpx.AsyncClient) -> None:
    completion = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    for path, body in (
        ("/v1/completions", completion),
        ("/v1/completions:estimate", completion),
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/messages/count_tokens", chat),
        ("/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 2}),
    ):
        query = "trace=1&trace=2&beta=true&%C3%A4=1"
        response = await client.post(f"{path}?{query}", json={**body, "zeta": 1})
        assert response.status_code == 200, response.text
        named = response.headers["x-ignored-params"].split(",")
        assert {"trace", "zeta"} <= {*named}
        assert not {"beta", "ä"} & {*named}
    stream = {**completion, "stream": True}
    headers = {EVENT_IDS_HEADER: "true"}
    begun = await client.post("/v1/completions?trace=1", json=stream, headers=headers)
    position = next(line[4:] for line in begun.text.splitlines() if line.startswith("id: "))
    headers = {"last-event-id": position}
    resumed = await client.post("/v1/completions?trace=1", json=stream, headers=headers)
    assert resumed.text == begun.text.partition("\n\n")[2]
    assert resumed.headers["x-ignored-params"] == "trace"


@all_cases(
    ("parameters", "code", "param"),
    [
        ({"model": None}, "missing_required_parameter", "model"),
        ({"n": "2"}, "invalid_value", "n"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"logit_bias": {"1" * 5000: 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"2048": 1}}, "invalid_value", "logit_bias"),
        ({"prompt": [5, 99999]}, "invalid_value", "prompt"),
        ({"prompt": [5, 10**400]}, "invalid_value", "prompt"),
        ({"prompt": ["a", "b"], "best_of": 1000}, "invalid_value", "best_of"),
        ({"stream_options": {}}, "invalid_value", "stream_options"),
        ({"best_of": 2, "stream": True}, "invalid_value", "best_of"),
        ({"grammar": "root ::= x"}, "unsupported_parameter", "grammar"),
        ({"prompt": [5] * 2048}, "context_length_exceeded", "prompt"),
        (
            {"max_tokens": 3000, "context_length_exceeded_behavior": "error"},
            "context_length_exceeded",
            "max_tokens",
        ),
        (
            {
                "max_tokens": None,
                "max_completion_tokens": 3000,
                "context_length_exceeded_behavior": "error",
            },
            "context_length_exceeded",
            "max_completion_tokens",
        ),
    ],
)
async def test_wrong_parameter_gets_400_naming_it(
    client: httpx.AsyncClient, store: "Redis", parameters: dict[str, Any], code: str, param: str
) -> None:
    response = await complete(client, **parameters)
    message = message_of(response, status=400, kind=INVALID, code=code, param=param)
    assert param in message
    await eventually(lambda: nothing_left(store, MODEL), what="an empty queue")


async def test_missing_prompt_gets_400_where_the_dialect_has_no_default(
    client: httpx.AsyncClient,
) -> None:
    response = await client.post(
        "/v1/completions", json=asking(prompt=None), headers={"x-api-dialect": "fireworks"}
    )
    message_of(
        response, status=400, kind=INVALID, code="missing_required_parameter", param="prompt"
    )


async def test_one_bad_prompt_refuses_the_request_naming_its_place(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    response = await complete(client, prompt=[[5], [6, 2048]])
    message = message_of(response, status=400, kind=INVALID, code="invalid_value", param="prompt")
    assert message == "'prompt[1][1]' must be a token id from 0 to 2047. Given: 2048."
    await eventually(lambda: nothing_left(store, MODEL), what="an empty queue")


@all_cases("media_type", ["text/plain", "application/x-www-form-urlencoded", "json"])
async def test_other_media_type_gets_415(client: httpx.AsyncClient, media_type: str) -> None:
    response = await client.post(
        "/v1/completions", content=json.dumps(asking()), headers={"content-type": media_type}
    )
    message = message_of(response, status=415, kind=INVALID, code="unsupported_media_type")
    assert f'Given: "{media_type}".' in message


@all_cases(
    "media_type", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"]
)
async def test_json_by_any_of_its_names_is_read(client: httpx.AsyncClient, media_type: str) -> None:
    response = await client.post(
        "/v1/completions", content=json.dumps(asking()), headers={"content-type": media_type}
    )
    assert response.status_code == 200


async def test_body_declared_too_large_gets_413_before_it_is_sent(stack: Stack, key: str) -> None:
    async with connection(stack.url) as (reader, writer):
        writer.write(head(key, f"content-length: {MAX_BODY_BYTES + 1}"))
        response = await read_response(reader)
    message = message_of(response, status=413, kind=INVALID, code="payload_too_large")
    assert str(MAX_BODY_BYTES) in message


async def test_body_that_grows_too_large_in_chunks_gets_413(stack: Stack, key: str) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    async with connection(stack.url) as (reader, writer):
        writer.write(head(key, "transfer-encoding: chunked"))
        writer.write(chunk * (MAX_BODY_BYTES // 0x10000 + 1))
        response = await read_response(reader)
    message_of(response, status=413, kind=INVALID, code="payload_too_large")


async def test_body_of_too_many_parts_gets_413_before_it_is_parsed(stack: Stack, key: str) -> None:
    body = b'{"prompt":[' + b"[]," * (MAX_BODY_BYTES // 3 - 10) + b"[]]}"
    async with connection(stack.url) as (reader, writer):
        # The last byte never arrives: the part before it is refused.
        writer.write(head(key, f"content-length: {len(body) + 1}") + body)
        response = await read_response(reader)
    message = message_of(response, status=413, kind=INVALID, code="payload_too_large")
    assert f"at most {MAX_MEMBERS} arrays, objects and members" in message


async def test_largest_allowed_body_is_read(client: httpx.AsyncClient) -> None:
    body = json.dumps(asking(max_tokens=1)).encode()
    response = await client.post(
        "/v1/completions",
        content=body + b" " * (MAX_BODY_BYTES - len(body)),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 200


@all_cases(
    ("window", "given", "expected"),
    [
        (4096, {}, BodyLimits(8 << 20, 262_144, MAX_MEMBERS)),
        (131_072, {}, BodyLimits(131_072 * 168, 1_048_576, 524_288)),
        (1_000_000, {}, BodyLimits(32 << 20, 1_600_000, 800_000)),
        (1_000_000, {"max_body_bytes": 100}, BodyLimits(100, 1_600_000, 800_000)),
        (1_000_000, {"max_body_items": 100}, BodyLimits(32 << 20, 100, MAX_MEMBERS)),
    ],
)
def test_bodies_grow_with_the_largest_window_unless_limited(
    window: int, given: dict[str, int], expected: BodyLimits
) -> None:
    settings = Settings(
        database_url=SecretStr("sqlite://"),
        redis_url="redis://a",
        **given,  # type: ignore[arg-type]
    )
    assert BodyLimits.of(settings, window=window) == expected


async def test_body_that_does_not_arrive_gets_408(stack: Stack, key: str) -> None:
    settings = Settings(
        database_url=SecretStr(stack.database_url),
        redis_url=stack.redis.url,
        body_timeout=timedelta(seconds=0.5),
    )

    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    # In this process, so that no other request has so little time.
    async with running_management(settings) as gateway:
        loop = asyncio.get_running_loop()
        began = loop.time()
        response = await gateway.call(key, "POST", "/v1/completions", content=body())
        took = loop.time() - began
        async with gateway.services[LoopTurns].slice_of("another tenant"):
            # The bytes that arrived wait longer for their turn than the client may take to send.
            long = asyncio.create_task(
                gateway.call(key, "POST", "/v1/completions", content=b" " * 100_000)
            )
            await asyncio.sleep(1)
        assert (await long).status_code == 400
    message = message_of(response, status=408, kind="timeout_error", code="request_timeout")
    assert "0.5 seconds" in message
    assert took > 0.4


@all_cases("temperature", [1, 9])
async def test_body_of_a_refused_request_is_freed_at_once(
    stack: Stack, key: str, temperature: int
) -> None:
    body = {"model": MODEL, "prompt": "a b c " * 20_000, "temperature": temperature}
    settings = Settings(database_url=SecretStr(stack.database_url), redis_url=stack.redis.url)
    async with running_management(settings) as gateway:
        gc.disable()
        try:
            refused = await gateway.call(key, "POST", "/v1/completions", body)
            await asyncio.sleep(0.1)  # The task of this test refers to what it awaited last.
            # A cycle of an error and a frame would keep the body until the collector runs.
            left = [str(each) for each in gc.get_objects() if isinstance(each, ApiError)]
        finally:
            gc.enable()
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] not in left


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": lambda content: gzip.compress(content[:9]) + gzip.compress(content[9:]),
    "deflate": zlib.compress,
    "Deflate": lambda content: zlib.compress(content, wbits=-zlib.MAX_WBITS),
    "br": brotli.compress,
    "zstd": zstd.compress,
}


@all_cases("coding", [*ENCODERS, "identity"])
async def test_encoded_body_is_decoded_within_its_limits(
    client: httpx.AsyncClient, coding: str
) -> None:
    encode = ENCODERS.get(coding, bytes)

    async def send(body: bytes, path: str = "/v1/completions") -> httpx.Response:
        headers = {"content-type": "application/json", "content-encoding": coding}
        return await client.post(path, content=body, headers=headers)

    text = json.dumps(asking(max_tokens=1) | {"metadata": "u" * 20_000}).encode()
    assert (await send(encode(text))).status_code == 200
    assert "input_file_id" in (await send(encode(b"{}"), "/v1/batches")).text
    bomb = await send(encode(b" " * 50_000_000 if coding in ENCODERS else b" " * 400_000))
    message_of(bomb, status=413, kind="invalid_request_error", code="payload_too_large")
    if coding in ENCODERS:
        # Empty members decode to nothing, however many there are.
        for broken in (encode(text)[:-3], b"\x78\x00 not encoded", encode(b"") * 2_000):
            refused = await send(broken)
            code = "invalid_value"
            message = message_of(refused, status=400, kind="invalid_request_error", code=code)
            assert "'Content-Encoding'" in message


@all_cases(
    ("path", "headers", "named"),
    [
        ("/v1/completions", {"content-encoding": "compress"}, "Content-Encoding"),
        ("/v1/keys", {"content-encoding": "gzip, br"}, "Content-Encoding"),
        ("/v1/files", {"content-encoding": "gzip"}, "Content-Encoding"),
        ("/v1/completions", {"content-type": "application/json; charset=latin-1"}, "latin-1"),
        ("/v1/keys", {"content-type": 'application/json; Charset="utf-16"'}, "utf-16"),
    ],
)
async def test_unknown_encoding_gets_415_that_names_it(
    client: httpx.AsyncClient, path: str, headers: dict[str, str], named: str
) -> None:
    refused = await client.post(path, content=b"{}", headers=headers)
    code = "unsupported_media_type"
    assert named in message_of(refused, status=415, kind="invalid_request_error", code=code)


async def test_tenant_with_a_full_queue_gets_429_and_others_do_not(
    stack: Stack, client: httpx.AsyncClient, store: "Redis"
) -> None:
    await serve(store, "full")
    waiting = asyncio.create_task(
        complete(client, model="full", prompt=["x"] * MOST_WAITING_OF_TENANT)
    )
    await eventually(lambda: _waiting(store, "full", MOST_WAITING_OF_TENANT), what="6")

    response = await complete(client, model="full")

    message = message_of(response, status=429, kind="rate_limit_error", code="concurrency")
    assert str(MOST_WAITING_OF_TENANT) in message
    assert int(response.headers["retry-after"]) >= 1
    assert int(response.headers["retry-after-ms"]) >= 1000
    other_key = await asyncio.to_thread(stack.key, "other")
    beside = asyncio.create_task(
        client.post(
            "/v1/completions",
            json=asking(model="full"),
            headers={"authorization": f"Bearer {other_key}"},
        )
    )
    await eventually(lambda: _waiting(store, "full", MOST_WAITING_OF_TENANT + 1), what="7")
    for task in (waiting, beside):
        task.cancel()
    await asyncio.gather(waiting, beside, return_exceptions=True)
    await eventually(lambda: nothing_left(store, "full"), what="the queue being empty")


async def _waiting(store: "Redis", model: str, number: int) -> bool:
    return (await jobs_in_redis(store, model))["waiting"] == number


@all_cases(
    ("state", "code"),
    [(WorkerState.LOADING, "model_loading"), (WorkerState.DRAINING, "no_worker")],
)
@all_cases("stream", [False, True])
async def test_model_without_workers_gets_503_with_a_retry_time(
    client: httpx.AsyncClient, store: "Redis", state: WorkerState, code: str, stream: bool
) -> None:
    await serve(store, f"unserved-{code}", state)
    response = await complete(client, model=f"unserved-{code}", stream=stream)
    message_of(response, status=503, kind="service_unavailable", code=code)
    assert response.headers["retry-after"] == "5"
    assert response.headers["retry-after-ms"] == "5000"


async def test_model_without_its_tokenizer_gets_503(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    await serve(store, "no-tokenizer", tokenizer_digest="0" * 64)
    await store.delete("tokenizer:" + "0" * 64)
    response = await complete(client, model="no-tokenizer")
    message_of(response, status=503, kind="service_unavailable", code="service_unavailable")


async def test_connection_survives_errors(stack: Stack, key: str) -> None:
    async with connection(stack.url) as (reader, writer):
        for body, status in ((b"{", 400), (asking(model="gpt-9"), 404), (asking(), 200)):
            writer.write(post(key, body))
            assert (await read_response(reader)).status_code == status


TYPES_OF_404 = {ErrorStyle.LLAMACPP: "not_found_error", ErrorStyle.VLLM: "NotFoundError"}


@all_cases("dialect", Dialect)
@all_cases("stream", [False, True])
async def test_conflict_18_wrong_parameter_has_the_style_of_the_dialect(
    client: httpx.AsyncClient, dialect: Dialect, stream: bool
) -> None:
    response = await client.post(
        "/v1/completions",
        json=asking(temperature=3, stream=stream),
        headers={"x-api-dialect": str(dialect)},
    )
    style = PROFILES[dialect].error_style
    error = InvalidParameterError(
        "'temperature' must be at most 2.0. Given: 3.", param="temperature"
    )
    assert response.json() == error.body(style)
    assert response.status_code == (422 if style is ErrorStyle.MISTRALRS else 400)
    assert response.headers["x-should-retry"] == "false"


@all_cases("dialect", Dialect)
async def test_conflict_18_invalid_json_has_the_style_of_the_dialect(
    client: httpx.AsyncClient, dialect: Dialect
) -> None:
    response = await client.post(
        "/v1/completions",
        content=b"{",
        headers={"content-type": "application/json", "x-api-dialect": str(dialect)},
    )
    style = PROFILES[dialect].error_style
    assert response.json() == InvalidJsonError(response.json()["error"]["message"]).body(style)
    assert response.status_code == (422 if style is ErrorStyle.MISTRALRS else 400)


@all_cases("dialect", Dialect)
async def test_conflict_18_unknown_route_has_the_style_of_the_dialect(
    client: httpx.AsyncClient, dialect: Dialect
) -> None:
    response = await client.post("/v1/nowhere", headers={"x-api-dialect": str(dialect)})
    expected = TYPES_OF_404.get(PROFILES[dialect].error_style, INVALID)
    assert (response.status_code, response.json()["error"]["type"]) == (404, expected)


@all_cases(
    "dialect", [name for name, profile in PROFILES.items() if not profile.takes_any_model_name]
)
async def test_conflict_18_unknown_model_has_the_style_of_the_dialect(
    client: httpx.AsyncClient, dialect: Dialect
) -> None:
    response = await client.post(
        "/v1/completions", json=asking(model="gpt-9"), headers={"x-api-dialect": str(dialect)}
    )
    expected = TYPES_OF_404.get(PROFILES[dialect].error_style, INVALID)
    assert (response.status_code, response.json()["error"]["type"]) == (404, expected)


@all_cases("dialect", Dialect)
async def test_conflict_18_missing_credential_has_the_style_of_the_dialect(
    stack: Stack, dialect: Dialect
) -> None:
    async with gateway_client(stack.url, None) as anonymous:
        response = await anonymous.post("/v1/completions", headers={"x-api-dialect": str(dialect)})
    style = PROFILES[dialect].error_style
    error = AuthenticationError(response.json()["error"]["message"])
    assert (response.status_code, response.json()) == (401, error.body(style))
    assert response.headers["www-authenticate"] == "Bearer"


async def test_conflict_18_too_long_prompt_has_the_counts_in_llamacpp(
    client: httpx.AsyncClient,
) -> None:
    response = await client.post(
        "/v1/completions",
        json=asking(prompt=[5] * 3000),
        headers={"x-api-dialect": "llamacpp"},
    )
    error = response.json()["error"]
    assert response.status_code == error["code"] == 400
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (3000, 2048)


async def test_garbage_bytes_never_give_a_500(client: httpx.AsyncClient) -> None:
    bodies = [b"\x00" * 100, b"\xff\xfe", b'"' * 1000, b'{"model":"\\u0000","prompt":"\\u0000"}']
    for body in bodies:
        response = await client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code in (400, 404)


async def test_failed_requests_are_counted_by_status_and_code(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    sample = (
        'sluice_gateway_requests_total{code="context_length_exceeded",'
        'endpoint="completions",status="400"}'
    )

    async def count() -> float:
        lines = (await client.get(f"{stack.operators}/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(sample))

    before = await count()
    await complete(client, prompt=[5] * 2048)
    assert await count() == before + 1
