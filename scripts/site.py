"""Hook of mkdocs that adds the documents outside `docs` to the site.

Documents link to each other by their places in the repository. This module turns these links into
those of the site. A link to a file that the site lacks, such as a module, becomes its text.
"""

import posixpath
import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent
PROOFS = REPOSITORY / "tests" / "proofs.toml"
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
    """Turn links between places in the repository into links of the site."""
    places = {_source(file): file.src_uri for file in files}
    folder = _source(page.file).parent

    def replaced(match: re.Match[str]) -> str:
        label, text, target, anchor = match.groups()
        path = (folder / target).resolve()
        if place := places.get(path):
            here = posixpath.dirname(page.file.src_uri)
            return f"{label}({posixpath.relpath(place, here or '.')}{anchor or ''})"
        return text if path.exists() else match[0]

    return LINK.sub(replaced, markdown)


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
