"""`/v1/audit` and `/admin/audit`: changes, for those who may read them."""

import asyncio
from typing import Any

from gateway.accounts.tenants.service import TenantService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from gateway.records.scopes import Scope
from tests.gateway.conftest import gateway_client
from tests.gateway.http_calls import message_of
from tests.support.cases import all_cases
from tests.support.stack import Stack

TENANT, OTHER = "audited", "unaudited"


async def key_with(stack: Stack, tenant: str, *scopes: Scope) -> str:
    """Return a new key of the tenant, whose creation is audited."""
    return await asyncio.to_thread(stack.key, tenant, scopes=frozenset(scopes))


async def entries(stack: Stack, key: str, path: str = "/v1/audit", **query: Any) -> Any:
    """Return some entries."""
    async with gateway_client(stack.listener_of(path), key) as client:
        response = await client.get(path, params={"limit": 100} | query)
    assert response.status_code == 200, response.text
    return response.json()


async def test_owner_sees_changes_of_the_own_tenant_only(stack: Stack) -> None:
    key = await key_with(stack, TENANT, Scope.MEMBERS, Scope.KEYS)
    await key_with(stack, OTHER, Scope.COMPLETIONS)
    async with gateway_client(stack.url, key) as client:
        made = (
            await client.post("/v1/keys", json={"name": "made by a key", "scopes": ["keys"]})
        ).json()
    body = await entries(stack, key)
    newest, *before = body["data"]
    assert {entry["tenant"] for entry in body["data"]} == {TENANT}
    assert (newest["action"], newest["subject"]) == ("key.create", made["id"])
    assert newest["actor"].startswith("key:key_")
    assert [entry["action"] for entry in before] == ["key.create", "tenant.create"]
    # The numbers must not reveal how much other tenants change.
    assert [entry["sequence"] for entry in body["data"]] == [3, 2, 1]
    assert made["key"][16:] not in str(body)
    assert [
        entry["action"] for entry in (await entries(stack, key, action="tenant.create"))["data"]
    ] == ["tenant.create"]


async def test_pages_are_contiguous(stack: Stack) -> None:
    key = await key_with(stack, TENANT, Scope.MEMBERS)
    whole = await entries(stack, key)
    first = await entries(stack, key, limit=1)
    assert (first["has_more"], first["next"]) == (True, whole["data"][0]["sequence"])
    rest = await entries(stack, key, after=first["next"])
    assert first["data"] + rest["data"] == whole["data"]
    assert (rest["has_more"], rest["next"]) == (False, None)


async def test_customers_do_not_see_operators_and_internals(stack: Stack) -> None:
    customer = await key_with(stack, TENANT, Scope.MEMBERS, Scope.USAGE)
    await asyncio.to_thread(rename, stack)
    shown = (await entries(stack, customer, action="tenant.update"))["data"]
    assert [entry["actor"] for entry in shown] == ["operator"]
    operator = await key_with(stack, OTHER, Scope.ADMIN_READ)
    asked = {"action": "tenant.update", "tenant": TENANT}
    shown = (await entries(stack, operator, "/admin/audit", **asked))["data"]
    assert [entry["actor"] for entry in shown] == ["cli:ann"]
    manager = await key_with(stack, OTHER, Scope.ADMIN)
    path = f"/admin/tenants/{TENANT}"
    async with gateway_client(stack.operators, manager) as client:
        change = {"name": "Audited plc", "weight": 2, "stripe_customer_id": "cus_1"}
        assert (await client.patch(path, json=change)).status_code == 200
    [newest, *_] = (await entries(stack, customer, action="tenant.update"))["data"]
    assert (newest["actor"], newest["details"]) == ("operator", {"name": "Audited plc"})
    [newest, *_] = (await entries(stack, operator, "/admin/audit", **asked))["data"]
    assert newest["actor"].startswith("operator:key:key_")
    assert newest["details"] == change


def rename(stack: Stack) -> None:
    """Change the tenant as a user of the command line does."""

    async def change() -> None:
        database = Database(stack.database_url)
        redis = connect(stack.redis.url, max_connections=1)
        service = TenantService(database, ChangeAnnouncer(redis))
        await service.update(TENANT, name="Audited Ltd.", actor="cli:ann")
        await redis.aclose()
        await database.aclose()

    asyncio.run(change())


async def test_operator_finds_changes_by_tenant_actor_and_action(stack: Stack) -> None:
    await key_with(stack, TENANT, Scope.MEMBERS)
    operator = await key_with(stack, OTHER, Scope.ADMIN_READ)
    found = (await entries(stack, operator, "/admin/audit"))["data"]
    assert {TENANT, OTHER} <= {entry["tenant"] for entry in found}
    query = {"tenant": OTHER, "action": "key.create", "actor": "system"}
    chosen = (await entries(stack, operator, "/admin/audit", **query))["data"]
    assert chosen
    assert {(entry["tenant"], entry["action"], entry["actor"]) for entry in chosen} == {
        (OTHER, "key.create", "system")
    }
    assert (await entries(stack, operator, "/admin/audit", actor="cli:nobody"))["data"] == []


@all_cases(
    ("path", "scope"),
    [("/v1/audit", Scope.KEYS), ("/v1/audit", Scope.USAGE), ("/admin/audit", Scope.MEMBERS)],
)
async def test_others_are_refused(stack: Stack, path: str, scope: Scope) -> None:
    key = await key_with(stack, TENANT, scope)
    async with gateway_client(stack.listener_of(path), key) as client:
        refused = await client.get(path)
    message_of(refused, status=403, kind="permission_error", code="insufficient_scope")


@all_cases(
    ("query", "param"),
    [
        ({"after": "0"}, "after"),
        ({"after": str(2**64)}, "after"),
        ({"after": "x"}, "after"),
        ({"limit": "101"}, "limit"),
        ({"action": "a\x00"}, "action"),
    ],
)
async def test_invalid_query_is_refused_by_name(
    stack: Stack, query: dict[str, str], param: str
) -> None:
    async with gateway_client(stack.url, await key_with(stack, TENANT, Scope.MEMBERS)) as client:
        refused = await client.get("/v1/audit", params=query)
    message_of(refused, status=400, kind="invalid_request_error", code="invalid_value", param=param)
