"""What a gateway counts, and under which labels."""

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest
from redis.asyncio import Redis

from contract.messages import ReturnReason, WorkerState
from gateway.jobs.schedule import TASKS
from gateway.models.catalogue import Catalogue
from tests.gateway.conftest import asking, eventually
from tests.support.fake_worker import FakeWorker
from tests.support.stack import MODEL
from tests.telemetry.conftest import (
    LABELLED_TENANT,
    MOST_WAITING,
    STEP_SECONDS,
    Observed,
    client_of,
)
from tests.telemetry.page import scrape

HTTP = "sluice_gateway_http_requests_total"
REFUSED = "sluice_gateway_refused_requests_total"
SLEEPING = "sleeping"
TENANT_TOKENS = "sluice_gateway_tenant_tokens_total"

Growth = Callable[..., float]


@pytest.fixture
async def growth(observed: Observed) -> Growth:
    """Growth of a counter since the test began, after earlier requests have ended."""

    async def is_idle() -> bool:
        reported = await asyncio.to_thread(scrape, observed.gateway)
        busy = ("sluice_gateway_requests_in_progress", "sluice_gateway_reserved_requests")
        return not any(reported.value(name) for name in busy)

    await eventually(is_idle, what="the end of earlier requests")
    before = await asyncio.to_thread(scrape, observed.gateway)

    def grown(name: str, **labels: str) -> float:
        return scrape(observed.gateway).value(name, **labels) - before.value(name, **labels)

    return grown


async def grows(growth: Growth, by: float, name: str, **labels: str) -> None:
    """Wait until a counter has grown by exactly so much, which may be just after the response."""

    async def has_grown() -> bool:
        return await asyncio.to_thread(growth, name, **labels) >= by

    await eventually(has_grown, what=f"{name} of {labels} growing by {by}")
    assert await asyncio.to_thread(growth, name, **labels) == by


async def answered(client: httpx.AsyncClient, **parameters: object) -> httpx.Response:
    """Return the response to a completion; retry while a busy gateway returns Retry-After."""
    while True:
        response = await client.post("/v1/completions", json=asking(**parameters))
        if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            return response
        await asyncio.sleep(float(response.headers["retry-after"]))


async def streamed(client: httpx.AsyncClient, **parameters: object) -> dict[str, int]:
    """Read a stream to its end; return its usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await answered(client, **options, **parameters)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if "{" in line]
    usage: dict[str, int] = json.loads(events[-1])["usage"]
    return usage


async def test_requests_are_counted_by_the_template_of_their_route(
    client: httpx.AsyncClient, growth: Growth
) -> None:
    for number in range(3):
        await client.get(f"/v1/completions/cmpl-{number}")
        await client.get(f"/nobody/knows/{number}")
    await client.put("/v1/models")
    await client.request("PROPFIND", "/v1/models")
    await client.get("/v1/models")
    template = "/v1/completions/{completion_id}"
    await grows(growth, 3, HTTP, route=template, method="GET", status="404")
    await grows(growth, 3, HTTP, route="other", method="GET", status="404")
    await grows(growth, 1, HTTP, route="/v1/models", method="PUT", status="405")
    await grows(growth, 1, HTTP, route="/v1/models", method="other", status="405")
    await grows(growth, 1, HTTP, route="/v1/models", method="GET", status="200")
    duration = "sluice_gateway_http_request_duration_seconds_count"
    await grows(growth, 3, duration, route=template, method="GET")


async def test_unreadable_request_is_counted_without_its_route(
    observed: Observed, growth: Growth
) -> None:
    url = httpx.URL(observed.customers)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n")
    assert b" 431 " in await reader.readline()
    writer.close()
    await grows(growth, 1, HTTP, route="other", method="other", status="431")


async def test_duration_of_a_stream_includes_all_of_it(
    client: httpx.AsyncClient, growth: Growth
) -> None:
    tokens = 40
    await streamed(client, max_tokens=tokens)
    labels = {"route": "/v1/completions", "method": "POST"}
    await grows(growth, 1, "sluice_gateway_http_request_duration_seconds_count", **labels)
    seconds = growth("sluice_gateway_http_request_duration_seconds_sum", **labels)
    assert seconds > tokens * STEP_SECONDS / 2


async def test_refusals_are_counted_by_their_code(
    observed: Observed, client: httpx.AsyncClient, growth: Growth
) -> None:
    refused = [
        await client.post("/v1/completions", json=asking(temperature="hot")),
        await client.post("/v1/completions", json=asking(model="nobody/knows")),
        await client.post(
            "/v1/completions", json=asking(), headers={"authorization": "Bearer sk-wrong"}
        ),
        # Of chats too.
        await client.post("/v1/chat/completions", json={"model": MODEL}),
    ]
    codes = [response.json()["error"]["code"] for response in refused]
    assert len(set(codes)) == len(codes)
    for code in codes:
        await grows(growth, 1, REFUSED, reason=code)
    assert growth("sluice_gateway_admitted_requests_total") == 0
    await client.get("/v1/completions/cmpl-unknown")
    assert growth(REFUSED) == len(refused), "reading an earlier response is no generation request"


async def test_sleeping_model_is_reported_until_it_is_removed(
    observed: Observed, client: httpx.AsyncClient
) -> None:
    async with Redis.from_url(observed.stack.redis.url) as redis:
        await FakeWorker(redis, SLEEPING).announce(WorkerState.DRAINING, ttl_ms=1)
        # Exported before the first request: Prometheus sees no growth in a series that begins with
        # an event.
        await eventually(
            lambda: refusals(observed) == {"no_worker": 0, "model_loading": 0},
            what="the gateway registering the model",
        )
        answer = await client.post("/v1/completions", json=asking(model=SLEEPING))
        assert answer.json()["error"]["code"] == "no_worker"
        await eventually(
            lambda: refusals(observed) == {"no_worker": 1, "model_loading": 0}, what="the refusal"
        )
        await eventually(
            lambda: ready_workers(observed) == {MODEL: 1, SLEEPING: 0}, what="one ready worker"
        )
        await Catalogue(redis).remove(SLEEPING)
        await eventually(
            lambda: ready_workers(observed) == {MODEL: 1},
            what="the gateway removing the model",
        )


def refusals(observed: Observed) -> dict[str, float]:
    """Number of refused requests for the sleeping model, by reason."""
    samples = scrape(observed.gateway).samples(REFUSED, model=SLEEPING)
    return {sample.labels["reason"]: sample.value for sample in samples}


def ready_workers(observed: Observed) -> dict[str, float]:
    """Ready workers by model."""
    samples = scrape(observed.gateway).samples("sluice_queue_ready_workers")
    return {sample.labels["model"]: sample.value for sample in samples}


def test_series_exist_before_their_first_event(observed: Observed) -> None:
    reported = scrape(observed.gateway)
    outcomes = {
        each.labels["outcome"] for each in reported.samples("sluice_gateway_image_fetches_total")
    }
    assert outcomes == {"fetched", "refused", "failed", "late"}
    reasons = {
        each.labels["reason"] for each in reported.samples("sluice_gateway_resumed_jobs_total")
    }
    assert reasons >= {"lease_expired", *ReturnReason}
    states = {
        each.labels["state"] for each in reported.samples("sluice_gateway_answers_taken_over_total")
    }
    assert states == {"running", "paused"}
    refused = {each.labels["reason"] for each in reported.samples(REFUSED, model="")}
    assert refused >= {"requests", "tokens", "concurrency", "overloaded"}
    tasks = scrape(observed.jobs).samples("sluice_jobs_tasks_total", outcome="failed")
    assert {each.labels["task"] for each in tasks} == {job.name for job in TASKS}


async def test_full_queue_counts_as_admission_and_refusal(
    client: httpx.AsyncClient, growth: Growth
) -> None:
    too_many = ["x"] * (MOST_WAITING + 1)
    response = await client.post("/v1/completions", json=asking(prompt=too_many))
    assert response.status_code == 503
    await grows(growth, 1, REFUSED, reason=response.json()["error"]["code"])
    admitted = "sluice_gateway_admitted_requests_total"
    await grows(growth, 1, admitted, model=MODEL, tier="default")


async def test_only_configured_tenants_have_their_own_label(
    observed: Observed, client: httpx.AsyncClient, growth: Growth
) -> None:
    usage = (await answered(client)).json()["usage"]
    async with client_of(observed, "rival") as rival:
        rivals = await streamed(rival, max_tokens=5)
        await rival.post("/v1/completions", json=asking(temperature="hot"))
    for tenant, spent in ((LABELLED_TENANT, usage), ("other", rivals)):
        for kind in ("prompt", "completion"):
            tokens = spent[f"{kind}_tokens"]
            await grows(growth, tokens, TENANT_TOKENS, tenant=tenant, kind=kind)
    requests = "sluice_gateway_tenant_requests_total"
    await grows(growth, 1, requests, tenant=LABELLED_TENANT, status="200")
    await grows(growth, 1, requests, tenant="other", status="200")
    await grows(growth, 1, requests, tenant="other", status="400")
    completion = usage["completion_tokens"] + rivals["completion_tokens"]
    await grows(growth, completion, "sluice_gateway_completion_tokens_total", model=MODEL)
    labels = await asyncio.to_thread(tenants_of, observed.gateway)
    assert labels == {LABELLED_TENANT, "other"}


def tenants_of(url: str) -> set[str]:
    """Return every value of the label `tenant`."""
    families = scrape(url).families.values()
    return {
        sample.labels["tenant"]
        for family in families
        for sample in family.samples
        if "tenant" in sample.labels
    }


async def test_times_of_tokens_are_those_of_the_engine(
    client: httpx.AsyncClient, growth: Growth
) -> None:
    tokens = 30
    latency = "sluice_gateway_inter_token_latency_seconds"
    streams = replies = 0
    # A gateway that stalls meanwhile gets all tokens of a choice in one reply.
    while replies < 2:
        await streamed(client, max_tokens=tokens, n=2, temperature=1.0)
        streams += 1
        await grows(growth, streams, "sluice_gateway_request_duration_seconds_count", model=MODEL)
        replies = int(growth(f"{latency}_count", model=MODEL))
    assert replies <= streams * 2 * (tokens - 1)
    mean = growth(f"{latency}_sum", model=MODEL) / replies
    # Of the right unit, however often the gateway stalls.
    assert STEP_SECONDS / 2 < mean < 500 * STEP_SECONDS
    first = "sluice_gateway_time_to_first_token_seconds"
    await grows(growth, streams, f"{first}_count", model=MODEL)
    assert growth(f"{latency}_bucket", model=MODEL, le="+Inf") == replies
    # A whole response has no time to first token.
    await answered(client)
    await grows(growth, streams + 1, "sluice_gateway_request_duration_seconds_count", model=MODEL)
    assert growth(f"{first}_count", model=MODEL) == streams


async def test_tokens_of_a_disconnected_client_are_counted_at_settlement(
    client: httpx.AsyncClient, growth: Growth
) -> None:
    body = asking(stream=True, max_tokens=1_500)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == httpx.codes.OK
        await anext(response.aiter_lines())
    counted = "sluice_gateway_completion_tokens_total"
    await eventually(lambda: asyncio.to_thread(growth, counted, model=MODEL), what="the settling")
    assert 0 < growth(counted, model=MODEL) < 1_500
    await grows(growth, 1, "sluice_gateway_disconnects_total")


async def test_waiting_jobs_are_reported_with_their_age_and_tenants(
    observed: Observed, client: httpx.AsyncClient
) -> None:
    async with client_of(observed, "rival") as rival:
        # One of each tenant runs until its client disconnects; the others wait.
        def send(
            *clients: httpx.AsyncClient, max_tokens: int
        ) -> list[asyncio.Task[httpx.Response]]:
            body = asking(max_tokens=max_tokens)
            posts = (each.post("/v1/completions", json=body) for each in clients)
            return [asyncio.create_task(post) for post in posts]

        async def both_run() -> bool:
            reported = await asyncio.to_thread(scrape, observed.gateway)
            return reported.value("sluice_queue_leased_jobs", model=MODEL) == 2

        running = send(client, rival, max_tokens=2_000)
        await eventually(both_run, what="two jobs running")
        waiting = send(client, rival, max_tokens=5)

        async def all_wait() -> bool:
            reported = await asyncio.to_thread(scrape, observed.gateway)
            waits = reported.value("sluice_queue_waiting_jobs", model=MODEL)
            tenants = reported.value("sluice_queue_waiting_tenants", model=MODEL)
            oldest = reported.value("sluice_queue_oldest_wait_seconds", model=MODEL)
            is_reported = (waits, tenants) == (2, 2) and oldest > 0.5
            of_gateway = ("reserved_requests", "jobs_in_flight", "requests_in_progress")
            counts = {reported.value(f"sluice_gateway_{name}") for name in of_gateway}
            has_worker = reported.value("sluice_queue_ready_workers", model=MODEL) == 1
            return is_reported and has_worker and counts == {4}

        await eventually(all_wait, what="two jobs of two tenants waiting for a while")
        for each in running:
            each.cancel()
        await asyncio.gather(*waiting)

    async def none_waits() -> bool:
        reported = await asyncio.to_thread(scrape, observed.gateway)
        return reported.value("sluice_queue_oldest_wait_seconds", model=MODEL) == 0

    await eventually(none_waits, what="the end of the wait")
    waits = await asyncio.to_thread(scrape, observed.worker)
    assert waits.value("sluice_worker_queue_wait_seconds_count") >= 4
    assert waits.value("sluice_worker_queue_wait_seconds_sum") > 0.5
    assert waits.value("sluice_worker_max_sequences") == 2


async def test_round_trips_are_labelled_by_script_and_statements_by_kind(
    observed: Observed, client: httpx.AsyncClient, growth: Growth
) -> None:
    async with client_of(observed, "newcomer") as newcomer:
        assert (await newcomer.post("/v1/completions", json=asking())).status_code == 200
    seconds = "sluice_redis_command_duration_seconds"
    for command in ("request_admit", "request_end", "job_enqueue"):
        await grows(growth, 1, f"{seconds}_count", command=command)
        assert 0 < growth(f"{seconds}_sum", command=command) < 60, command
    assert growth(f"{seconds}_count", command="xread") == 0
    assert growth("sluice_sql_statement_duration_seconds_count", operation="select") >= 1
    assert growth("sluice_gateway_reply_frames_total") >= 1
    reported = await asyncio.to_thread(scrape, observed.gateway)
    used = reported.value("sluice_redis_used_memory_bytes")
    assert 100_000 < used < reported.value("sluice_redis_max_memory_bytes")
