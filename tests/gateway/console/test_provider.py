"""Login at a real OpenID provider: people of accounts, operators, and what attackers send."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from sqlalchemy import delete

from gateway.accounts.audit.log import AuditService
from gateway.accounts.members import MemberService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import MemberRow
from gateway.platform.redis_client import connect
from gateway.platform.settings import Settings
from gateway.records.scopes import Role
from tests.gateway.console.conftest import CSRF, OTHER, TENANT, Tab, Visit, anonymous
from tests.gateway.management_api import running_management
from tests.support.cases import all_cases
from tests.support.processes import free_port, spawn, stop, wait_until
from tests.support.redis_server import RedisServer
from tests.support.stack import MODEL, REPOSITORY, Stack, http_status

NODE: Final = shutil.which("node")
CLIENTS: Final = REPOSITORY / "tests/clients"
CALLBACK: Final = "/console/login/callback"
ADA: Final = "ada@acme.example"
ACCOUNTS: Final[dict[str, dict[str, Any]]] = {
    # Cognito sends a string.
    "ada": {"email": "Ada@Acme.example", "email_verified": "true", "groups": ["people"]},
    "eve": {"email": ADA, "email_verified": False, "groups": ["Staff", "staff "]},
    "kim": {"email": "\N{KELVIN SIGN}im@acme.example", "email_verified": True},
    "ron": {"groups": ["people", "auditors"]},
    "sue": {"groups": ["staff"]},
    "sam": {},
    "gus": {"groups": ["acme-viewers", "acme-admins"]},
}


@dataclass
class Provided:
    """Two gateways that share a provider, and the provider."""

    stack: Stack
    issuer: str
    url: str
    other_url: str

    @property
    def operators(self) -> str:
        return self.stack.operators_of(self.url)

    async def tamper(self, **claims: Any) -> None:
        """Change claims of the next ID token."""
        async with httpx.AsyncClient() as client:
            response = await client.post(f"{self.issuer}/tamper", json=claims)
            assert response.status_code == 204


@pytest.fixture(scope="module")
def provided(stack: Stack) -> Iterator[Provided]:
    if NODE is None or not (CLIENTS / "node_modules/oidc-provider").exists():
        pytest.skip("oidc-provider is not installed (npm)")
    ports = [free_port() for _ in range(5)]
    issuer = f"http://127.0.0.1:{ports[0]}"
    settings = {
        "SLUICE_OIDC_ISSUER": issuer,
        "SLUICE_OIDC_CLIENT_ID": "sluice",
        "SLUICE_OIDC_CLIENT_SECRET": "the secret of these tests/+%",
        "SLUICE_OIDC_OPERATOR_CLAIM": "groups",
        "SLUICE_OIDC_OPERATOR_VALUES": "staff,admins",
        "SLUICE_OIDC_OPERATOR_READER_VALUES": "auditors",
        "SLUICE_OIDC_ROLE_CLAIM": "groups",
        "SLUICE_OIDC_ROLES": json.dumps(
            {
                "acme-viewers": {TENANT: "viewer", OTHER: "billing"},
                "acme-admins": {TENANT: "admin"},
            }
        ),
        "SLUICE_OIDC_EMAIL_TENANTS": "directory-1",
    }
    names = ("provided", "provided-too")
    urls = [
        stack.launch_gateway(name, settings, port=port, operators=operators)
        for name, port, operators in zip(names, ports[1:3], ports[3:], strict=True)
    ]
    listeners = [f"http://127.0.0.1:{port}" for port in ports[1:]]
    options = {
        "port": ports[0],
        "client_id": "sluice",
        "client_secret": settings["SLUICE_OIDC_CLIENT_SECRET"],
        "redirect_uris": [f"{url}{CALLBACK}" for url in listeners],
        "post_logout_redirect_uris": [f"{url}/console/login" for url in listeners],
        "accounts": ACCOUNTS,
    }
    process = spawn(NODE, "provider.mjs", json.dumps(options), cwd=CLIENTS)
    try:
        for name, url in zip(names, urls, strict=True):
            stack.await_gateway(name, url)
        wait_until(lambda: http_status(f"{issuer}/jwks") == 200, what="the provider being ready")
        yield Provided(stack, issuer, *urls)
    finally:
        stop(process)
        for name in names:
            stack.stop(name)


@pytest.fixture
async def members(stack: Stack) -> AsyncIterator[MemberService]:
    """The members of all tenants; at the end there are none."""
    database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
    service = MemberService(database, ChangeAnnouncer(redis))
    try:
        yield service
        async with database.writing() as transaction:
            await transaction.execute(delete(MemberRow))
        for tenant in (TENANT, OTHER):
            await service._announcer.tenant_changed(tenant)
    finally:
        await redis.aclose()
        await database.aclose()


@pytest.fixture
async def _ada(members: MemberService) -> None:
    """Make one person an owner."""
    await members.add(TENANT, subject="ada", role=Role.OWNER)


async def _authorize(client: httpx.AsyncClient, login: str, **query: str) -> str:
    """Log in at the provider, and return the URL to which it sends the browser."""
    begun = await client.get("/console/login/provider", params=query)
    assert begun.status_code == 303, begun.text
    response = await client.get(begun.headers["location"])
    while not (target := response.headers.get("location", "")).partition("?")[0].endswith(CALLBACK):
        url = str(response.url.join(target))
        response = await client.get(url)
        if response.status_code == 200:
            response = await client.post(url, data={"login": login})
    return str(target)


async def _enter(client: httpx.AsyncClient, login: str, **query: str) -> httpx.Response:
    return await client.get(await _authorize(client, login, **query))


@asynccontextmanager
async def _entered(url: str, login: str) -> AsyncIterator[Visit]:
    async with anonymous(url) as client:
        response = await _enter(client, login)
        assert response.status_code == 303, response.text
        home = await client.get("/console")
        assert home.status_code == 200, home.text
        yield Visit(client, CSRF.findall(home.text)[0])


async def test_verified_email_makes_an_invited_person_a_member_once(
    provided: Provided, members: MemberService
) -> None:
    invited = await members.add(TENANT, email="ADA@acme.example", role=Role.ADMIN)
    assert (invited.email, invited.subject) == (ADA, None)
    async with anonymous(provided.url) as client:
        for login in ("eve", "kim", "sam"):
            client.cookies.clear()
            refused = await _enter(client, login)
            assert refused.status_code == 403
            assert f"Your subject is &#34;{login}&#34;, with no verified e-mail." in refused.text
            assert (await client.get("/console")).status_code == 303
    async with _entered(provided.url, "ada") as ada:
        found = await members.get(TENANT, ADA)
        assert (found.id, found.subject) == (invited.id, "ada")
        assert found.issuer == provided.issuer
        home = (await ada.get("/console")).text
        assert "/console/keys" in home
        assert "/console/members" not in home
        # The playground runs with the rights of the member.
        answer = await ada.client.post(
            "/console/try/v1/completions",
            json={"model": MODEL, "prompt": "Hi", "max_tokens": 2},
            headers={"x-csrf-token": ada.csrf, "accept": "application/json"},
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2
        await members.set_role(TENANT, invited.id, role=Role.VIEWER)
        async with asyncio.timeout(30):
            while (await ada.get("/console/keys")).status_code != 403:
                await asyncio.sleep(0.02)
        await members.remove(TENANT, invited.id)
        async with asyncio.timeout(30):
            while (await ada.get("/console")).status_code != 303:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("login", "claims", "is_verified"),
    [
        # The provider's userinfo says that this address of Ada is verified.
        ("ada", {"email": ADA}, True),
        ("ada", {"email": "other@acme.example"}, False),
        ("ada", {"email": ADA, "email_verified": False}, False),
        # Microsoft Entra never sends `email_verified`.
        ("sam", {"email": ADA, "tid": "directory-1"}, True),
        ("sam", {"email": ADA, "tid": "directory-2"}, False),
        ("sam", {"email": ADA, "tid": "directory-1", "email_verified": "false"}, False),
    ],
)
async def test_address_is_verified_by_userinfo_or_a_trusted_directory(
    provided: Provided,
    members: MemberService,
    login: str,
    claims: dict[str, Any],
    is_verified: bool,
) -> None:
    for email in (ADA, "other@acme.example"):
        await members.add(TENANT, email=email, role=Role.VIEWER)
    await provided.tamper(**claims)
    async with anonymous(provided.url) as client:
        entered = await _enter(client, login)
        assert entered.status_code == (303 if is_verified else 403), entered.text


async def test_groups_give_roles_without_members(
    provided: Provided, members: MemberService
) -> None:
    async with anonymous(provided.url) as client:
        entered = await _enter(client, "gus")
        assert entered.headers["location"].startswith("/console/accounts")
        page = (await client.get("/console/accounts")).text
        assert re.findall(r'<td class="mono">(.*?)</td><td>(.*?)</td>', page) == [
            *sorted([(TENANT, "admin"), (OTHER, "billing")])
        ]
        chosen = {"csrf": CSRF.findall(page)[0], "tenant": TENANT}
        await client.post("/console/accounts", data=chosen)
        assert (await client.get("/console/keys")).status_code == 200
        assert (await client.get("/console/members")).status_code == 403


async def test_subject_of_another_issuer_is_another_person(
    provided: Provided, members: MemberService
) -> None:
    added = await members.add(TENANT, subject="sam", role=Role.VIEWER)
    async with _entered(provided.url, "sam"):
        pass
    async with members._database.writing() as transaction:
        row = await transaction.get_one(MemberRow, added.id)
        row.issuer = "https://elsewhere.example"
    async with anonymous(provided.url) as client:
        assert (await _enter(client, "sam")).status_code == 403


async def test_person_of_two_accounts_chooses_one(
    provided: Provided, members: MemberService
) -> None:
    await members.add(TENANT, email=ADA, role=Role.OWNER)
    await members.add(OTHER, email=ADA, role=Role.VIEWER)
    async with anonymous(provided.url) as client:
        entered = await _enter(client, "ada", next="/console/limits")
        assert entered.headers["location"] == "/console/accounts?next=%2Fconsole%2Flimits"
        # Without a choice there is no page, but the one of the choice.
        assert (await client.get("/console")).headers["location"] == "/console/accounts"
        choice = await client.get(entered.headers["location"])
        [*_, csrf] = CSRF.findall(choice.text)
        form = {"csrf": csrf, "next": "/console/limits"}
        for wrong in ("staff", "", "nothing"):
            refused = await client.post("/console/accounts", data={**form, "tenant": wrong})
            assert refused.status_code == 403
        chosen = await client.post("/console/accounts", data={**form, "tenant": OTHER})
        assert chosen.headers["location"] == "/console/limits"
        home = await client.get("/console")
        assert "/console/keys" not in home.text
        # A page of the former account is open: its forms are not for this one.
        late = await client.post("/console/accounts", data={**form, "tenant": TENANT})
        assert (late.status_code, "another session" in late.text) == (403, True)
        form["csrf"] = CSRF.findall(home.text)[0]
        await client.post("/console/accounts", data={**form, "tenant": TENANT})
        assert "/console/keys" in (await client.get("/console")).text


async def test_only_mapped_values_make_operators(
    provided: Provided, members: MemberService
) -> None:
    await members.add(TENANT, email=ADA, role=Role.OWNER)
    async with anonymous(provided.operators) as client:
        for login in ("ada", "eve", "sam"):
            client.cookies.clear()
            refused = await _enter(client, login)
            assert (refused.status_code, "not an operator" in refused.text) == (403, True)
    async with _entered(provided.operators, "sue") as sue:
        created = await sue.send("/console/tenants/new", name="Made", id="made-by-sue")
        assert created.status_code == 303, created.text
        # A person of the staff is no customer, also with the cookie of the other console.
        token = sue.client.cookies["sluice-operators"]
        async with anonymous(provided.url) as client:
            client.cookies["sluice"] = token
            assert (await client.get("/console")).status_code == 303
    entries = await AuditService(members._database).page_of(
        "made-by-sue", action=None, before=None, limit=1
    )
    assert [each.actor for each in entries.entries] == ["operator:oidc:sue"]
    async with _entered(provided.operators, "ron") as ron:
        assert (await ron.send("/console/tenants/new", name="x", id="by-ron")).status_code == 403
        # Logging out needs no right to change something.
        assert (await ron.send("/console/logout")).status_code == 200
        assert (await ron.get("/console")).status_code == 303


async def test_logins_belong_to_one_browser_and_end_once(
    provided: Provided, members: MemberService
) -> None:
    await members.add(TENANT, email=ADA, role=Role.OWNER)
    async with anonymous(provided.url) as client, anonymous(provided.url) as victim:
        target = await _authorize(client, "ada")
        # A link with the attacker's login would log the victim in as the attacker.
        for cookie in (None, "guessed"):
            if cookie is not None:
                state = parse_qs(urlsplit(target).query)["state"][0]
                name = re.sub(r"[^A-Za-z0-9]", "", state[:8])
                victim.cookies[f"sluice-attempt-{name}"] = cookie
            refused = await victim.get(target)
            assert (refused.status_code, "another browser" in refused.text) == (400, True)
            assert (await victim.get("/console")).status_code == 303
        # The attempt has ended it.
        assert (await client.get(target)).status_code == 400
        client.cookies["sluice"] = "planted"
        target = await _authorize(client, "ada")
        wrong = re.sub(r"state=[^&]+", "state=wrong", target)
        assert (await client.get(wrong)).status_code == 400
        # Another gateway than the one at which the login began finishes it.
        entered = await client.get(target.replace(provided.url, provided.other_url))
        assert (entered.status_code, entered.headers["location"]) == (303, "/console"), entered.text
        tokens = {each.value for each in client.cookies.jar if each.name == "sluice"}
        assert len(tokens - {"planted"}) == 1
        assert (await client.get(target)).status_code == 400
        # The same code with a new state.
        again = await _authorize(client, "ada")
        code = re.search(r"code=([^&]+)", target)
        assert code is not None
        replayed = await client.get(re.sub(r"code=[^&]+", f"code={code[1]}", again))
        assert (replayed.status_code, "rejected the login" in replayed.text) == (401, True)
        # A login of one console is none of the other.
        target = await _authorize(client, "ada")
        operators = target.replace(provided.url, provided.operators)
        assert (await client.get(operators)).status_code == 400


@all_cases(
    "changes",
    [
        {"nonce": "other"},
        {"nonce": None},
        {"aud": "another-client"},
        {"aud": ["sluice", "another-client"], "azp": "another-client"},
        {"iss": "https://elsewhere.example"},
        {"exp": 1_700_000_000},
        {"iat": 9_000_000_000},
        {"sub": ""},
        {"at_hash": "AAAAAAAAAAAAAAAAAAAAAA"},
    ],
)
async def test_id_tokens_are_checked(
    provided: Provided, _ada: None, changes: dict[str, Any]
) -> None:
    async with anonymous(provided.url) as client:
        target = await _authorize(client, "ada")
        await provided.tamper(**changes)
        refused = await client.get(target)
        assert (refused.status_code, "ID token" in refused.text) == (401, True), refused.text
        assert (await client.get("/console")).status_code == 303


async def test_keys_of_the_provider_may_rotate(provided: Provided, _ada: None) -> None:
    async with anonymous(provided.url) as client:
        await _enter(client, "ada")
        target = await _authorize(client, "ada")
        await provided.tamper(key="second")
        assert (await client.get(target)).status_code == 303


@all_cases(
    ("given", "followed"),
    [
        ("/console/keys?after=key_1", "/console/keys?after=key_1"),
        ("https://evil.example/console", "/console"),
        ("//evil.example", "/console"),
    ],
)
async def test_provider_leads_only_to_pages_of_the_console(
    provided: Provided, _ada: None, given: str, followed: str
) -> None:
    async with anonymous(provided.url) as client:
        entered = await _enter(client, "ada", next=given)
        assert entered.headers["location"] == followed


async def test_errors_of_the_provider_are_shown(provided: Provided) -> None:
    async with anonymous(provided.url) as client:
        refused = await _enter(client, "")
        assert (refused.status_code, "(access_denied)" in refused.text) == (401, True)
        target = await _authorize(client, "")
        mixed_up = re.sub(r"iss=[^&]+", "iss=https%3A%2F%2Fevil.example", target)
        refused = await client.get(mixed_up.replace("error=access_denied", "code=stolen"))
        assert "another identity provider" in refused.text
        await client.get("/console/login/provider")
        assert len([name for name in client.cookies if name.startswith("sluice-attempt")]) == 1


async def test_console_without_keys_and_with_a_dead_provider(
    database_url: str, redis_server: RedisServer
) -> None:
    settings: Any = {
        "redis_url": redis_server.url,
        "database_url": database_url,
        "cache_salt_secret": "the salt of these tests",
        "oidc_issuer": "http://127.0.0.1:9",
        "oidc_client_id": "sluice",
        "console_key_login": False,
        "failed_logins_per_minute": 2,
    }
    async with running_management(Settings(**settings)) as management:
        transport = httpx.ASGITransport(management.app)
        async with httpx.AsyncClient(transport=transport, base_url="https://gateway") as client:
            form = await client.get("/console/login")
            assert "API key" not in form.text
            failed = await client.get("/console/login/provider")
            assert (failed.status_code, "does not respond" in failed.text) == (503, True)
            fields = {"csrf": client.cookies["__Host-sluice-login-customers"], "key": "sk-x"}
            refused = await client.post("/console/login", data=fields)
            assert (refused.status_code, "no keys" in refused.text) == (401, True)
            await client.get("/console/login/provider")
            # Each beginning needs memory in Redis.
            assert (await client.get("/console/login/provider")).status_code == 429


@pytest.mark.asyncio(loop_scope="session")
async def test_people_log_in_and_out_with_a_browser(
    provided: Provided, open_tab: Callable[..., Awaitable[Tab]]
) -> None:
    database, redis = (
        Database(provided.stack.database_url),
        connect(provided.stack.redis.url, max_connections=1),
    )
    service = MemberService(database, ChangeAnnouncer(redis))
    try:
        await service.add(TENANT, subject="sue", role=Role.DEVELOPER)
        await service.add(OTHER, subject="sue", role=Role.DEVELOPER)
    finally:
        await redis.aclose()
        await database.aclose()
    tab = await open_tab(provided.url)
    page = tab.page
    await tab.open("/console/limits")
    await page.get_by_role("link", name="Log in with your identity provider").click()
    await page.get_by_label("Account").fill("sue")
    await page.get_by_role("button", name="Enter").click()
    await page.get_by_role("button", name=f"Open {TENANT}").click()
    await page.get_by_role("heading", name="Limits").wait_for()
    await page.get_by_text(TENANT, exact=True).first.click()
    await page.get_by_role("link", name="Change the account").click()
    await page.get_by_role("button", name=f"Open {OTHER}").click()
    await page.get_by_text(OTHER, exact=True).first.click()
    # The operators' console needs no password now, but a login of its own.
    await page.goto(f"{provided.operators}/console")
    await page.get_by_role("link", name="Log in with your identity provider").click()
    await page.get_by_text("operators", exact=True).wait_for()
    await page.get_by_text("sue", exact=True).first.click()
    await page.get_by_role("button", name="Log out everywhere").click()
    await page.get_by_role("button", name="Leave").click()
    await page.wait_for_url(f"{provided.operators}/console/login*")
    await tab.open("/console")
    await page.get_by_role("link", name="Log in with your identity provider").click()
    await page.get_by_label("Account").wait_for()
