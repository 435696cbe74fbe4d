"""What is installed: named exactly, and not much of it."""

import re
import tomllib

from tests.support.stack import REPOSITORY

MOST_DIRECT = 27
"""Packages that the gateway asks for by itself."""

_PINNED = re.compile(r"[A-Za-z0-9_.\[\]-]+ ?==[^*]+")


def test_every_dependency_is_pinned_to_one_version() -> None:
    files = sorted((REPOSITORY / "requirements").glob("*.txt"))
    assert len(files) >= 5
    for file in files:
        lines = [line for line in file.read_text().splitlines() if line and line[0] != "#"]
        assert lines
        assert [line for line in lines if not _PINNED.fullmatch(line)] == [], file.name


def test_the_gateway_asks_for_few_packages() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    direct = {*project["dependencies"], *project["optional-dependencies"]["gateway"]}
    assert 10 < len(direct) <= MOST_DIRECT
