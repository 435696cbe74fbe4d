"""Aliases that operators define: which model runs, what the response says, and their sunset."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract.messages import WorkerState
from gateway.accounts.aliases import AliasService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.records.aliases import Sticky
from gateway.records.scopes import Scope
from tests.gateway.callers import caller
from tests.gateway.chats import CHATS
from tests.gateway.conftest import asking, complete, eventually, gateway_client, serve
from tests.gateway.http_calls import message_of
from tests.support.events import parse_chunks
from tests.support.stack import MODEL, Stack

ASLEEP = "asleep"
"""A target of aliases that has no ready worker."""
LATER = datetime(2999, 12, 31, 12, tzinfo=UTC)


class Aliases:
    """Defines aliases, and waits until both gateways apply them."""

    def __init__(self, service: AliasService, clients: list[httpx.AsyncClient]) -> None:
        self._service = service
        self._clients = clients

    async def define(self, name: str, *, is_over: bool = False, **options: Any) -> None:
        """Define an alias; `is_over` if requests for it get 404."""
        await self._service.put(name, **options)

        async def is_applied() -> bool:
            pages = [await client.get(f"/v1/models/{name}") for client in self._clients]
            return all(page.is_error if is_over else "resolves_to" in page.json() for page in pages)

        await eventually(is_applied, what=f"the alias {name} at every gateway")


@pytest.fixture
async def aliases(
    stack: Stack, store: Redis, client: httpx.AsyncClient, other_client: httpx.AsyncClient
) -> AsyncIterator[Aliases]:
    database = Database(stack.database_url)
    service = AliasService(database, ChangeAnnouncer(store))
    await serve(store, ASLEEP, WorkerState.DRAINING)
    yield Aliases(service, [client, other_client])
    for alias in await service.list_all():
        await service.remove(alias.name)
    await database.aclose()


async def test_response_names_the_model_that_ran(
    aliases: Aliases, client: httpx.AsyncClient, other_client: httpx.AsyncClient, stack: Stack
) -> None:
    await aliases.define("vendor/chat", weights={MODEL: 1})
    for each in (client, other_client):
        whole = await complete(each, model="vendor/chat")
        assert (whole.status_code, whole.json()["model"]) == (200, MODEL), whole.text
        assert not {"sunset", "deprecation"} & set(whole.headers)
    streamed = await complete(client, model="vendor/chat", stream=True)
    assert {chunk["model"] for chunk in parse_chunks(streamed.content)} == {MODEL}
    body = {"model": "vendor/chat", "messages": [{"role": "user", "content": "Hi"}]}
    chat = await client.post(CHATS, json=body | {"max_tokens": 2})
    assert chat.json()["model"] == MODEL
    tokens = await client.post("/tokenize", json={"model": "vendor/chat", "prompt": "a"})
    assert tokens.status_code == 200
    async with httpx.AsyncClient(base_url=stack.operators) as operators:
        metrics = (await operators.get("/metrics")).text
    series = f'sluice_gateway_alias_requests_total{{alias="vendor/chat",model="{MODEL}"}}'
    assert f"{series} 3.0" in metrics
    listed = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
    page = listed["vendor/chat"]
    assert (page["resolves_to"], page["context_window"]) == (MODEL, 2048)
    assert "resolves_to" not in listed[MODEL]
    assert (await client.get("/v1/models/vendor/chat")).json() == page


async def test_alias_selects_the_dialect_of_its_model(
    aliases: Aliases, client: httpx.AsyncClient, store: Redis
) -> None:
    await serve(store, "speaks-llamacpp", dialect="llamacpp")
    await aliases.define("dialectal", weights={"speaks-llamacpp": 1})
    body = {"model": "dialectal", "content": "a", "add_special": False}
    assert "tokens" in (await client.post("/tokenize", json=body)).json()


async def test_fallback_runs_what_an_unserved_model_cannot(
    aliases: Aliases, client: httpx.AsyncClient
) -> None:
    await aliases.define("safe", weights={ASLEEP: 1}, fallback=MODEL)
    assert (await complete(client, model="safe")).json()["model"] == MODEL
    await aliases.define("listed", weights={ASLEEP: 1}, fallback="nobody's", fallbacks=[MODEL])
    assert (await complete(client, model="listed")).json()["model"] == MODEL
    await aliases.define("unsafe", weights={ASLEEP: 1}, fallback="nobody's")
    response = await complete(client, model="unsafe")
    message_of(response, status=503, kind="service_unavailable", code="no_worker")


async def test_error_for_a_target_that_no_worker_has_announced_names_the_alias(
    aliases: Aliases, client: httpx.AsyncClient
) -> None:
    await aliases.define("dangling", weights={MODEL: 1})
    await aliases.define("dangling", weights={"nobody's": 1}, is_over=True)
    for path in ("/v1/completions", "/tokenize"):
        response = await client.post(path, json={"model": "dangling", "prompt": "a"})
        expected = {"kind": "invalid_request_error", "code": "model_not_found", "param": "model"}
        message = message_of(response, status=404, **expected)
        assert '"dangling" does not exist' in message


async def test_users_of_a_tenant_are_divided_by_weight(
    aliases: Aliases, client: httpx.AsyncClient
) -> None:
    await aliases.define("canary", weights={MODEL: 1, ASLEEP: 1}, sticky=Sticky.USER)

    async def statuses(name: str) -> list[int]:
        return [
            (
                await complete(client, model="canary", max_tokens=1, **{name: f"u{number}"})
            ).status_code
            for number in range(12)
        ]

    found = await statuses("user")
    assert set(found) == {200, 503}
    assert await statuses("user") == found


async def test_key_of_an_alias_may_use_its_models_only_through_it(
    aliases: Aliases, stack: Stack
) -> None:
    await aliases.define("product", weights={MODEL: 1})
    for allowed, expected in (
        (["product"], {"product": 200, MODEL: 404}),
        ([MODEL], {"product": 200, MODEL: 200}),
        (["other"], {"product": 404, MODEL: 404}),
    ):
        key = await asyncio.to_thread(stack.key, "acme", allowed_models=allowed)
        async with gateway_client(stack.url, key) as limited:
            found = {
                name: (await complete(limited, model=name, max_tokens=1)).status_code
                for name in expected
            }
            listed = {model["id"] for model in (await limited.get("/v1/models")).json()["data"]}
        assert found == expected
        assert listed == {name for name, status in expected.items() if status == 200}


async def test_alias_hides_a_model_of_its_name(
    aliases: Aliases, client: httpx.AsyncClient, store: Redis
) -> None:
    await serve(store, "taken")
    await aliases.define("taken", weights={MODEL: 1})
    assert (await complete(client, model="taken", max_tokens=1)).json()["model"] == MODEL
    listed = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
    assert listed.count("taken") == 1


async def test_dated_alias_announces_its_sunset_and_then_names_its_replacement(
    aliases: Aliases, client: httpx.AsyncClient
) -> None:
    began = datetime.now(UTC)
    await aliases.define("dated", weights={MODEL: 1}, sunset_at=LATER)
    for path in ("/v1/completions", "/v1/completions:estimate"):
        for stream in (False, True):
            response = await client.post(path, json=asking(model="dated", stream=stream))
            assert response.headers["sunset"] == "Tue, 31 Dec 2999 12:00:00 GMT"
            deprecated_at = int(response.headers["deprecation"].removeprefix("@"))
            assert 0 <= deprecated_at - int(began.timestamp()) < 60
    headers = {"anthropic-version": "2023-06-01"}
    model = (await client.get("/v1/models/dated", headers=headers)).json()
    dates = [datetime.fromisoformat(model[name]) for name in ("deprecated_at", "retires_at")]
    assert model["lifecycle"] == "deprecated"
    assert (int(dates[0].timestamp()), dates[1]) == (deprecated_at, LATER)
    listed = (await client.get("/v1/models?lifecycle[]=deprecated")).json()["data"]
    assert {each["id"] for each in listed if each["sunset_at"]} == {each["id"] for each in listed}
    assert "dated" in {each["id"] for each in listed}
    over = began - timedelta(days=1)
    await aliases.define(
        "dated", weights={MODEL: 1}, sunset_at=over, replacement="newer", is_over=True
    )
    for path in ("/v1/completions", "/v1/models/dated"):
        method = "POST" if path == "/v1/completions" else "GET"
        body = asking(model="dated") if method == "POST" else None
        response = await client.request(method, path, json=body)
        kind, code = "invalid_request_error", "model_not_found"
        message = message_of(response, status=404, kind=kind, code=code, param="model")
        assert f'The model "dated" was retired at {over:%Y-%m-%d}' in message
        assert message.endswith('Use "newer" instead.')
        assert response.headers["deprecation"] == f"@{deprecated_at}"
    assert "dated" not in {m["id"] for m in (await client.get("/v1/models")).json()["data"]}


async def test_pattern_stands_for_names_that_nothing_else_has(
    aliases: Aliases, client: httpx.AsyncClient, stack: Stack
) -> None:
    await aliases.define("claude-*haiku*", weights={ASLEEP: 1})
    await aliases.define("claude-*", weights={MODEL: 1})
    await aliases.define("claude-exact", weights={MODEL: 1})
    listed = (await client.get("/v1/models")).json()["data"]
    assert not [model["id"] for model in listed if "*" in model["id"]]
    for name, status in (
        ("Claude-Opus-5", 200),
        ("claude-exact", 200),
        # The longest pattern counts, of those with models that the key may use.
        ("claude-5-haiku-latest", 503),
        ("gpt-claude-", 404),
        (MODEL, 200),
    ):
        response = await complete(client, model=name)
        assert response.status_code == status, name
    async with caller(stack, "acme", Scope.COMPLETIONS, allowed_models=[MODEL]) as restricted:
        response = await complete(restricted, model="claude-5-haiku-latest")
        assert (response.status_code, response.json()["model"]) == (200, MODEL)
