"""The reference at `/docs` in a browser: search, languages, copies, and requests."""

import asyncio
import json
import shlex
from collections.abc import Awaitable, Callable

import pytest

from tests.gateway.console.conftest import TENANT, Tab
from tests.support.stack import MODEL, Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[..., Awaitable[Tab]]


async def test_people_search_choose_a_language_and_try_a_request(
    stack: Stack, open_tab: OpenTab
) -> None:
    tab = await open_tab(stack.url, permissions=["clipboard-read", "clipboard-write"])
    page = tab.page
    await tab.open("/docs")
    await page.keyboard.press("/")
    await page.keyboard.type("mirostat_tau")
    await page.locator("#found a").first.click()
    await page.wait_for_url("**/docs/completions#**.mirostat_tau")
    # The parameter is in a group that a reader has to open otherwise.
    await page.locator("dt:target:visible").wait_for()
    await page.get_by_label("Search").fill("context_length")
    await page.locator("#found a").first.click()
    await page.get_by_role("heading", name="context_length_exceeded").wait_for()
    # In the sidebar, by the operation's name in OpenAI's path.
    await page.get_by_text("Completions", exact=True).click()
    await page.get_by_role("link", name="POST /v1/completions", exact=True).click()
    first = page.locator("section").first
    curl = await first.locator("pre.curl").first.inner_text()
    asked = json.loads(shlex.split(curl)[-1])
    assert asked["prompt"] == "Once upon a time"
    await first.get_by_role("radio", name="Python").first.check(force=True)
    assert not await first.locator("pre.curl").first.is_visible()
    await first.get_by_role("button", name="Copy").first.click()
    copied = await page.evaluate("navigator.clipboard.readText()")
    compile(copied, "python", "exec")
    assert "client.completions.create(" in copied
    # The choice holds for the other pages.
    await tab.open("/docs/files")
    python = page.locator("pre.python").first
    assert "httpx.get(" in await python.inner_text()
    assert await python.is_visible()

    key = await asyncio.to_thread(stack.key, TENANT)
    await tab.open("/docs/completions")
    first = page.locator("section").first
    await first.get_by_text("Try it").click()
    await first.get_by_label("Your key").fill(key)
    await first.get_by_label("Body").fill(json.dumps(asked | {"model": MODEL, "max_tokens": 3}))
    await first.get_by_role("button", name="Send").click()
    await first.get_by_text("Status 200 in").wait_for()
    answer = json.loads(await first.locator("form pre").inner_text())
    assert answer["usage"]["completion_tokens"] == 3


async def test_reference_sends_requests_with_the_rights_of_a_session(
    stack: Stack, open_tab: OpenTab
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=frozenset({"usage", "completions"}))
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    await tab.open("/docs/models")
    first = tab.page.locator("section").first
    await first.get_by_text("Try it").click()
    await first.get_by_text("With the rights of key_").wait_for()
    await first.get_by_role("button", name="Send").click()
    await first.get_by_text("Status 200 in").wait_for()
    assert MODEL in await first.locator("form pre").inner_text()
