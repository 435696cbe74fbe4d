"""Each admitted request leaves one usage record, however it ends; a refused one none."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import msgspec
import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from contract import keys
from contract.messages import Delta, JobFailed, ReturnReason, WorkerState
from contract.outcomes import FailureCode, FinishReason
from contract.tier import ServiceTier
from gateway.accounts.tenants.service import TenantService
from gateway.billing.prices import PriceService
from gateway.completions.stored.head import ResponseHead
from gateway.completions.stored.store import ResponseStore
from gateway.limits.reservations import Reservations
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from gateway.platform.settings import Settings
from gateway.records.limits import LimitName
from gateway.records.records import Billing
from gateway.records.scopes import Scope
from gateway.records.usage_record import Outcome, UsageRecord, decode_usage
from tests.gateway.conftest import (
    MOST_WAITING_OF_TENANT,
    asking,
    complete,
    eventually,
    gateway_client,
    jobs_in_redis,
    nothing_left,
    serve,
)
from tests.gateway.management_api import Management, running_management
from tests.gateway.tenants import all_have_received_changes, change_tenant
from tests.support.fake_worker import ENGINE, FakeWorker
from tests.support.processes import wait_until
from tests.support.redis_server import RedisServer
from tests.support.stack import MODEL, Stack, metric

PROMPT_MICROS, CACHED_MICROS, COMPLETION_MICROS = 3_000_001, 1_000_000, 7_000_003


@dataclass
class Customer:
    """A separate tenant with one key, and its usage records."""

    stack: Stack
    tenant: str
    client: httpx.AsyncClient
    store: "Redis"

    async def records(self, count: int) -> list[UsageRecord]:
        """Wait until the tenant has no open request; return its records, a given number."""
        bucket = keys.bucket_of(self.tenant)

        async def is_settled() -> bool:
            request_ids: Any = await self.store.zrange(keys.open_requests(bucket), 0, -1)
            drafts: Any = [
                await self.store.hget(keys.request(bucket, request_id.decode()), "record")
                for request_id in request_ids
            ]
            return all(decode_usage(draft).tenant_id != self.tenant for draft in drafts if draft)

        await eventually(is_settled, what="the settlement")
        entries: Any = await self.store.xrange(keys.usage(bucket))
        records = [decode_usage(fields[b"u"]) for _, fields in entries]
        own = [record for record in records if record.tenant_id == self.tenant]
        assert len(own) == count, own
        assert len({record.request_id for record in own}) == count
        return own

    async def change(self, **options: Any) -> None:
        """Change the tenant, and wait until the gateways have received it."""
        await change_tenant(self.stack, self.tenant, **options)
        await all_have_received_changes(self.stack)


@pytest.fixture
async def customer(stack: Stack, store: "Redis") -> AsyncIterator[Customer]:
    """A new tenant at the first gateway."""
    tenant = f"customer-{secrets.token_hex(4)}"
    key = await asyncio.to_thread(stack.key, tenant)
    async with gateway_client(stack.url, key) as client:
        yield Customer(stack, tenant, client, store)


@pytest.fixture(scope="module")
def prices(stack: Stack) -> None:
    """A price for the tiny model in each tier except flex, which has the default price."""

    async def add() -> None:
        database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
        service = PriceService(database, ChangeAnnouncer(redis))
        for tier, factor in ((ServiceTier.DEFAULT, 1), (ServiceTier.PRIORITY, 2)):
            await service.add(
                MODEL,
                service_tier=tier,
                prompt_micros=factor * PROMPT_MICROS,
                cached_micros=factor * CACHED_MICROS,
                completion_micros=factor * COMPLETION_MICROS,
            )
        await redis.aclose()
        await database.aclose()

    asyncio.run(add())
    headers = {"authorization": f"Bearer {stack.key()}"}
    for url in stack.gateways[:2]:

        def are_known(page: str = f"{url}/v1/models/{MODEL}") -> bool:
            # Gateways receive the model in a moment.
            shown = httpx.get(page, headers=headers, timeout=None).json().get("pricing") or {}
            return bool(shown.get("priority", {}).get("prompt_micros") == 2 * PROMPT_MICROS)

        wait_until(are_known, what="the prices being known")


def cost_of(usage: dict[str, Any], factor: int = 1) -> int:
    """Return the cost in micro-dollars as a customer would compute it."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    cost = (
        (usage["prompt_tokens"] - cached) * PROMPT_MICROS
        + cached * CACHED_MICROS
        + usage["completion_tokens"] * COMPLETION_MICROS
    )
    return int(-(-factor * cost // 1_000_000))


async def usage_of_stream(client: httpx.AsyncClient, **parameters: Any) -> dict[str, Any]:
    """Return the usage in the final chunk of a stream."""
    response = await complete(client, stream=True, **parameters)
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    usage: dict[str, Any] = msgspec.json.decode(events[-1])["usage"]
    return usage


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "parameters", [{}, {"n": 2, "best_of": 2}, {"prompt": ["One", "Two words"]}], ids=str
)
async def test_usage_record_matches_the_response(
    customer: Customer, prices: None, stream: bool, parameters: dict[str, Any]
) -> None:
    if stream:
        usage = await usage_of_stream(customer.client, **parameters)
    else:
        usage = (await complete(customer.client, **parameters)).json()["usage"]
    assert "cost" not in usage
    [record] = await customer.records(1)
    assert record.outcome is Outcome.FINISHED
    assert record.prompt_tokens == usage["prompt_tokens"]
    assert record.completion_tokens == usage["completion_tokens"]
    assert record.cost_micros == cost_of(usage) > 0
    assert (record.model, record.endpoint, record.dialect) == (MODEL, "completions", "openai")
    assert record.is_streamed is stream
    assert record.service_tier is ServiceTier.DEFAULT
    assert record.credential_id.startswith("key_")
    assert 0 < record.created_ms <= record.ended_ms
    assert 0 < record.first_token_ms <= record.ended_ms - record.created_ms + 5
    assert (record.code, record.engine) == ("", "scripted")


async def test_record_is_written_before_the_response_ends(customer: Customer) -> None:
    await customer.change(limits={LimitName.CONCURRENT_REQUESTS: 1})
    for number in range(20):
        response = await complete(customer.client, max_tokens=1, stream=number % 2 == 0)
        assert response.status_code == 200, response.text


async def test_account_can_request_the_cost_in_responses(customer: Customer, prices: None) -> None:
    await customer.change(shows_cost=True)
    whole = await complete(customer.client)
    usage = whole.json()["usage"]
    micros = cost_of(usage)
    assert usage["cost"] == micros / 1_000_000
    assert float(whole.headers["x-cost"]) == micros / 1_000_000
    assert "e" not in whole.headers["x-cost"]
    streamed = await usage_of_stream(customer.client)
    assert streamed["cost"] == cost_of(streamed) / 1_000_000
    extra = await usage_of_stream(customer.client, stream_options={"include_usage": True})
    assert extra["cost"] == cost_of(extra) / 1_000_000
    silent = await customer.client.post(
        "/v1/completions", json=asking(), headers={"x-include-cost": "false"}
    )
    assert "cost" not in silent.json()["usage"]
    assert "x-cost" not in silent.headers


async def test_request_can_ask_for_the_cost(customer: Customer, prices: None) -> None:
    response = await customer.client.post(
        "/v1/completions", json=asking(), headers={"x-include-cost": "true"}
    )
    assert response.json()["usage"]["cost"] == cost_of(response.json()["usage"]) / 1_000_000


@pytest.mark.parametrize(("tier", "factor"), [("priority", 2), ("flex", 1), ("default", 1)])
async def test_tier_has_its_price_and_is_in_the_response(
    customer: Customer, prices: None, tier: str, factor: int
) -> None:
    body = (await complete(customer.client, service_tier=tier)).json()
    assert body["service_tier"] == tier
    [record] = await customer.records(1)
    assert record.service_tier == tier
    assert record.cost_micros == cost_of(body["usage"], factor)


async def test_hold_covers_the_dearest_of_a_list_and_the_price_is_that_of_the_model_that_ran(
    customer: Customer, prices: None, store: "Redis"
) -> None:
    cheap = f"cheap-{secrets.token_hex(4)}"  # It has no price.
    worker = await serve(store, cheap)
    estimate = "/v1/completions:estimate"
    dear = (await customer.client.post(estimate, json=asking())).json()["cost"]["max_micros"]
    listed = asking(model=cheap, models=[MODEL])

    async def covers_the_dearest() -> bool:
        response = await customer.client.post(estimate, json=listed)
        if response.is_error:
            return False
        found = response.json()
        return bool(found["model"] == cheap and found["cost"]["max_micros"] == dear > 0)

    await eventually(covers_the_dearest, what="the cheap model being served")
    await customer.change(limits={LimitName.BUDGET: dear - 1})
    refused = await customer.client.post("/v1/completions", json=listed)
    assert refused.status_code in (402, 429), refused.text
    await customer.change(limits={LimitName.BUDGET: dear})
    await worker.announce(WorkerState.DRAINING)

    async def is_left() -> bool:
        page = await customer.client.get(f"/v1/models/{cheap}")
        return not page.json()["ready"]

    await eventually(is_left, what="the cheap model having no worker")
    body = (await complete(customer.client, model=cheap, models=[MODEL])).json()
    usage = body["usage"]
    assert body["model"] == MODEL
    [record] = await customer.records(1)
    assert (record.model, record.cost_micros) == (MODEL, cost_of(usage))


async def test_models_list_their_prices(customer: Customer, prices: None) -> None:
    body = (await customer.client.get(f"/v1/models/{MODEL}")).json()
    default = {
        "prompt_micros": PROMPT_MICROS,
        "cached_micros": CACHED_MICROS,
        "completion_micros": COMPLETION_MICROS,
        "audio_micros": 0,
    }
    priority = {name: 2 * micros for name, micros in default.items()}
    batch = {name: (micros + 1) // 2 for name, micros in default.items()}
    assert body["pricing"] == {
        "batch": batch,
        "flex": default,
        "default": default,
        "priority": priority,
    }
    listed = await customer.client.get("/v1/models", params={"format": "openrouter"})
    [pricing] = [each["pricing"] for each in listed.json()["data"] if each["id"] == MODEL]
    assert pricing == {
        "prompt": "0.000003000001",
        "input_cache_read": "0.000001",
        "completion": "0.000007000003",
        "image": "0",
        "request": "0",
    }


async def test_tier_comes_from_the_account_unless_the_request_names_one(customer: Customer) -> None:
    await customer.change(service_tier=ServiceTier.FLEX)
    body = (await complete(customer.client)).json()
    assert "service_tier" not in body
    body = (await complete(customer.client, service_tier="auto")).json()
    assert body["service_tier"] == "flex"
    await complete(customer.client, service_tier="default")
    tiers = [record.service_tier for record in await customer.records(3)]
    assert tiers == [ServiceTier.FLEX, ServiceTier.FLEX, ServiceTier.DEFAULT]


async def test_estimate_has_the_highest_cost_of_a_request(customer: Customer, prices: None) -> None:
    await customer.change(limits={LimitName.REQUESTS_PER_MINUTE: 7})
    response = await customer.client.post("/v1/completions:estimate", json=asking(best_of=3))
    body = response.json()
    usage = {
        "prompt_tokens": body["prompt_tokens"],
        "completion_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["cost"] == {
        "prompt_micros": cost_of(usage | {"completion_tokens": 0}),
        "max_micros": cost_of(usage),
    }
    assert body["limits"]["tenant"]["requests_per_minute"] == 7
    await customer.records(0)


# --- other ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_disconnected_client_pays_for_generated_tokens(
    customer: Customer, prices: None, stream: bool
) -> None:
    url, tokens = customer.stack.worker_url(), "sluice_worker_completion_tokens_total"
    # Its first token is this request's.
    await eventually(lambda: nothing_left(customer.store, MODEL), what="the end of other work")
    before = await asyncio.to_thread(metric, url, tokens)
    task = asyncio.create_task(complete(customer.client, max_tokens=2000, stream=stream))

    async def runs() -> bool:
        return await asyncio.to_thread(metric, url, tokens) > before

    await eventually(runs, what="the first token")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    [record] = await customer.records(1)
    assert (record.outcome, record.engine) == (Outcome.CANCELLED, "scripted")
    assert record.prompt_tokens > 0
    assert 0 < record.completion_tokens < 2000
    usage = {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
    }
    assert record.cost_micros == cost_of(usage) > 0


async def test_client_that_disconnects_in_the_queue_pays_nothing(customer: Customer) -> None:
    await serve(customer.store, "busy")
    task = asyncio.create_task(complete(customer.client, model="busy"))

    async def waits() -> bool:
        return (await jobs_in_redis(customer.store, "busy"))["waiting"] == 1

    await eventually(waits, what="the job being queued")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    [record] = await customer.records(1)
    assert record.outcome is Outcome.CANCELLED
    assert (record.prompt_tokens, record.completion_tokens, record.cost_micros) == (0, 0, 0)
    assert record.engine == ""


@pytest.mark.parametrize(
    ("code", "status", "error", "free_tokens", "prompt"),
    [
        (FailureCode.ENGINE_ERROR, 503, "engine_dead", 3, [5]),
        # Its bytes count as stored, but no client can receive the output.
        (FailureCode.ENGINE_ERROR, 503, "engine_dead", 3, [5] * 4000),
        # A grammar that the forbidden tokens of the same request leave no way out of.
        (FailureCode.INVALID_REQUEST, 400, "invalid_value", 0, [5]),
    ],
    ids=["engine", "engine-stored", "client"],
)
async def test_failed_request_is_recorded_with_the_engines_counts(
    customer: Customer,
    code: FailureCode,
    status: int,
    error: str,
    free_tokens: int,
    prompt: list[int],
) -> None:
    model = f"failing-{status}-{len(prompt)}"
    worker = await serve(customer.store, model, context_window=8192)
    task = asyncio.create_task(complete(customer.client, model=model, prompt=prompt))
    claim = await worker.claim_one()
    handle, attempt = claim.job.handle, claim.attempt
    received = Delta(handle, attempt, 0, 0, "word", [5, 6])
    await worker.send(claim.job.gateway, deltas=[received])
    failed = JobFailed(handle, attempt, code, "broken")
    await worker.send(claim.job.gateway, failed=[failed])
    await worker.drop(claim, tokens=3)
    assert (await task).status_code == status
    [record] = await customer.records(1)
    assert (record.outcome, record.code, record.engine) == (Outcome.FAILED, error, ENGINE)
    prompt_tokens = len(claim.job.prompt_token_ids)
    assert (record.prompt_tokens, record.completion_tokens) == (prompt_tokens, 3)
    assert record.free_prompt_tokens == (prompt_tokens if free_tokens else 0)
    assert record.free_completion_tokens == free_tokens


async def test_streamed_tokens_count_although_the_worker_never_reports(
    customer: Customer,
) -> None:
    worker = await serve(customer.store, "vanishing")
    task = asyncio.create_task(complete(customer.client, model="vanishing", stream=True))
    claim = await worker.claim_one()
    job = claim.job
    await worker.send(job.gateway, deltas=[Delta(job.handle, 1, 0, 0, "word", [5, 6])])
    failed = JobFailed(job.handle, 1, FailureCode.ENGINE_ERROR, "")
    await worker.send(job.gateway, failed=[failed])
    response = await task
    assert '"error"' in response.text
    await worker.lose(claim)
    [record] = await customer.records(1)
    assert record.outcome is Outcome.FAILED
    assert (record.prompt_tokens, record.completion_tokens) == (len(job.prompt_token_ids), 2)
    assert (record.free_prompt_tokens, record.free_completion_tokens) == (0, 0)


async def test_request_refused_by_the_queue_is_not_recorded_and_uses_no_limit(
    customer: Customer,
) -> None:
    await customer.change(limits={LimitName.REQUESTS_PER_MINUTE: 2})
    await serve(customer.store, "crowded")
    prompts = ["Hello"] * (MOST_WAITING_OF_TENANT + 1)
    for _ in range(3):
        refused = await complete(customer.client, model="crowded", prompt=prompts)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "concurrency"
    await customer.records(0)
    assert (await complete(customer.client)).status_code == 200


@pytest.fixture
async def fake_worker(redis: "Redis") -> FakeWorker:
    """A worker that the gateway in this process knows when it starts."""
    worker = FakeWorker(redis, MODEL)
    await worker.announce()
    return worker


@pytest.fixture
async def management(
    fake_worker: FakeWorker,
    copy_sqlite: Callable[[Path], str],
    redis_server: RedisServer,
    tmp_path: Path,
) -> AsyncIterator[Management]:
    """A gateway in this process, with the tenant `acme`."""
    settings = Settings(
        database_url=SecretStr(copy_sqlite(tmp_path / "own.db")), redis_url=redis_server.url
    )
    async with running_management(settings) as gateway:
        services = gateway.services
        await TenantService(services[Database], services[ChangeAnnouncer]).create(
            "acme", tenant_id="acme"
        )
        yield gateway


async def test_request_that_fails_before_the_queue_holds_nothing(
    redis: "Redis", management: Management, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResponseHead, "of", Mock(side_effect=ArithmeticError("a bug")))
    key = await management.key("acme", Scope.COMPLETIONS)
    body = asking(prompt="a b " * 900, stream=True)
    assert (await management.call(key, "POST", "/v1/completions", body)).status_code == 500
    assert not management.services[Reservations].open_requests

    async def is_free() -> bool:
        return not await redis.keys("{b:*}:open*") + await redis.keys("{b:*}:stored*")

    await eventually(is_free, what="the release")


async def test_stream_that_must_not_run_twice_begins_only_when_it_is_stored(
    redis: "Redis",
    fake_worker: FakeWorker,
    management: Management,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only its gateway could resume it, and its client would get another one under the same key."""
    key = await management.key("acme", Scope.COMPLETIONS)

    async def ask() -> httpx.Response:
        body = asking(stream=True, max_tokens=2)
        headers = {"idempotency-key": "order-1"}
        return await management.call(key, "POST", "/v1/completions", body, headers=headers)

    with monkeypatch.context() as patch:
        patch.setattr(ResponseStore, "open", AsyncMock(side_effect=RedisConnectionError))
        refused = await ask()
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] == "store_unavailable"
        assert "retry-after" in refused.headers
        await eventually(lambda: nothing_left(redis, MODEL), what="the cancellation")
    again = asyncio.create_task(ask())
    await fake_worker.conclude(await fake_worker.claim_one(), "b")
    assert (await again).status_code == 200


async def test_record_counts_preemptions_of_all_attempts_and_their_tokens_once(
    copy_sqlite: Callable[[Path], str],
    redis: "Redis",
    redis_server: RedisServer,
    tmp_path: Path,
) -> None:
    worker, usage = FakeWorker(redis, MODEL), keys.usage(keys.bucket_of("acme"))
    await worker.announce()
    settings = Settings(
        database_url=SecretStr(copy_sqlite(tmp_path / "preempted.db")), redis_url=redis_server.url
    )
    async with running_management(settings) as gateway:
        tenants = TenantService(gateway.services[Database], gateway.services[ChangeAnnouncer])
        await tenants.create("acme", tenant_id="acme", limits={LimitName.MODEL_SHARE: 25})
        key = await gateway.key("acme", Scope.COMPLETIONS)
        asked = asyncio.create_task(gateway.call(key, "POST", "/v1/completions", asking()))
        claim = await worker.claim_one()
        await worker.say(claim, "a")
        await worker.preempt(claim, 1, 1)
        await worker.give_back(claim, ReturnReason.PREEMPTED, has_progressed=True)
        again = await worker.claim_one()
        assert (again.attempt, again.job.model_share) == (2, 25)
        await worker.preempt(again, 2, 4)
        await worker.say(again, "b", finish=FinishReason.STOP)
        await worker.finish(again)
        assert (await asked).status_code == 200
        # Also of requests that do not finish.
        asked = asyncio.create_task(gateway.call(key, "POST", "/v1/completions", asking()))
        claim = await worker.claim_one()
        await worker.preempt(claim, 3, 7)
        await worker.fail(claim, FailureCode.ENGINE_ERROR)
        assert (await asked).is_server_error
        asked = asyncio.create_task(gateway.call(key, "POST", "/v1/completions", asking()))
        claim = await worker.claim_one()
        await worker.preempt(claim, 4, 9)
        await worker.say(claim, "a")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await eventually(lambda: redis.llen(keys.control(MODEL, worker.name)), what="the end")
        await worker.drop(claim, tokens=1)

        async def records() -> list[UsageRecord]:
            entries: Any = await redis.xrange(usage)
            some = [decode_usage(fields[b"u"]) for _, fields in entries]
            return some if len(some) == 3 else []

        await eventually(records, what="the records")
        ended = await records()
    counts = [(e.preemptions, e.recomputed_tokens, e.completion_tokens) for e in ended]
    assert counts == [(3, 5, 2), (3, 7, 0), (4, 9, 1)]


async def test_invalid_request_uses_no_limit(customer: Customer) -> None:
    await customer.change(limits={LimitName.REQUESTS_PER_MINUTE: 1})
    for _ in range(3):
        assert (await complete(customer.client, temperature=9)).status_code == 400
    assert (await complete(customer.client)).status_code == 200
    await customer.records(1)


# --- refusals ------------------------------------------------------------------------------------


async def test_refusal_names_the_limit_and_when_it_resets(customer: Customer) -> None:
    await customer.change(limits={LimitName.REQUESTS_PER_MINUTE: 1})
    admitted = await complete(customer.client, max_tokens=1)
    assert admitted.headers["x-ratelimit-limit-requests"] == "1"
    assert admitted.headers["x-ratelimit-remaining-requests"] == "0"
    refused = await complete(customer.client, max_tokens=1)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "requests")
    assert (error["limit"], error["scope"]) == ("requests_per_minute", "tenant")
    assert 30 < error["reset_seconds"] <= 61
    assert refused.headers["x-should-retry"] == "true"
    assert float(refused.headers["retry-after-ms"]) / 1000 == pytest.approx(
        error["reset_seconds"], abs=0.01
    )
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    await customer.records(1)


@pytest.mark.parametrize(
    ("dialect", "status", "code"),
    [
        ("openai", 429, "insufficient_quota"),
        ("fireworks", 402, "budget_exceeded"),
        ("omlx", 402, "budget_exceeded"),
        ("mistralrs", 402, "budget_exceeded"),
        ("llamacpp", 402, 402),
        ("vllm", 402, 402),
    ],
)
async def test_exceeded_budget_has_the_style_of_the_dialect(
    customer: Customer, prices: None, dialect: str, status: int, code: object
) -> None:
    await customer.change(limits={LimitName.BUDGET: 10})
    refused = await customer.client.post(
        "/v1/completions", json=asking(), headers={"x-api-dialect": dialect}
    )
    assert refused.status_code == status, refused.text
    assert refused.json()["error"]["code"] == code
    assert refused.json()["error"]["limit"] == "budget_micros"
    assert refused.headers["x-should-retry"] == "false"
    await customer.records(0)


async def test_prepaid_tenant_without_credits_is_refused(customer: Customer, prices: None) -> None:
    await customer.change(billing=Billing.PREPAID)
    refused = await customer.client.post(
        "/v1/completions", json=asking(), headers={"x-api-dialect": "fireworks"}
    )
    assert refused.status_code == 402
    assert refused.json()["error"]["code"] == "insufficient_credits"


async def test_null_and_absent_limits_refuse_nothing(customer: Customer, prices: None) -> None:
    await customer.change(limits=dict.fromkeys(LimitName))
    response = await complete(customer.client)
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


async def test_limit_holds_with_several_gateways(customer: Customer, stack: Stack) -> None:
    # The queue's limit for waiting jobs is the same.
    most = MOST_WAITING_OF_TENANT
    await customer.change(limits={LimitName.REQUESTS_PER_MINUTE: most})
    key = customer.client.headers["authorization"].removeprefix("Bearer ")
    async with gateway_client(stack.gateways[1], key) as other:
        clients = (customer.client, other)
        answers = await asyncio.gather(
            *(complete(clients[number % 2], max_tokens=1) for number in range(40))
        )
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200] * most + [429] * (40 - most)
    await customer.records(most)
