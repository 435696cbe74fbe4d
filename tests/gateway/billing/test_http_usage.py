"""`/v1/usage` and `/admin/usage`: sums, access rights and schemas."""

import asyncio
import base64
import csv
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from redis.asyncio import Redis

from gateway.auth.store import find_owner
from gateway.billing.ledger.drain import Drain
from gateway.platform.database.engine import Database
from gateway.records.scopes import Scope
from gateway.records.usage_record import Outcome, UsageRecord
from tests.gateway.billing.ledger_rows import NOON, add, record, totals
from tests.gateway.conftest import complete, gateway_client
from tests.gateway.http_calls import message_of
from tests.support.cases import all_cases
from tests.support.stack import Stack

DAY = timedelta(days=1)
TENANT, OTHER = "spender", "neighbour"
NOVEMBER = {"start": "2026-11-01", "end": "2026-12-01T00:00:00Z"}

Client = Callable[..., Awaitable[httpx.AsyncClient]]


@pytest.fixture(scope="module")
def records(stack: Stack) -> list[UsageRecord]:
    """What two tenants used in November."""
    ids = {name: key_id(stack, **options) for name, options in KEYS.items()}
    made = [
        record(NOON, tenant_id=TENANT, credential_id=ids["own"], model="m1"),
        record(NOON, tenant_id=TENANT, credential_id=ids["usage"], model="org/m2"),
        record(NOON + DAY, tenant_id=TENANT, credential_id=ids["own"], project_id="prj_1"),
        record(
            NOON + DAY,
            tenant_id=TENANT,
            credential_id=ids["own"],
            model="@SUM(A1)",
            outcome=Outcome.FAILED,
            code="engine_dead",
            engine="vllm 0.32.0",
            free_completion_tokens=3,
        ),
        record(NOON + 2 * DAY, tenant_id=TENANT, credential_id="jwt:-ann", is_prepaid=True),
        record(NOON, tenant_id=OTHER, credential_id=ids["other"]),
    ]

    async def store() -> None:
        database = Database(stack.database_url)
        await add(database, made)
        await database.aclose()

    asyncio.run(store())
    return made


KEYS: dict[str, dict[str, Any]] = {
    "own": {"tenant": TENANT},
    "usage": {"tenant": TENANT, "scopes": frozenset({Scope.USAGE})},
    "keys": {"tenant": TENANT, "scopes": frozenset({Scope.KEYS})},
    "other": {"tenant": OTHER, "scopes": frozenset({Scope.USAGE, Scope.COMPLETIONS})},
    "operator": {"tenant": OTHER, "scopes": frozenset({Scope.ADMIN_READ})},
}


def key_id(stack: Stack, **options: Any) -> str:
    """Return the id of a key."""

    async def find(prefix: str) -> str:
        database = Database(stack.database_url)
        try:
            async with database.reading() as transaction:
                owner = await find_owner(transaction, prefix)
        finally:
            await database.aclose()
        assert owner is not None
        return owner.key.id

    return asyncio.run(find(stack.key(**options)[3:15]))


@pytest.fixture
async def client_of(stack: Stack, records: list[UsageRecord]) -> AsyncIterator[Client]:
    """Makes clients that send one of the keys."""
    async with AsyncExitStack() as clients:

        async def make(name: str) -> httpx.AsyncClient:
            key = await asyncio.to_thread(stack.key, **KEYS[name])
            url = stack.operators if name == "operator" else stack.url
            return await clients.enter_async_context(gateway_client(url, key))

        yield make


async def shown(client: httpx.AsyncClient, path: str, **query: Any) -> dict[str, Any]:
    """Return a response that matches its schema."""
    response = await client.get(path, params=NOVEMBER | query)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    page = (await client.get("/openapi.json")).json()
    described = page["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
    jsonschema.validate(body, described["schema"] | {"components": page["components"]})
    return body


def sums(line: dict[str, Any]) -> tuple[int, ...]:
    """Return the numbers of a line of a report."""
    return tuple(line[name] for name in totals([])._fields)


async def test_usage_is_summed_up_by_day(client_of: Client, records: list[UsageRecord]) -> None:
    body = await shown(await client_of("usage"), "/v1/usage")
    assert (body["start"], body["end"], body["bucket"]) == (
        "2026-11-01T00:00:00Z",
        "2026-12-01T00:00:00Z",
        "day",
    )
    assert [(line["start"], line["end"], sums(line)) for line in body["data"]] == [
        ("2026-11-10T00:00:00Z", "2026-11-11T00:00:00Z", totals(records[0:2])),
        ("2026-11-11T00:00:00Z", "2026-11-12T00:00:00Z", totals(records[2:4])),
        ("2026-11-12T00:00:00Z", "2026-11-13T00:00:00Z", totals(records[4:5])),
    ]
    assert (body["has_more"], body["next"]) == (False, None)
    assert {body["data"][0][name] for name in ("model", "key", "project")} == {None}
    assert "tenant" not in body["data"][0]
    # A request that was not finished in time counts as failed and costs nothing.
    assert body["data"][1]["failed_requests"] == 1


@pytest.mark.parametrize(
    "group_by", [["model", "project"], "model,project", "project, model", ["project,model", ""]]
)
async def test_usage_is_grouped_as_requested(
    client_of: Client, records: list[UsageRecord], group_by: Any
) -> None:
    body = await shown(await client_of("usage"), "/v1/usage", bucket="total", group_by=group_by)
    found = {(line["model"], line["project"]): sums(line) for line in body["data"]}
    assert found == {
        ("m1", None): totals([records[0], records[4]]),
        ("m1", "prj_1"): totals([records[2]]),
        ("org/m2", None): totals([records[1]]),
        ("@SUM(A1)", None): totals([records[3]]),
    }


async def test_pages_are_contiguous(client_of: Client, records: list[UsageRecord]) -> None:
    client = await client_of("usage")
    for path, query, most in (
        ("/v1/usage", {"group_by": "model,key,project,service_tier"}, 5),
        ("/v1/usage/requests", {}, 5),
    ):
        whole = (await shown(client, path, **query))["data"]
        assert len(whole) == most
        seen: list[dict[str, Any]] = []
        after: dict[str, str] = {}
        while True:
            page = await shown(client, path, **query, limit=2, **after)
            seen += page["data"]
            if not page["has_more"]:
                break
            after = {"after": page["next"]}
        assert seen == whole


async def test_filters_exclude_the_rest(client_of: Client, records: list[UsageRecord]) -> None:
    client = await client_of("usage")
    for query, chosen in (
        ({"model": "org/m2"}, records[1:2]),
        ({"project": "prj_1"}, records[2:3]),
        ({"key": "jwt:-ann"}, records[4:5]),
        ({"key": "jwt:-ann", "model": "org/m2"}, []),
        ({"start": "2026-11-11", "end": "2026-11-12"}, records[2:4]),
        ({"start": "2026-11-12T13:30:00+03:00"}, records[4:5]),
    ):
        body = await shown(client, "/v1/usage", bucket="total", **query)
        assert sum(line["cost_micros"] for line in body["data"]) == totals(chosen).cost_micros
        listed = await shown(client, "/v1/usage/requests", **query)
        assert {line["id"] for line in listed["data"]} == {each.request_id for each in chosen}
    for path in ("/v1/usage", "/v1/usage/requests"):
        refused = await client.get(path, params={"tenant": OTHER})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tenant")


async def test_receipt_has_every_field_of_a_request(
    client_of: Client, records: list[UsageRecord]
) -> None:
    client = await client_of("usage")
    response = await client.get(f"/v1/usage/requests/{records[3].request_id}")
    assert response.json() == {
        "object": "usage.request",
        "id": records[3].request_id,
        "created_at": "2026-11-11T12:00:00Z",
        "ended_at": "2026-11-11T12:00:01.500000Z",
        "first_token_ms": 120,
        "model": "@SUM(A1)",
        "engine": "vllm 0.32.0",
        "key": records[3].credential_id,
        "project": None,
        "endpoint": "completions",
        "dialect": "openai",
        "service_tier": "default",
        "stream": False,
        "outcome": "failed",
        "code": "engine_dead",
        "prompt_tokens": records[3].prompt_tokens,
        "cached_tokens": records[3].cached_tokens,
        "completion_tokens": 20,
        "prices": {
            "prompt_micros": 150_000,
            "cached_micros": 75_000,
            "completion_micros": 600_000,
            "audio_micros": 0,
        },
        "audio_seconds": 0,
        "free_prompt_tokens": 0,
        "free_cached_tokens": 0,
        "free_completion_tokens": 3,
        "free_audio_seconds": 0,
        "is_prepaid": False,
        "preemptions": 2,
        "recomputed_tokens": 96,
        "exactness_class": "438df8cab49b",
        "class_crossings": 0,
        "cost_micros": records[3].cost_micros,
    }
    prepaid = await client.get(f"/v1/usage/requests/{records[4].request_id}")
    assert (prepaid.json()["is_prepaid"], prepaid.json()["cost_micros"]) == (
        True,
        records[4].cost_micros,
    )
    assert prepaid.json()["engine"] is None


async def test_requests_of_other_tenants_are_hidden(
    client_of: Client, records: list[UsageRecord]
) -> None:
    client = await client_of("other")
    assert len((await shown(client, "/v1/usage/requests"))["data"]) == 1
    refused = await client.get(f"/v1/usage/requests/{records[0].request_id}")
    same = await client.get("/v1/usage/requests/cmpl-none")
    message = message_of(refused, status=404, kind="invalid_request_error", code="not_found")
    assert message.replace(records[0].request_id, "cmpl-none") == same.json()["error"]["message"]


async def test_key_without_the_scope_sees_only_its_own_usage(
    client_of: Client, records: list[UsageRecord]
) -> None:
    client, mine = await client_of("own"), [records[0], records[2], records[3]]
    body = await shown(client, "/v1/usage", bucket="total")
    assert [sums(line) for line in body["data"]] == [totals(mine)]
    listed = await shown(client, "/v1/usage/requests", key=records[0].credential_id)
    assert {line["id"] for line in listed["data"]} == {each.request_id for each in mine}
    for path in ("/v1/usage", "/v1/usage/requests"):
        refused = await client.get(path, params={"key": records[1].credential_id})
        message_of(
            refused, status=403, kind="permission_error", code="insufficient_scope", param="key"
        )
    assert (await client.get(f"/v1/usage/requests/{mine[0].request_id}")).status_code == 200
    assert (await client.get(f"/v1/usage/requests/{records[1].request_id}")).status_code == 404


@all_cases(
    "path",
    [
        "/v1/usage",
        "/v1/usage/requests",
        "/v1/usage/requests/x",
        "/admin/usage",
        "/admin/usage/requests",
        "/admin/usage/requests/x",
        "/admin/audit",
    ],
)
async def test_other_credentials_see_nothing(stack: Stack, client_of: Client, path: str) -> None:
    url = stack.listener_of(path) + path
    refused = await (await client_of("keys")).get(url)
    message_of(refused, status=403, kind="permission_error", code="insufficient_scope")
    async with gateway_client(stack.url, None) as anonymous:
        assert (await anonymous.get(url)).status_code == 401
    if path.startswith("/admin"):
        assert (await (await client_of("usage")).get(url)).status_code == 403


async def test_operator_sees_all_tenants(client_of: Client, records: list[UsageRecord]) -> None:
    client = await client_of("operator")
    body = await shown(client, "/admin/usage", bucket="month", group_by="tenant")
    found = {line["tenant"]: sums(line) for line in body["data"]}
    assert found[TENANT] == totals(records[:5])
    assert found[OTHER] == totals(records[5:])
    listed = await shown(client, "/admin/usage/requests", tenant=OTHER)
    assert [(line["id"], line["tenant"], line["gateway"]) for line in listed["data"]] == [
        (records[5].request_id, OTHER, "gw-1")
    ]
    receipt = await client.get(f"/admin/usage/requests/{records[0].request_id}")
    assert receipt.json()["tenant"] == TENANT


@pytest.mark.parametrize(
    "asking",
    [
        {"params": {"format": "csv"}},
        {"headers": {"accept": "text/csv"}},
        {"headers": {"accept": "text/csv;q=0.9, application/json;q=0.1"}},
        {"params": {"format": "csv"}, "headers": {"accept": "application/json"}},
    ],
    ids=["format", "accept", "accept first", "format before accept"],
)
async def test_usage_is_csv_on_request(
    client_of: Client, records: list[UsageRecord], asking: dict[str, Any]
) -> None:
    client = await client_of("usage")
    query = NOVEMBER | {"group_by": "model", "bucket": "total"} | asking.get("params", {})
    response = await client.get("/v1/usage", params=query, headers=asking.get("headers"))
    assert response.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(response.text)))
    assert {row["model"]: int(row["requests"]) for row in rows} == {
        "'@SUM(A1)": 1,
        "m1": 3,
        "org/m2": 1,
    }
    assert "tenant" not in rows[0]
    assert rows[0]["start"] == "2026-11-01T00:00:00Z"
    assert "x-next-page" not in response.headers


async def test_pages_of_csv_are_contiguous(client_of: Client, records: list[UsageRecord]) -> None:
    client = await client_of("usage")
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        query = NOVEMBER | {"format": "csv", "limit": "2"} | after
        response = await client.get("/v1/usage/requests", params=query)
        rows = list(csv.DictReader(io.StringIO(response.text)))
        seen += [row["id"] for row in rows]
        if "x-next-page" not in response.headers:
            break
        after = {"after": response.headers["x-next-page"]}
    assert sorted(seen) == sorted(each.request_id for each in records[:5])


@all_cases("accept", ["*/*", "application/json, text/csv", "text/html", ""])
async def test_other_formats_are_json(client_of: Client, accept: str) -> None:
    client = await client_of("usage")
    response = await client.get("/v1/usage", headers={"accept": accept})
    assert response.json()["object"] == "list"


def cursor(*values: str) -> str:
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")


@all_cases(
    ("query", "param"),
    [
        ({"start": "yesterday"}, "start"),
        ({"start": "1700000000"}, "start"),
        ({"start": "0001-01-01"}, "start"),
        ({"end": "9999-12-31T23:59:59-12:00"}, "end"),
        ({"end": "2026-02-30"}, "end"),
        ({"start": "2026-11-02", "end": "2026-11-02"}, "start"),
        ({"start": "2025-01-01", "end": "2026-11-02"}, "start"),
        ({"bucket": "hour", "start": "2026-10-01", "end": "2026-11-02"}, "start"),
        ({"bucket": "week"}, "bucket"),
        ({"group_by": "tenant"}, "group_by"),
        ({"group_by": ["model"] * 9}, "group_by"),
        ({"limit": "0"}, "limit"),
        ({"limit": "1001"}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"format": "xml"}, "format"),
        ({"model": ""}, "model"),
        ({"model": "a\x00b"}, "model"),
        ({"key": "x" * 301}, "key"),
        ({"after": "x"}, "after"),
        ({"after": "é"}, "after"),
        ({"after": cursor("a", "b")}, "after"),
        ({"after": cursor("2026\x00")}, "after"),
        ({"after": cursor("\ud800")}, "after"),
        ({"after": base64.urlsafe_b64encode(b"[1]").decode()}, "after"),
        ({"after": base64.urlsafe_b64encode(b"[[" * 1000).decode()}, "after"),
        ({"after": "x" * 4097}, "after"),
    ],
)
async def test_invalid_query_is_refused_by_name(
    client_of: Client, query: dict[str, Any], param: str
) -> None:
    response = await (await client_of("usage")).get("/v1/usage", params=query)
    assert response.status_code == 400, response.text
    message_of(
        response, status=400, kind="invalid_request_error", code="invalid_value", param=param
    )


@all_cases(
    "after",
    [cursor("1"), cursor("x", "y"), cursor("-1", "y"), cursor("9" * 30, "y"), cursor("²", "y")],
)
async def test_wrong_cursor_of_requests_is_refused(client_of: Client, after: str) -> None:
    response = await (await client_of("usage")).get("/v1/usage/requests", params={"after": after})
    message_of(
        response, status=400, kind="invalid_request_error", code="invalid_value", param="after"
    )


async def test_default_report_covers_the_last_thirty_days(client_of: Client) -> None:
    body = (await (await client_of("usage")).get("/v1/usage")).json()
    assert body["start"].endswith("T00:00:00Z")
    assert body["bucket"] == "day"


async def test_report_has_the_counts_of_the_response(stack: Stack, store: Redis) -> None:
    key = await asyncio.to_thread(stack.key, "reported")
    database = Database(stack.database_url)
    async with gateway_client(stack.url, key) as client:
        answer = (await complete(client, prompt=["one", "two words"], n=2, max_tokens=3)).json()
        await Drain(store, database).run()
        receipt = (await client.get(f"/v1/usage/requests/{answer['id']}")).json()
        [line] = (await client.get("/v1/usage", params={"bucket": "total"})).json()["data"]
    await database.aclose()
    usage = answer["usage"]
    for reported in (receipt, line):
        assert reported["prompt_tokens"] == usage["prompt_tokens"]
        assert reported["completion_tokens"] == usage["completion_tokens"]
    assert (receipt["outcome"], receipt["endpoint"], receipt["stream"]) == (
        *("finished", "completions"),
        False,
    )
    assert (line["requests"], line["failed_requests"]) == (1, 0)
