"""Generate files of the Helm chart: README, and copies of alerting rules, dashboards and Redis.

    .venv/bin/python scripts/chart.py           write
    .venv/bin/python scripts/chart.py --check   only list changes; exit code 1 if there are any

Helm packages one folder, so files that Compose also uses are copied into it. The README is
README.md.gotmpl with the values table that helm-docs would generate from the comments in
values.yaml. Of helm-docs' templates, only those in `SECTIONS` are supported.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
CHART: Final = ROOT / "deploy" / "helm" / "sluice"
COPIES: Final = {
    CHART / "rules": (ROOT / "ops" / "prometheus" / "rules", "*.yaml"),
    CHART / "redis": (ROOT / "ops" / "redis", "*"),
    CHART / "dashboards": (ROOT / "ops" / "grafana" / "dashboards", "*.json"),
}
"""Folder in the chart -> source folder and pattern of its files."""

_DIRECTIVE = re.compile(r"\{\{ template \"([\w.]+)\" \. \}\}")
_COMMENT = re.compile(r"^\s*# ?(.*)$")
_MARK = "-- "


class Row(NamedTuple):
    """A value of the chart: its dotted path, its type, its default as JSON, and its comment."""

    key: str
    kind: str
    default: str
    text: str


def main() -> int:
    """Write or check every file."""
    parser = argparse.ArgumentParser(description="Write the chart's README and copied files.")
    parser.add_argument("--check", action="store_true", help="list changes, write nothing")
    check = parser.parse_args().check
    changes = stale_files()
    for path, content in changes.items():
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
        if check:
            continue
        if content is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return int(check and bool(changes))


def stale_files() -> dict[Path, str | None]:
    """Return the required content of each outdated file; None if the file must be deleted."""
    wanted: dict[Path, str | None] = {CHART / "README.md": readme()}
    for folder, (source, pattern) in COPIES.items():
        # Existing files are deleted unless the source has them.
        wanted |= dict.fromkeys(folder.glob("*"))
        wanted |= {folder / file.name: file.read_text() for file in source.glob(pattern)}
    return {path: text for path, text in wanted.items() if text != _text_of(path)}


def readme() -> str:
    """Return the README. Raises ValueError for an unknown template or a value without comment."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    rows = list(read_rows((CHART / "values.yaml").read_text()))

    def section(match: re.Match[str]) -> str:
        if match[1] not in SECTIONS:
            raise ValueError(f"README.md.gotmpl: unknown template {match[1]}")
        return SECTIONS[match[1]](chart, rows)

    return _DIRECTIVE.sub(section, (CHART / "README.md.gotmpl").read_text())


def read_rows(values: str) -> Iterator[Row]:
    """Return a row for each value of a values.yaml with a `# --` comment.

    Raises ValueError for a value that neither has a comment nor is a group of values with comments.
    """
    node = yaml.compose(values, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("values.yaml: no values")  # noqa: TRY004 - of the file, not of a caller
    yield from _rows(node, values.splitlines(), prefix="")


def _rows(node: yaml.MappingNode, lines: list[str], *, prefix: str) -> Iterator[Row]:
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        text = _comment_above(lines, key.start_mark.line)
        if text is not None:
            plain = yaml.SafeLoader("").construct_document(value)
            yield Row(path, _kind(plain), json.dumps(plain), text)
        elif isinstance(value, yaml.MappingNode) and value.value:
            yield from _rows(value, lines, prefix=f"{path}.")
        else:
            raise ValueError(f"values.yaml: {path} has no comment that starts with `# --`")


def _comment_above(lines: list[str], number: int) -> str | None:
    """Return the text of the `# --` comment that ends above a line; None if there is none."""
    text: list[str] = []
    for line in reversed(lines[:number]):
        match = _COMMENT.match(line)
        if match is None:
            return None
        if match[1].startswith(_MARK):
            return " ".join([match[1].removeprefix(_MARK), *reversed(text)])
        text.append(match[1])
    return None


def _kind(value: Any) -> str:
    kinds = {bool: "bool", int: "int", float: "float", str: "string", list: "list", dict: "object"}
    return kinds.get(type(value), "")


def _values_table(_chart: Mapping[str, Any], rows: list[Row]) -> str:
    lines = ["| Key | Type | Default | Description |", "|-----|------|---------|-------------|"]
    lines += [f"| {r.key} | {r.kind} | `{r.default}` | {r.text} |" for r in rows]
    return "\n".join(lines)


SECTIONS: Final[Mapping[str, Callable[[Mapping[str, Any], list[Row]], str]]] = {
    "chart.header": lambda chart, _rows: f"# {chart['name']}",
    "chart.description": lambda chart, _rows: str(chart["description"]),
    "chart.kubeVersion": lambda chart, _rows: str(chart["kubeVersion"]),
    "chart.valuesTable": _values_table,
}


def _text_of(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
