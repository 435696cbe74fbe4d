"""Fallbacks of a model in a request: which one runs, when, and what is refused."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract.messages import WorkerState
from contract.outcomes import FailureCode
from gateway.records.scopes import Scope
from tests.gateway.callers import caller
from tests.gateway.chats import HELLO
from tests.gateway.conftest import MOST_WAITING_OF_TENANT, complete, eventually, serve
from tests.gateway.http_calls import message_of
from tests.support.cases import all_cases
from tests.support.events import parse_chunks
from tests.support.fake_worker import FakeWorker
from tests.support.stack import MODEL, Stack

ASLEEP = "fallback-asleep"
CHAT = {"messages": HELLO, "max_tokens": 4}
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
}


@pytest.fixture
async def asleep(client: httpx.AsyncClient, store: Redis) -> str:
    """A model that the gateway knows, without a ready worker."""
    await serve(store, ASLEEP, WorkerState.DRAINING)
    await _known(client, ASLEEP)
    return ASLEEP


@pytest.fixture
async def busy(client: httpx.AsyncClient, store: Redis) -> FakeWorker:
    """A worker of a model of its own that claims only what a test lets it claim."""
    worker = await serve(store, f"busy-{secrets.token_hex(4)}")
    await _known(client, worker.queue.model)
    return worker


@pytest.fixture
async def waiting(stack: Stack, busy: FakeWorker) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose tenant has as many prompts waiting for `busy` as it may have."""
    async with caller(stack, f"waits-{secrets.token_hex(4)}", Scope.COMPLETIONS) as client:
        asking = [
            asyncio.create_task(complete(client, model=busy.queue.model))
            for _ in range(MOST_WAITING_OF_TENANT)
        ]

        async def is_full() -> bool:
            return (await busy.queue.status()).waiting_jobs == MOST_WAITING_OF_TENANT

        await eventually(is_full, what="the queue being full")
        yield client
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _known(client: httpx.AsyncClient, model: str) -> None:
    async def is_known() -> bool:
        return (await client.get(f"/v1/models/{model}")).status_code == 200

    await eventually(is_known, what=f"{model} being known")


@all_cases("path", BODIES)
async def test_next_model_runs_what_an_unserved_one_cannot_in_every_api(
    client: httpx.AsyncClient, asleep: str, path: str
) -> None:
    body = BODIES[path] | {"model": asleep, "models": [MODEL]}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == MODEL
    assert "x-ignored-params" not in response.headers
    counted = {"/v1/messages": "/count_tokens", "/v1/responses": "/input_tokens"}
    if suffix := counted.get(path):
        assert (await client.post(path + suffix, json=body)).status_code == 200


async def test_models_alone_name_the_first_model_too(
    client: httpx.AsyncClient, asleep: str
) -> None:
    for models in ([MODEL, asleep], [asleep, MODEL], [asleep, asleep, MODEL]):
        for stream in (False, True):
            response = await complete(client, model=None, models=models, stream=stream)
            assert response.status_code == 200, response.text
            if stream:
                assert {each["model"] for each in parse_chunks(response.content)} == {MODEL}
            else:
                assert response.json()["model"] == MODEL


async def test_prompt_that_is_too_long_for_a_model_runs_on_the_next(
    client: httpx.AsyncClient, store: Redis
) -> None:
    short = f"short-{secrets.token_hex(4)}"
    await serve(store, short, context_window=8)
    await _known(client, short)
    prompt = "Once upon a time there was a model that had read too much. " * 2
    response = await complete(client, model=short, models=[MODEL], prompt=prompt)
    assert (response.status_code, response.json()["model"]) == (200, MODEL)
    # Whatever else is wrong with a request is wrong for every model.
    refused = await complete(client, model=short, models=[MODEL], temperature=3)
    assert refused.json()["error"]["param"] == "temperature"


async def test_full_queue_is_described_and_left_for_the_next_model(
    waiting: httpx.AsyncClient, busy: FakeWorker
) -> None:
    model = busy.queue.model
    refused = await complete(waiting, model=model, service_tier="flex")
    message_of(refused, status=429, kind="rate_limit_error", code="concurrency")
    assert refused.json()["error"]["availability"] == {
        "reason": "concurrency",
        "model": model,
        "tier": "flex",
        "position": MOST_WAITING_OF_TENANT + 1,
        "estimated_wait_seconds": None,
    }
    assert refused.headers["retry-after"]
    headers = {"idempotency-key": secrets.token_hex(8)}
    body = BODIES["/v1/completions"] | {"model": model, "models": [MODEL], "stream": True}
    texts = set[bytes]()
    for is_replayed in (False, True):
        response = await waiting.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        assert {each["model"] for each in parse_chunks(response.content)} == {MODEL}
        assert ("idempotent-replayed" in response.headers) == is_replayed
        texts.add(response.content)
    assert len(texts) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_request_whose_wait_ends_without_a_token_runs_on_the_next_model(
    client: httpx.AsyncClient, busy: FakeWorker, stream: bool
) -> None:
    asking = asyncio.create_task(
        complete(client, model=busy.queue.model, models=[MODEL], stream=stream)
    )
    claim = await busy.claim_one()
    await busy.fail(claim, FailureCode.NO_WORKER)
    response = await asking
    assert response.status_code == 200, response.text
    assert MODEL in response.text
    assert busy.queue.model not in response.text


async def test_error_is_that_of_a_model_that_is_only_unavailable(
    client: httpx.AsyncClient, asleep: str, store: Redis
) -> None:
    short = f"short-{secrets.token_hex(4)}"
    await serve(store, short, context_window=2)
    await _known(client, short)
    for models in ([short, asleep], [asleep, short]):
        response = await complete(client, model=None, models=models)
        message_of(response, status=503, kind="service_unavailable", code="no_worker")
        assert response.json()["error"]["availability"] == {
            "reason": "no_worker",
            "model": asleep,
            "tier": "default",
            "position": None,
            "estimated_wait_seconds": 5.0,
        }
        assert response.headers["retry-after"] == "5"


async def test_availability_is_in_the_envelope_of_every_api(
    client: httpx.AsyncClient, asleep: str
) -> None:
    for path, body in BODIES.items():
        for headers in ({}, {"x-api-dialect": "llamacpp"}, {"x-api-dialect": "vllm"}):
            response = await client.post(path, json=body | {"model": asleep}, headers=headers)
            found = response.json()["error"]["availability"]
            assert (found["reason"], found["model"]) == ("no_worker", asleep), path


BAD: list[tuple[Any, int, str]] = [
    ([MODEL, "nobody's"], 404, "models[1]"),
    ("text", 400, "models"),
    ([MODEL, 5], 400, "models"),
    ([""], 400, "models"),
    ([MODEL] * 9, 400, "models"),
]


@all_cases(("models", "status", "param"), BAD)
async def test_bad_list_is_refused_by_its_position(
    client: httpx.AsyncClient, models: Any, status: int, param: str
) -> None:
    for model in (MODEL, None):
        response = await complete(client, model=model, models=models)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert f"'{param}'" in error["message"]


async def test_each_model_must_be_allowed_to_the_key(stack: Stack, asleep: str) -> None:
    tenant = f"allowed-{secrets.token_hex(4)}"
    async with caller(stack, tenant, Scope.COMPLETIONS, allowed_models=[asleep]) as limited:
        response = await complete(limited, model=asleep, models=[MODEL])
        param = "models[0]"
        message_of(
            response, status=404, kind="invalid_request_error", code="model_not_found", param=param
        )
