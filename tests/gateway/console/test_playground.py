"""The playground in a browser: two answers side by side, what it keeps, and what code it shows."""

import asyncio
import base64
import json
import re
import shlex
from collections.abc import Awaitable, Callable

import pytest
from playwright.async_api import Request, Route

from gateway.records.scopes import TENANT_SCOPES
from tests.gateway.console.conftest import TENANT, Tab
from tests.support.stack import MODEL, Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[..., Awaitable[Tab]]
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


async def test_two_settings_answer_side_by_side_and_stay_in_the_browser(
    stack: Stack, open_tab: OpenTab
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    await tab.open("/console/playground")
    page = tab.page
    assert await page.get_by_label("Temperature").get_attribute("placeholder") == "1"
    await page.get_by_label("Beside it").select_option(MODEL)
    await page.get_by_text("JSON schema, tools and other parameters").click()
    await page.get_by_label("Different parameters").fill('{"max_tokens": 3}')
    await page.get_by_label("Maximum tokens").fill("6")
    await page.get_by_label("Prompt", exact=True).fill("Hello <b>you</b>")
    # The code is there before a click, and has what will be sent.
    code = await page.locator("#code").text_content() or ""
    assert json.loads(shlex.split(code)[-1])["stream"] is True
    sent: list[dict[str, object]] = []

    def note(request: Request) -> None:
        if request.post_data and "/console/try/" in request.url:
            sent.append(json.loads(request.post_data))

    page.on("request", note)
    await page.get_by_role("button", name="Send").click()
    await page.get_by_text(re.compile(r" 6 out; .* 3 out; ")).wait_for()
    assert [each["max_tokens"] for each in sent] == [6, 3]
    code = await page.locator("#code").text_content() or ""
    assert json.loads(shlex.split(code)[-1]) == sent[0]
    roles = await page.locator("#talk .role").all_text_contents()
    assert roles == ["User", f"Assistant: {MODEL}", f"Assistant: {MODEL}"]
    first = await page.locator("#talk .assistant").first.inner_text()
    await page.get_by_role("button", name="Python").click()
    code = await page.locator("#code").text_content() or ""
    compile(code, "python", "exec")
    assert "for event in answer:" in code
    await page.get_by_role("button", name="Link to it").click()
    link = page.url
    # Each side continues with its own response.
    await page.get_by_label("Prompt", exact=True).fill("Again")
    await page.get_by_role("button", name="Send").click()
    await page.get_by_text(re.compile(r" 6 out; .* 3 out; ")).wait_for()
    said = [each["messages"] for each in sent[2:]]
    assert [len(each) for each in said] == [3, 3]  # type: ignore[arg-type]
    assert said[0] != said[1]
    # A reload and the link show it again, from the browser alone.
    await tab.open("/console/playground")
    assert await page.locator("#talk .user").count() == 4
    await page.get_by_role("button", name="New conversation").click()
    await tab.open("/console/playground")
    assert await page.locator("#talk .user").count() == 0
    await page.goto(link)
    await page.reload()
    assert await page.locator("#talk .user").first.text_content() == "Hello <b>you</b>"
    assert await page.locator("#talk .output").first.inner_text() == first
    assert await page.evaluate("localStorage.length") == 0
    await page.get_by_label("Seed").fill("7")
    assert await page.evaluate("localStorage.length") == 1
    await page.get_by_text(TENANT, exact=True).first.click()
    await page.get_by_role("button", name="Log out", exact=True).click()
    await page.get_by_role("button", name="Log in").wait_for()
    assert await page.evaluate("localStorage.length") == 0


async def test_a_stopped_stream_shows_its_usage(stack: Stack, open_tab: OpenTab) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    await tab.open("/console/playground")
    page, receipts = tab.page, [204, 200]

    async def answer(route: Route) -> None:
        """The receipt of a request appears a moment after its end."""
        usage = {"prompt_tokens": 3, "completion_tokens": 7, "cost_micros": 9}
        await route.fulfill(status=receipts.pop(0), json=usage)

    await page.route("**/console/requests/*", answer)
    await page.get_by_label("Prompt", exact=True).fill("Hello")
    await page.get_by_label("Maximum tokens").fill("1900")
    await page.get_by_role("button", name="Send").click()
    await page.locator("#talk .assistant:not(:empty)").wait_for()
    await page.get_by_role("button", name="Stop").click()
    await page.get_by_text("3 tokens in, 7 out; Stopped").wait_for()
    assert "$0.000009" in await page.locator("#facts").inner_text()
    assert await page.get_by_role("link", name="Receipt").count() == 1
    assert not receipts


async def test_log_probabilities_end_with_the_text(stack: Stack, open_tab: OpenTab) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    await tab.open("/console/playground")
    page = tab.page
    scores: dict[str, object] = {"tokens": ["Hi", "</s>"], "text_offset": [0, 2]}
    scores |= {"token_logprobs": [-0.1, -0.2], "top_logprobs": [{"Hi": -0.1}, {"</s>": -0.2}]}
    choice = {"index": 0, "text": "Hi", "finish_reason": "stop", "logprobs": scores}
    await page.route(
        "**/console/try/v1/completions", lambda route: route.fulfill(json={"choices": [choice]})
    )
    await page.get_by_label("Endpoint").select_option("completions")
    await page.get_by_label("Prompt", exact=True).fill("Hello")
    await page.get_by_role("button", name="Send").click()
    await page.get_by_text("Finish reason: stop").wait_for()
    assert await page.locator("#talk .assistant").inner_text() == "Hi"


async def test_images_are_part_of_the_request(stack: Stack, open_tab: OpenTab) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    await tab.open("/console/playground")
    page = tab.page
    # The scripted model takes none, so the test sets that it does.
    assert not await page.locator("#f-images").is_visible()
    await page.evaluate("name => { document.forms.playground.dataset.images = name }", MODEL)
    await page.get_by_label("Endpoint").select_option("messages")
    image = {"name": "a.png", "mimeType": "image/png", "buffer": base64.b64decode(PIXEL)}
    await page.locator("#f-images").set_input_files(image)  # type: ignore[arg-type]
    await page.get_by_label("Prompt", exact=True).fill("What is it?")
    await page.get_by_alt_text("Attached image").wait_for()
    for endpoint, part in (
        ("messages", '"media_type":"image/png"'),
        ("responses", '"type":"input_image"'),
        ("chat/completions", f'"image_url":{{"url":"data:image/png;base64,{PIXEL}"}}'),
    ):
        await page.get_by_label("Endpoint").select_option(endpoint)
        assert part in (await page.locator("#code").text_content() or ""), endpoint
