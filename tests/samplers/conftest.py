"""The engines that a test runs on in turn: one set for all tests."""

from collections.abc import Iterator

import pytest

from tests.samplers.engines import Engines, Side, both_runners


@pytest.fixture(scope="session")
def runners() -> Iterator[dict[str, Engines]]:
    """Engines on both runners."""
    with both_runners() as runners:
        yield runners


@pytest.fixture(params=["v1", "v2", "v2-ahead"])
def side(request: pytest.FixtureRequest, runners: dict[str, Engines]) -> Side:
    """An engine with chains."""
    runner, _, ahead = request.param.partition("-")
    return Side(runners[runner], ahead or "chained", is_fast=runner == "v1")
