"""Lists: what a person finds, in which order, and on a phone."""

import asyncio
import html
import re
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
from playwright.async_api import ViewportSize

from contract import keys, messages
from contract.messages import WorkerCard, WorkerState
from gateway.accounts.keys.service import KeyService
from gateway.console.lists import ROWS
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from gateway.records.adapters import AdapterState
from gateway.records.scopes import TENANT_SCOPES, Scope
from gateway.records.times import to_ms, utc_now
from tests.gateway.conftest import eventually, gateway_client
from tests.gateway.console.conftest import HOSTILE, TENANT, Tab, Visit, fail_adapter, visiting
from tests.gateway.console.crawl import opened_pages
from tests.gateway.console.pages import FIND_CLIPPED
from tests.support.ledger import use
from tests.support.stack import MODEL, Stack

OpenTab = Callable[..., Awaitable[Tab]]
PHONE: ViewportSize = {"width": 390, "height": 844}


async def _spend(stack: Stack, tenant: str, count: int) -> None:
    """Store keys of a tenant, each of which has spent more than the one before."""
    database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
    try:
        service = KeyService(database, ChangeAnnouncer(redis))
        for number in range(count):
            key = (await service.create(tenant, name=f"key {number:03}")).record
            await use(database, tenant, 1_000_000 * (number + 1), credential_id=key.id)
    finally:
        await redis.aclose()
        await database.aclose()


def _names(page: str) -> list[str]:
    return re.findall(r">(key \d\d\d)<", page)


async def test_lists_are_sorted_and_searched_beyond_one_page(stack: Stack) -> None:
    owner = await asyncio.to_thread(stack.key, "lists", scopes=TENANT_SCOPES)
    await _spend(stack, "lists", ROWS + 5)
    last = f"key {ROWS + 4:03}"
    async with visiting(stack.url, owner) as visit:
        page = (await visit.get("/console/keys")).text
        links = {
            html.unescape(href) for href in re.findall(r'href="(\?[^"]*|/[^"]*sort[^"]*)"', page)
        }
        assert "/console/keys?sort=-spend-this-month" in links
        page = (await visit.get("/console/keys?sort=-spend-this-month")).text
        assert _names(page)[:2] == [last, f"key {ROWS + 3:03}"]
        assert 'aria-sort="descending"' in page
        [following] = re.findall(r'rel="next" href="([^"]+)"', page)
        second = (await visit.get(html.unescape(following))).text
        assert _names(second) == [f"key {number:03}" for number in (4, 3, 2, 1, 0)]
        assert _names((await visit.get("/console/keys?sort=name")).text)[0] == "key 000"
        assert _names((await visit.get("/console/keys?find=Y 007")).text) == ["key 007"]
        refused = await visit.get("/console/keys?sort=size")
        assert (refused.status_code, "spend-this-month" in refused.text) == (400, True)
        # The dearest key comes first without a click.
        usage = (await visit.get("/console/usage?by=key")).text
        assert _names(usage.partition("<thead>")[2])[:2] == [last, f"key {ROWS + 3:03}"]
        usage = (await visit.get("/console/usage?by=key&sort=key")).text
        assert _names(usage.partition("<thead>")[2])[0] == "key 000"


async def test_the_search_box_opens_what_it_finds(stack: Stack, operator: Visit) -> None:
    owner = await asyncio.to_thread(stack.key, "found", scopes=TENANT_SCOPES)
    database = Database(stack.database_url)
    await use(database, "found", 5)
    await database.aclose()
    async with visiting(stack.url, owner) as visit:
        listed = (await visit.get("/console/requests")).text
        [request_id] = re.findall(r'href="/console/requests/([^"?]+)"', listed)
        made = await visit.send("/console/keys/new", name="Needle", scopes="usage")
        stack.note_key(re.findall(r"sk-\w{12}-\w{40}", made.text)[0])

        async def target(text: str, visitor: Visit = visit) -> str:
            found = await visitor.get("/console/search", params={"q": text})
            return str(found.headers.get("location", ""))

        assert await target(request_id) == f"/console/requests/{request_id}"
        assert (await target("needl")).startswith("/console/keys/key_")
        assert (await target(owner[3:15])).startswith("/console/keys/key_")
        assert await target(MODEL) == f"/console/playground?model={MODEL}"
        assert await target("invoi") == "/console/invoices"
        several = (await visit.get("/console/search?q=key")).text
        assert several.count('class="record"') > 1
        assert "Nothing was found" in (await visit.get("/console/search?q=haystack")).text
    assert await target("found", operator) == "/console/tenants/found"
    key_page = await target(owner[3:15], operator)
    assert key_page.startswith("/console/tenants/found/keys/key_")
    # Nobody finds what another tenant has.
    other = await asyncio.to_thread(stack.key, "finder", scopes=TENANT_SCOPES)
    async with visiting(stack.url, other) as visit:
        for text in ("needl", request_id, owner[3:15]):
            assert "Nothing was found" in (await visit.get(f"/console/search?q={text}")).text


async def test_customers_see_why_requests_were_rejected(stack: Stack) -> None:
    owner = await asyncio.to_thread(stack.key, "rejected", scopes=TENANT_SCOPES)
    soon = utc_now() + timedelta(seconds=2)
    expired = await asyncio.to_thread(stack.key, "rejected", expires_at=soon)
    neighbour = await asyncio.to_thread(
        stack.key, "rejected", scopes=frozenset({Scope.COMPLETIONS})
    )
    body = {"model": MODEL, "prompt": "a secret prompt", "max_tokens": 1}
    async with gateway_client(stack.url, owner) as client:
        for wrong in ({"temperature": 9}, {"model": "nothing"}, {"prompt": {"a secret": 1}}):
            await client.post("/v1/completions", json=body | wrong)
        assert (await client.get("/v1/limits/refusals")).json()["data"] == []
    await asyncio.sleep(max((soon - utc_now()).total_seconds(), 0))
    async with gateway_client(stack.url, expired) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 401
    async with visiting(stack.url, owner) as visit:

        async def all_are_listed() -> bool:
            page = (await visit.get("/console/rejected")).text
            codes = set(re.findall(r'href="/docs/errors/(\w+)"', page))
            return codes == {"invalid_value", "model_not_found", "expired_token"}

        await eventually(all_are_listed, what="rejected requests being listed")
        page = (await visit.get("/console/rejected")).text
        assert "&#39;temperature&#39; must be" in page
        assert "secret" not in page
    async with visiting(stack.url, neighbour) as visit:
        page = (await visit.get("/console/rejected")).text
        assert "No request has been rejected" in page


async def test_a_receipt_explains_its_error_and_shows_the_request(stack: Stack) -> None:
    owner = await asyncio.to_thread(stack.key, "explained", scopes=TENANT_SCOPES)
    database = Database(stack.database_url)
    found = {
        "outcome": "failed",
        "code": "engine_dead",
        "is_streamed": True,
        "endpoint": "messages",
    }
    await use(database, "explained", 0, credential_id=f"key_{owner[3:15]}", **found)  # type: ignore[arg-type]
    await fail_adapter(database, "explained", "verse", state=AdapterState.READY, rank=1)
    await database.aclose()
    async with visiting(stack.url, owner) as visit:
        listed = (await visit.get("/console/requests?outcome=failures")).text
        [path, *_] = re.findall(r'href="(/console/requests/[^"?]+)"', listed)
        page = html.unescape((await visit.get(path)).text)
        assert 'href="/docs/errors/engine_dead"' in page
        assert "<strong>What to do:</strong> Retry." in page
        assert '"stream":true' in page.partition("/v1/messages")[2]
        asked = await visit.get(path, headers={"accept": "application/json"})
        assert (asked.json()["code"], asked.json()["cost_micros"]) == ("engine_dead", 0)
        # Adapters are models of the ledger, too.
        redis = connect(stack.redis.url, max_connections=1)
        await ChangeAnnouncer(redis).adapters_changed()
        await redis.aclose()

        async def is_offered() -> bool:
            page = (await visit.get("/console/usage")).text
            return f'<option value="{MODEL}:verse">' in page

        await eventually(is_offered, what="the adapter being offered")
        # The same thirty days as those of the overview.
        first = f"{utc_now() - timedelta(days=29):%Y-%m-%d}"
        for query in ("", "?range=30d"):
            assert f'value="{first}"' in (await visit.get(f"/console/usage{query}")).text
        # No invoices of months before the tenant.
        months = re.findall(
            r"/console/invoices/([\d-]+)\"", (await visit.get("/console/invoices")).text
        )
        assert months == [f"{utc_now():%Y-%m}"]
        assert ">open</td>" in (await visit.get("/console/invoices")).text.replace("</span>", "")


async def test_a_silent_worker_stays_in_the_list_and_needs_attention(
    stack: Stack, operator: Visit
) -> None:
    redis = connect(stack.redis.url, max_connections=1)
    card = WorkerCard("w-stuck", MODEL, WorkerState.READY, "vllm", created=1, max_sequences=9)
    at_ms = to_ms(utc_now()) - 90_000
    entry = b"%d %b" % (at_ms, messages.encode(card))
    try:
        await redis.hset(keys.last_seen(MODEL), "w-stuck", entry)
        page = (await operator.get("/console/models")).text
        assert re.search(r"w-stuck</th>.*?silent for 1 min 3\d s", page, re.DOTALL)
        home = (await operator.get("/console")).text
        assert f"The worker w-stuck of {MODEL} is silent for 1 min" in home
        assert re.search(r"workers: 1, for", home)
    finally:
        await redis.hdel(keys.last_seen(MODEL), "w-stuck")
        await redis.aclose()


@pytest.mark.asyncio(loop_scope="session")
async def test_times_are_those_of_the_browser_with_utc_as_their_title(
    stack: Stack, open_tab: OpenTab
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url, timezone_id="Asia/Kolkata")
    await tab.log_in(key)
    await tab.open("/console/requests")
    time = tab.page.locator("main time").first
    title, shown = await time.get_attribute("title") or "", await time.inner_text()
    assert title.endswith(" UTC")
    assert title[:19] != shown
    assert title[14:16] != shown[14:16]
    assert "(UTC)" not in await tab.page.locator("thead").inner_text()


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("listener", ["customers", "operators"])
async def test_every_page_fits_a_phone(stack: Stack, open_tab: OpenTab, listener: str) -> None:
    is_operator = listener == "operators"
    scopes = frozenset({Scope.ADMIN}) if is_operator else TENANT_SCOPES
    tenant = "staff" if is_operator else TENANT
    key = await asyncio.to_thread(stack.key, tenant, scopes=scopes)
    tab = await open_tab(stack.operators if is_operator else stack.url, viewport=PHONE)
    await tab.log_in(key)
    page, wrong = tab.page, list[str]()
    async for path in opened_pages(tab, "/console"):
        overflow = await page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        wrong += [f"{path}: {overflow} pixels too wide"] if overflow > 0 else []
        wrong += [f"{path}: clipped: {each}" for each in await page.evaluate(FIND_CLIPPED)]
        if not await page.locator("main").is_visible():
            wrong.append(f"{path}: blank")
        wide = await page.evaluate(
            "[...document.querySelectorAll('.list')].filter("
            "each => each.scrollWidth > each.clientWidth).map(each => each.ariaLabel)"
        )
        wrong += [f"{path}: the list {each} is scrolled sideways" for each in wide]
    assert wrong == []
    assert HOSTILE not in await page.content()
