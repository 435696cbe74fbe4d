"""Hook of mkdocs that adds the documents outside `docs` to the site.

Documents link to each other by their places in the repository. This module turns these links into
those of the site. A link to a file that the site lacks, such as a module, becomes its text.
"""

import hashlib
import posixpath
import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent
PROOFS = REPOSITORY / "tests" / "proofs.toml"
DIAGRAMS = REPOSITORY / "docs" / "diagrams"
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RENAMED = {
    "README.md": "index.md",
    "SECURITY.md": "vulnerabilities.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/helm/sluice/README.md": "helm.md",
    "ops/README.md": "observability.md",
    "bench/results/README.md": "measurements.md",
    "tests/proofs.toml": "proofs.md",
}
"""Documents whose place in the site is not their place in the repository."""
PATTERNS = (*RENAMED, "ops/runbooks/*.md", "bench/results/2*.md", "bench/results/*.svg")
LINK = re.compile(r"(!?\[([^\]]*)\])\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Replace each folder in the navigation by its pages."""
    config.nav = _expanded(config.nav)


def _expanded(entry: object) -> object:
    if isinstance(entry, list):
        return [_expanded(each) for each in entry]
    if isinstance(entry, dict):
        return {title: _expanded(each) for title, each in entry.items()}
    if isinstance(entry, str) and entry.endswith("/"):
        folders = (REPOSITORY, REPOSITORY / "docs")
        names = [path.name for folder in folders for path in (folder / entry).glob("*.md")]
        names.sort(key=lambda name: (name != "README.md", name))
        return [entry + name for name in names]
    return entry


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the documents outside `docs`."""
    for pattern in PATTERNS:
        for path in sorted(REPOSITORY.glob(pattern)):
            name = path.relative_to(REPOSITORY).as_posix()
            files.append(File.generated(config, RENAMED.get(name, name), abs_src_path=str(path)))


def on_page_read_source(page: Page, **_: object) -> str | None:
    """Return the page that is generated from `tests/proofs.toml`."""
    return proofs() if _source(page.file) == PROOFS else None


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Turn links between places in the repository into links of the site, and draw diagrams."""
    # Reports of measurements repeat all words, and nobody asks for a test by its name.
    if page.file.src_uri.startswith("bench/results/2") or _source(page.file) == PROOFS:
        page.meta["search"] = {"exclude": True}
    places = {_source(file): file.src_uri for file in files}
    folder = _source(page.file).parent

    def replaced(match: re.Match[str]) -> str:
        label, text, target, anchor = match.groups()
        path = (folder / target).resolve()
        if place := places.get(path):
            here = posixpath.dirname(page.file.src_uri)
            return f"{label}({posixpath.relpath(place, here or '.')}{anchor or ''})"
        return text if path.exists() else match[0]

    def drawn(match: re.Match[str]) -> str:
        name = posixpath.join("diagrams", diagram_name(match[1]))
        heading = re.findall(r"^#+ (.+)", markdown[: match.start()], re.MULTILINE)[-1]
        place = posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".")
        return f"![Diagram: {heading}]({place})"

    return DIAGRAM.sub(drawn, LINK.sub(replaced, markdown))


def diagram_name(source: str) -> str:
    """Return the name of the file that `scripts/diagrams.py` draws of a Mermaid text."""
    return hashlib.sha256(source.encode()).hexdigest()[:16] + ".svg"


LAZY_INDEX = """<script>
{
  const { open, send } = XMLHttpRequest.prototype;
  XMLHttpRequest.prototype.open = function (method, url, ...others) {
    open.call(this, method, url, ...others);
    const { activeElement } = document;
    const searches = activeElement?.closest(".md-search") || /[?&]q=/.test(location.search);
    if (searches || !String(url).endsWith("search_index.json")) return;
    this.send = () => {
      const begin = ({ target }) => {
        if (!target.closest(".md-search")) return;
        removeEventListener("focusin", begin);
        send.call(this);
      };
      addEventListener("focusin", begin);
    };
  };
}
</script>"""
"""Lets the theme load the index of the search when a reader begins to search."""


def on_post_page(output: str, **_: object) -> str:
    """Name the dialog of the search, let keys reach code, and load what few readers need later."""
    named = output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)
    reached = named.replace("<pre><span></span><code>", '<pre><span></span><code tabindex="0">')
    lazy = reached.replace("<img ", '<img loading="lazy" ')
    return lazy.replace("</head>", f"{LAZY_INDEX}</head>", 1)


def _source(file: File) -> Path:
    return Path(file.abs_src_path or file.src_uri).resolve()


def proofs() -> str:
    """Return the page of the tests that prove each documented behaviour."""
    folders: dict[str, str] = {}
    for path in sorted((REPOSITORY / "tests").glob("**/test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE):
            folders[f"{path.name}::{name}"] = path.parent.relative_to(REPOSITORY).as_posix()
    lines = ["# Tests of documented behaviour", "", "Generated from `tests/proofs.toml`.", ""]
    for section, rows in tomllib.loads(PROOFS.read_text()).items():
        lines += [f"## {section[0].upper()}{section[1:]}", "", "| | tests |", "|---|---|"]
        for subject, tests in rows.items():
            cells = "<br>".join(f"`{folders[test]}/{test}`" for test in tests)
            lines.append(f"| {subject} | {cells} |")
        lines.append("")
    return "\n".join(lines)
