"""`/v1/projects` and `/v1/members`: how a tenant manages projects and members."""

from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.records.scopes import Scope
from tests.gateway.callers import caller, status_with
from tests.gateway.conftest import eventually, gateway_client
from tests.gateway.http.test_http_access import token
from tests.gateway.http_calls import message_of
from tests.support.cases import all_cases
from tests.support.stack import Stack

TENANT, OTHER = "studio", "rival"


@pytest.fixture
async def manager(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client that may manage everything of its tenant."""
    scopes = (Scope.COMPLETIONS, Scope.USAGE, Scope.KEYS, Scope.MEMBERS)
    async with caller(stack, TENANT, *scopes) as client:
        yield client


async def test_project_is_created_changed_and_archived_with_its_keys(
    stack: Stack, manager: httpx.AsyncClient
) -> None:
    made = (await manager.post("/v1/projects", json={"name": "shop"})).json()
    assert made == {
        "object": "project",
        "id": made["id"],
        "tenant_id": TENANT,
        "name": "shop",
        "status": "active",
        "limits": {},
        "created_at": made["created_at"],
    }
    path = f"/v1/projects/{made['id']}"
    changed = (
        await manager.patch(path, json={"name": "store", "limits": {"tokens_per_day": 5}})
    ).json()
    assert changed == made | {"name": "store", "limits": {"tokens_per_day": 5}}
    assert changed in (await manager.get("/v1/projects", params={"limit": 100})).json()["data"]
    body = {"name": "x", "project_id": made["id"]}
    key = (await manager.post("/v1/keys", json=body)).json()
    stack.note_key(key["key"])
    assert key["project_id"] == made["id"]
    for url in stack.gateways[:2]:
        assert await status_with(url, key["key"]) == 200
    archived = (await manager.post(f"{path}:archive")).json()
    assert archived == changed | {"status": "archived"} == (await manager.get(path)).json()
    for url in stack.gateways[:2]:

        async def refused(url: str = url) -> bool:
            return await status_with(url, key["key"]) == 403

        await eventually(refused, what="the archiving taking effect")
    async with gateway_client(stack.url, key["key"]) as client:
        message = message_of(
            await client.get("/v1/models"),
            status=403,
            kind="permission_error",
            code="account_suspended",
        )
        assert "is archived" in message
    assert (await manager.post("/v1/keys", json=body)).json()["error"]["param"] == "project_id"
    assert (await manager.post(f"{path}:activate")).json() == changed

    async def works() -> bool:
        return await status_with(stack.url, key["key"]) == 200

    await eventually(works, what="the activation taking effect")


async def test_other_tenants_projects_and_members_do_not_exist(
    stack: Stack, manager: httpx.AsyncClient
) -> None:
    project = (await manager.post("/v1/projects", json={"name": "shop"})).json()
    member = (await manager.post("/v1/members", json={"subject": "zoe", "role": "viewer"})).json()
    async with caller(stack, OTHER, Scope.KEYS, Scope.MEMBERS, Scope.USAGE) as other:
        for response in (
            await other.get(f"/v1/projects/{project['id']}"),
            await other.patch(f"/v1/projects/{project['id']}", json={"name": "mine"}),
            await other.post(f"/v1/projects/{project['id']}:archive"),
            await other.post(
                "/v1/keys", json={"name": "x", "scopes": ["keys"]} | {"project_id": project["id"]}
            ),
            await other.get(f"/v1/members/{member['id']}"),
            await other.get("/v1/members/zoe"),
            await other.patch("/v1/members/zoe", json={"role": "viewer"}),
            await other.delete(f"/v1/members/{member['id']}"),
        ):
            assert response.status_code == 404, response.text
        assert (await other.get("/v1/projects")).json()["data"] == []
        assert (await other.get("/v1/members")).json()["data"] == []
    assert (await manager.get(f"/v1/projects/{project['id']}")).json() == project
    assert (await manager.delete(f"/v1/members/{member['id']}")).json() == {
        "object": "member.deleted",
        "id": member["id"],
        "deleted": True,
    }


async def test_member_acts_within_the_role_on_every_gateway(
    stack: Stack, manager: httpx.AsyncClient
) -> None:
    body = {"subject": "auth0|ada", "role": "owner", "name": "Ada"}
    owner = (await manager.post("/v1/members", json=body)).json()
    assert owner == {
        "object": "member",
        "id": owner["id"],
        "tenant_id": TENANT,
        "created_at": owner["created_at"],
        "issuer": None,
        "email": None,
        **body,
    }
    again = await manager.post("/v1/members", json=body)
    message_of(again, status=409, kind="conflict", code="already_exists")
    signed = token(tenant=TENANT, sub="auth0|ada")
    modest = token(tenant=TENANT, sub="auth0|ada", scope="completions")
    for url in stack.gateways[:2]:

        async def may_manage(url: str = url) -> bool:
            async with gateway_client(url, signed) as client:
                return (await client.get("/v1/members")).status_code == 200

        await eventually(may_manage, what="the membership taking effect")
        async with gateway_client(url, modest) as client:
            assert (await client.get("/v1/members")).status_code == 403
            assert (await client.get("/v1/models")).status_code == 200
    async with gateway_client(stack.url, signed) as client:
        # The last owner cannot be demoted or removed.
        for response in (
            await client.delete(f"/v1/members/{owner['id']}"),
            await client.patch("/v1/members/auth0%7Cada", json={"role": "viewer"}),
        ):
            assert response.status_code == 400
            assert "last owner" in response.json()["error"]["message"]
        made = await client.post("/v1/members", json={"subject": "bob", "role": "admin"})
        assert made.status_code == 200
        key = await client.post("/v1/keys", json={"name": "x", "scopes": ["members"]})
        stack.note_key(key.json()["key"])
    bob = token(tenant=TENANT, sub="bob")
    async with gateway_client(stack.gateways[1], bob) as client:

        async def has_keys() -> bool:
            return (await client.get("/v1/keys")).status_code == 200

        await eventually(has_keys, what="the membership taking effect")
        assert (await client.get("/v1/members")).status_code == 403
        refused = await client.post("/v1/keys", json={"name": "x", "scopes": ["members"]})
        assert refused.status_code == 403
        await manager.patch("/v1/members/bob", json={"role": "viewer"})

        async def has_no_keys() -> bool:
            return (await client.get("/v1/keys")).status_code == 403

        await eventually(has_no_keys, what="the new role taking effect")


async def test_credential_grants_no_role_with_more_rights_than_its_own(stack: Stack) -> None:
    async with caller(stack, TENANT, Scope.MEMBERS, Scope.USAGE) as few:
        for role in ("owner", "admin", "developer"):
            message_of(
                await few.post("/v1/members", json={"subject": f"new {role}", "role": role}),
                status=403,
                kind="permission_error",
                code="insufficient_scope",
            )
        made = await few.post("/v1/members", json={"subject": "new viewer", "role": "viewer"})
        assert made.status_code == 200
        path = f"/v1/members/{made.json()['id']}"
        assert (await few.patch(path, json={"role": "owner"})).status_code == 403
        assert (await few.patch(path, json={"role": "billing"})).json()["role"] == "billing"


@all_cases(
    ("body", "param"),
    [
        ({"role": "viewer"}, "subject"),
        ({"subject": "", "role": "viewer"}, "subject"),
        ({"subject": "a\x00", "role": "viewer"}, "subject"),
        ({"subject": "x" * 201, "role": "viewer"}, "subject"),
        ({"subject": "x"}, "role"),
        ({"subject": "x", "role": "king"}, "role"),
        ({"subject": "x", "role": "viewer", "scopes": []}, "scopes"),
    ],
)
async def test_invalid_member_is_refused_by_name(
    manager: httpx.AsyncClient, body: dict[str, object], param: str
) -> None:
    response = await manager.post("/v1/members", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
