"""`/admin/tenants`: how operators manage tenants and their resources."""

import secrets
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.records.scopes import Scope
from tests.gateway.callers import operator_caller, send, status_with
from tests.gateway.conftest import eventually
from tests.gateway.http_calls import message_of
from tests.support.cases import all_cases
from tests.support.stack import Stack


@pytest.fixture
async def operator(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client with every scope."""
    async with operator_caller(stack, "operators", Scope.ADMIN) as client:
        yield client


@pytest.fixture
async def tenant(operator: httpx.AsyncClient) -> dict[str, Any]:
    """A new tenant."""
    body = {"name": "Acme", "id": f"t-{secrets.token_hex(6)}"}
    made: dict[str, Any] = (await operator.post("/admin/tenants", json=body)).json()
    return made


async def test_tenant_is_created_and_changed_with_all_options(operator: httpx.AsyncClient) -> None:
    body = {
        "name": "Acme",
        "weight": 2.5,
        "dialect": "vllm",
        "strict_parameters": True,
        "default_model": "m1",
        "limits": {"requests_per_minute": 60, "budget_micros": None},
        "billing": "prepaid",
        "service_tier": "priority",
        "shows_cost": True,
        "zero_retention": True,
        "cors_origins": ["https://app.example.com"],
        "stripe_customer_id": "cus_1",
        "time_zone": "Asia/Kathmandu",
        "anomaly_factor": 5,
        "anomaly_repeats": 100,
        "anomaly_action": "report",
    }
    made = (await operator.post("/admin/tenants", json=body)).json()
    assert made == body | {
        "object": "tenant",
        "id": made["id"],
        "status": "active",
        "plan_id": None,
        "created_at": made["created_at"],
    }
    path = f"/admin/tenants/{made['id']}"
    change = {
        "name": "New",
        "weight": 1,
        "dialect": None,
        "strict_parameters": False,
        "limits": {"requests_per_minute": "plan"},
        "billing": "postpaid",
    }
    changed = (await operator.patch(path, json=change)).json()
    assert changed == made | change | {"limits": {"budget_micros": None}}
    assert (await operator.get(path)).json() == changed
    listed = await _all(operator, "/admin/tenants")
    assert changed in listed


async def _all(client: httpx.AsyncClient, path: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    has_more = True
    while has_more:
        after = {"after": entries[-1]["id"]} if entries else {}
        page = (await client.get(path, params={"limit": 2, **after})).json()
        entries += page["data"]
        has_more = page["has_more"]
    return entries


@all_cases(
    ("body", "param"),
    [
        ({"id": "x"}, "name"),
        ({"name": "x", "id": "Not An Id"}, "id"),
        ({"name": "x", "weight": 0}, "weight"),
        ({"name": "x", "weight": "heavy"}, "weight"),
        ({"name": "x", "plan_id": "none"}, "plan_id"),
        ({"name": "x", "plan_id": "\x00"}, "plan_id"),
        ({"name": "x", "default_model": "\x00"}, "default_model"),
        ({"name": "x", "billing": "never"}, "billing"),
        ({"name": "x", "stripe_customer_id": "cus-1"}, "stripe_customer_id"),
        ({"name": "x", "service_tier": "first"}, "service_tier"),
        ({"name": "x", "limits": {"requests_per_minute": "some"}}, "limits.requests_per_minute"),
        ({"name": "x", "status": "suspended"}, "status"),
    ],
)
async def test_invalid_tenant_is_refused_by_name(
    operator: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    response = await send(operator, "POST", "/admin/tenants", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_existing_id_is_a_conflict(
    operator: httpx.AsyncClient, tenant: dict[str, Any]
) -> None:
    response = await operator.post("/admin/tenants", json={"name": "x", "id": tenant["id"]})
    message_of(response, status=409, kind="conflict", code="already_exists")


async def test_suspended_tenant_is_refused_by_every_gateway_until_it_is_activated(
    stack: Stack, operator: httpx.AsyncClient, tenant: dict[str, Any]
) -> None:
    path = f"/admin/tenants/{tenant['id']}"
    body = {"name": "x", "scopes": ["completions", "admin"]}
    key = (await operator.post(f"{path}/keys", json=body)).json()
    stack.note_key(key["key"])
    assert key["scopes"] == ["admin", "completions"]

    async def all_answer(status: int) -> bool:
        return {await status_with(url, key["key"]) for url in stack.gateways[:2]} == {status}

    assert await all_answer(200)
    suspended = (await operator.post(f"{path}:suspend")).json()
    assert suspended == tenant | {"status": "suspended"}
    await eventually(lambda: all_answer(403), what="the suspension taking effect")
    assert (await operator.post(f"{path}:activate")).json() == tenant
    await eventually(lambda: all_answer(200), what="the activation taking effect")


async def test_operator_manages_what_belongs_to_a_tenant(
    stack: Stack, operator: httpx.AsyncClient, tenant: dict[str, Any]
) -> None:
    path = f"/admin/tenants/{tenant['id']}"
    project = (await operator.post(f"{path}/projects", json={"name": "p"})).json()
    body = {"name": "k", "project_id": project["id"], "scopes": ["keys", "members"]}
    key = (await operator.post(f"{path}/keys", json=body)).json()
    rotated = (await operator.post(f"{path}/keys/{key['id']}:rotate")).json()
    for secret in (key["key"], rotated["key"]):
        stack.note_key(secret)
        assert await status_with(stack.url, secret) == 403
    changed = (
        await operator.patch(f"{path}/keys/{key['id']}", json={"scopes": ["completions"]})
    ).json()
    assert changed["scopes"] == ["completions"]
    assert await _all(operator, f"{path}/keys") == [changed]
    assert (await operator.get(f"{path}/keys/{key['id']}")).json() == changed
    member = (
        await operator.post(f"{path}/members", json={"subject": "ada", "role": "owner"})
    ).json()
    assert await _all(operator, f"{path}/members") == [member]
    assert (await operator.delete(f"{path}/members/ada")).status_code == 400
    other = await operator.post(f"{path}/members", json={"subject": "bob", "role": "owner"})
    viewer = await operator.patch(f"{path}/members/ada", json={"role": "viewer"})
    assert viewer.json() == member | {"role": "viewer"}
    assert (await operator.get(f"{path}/members/bob")).json() == other.json()
    assert (await operator.delete(f"{path}/members/ada")).status_code == 200
    renamed = (await operator.patch(f"{path}/projects/{project['id']}", json={"name": "q"})).json()
    assert renamed == project | {"name": "q"}
    archived = await operator.post(f"{path}/projects/{project['id']}:archive")
    assert archived.json() == renamed | {"status": "archived"}
    activated = await operator.post(f"{path}/projects/{project['id']}:activate")
    assert activated.json() == renamed
    assert await _all(operator, f"{path}/projects") == [renamed]
    assert (await operator.get(f"{path}/projects/{project['id']}")).json() == renamed
    revoked = await operator.delete(f"{path}/keys/{key['id']}")
    assert revoked.json()["revoked_at"] is not None


async def test_resources_are_found_only_under_their_own_tenant(
    operator: httpx.AsyncClient, tenant: dict[str, Any]
) -> None:
    project = (
        await operator.post(f"/admin/tenants/{tenant['id']}/projects", json={"name": "p"})
    ).json()
    for path in (
        f"/admin/tenants/operators/projects/{project['id']}",
        "/admin/tenants/nobody",
        "/admin/tenants/nobody/keys",
        "/admin/tenants/nobody/members",
        "/admin/tenants/nobody/projects",
        "/admin/tenants/%00",
        "/admin/tenants/%00/keys",
        "/admin/tenants/%ff/keys/%00",
        f"/admin/tenants/{tenant['id']}/members/%00",
        f"/admin/tenants/{tenant['id']}/members/%F0%9F%98%80",
        f"/admin/tenants/{tenant['id']}/projects/%0A",
    ):
        response = await operator.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found"), path


async def test_read_scope_reads_everything_and_changes_nothing(
    stack: Stack, tenant: dict[str, Any]
) -> None:
    async with operator_caller(stack, "operators", Scope.ADMIN_READ) as reader:
        path = f"/admin/tenants/{tenant['id']}"
        for each in ("", "/keys", "/projects", "/members"):
            assert (await reader.get(path + each)).status_code == 200
        for response in (
            await reader.post("/admin/tenants", json={"name": "x"}),
            await reader.patch(path, json={"name": "x"}),
            await reader.post(f"{path}:suspend"),
            await reader.post(f"{path}/keys", json={"name": "x"}),
            await reader.post(f"{path}/projects", json={"name": "x"}),
            await reader.post(f"{path}/members", json={"subject": "x", "role": "viewer"}),
        ):
            message_of(response, status=403, kind="permission_error", code="insufficient_scope")


async def test_customer_cannot_change_operator_settings(
    stack: Stack, tenant: dict[str, Any]
) -> None:
    every = (Scope.COMPLETIONS, Scope.USAGE, Scope.KEYS, Scope.MEMBERS)
    async with operator_caller(stack, tenant["id"], *every) as customer:
        path = f"/admin/tenants/{tenant['id']}"
        change = {"weight": 1000, "limits": {"budget_micros": None}}
        assert (await customer.patch(path, json=change)).status_code == 403
        assert (await customer.get(path)).status_code == 403
        assert (await customer.post(f"{path}:activate")).status_code == 403
