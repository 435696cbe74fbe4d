"""The console in a real browser: whole flows by keyboard, accessibility, and hostile names."""

import asyncio
import json
import re
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

from gateway.records.scopes import ROLE_SCOPES, TENANT_SCOPES, Role, Scope
from tests.gateway.conftest import complete, gateway_client
from tests.gateway.console.conftest import HOSTILE, TENANT, Tab, visiting
from tests.gateway.console.crawl import (
    FIND_LOCAL_TIMES,
    add_axe,
    check_page,
    opened_pages,
    serious_problems,
)
from tests.support.cases import all_cases
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[..., Awaitable[Tab]]
REASONING: Final[dict[str, dict[str, object]]] = {
    "chat/completions": {"reasoning_effort": "high"},
    "messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1200},
    "responses": {"reasoning": {"effort": "high"}},
}
"""What lets the model reason before it answers, by endpoint."""


@pytest.mark.slow
@pytest.mark.parametrize("listener", ["customers", "operators"])
async def test_every_page_is_accessible_at_every_size(
    stack: Stack, open_tab: OpenTab, listener: str
) -> None:
    is_operator = listener == "operators"
    scopes = frozenset({Scope.ADMIN}) if is_operator else TENANT_SCOPES
    key = await asyncio.to_thread(stack.key, "staff" if is_operator else TENANT, scopes=scopes)
    url = stack.operators if is_operator else stack.url
    await _add_hostile_names(stack)
    tab = await open_tab(url, color_scheme="dark")
    await add_axe(tab)
    await tab.open("/console/login")
    assert await serious_problems(tab) == []
    await tab.log_in(key)
    public = [
        "/",
        "/docs",
        "/docs/errors/requests",
        *([] if is_operator else ["/docs/completions"]),
    ]
    seen = set[str]()
    async for path in opened_pages(tab, "/console", *public):
        assert await tab.page.evaluate(FIND_LOCAL_TIMES) == [], path
        await check_page(tab)
        if re.search(r"/invoices/2", path):
            await _check_print(tab)
        if not seen:
            # One stylesheet: one page shows whether the colors of the other scheme suffice.
            await tab.page.emulate_media(color_scheme="light")
            assert await serious_problems(tab) == [], path
            await tab.page.emulate_media(color_scheme="dark")
        seen.add(path)
    assert len(seen) > 8
    assert ("/status" in seen) is not is_operator


async def _check_print(tab: Tab) -> None:
    """Check that a page fits the width of A4 between its margins, without menus and buttons."""
    await tab.page.set_viewport_size({"width": 680, "height": 900})
    await tab.page.emulate_media(media="print")
    found = await tab.page.evaluate(
        "[...document.querySelectorAll('nav, header, button, .button, table')].filter("
        "each => each.checkVisibility()).map(each => [each.tagName, each.scrollWidth])"
    )
    # Without usage in the month, there is no table either.
    assert {name for name, _ in found} <= {"TABLE"}
    assert max((width for _, width in found), default=0) <= 680
    await tab.page.emulate_media(media="screen")


async def _add_hostile_names(stack: Stack) -> None:
    """Store a name that would run a script in a page that does not escape it."""
    owner = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    async with visiting(stack.url, owner) as visit:
        created = await visit.send(
            "/console/keys/new", name=f"key {HOSTILE}"[:100], scopes="usage", models="<b>m</b>"
        )
        assert created.status_code == 200, created.text
        stack.note_key(re.findall(r"sk-\w+-\w{40}", created.text)[0])
        assert "<script>alert" not in created.text


async def test_owner_makes_rotates_and_revokes_a_key_with_the_keyboard(
    stack: Stack, open_tab: OpenTab
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    page, press = tab.page, tab.page.keyboard.press
    # The first stop skips the menu.
    await press("Tab")
    assert await page.evaluate("document.activeElement.textContent") == "Skip to the content"
    await page.get_by_role("link", name="Keys", exact=True).focus()
    await press("Enter")
    await page.get_by_role("link", name="Create a key").focus()
    await press("Enter")
    await page.get_by_label("Name").focus()
    await page.keyboard.type("by keyboard")
    await page.get_by_label("Requests per minute").focus()
    await page.keyboard.type("many")
    await press("Enter")
    # Said once, at the field, and with its name on the page.
    fault = await page.locator("#e-limit_requests_per_minute").text_content()
    assert fault == (
        "“Requests per minute” must be a whole number, 'none' or empty. Given: \"many\"."
    )
    assert (await page.content()).count("must be a whole number") == 1
    # Chromium itself reports the status of the page.
    [complaint] = tab.complaints
    assert "400 (Bad Request)" in complaint
    tab.complaints.clear()
    # What was typed is still there.
    assert await page.get_by_label("Name").input_value() == "by keyboard"
    await page.get_by_label("Requests per minute").fill("7")
    await press("Enter")
    secret = await page.locator(".secret").text_content() or ""
    stack.note_key(secret)
    assert re.fullmatch(r"sk-\w{12}-\w{40}", secret)
    await page.get_by_role("button", name="Copy").first.click()
    await page.get_by_role("button", name="Copied").wait_for()
    await page.get_by_role("link", name="To the keys").click()
    assert secret not in await page.content()
    await page.get_by_role("link", name="by keyboard", exact=True).click()
    assert await page.get_by_label("Requests per minute").input_value() == "7"
    await page.get_by_role("link", name="Rotate").click()
    await page.get_by_role("button", name="Rotate the key").click()
    rotated = await page.locator(".secret").text_content() or ""
    stack.note_key(rotated)
    assert rotated != secret
    await page.get_by_role("link", name="To the keys").click()
    await page.get_by_role("link", name="by keyboard", exact=True).click()
    await page.get_by_role("link", name="Revoke").click()
    await page.get_by_role("button", name="Revoke the key").click()
    await page.get_by_text("The key is revoked.").wait_for()
    await page.get_by_role("link", name="Audit log").click()
    actions = await page.locator(".record td:nth-child(2)").all_text_contents()
    assert actions[:3] == ["key.revoke", "key.rotate", "key.create"]


@pytest.mark.slow
async def test_owner_manages_projects_members_and_webhooks_with_the_keyboard(
    stack: Stack, open_tab: OpenTab
) -> None:
    key = await asyncio.to_thread(stack.key, "flows", scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    press, row = tab.press, tab.page.locator("tbody tr:not(.lower)")

    await press("link", "Projects")
    await press("link", "Create a project")
    await press("button", "Create the project", name="Shop", limit_tokens_per_day="5000")
    await press("link", "Shop")
    assert await tab.page.get_by_label("Tokens per day").input_value() == "5000"
    await press("link", "Archive")
    await press("button", "Archive the project")
    assert "archived" in (await row.all_text_contents())[0]

    await press("link", "Members")
    for subject, role in (("flora", "owner"), ("fred", "viewer")):
        await press("button", "Add the member", subject=subject, name=subject, role=role)
    await press("link", "fred")
    await press("button", "Change the role", role="billing")
    assert "billing" in await row.filter(has_text="fred").inner_text()
    await press("link", "fred")
    await tab.page.get_by_text("Remove the member").focus()
    await tab.page.keyboard.press("Enter")
    await press("button", "Remove fred")
    assert await row.filter(has_text="fred").count() == 0

    await press("link", "Webhooks")
    await press("button", "Register", url="http://127.0.0.1:9/hook", thresholds="50 90")
    await press("link", "To the webhook")
    await press("button", "Send a test event")
    assert "webhook.test" in (await row.all_text_contents())[0]
    await press("link", "Remove")
    await press("button", "Remove the webhook")
    await tab.page.get_by_text("There is no webhook.").wait_for()


async def test_viewer_sees_usage_and_nothing_else(stack: Stack, open_tab: OpenTab) -> None:
    scopes = ROLE_SCOPES[Role.VIEWER]
    key = await asyncio.to_thread(stack.key, TENANT, scopes=scopes)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    menu = tab.page.get_by_role("navigation", name="Pages").get_by_role("link")
    names = await menu.all_text_contents()
    assert names == [
        *("Overview", "Usage", "Requests", "Rejected", "Invoices", "Credits", "Limits"),
        *("Getting started", "Status"),
    ]
    for name in names:
        await tab.press("link", name)
        # Filters only read, and everybody may log out.
        actions = await tab.page.locator('form[method="post"]').evaluate_all(
            "forms => forms.map(form => form.getAttribute('action'))"
        )
        assert set(actions) <= {"/console/logout", "/console/logout-everywhere"}, name
        await tab.open("/console")
    await tab.press("link", "Requests")
    await tab.page.locator("tbody a").first.focus()
    await tab.page.keyboard.press("Enter")
    await tab.page.get_by_role("heading", name="Receipt").wait_for()


async def test_operator_manages_a_tenant_with_the_keyboard(stack: Stack, open_tab: OpenTab) -> None:
    key = await asyncio.to_thread(stack.key, "staff", scopes=frozenset({Scope.ADMIN}))
    tab = await open_tab(stack.operators)
    await tab.log_in(key)
    press, content = tab.press, tab.page.locator("main")

    await press("link", "Tenants")
    await press("link", "Create a tenant")
    await press("button", "Create the tenant", name="Keyboard", id="by-keyboard", billing="prepaid")
    await press("button", "Continue", amount="12.50", note="welcome")
    assert "Grant $12.50 to" in await content.inner_text()
    await press("button", "Change the balance")
    assert "$12.50 granted" in await content.inner_text()

    customer = await asyncio.to_thread(stack.key, "by-keyboard", scopes=TENANT_SCOPES)
    async with gateway_client(stack.url, customer) as client:
        running = asyncio.create_task(complete(client, max_tokens=1900))
        await press("link", "live requests")
        await content.get_by_role("link", name="Cancel").focus()
        await tab.page.keyboard.press("Enter")
        await press("button", "Cancel the request")
        assert (await running).status_code == 409
    await tab.open("/console/tenants/by-keyboard")
    await press("link", "Suspend")
    await press("button", "Suspend the tenant")
    assert await tab.page.locator("dd.bad").text_content() == "suspended"
    await press("button", "Activate")

    await press("link", "Prices")
    await press("link", "Add a price")
    price = {"model": "by-keyboard", "prompt_micros": "0.15", "completion_micros": "0.60"}
    await press("button", "Continue", **price)
    await press("button", "Add the price")
    await press("link", "Audit log")
    actions = await tab.page.locator(".record td:nth-child(2)").all_text_contents()
    assert actions[:4] == ["price.add", "tenant.activate", "tenant.suspend", "request.cancel"]
    await press("button", "Verify the chain")
    await tab.page.get_by_text("entries are intact").wait_for()


@pytest.mark.slow
async def test_filters_replace_the_results_without_loading_the_page(
    stack: Stack, open_tab: OpenTab, tmp_path: Path
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    await tab.open("/console/usage")
    page = tab.page
    await page.evaluate("window.isSamePage = true")
    await page.get_by_label("Group by").select_option("key")
    # With the keyboard: a pointer would lie on a chart afterwards, and read its column.
    await page.get_by_role("button", name="Show").press("Enter")
    await page.get_by_role("heading", name="By key").wait_for()
    assert await page.evaluate("window.isSamePage")
    assert "by=key" in page.url
    async with page.expect_download() as downloading:
        await page.get_by_role("link", name="Download CSV").press("Enter")
    download, file = await downloading.value, tmp_path / "usage.csv"
    assert re.fullmatch(TENANT + r"-usage(-\d{4}-\d\d-\d\d){2}\.csv", download.suggested_filename)
    await download.save_as(file)
    lines = file.read_text().splitlines()
    assert lines[0].startswith("start,end,model,key,")
    assert len(lines) == 13
    # The arrow keys read the columns of a chart, and Esc closes the menu of the account.
    await page.get_by_role("img", name=re.compile("Cost per day")).focus()
    await page.keyboard.press("ArrowLeft")
    readout = page.locator(".readout").first
    assert re.fullmatch(r"\d{4}-\d\d-\d\d: \$1\.25", await readout.inner_text())
    await page.keyboard.press("ArrowLeft")
    assert "$2.50" in await readout.inner_text()
    await page.locator(".account summary").click()
    await page.keyboard.press("Escape")
    assert not await page.get_by_role("button", name="Log out", exact=True).is_visible()
    await page.get_by_role("link", name="key_1").click()
    await page.get_by_role("link", name=re.compile("cmpl-")).first.click()
    await page.get_by_role("heading", name="Receipt").wait_for()
    assert "$1.25" in await page.content()


@pytest.mark.slow
async def test_forms_work_without_javascript(stack: Stack, open_tab: OpenTab) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url, java_script_enabled=False)
    await tab.log_in(key)
    await tab.open("/console/usage")
    await tab.page.get_by_label("Group by").select_option("period")
    await tab.page.get_by_role("button", name="Show").click()
    await tab.page.get_by_role("heading", name="By day").wait_for()
    await tab.open("/console/playground")
    sent = {"prompt": "Hello <b>you</b>", "temperature": "9"}
    await tab.press("button", "Send", **sent)
    assert "“Temperature”" in await tab.page.locator("#e-temperature").inner_text()
    tab.complaints.clear()
    await tab.page.get_by_label("Temperature").fill("1")
    await tab.press("button", "Send")
    await tab.page.get_by_text("Finish reason: length").wait_for()
    assert await tab.page.locator("section .output").inner_text()
    assert await tab.page.get_by_label("Prompt").input_value() == "Hello <b>you</b>"
    await tab.page.get_by_text(TENANT, exact=True).first.click()
    await tab.page.get_by_role("button", name="Log out", exact=True).click()
    await tab.page.get_by_role("button", name="Log in").wait_for()
    await tab.page.get_by_role("link", name="Status of the service").click()
    await tab.page.get_by_role("heading", name="All requests").wait_for()
    strip = tab.page.get_by_role("img", name=re.compile("Availability of 90 days")).first
    assert await strip.locator("rect").count() == 90


@pytest.mark.slow
async def test_playground_streams_estimates_and_writes_code(
    stack: Stack, open_tab: OpenTab
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    await tab.open("/console/playground")
    page = tab.page
    await page.get_by_label("Prompt", exact=True).fill("Hello <b>you</b>")
    await page.get_by_label("Maximum tokens").fill("6")
    await page.get_by_label("Log-probabilities").check()
    await page.get_by_role("button", name="Estimate the cost").click()
    await page.get_by_text("at most 6 out").wait_for()
    await page.get_by_role("button", name="curl").click()
    code = await page.locator("#code").text_content() or ""
    asked = json.loads(shlex.split(code)[-1])
    assert asked["messages"] == [{"role": "user", "content": "Hello <b>you</b>"}]
    assert (asked["max_tokens"], asked["logprobs"]) == (6, True)
    assert shlex.split(code)[1] == f"{stack.url}/v1/chat/completions"
    await page.get_by_role("button", name="Python").click()
    compile(await page.locator("#code").text_content() or "", "python", "exec")
    await page.get_by_label("Choices").fill("2")
    await page.get_by_label("Prompt", exact=True).focus()
    await page.keyboard.press("Control+Enter")
    await page.get_by_text("12 out; first token").wait_for()
    first, second = await page.locator("#talk .assistant").all()
    assert await first.locator(".token").count() == await second.locator(".token").count() == 6
    # The alternatives of a token, by a click and by the arrow keys.
    await first.locator(".token").nth(2).click()
    clicked = await page.locator(".readout").first.inner_text()
    assert clicked.count("%") == 5
    await first.focus()
    await page.keyboard.press("ArrowRight")
    assert (
        await first.locator(".read").inner_text()
        == await first.locator(".token").nth(3).inner_text()
    )
    assert await page.locator("#talk .finish").all_text_contents() == ["Finish reason: length"] * 2
    assert await page.locator("#talk .user").text_content() == "Hello <b>you</b>"
    # A copy is the request that was sent, whatever the form has now.
    await page.get_by_label("Choices").fill("")
    await page.get_by_label("Prompt", exact=True).fill("Not yet")
    await page.get_by_role("button", name="curl").click()
    sent = json.loads(shlex.split(await page.locator("#code").text_content() or "")[-1])
    assert sent["messages"] == [{"role": "user", "content": "Hello <b>you</b>"}]
    assert sent["n"] == 2
    # Each endpoint continues the conversation in its own form.
    for endpoint, name in (("messages", "end_turn|max_tokens"), ("responses", "max_output_tokens")):
        await page.get_by_label("Endpoint").select_option(endpoint)
        for streams in (True, False):
            await page.get_by_label("Stream").set_checked(streams)
            await page.get_by_label("Prompt", exact=True).fill(f"{endpoint} {streams}")
            answers = await page.locator("#talk .assistant").count()
            await page.get_by_role("button", name="Send").click()
            await page.get_by_text(re.compile(r" 6 out; ")).wait_for()
            shown = page.locator("#talk .choice").nth(answers)
            assert await shown.locator(".assistant").inner_text()
            assert re.search(name, await shown.locator(".finish").inner_text())
    await page.get_by_role("button", name="Python").click()
    assert "client.responses.create(" in (await page.locator("#code").text_content() or "")
    await page.get_by_label("Endpoint").select_option("completions")
    await page.get_by_label("Prompt", exact=True).fill("Once")
    await page.get_by_role("button", name="Send").click()
    await page.get_by_text(re.compile(r" 6 out; \d+ ms")).wait_for()
    await page.get_by_label("Temperature").fill("9")
    await page.get_by_role("button", name="Send").click()
    await page.get_by_text("'temperature'").wait_for()
    [complaint] = tab.complaints
    assert "400" in complaint
    tab.complaints.clear()
    assert await page.get_by_label("Prompt", exact=True).input_value() == "Once"


@pytest.mark.slow
@all_cases("endpoint", REASONING)
async def test_playground_shows_reasoning_and_answers_calls(
    stack: Stack, open_tab: OpenTab, endpoint: str
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    await tab.open("/console/playground")
    page = tab.page
    await page.get_by_label("Endpoint").select_option(endpoint)
    await page.get_by_label("Maximum tokens").fill("200")
    await page.get_by_text("JSON schema, tools and other parameters").click()
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    await page.get_by_label("Tools").fill(json.dumps([tool]))
    await page.get_by_label("Other parameters").fill(json.dumps(REASONING[endpoint]))
    await page.get_by_label("Prompt", exact=True).fill("The weather in Oslo?")
    await page.get_by_role("button", name="Send", exact=True).click()
    await page.get_by_label("Result of weather").fill("rain")
    called = await page.locator("#talk .call").inner_text()
    assert json.loads(called.removeprefix("weather(").removesuffix(")")) == {"city": "Oslo"}
    await page.get_by_text("Reasoning", exact=True).click()
    await page.get_by_text("The tool knows it.").wait_for()
    await page.get_by_role("button", name="Send the results").click()
    await page.locator("#talk .assistant", has_text="It rains.").wait_for()
    # The copies are the request that sent the result, with the call and the tools.
    for language in ("Python", "Node", "curl"):
        await page.get_by_role("button", name=language).click()
        code = await page.locator("#code").text_content() or ""
        assert all(part in code for part in ("weather", "Oslo", "rain", "tools")), language
        if language == "Python":
            compile(code, "python", "exec")
    assert "The weather in Oslo?" in str(json.loads(shlex.split(code)[-1]))


@pytest.mark.slow
async def test_playground_stops_a_stream(stack: Stack, open_tab: OpenTab) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    await tab.open("/console/playground")
    await tab.page.get_by_label("Prompt", exact=True).fill("Hello")
    await tab.page.get_by_label("Maximum tokens").fill("1900")
    await tab.page.get_by_role("button", name="Send").click()
    await tab.page.locator("#talk .assistant:not(:empty)").wait_for()
    await tab.page.get_by_role("button", name="Stop").click()
    await tab.page.get_by_text("Stopped.").wait_for()
