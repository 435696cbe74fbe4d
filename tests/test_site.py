"""The documentation as a web site in a browser: what it loads and finds, and for whom."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final

import pytest
from playwright.sync_api import Page, Response, sync_playwright
from typing_extensions import override

from tests.gateway.console.conftest import CHROMIUM
from tests.gateway.console.crawl import AXE, FIND_PROBLEMS
from tests.support.cases import all_cases
from tests.support.stack import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium-headless-shell is not installed"),
]

MOST_BYTES: Final = 600_000


class _Quiet(SimpleHTTPRequestHandler):
    @override
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the site, built and served."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", f"--site-dir={folder}"]
    subprocess.run(build, cwd=REPOSITORY, check=True, timeout=120, capture_output=True)
    # `make docs` adds it, from npm.
    (folder / "javascripts" / "iframe-worker.js").touch()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of a new browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_context(color_scheme=request.param).new_page()
        browser.close()


@all_cases("path", ["index.html", "architecture.html", "cookbook.html", "api.html"])
def test_first_visit_is_small_and_accessible(site: str, page: Page, path: str) -> None:
    responses: list[Response] = []

    # Playwright takes no method of a built-in type.
    def note(response: Response) -> None:
        responses.append(response)

    page.on("response", note)
    if AXE.exists():
        page.add_init_script(path=AXE)
    page.goto(f"{site}/{path}", wait_until="networkidle")
    # The theme has put tables into boxes.
    page.locator(".md-typeset__scrollwrap[tabindex]").first.wait_for(state="attached")
    assert sum(len(each.body()) for each in responses if each.ok) < MOST_BYTES
    assert [each.url for each in responses if not each.url.startswith(site)] == []
    if AXE.exists():
        assert page.evaluate(FIND_PROBLEMS) == []


@all_cases(
    ("words", "hit"),
    [
        ("stream with tools in Python", "cookbook.html#stream-with-tools-in-python"),
        ("back up and restore", "cookbook.html#back-up-and-restore"),
    ],
)
def test_search_finds_the_example_first(site: str, page: Page, words: str, hit: str) -> None:
    page.goto(f"{site}/index.html")
    box = page.get_by_role("textbox", name="Search")
    box.click()
    box.press_sequentially(words)
    page.locator(".md-search-result__meta", has_text="matching").wait_for()
    page.wait_for_function(
        "hit => document.querySelector('.md-search-result__item').innerHTML.includes(hit)",
        arg=hit,
    )
