"""`/v1/organization/usage/...` and `/v1/organization/costs`, as OpenAI's client reads them."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from contract.tier import ServiceTier
from gateway.billing.usage.organization import MOST_VALUES
from gateway.platform.database.engine import Database
from gateway.records.scopes import Scope
from gateway.records.usage_record import UsageRecord
from tests.gateway.billing.ledger_rows import NOON, add, record, totals
from tests.gateway.conftest import gateway_client
from tests.support.cases import all_cases
from tests.support.processes import wait_until
from tests.support.stack import MODEL, Stack

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
TENANT = f"organization-{secrets.token_hex(4)}"
START, END = (int((NOON + number * DAY).timestamp()) for number in (-1, 3))
USAGE, COSTS = "/v1/organization/usage/completions", "/v1/organization/costs"
KINDS = ("completions", "embeddings", "audio_transcriptions")


@pytest.fixture(scope="module")
def records(stack: Stack) -> list[UsageRecord]:
    """What a tenant used in three days."""
    made = [
        record(NOON, tenant_id=TENANT, model="m1", credential_id="key_a", project_id="prj_1"),
        record(NOON + HOUR, tenant_id=TENANT, model="m1", credential_id="key_b"),
        record(NOON + DAY, tenant_id=TENANT, model="m2", credential_id="jwt:ann"),
        record(NOON + DAY, tenant_id=TENANT, model="m2", service_tier=ServiceTier.BATCH),
        # What a known model does is not read from its counts.
        record(NOON + DAY, tenant_id=TENANT, model=MODEL, completion_tokens=0),
        record(NOON + DAY, tenant_id=TENANT, model="vectors", completion_tokens=0),
        record(NOON + 2 * DAY, tenant_id=TENANT, model="ears", audio_seconds=42),
        record(NOON, tenant_id=f"{TENANT}-2", model="m1"),
    ]

    async def store() -> None:
        database = Database(stack.database_url)
        await add(database, made)
        await database.aclose()

    asyncio.run(store())
    headers = {"Authorization": f"Bearer {stack.key(TENANT)}"}
    wait_until(
        lambda: MODEL in httpx.get(f"{stack.url}/v1/models", headers=headers).text,
        what="the announcement of the model",
    )
    return made[:-1]


@pytest.fixture
async def customer(stack: Stack, records: list[UsageRecord]) -> AsyncIterator[httpx.AsyncClient]:
    """A client that may see the usage of the tenant."""
    key = await asyncio.to_thread(stack.key, TENANT, scopes=frozenset({Scope.USAGE}))
    async with gateway_client(stack.url, key) as client:
        yield client


async def pages(
    client: httpx.AsyncClient, path: str, **query: Any
) -> list[tuple[int, int, list[dict[str, Any]]]]:
    """Return the buckets of all pages."""
    found, asked = [], {"start_time": START, "end_time": END, **query}
    while True:
        response = await client.get(path, params=asked)
        assert response.status_code == 200, response.text
        body = response.json()
        assert body["object"] == "page"
        found += [(each["start_time"], each["end_time"], each["results"]) for each in body["data"]]
        assert body["has_more"] is (body["next_page"] is not None)
        if not body["has_more"]:
            return found
        asked["page"] = body["next_page"]


async def test_sums_of_all_kinds_equal_those_of_our_own_report(
    customer: httpx.AsyncClient, records: list[UsageRecord]
) -> None:
    own = await customer.get(
        "/v1/usage", params={"start": "2026-11-09T12:00Z", "end": "2026-11-13T12:00Z"}
    )
    expected = {line["start"]: line for line in own.json()["data"]}
    whole = totals(records)
    assert sum(line["cost_micros"] for line in expected.values()) == whole.cost_micros
    for width in ("1h", "1d"):
        found = Counter[str]()
        for kind in KINDS:
            path = f"/v1/organization/usage/{kind}"
            for _, _, results in await pages(customer, path, bucket_width=width):
                for result in results:
                    found.update({n: each for n, each in result.items() if isinstance(each, int)})
        assert found["num_model_requests"] == whole.requests
        assert found["output_tokens"] == whole.completion_tokens - records[6].completion_tokens
        tokens = whole.prompt_tokens - records[6].prompt_tokens
        assert found["input_tokens"] == tokens
        assert found["input_cached_tokens"] + found["input_uncached_tokens"] == (
            tokens - records[5].prompt_tokens
        )
        assert found["seconds"] == whole.audio_seconds
    buckets = await pages(customer, COSTS, limit=1)
    assert [end for _, end, _ in buckets[:-1]] == [start for start, _, _ in buckets[1:]]
    assert (buckets[0][0], buckets[-1][1], len(buckets)) == (START, END, 5)
    costs = [sum(each["amount"]["value"] for each in results) for *_, results in buckets]
    assert [round(cost * 1e6) for cost in costs if cost] == [
        expected[start]["cost_micros"] for start in sorted(expected)
    ]


async def test_results_are_grouped_as_openais_client_asks(
    stack: Stack, customer: httpx.AsyncClient, records: list[UsageRecord]
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=frozenset({Scope.USAGE}))
    async with AsyncOpenAI(
        api_key=key, admin_api_key=key, base_url=f"{stack.url}/v1", max_retries=0
    ) as client:
        # A result is one of ten types.
        usage: Any = client.admin.organization.usage
        page = await usage.completions(
            start_time=START,
            end_time=END,
            group_by=["project_id", "user_id", "api_key_id", "model", "batch", "service_tier"],
        )
        results = [each for bucket in page.data for each in bucket.results]
        found = {
            (r.model, r.project_id, r.user_id, r.api_key_id, r.batch, r.service_tier): (
                r.input_tokens
            )
            for r in results
        }
        names = ("m1", "prj_1", None, "key_a", False, "default")
        assert found == {
            names: records[0].prompt_tokens,
            ("m1", None, None, "key_b", False, "default"): records[1].prompt_tokens,
            ("m2", None, "ann", None, False, "default"): records[2].prompt_tokens,
            ("m2", None, None, "key_1", True, "batch"): records[3].prompt_tokens,
            (MODEL, None, None, "key_1", False, "default"): records[4].prompt_tokens,
        }
        costs = await usage.costs(start_time=START, end_time=END, group_by=["line_item"])
        lines = {r.line_item for bucket in costs.data for r in bucket.results}
        assert lines == {"m1", "m2", MODEL, "vectors", "ears"}
        ears = await usage.audio_transcriptions(start_time=START, end_time=END)
        assert [r.seconds for bucket in ears.data for r in bucket.results] == [42]


async def test_filters_exclude_the_rest(
    customer: httpx.AsyncClient, records: list[UsageRecord]
) -> None:
    chosen: list[tuple[str, Any, list[int]]] = [
        ("models", ["m1", "none"], [0, 1]),
        ("models[]", "m2", [2, 3]),
        ("project_ids", "prj_1", [0]),
        ("api_key_ids[]", ["key_a", "key_b"], [0, 1]),
        ("user_ids", "ann", [2]),
        ("user_ids", "nobody", []),
        ("batch", "true", [3]),
        ("batch", "false", [0, 1, 2, 4]),
    ]
    for name, value, numbers in chosen:
        buckets = await pages(customer, USAGE, **{name: value})
        tokens = sum(each["input_tokens"] for *_, results in buckets for each in results)
        assert tokens == sum(records[number].prompt_tokens for number in numbers), name


BAD = [
    (USAGE, {"start_time": None}, "start_time"),
    (USAGE, {"start_time": "2026-11-01"}, "start_time"),
    (USAGE, {"start_time": -1}, "start_time"),
    (USAGE, {"end_time": START}, "end_time"),
    (USAGE, {"bucket_width": "1m"}, "bucket_width"),
    (COSTS, {"bucket_width": "1h"}, "bucket_width"),
    (USAGE, {"limit": 0}, "limit"),
    (USAGE, {"limit": 32}, "limit"),
    (USAGE, {"limit": 169, "bucket_width": "1h"}, "limit"),
    (COSTS, {"limit": 181}, "limit"),
    (USAGE, {"group_by": "size"}, "group_by"),
    (COSTS, {"group_by[]": ["model"]}, "group_by"),
    (USAGE, {"page": "x"}, "page"),
    (USAGE, {"page": "9" * 20}, "page"),
    (USAGE, {"page": str(END)}, "page"),
    (USAGE, {"models": ["m"] * (MOST_VALUES + 1)}, "models"),
    (USAGE, {"batch": "maybe"}, "batch"),
    (USAGE, {"sizes": "1"}, "sizes"),
    ("/v1/organization/usage/images", {}, "kind"),
]


@all_cases(("path", "query", "param"), BAD)
async def test_bad_query_is_refused_by_parameter(
    customer: httpx.AsyncClient, path: str, query: dict[str, Any], param: str
) -> None:
    asked = {"start_time": START, "end_time": END} | query
    given = {name: value for name, value in asked.items() if value is not None}
    response = await customer.get(path, params=given)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_key_without_the_scope_sees_only_its_own_usage(
    stack: Stack, records: list[UsageRecord]
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT)
    async with gateway_client(stack.url, key) as client:
        for path in (USAGE, COSTS):
            assert not any(results for *_, results in await pages(client, path))
            query: dict[str, Any] = {"start_time": START, "api_key_ids": "key_a"}
            assert (await client.get(path, params=query)).status_code == 403
    key = await asyncio.to_thread(stack.key, TENANT, scopes=frozenset({Scope.KEYS}))
    async with gateway_client(stack.url, key) as client:
        assert (await client.get(COSTS, params={"start_time": START})).status_code == 403
