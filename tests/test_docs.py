"""The docs name what there is: settings, error codes, files."""

import re
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

import gateway.settings
import worker.settings
from gateway import errors
from tests.support.stack import REPOSITORY

DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])


@pytest.mark.parametrize(
    "settings", [gateway.settings.Settings, worker.settings.Settings], ids=["gateway", "worker"]
)
def test_every_setting_is_documented(settings: type[BaseSettings]) -> None:
    documented = (REPOSITORY / "docs" / "configuration.md").read_text()
    missing = [
        name for name in settings.model_fields if f"`SLUICE_{name.upper()}`" not in documented
    ]
    assert missing == []


def test_every_documented_setting_exists() -> None:
    known = {*gateway.settings.Settings.model_fields, *worker.settings.Settings.model_fields}
    named = set()
    for document in DOCUMENTS:
        named |= set(re.findall(r"\bSLUICE_([A-Z_]+)\b", document.read_text()))
    # The three of demo.env, and the switch of set-up.
    assert named - {name.upper() for name in known} <= {"URL", "KEY", "MODEL", "DEVICE"}


def test_every_error_of_the_api_is_documented() -> None:
    documented = (REPOSITORY / "docs" / "api.md").read_text()
    classes = [errors.ApiError]
    for each in classes:
        classes += each.__subclasses__()
    assert len(classes) > 20
    # Answers of the command line only, never of the API.
    internal = {"ConflictError"}
    missing = [
        each.code
        for each in classes
        if each.__name__ not in internal
        and not (each.code == "invalid_value" or f"`{each.code}`" in documented)
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target
