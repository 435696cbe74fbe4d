"""The management API of plans, prices, credits and webhooks, and the limits that callers see."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from sqlalchemy import update

from gateway.accounts.audit.log import AuditLog
from gateway.accounts.tenants.service import TenantService
from gateway.billing.exports.store import ExportStore
from gateway.limits.replies import Admitted, ReservationRequest
from gateway.limits.reservations import Reservations
from gateway.limits.store import QuotaStore
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import ExportBatchRow, ExportBatchState
from gateway.platform.settings import Settings
from gateway.records.limits import LimitName, Limits, LimitScope, SubjectLimits
from gateway.records.records import Billing
from gateway.records.scopes import Scope
from gateway.records.times import utc_now
from tests.gateway.conftest import eventually, serve
from tests.gateway.http_calls import message_of
from tests.gateway.management_api import Management, running_management
from tests.support.billing import rejected_batch
from tests.support.ledger import use
from tests.support.redis_server import RedisServer
from tests.support.secret_box import ENCRYPTION_KEY

HOOK = "https://example.com/hooks"
RPM = LimitName.REQUESTS_PER_MINUTE
SHARE = "model_share_percent"

# On SQLite only: other tests run the services on both kinds of databases.
pytestmark = pytest.mark.parametrize(
    "database_url",
    ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)],
    indirect=True,
)


@pytest.fixture
async def management(
    database: Database, database_url: str, redis: Redis, redis_server: RedisServer
) -> AsyncIterator[Management]:
    settings = Settings(
        database_url=SecretStr(database_url),
        redis_url=redis_server.url,
        encryption_keys=(SecretStr(ENCRYPTION_KEY),),
    )
    async with running_management(settings) as management:
        for tenant_id in ("ops", "acme", "other"):
            await _tenants(management).create(tenant_id, tenant_id=tenant_id)
        yield management


@pytest.fixture
async def admin(management: Management) -> str:
    """A key of the operator."""
    return await management.key("ops", Scope.ADMIN)


@pytest.fixture
async def owner(management: Management) -> str:
    """A key of the tenant `acme` that manages it."""
    return await management.key("acme", Scope.KEYS, Scope.USAGE)


def _tenants(management: Management) -> TenantService:
    return TenantService(management.services[Database], management.services[ChangeAnnouncer])


async def _ok(
    management: Management, key: str, method: str, path: str, body: Any = None, **options: Any
) -> Any:
    response = await management.call(key, method, path, body, **options)
    assert response.status_code == 200, response.text
    return response.json()


async def _refused(
    management: Management, key: str, method: str, path: str, body: Any = None, **options: Any
) -> str:
    """Return the message of a 400 that names a parameter."""
    response = await management.call(key, method, path, body, **options)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["param"])


async def test_plan_is_created_shown_and_changed(management: Management, admin: str) -> None:
    body = {"id": "pro", "key_limits": {"requests_per_minute": 60}}
    made = await _ok(management, admin, "POST", "/admin/plans", body)
    assert made == {
        "object": "plan",
        "id": "pro",
        "name": "pro",
        "tenant_limits": {},
        "project_limits": {},
        "key_limits": {"requests_per_minute": 60},
        "spend_limits": {},
        "created_at": made["created_at"],
    }
    change = {"key_limits": {"requests_per_minute": None}, "tenant_limits": {"budget_micros": 5}}
    changed = await _ok(management, admin, "PATCH", "/admin/plans/pro", change)
    assert (changed["key_limits"], changed["tenant_limits"]) == ({}, {"budget_micros": 5})
    assert await _ok(management, admin, "GET", "/admin/plans/pro") == changed
    listed = await _ok(management, admin, "GET", "/admin/plans")
    assert listed == {"object": "list", "data": [changed], "has_more": False}
    async with management.services[Database].reading() as transaction:
        newest = (await AuditLog(transaction).entries())[0]
    assert newest.actor.startswith("operator:key:key_")


async def test_price_is_added_and_listed(management: Management, admin: str) -> None:
    body = {"model": "a/b", "prompt_micros": 150_000, "completion_micros": 600_000}
    added = await _ok(management, admin, "POST", "/admin/prices", body)
    assert (added["service_tier"], added["cached_micros"]) == ("default", 150_000)
    later = (utc_now() + timedelta(days=1)).isoformat()
    future = await _ok(management, admin, "POST", "/admin/prices", body | {"effective_at": later})
    current = await _ok(management, admin, "GET", "/admin/prices", params={"model": "a/b"})
    assert current["data"] == [added]
    history = await _ok(management, admin, "GET", "/admin/prices", params={"history": "true"})
    assert history["data"] == [added, future]


async def test_credits_are_granted_adjusted_and_shown(management: Management, admin: str) -> None:
    path = "/admin/tenants/acme/credits"
    expires_at = (utc_now() + timedelta(days=30)).isoformat()
    grant = {"amount_micros": 1000, "note": "trial", "expires_at": expires_at}
    granted = await _ok(management, admin, "POST", path, grant)
    assert (granted["kind"], granted["amount_micros"], granted["note"]) == ("grant", 1000, "trial")
    adjust = {"kind": "adjustment", "amount_micros": -100, "note": "mistake"}
    adjusted = await _ok(management, admin, "POST", path, adjust)
    await use(management.services[Database], "acme", 250)
    shown = await _ok(management, admin, "GET", path)
    assert shown["data"] == [granted, adjusted]
    assert shown["balance"] == {
        "granted_micros": 900,
        "spent_micros": 250,
        "balance_micros": 650,
    }
    first = await _ok(management, admin, "GET", path, params={"limit": 1})
    rest = await _ok(management, admin, "GET", path, params={"after": granted["id"]})
    assert (first["data"], first["has_more"]) == ([granted], True)
    assert (rest["data"], rest["has_more"]) == ([adjusted], False)


async def test_webhook_is_registered_tested_and_removed(
    management: Management, owner: str, admin: str
) -> None:
    made = await _ok(management, owner, "POST", "/v1/webhooks", {"url": HOOK})
    secret = made.pop("secret")
    assert secret.startswith("whsec_")
    assert made["thresholds"] == [50, 80, 100]
    for key, path in ((owner, "/v1/webhooks"), (admin, "/admin/tenants/acme/webhooks")):
        listed = await management.call(key, "GET", path)
        assert listed.json()["data"] == [made]
        assert secret not in listed.text
    tried = await _ok(management, owner, "POST", f"/v1/webhooks/{made['id']}:test")
    assert tried["type"] == "webhook.test"
    other = await management.key("other", Scope.KEYS)
    for method, path in (("DELETE", ""), ("POST", ":test")):
        stranger = await management.call(other, method, f"/v1/webhooks/{made['id']}{path}")
        assert stranger.status_code == 404
    removed = await _ok(management, owner, "DELETE", f"/v1/webhooks/{made['id']}")
    assert removed == {"object": "webhook.deleted", "id": made["id"], "deleted": True}
    assert (await _ok(management, owner, "GET", "/v1/webhooks"))["data"] == []


async def test_operator_manages_webhooks_of_any_tenant(management: Management, admin: str) -> None:
    path = "/admin/tenants/other/webhooks"
    made = await _ok(management, admin, "POST", path, {"url": HOOK})
    await _ok(management, admin, "POST", f"{path}/{made['id']}:test")
    again = await management.call(admin, "POST", f"{path}/{made['id']}:test")
    assert again.status_code in (200, 409)  # Another minute may have begun.
    await _ok(management, admin, "DELETE", f"{path}/{made['id']}")


async def test_stored_responses_of_a_tenant_are_limited_and_shown(
    management: Management, redis: "Redis"
) -> None:
    # Two of the background requests below fit.
    most = 40_000
    await _tenants(management).update("acme", limits={LimitName.STORED_BYTES: most})
    worker = await serve(redis, "stored")
    key = await management.key("acme", Scope.COMPLETIONS, Scope.USAGE)

    async def post(**body: Any) -> httpx.Response:
        return await management.call(
            key, "POST", "/v1/completions", {"model": "stored", "max_tokens": 4} | body
        )

    async def used() -> int:
        of_key, of_tenant = (await _ok(management, key, "GET", "/v1/limits"))["scopes"]
        assert of_key["limits"]["stored_bytes"]["limit"] is None
        shown = of_tenant["limits"]["stored_bytes"]
        assert shown == {
            "limit": most,
            "used": shown["used"],
            "remaining": most - shown["used"],
            "resets_at": None,
        }
        return int(shown["used"])

    waiting = asyncio.create_task(post(prompt=[[5] * 2000] * 2))
    claims = await worker.claim(2)
    assert 2 * (1024 + 5 * 2000) < await used() < 2 * (1024 + 6.5 * 2000)
    for claim in claims:
        await worker.say(claim, "a")
        await worker.finish(claim)
    assert (await waiting).status_code == 200

    async def is_given_back() -> bool:
        return await used() == 0

    await eventually(is_given_back, what="the bytes of a request that has ended")
    assert (await post(prompt=[5] * 1000, background=True)).status_code == 200
    # Its job and its head have the prompt.
    one = await used()
    assert 2 * 5 * 1000 < one < 2 * (2048 + 6.5 * 1000)
    assert (await post(prompt=[5] * 1000, background=True)).status_code == 200
    assert await used() == 2 * one
    refused = await post(prompt=[5] * 1000, background=True)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert f"{most} stored bytes of the tenant 'acme'" in error["message"]
    assert (error["code"], error["used"]) == ("stored_bytes", 2 * one)
    # Refused requests leave nothing, and small foreground responses do not count.
    assert management.services[Reservations].open_requests == 2


async def test_limits_show_values_and_use(management: Management, admin: str) -> None:
    limits = {"requests_per_day": 100, "model_share_percent": 25}
    plan = {"id": "p", "tenant_limits": limits, "key_limits": {RPM: 60}}
    await _ok(management, admin, "POST", "/admin/plans", plan)
    await _tenants(management).update(
        "acme", plan_id="p", limits={LimitName.BUDGET: 1000}, billing=Billing.PREPAID
    )
    grant = {"amount_micros": 5000}
    await _ok(management, admin, "POST", "/admin/tenants/acme/credits", grant)
    key = await management.key("acme", Scope.USAGE, limits={LimitName.TOKENS_PER_DAY: 7})
    await use(management.services[Database], "acme", 1200)
    shown = await _ok(management, key, "GET", "/v1/limits")
    by_key, by_tenant = shown.pop("scopes")
    assert shown == {
        "object": "limits",
        "tenant": "acme",
        "plan": "p",
        "service_tier": "default",
        "billing": "prepaid",
        "credits": {"remaining_micros": 3800},
        "spend_limits": [],
    }
    assert (by_key["scope"], by_tenant["scope"], by_tenant["id"]) == ("key", "tenant", "acme")
    assert set(by_key["limits"]) == set(LimitName)
    unlimited = {"limit": None, "used": None, "remaining": None, "resets_at": None}
    assert by_key["limits"]["budget_micros"] == unlimited
    per_minute = by_key["limits"]["requests_per_minute"]
    assert per_minute == {"limit": 60, "used": 0, "remaining": 60, "resets_at": None}
    stored = {"limit": 268435456, "used": 0, "remaining": 268435456, "resets_at": None}
    assert by_tenant["limits"]["stored_bytes"] == stored
    assert by_tenant["limits"]["model_share_percent"] == unlimited | {"limit": 25}
    budget, day = by_tenant["limits"]["budget_micros"], by_tenant["limits"]["requests_per_day"]
    assert (budget["limit"], budget["used"], budget["remaining"]) == (1000, 1200, 0)
    assert (day["limit"], day["used"], day["remaining"]) == (100, 1, 99)
    now = utc_now()
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    next_month = (now.replace(day=1) + timedelta(days=32)).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    assert datetime.fromisoformat(day["resets_at"]) == midnight
    assert datetime.fromisoformat(budget["resets_at"]) == next_month


async def test_running_requests_count_as_used_until_they_leave_the_minute(
    management: Management,
) -> None:
    concurrent = LimitName.CONCURRENT_REQUESTS
    limits = {LimitName.TOKENS_PER_MINUTE: 100, concurrent: 3, LimitName.BUDGET: 500}
    await _tenants(management).update("acme", limits=limits)
    key = await management.key("acme", Scope.USAGE)
    await _ok(management, key, "GET", "/v1/limits")
    tenant = SubjectLimits(LimitScope.TENANT, "acme", Limits.from_values(limits, {}))
    request = ReservationRequest(
        request_id="cmpl-1",
        tenant_id="acme",
        subjects=(tenant,),
        prompt_tokens=30,
        completion_tokens=12,
        cost_micros=77,
        is_prepaid=False,
        record=b"",
    )
    assert isinstance(
        await management.services[QuotaStore].reserve(request, lease_ms=60_000), Admitted
    )
    shown = (await _ok(management, key, "GET", "/v1/limits"))["scopes"][-1]["limits"]
    now = utc_now()
    used = {name: shown[name]["used"] for name in limits}
    remaining = {name: shown[name]["remaining"] for name in limits}
    assert used == {LimitName.TOKENS_PER_MINUTE: 42, concurrent: 1, LimitName.BUDGET: 77}
    assert remaining == {LimitName.TOKENS_PER_MINUTE: 58, concurrent: 2, LimitName.BUDGET: 423}
    resets_at = datetime.fromisoformat(shown[LimitName.TOKENS_PER_MINUTE]["resets_at"])
    assert timedelta(seconds=30) < resets_at - now < timedelta(seconds=61)
    assert shown[concurrent]["resets_at"] is None


async def test_granted_credit_shows_at_once(management: Management, admin: str) -> None:
    await _tenants(management).update("acme", billing=Billing.PREPAID)
    key = await management.key("acme", Scope.USAGE)
    for granted in (10, 20):
        body = {"amount_micros": 10}
        await _ok(management, admin, "POST", "/admin/tenants/acme/credits", body)
        shown = await _ok(management, key, "GET", "/v1/limits")
        assert shown["credits"] == {"remaining_micros": granted}


async def test_operator_sees_limits_of_tenant_project_and_key(
    management: Management, admin: str, owner: str
) -> None:
    made = await _ok(management, owner, "POST", "/v1/projects", {"name": "web"})
    (key,) = (await _ok(management, owner, "GET", "/v1/keys"))["data"]
    path = "/admin/tenants/acme/limits"
    shown = await _ok(management, admin, "GET", path)
    assert [(each["scope"], each["id"]) for each in shown["scopes"]] == [("tenant", "acme")]
    assert shown["credits"] is None
    query = {"project": made["id"], "key": key["id"]}
    shown = await _ok(management, admin, "GET", path, params=query)
    assert [(each["scope"], each["id"]) for each in shown["scopes"]] == [
        ("key", key["id"]),
        ("project", made["id"]),
        ("tenant", "acme"),
    ]
    for name, id_ in query.items():
        stranger = await management.call(
            admin, "GET", "/admin/tenants/other/limits", params={name: id_}
        )
        assert stranger.status_code == 404


ADMIN_ROUTES = [
    ("GET", "/admin/plans", None),
    ("POST", "/admin/plans", {"id": "q"}),
    ("GET", "/admin/plans/pro", None),
    ("PATCH", "/admin/plans/pro", {"name": "x"}),
    ("GET", "/admin/prices", None),
    ("POST", "/admin/prices", {"model": "m", "prompt_micros": 1, "completion_micros": 1}),
    ("GET", "/admin/aliases", None),
    ("PUT", "/admin/aliases/org/chat", {"weights": {"m": 1}}),
    ("GET", "/admin/aliases/org/chat", None),
    ("DELETE", "/admin/aliases/org/chat", None),
    ("GET", "/admin/tenants/acme/credits", None),
    ("POST", "/admin/tenants/acme/credits", {"amount_micros": 1}),
    ("GET", "/admin/tenants/acme/limits", None),
    ("GET", "/admin/tenants/acme/live-requests", None),
    ("POST", "/admin/tenants/acme/live-requests/cmpl-0:cancel", None),
    ("GET", "/admin/tenants/acme/webhooks", None),
    ("POST", "/admin/tenants/acme/webhooks", {"url": HOOK}),
    ("DELETE", "/admin/tenants/acme/webhooks/whk_0", None),
    ("POST", "/admin/tenants/acme/webhooks/whk_0:test", None),
]
TENANT_ROUTES = [
    ("GET", "/v1/webhooks", None),
    ("POST", "/v1/webhooks", {"url": HOOK}),
    ("DELETE", "/v1/webhooks/whk_0", None),
    ("POST", "/v1/webhooks/whk_0:test", None),
]


async def test_scopes_are_required(management: Management, owner: str) -> None:
    reader = await management.key("ops", Scope.ADMIN_READ)
    plain = await management.key("acme", Scope.COMPLETIONS, Scope.USAGE, Scope.MEMBERS)
    await _ok(management, await management.key("ops", Scope.ADMIN), *ADMIN_ROUTES[1])
    for method, path, body in ADMIN_ROUTES:
        assert (await management.call("", method, path, body)).status_code == 401
        response = await management.call(owner, method, path, body)
        message_of(response, status=403, kind="permission_error", code="insufficient_scope")
        response = await management.call(reader, method, path, body)
        assert (response.status_code == 403) == (method != "GET"), (method, path)
    for method, path, body in TENANT_ROUTES:
        assert (await management.call("", method, path, body)).status_code == 401
        assert (await management.call(plain, method, path, body)).status_code == 403
    assert (await management.call("", "GET", "/v1/limits")).status_code == 401
    assert (await management.call(plain, "GET", "/v1/limits")).status_code == 200


async def test_database_outage_is_reported(management: Management, admin: str, owner: str) -> None:
    await management.call(admin, "GET", "/v1/limits")
    await management.call(owner, "GET", "/v1/limits")
    management.lose_database()
    routes = [(admin, *route) for route in ADMIN_ROUTES]
    routes += [(owner, *route) for route in [*TENANT_ROUTES, ("GET", "/v1/limits", None)]]
    for key, method, path, body in routes:
        response = await management.call(key, method, path, body)
        message_of(response, status=503, kind="service_unavailable", code="store_unavailable")


async def test_redis_outage_is_reported(management: Management, admin: str) -> None:
    management.lose_redis()
    for method, path, body in (
        ("GET", "/v1/limits", None),
        ("POST", "/admin/tenants/acme/credits", {"amount_micros": 1}),
    ):
        response = await management.call(admin, method, path, body)
        message_of(response, status=503, kind="service_unavailable", code="store_unavailable")


BAD_INPUT: list[tuple[str, dict[str, Any], str]] = [
    ("/admin/plans", {}, "id"),
    ("/admin/plans", {"id": "A B"}, "id"),
    ("/admin/plans", {"id": "p", "name": "\0"}, "name"),
    ("/admin/plans", {"id": "p", "limits": {}}, "limits"),
    ("/admin/plans", {"id": "p", "key_limits": {"x": 1}}, "key_limits"),
    ("/admin/plans", {"id": "p", "key_limits": {RPM: True}}, f"key_limits.{RPM}"),
    ("/admin/plans", {"id": "p", "key_limits": {RPM: 10**16}}, f"key_limits.{RPM}"),
    ("/admin/plans", {"id": "p", "tenant_limits": {SHARE: 0}}, f"tenant_limits.{SHARE}"),
    ("/admin/plans", {"id": "p", "project_limits": {SHARE: 9}}, f"project_limits.{SHARE}"),
    ("/admin/tenants/acme/projects", {"name": "x", "limits": {SHARE: 9}}, f"limits.{SHARE}"),
    ("/admin/tenants", {"name": "x", "limits": {SHARE: 101}}, f"limits.{SHARE}"),
    ("/admin/prices", {"prompt_micros": 1, "completion_micros": 1}, "model"),
    ("/admin/prices", {"model": "\0", "prompt_micros": 1, "completion_micros": 1}, "model"),
    ("/admin/prices", {"model": "m", "prompt_micros": 1.5}, "prompt_micros"),
    ("/admin/prices", {"model": "m", "prompt_micros": "1"}, "prompt_micros"),
    ("/admin/prices", {"model": "m", "prompt_micros": -1}, "prompt_micros"),
    (
        "/admin/prices",
        {"model": "m", "prompt_micros": 1, "completion_micros": 1, "cached_micros": 2},
        "cached_micros",
    ),
    (
        "/admin/prices",
        {
            "model": "m",
            "prompt_micros": 1,
            "completion_micros": 1,
            "effective_at": "9999-12-31T23:59:59-10:00",
        },
        "effective_at",
    ),
    ("/admin/tenants/acme/credits", {"amount_micros": 0}, "amount_micros"),
    ("/admin/tenants/acme/credits", {"amount_micros": 10**30}, "amount_micros"),
    ("/admin/tenants/acme/credits", {"amount_micros": 1, "note": "\0"}, "note"),
    ("/admin/tenants/acme/credits", {"amount_micros": 1, "note": "x" * 201}, "note"),
    ("/admin/tenants/acme/credits", {"amount_micros": 1, "kind": "expiry"}, "kind"),
    ("/admin/tenants/acme/credits", {"amount_micros": -1, "kind": "adjustment"}, "note"),
    (
        "/admin/tenants/acme/credits",
        {"amount_micros": 1, "expires_at": "9999-12-31T23:59:59-10:00"},
        "expires_at",
    ),
    (
        "/admin/tenants/acme/credits",
        {"amount_micros": 1, "expires_at": "2020-01-01T00:00:00"},
        "expires_at",
    ),
    (
        "/admin/tenants/acme/credits",
        {
            "amount_micros": 1,
            "kind": "adjustment",
            "note": "x",
            "expires_at": "2999-01-01T00:00:00Z",
        },
        "expires_at",
    ),
    ("/admin/tenants/acme/webhooks", {"url": "http://example.com"}, "url"),
    ("/admin/tenants/acme/webhooks", {"url": "https://10.0.0.1/"}, "url"),
    ("/admin/tenants/acme/webhooks", {"url": HOOK, "thresholds": []}, "thresholds"),
    ("/admin/tenants/acme/webhooks", {"url": HOOK, "thresholds": [5, 5]}, "thresholds"),
]


async def test_bad_input_is_refused_by_name(management: Management, admin: str) -> None:
    # In one test, because preparing a database takes longer than all of them.
    for path, body, param in BAD_INPUT:
        assert await _refused(management, admin, "POST", path, body) == param, (path, body)


async def test_alias_is_defined_listed_and_removed(management: Management, admin: str) -> None:
    path, body = "/admin/aliases/org/chat", {"weights": {"m": 90, "n": 10}, "fallback": "m"}
    made = await _ok(management, admin, "PUT", path, body | {"sunset_at": "2999-01-01T00:00:00Z"})
    assert (made["name"], made["weights"], made["sticky"]) == (
        *("org/chat", body["weights"]),
        "tenant",
    )
    assert await _ok(management, admin, "GET", path) == made
    assert (await _ok(management, admin, "GET", "/admin/aliases"))["data"] == [made]
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "weights"),
        ({"weights": {"m": "1"}}, "weights.m"),
        ({"weights": {"m": 0}}, "weights"),
        ({"weights": {"m": 1}, "sticky": "key"}, "sticky"),
        ({"weights": {"m": 1}, "sunset_at": "9999-12-31T23:59:59-10:00"}, "sunset_at"),
    ]
    for wrong, param in bad:
        assert await _refused(management, admin, "PUT", path, wrong) == param, wrong
    removed = await _ok(management, admin, "DELETE", path)
    assert removed == {"object": "model_alias.deleted", "name": "org/chat", "deleted": True}
    assert (await management.call(admin, "DELETE", path)).status_code == 404


async def test_odd_ids_and_cursors_are_not_found_or_refused(
    management: Management, admin: str
) -> None:
    for path in ("/admin/plans/%00", "/admin/tenants/%00/credits", "/admin/tenants/a%20b/limits"):
        assert (await management.call(admin, "GET", path)).status_code == 404
    for after in ("\0", "crd_0", "é"):
        query = {"after": after}
        path = "/admin/tenants/acme/credits"
        assert await _refused(management, admin, "GET", path, params=query) == "after"
    webhook = await management.call(admin, "DELETE", "/admin/tenants/acme/webhooks/%00")
    assert webhook.status_code == 404


async def test_audit_log_has_no_webhook_secret(management: Management, owner: str) -> None:
    made = await _ok(management, owner, "POST", "/v1/webhooks", {"url": HOOK})
    async with management.services[Database].reading() as transaction:
        entries = await AuditLog(transaction).entries()
    kept = json.dumps([dict(entry.details) for entry in entries])
    assert "example.com" in kept
    assert made["secret"] not in kept


async def test_operator_pauses_and_repairs_an_export(management: Management, admin: str) -> None:
    async with management.services[Database].writing() as transaction:
        row = await ExportStore(transaction).register("meter", "openmeter", utc_now())
        batch = rejected_batch(row)
        transaction.add(batch)
    [listed] = (await _ok(management, admin, "GET", "/admin/exports"))["data"]
    assert (listed["name"], listed["batches"]["rejected"]) == ("meter", 1)
    path = "/admin/exports/meter"
    assert (await _ok(management, admin, "POST", f"{path}:pause"))["paused_at"]
    assert (await _ok(management, admin, "POST", f"{path}:resume"))["paused_at"] is None
    found = await _ok(management, admin, "GET", f"{path}/batches?state=rejected")
    assert [each["identifier"] for each in found["data"]] == ["cmpl-1"]
    one = f"{path}/batches/{batch.id}"
    assert (await _ok(management, admin, "POST", f"{one}:retry"))["batches"] == 1
    assert (await _ok(management, admin, "POST", f"{path}:retry"))["batches"] == 0
    for method, wrong in (
        ("DELETE", one),  # It is pending again.
        ("POST", "/admin/exports/other:pause"),
        ("GET", "/admin/exports/other/batches"),
    ):
        assert (await management.call(admin, method, wrong)).status_code == 404
    async with management.services[Database].writing() as transaction:
        await transaction.execute(update(ExportBatchRow).values(state=ExportBatchState.UNCERTAIN))
    assert (await _ok(management, admin, "DELETE", one))["id"] == batch.id
    assert (await _ok(management, admin, "DELETE", path))["deleted"]
    assert (await _ok(management, admin, "GET", "/admin/exports"))["data"] == []
