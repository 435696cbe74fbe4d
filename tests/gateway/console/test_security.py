"""What protects the console: sessions, forms, headers, and other tenants' data."""

import asyncio
import itertools
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi.routing import APIRoute
from redis.asyncio import Redis

from common import clock
from gateway.accounts.keys.service import KeyService
from gateway.accounts.members import MemberService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.tenants.service import TenantService
from gateway.accounts.webhooks.secret_box import SecretBox
from gateway.accounts.webhooks.service import WebhookService
from gateway.auth.sessions import (
    MOST_SESSIONS,
    Audience,
    KeyLogin,
    Sessions,
    make_link,
    use_link,
)
from gateway.billing.usage.parts import UsageFilter
from gateway.billing.usage.query import read_span
from gateway.billing.usage.service import UsageService
from gateway.console.login import safe_page
from gateway.console.routing import CustomerRoute, OperatorRoute, TenantRoute
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import PageRequest
from gateway.platform.redis_client import connect
from gateway.platform.settings import Settings
from gateway.process.app import create_app, create_operator_app
from gateway.records.scopes import TENANT_SCOPES, Role, Scope
from tests.gateway.conftest import gateway_client
from tests.gateway.console.conftest import (
    OTHER,
    TENANT,
    Visit,
    anonymous,
    fail_adapter,
    log_in,
    visiting,
)
from tests.gateway.management_api import running_management
from tests.support.cases import all_cases
from tests.support.redis_server import RedisServer
from tests.support.secret_box import ENCRYPTION_KEY
from tests.support.stack import MODEL, Stack

LOGIN = KeyLogin("prefix", b"digest")


class Page(NamedTuple):
    """A route of the console, with an example for each part of its path."""

    method: str
    path: str
    audience: Audience
    needs_session: bool

    def filled(self, ids: dict[str, str]) -> str:
        return re.sub(r"{(\w+)}", lambda match: ids.get(match[1], "missing"), self.path)


def _pages() -> Iterator[Page]:
    customers = create_app(Settings())
    operators = create_operator_app(Settings(), customers)
    for app, audience in ((customers, Audience.CUSTOMERS), (operators, Audience.OPERATORS)):
        for route in app.routes:
            if isinstance(route, APIRoute) and route.path.startswith("/console"):
                if ":path" in route.path:
                    continue  # It answers for paths that no page has.
                needs_session = isinstance(route, CustomerRoute | OperatorRoute | TenantRoute)
                for method in route.methods:
                    yield Page(method, route.path, audience, needs_session)


PAGES = list(_pages())
OWN = [page for page in PAGES if page.needs_session]


def _url(stack: Stack, page: Page) -> str:
    return stack.url if page.audience is Audience.CUSTOMERS else stack.operators


async def test_pages_without_a_session_lead_to_the_login_page(stack: Stack) -> None:
    public = {page.path for page in PAGES if not page.needs_session}
    assert public == {
        "/console/static/{name}",
        "/console/login",
        "/console/login/provider",
        "/console/login/callback",
        "/console/enter",
    }
    for page in OWN:
        async with anonymous(_url(stack, page)) as client:
            response = await client.request(page.method, page.filled({}))
            assert response.status_code == 303, page
            assert response.headers["location"].startswith("/console/login"), page


async def test_forms_need_the_token_of_their_session(
    stack: Stack, visit: Visit, operator: Visit
) -> None:
    posts = [page for page in OWN if page.method == "POST"]
    assert len(posts) >= 5
    for page in posts:
        visitor = visit if page.audience is Audience.CUSTOMERS else operator
        path = page.filled({})
        stolen = operator.csrf if visitor is visit else visit.csrf
        for token in ("", "x", stolen):
            refused = await visitor.client.post(path, data={"csrf": token})
            assert (refused.status_code, "another session" in refused.text) == (403, True), page
        for headers in (
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ):
            refused = await visitor.client.post(path, data={"csrf": visitor.csrf}, headers=headers)
            assert refused.status_code == 403, (page, headers)
    # None of them ended the session.
    assert (await visit.get("/console")).status_code == 200


async def _ids_of_other(stack: Stack) -> dict[str, str]:
    other = await asyncio.to_thread(stack.key, OTHER, scopes=TENANT_SCOPES)
    async with gateway_client(stack.url, other) as client:
        fields, line = {"purpose": "batch"}, {"file": ("theirs.jsonl", b"{}\n")}
        file = (await client.post("/v1/files", data=fields, files=line)).json()
        wanted = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await client.post("/v1/batches", json={"input_file_id": file["id"], **wanted})
        spend = {"scope": "tenant", "window": "day", "amount_micros": 10**12}
        limit = await client.post("/v1/spend_limits", json=spend)
    database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
    try:
        announcer = ChangeAnnouncer(redis)
        key, *_ = (await KeyService(database, announcer).page(OTHER, PageRequest())).entries
        project = await ProjectService(database, announcer).create(OTHER, name="theirs")
        member = await MemberService(database, announcer).add(
            OTHER, subject="theirs", role=Role.VIEWER
        )
        webhooks = WebhookService(database, SecretBox([ENCRYPTION_KEY]))
        webhook = await webhooks.create(OTHER, "https://example.com/theirs")
        found = await UsageService(database).requests(
            UsageFilter(tenant_id=OTHER), read_span(None, None), before=None, limit=1
        )
        return {
            "file_id": file["id"],
            "batch_id": batch.json()["id"],
            "adapter_id": await fail_adapter(database, OTHER, secrets.token_hex(4)),
            "key_id": key.id,
            "project_id": project.id,
            "member_id": member.id,
            "webhook_id": webhook.id,
            "limit_id": limit.json()["id"],
            "month": "2026-01",
            "request_id": found.entries[0].request_id,
        }
    finally:
        await redis.aclose()
        await database.aclose()


async def test_requests_of_a_session_need_its_token_and_its_rights(visit: Visit) -> None:
    accepting = {"accept": "application/json"}
    token = {**accepting, "x-csrf-token": visit.csrf}
    ask = visit.client.request
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
        for headers in (accepting, token | {"x-csrf-token": "other"}):
            refused = await ask(method, f"/console/try{path}", headers=headers)
            assert refused.status_code in (403, 415), refused.text
    # Of the API alone, with its own errors.
    for path, code in (
        ("/console/keys", "not_found"),
        ("/v1/nothing", "not_found"),
        ("/v1/keys?limti=3", "unknown_parameter"),
    ):
        refused = await visit.get(f"/console/try{path}", headers=token)
        assert refused.json()["error"]["code"] == code
    named = await ask("POST", "/console/try/v1/messages", headers=token, json={"model": MODEL})
    assert named.json()["type"] == "error"
    assert (await visit.get("/console/try/v1/keys", headers=token)).json()["object"] == "list"


async def test_no_route_reaches_another_tenant(stack: Stack, visit: Visit) -> None:
    ids = await _ids_of_other(stack)
    key = await asyncio.to_thread(stack.key, OTHER, scopes=TENANT_SCOPES)
    of_customers = [page for page in OWN if page.audience is Audience.CUSTOMERS]
    with_ids = [page for page in of_customers if "{" in page.path]
    assert {name for page in with_ids for name in re.findall(r"{(\w+)}", page.path)} <= set(ids)
    async with visiting(stack.url, key) as owner:
        for page in with_ids:
            path = page.filled(ids)
            if page.method == "GET":
                assert (await owner.get(path)).status_code == 200, page
            fields = {"name": "x", "grace_seconds": "0", "scopes": "usage"}
            is_form = page.method == "POST"
            response = await (visit.send(path, **fields) if is_form else visit.get(path))
            # A month is not of a tenant; the page shows the visitor's own.
            expected = 200 if "{month}" in page.path else 404
            assert response.status_code == expected, page
    query = f"?key={ids['key_id']}&project={ids['project_id']}&tenant={OTHER}"
    for page in of_customers:
        if page.method == "GET" and "{" not in page.path:
            text = (await visit.get(page.path + query, follow_redirects=True)).text
            text = text.replace(ids["key_id"], "").replace(ids["project_id"], "")
            assert ids["request_id"] not in text, page
            assert "$77.00" not in text, page


async def test_pages_follow_the_scopes_of_the_key(stack: Stack) -> None:
    allowed = {
        Scope.COMPLETIONS: {
            *("/console/usage", "/console/requests", "/console/models", "/console/playground"),
            *("/console/batches", "/console/files", "/console/files/new", "/console/rejected"),
        },
        Scope.USAGE: {
            "/console/rejected",
            *("/console/usage", "/console/requests", "/console/invoices", "/console/credits"),
        },
        Scope.KEYS: {
            "/console/keys",
            "/console/keys/new",
            "/console/projects",
            "/console/projects/new",
            "/console/webhooks",
            "/console/adapters",
        },
        Scope.MEMBERS: {"/console/audit", "/console/members"},
    }
    guarded = {page.path for page in OWN if page.audience is Audience.CUSTOMERS} & set().union(
        *allowed.values()
    )
    for scope, paths in allowed.items():
        key = await asyncio.to_thread(stack.key, TENANT, scopes=frozenset({scope}))
        async with visiting(stack.url, key) as visit:
            home = (await visit.get("/console")).text
            for path in guarded:
                status = (await visit.get(path)).status_code
                assert status == (200 if path in paths else 403), (scope, path)
                if not path.endswith("/new"):
                    assert (f'href="{path}"' in home) == (path in paths), (scope, path)


async def test_operators_with_read_access_send_no_forms(stack: Stack) -> None:
    key = await asyncio.to_thread(stack.key, "staff", scopes=frozenset({Scope.ADMIN_READ}))
    async with visiting(stack.operators, key) as reader:
        for page in OWN:
            if page.audience is Audience.OPERATORS and page.method == "POST":
                if "logout" in page.path:
                    continue
                refused = await reader.send(page.filled({}))
                assert (refused.status_code, "scope" in refused.text) == (403, True), page


async def test_customers_cannot_enter_the_console_of_operators(stack: Stack, visit: Visit) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    async with anonymous(stack.operators) as client:
        refused = await log_in(client, key)
        assert refused.status_code == 403
        assert "admin" in refused.text
        # Ports of one host share their cookies.
        token = visit.client.cookies["sluice"]
        client.cookies.update({"sluice": token, "sluice-operators": token})
        assert (await client.get("/console")).status_code == 303


@all_cases("path", ["/console", "/console/login", "/console/no/page", "/console/keys/x"])
async def test_pages_cannot_be_framed_or_run_foreign_scripts(
    visit: Visit, operator: Visit, path: str
) -> None:
    for visitor in (visit, operator):
        response = await visitor.get(path)
        headers = response.headers
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        policy = headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        [nonce] = re.findall(r"script-src 'nonce-([\w-]+)'", policy)
        scripts = re.findall(r"<script[^>]*>", response.text)
        assert scripts
        assert all(f'nonce="{nonce}"' in script for script in scripts)
        assert not re.findall(r"<[^>]+ (?:on\w+|style|hx-on\S*)=", response.text)
        assert nonce not in (await visitor.get(path)).headers["content-security-policy"]


@all_cases(
    ("given", "followed"),
    [
        ("/console/keys?after=key_1", "/console/keys?after=key_1"),
        ("https://evil.example/console", "/console"),
        ("//evil.example", "/console"),
        ("/\\evil.example", "/console"),
        ("/console\\..\\evil", "/console"),
        ("/console/../admin", "/console"),
        ("/console/%2e%2e/docs", "/console"),
        ("/consoles", "/console"),
        ("/console\r\nset-cookie: a=b", "/console"),
        ("javascript:alert(1)", "/console"),
        ("/docs", "/console"),
    ],
)
async def test_login_leads_only_to_pages_of_the_console(
    stack: Stack, given: str, followed: str
) -> None:
    assert safe_page(given) == followed
    if given == followed or given.startswith("https"):
        key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
        async with anonymous(stack.url) as client:
            response = await log_in(client, key, next=given)
            assert response.headers["location"] == followed


async def test_login_begins_a_session_that_nobody_knows(stack: Stack) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    async with anonymous(stack.url) as client:
        client.cookies["sluice"] = "planted"
        await log_in(client, key)
        first = client.cookies.jar._cookies  # type: ignore[attr-defined]
        tokens = [cookie.value for cookie in client.cookies.jar if cookie.name == "sluice"]
        assert tokens != ["planted"], first
        [token] = [each for each in tokens if each != "planted"]
    async with anonymous(stack.url) as client:
        client.cookies["sluice"] = "planted"
        assert (await client.get("/console")).status_code == 303
        client.cookies["sluice"] = token or ""
        assert (await client.get("/console")).status_code == 200
        # Another login in the same browser ends the earlier session.
        await log_in(client, key)
    async with anonymous(stack.url) as client:
        client.cookies["sluice"] = token or ""
        assert (await client.get("/console")).status_code == 303


async def test_sessions_end_with_their_key_and_on_request(stack: Stack) -> None:
    owner = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    short = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES, limits={})
    async with visiting(stack.url, short) as visit, visiting(stack.url, short) as again:
        await visit.send("/console/logout")
        assert (await visit.get("/console")).status_code == 303
        assert (await again.get("/console")).status_code == 200
        async with visiting(stack.url, short) as third:
            await again.send("/console/logout-everywhere")
            for one in (again, third):
                assert (await one.get("/console")).status_code == 303
        async with visiting(stack.url, short) as last, visiting(stack.url, owner) as manager:
            revoked = await manager.send(f"/console/keys/{short[3:15]}/revoke")
            assert revoked.headers["location"] == "/console/keys?done=revoked"
            async with asyncio.timeout(30):
                while (await last.get("/console")).status_code != 303:
                    await asyncio.sleep(0.02)
            assert (await manager.get("/console")).status_code == 200


@pytest.fixture
def sessions(redis: "Redis") -> Sessions:
    return Sessions(redis, idle=timedelta(minutes=30), longest=timedelta(hours=12))


async def test_sessions_time_out(
    sessions: Sessions, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await sessions.begin(Audience.CUSTOMERS, LOGIN, "key:1")
    [name] = [key async for key in redis.scan_iter("console:session:*")]
    assert token.encode() not in name
    await redis.pexpire(name, 1000)
    assert await sessions.find(token, Audience.CUSTOMERS) is not None
    assert 1_700_000 < await redis.pttl(name) <= 1_800_000
    assert await sessions.find(token, Audience.OPERATORS) is None
    began = clock.now_ms()
    monkeypatch.setattr(clock, "now_ms", lambda: began + 12 * 3_600_000)
    assert await sessions.find(token, Audience.CUSTOMERS) is None


async def test_only_the_latest_sessions_of_a_key_continue(
    sessions: Sessions, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count(clock.now_ms())
    monkeypatch.setattr(clock, "now_ms", lambda: next(times))

    async def began(subject: str, number: int) -> list[str]:
        return [await sessions.begin(Audience.CUSTOMERS, LOGIN, subject) for _ in range(number)]

    async def going(tokens: list[str]) -> list[bool]:
        return [await sessions.find(each, Audience.CUSTOMERS) is not None for each in tokens]

    other, tokens = await began("key:2", 1), await began("key:1", MOST_SESSIONS)
    # A session that ended leaves its place.
    await sessions.end(tokens[0])
    tokens += await began("key:1", 4)
    assert await going(other + tokens) == [True, *[False] * 4, *[True] * MOST_SESSIONS]
    stored = [key async for key in redis.scan_iter("console:*")]
    assert len(stored) == 1 + MOST_SESSIONS + 2
    assert 0 < await redis.pttl("console:sessions:key:1") <= 12 * 3_600_000


async def test_links_log_in_once(redis: "Redis") -> None:
    path = await make_link(redis, LOGIN)
    token = path.partition("=")[2]
    [name] = [key async for key in redis.scan_iter("console:link:*")]
    assert 0 < await redis.pttl(name) <= 3_600_000
    assert await use_link(redis, token) == LOGIN
    assert await use_link(redis, token) is None
    assert await use_link(redis, "made-up") is None


@pytest.fixture
async def https(
    database_url: str, redis_server: RedisServer
) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A client over https of a gateway that allows two failed logins, and a key."""
    settings: Any = {
        "redis_url": redis_server.url,
        "database_url": database_url,
        "cache_salt_secret": "the salt of these tests",
        "failed_logins_per_minute": 2,
    }
    async with running_management(Settings(**settings)) as management:
        services = management.services
        await TenantService(services[Database], services[ChangeAnnouncer]).create(
            "A", tenant_id="acme"
        )
        key = await management.key("acme", Scope.USAGE)
        transport = httpx.ASGITransport(management.app)
        async with httpx.AsyncClient(transport=transport, base_url="https://gateway") as client:
            yield client, key


async def test_cookies_are_safe_and_logins_throttled(
    https: tuple[httpx.AsyncClient, str],
) -> None:
    client, key = https
    for cookie in (
        (await client.get("/console/login")).headers["set-cookie"],
        (await log_in(client, key)).headers["set-cookie"],
    ):
        assert cookie.startswith("__Host-sluice")
        assert {"HttpOnly", "Secure", "Path=/", "SameSite=lax"} <= set(cookie.split("; "))
        assert "Domain" not in cookie
    wrong = key[:-1] + ("a" if key[-1] != "a" else "b")
    statuses = [(await log_in(client, wrong)).status_code for _ in range(3)]
    assert statuses == [401, 401, 429]
    assert (await log_in(client, key)).status_code == 429
