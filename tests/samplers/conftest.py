"""The engines that a test runs on in turn."""

import pytest

from tests.samplers.engines import Engines, Side


@pytest.fixture(params=["v1", "v2", "v2-ahead"])
def side(request: pytest.FixtureRequest, runners: dict[str, Engines]) -> Side:
    """An engine of the module's `runners`."""
    runner, _, ahead = request.param.partition("-")
    return Side(runners[runner], ahead or "chained", is_fast=runner == "v1")
