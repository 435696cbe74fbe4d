"""The management API of spend limits, and what they count."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis

from gateway.accounts.members import MemberService
from gateway.accounts.spend_alerts import SpendAlertService
from gateway.accounts.tenants.service import TenantService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.settings import Settings
from gateway.records.errors import InvalidParameterError
from gateway.records.scopes import Role, Scope
from gateway.records.times import utc_now
from tests.gateway.management_api import Management, running_management
from tests.support.cases import all_cases
from tests.support.kinds import every_database
from tests.support.ledger import use
from tests.support.redis_server import RedisServer

LIMITS = "/v1/spend_limits"


@pytest.fixture
async def management(
    database: Database, database_url: str, redis: Redis, redis_server: RedisServer
) -> AsyncIterator[Management]:
    settings = Settings(database_url=SecretStr(database_url), redis_url=redis_server.url)
    async with running_management(settings) as management:
        for tenant_id in ("ops", "acme"):
            await tenants(management).create(tenant_id, tenant_id=tenant_id)
        yield management


@pytest.fixture
async def owner(management: Management) -> str:
    """A key of the tenant `acme` that manages it."""
    return await management.key("acme", Scope.KEYS, Scope.USAGE, Scope.MEMBERS)


def tenants(management: Management) -> TenantService:
    return TenantService(management.services[Database], management.services[ChangeAnnouncer])


async def call(
    management: Management, key: str, method: str, path: str, body: Any = None, status: int = 200
) -> Any:
    response = await management.call(key, method, path, body)
    assert response.status_code == status, response.text
    return response.json()


async def add(management: Management, key: str, **given: Any) -> dict[str, Any]:
    body = {"scope": "tenant", "window": "month", "amount_micros": 500} | given
    made: dict[str, Any] = await call(management, key, "POST", LIMITS, body)
    return made


@every_database
async def test_spend_limit_counts_what_was_spent_in_its_window(
    management: Management, owner: str
) -> None:
    database = management.services[Database]
    await use(database, "acme", 300, credential_id="key_1", model="m1")
    await use(database, "acme", 40, credential_id="jwt:ada", model="m2", end_user="eve")
    await use(database, "acme", 999, at=utc_now() - timedelta(days=40))
    members = MemberService(database, management.services[ChangeAnnouncer])
    ada = await members.add("acme", subject="ada", role=Role.DEVELOPER)

    made = await add(management, owner, amount_micros=100)
    assert made == {
        "object": "spend_limit",
        "id": made["id"],
        "scope": "tenant",
        "holder": None,
        "model": None,
        "window": "month",
        "starts_on": 1,
        "time_zone": "UTC",
        "amount_micros": 100,
        "repeats": None,
        "limits": {},
        "raised_micros": None,
        "raised_until": None,
        "raise_reason": None,
        "is_automatic": False,
        "is_enforced": True,
        "is_operators": False,
        "is_from_plan": False,
        "used_micros": 340,
        "remaining_micros": 0,
        "window_starts_at": made["window_starts_at"],
        "resets_at": made["resets_at"],
        "created_at": made["created_at"],
    }
    of_model = await add(management, owner, model="m1")
    of_member = await add(management, owner, scope="member", holder=ada.id)
    of_users = await add(management, owner, scope="user", limits={"requests_per_minute": 9})
    used = [each["used_micros"] for each in (of_model, of_member, of_users)]
    assert (used, of_member["holder"]) == ([300, 40, None], "ada")
    of_eve = await call(management, owner, "GET", f"{LIMITS}/{of_users['id']}?user=eve")
    assert of_eve["used_micros"] == 40
    listed = await call(management, owner, "GET", LIMITS)
    assert [each["id"] for each in listed["data"]] == [
        each["id"] for each in (made, of_model, of_member, of_users)
    ]
    own = await call(management, owner, "GET", "/v1/limits")
    assert own["spend_limits"] == [made, of_model, of_users]


async def test_raise_has_an_end_and_a_reason(management: Management, owner: str) -> None:
    path = f"{LIMITS}/{(await add(management, owner))['id']}"
    until = (utc_now() + timedelta(hours=1)).isoformat()
    change = {"raised_micros": 800, "raised_until": until, "raise_reason": "launch"}
    for name in ("raised_until", "raise_reason"):
        part = {each: value for each, value in change.items() if each != name}
        error = await call(management, owner, "PATCH", path, part, 400)
        assert error["error"]["param"] == name
    for wrong in (
        {"raised_micros": 499},
        {"raised_until": utc_now().isoformat()},
        {"raised_until": (utc_now() + timedelta(days=400)).isoformat()},
    ):
        error = await call(management, owner, "PATCH", path, change | wrong, 400)
        assert error["error"]["param"] in wrong
    raised = await call(management, owner, "PATCH", path, change)
    assert (raised["amount_micros"], raised["remaining_micros"]) == (500, 800)
    ended = await call(management, owner, "PATCH", path, {"raised_micros": None})
    assert (ended["raised_until"], ended["remaining_micros"]) == (None, 500)
    actions = await call(management, owner, "GET", "/v1/audit")
    assert [each["action"] for each in actions["data"][:3]] == [
        "spend_limit.change",
        "spend_limit.change",
        "spend_limit.add",
    ]


@all_cases(
    ("given", "param"),
    [
        ({"scope": "galaxy"}, "scope"),
        ({"window": "year"}, "window"),
        ({"amount_micros": -1}, "amount_micros"),
        ({"amount_micros": None}, "amount_micros"),
        ({"window": "week", "starts_on": 8}, "starts_on"),
        ({"starts_on": 29}, "starts_on"),
        ({"holder": "acme"}, "holder"),
        ({"scope": "key"}, "holder"),
        ({"scope": "user", "holder": "a\0b"}, "holder"),
        ({"limits": {"requests_per_minute": 1}}, "limits"),
        ({"scope": "user", "limits": {"model_share_percent": 1}}, "limits.model_share_percent"),
        ({"model": "a\0b"}, "model"),
    ],
)
async def test_invalid_spend_limit_names_the_parameter(
    management: Management, owner: str, given: dict[str, Any], param: str
) -> None:
    body = {"scope": "tenant", "window": "month", "amount_micros": 5} | given
    error = (await call(management, owner, "POST", LIMITS, body, 400))["error"]
    assert error["param"] == param


async def test_credential_changes_neither_its_own_limit_nor_an_operators(
    management: Management, owner: str
) -> None:
    admin = await management.key("ops", Scope.ADMIN)
    own_key = (await call(management, owner, "GET", "/v1/keys"))["data"][0]["id"]
    of_operator = await call(
        management,
        admin,
        "POST",
        "/admin/tenants/acme/spend_limits",
        {"scope": "key", "holder": own_key, "window": "day", "amount_micros": 5},
    )
    assert of_operator["is_operators"] is True
    other = await management.key("acme", Scope.KEYS)
    path = f"{LIMITS}/{of_operator['id']}"
    refused = await call(management, other, "DELETE", path, status=403)
    assert "Only an operator" in refused["error"]["message"]
    own = await add(management, other, scope="key", holder=own_key)
    refused = await call(management, owner, "DELETE", f"{LIMITS}/{own['id']}", status=403)
    assert "of its own" in refused["error"]["message"]
    # Otherwise it would give itself another one without the limit.
    more = {"name": "more", "scopes": ["usage"]}
    refused = await call(management, owner, "POST", "/v1/keys", more, 403)
    assert "cannot create keys" in refused["error"]["message"]
    removed = await call(management, other, "DELETE", f"{LIMITS}/{own['id']}")
    assert removed == {"object": "spend_limit.deleted", "id": own["id"], "deleted": True}
    assert (await call(management, other, "GET", LIMITS))["data"] == [of_operator]
    await call(management, other, "GET", f"{LIMITS}/{own['id']}", status=404)
    unknown = {"scope": "project", "holder": "prj_0", "window": "day", "amount_micros": 1}
    await call(management, other, "POST", LIMITS, unknown, 404)


async def test_openai_form_sets_the_monthly_limit(management: Management, owner: str) -> None:
    project = (await call(management, owner, "POST", "/v1/projects", {"name": "shop"}))["id"]
    for path, kind in (
        ("/v1/organization/spend_limit", "organization.spend_limit"),
        (f"/v1/organization/projects/{project}/spend_limit", "project.spend_limit"),
    ):
        await call(management, owner, "GET", path, status=404)
        for cents in (1000, 2000):
            body = {"threshold_amount": cents, "currency": "USD", "interval": "month"}
            assert await call(management, owner, "POST", path, body) == {
                "object": kind,
                "threshold_amount": cents,
                "currency": "USD",
                "interval": "month",
                "enforcement": {"status": "inactive"},
            }
        [found] = (await call(management, owner, "GET", LIMITS))["data"]
        assert (found["amount_micros"], found["window"]) == (20_000_000, "month")
        wrong = {"threshold_amount": 5, "currency": "EUR", "interval": "month"}
        error = await call(management, owner, "POST", path, wrong, 400)
        assert error["error"]["param"] == "currency"
        deleted = await call(management, owner, "DELETE", path)
        assert deleted == {"object": f"{kind}.deleted", "deleted": True}
        await call(management, owner, "DELETE", path, status=404)


async def test_openai_form_adds_spend_alerts(
    management: Management, owner: str, database: Database
) -> None:
    project = (await call(management, owner, "POST", "/v1/projects", {"name": "shop"}))["id"]
    channel = {"type": "email", "recipients": ["a@example.com"], "subject_prefix": None}
    body = {"threshold_amount": 500, "currency": "USD", "interval": "month"}
    body |= {"notification_channel": channel}
    alerts = SpendAlertService(database, sends_mail=True)
    options = {"amount_micros": 5_000_000, "recipients": ["a@example.com"], "subject_prefix": None}
    for path, of, kind in (
        ("/v1/organization/spend_alerts", None, "organization.spend_alert"),
        (f"/v1/organization/projects/{project}/spend_alerts", project, "project.spend_alert"),
    ):
        refused = await call(management, owner, "POST", path, body, 400)
        assert refused["error"]["param"] == "notification_channel"
        wrong = {**body, "notification_channel": {**channel, "recipients": []}}
        refused = await call(management, owner, "POST", path, wrong, 400)
        assert refused["error"]["param"] == "notification_channel.recipients"
        with pytest.raises(InvalidParameterError, match=r"recipients\[0\]' must be an address"):
            await alerts.add("acme", of, {**options, "recipients": ["a"]})
        first, second = [(await alerts.add("acme", of, options)).id for _ in range(2)]
        found = await call(management, owner, "GET", f"{path}/{first}")
        assert found == {"id": first, "object": kind, **body}
        page = await call(management, owner, "GET", f"{path}?limit=1")
        assert (page["data"], page["last_id"], page["has_more"]) == ([found], first, True)
        [rest] = (await call(management, owner, "GET", f"{path}?after={first}"))["data"]
        assert rest["id"] == second
        deleted = await call(management, owner, "DELETE", f"{path}/{first}")
        assert deleted == {"id": first, "object": f"{kind}.deleted", "deleted": True}
        await call(management, owner, "GET", f"{path}/{first}", status=404)
    # Each is listed where it belongs.
    await call(management, owner, "GET", f"/v1/organization/spend_alerts/{second}", status=404)


async def test_time_zone_of_a_tenant_is_known(management: Management, owner: str) -> None:
    admin, path = await management.key("ops", Scope.ADMIN), "/admin/tenants/acme"
    error = await call(management, admin, "PATCH", path, {"time_zone": "Mars/Olympus"}, 400)
    assert error["error"]["param"] == "time_zone"
    await call(management, admin, "PATCH", path, {"time_zone": "Asia/Kathmandu"})
    made = await add(management, owner)
    assert (made["time_zone"], made["resets_at"][10:]) == ("Asia/Kathmandu", "T18:15:00Z")
