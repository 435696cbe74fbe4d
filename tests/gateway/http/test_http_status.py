"""The status page: for everybody, of all models, and with nothing of tenants."""

import asyncio
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract.messages import WorkerState
from gateway.cli.launch.bring_up import wait_until_serving
from gateway.platform.settings import Settings
from gateway.process.app import create_app
from tests.gateway.conftest import complete, eventually, gateway_client, serve
from tests.gateway.http_calls import message_of
from tests.support.cases import all_cases
from tests.support.ledger import rejected
from tests.support.stack import MODEL, Stack, metric

UNSERVED = "status:loading"


async def test_everybody_sees_all_models_and_nobody_sees_tenants(
    stack: Stack, client: httpx.AsyncClient, store: Redis
) -> None:
    await serve(store, UNSERVED, WorkerState.LOADING)
    assert (await complete(client)).status_code == 200

    async with gateway_client(stack.url, None) as anonymous:

        async def shown() -> dict[str, Any]:
            # For some seconds it is the response to an earlier test.
            response = await anonymous.get("/status.json", params={"days": 7})
            assert response.headers["cache-control"] == "public, max-age=10"
            body: dict[str, Any] = response.json()
            return body

        async def is_listed() -> bool:
            return UNSERVED in {model["model"] for model in (await shown())["models"]}

        status, page = dict[str, Any](), httpx.Response(200)

        async def agree() -> bool:
            # The page is the response to another moment, for some seconds.
            nonlocal status, page
            status, page = await shown(), await anonymous.get("/status")
            return page.text.count('<svg class="strip"') == 1 + len(status["models"])

        await eventually(is_listed, what="the new model")
        await eventually(agree, what="a page with all models")
    states = {model["model"]: model["state"] for model in status["models"]}
    assert (states[MODEL], states[UNSERVED]) == ("operational", "no_worker")
    assert status["state"] == "degraded"
    assert {len(each["days"]) for each in (status, *status["models"])} == {7}
    [model] = [each for each in status["models"] if each["model"] == MODEL]
    assert model.keys() == {"model", "state", "availability", "p50_ms", "p75_ms", "days"}
    assert model["days"][0].keys() == {"date", "availability", "p50_ms", "p75_ms"}
    assert page.status_code == 200
    assert "acme" not in page.text
    assert "<script" not in page.text
    assert "script-src 'none'" in page.headers["content-security-policy"]


@all_cases("given", ["0", "91", "-1", "1.5", "x", ""])
async def test_other_number_of_days_is_an_error_that_names_it(
    client: httpx.AsyncClient, given: str
) -> None:
    response = await client.get("/status.json", params={"days": given})
    message = message_of(
        response, status=400, kind="invalid_request_error", code="invalid_value", param="days"
    )
    is_integer = given.lstrip("-").isdigit()
    reason = "Input should be " if is_integer else "must be an integer in plain digits. Given: "
    assert message.startswith(f"'days': {reason}")


async def test_rejections_of_the_service_reach_sql_and_those_of_clients_do_not(
    stack: Stack, client: httpx.AsyncClient, store: Redis
) -> None:
    await serve(store, UNSERVED, WorkerState.LOADING)
    before = {name: await rejected(stack.database_url, name) for name in (MODEL, UNSERVED)}
    refused = await asyncio.gather(
        complete(client, model=UNSERVED),
        complete(client, model=UNSERVED, stream=True),
        complete(client, temperature=9),
        complete(client, prompt=[5] * 5000),
        complete(client, model="unknown"),
    )
    assert [each.status_code for each in refused] == [503, 503, 400, 400, 404]

    async def is_written() -> bool:
        return await rejected(stack.database_url, UNSERVED) == before[UNSERVED] + 2

    await eventually(is_written, what="the count of rejected requests")
    assert await rejected(stack.database_url, MODEL) == before[MODEL]


async def test_start_of_a_deployment_has_no_rejected_requests(
    stack: Stack, client: httpx.AsyncClient, key: str, store: Redis
) -> None:
    def sent(name: str) -> float:
        return metric(stack.operators, f"sluice_gateway_{name}")

    async def is_listed() -> bool:
        models = (await client.get("/v1/models")).json()["data"]
        return UNSERVED in {model["id"] for model in models}

    refusals = f'refused_requests_total{{model="{UNSERVED}",reason="model_loading"}}'
    polls = 'http_requests_total{method="GET",route="/v1/models",status="200"}'
    await serve(store, UNSERVED, WorkerState.LOADING)
    await eventually(is_listed, what="the new model")
    before = await asyncio.to_thread(sent, refusals)
    polled = await asyncio.to_thread(sent, polls)
    # The probe of `sluice up`.
    probe = asyncio.create_task(wait_until_serving(httpx.URL(stack.url).port or 0, key, UNSERVED))

    async def has_polled() -> bool:
        return await asyncio.to_thread(sent, polls) > polled + 2

    await eventually(has_polled, what="polls while the model is loading")
    probe.cancel()
    assert await asyncio.to_thread(sent, refusals) == before


@pytest.mark.parametrize("console", [False, True])
def test_status_can_be_switched_off(console: bool) -> None:
    def paths(status_page: bool) -> set[str]:
        app = create_app(Settings(console=console, status_page=status_page))
        return {getattr(route, "path", "") for route in app.routes}

    assert paths(True) - paths(False) >= {"/status", "/status.json"}
    assert "/console/static/{name}" in paths(True)
    assert ("/console/static/{name}" in paths(False)) is console
