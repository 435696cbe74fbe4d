"""The documents name only settings, error codes and files that exist."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from pydantic_settings import BaseSettings

import gateway.settings
import worker.hosting.settings
import worker.settings
from gateway import errors
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.parameters import PARAMETERS
from tests.support.cases import all_cases
from tests.support.stack import REPOSITORY

DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
OUTSIDE_THE_SITE = sorted(
    path
    for pattern in ("*.md", "deploy/**/*.md", "ops/**/*.md")
    for path in REPOSITORY.glob(pattern)
)


SETTINGS: dict[str, type[BaseSettings]] = {
    "gateway": gateway.settings.Settings,
    "worker": worker.settings.Settings,
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
    # Those of demo.env, and the option of the set-up.
    assert named - known <= {
        "SLUICE_URL",
        "SLUICE_KEY",
        "SLUICE_MODEL",
        "SLUICE_ADMIN_KEY",
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


def test_links_between_documents_exist(tmp_path: Path) -> None:
    # With --quiet, mkdocs does not count warnings, so --strict has no effect.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={tmp_path}"]
    built = subprocess.run(
        build, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60
    )
    assert built.returncode == 0, built.stderr
    for document in OUTSIDE_THE_SITE:
        for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", document.read_text()):
            if target.startswith("http"):
                continue
            path = (document.parent / target).resolve()
            assert path.exists(), f"{document.name}: {target}"
            if anchor:
                page = path.relative_to(REPOSITORY / "docs").with_suffix(".html")
                assert f'id="{anchor}"' in (tmp_path / page).read_text(), (
                    f"{document.name}: {anchor}"
                )


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


API = (REPOSITORY / "docs" / "api.md").read_text()
CONFLICTS = 26
COLUMNS = 11
"""Parameter, meaning, range, default, the six dialects, tests."""
CHAT_COLUMNS = 5
"""Parameter, meaning, range, default, tests."""


def rows(columns: int) -> list[list[str]]:
    """Return the cells of the tables of docs/api.md with this number of columns, without their
    heads.
    """
    lines = [line for line in API.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if len(row) == columns and row[-1] != "tests"]


@cache
def names_of_tests(path: Path) -> frozenset[str]:
    """Return the names of the tests of a file."""
    body = ast.parse(path.read_text()).body
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in body if isinstance(node, functions))


def test_every_parameter_is_in_the_table_once() -> None:
    named = [row[0].strip("`") for row in rows(COLUMNS)]
    assert sorted(named) == sorted(CompletionRequest.model_fields)


def test_every_parameter_that_differs_in_chats_is_in_their_table_once() -> None:
    named = [row[0].strip("`") for row in rows(CHAT_COLUMNS)]
    shared = CompletionRequest.model_fields.keys() - {"logprobs"}
    assert sorted(named) == sorted(ChatCompletionRequest.model_fields.keys() - shared)


def test_no_cell_of_the_table_is_empty() -> None:
    assert [row for row in rows(COLUMNS) if not all(row)] == []


def test_every_parameter_names_a_test() -> None:
    assert [row[0] for row in rows(COLUMNS) if "::test_" not in row[-1]] == []


def test_every_named_test_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", API)
    assert len(named) > CONFLICTS
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (REPOSITORY / "tests" / path).is_file()
        or name not in names_of_tests(REPOSITORY / "tests" / path)
    ]
    assert missing == []


def test_every_conflict_names_tests_of_its_number() -> None:
    conflicts = {int(row[0]): row[-1] for row in rows(4) if row[0].isdigit()}
    assert sorted(conflicts) == list(range(1, CONFLICTS + 1))
    for number, tests in conflicts.items():
        assert f"::test_conflict_{number:02}_" in tests


TABLE = re.compile(r"(?<=\n\n)\| parameters \| rejected by \|.*?\n(?=\n)", re.DOTALL)


def table_of_parameters() -> str:
    """Return the table of docs/api.md with the parameters that are rejected or have no effect."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in PARAMETERS.items():
        accepted = f" (except {row.accepted_json})" if row.accepted else ""
        group = ((row.endpoints.name or "").lower(), row.markdown)
        groups.setdefault(group, []).append(f"`{name}`{accepted}")
    lines = [f"| {', '.join(names)} | {by} | {why} |" for (by, why), names in groups.items()]
    head = ["| parameters | rejected by | reason, and what to use instead |", "|---|---|---|"]
    return "\n".join([*head, *lines, ""])


def test_table_of_parameters_is_that_of_the_code() -> None:
    """`python -m tests.test_docs` writes it."""
    assert TABLE.findall(API) == [table_of_parameters()]


LESSONS = (REPOSITORY / "docs" / "lessons.md").read_text()
LESSON = re.compile(r"^\| (\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)
HOW_MANY_LESSONS = 28


def test_every_lesson_names_tests_that_exist() -> None:
    lessons = LESSON.findall(LESSONS)
    assert [int(number) for number, _, _ in lessons] == list(range(1, HOW_MANY_LESSONS + 1))
    for number, _, proofs in lessons:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", proofs)
        assert named, number
        for path, name in named:
            assert name in names_of_tests(REPOSITORY / "tests" / path), f"{path}::{name}"


if __name__ == "__main__":
    path = REPOSITORY / "docs" / "api.md"
    path.write_text(TABLE.sub(lambda _: table_of_parameters(), API))
