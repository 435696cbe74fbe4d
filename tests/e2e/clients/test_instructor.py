"""instructor in the modes that need no better model, through tests/clients/instructor_calls.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.clients.environments import PROGRAMS, PYTHON
from tests.support.stack import MODEL

pytestmark = [pytest.mark.e2e, PYTHON.skip]

ENFORCED = ("TOOLS", "TOOLS_STRICT", "FUNCTIONS", "JSON_SCHEMA")
"""The modes whose schema Sluice enforces."""


@pytest.fixture(scope="module")
def reported(client: OpenAI, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results by mode."""
    folder: Path = tmp_path_factory.mktemp("instructor")
    printed = PYTHON.run(
        ["python", "-I", str(PROGRAMS / "instructor_calls.py"), MODEL],
        folder,
        OPENAI_BASE_URL=str(client.base_url),
        OPENAI_API_KEY=client.api_key,
    )
    return json.loads(printed)


@pytest.mark.parametrize("mode", ENFORCED)
def test_enforced_response_is_of_the_class(reported: Any, mode: str) -> None:
    place = reported[mode]["whole"]
    assert place["city"] in ("Oslo", "Rome")
    assert isinstance(place["warm"], bool)
    assert reported[mode]["partial"][-1] == place


@pytest.mark.parametrize("mode", ENFORCED)
def test_rejected_response_is_requested_again(reported: Any, mode: str) -> None:
    # The second request has the first response, and what its validation found.
    assert reported[mode]["attempts"] == [True, True]


def test_model_calls_tools_in_parallel(reported: Any) -> None:
    assert reported["PARALLEL_TOOLS"]["whole"] == [{"city": "Paris"}]


def test_model_writes_json(reported: Any) -> None:
    assert reported["JSON"]["whole"].keys() == {"name", "age"}
