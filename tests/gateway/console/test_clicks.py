"""Ten tasks of people, in a browser, with the clicks that each may take from the first page on."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import pytest

from gateway.platform.database.engine import Database
from gateway.records.scopes import TENANT_SCOPES, Scope
from gateway.records.usage_record import Outcome
from tests.gateway.console.conftest import Tab
from tests.support.ledger import use
from tests.support.stack import MODEL, Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[..., Awaitable[Tab]]


class Click(NamedTuple):
    """A click on the first link or button whose name fits."""

    role: Literal["link", "button"]
    name: str

    async def do(self, tab: Tab, _: Path) -> None:
        """Wait for it and click."""
        name = re.compile(self.name)
        await tab.page.get_by_role(self.role, name=name).first.click()


@dataclass(frozen=True)
class Fill:
    """A field that is typed into, chosen from a list, or gets a file; no click."""

    label: str
    value: str

    async def do(self, tab: Tab, file: Path) -> None:
        """Fill it in."""
        field = tab.page.get_by_label(self.label, exact=True)
        kind = await field.evaluate("each => each.type")
        if kind == "file":
            await field.set_input_files(file)
        elif kind == "select-one":
            await field.select_option(self.value)
        else:
            await field.fill(self.value)


def link(name: str) -> Click:
    """Return a click on a link."""
    return Click("link", name)


def button(name: str) -> Click:
    """Return a click on a button."""
    return Click("button", name)


TASKS: Final[dict[str, tuple[int, tuple[Click | Fill, ...], str]]] = {
    "create a key": (
        2,
        (link("^Create a key$"), Fill("Name", "clicked"), button("^Create the key$")),
        "Store it now",
    ),
    "why a request failed": (
        3,
        (link("^list$"), link("^cmpl-")),
        "engine_dead",
    ),
    "the dearest key": (1, (link("^by key$"),), "By key"),
    "set a budget": (
        3,
        (
            link("^Keys$"),
            link("^clicked$"),
            Fill("Monthly budget, in dollars", "5"),
            button("^Save$"),
        ),
        r"of \$5",
    ),
    "revoke a key": (
        3,
        (link("^Keys$"), link("^Revoke clicked$"), button("^Revoke the key$")),
        "The key is revoked",
    ),
    "see an invoice": (2, (link("^Invoices$"), link(r"\d{4}")), "Print or save as PDF"),
    "run a batch": (
        5,
        (
            link("^Batches$"),
            link("^Create a batch$"),
            Fill("File", ""),
            button("^Upload$"),
            button("^Create the batch$"),
        ),
        "validating|in progress|completed",
    ),
    "compare two settings": (
        2,
        (
            link("^Playground$"),
            Fill("Prompt", "Hello"),
            Fill("Maximum tokens", "3"),
            Fill("Beside it", MODEL),
            button("^Send$"),
        ),
        "first token",
    ),
    "copy an example": (2, (link("^Getting started$"), button("^Copy$")), "Copied"),
}
"""By task: the most clicks, the steps, and a pattern of what the page then shows."""
OF_OPERATORS: Final[dict[str, tuple[int, tuple[Click | Fill, ...], str]]] = {
    "create a tenant": (
        5,
        (
            link("^Tenants$"),
            link("^Create a tenant$"),
            Fill("Name", "Clicks"),
            Fill("Id", "clicks"),
            button("^Create the tenant$"),
        ),
        "The tenant is created",
    ),
}


async def test_tasks_take_few_clicks(stack: Stack, open_tab: OpenTab, tmp_path: Path) -> None:
    file = tmp_path / "batch.jsonl"
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file.write_text(json.dumps(line))
    for url, tenant, scopes, tasks in (
        (stack.url, "clicker", TENANT_SCOPES, TASKS),
        (stack.operators, "staff", frozenset({Scope.ADMIN}), OF_OPERATORS),
    ):
        key = await asyncio.to_thread(stack.key, tenant, scopes=scopes)
        if tenant == "clicker":
            database = Database(stack.database_url)
            code, outcome = "engine_dead", Outcome.FAILED
            await use(database, tenant, 77, is_prepaid=False, code=code, outcome=outcome)
            await database.aclose()
        tab = await open_tab(url, permissions=["clipboard-write"])
        await tab.log_in(key)
        for task, (most, steps, shown) in tasks.items():
            await tab.open("/console")
            for step in steps:
                await step.do(tab, file)
            await tab.page.get_by_text(re.compile(shown)).first.wait_for()
            if secret := await tab.page.locator(".secret").all_text_contents():
                stack.note_key(secret[0])
            assert sum(isinstance(step, Click) for step in steps) <= most, task
