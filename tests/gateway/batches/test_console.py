"""Batches and files in the console, in a real browser with the keyboard alone."""

import asyncio
import json
from pathlib import Path

import pytest

from gateway.records.scopes import ROLE_SCOPES, TENANT_SCOPES, Role
from tests.gateway.batches.conftest import jsonl, line
from tests.gateway.console.conftest import HOSTILE, browser, open_tab, visiting
from tests.gateway.console.crawl import add_axe, check_page
from tests.gateway.console.test_browser import OpenTab
from tests.support.stack import Stack

__all__ = ["browser", "open_tab"]
pytestmark = pytest.mark.asyncio(loop_scope="session")

TENANT = "batches-by-keyboard"
LONG_NAME = f"{'questions-' * 12}.jsonl"


@pytest.mark.slow
async def test_developer_uploads_runs_follows_and_cancels_batches(
    stack: Stack, open_tab: OpenTab, tmp_path: Path
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=ROLE_SCOPES[Role.DEVELOPER])
    tab = await open_tab(stack.url, color_scheme="dark")
    await add_axe(tab)
    await tab.log_in(key)
    page, press = tab.page, tab.press

    async def upload(name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        await page.locator('[name="file"]').set_input_files(tmp_path / name)
        await press("button", "Upload")

    async def run(name: str, content: bytes) -> None:
        # On a phone the menu is folded, and says where the visitor is.
        await page.set_viewport_size({"width": 390, "height": 800})
        await page.get_by_text("Menu: Batches").focus()
        await page.keyboard.press("Enter")
        await press("link", "Files")
        await press("link", "Upload a file")
        await upload(name, content)
        await press("button", "Create the batch")

    await press("link", "Batches")
    await press("link", "Create a batch")
    await page.get_by_text("Upload the requests of the batch first.").wait_for()
    # An error is beside its field, in the same page, which has shown how much was sent.
    await page.evaluate(
        """new MutationObserver(() => {
            if (document.querySelector("progress")) window.hasProgress = true;
        }).observe(document.body, { childList: true, subtree: true })"""
    )
    (tmp_path / "latin.jsonl").write_bytes(b'{"custom_id": "\xe4"}\n')
    await page.locator('[name="file"]').set_input_files(tmp_path / "latin.jsonl")
    await page.get_by_role("button", name="Upload").focus()
    await page.keyboard.press("Enter")
    await page.locator("#e-file").wait_for()
    [complaint] = tab.complaints
    assert "400" in complaint
    tab.complaints.clear()
    field = page.locator('[name="file"]')
    assert await field.get_attribute("aria-invalid") == "true"
    assert await field.get_attribute("aria-describedby") == "h-file e-file"
    assert "is not valid UTF-8" in await page.locator("#e-file").inner_text()
    assert await page.evaluate("window.hasProgress")

    await upload(LONG_NAME, jsonl(line("a"), line(f"b {HOSTILE}", temperature=9), line("c")))
    # Empty: the endpoint of the first line.
    assert await page.locator('[name="endpoint"]').input_value() == ""
    await press("button", "Create the batch", metadata=HOSTILE)
    # The page follows the batch.
    await page.locator(".state.good").wait_for()
    content = await page.locator("main").inner_text()
    assert "3 of 3 lines have ended, 1 failed" in content
    failed = page.get_by_role("region", name="Failed lines").locator("tbody td, tbody th")
    name, _, message = await failed.all_text_contents()
    assert name == f"b {HOSTILE}"
    assert message.startswith("'temperature'")
    async with page.expect_download() as downloading:
        await page.get_by_role("link", name="output.jsonl").focus()
        await page.keyboard.press("Enter")
    await (await downloading.value).save_as(tmp_path / "output")
    results = [json.loads(each) for each in (tmp_path / "output").read_text().splitlines()]
    assert sorted(each["custom_id"] for each in results) == ["a", "c"]
    await check_page(tab)

    await run("invalid.jsonl", jsonl(line("a")) + b"{\n")
    await page.locator(".state.bad").wait_for()
    errors = page.get_by_role("region", name="Errors of the file").locator("tbody td, tbody th")
    assert (await errors.all_text_contents())[:2] == ["2", "invalid_json_line"]

    endless = [line(f"line-{number}", max_tokens=1900) for number in range(40)]
    await run("long.jsonl", jsonl(*endless))
    await page.get_by_text("0 of 40 lines have ended").wait_for()
    await press("link", "Cancel")
    await press("button", "Cancel the batch")
    await page.locator(".state.warn", has_text="cancelled").wait_for()

    for path in ("/console/batches", "/console/files", "/console/batches/new"):
        await tab.open(path)
        await check_page(tab)
    await press("link", "Files")
    await page.get_by_role("link", name="delete: invalid.jsonl").focus()
    await page.keyboard.press("Enter")
    await press("button", "Delete the file")
    await page.get_by_text("The file is deleted.").wait_for()
    assert await page.get_by_text("invalid.jsonl").count() == 0
    # A member without the right to run requests has no such pages.
    viewer = await asyncio.to_thread(stack.key, TENANT, scopes=ROLE_SCOPES[Role.VIEWER])
    async with visiting(stack.url, viewer) as visit:
        home = await visit.get("/console")
        for name in ("batches", "batches/new", "files", "files/new"):
            assert f"/console/{name}" not in home.text
            assert (await visit.get(f"/console/{name}")).status_code == 403
        # A form with a file has a token, too, and nothing of it is stored without.
        owner = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    async with visiting(stack.url, owner) as visit:
        fields = {"purpose": "batch", "csrf": "another"}
        file = {"file": ("forged.jsonl", jsonl(line("a")))}
        refused = await visit.client.post("/console/files/new", data=fields, files=file)
        assert "another session" in refused.text
        assert "forged.jsonl" not in (await visit.get("/console/files")).text
