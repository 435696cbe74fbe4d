"""The engines that a test runs on in turn: one set for all tests."""

from collections.abc import Iterator

import pytest

from tests.samplers.engines import Engines, Side, both_runners


@pytest.fixture(scope="session")
def runners(request: pytest.FixtureRequest) -> Iterator[dict[str, Engines]]:
    """Engines on both runners."""
    with both_runners(is_long=request.config.getoption("--long")) as runners:
        yield runners


# The newer runner samples in the same way ahead or not; what a step ahead can spoil comes on top.
@pytest.fixture(params=["v1", pytest.param("v2", marks=pytest.mark.long), "v2-ahead"])
def side(request: pytest.FixtureRequest, runners: dict[str, Engines]) -> Side:
    """An engine with chains."""
    runner, _, ahead = request.param.partition("-")
    return Side(runners[runner], ahead or "chained", is_fast=runner == "v1")
