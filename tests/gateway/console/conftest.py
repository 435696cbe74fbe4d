"""A deployment for all tests of the console, and a browser."""

import asyncio
import json
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import (
    Browser,
    ConsoleMessage,
    Dialog,
    Error,
    Page,
    async_playwright,
)

from gateway.accounts.aliases import AliasService
from gateway.accounts.tenants.service import TenantService
from gateway.billing.credits.service import CreditService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.claims import Claim
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import AdapterRow
from gateway.platform.redis_client import connect
from gateway.records.adapters import Adapter, AdapterState
from gateway.records.limits import LimitName
from gateway.records.records import Billing
from gateway.records.scopes import TENANT_SCOPES, Scope
from gateway.records.times import utc_now
from tests.support.ledger import use
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import free_port
from tests.support.secret_box import ENCRYPTION_KEY
from tests.support.stack import MODEL, Stack, running_stack

CHROMIUM: Final = shutil.which("chromium-headless-shell")
PATIENCE_MS: Final = 30_000
TENANT, OTHER = "acme", "other"
HOSTILE: Final = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
ISSUER: Final = {
    "name": "Example Tokens GmbH",
    "address": ["Long Street 1", "10115 Berlin"],
    "tax_id": "DE123456789",
    "tax_percent": 19,
    "note": "Pay within 14 days.",
}
SESSIONS: Final = [
    {
        "when": "weather in Oslo",
        "turns": [
            {
                "reasoning": "The tool knows it.",
                "calls": [{"name": "weather", "arguments": {"city": "Oslo"}}],
            },
            {"reasoning": "It said so.", "text": "It rains."},
        ],
    }
]
"""What the model answers in a chat about the weather in Oslo."""
CSRF: Final = re.compile(r'name="csrf" value="([^"]+)"')


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """A gateway, a worker with the scripted engine, and two tenants with usage."""
    with console_stack() as stack:
        yield stack


@contextmanager
def console_stack(database_url: str | None = None) -> Iterator[Stack]:
    """Start what `stack` has, by default on SQLite."""
    with running_stack(database_url=database_url) as stack:
        settings = {
            "SLUICE_ENCRYPTION_KEYS": ENCRYPTION_KEY,
            "SLUICE_WEBHOOK_ALLOW_PRIVATE": "1",
            "SLUICE_INVOICE_ISSUER": json.dumps(ISSUER),
            "SLUICE_DASHBOARD_URL": "https://grafana.example/d/all",
            "SLUICE_TRACES_URL": "https://grafana.example/explore",
            "SLUICE_TENANT_DASHBOARD_URL": "https://grafana.example/d/t?var-tenant={tenant}",
            "SLUICE_MODEL_DASHBOARD_URL": "https://grafana.example/d/m?var-model={model}",
            "SLUICE_TRACE_URL": "https://traces.example/find?id={request_id}",
        }
        url = stack.launch_gateway("gateway", settings, port=free_port())
        sessions = stack.directory / "sessions.json"
        sessions.write_text(json.dumps(SESSIONS))
        stack.start_worker(
            SLUICE_ENGINE="scripted",
            SLUICE_SCRIPTED_STEP_SECONDS="0.005",
            SLUICE_SCRIPTED_SESSIONS=str(sessions),
            SLUICE_ADAPTER_SLOTS="2",
        )
        stack.await_gateway("gateway", url)
        stack.key(TENANT, scopes=TENANT_SCOPES)
        stack.key(OTHER, scopes=TENANT_SCOPES)
        asyncio.run(_prepare(stack))
        yield stack


async def _prepare(stack: Stack) -> None:
    """Let both tenants have usage, and names and reasons that are hostile to pages."""
    database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
    try:
        tenants = TenantService(database, ChangeAnnouncer(redis))
        limits = {LimitName.BUDGET: 10**12, LimitName.STORED_BYTES: 2**28}
        name = f"Acme {HOSTILE}"
        await tenants.update(TENANT, name=name, billing=Billing.PREPAID, limits=limits)
        credit = CreditService(database, ChangeAnnouncer(redis))
        await credit.grant(TENANT, 10**11, note=f"Note {HOSTILE}")
        for days in range(12):
            at = utc_now() - timedelta(days=days, minutes=5)
            await use(database, TENANT, 1_250_000 * (1 + days % 4), at=at, is_prepaid=False)
        await use(database, OTHER, 77_000_000, is_prepaid=False)
        for tenant in (TENANT, OTHER):
            await fail_adapter(database, tenant, "broken")
        aliases = AliasService(database, ChangeAnnouncer(redis))
        await aliases.put(f"alias {HOSTILE}", weights={HOSTILE: 1}, fallback=f"f {HOSTILE}")
        sunset = utc_now() + timedelta(days=100)
        await aliases.put(f"old {HOSTILE}", weights={MODEL: 1}, sunset_at=sunset)
    finally:
        await redis.aclose()
        await database.aclose()


async def fail_adapter(database: Database, tenant_id: str, name: str, **changes: Any) -> str:
    """Store an adapter whose validation has failed, apart from these changes; return its id."""
    now = utc_now()
    adapter = Adapter(
        id=f"adp_{secrets.token_hex(8)}",
        tenant_id=tenant_id,
        name=name,
        base_model=MODEL,
        source="/nowhere",
        is_shared=False,
        created_at=now,
    )
    async with database.writing() as transaction:
        transaction.add(AdapterRow(**asdict(adapter), is_stored=False, claimed_until=now))
    claim = Claim(database, AdapterRow.claimed_until, adapter.id, now)
    await claim.change(**{"state": AdapterState.FAILED, "reason": f"Why {HOSTILE}"} | changes)
    return adapter.id


@dataclass
class Visit:
    """A client that is logged in to a console, like a browser without JavaScript."""

    client: httpx.AsyncClient
    csrf: str = ""

    async def get(self, path: str, **options: Any) -> httpx.Response:
        """Open a page."""
        return await self.client.get(path, **options)

    async def send(self, path: str, **fields: Any) -> httpx.Response:
        """Send a form with the token of the session, and load what answers it."""
        response = await self.client.post(path, data={"csrf": self.csrf, **fields})
        target = response.headers.get("location", "")
        return await self.client.get(target) if "shown=" in target else response


@asynccontextmanager
async def anonymous(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client without a session."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
        yield client


async def log_in(client: httpx.AsyncClient, key: str, **fields: str) -> httpx.Response:
    """Send the login form."""
    form = await client.get("/console/login")
    [token] = CSRF.findall(form.text)
    return await client.post("/console/login", data={"csrf": token, "key": key, **fields})


@asynccontextmanager
async def visiting(url: str, key: str) -> AsyncIterator[Visit]:
    """Log in with a key."""
    async with anonymous(url) as client:
        response = await log_in(client, key)
        assert response.status_code == 303, response.text
        home = await client.get("/console")
        assert home.status_code == 200, home.text
        yield Visit(client, CSRF.findall(home.text)[0])


@pytest.fixture
async def visit(stack: Stack) -> AsyncIterator[Visit]:
    """The owner of the first tenant, logged in."""
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    async with visiting(stack.url, key) as visit:
        yield visit


@pytest.fixture
async def operator(stack: Stack) -> AsyncIterator[Visit]:
    """An operator, logged in on the operators' port."""
    key = await asyncio.to_thread(stack.key, "staff", scopes=frozenset({Scope.ADMIN}))
    async with visiting(stack.operators, key) as visit:
        yield visit


@dataclass
class Tab:
    """A page in a browser; what its scripts reported."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)

    async def open(self, path: str) -> None:
        """Open a page."""
        await self.page.goto(f"{self.url}{path}")

    async def press(self, role: Literal["button", "link"], text: str, /, **fields: str) -> None:
        """Fill in fields by their names, then press a link or button, with the keyboard alone."""
        for field_name, value in fields.items():
            await self.page.locator(f'main [name="{field_name}"]').focus()
            # In a list, typing selects the option that begins so.
            await self.page.keyboard.type(value)
        target = self.page.get_by_role(role, name=text, exact=True)
        await target.focus()
        async with self.page.expect_event("load"):
            await self.page.keyboard.press("Enter")

    async def log_in(self, key: str) -> None:
        """Fill in the login form with the keyboard alone."""
        await self.open("/console/login")
        await self.page.locator("#f-key:focus").wait_for()
        await self.page.keyboard.type(key)
        await self.page.keyboard.press("Enter")
        await self.page.wait_for_url(re.compile(r"/console$"))


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Debian's Chromium, without a window."""
    if CHROMIUM is None:
        pytest.skip("chromium-headless-shell is not installed")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def open_tab(browser: Browser) -> AsyncIterator[Callable[..., Awaitable[Tab]]]:
    """Opens tabs in new profiles. At the end, none may have reported an error."""
    tabs: list[Tab] = []

    async def open_one(url: str, **options: Any) -> Tab:
        context = await browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        tab = Tab(await context.new_page(), url)
        listen(tab)
        tabs.append(tab)
        return tab

    yield open_one
    for tab in tabs:
        await tab.page.context.close()
        assert tab.complaints == []


def listen(tab: Tab) -> None:
    """Keep what the scripts of a page report."""

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            tab.complaints.append(message.text)

    def on_error(error: Error) -> None:
        tab.complaints.append(str(error))

    def on_dialog(dialog: Dialog) -> None:
        tab.complaints.append(f"dialog {dialog.message}")

    tab.page.on("console", on_console)
    tab.page.on("pageerror", on_error)
    tab.page.on("dialog", on_dialog)
