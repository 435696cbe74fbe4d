"""Every page that links of a console lead to, and what is wrong with a page."""

import re
from collections.abc import AsyncIterator
from typing import Final

import pytest
from playwright.async_api import ViewportSize

from tests.gateway.console.conftest import Tab
from tests.support.stack import REPOSITORY

AXE: Final = REPOSITORY / "tests/clients/node_modules/axe-core/axe.min.js"
# What axe-core finds is large, so that the page selects from it. Without `preload`, axe-core does
# not load the stylesheet again, which only rules that are off by default need.
FIND_PROBLEMS: Final = """
axe.run({resultTypes: ['violations'], preload: false}).then(found => found.violations
  .filter(each => ['serious', 'critical'].includes(each.impact))
  .map(each => `${each.id}: ${each.nodes[0].html.slice(0, 200)}`))
"""
SIZES: Final[list[ViewportSize]] = [
    {"width": width, "height": 800} for width in (1280, 1920, 768, 390)
]
FIND_LOCAL_TIMES: Final = r"""
[...document.querySelectorAll('main *')].flatMap(each => [...each.childNodes])
  .filter(each => each.nodeType === 3 && /\d{4}-\d\d-\d\d \d\d:\d\d/.test(each.data))
  .filter(each => {
    const cell = each.parentElement.closest('td, th');
    const head = cell && cell.closest('table').tHead.rows[0].cells[cell.cellIndex];
    const shown = each.parentElement.closest('figure') || each.parentElement;
    const texts = [shown.textContent, each.parentElement.title, head?.textContent];
    return !texts.some(text => text?.includes('UTC'));
  }).map(each => each.data)
"""
"""Times that neither their text or title nor the head of their column calls UTC."""
MAX_PAGES: Final = 60


async def add_axe(tab: Tab) -> None:
    """Load axe-core into each page from now on; sending it to each one takes far longer."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed (npm)")
    await tab.page.add_init_script(path=AXE)


async def serious_problems(tab: Tab) -> list[str]:
    """Return what axe-core finds; see `add_axe`."""
    found: list[str] = await tab.page.evaluate(FIND_PROBLEMS)
    return found


async def check_page(tab: Tab) -> None:
    """Check that a page fits every size, and what axe-core finds; see `add_axe`."""
    for size in SIZES:
        await tab.page.set_viewport_size(size)
        overflow = await tab.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert overflow <= 0, (tab.page.url, size, overflow)
    assert await serious_problems(tab) == [], tab.page.url
    await tab.page.set_viewport_size(SIZES[0])


async def opened_pages(tab: Tab, *paths: str) -> AsyncIterator[str]:
    """Open these pages and all that links lead to, once for each kind; yield their paths."""
    found, seen = [*paths], set[str]()
    while found:
        path = found.pop(0)
        kind = re.sub(
            r"[?=].*|(key|prj|mbr|whk|crd|adp)_\w+|cmpl-\w+|tenants/[\w-]+|\d{4}-\d\d", "", path
        )
        if kind in seen:
            continue
        seen.add(kind)
        await tab.open(path)
        yield path
        found += await _reachable(tab)
        assert len(seen) < MAX_PAGES


async def _reachable(tab: Tab) -> list[str]:
    """Return the pages that links lead to, without files and without pages of other ids."""
    links: list[str] = await tab.page.evaluate(
        '[...document.querySelectorAll(\'a[href^="/console"], a[href="/status"]\')]'
        ".map(a => a.getAttribute('href'))"
    )
    return [link for link in links if ".csv" not in link]
