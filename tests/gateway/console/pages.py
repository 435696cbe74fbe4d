"""`python -m tests.gateway.console.pages`: every page of both consoles for a generated month.

Starts a deployment on PostgreSQL whose ledger has many rows of many tenants. Opens each page at two
widths in light and dark, and prints what is wrong: overflow, clipped text, errors of scripts,
serious findings of axe-core, and pages that take longer than --slowest-ms.
"""

import argparse
import asyncio
import re
import statistics
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Final

from playwright.async_api import Browser, async_playwright
from sqlalchemy import text

from gateway.billing.ledger.rollups import Rollups
from gateway.billing.ledger.store import LedgerStore
from gateway.billing.usage.periods import DAY, HOUR
from gateway.platform.database.engine import Database
from gateway.platform.database.partitions import make_partitions
from gateway.records.scopes import TENANT_SCOPES, Scope
from gateway.records.times import hour_of, month_start, utc_now
from tests.gateway.console.conftest import CHROMIUM, TENANT, Tab, console_stack, listen
from tests.gateway.console.crawl import add_axe, opened_pages, serious_problems
from tests.support.ledger import use
from tests.support.postgres_server import PostgresServer
from tests.support.stack import Stack

DAYS: Final = 30
WIDTHS: Final = (1280, 390)
SCHEMES: Final = ("light", "dark")
FIND_CLIPPED: Final = """
[...document.querySelectorAll('main *')].filter(each => each.checkVisibility()).filter(each => {
  if (each instanceof SVGTextElement) {
    const box = each.getBBox(), view = each.ownerSVGElement.viewBox.baseVal;
    return box.x < view.x - 1 || box.x + box.width > view.x + view.width + 1;
  }
  return getComputedStyle(each).overflowX === 'hidden' && each.scrollWidth > each.clientWidth + 1;
}).map(each => `${each.tagName} ${each.textContent.slice(0, 60)}`)
"""
_COPY: Final = """
INSERT INTO usage_ledger SELECT copy.* FROM usage_ledger AS one,
    generate_series(1, CAST(:rows AS int)) AS number,
    LATERAL (SELECT CAST(:start AS timestamptz) + number * CAST(:step AS interval) AS at) AS time,
    LATERAL jsonb_populate_record(one, jsonb_build_object(
        'request_id', 'cmpl-' || number,
        'tenant_id', CASE WHEN number % 2 = 0 THEN CAST(:tenant AS text)
            ELSE 't' || number % CAST(:tenants AS int) END,
        'credential_id', 'key_' || number % 1000,
        'created_at', at,
        'ended_at', at)) AS copy
WHERE one.request_id = :copied
"""
_NEW_TENANTS: Final = """
INSERT INTO tenants SELECT copy.* FROM tenants AS one,
    generate_series(1, CAST(:tenants AS int)) AS number,
    LATERAL jsonb_populate_record(one, jsonb_build_object(
        'id', 't' || (number - 1),
        'name', 'Tenant ' || number || ' with a rather long name')) AS copy
WHERE one.id = 'other'
"""


async def _fill(database: Database, *, rows: int, tenants: int) -> None:
    """Write a month of usage: half of the rows are of one prepaid tenant."""
    now = utc_now()
    await use(database, TENANT, 1_234, model="sluice-tiny", prompt_tokens=900, completion_tokens=80)
    start, step = now - DAYS * DAY, DAYS * DAY / rows
    async with database.writing() as transaction:
        copied = await transaction.scalar(
            text("SELECT request_id FROM usage_ledger WHERE cost_micros = 1234")
        )
        await transaction.execute(text(_NEW_TENANTS), {"tenants": tenants})
        await make_partitions(transaction, {month_start(start), month_start(now)})
        values = {"tenant": TENANT, "tenants": tenants, "rows": rows, "start": start, "step": step}
        await transaction.execute(text(_COPY), values | {"copied": copied})
        store = LedgerStore(transaction)
        await store.mark_dirty(hour_of(now - hour * HOUR) for hour in range(DAYS * 24 + 2))
    await Rollups(database).make_all()
    async with database.engine.connect() as connection:
        alone = await connection.execution_options(isolation_level="AUTOCOMMIT")
        await alone.execute(text("VACUUM ANALYZE"))


class Report:
    """What is wrong with pages, and how long they take."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.problems = list[str]()
        self.times = defaultdict[str, list[float]](list)

    async def look(self, tab: Tab, console: str, path: str) -> None:
        """Look at a page at each width and in each scheme."""
        for width, scheme in product(WIDTHS, SCHEMES):
            await tab.page.set_viewport_size({"width": width, "height": 900})
            await tab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            await tab.open(path)
            waited = await tab.page.evaluate(
                "(([each]) => each.responseEnd - each.requestStart)"
                "(performance.getEntriesByType('navigation'))"
            )
            self.times[f"{console} {path}"].append(waited)
            name = f"{console} {path} {width} {scheme}"
            overflow = await tab.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            found = [f"{overflow} pixels too wide"] if overflow > 0 else []
            found += [f"clipped: {each}" for each in await tab.page.evaluate(FIND_CLIPPED)]
            found += await serious_problems(tab)
            found += tab.complaints
            tab.complaints.clear()
            self.problems += [f"{name}: {each}" for each in found]
            if self._folder is not None:
                image = re.sub(r"\W+", "-", name) + ".png"
                await tab.page.screenshot(path=self._folder / image, full_page=True)


async def _crawl(report: Report, browser: Browser, stack: Stack, console: str) -> None:
    is_operators = console == "operators"
    scopes = frozenset({Scope.ADMIN}) if is_operators else TENANT_SCOPES
    key = await asyncio.to_thread(stack.key, "staff" if is_operators else TENANT, scopes=scopes)
    url = stack.operators if is_operators else stack.url
    context = await browser.new_context()
    context.set_default_timeout(60_000)
    tab = Tab(await context.new_page(), url)
    await add_axe(tab)
    listen(tab)
    await tab.log_in(key)
    async for path in opened_pages(tab, "/console"):
        await report.look(tab, console, path)
    await context.close()


async def _run(stack: Stack, options: argparse.Namespace) -> int:
    database = Database(stack.database_url, statement_timeout_seconds=None)
    await _fill(database, rows=options.rows, tenants=options.tenants)
    await database.aclose()
    report = Report(options.folder)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        for console in ("customers", "operators"):
            await _crawl(report, browser, stack, console)
        await browser.close()
    for name, times in sorted(report.times.items(), key=lambda each: -statistics.median(each[1])):
        median = statistics.median(times)
        sys.stdout.write(f"{median:6.0f} ms  {name}\n")
        if median > options.slowest_ms:
            report.problems.append(f"{name}: {median:.0f} ms")
    sys.stdout.writelines(f"{each}\n" for each in report.problems)
    return 1 if report.problems else 0


def main() -> int:
    """Print the times of all pages and what is wrong; return 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--slowest-ms", type=float, default=300)
    parser.add_argument("--folder", type=Path, help="folder for screenshots")
    options = parser.parse_args()
    server = PostgresServer()
    try:
        with console_stack(server.create_database()) as stack:
            return asyncio.run(_run(stack, options))
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main())
