"""Write the screenshots of docs/console.md: docs/images/console-*.png.

    .venv/bin/python scripts/console_screenshots.py

Starts `sluice up` with the scripted engine in a temporary folder, sends some requests, and opens
pages in Debian's Chromium.
"""

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from gateway.billing.ledger.drain import row_of
from gateway.billing.ledger.rollups import Rollups
from gateway.billing.ledger.store import LedgerStore
from gateway.platform.database.engine import Database
from gateway.records.times import to_ms, utc_now
from gateway.records.usage_record import Outcome, UsageRecord

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
SLUICE = [sys.executable, "-m", "gateway.cli.main"]
START_SECONDS = 180
REQUESTS = 40
DAYS = 75
HELD = 5
DESKTOP: ViewportSize = {"width": 1200, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}
STATUS: ViewportSize = {"width": 960, "height": 560}


@contextmanager
def deployment(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Run `sluice up`, and give the links of both consoles and the demo key."""
    log = folder / "up.txt"
    with log.open("wb") as out:
        up = subprocess.Popen([*SLUICE, "up", "--engine", "scripted"], cwd=folder, stdout=out)
    try:
        end = time.monotonic() + START_SECONDS
        while "Try it:" not in (text := log.read_text()):
            if up.poll() is not None or time.monotonic() > end:
                sys.exit(f"sluice up does not start:\n{text}")
            time.sleep(0.2)
        customers, operators = re.findall(r"http\S+/console/enter\S+", text)
        [key] = re.findall(r"API key +(\S+)", text)
        yield customers, operators, key
    finally:
        up.terminate()
        up.wait()


def use(folder: Path, url: str, key: str) -> None:
    """Set a price and a limit, and send requests."""
    for command in (
        ("prices", "add", "sluice-tiny", "--prompt", "15", "--completion", "60"),
        ("tenants", "set", "demo", "--limit", "budget_micros=2000000"),
        ("tenants", "create", "Acme", "--id", "acme", "--weight", "2"),
    ):
        subprocess.run([*SLUICE, *command], cwd=folder, check=True, capture_output=True)
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}) as client:
        for number in range(REQUESTS):
            body = {"model": "sluice-tiny", "prompt": "Once upon a time", "max_tokens": 20 + number}
            client.post("/v1/completions", json=body, timeout=60.0).raise_for_status()
    time.sleep(3.0)  # The requests reach the ledger.


async def remember(path: Path) -> None:
    """Let the ledger have requests of some days, of which the service failed a few."""
    now, rows = utc_now(), []
    for number in range(DAYS * 60):
        at_ms = to_ms(now - timedelta(days=1 + number / 60))
        has_failed = number // 60 in (9, 23, 24, 51) and number % 30 == 0
        record = UsageRecord(
            request_id=f"cmpl-{number}",
            tenant_id="acme",
            project_id=None,
            credential_id="key_1",
            model="sluice-tiny",
            endpoint="completions",
            dialect="openai",
            created_ms=at_ms,
            ended_ms=at_ms + 900,
            outcome=Outcome.LOST if has_failed else Outcome.FINISHED,
            first_token_ms=0 if has_failed else 40 + number * 7 % 61,
        )
        rows.append(row_of(record))
    database = Database(f"sqlite+aiosqlite:///{path}")
    async with database.writing() as transaction:
        for start in range(0, len(rows), 500):
            await LedgerStore(transaction).insert(rows[start : start + 500])
    await Rollups(database).make_all()
    await database.aclose()


@contextmanager
def holding(url: str, key: str) -> Iterator[None]:
    """Let requests run and wait for the length of a block."""
    with ExitStack() as stack:
        client = stack.enter_context(
            httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60.0)
        )
        body = {"model": "sluice-tiny", "prompt": "Once", "max_tokens": 1900, "stream": True}
        for _ in range(HELD):
            stack.enter_context(client.stream("POST", "/v1/completions", json=body))
        time.sleep(2.0)  # Their worker reports tokens.
        yield


def enter(browser: Browser, link: str, size: ViewportSize) -> Page:
    """Log in."""
    page = browser.new_context(viewport=size, color_scheme="light").new_page()
    page.goto(link)
    return page


def main() -> None:
    """Take the screenshots."""
    chromium = shutil.which("chromium-headless-shell") or sys.exit(
        "chromium-headless-shell is not installed"
    )
    with tempfile.TemporaryDirectory() as folder, deployment(Path(folder)) as links:
        customers, operators, key = links
        url = customers.partition("/console")[0]
        use(Path(folder), url, key)
        [database] = Path(folder).glob("**/sluice.db")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = enter(browser, customers, DESKTOP)
            page.screenshot(path=IMAGES / "console-overview.png")
            page.goto(f"{url}/console/playground")
            page.get_by_label("Prompt", exact=True).fill("Once upon a time")
            page.get_by_label("Log-probabilities").check()
            page.get_by_label("Maximum tokens").fill("60")
            page.get_by_role("button", name="Send").click()
            page.get_by_role("link", name="Receipt").wait_for()
            page.screenshot(path=IMAGES / "console-playground.png")
            page.context.set_default_timeout(10_000)
            page.set_viewport_size(PHONE)
            page.emulate_media(color_scheme="dark")
            page.goto(f"{url}/console/limits")
            page.screenshot(path=IMAGES / "console-phone.png")
            page = enter(browser, operators, DESKTOP)
            page.screenshot(path=IMAGES / "console-operators.png")
            with holding(url, key):
                page.goto(f"{page.url.partition('/console')[0]}/console/tenants/demo/live")
                page.screenshot(path=IMAGES / "console-live.png")
            # An event loop is running here: the browser's.
            with ThreadPoolExecutor() as thread:
                thread.submit(asyncio.run, remember(database)).result()
            page.set_viewport_size(STATUS)
            page.goto(f"{url}/status")
            page.screenshot(path=IMAGES / "console-status.png")
            browser.close()


if __name__ == "__main__":
    main()
