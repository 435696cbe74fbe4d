"""`/v1/keys`: how a tenant manages its keys."""

import base64
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from gateway.records.scopes import Scope
from tests.gateway.callers import caller, let_expire, send, status_with
from tests.gateway.conftest import eventually, gateway_client
from tests.gateway.http_calls import message_of
from tests.support.cases import all_cases
from tests.support.stack import Stack

TENANT, OTHER = "keyholder", "neighbour"


@pytest.fixture
async def manager(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client that may manage the keys of its tenant, and use the models."""
    async with caller(stack, TENANT, Scope.KEYS, Scope.COMPLETIONS) as client:
        yield client


async def _make(manager: httpx.AsyncClient, **options: Any) -> dict[str, Any]:
    response = await manager.post("/v1/keys", json={"name": "made", **options})
    assert response.status_code == 200, response.text
    created: dict[str, Any] = response.json()
    return created


async def test_new_key_works_and_is_shown_once(stack: Stack, manager: httpx.AsyncClient) -> None:
    created = await _make(
        manager,
        name="web",
        allowed_models=["b", "a"],
        allowed_addresses=["127.0.0.1", "::ffff:10.0.0.0/104"],
        expires_at="2199-12-31T23:30:00+01:00",
        dialect="vllm",
        limits={"requests_per_minute": 60, "budget_micros": None, "tokens_per_day": "plan"},
    )
    secret = created.pop("key")
    stack.note_key(secret)
    assert created == {
        "object": "key",
        "id": created["id"],
        "tenant_id": TENANT,
        "project_id": None,
        "prefix": secret[3:15],
        "name": "web",
        "scopes": ["completions"],
        "allowed_models": ["a", "b"],
        "allowed_addresses": ["127.0.0.1/32", "10.0.0.0/8"],
        "dialect": "vllm",
        "limits": {"requests_per_minute": 60, "budget_micros": None},
        "created_at": created["created_at"],
        "expires_at": "2199-12-31T22:30:00Z",
        "revoked_at": None,
        "old_prefix": None,
        "old_expires_at": None,
    }
    made_at = datetime.fromisoformat(created["created_at"])
    assert abs((datetime.now(UTC) - made_at).total_seconds()) < 30
    for url in stack.gateways[:2]:
        assert await status_with(url, secret) == 200
    for name in (created["id"], created["prefix"]):
        shown = await manager.get(f"/v1/keys/{name}")
        assert shown.json() == created
    listed = await manager.get("/v1/keys", params={"limit": 100})
    assert created in listed.json()["data"]
    assert secret[16:] not in listed.text


async def test_list_comes_in_pages(manager: httpx.AsyncClient) -> None:
    for _ in range(3):
        await _make(manager)
    everything = (await manager.get("/v1/keys", params={"limit": 100})).json()
    assert (everything["object"], everything["has_more"]) == ("list", False)
    ids = [key["id"] for key in everything["data"]]
    seen: list[str] = []
    has_more = True
    while has_more:
        after = {"after": seen[-1]} if seen else {}
        page = (await manager.get("/v1/keys", params={"limit": 2, **after})).json()
        seen += [key["id"] for key in page["data"]]
        has_more = page["has_more"]
    assert seen == ids
    for query, param in (
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("after=key_0", "after"),
        ("after=%00", "after"),
    ):
        message_of(
            await manager.get(f"/v1/keys?{query}"),
            status=400,
            kind="invalid_request_error",
            code="invalid_value",
            param=param,
        )


async def test_only_named_fields_of_a_key_change(manager: httpx.AsyncClient) -> None:
    created = await _make(manager, limits={"requests_per_minute": 5, "tokens_per_day": 6})
    del created["key"]
    path = f"/v1/keys/{created['id']}"
    changed = await manager.patch(
        path,
        json={
            "name": "new",
            "limits": {"requests_per_minute": "plan", "requests_per_day": 1},
            "allowed_addresses": ["2001:db8::/32"],
        },
    )
    assert changed.json() == created | {
        "name": "new",
        "limits": {"tokens_per_day": 6, "requests_per_day": 1},
        "allowed_addresses": ["2001:db8::/32"],
    }
    taken = await manager.patch(path, json={"allowed_addresses": None})
    assert taken.json()["allowed_addresses"] is None
    assert (await manager.get(path)).json() == taken.json()


@all_cases(
    ("body", "param"),
    [
        ({}, None),
        ({"name": None}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["root"]}, "scopes.0"),
        ({"allowed_models": []}, "allowed_models"),
        ({"allowed_models": ["\x00"]}, "allowed_models"),
        ({"allowed_addresses": ["10.0.0.1/8"]}, "allowed_addresses"),
        ({"allowed_addresses": ["nowhere"]}, "allowed_addresses"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ({"expires_at": "2199-01-01T00:00:00"}, "expires_at"),
        ({"expires_at": "9999-12-31T23:59:59-01:00"}, "expires_at"),
        ({"expires_at": "0001-01-01T00:00:00+10:00"}, "expires_at"),
        ({"limits": {"rpm": 1}}, "limits"),
        ({"limits": {"budget_micros": -1}}, "limits.budget_micros"),
        ({"limits": {"budget_micros": 1.5}}, "limits.budget_micros"),
        ({"limits": {"budget_micros": 10**30}}, "limits.budget_micros"),
        ({"limits": {"budget_micros": True}}, "limits.budget_micros"),
        ({"limits": []}, "limits"),
        ({"dialect": "klingon"}, "dialect"),
        ({"tenant_id": OTHER}, "tenant_id"),
        ({"digest": "x"}, "digest"),
        ({"project_id": "prj_1"}, "project_id"),
        ([], None),
        ("x", None),
        (None, None),
    ],
)
async def test_invalid_change_is_refused_by_name(
    manager: httpx.AsyncClient, body: Any, param: str | None
) -> None:
    created = await _make(manager)
    del created["key"]
    response = await send(manager, "PATCH", f"/v1/keys/{created['id']}", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert (await manager.get(f"/v1/keys/{created['id']}")).json() == created


async def test_odd_bodies_are_refused(manager: httpx.AsyncClient) -> None:
    async def post(content: bytes, media_type: str = "application/json") -> tuple[int, str]:
        response = await manager.post(
            "/v1/keys", content=content, headers={"content-type": media_type}
        )
        assert list(response.json()) == ["error"]
        return response.status_code, response.json()["error"]["code"]

    huge = b'{"name": ' + b"9" * 5000 + b"}"
    for content in (b"", b"{", b"\xff", b"[" * 50_000, huge, b"NaN", b'"\\ud800"'):
        status, _ = await post(content)
        assert status == 400, content[:20]
    assert await post(b" " * 300_000) == (413, "payload_too_large")
    assert await post(b'{"name": "x"}', "text/plain") == (415, "unsupported_media_type")

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    assert (await manager.post("/v1/keys", content=endless())).status_code == 413


async def test_rotated_key_has_two_secrets_and_revocation_ends_both(
    stack: Stack, manager: httpx.AsyncClient
) -> None:
    created = await _make(manager, scopes=[Scope.KEYS, Scope.COMPLETIONS])
    path = f"/v1/keys/{created['id']}"
    response = await manager.post(f"{path}:rotate", json={"grace_seconds": 3600})
    rotated = response.json()
    for secret in (created["key"], rotated["key"]):
        stack.note_key(secret)
    assert rotated["id"] == created["id"]
    assert rotated["old_prefix"] == created["prefix"]
    assert rotated["prefix"] == rotated["key"][3:15] != created["prefix"]
    for url in stack.gateways[:2]:
        for secret in (created["key"], rotated["key"]):
            assert await status_with(url, secret) == 200
    async with gateway_client(stack.url, created["key"]) as thief:
        made = await _make(thief, scopes=[Scope.KEYS])
    stack.note_key(made["key"])
    assert made["expires_at"] == rotated["old_expires_at"]
    revoked = await manager.delete(path)
    assert revoked.json()["revoked_at"] is not None
    assert "key" not in revoked.json()
    for secret in (created["key"], rotated["key"], made["key"]):
        await _wait_until_refused(stack, secret)
    refused = await manager.post(f"{path}:rotate")
    assert refused.status_code == 400
    assert (await manager.delete(path)).json() == revoked.json()


async def test_rotation_has_a_day_of_grace_by_default_and_zero_ends_at_once(
    stack: Stack, manager: httpx.AsyncClient
) -> None:
    created = await _make(manager)
    path = f"/v1/keys/{created['id']}:rotate"
    rotated = (await manager.post(path)).json()
    ends_in = datetime.fromisoformat(rotated["old_expires_at"]) - datetime.now(UTC)
    assert abs(ends_in.total_seconds() - 86_400) < 30
    assert await status_with(stack.gateways[1], rotated["key"]) == 200
    at_once = (await manager.post(path, json={"grace_seconds": 0})).json()
    assert at_once["old_expires_at"] is None
    for secret in (created["key"], rotated["key"]):
        await _wait_until_refused(stack, secret)
    assert await status_with(stack.gateways[1], at_once["key"]) == 200
    for grace in (-1, 2_592_001, "x", None, True, "1", 1.0):
        response = await manager.post(path, json={"grace_seconds": grace})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "grace_seconds")


async def _wait_until_refused(stack: Stack, secret: str) -> None:
    for url in stack.gateways[:2]:

        async def refused(url: str = url) -> bool:
            return await status_with(url, secret) == 401

        await eventually(refused, what="the refusal")


async def test_other_tenants_keys_do_not_exist(stack: Stack, manager: httpx.AsyncClient) -> None:
    created = await _make(manager)
    async with caller(stack, OTHER, Scope.KEYS, Scope.COMPLETIONS) as other:
        for name in (created["id"], created["prefix"]):
            path = f"/v1/keys/{name}"
            for response in (
                await other.get(path),
                await other.patch(path, json={"name": "mine"}),
                await other.post(f"{path}:rotate"),
                await other.delete(path),
            ):
                message_of(response, status=404, kind="invalid_request_error", code="not_found")
        listed = (await other.get("/v1/keys", params={"limit": 100})).json()["data"]
        assert {key["tenant_id"] for key in listed} == {OTHER}
        after = await other.get("/v1/keys", params={"after": created["id"]})
        assert after.status_code == 400
    assert (await manager.get(f"/v1/keys/{created['id']}")).json()["revoked_at"] is None


async def test_whole_key_in_the_path_is_not_repeated(
    stack: Stack, manager: httpx.AsyncClient
) -> None:
    created = await _make(manager)
    stack.note_key(created["key"])
    found = await manager.get(f"/v1/keys/{created['key']}")
    assert found.json()["id"] == created["id"]
    async with caller(stack, OTHER, Scope.KEYS) as other:
        for name in (created["key"], created["key"][:-1], created["key"] + "x"):
            response = await other.get(f"/v1/keys/{name}")
            assert response.status_code == 404
            assert created["key"][16:40] not in response.text


@all_cases(
    ("method", "path"),
    [
        ("GET", "/v1/keys"),
        ("POST", "/v1/keys"),
        ("GET", "/v1/keys/key_1"),
        ("PATCH", "/v1/keys/key_1"),
        ("DELETE", "/v1/keys/key_1"),
        ("POST", "/v1/keys/key_1:rotate"),
        ("GET", "/v1/projects"),
        ("POST", "/v1/projects"),
        ("PATCH", "/v1/projects/prj_1"),
        ("POST", "/v1/projects/prj_1:archive"),
        ("GET", "/v1/members"),
        ("POST", "/v1/members"),
        ("PATCH", "/v1/members/mbr_1"),
        ("DELETE", "/v1/members/mbr_1"),
        ("GET", "/admin/tenants"),
        ("POST", "/admin/tenants"),
        ("PATCH", "/admin/tenants/keyholder"),
        ("POST", "/admin/tenants/keyholder:suspend"),
        ("GET", "/admin/tenants/keyholder/keys"),
        ("POST", "/admin/tenants/keyholder/keys"),
        ("POST", "/admin/tenants/keyholder/keys/key_1:rotate"),
        ("POST", "/admin/tenants/keyholder/members"),
        ("POST", "/admin/tenants/keyholder/projects"),
    ],
)
async def test_credential_without_the_scope_is_refused(
    stack: Stack, method: str, path: str
) -> None:
    enough = {
        "/v1/keys": Scope.KEYS,
        "/v1/projects": Scope.KEYS,
        "/v1/members": Scope.MEMBERS,
        "/admin/tenants": Scope.ADMIN,
    }
    [needed] = [scope for prefix, scope in enough.items() if path.startswith(prefix)]
    missing = set(Scope) - {needed}
    if needed is Scope.ADMIN and method == "GET":
        missing -= {Scope.ADMIN_READ}
    body = {"name": "x"}
    url = stack.listener_of(path) + path
    async with caller(stack, TENANT, *sorted(missing)) as client:
        message_of(
            await client.request(method, url, json=None if method == "GET" else body),
            status=403,
            kind="permission_error",
            code="insufficient_scope",
        )
    async with gateway_client(stack.url, None) as anonymous:
        response = await anonymous.request(method, url, json=None if method == "GET" else body)
        assert response.status_code == 401


async def test_new_key_gets_no_more_rights_than_its_maker(
    stack: Stack, manager: httpx.AsyncClient
) -> None:
    for scopes in (["members"], ["completions", "usage"], ["admin"], ["admin:read"]):
        message = message_of(
            await manager.post("/v1/keys", json={"name": "x", "scopes": scopes}),
            status=403,
            kind="permission_error",
            code="insufficient_scope",
            param="scopes",
        )
        assert scopes[-1] in message
    both = await _make(manager, scopes=["keys", "completions", "keys"])
    assert both["scopes"] == ["completions", "keys"]
    widened = await manager.patch(f"/v1/keys/{both['id']}", json={"scopes": ["members"]})
    assert widened.status_code == 403
    async with caller(stack, TENANT, *Scope) as operator:
        response = await operator.post("/v1/keys", json={"name": "x", "scopes": ["admin"]})
        assert response.status_code == 403
        strong = await _make(operator, scopes=["members"])
    for response in (
        await manager.post(f"/v1/keys/{strong['id']}:rotate"),
        await manager.patch(f"/v1/keys/{strong['id']}", json={"name": "mine"}),
        await manager.delete(f"/v1/keys/{strong['id']}"),
    ):
        assert response.status_code == 403
        assert "key" not in response.json()
    assert (await manager.get(f"/v1/keys/{strong['id']}")).json()["revoked_at"] is None


async def test_key_for_some_addresses_is_refused_elsewhere(
    stack: Stack, manager: httpx.AsyncClient
) -> None:
    elsewhere = await _make(manager, allowed_addresses=["192.0.2.0/24", "2001:db8::/32"])
    async with gateway_client(stack.url, elsewhere["key"]) as client:
        message_of(
            await client.get("/v1/models"),
            status=403,
            kind="permission_error",
            code="ip_not_allowed",
        )
        claimed = await client.get("/v1/models", headers={"x-forwarded-for": "192.0.2.1"})
        assert claimed.status_code == 403
    await manager.patch(
        f"/v1/keys/{elsewhere['id']}", json={"allowed_addresses": ["::ffff:127.0.0.0/104"]}
    )

    async def works() -> bool:
        return await status_with(stack.url, elsewhere["key"]) == 200

    await eventually(works, what="the change taking effect")


async def test_expired_key_is_refused(stack: Stack, manager: httpx.AsyncClient) -> None:
    expires_at = datetime.now(UTC) + timedelta(hours=1)
    created = await _make(manager, expires_at=expires_at.isoformat())
    assert await status_with(stack.url, created["key"]) == 200
    await let_expire(stack, created["key"])

    async def is_refused() -> bool:
        return await status_with(stack.url, created["key"]) == 401

    await eventually(is_refused, what="the end of the key")
    async with gateway_client(stack.url, created["key"]) as client:
        message_of(
            await client.get("/v1/models"),
            status=401,
            kind="authentication_error",
            code="expired_token",
        )


async def test_no_route_shows_a_secret_or_its_hash(
    stack: Stack, manager: httpx.AsyncClient
) -> None:
    created = await _make(manager)
    path = f"/v1/keys/{created['id']}"
    rotated = (await manager.post(f"{path}:rotate")).json()
    async with caller(stack, TENANT, *Scope) as everything:
        texts = [
            (await everything.get(stack.listener_of(each) + each)).text
            for each in (
                *("/v1/keys?limit=100", "/v1/audit?limit=100", "/admin/audit?limit=100"),
                *(f"/admin/tenants/{TENANT}/keys?limit=100", path),
                f"/admin/tenants/{TENANT}/keys/{created['id']}",
            )
        ]
    texts.append((await manager.patch(path, json={"name": "new"})).text)
    texts.append((await manager.delete(path)).text)
    assert all(created["id"] in text for text in texts)
    for key in (created["key"], rotated["key"]):
        stack.note_key(key)
        hashed = hashlib.sha256(key.encode()).digest()
        for text in texts:
            assert key[16:] not in text
            assert hashed.hex() not in text
            assert base64.b64encode(hashed).decode() not in text
            assert "digest" not in text
