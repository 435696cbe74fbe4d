"""Forms: what answers them can be loaded again, and nothing that was typed is lost."""

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import update

from gateway.platform.database.engine import Database
from gateway.platform.database.tables import BatchRow
from gateway.platform.redis_client import connect
from gateway.records.batches import BatchStatus
from gateway.records.scopes import TENANT_SCOPES
from tests.gateway.conftest import gateway_client
from tests.gateway.console.conftest import TENANT, Tab, Visit, visiting
from tests.support.ledger import use
from tests.support.stack import Stack

OpenTab = Callable[..., Awaitable[Tab]]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_reload_makes_no_second_key_and_back_shows_the_form(
    stack: Stack, open_tab: OpenTab
) -> None:
    key = await asyncio.to_thread(stack.key, "reloads", scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    page = tab.page
    await tab.open("/console/keys/new")
    await tab.press("button", "Create the key", name="twice", limit_tokens_per_day="many")
    tab.complaints.clear()
    await page.get_by_label("Tokens per day").fill("7")
    await tab.press("button", "Create the key")
    secret = await page.locator(".secret").text_content() or ""
    stack.note_key(secret)
    # The command for a first request has the key in it.
    code = await page.locator("main pre > code").text_content() or ""
    assert f'-H "Authorization: Bearer {secret}"' in code
    await page.reload()
    assert await page.locator(".secret").text_content() == secret
    await page.go_back()
    assert await page.get_by_label("Name", exact=True).input_value() == "twice"
    tab.complaints.clear()
    await tab.open("/console/keys")
    assert (await page.content()).count(">twice<") == 1


async def test_answers_of_forms_are_sealed_and_belong_to_their_session(
    stack: Stack, visit: Visit
) -> None:
    sent = await visit.client.post(
        "/console/keys/new", data={"csrf": visit.csrf, "name": "sealed", "scopes": "usage"}
    )
    target = sent.headers["location"]
    assert re.fullmatch(r"/console/keys/new\?shown=\d+", target)
    shown = (await visit.get(target)).text
    [secret] = set(re.findall(r"sk-\w{12}-\w{40}", shown))
    stack.note_key(secret)
    redis = connect(stack.redis.url, max_connections=1)
    names = [name async for name in redis.scan_iter("console:kept:*")]
    stored = [value for name in names for value in await redis.hvals(name)]
    await redis.aclose()
    assert stored
    assert not any(secret.encode() in value for value in stored)
    async with visiting(stack.url, secret) as other:
        assert secret not in (await other.get(target)).text
    # Only the latest are kept.
    for _ in range(8):
        await visit.send("/console/keys/new", name="")
    assert secret not in (await visit.get(target)).text


@pytest.mark.asyncio(loop_scope="session")
async def test_a_form_that_is_sent_without_a_session_is_filled_in_after_the_login(
    stack: Stack, open_tab: OpenTab
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    tab = await open_tab(stack.url)
    await tab.log_in(key)
    page = tab.page
    await tab.open("/console/keys/new")
    await page.get_by_label("Name", exact=True).fill("drafted")
    await page.get_by_label("usage", exact=True).check()
    await page.context.clear_cookies()
    await page.get_by_role("button", name="Create the key").click()
    await page.locator("#f-key").fill(key)
    await page.get_by_role("button", name="Log in").click()
    await page.get_by_text("Your session had ended.").wait_for()
    assert await page.get_by_label("Name", exact=True).input_value() == "drafted"
    assert await page.get_by_label("usage", exact=True).is_checked()
    # The playground shows the error, and works after a login in another tab.
    await tab.open("/console/playground")
    await page.get_by_label("Prompt", exact=True).fill("Hello")
    await page.context.clear_cookies()
    await page.get_by_role("button", name="Send").click()
    await page.get_by_text("Your session has ended. Log in again in another tab").wait_for()
    other = await page.context.new_page()
    second = Tab(other, stack.url)
    await second.log_in(key)
    await page.get_by_role("button", name="Send").click()
    await page.locator("#talk .assistant:not(:empty)").wait_for()
    tab.complaints.clear()


async def test_choices_begin_with_their_defaults(operator: Visit) -> None:
    for path, chosen in (
        ("/console/tenants/new", ("default", "postpaid")),
        ("/console/prices/new", ("default",)),
    ):
        page = (await operator.get(path)).text
        for value in chosen:
            assert f'<option value="{value}" selected>' in page, (path, value)


async def test_a_batch_has_the_endpoint_of_its_file_and_says_each_error_once(
    stack: Stack,
) -> None:
    key = await asyncio.to_thread(stack.key, "batches", scopes=TENANT_SCOPES)
    line = (
        b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "x"}}\n'
    )
    async with gateway_client(stack.url, key) as client:
        made = await client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("some.jsonl", line)}
        )
        file = made.json()["id"]
    database = Database(stack.database_url)
    async with visiting(stack.url, key) as visit:
        page = (await visit.get("/console/batches/new")).text
        choices = page.partition('name="endpoint"')[2]
        assert "the one of the file" in choices.partition("</option")[0]
        fields = {"input_file_id": file, "endpoint": "", "completion_window": "24h"}
        path = (await visit.send("/console/batches/new", **fields)).headers["location"]
        assert "/v1/completions</dd>" in (await visit.get(path)).text
        assert "not checked yet" in (await visit.get("/console/batches")).text
        error = {"code": "model_not_found", "param": "model", "message": "No model x."}
        async with database.writing() as transaction:
            failed = {
                "status": BatchStatus.FAILED,
                "errors": [error | {"line": number} for number in range(1, 10)],
            }
            await transaction.execute(
                update(BatchRow).where(BatchRow.id == path.rpartition("/")[2]).values(failed)
            )
        page = (await visit.get(path)).text
        assert "The file is invalid, and no line has run" in page
        errors = page.partition("<h2>Errors</h2>")[2]
        assert (errors.count('class="record"'), errors.count("No model x.")) == (1, 1)
        assert "1, 2, 3, 4, 5 and 4 more" in errors
        assert "file invalid" in (await visit.get("/console/batches")).text
    await database.aclose()


async def test_a_new_account_gets_first_steps_until_it_has_traffic(stack: Stack) -> None:
    key = await asyncio.to_thread(stack.key, "steps", scopes=TENANT_SCOPES)
    async with visiting(stack.url, key) as visit:
        page = (await visit.get("/console")).text
        steps = ("Copy a ready curl", "Set the budget of a key", "Register a webhook")
        assert all(step in page for step in (*steps, "Invite a colleague"))
        listed = page.partition("<h2>First steps</h2>")[2].partition("</div>")[0]
        assert "Create a key" not in listed
        await visit.send("/console/webhooks", url="http://127.0.0.1:9/hook", thresholds="50")
        assert steps[2] not in (await visit.get("/console")).text
        database = Database(stack.database_url)
        await use(database, "steps", 5)
        await database.aclose()
        assert "First steps" not in (await visit.get("/console")).text
    async with gateway_client(stack.url, key) as client:
        missing = await client.get("/nope", headers={"accept": "text/html,*/*"})
        assert (missing.status_code, "<h1>Not found</h1>" in missing.text) == (404, True)
        assert (await client.get("/nope")).json()["error"]["code"] == "not_found"
